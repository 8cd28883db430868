"""The three parties of the soak: an engine that costs little, callers, and the gateway's process.

Engine and callers share this process and one loop; the gateway is `headrace serve`, and everything
said of it is read from outside: `/proc`, and the admin listener.
"""

import asyncio
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

MODEL = "soak"
FRAMES = 10
"""Frames with content of a short answer."""
ACTIVE_FRAMES = 50
"""The same of an active stream, one in `ACTIVE_S`: ten seconds."""
ACTIVE_S, SHORT_S = 0.2, 0.01
ENGINES = 2
ROOM = 4_096
"""Streams that one engine may have, by its profile and by the gateway's connections."""
_MESSAGE_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_START_S, _STOP_S = 20.0, 30.0


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _frame(choices: object, **more: object) -> bytes:
    told = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": choices,
        **more,
    }
    return b"data: " + msgspec.json.encode(told) + b"\n\n"


_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_WORD = _chunked(_frame([{"index": 0, "delta": {"content": " water"}, "finish_reason": None}]))
_WELL = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def _end(frames: int) -> bytes:
    used = {"prompt_tokens": 5, "completion_tokens": frames, "total_tokens": frames + 5}
    last = _frame([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    return _chunked(last + _frame([], usage=used) + b"data: [DONE]\n\n") + b"0\r\n\r\n"


_ENDS = {frames: _end(frames) for frames in (FRAMES, ACTIVE_FRAMES)}


class Engines:
    """Some engines, on ports of their own."""

    def __init__(self) -> None:
        """Serve nobody yet."""
        self.answering = 0
        """Answers under way."""
        self.asked = 0
        """Answers ever begun."""
        self.urls: list[str] = []
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        for _ in range(ENGINES):
            server = await loop.create_server(lambda: _Served(self), "127.0.0.1", 0, backlog=ROOM)
            self._servers.append(server)
            self.urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    def stop(self) -> None:
        """Listen no more."""
        for server in self._servers:
            server.close()


class _Served(asyncio.Protocol):
    """One connection of the gateway's. What the prompt says decides what is answered."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._transport: asyncio.Transport | None = None
        self._read = b""
        self._left = 0
        self._frames = 0
        self._pace_s = 0.0
        self._answering = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head = self._read.find(_MESSAGE_END)
        if head < 0:
            return
        told = _LENGTH.search(self._read, 0, head + 2)
        size = head + len(_MESSAGE_END) + (int(told.group(1)) if told else 0)
        if len(self._read) < size:
            return
        asked, self._read = self._read[:size], self._read[size:]
        assert self._transport is not None
        if asked.startswith(b"GET "):
            self._transport.write(_WELL)
            return
        self._begin(asked)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self._over()

    def _begin(self, asked: bytes) -> None:
        """Answer with a first token, and then as asked."""
        assert self._transport is not None
        self._engines.answering += 1
        self._engines.asked += 1
        self._answering = True
        self._transport.write(_HEAD + _WORD)
        if b"soak-idle" in asked:
            return
        is_active = b"soak-active" in asked
        self._pace_s = ACTIVE_S if is_active else SHORT_S
        self._frames = ACTIVE_FRAMES if is_active else FRAMES
        self._left = self._frames - 1
        self._timer = asyncio.get_running_loop().call_later(self._pace_s, self._go_on)

    def _go_on(self) -> None:
        assert self._transport is not None
        if self._left:
            self._left -= 1
            self._transport.write(_WORD)
            self._timer = asyncio.get_running_loop().call_later(self._pace_s, self._go_on)
        else:
            self._transport.write(_ENDS[self._frames])
            self._over()

    def _over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._answering:
            self._answering = False
            self._engines.answering -= 1


def ask(kind: str) -> bytes:
    """Return a request for an `idle`, `active` or `short` answer."""
    body = msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"soak-{kind} answer please"}],
            "stream": True,
            "max_tokens": 64,
        }
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Caller(asyncio.Protocol):
    """One connection with one request on it."""

    def __init__(self, request: bytes) -> None:
        """Send `request` once connected."""
        loop = asyncio.get_running_loop()
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self.status = b""
        self.frames = 0
        """Words of the answer."""
        self.whole = False
        """The end of the stream, and of the body, came."""
        self.begun: asyncio.Future[None] = loop.create_future()
        """The first word came, or the connection ended."""
        self.over: asyncio.Future[None] = loop.create_future()
        """The answer is whole, or the connection ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count words; the end mark may come in two pieces."""
        if not self.status:
            self.status = data[:15].split(b" ")[1]
        self.frames += (self._tail + data).count(b'" water"') - self._tail.count(b'" water"')
        self.whole = self.whole or b"data: [DONE]" in self._tail + data
        self._tail = (self._tail + data)[-16:]
        if self.frames:
            _settle(self.begun)
        if self.whole and self._tail.endswith(b"0\r\n\r\n"):
            _settle(self.over)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Wait for nothing more."""
        _settle(self.begun)
        _settle(self.over)

    def send(self, data: bytes) -> None:
        """Send some more."""
        assert self._transport is not None
        self._transport.write(data)

    def leave(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def configured(engines: Engines, folder: Path) -> dict[str, Any]:
    """Return a deployment in which nothing but the process itself limits how many streams run."""
    profile = {
        "name": "soak",
        "source": "none: large enough for any soak",
        "hardware": "none",
        "model": MODEL,
        "kv_bytes_per_token": 1,
        "kv_capacity_tokens": 100_000_000,
        "max_running": ROOM,
        "reference_batch": 256,
        "decode": {"a_ms": 1.0, "c_ms": 0.0001, "d_ms": 0.0},
        "mixed": {
            "a_ms": 1.0, "knee": 0, "b_ms": 0.001, "c_ms": 0.0001, "d_ms": 0.0, "e_ms": 0.0,
        },
    }  # fmt: skip
    patient = {"ttft_ms": None, "itl_ms": 600_000, "tenant_queue": 10_000}
    return {
        "deployment": {
            "models": [{"name": MODEL}],
            "pools": [{"name": "p", "model": MODEL, "profile": profile, "replicas": 0}],
            "tenants": [{"name": "t"}],
            "classes": [{"name": "patient", **patient}],
        },
        "server": {"port": 0, "drain_s": 1},
        "admin": {"port": 0, "open": True},
        "journal": {"path": str(folder / "journal")},
        "upstreams": [
            {"url": url, "pool": "p", "kind": "openai", "connections": ROOM}
            | {"first_byte_s": 600, "gap_s": 3_600}
            for url in engines.urls
        ],
    }


class Served:
    """A gateway in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, place: str, admin: str) -> None:
        """Know a gateway that listens."""
        self._process = process
        self.address, self._admin = _address(place), _address(admin)

    @classmethod
    async def start(cls, config: dict[str, Any], folder: Path, *, replicas: int) -> "Served":
        """Start it, with its configuration in `folder`, and wait until it has so many replicas."""
        file = folder / "headrace.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        command = "import sys; from headrace.cli import main; sys.exit(main())"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", command, "serve", "--config", str(file),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                lines = [(await process.stdout.readline()).decode() for _ in range(2)]
                found = [re.search(r"http://([\d.]+:\d+)", line) for line in lines]
                assert found[0], lines
                assert found[1], lines
                served = cls(process, found[0].group(1), found[1].group(1))
                while len((await served.state())["replicas"]) < replicas:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.05)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return served

    async def stop(self) -> int:
        """End it, and return its exit status."""
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_S):
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()

    async def kill(self) -> None:
        """End it at once: nothing that it holds matters any more."""
        self._process.kill()
        await self._process.wait()

    async def call(self, kind: str, request: bytes | None = None) -> Caller:
        """Send a request over a connection of its own."""
        loop = asyncio.get_running_loop()
        sent = ask(kind) if request is None else request
        _, caller = await loop.create_connection(lambda: Caller(sent), *self.address)
        return caller

    async def state(self) -> dict[str, Any]:
        """Return what the admin listener shows at a glance."""
        shown: dict[str, Any] = await self._shown("/state")
        return shown

    async def metrics(self) -> bytes:
        """Return what Prometheus would be told."""
        return await self._read(self._admin, "/metrics")

    async def alive(self) -> None:
        """Have it answer as soon as its loop comes to it."""
        await self._read(self.address, "/livez")

    async def held(self) -> dict[str, float]:
        """Return everything that somebody still holds; nothing, once all are gone."""
        state, tenants = await self.state(), await self._shown("/tenants")
        found = {"live": state["live"]}
        for queue in state["queues"]:
            found["waiting"] = found.get("waiting", 0) + queue["waiting"]
        for replica in state["replicas"]:
            for word in ("pending_prefill_s", "decodes", "kv_blocks_reserved"):
                found[word] = found.get(word, 0) + replica[word]
        for tenant in tenants["tenants"]:
            for word in ("parallel", "reserved_tokens"):
                found[word] = found.get(word, 0) + tenant[word]
        return {word: amount for word, amount in found.items() if amount}

    async def _shown(self, path: str) -> Any:
        return json.loads(await self._read(self._admin, path))

    async def _read(self, place: tuple[str, int], path: str) -> bytes:
        reader, writer = await asyncio.open_connection(*place)
        try:
            writer.write(b"GET %s HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n" % path.encode())
            return (await reader.read()).partition(_MESSAGE_END)[2]
        finally:
            writer.close()

    # What the kernel knows of it ----------------------------------------------------------------

    @property
    def rss_mb(self) -> float:
        """Memory that it occupies, in millions of bytes."""
        text = self._proc("statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def files(self) -> int:
        """File descriptors that it holds."""
        return len(os.listdir(self._proc("fd")))  # noqa: PTH208 - names alone are counted

    @property
    def cpu_s(self) -> float:
        """CPU time that it has used."""
        fields = self._proc("stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self._process.pid}/{name}")


def _address(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host, int(port)


def raise_limit() -> int:
    """Have as many files as may be, here and in the gateway to come; return how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


async def until(holds: Callable[[], bool], within_s: float) -> bool:
    """Wait for something; return whether it came in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while not holds():
        if loop.time() > end:
            return False
        await asyncio.sleep(0.01)
    return True
