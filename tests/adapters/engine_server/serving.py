"""What these tests share: an engine server on a real socket, and a caller that sees every byte."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httptools
import msgspec
from openai import AsyncOpenAI

from headrace.adapters.engines.server.engine import EngineServer, EngineSpec
from headrace.config.profiles import load_profile
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import listen

PROFILE = load_profile("h100-8b-tp1")
MODEL = "m"
FAST = 200.0
"""A speed at which short answers are there at once."""
ENDLESS = {"ignore_eos": True, "max_tokens": 100_000}
"""An answer that no test waits for: ten minutes long at speed 1."""
KINDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello there"}]},
    "/v1/completions": {"prompt": "hello there"},
    "/v1/responses": {"input": "hello there"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello there"}]},
    "/v1/embeddings": {"input": "hello there"},
}
"""A small request to every path that the engine works for."""
NAMED = re.compile(rb"event: (?P<name>[a-z_.]+)\ndata: (?P<data>[^\n]+)")
_READ = 65_536
_SAMPLE = re.compile(r"(?P<name>[a-z_:]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)")


class Served:
    """A running server and how to speak to it."""

    def __init__(self, server: EngineServer, port: int) -> None:
        self.server, self.port = server, port
        self.base = f"http://127.0.0.1:{port}"
        self._talks: list[Talk] = []

    async def get(self, path: str) -> "Reply":
        """Return the answer to a GET."""
        return await self.open("GET", path)

    async def post(self, path: str, body: Any = None, **headers: str) -> "Reply":
        """Return the answer to a POST."""
        return await self.open("POST", path, body, headers)

    async def chat(self, **fields: Any) -> "Reply":
        """Return the answer to a small chat."""
        return await self.post("/v1/chat/completions", chat(**fields))

    async def open(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> "Reply":
        """Ask over a connection of its own and read to its end."""
        talk = await self.talk(method, path, body, headers)
        reply = await talk.rest()
        talk.leave()
        return reply

    async def talk(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> "Talk":
        """Ask over a connection of its own; read when it pleases."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        content = b"" if body is None else content
        told = {"Host": "engine", "Content-Length": len(content), **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        self._talks.append(Talk(reader, writer))
        return self._talks[-1]

    def leave(self) -> None:
        """Close every connection."""
        for talk in self._talks:
            talk.leave()

    async def metric(self, name: str, **labels: str) -> float:
        """Return one sample of the metrics."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        (found,) = [
            float(sample["value"])
            for sample in _SAMPLE.finditer((await self.get("/metrics")).body.decode())
            if sample["name"] == f"vllm:{name}" and wanted <= set(sample["labels"].split(","))
        ]
        return found

    @asynccontextmanager
    async def sdk(self) -> AsyncIterator[AsyncOpenAI]:
        """A client that we did not write."""
        async with AsyncOpenAI(api_key="-", base_url=f"{self.base}/v1", max_retries=0) as client:
            yield client


class Reply:
    """One answer, as far as it came."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode()] = value.decode()

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def frames(self) -> list[bytes]:
        """The data of the whole events; what is left over behind them comes last."""
        *events, rest = self.body.split(b"\n\n")
        return [event.removeprefix(b"data: ") for event in events] + ([rest] if rest else [])

    @property
    def events(self) -> list[Any]:
        """The events of a stream that ended as it should, `[DONE]` apart."""
        *events, done = self.frames
        assert done == b"[DONE]"
        assert self.complete
        return [json.loads(event) for event in events]

    @property
    def named(self) -> list[Any]:
        """The events of a stream whose events have names and that has no end mark."""
        assert self.complete
        assert self.body.endswith(b"\n\n")
        events = [NAMED.fullmatch(event) for event in self.body[:-2].split(b"\n\n")]
        told = [(event["name"].decode(), json.loads(event["data"])) for event in events if event]
        assert len(told) == len(events)
        assert all(name == data["type"] for name, data in told)
        return [data for _, data in told]


class Talk:
    """One connection with one request on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.reply = Reply()

    async def more(self) -> bool:
        """Read once; return whether anything came."""
        part = await self._reader.read(_READ)
        if part:
            self.reply.parser.feed_data(part)
        return bool(part)

    async def until(self, content: bytes) -> None:
        """Read until the answer holds something."""
        while content not in self.reply.body:
            assert await self.more(), f"closed without {content!r}"

    async def rest(self) -> Reply:
        """Read to the end of the answer or of the connection."""
        while not self.reply.complete and await self.more():
            pass
        return self.reply

    def leave(self) -> None:
        """Close the connection."""
        self._writer.close()


def asking(path: str, *, most: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return a small request to a path, for `most` tokens of output and no fewer."""
    body = {"model": MODEL, **KINDS[path], **fields}
    if most is not None and path != "/v1/embeddings":
        name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body |= {name: most, "ignore_eos": True}
    return body


def chat(**fields: Any) -> dict[str, Any]:
    """Return the body of a small chat."""
    return asking("/v1/chat/completions", **fields)


@asynccontextmanager
async def serving(**told: Any) -> AsyncIterator[Served]:
    """Serve; the socket listens before the server runs, so nobody waits for anything."""
    spec = msgspec.convert({"profile": PROFILE, "model": MODEL, "speed": FAST, **told}, EngineSpec)
    server = EngineServer(spec, LoopClock(asyncio.get_running_loop()))
    sock = listen("127.0.0.1", 0)
    running = asyncio.create_task(server.serve(sock))
    served = Served(server, sock.getsockname()[1])
    try:
        yield served
    finally:
        server.stop()
        assert await running
        served.leave()
        assert not server.attempts.count
