"""A whole gateway between raw sockets: a caller, what `headrace serve` runs, and an engine that is told
what to say; all of it on one loop, in virtual time.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from headrace.adapters.engines.remote import RemoteEngine
from headrace.adapters.journal.ring import segments
from headrace.adapters.upstream.pool import Pool
from headrace.config.schema import JournalSpec, ServerSpec, Settings, UpstreamSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from headrace.model.engine import EngineKind
from headrace.plane.journal import Verified, verify
from headrace.policy.catalog import Reports
from tests.adapters.upstream.scenes import (
    DONE,
    EVENTS,
    LAST,
    USAGE,
    WORD,
    Peer,
    Server,
    chunk,
    is_look,
    look,
)
from tests.gateway.scenes import KEYS, MODEL, assert_books_closed, deployment, keys

LIFETIME_S = 3_000.0
"""Virtual seconds that only a test that fails lives through."""
TURNS = 12
"""Turns of the loop in which what needs no time has happened."""
ENGINE_KEY = "sk-engine"

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
HEALTH = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
WHOLE = json.dumps(
    {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word"}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
    }
).encode()


def sized(body: bytes = WHOLE, status: bytes = b"200 OK", *fields: bytes) -> bytes:
    """Return an answer of the engine with a length."""
    lines = [b"HTTP/1.1 " + status, b"content-type: application/json", *fields]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


def events(*data: bytes) -> bytes:
    """Return a whole stream of the engine, a chunk for each piece."""
    return EVENTS + b"".join(map(chunk, data)) + LAST


STREAM = events(WORD, WORD, USAGE, DONE)
SHOWN = WORD + WORD + DONE
"""What a caller who asked for no usage gets of it."""


def post(
    body: bytes | None = None,
    *fields: bytes,
    path: bytes = b"/v1/chat/completions",
    key: str | None = KEYS["free"],
    **chat: Any,
) -> bytes:
    """Return a request with a body: by default a chat, `chat` being added to it."""
    content = json.dumps({**CHAT, **chat}).encode() if body is None else body
    return head(b"content-length: %d" % len(content), *fields, path=path, key=key) + content


def head(
    *fields: bytes, path: bytes = b"/v1/chat/completions", key: str | None = KEYS["free"]
) -> bytes:
    """Return the head of a request."""
    lines = [b"POST " + path + b" HTTP/1.1", b"host: h", *fields]
    if key is not None:
        lines.append(b"authorization: Bearer " + key.encode())
    return b"\r\n".join([*lines, b"", b""])


class Answer(Struct):
    """One answer as a caller reads it."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    whole: bool
    """It is complete."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """What an error is called."""
        return cast("str", self.json["error"]["code"])


def read_answers(data: bytes, *, is_head: bool = False, closed: bool = False) -> list[Answer]:
    """Read answers strictly, to the last byte."""
    found: list[Answer] = []
    while data:
        top, ended, data = data.partition(b"\r\n\r\n")
        if not ended:
            break
        first, *lines = top.split(b"\r\n")
        pairs = [line.split(b": ", 1) for line in lines]
        headers = {pair[0].lower(): pair[1] for pair in pairs}
        assert len(headers) == len(pairs), "a header came twice"
        version, status, _ = first.split(b" ", 2)
        assert version == b"HTTP/1.1"
        answer = Answer(status=int(status), headers=headers, body=b"", whole=True)
        found.append(answer)
        if is_head or answer.status < 200 or answer.status in (204, 304):
            continue
        if b"content-length" in headers:
            size = int(headers[b"content-length"])
            answer.body, data = data[:size], data[size:]
            answer.whole = len(answer.body) == size
        elif headers.get(b"transfer-encoding") == b"chunked":
            answer.body, answer.whole, data = _dechunked(data)
        else:
            answer.body, answer.whole, data = data, closed, b""
    return found


def _dechunked(data: bytes) -> tuple[bytes, bool, bytes]:
    pieces: list[bytes] = []
    while True:
        line, ended, rest = data.partition(b"\r\n")
        if not ended:
            return b"".join(pieces), False, b""
        size = int(line, 16)
        if len(rest) < size + 2:
            return b"".join(pieces), False, b""
        assert rest[size : size + 2] == b"\r\n"
        pieces.append(rest[:size])
        data = rest[size + 2 :]
        if not size:
            return b"".join(pieces), True, data


class Caller(asyncio.Protocol):
    """One connection as its caller sees it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.received = bytearray()
        self.taken: Callable[[bytes], None] = self.received.extend
        """What is done with what comes: kept, unless a test knows better."""
        self.is_open = True
        self.is_stalled = False
        self.fault: Exception | None = None
        self.ended = False
        """The gateway sends no more, and said so."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.taken(data)

    def eof_received(self) -> bool:
        self.ended = True
        return True  # our side stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open, self.fault = False, exc

    def pause_writing(self) -> None:
        self.is_stalled = True

    def resume_writing(self) -> None:
        self.is_stalled = False

    def say(self, *data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(b"".join(data))

    def finish(self) -> None:
        """Say that nothing more will be said."""
        assert self.transport is not None
        self.transport.write_eof()

    def leave(self) -> None:
        """Go away at once."""
        assert self.transport is not None
        self.transport.abort()

    def stop_reading(self) -> None:
        assert self.transport is not None
        self.transport.pause_reading()

    def read_on(self) -> None:
        assert self.transport is not None
        self.transport.resume_reading()

    @property
    def over(self) -> bool:
        """Nothing more comes."""
        return self.ended or not self.is_open

    @property
    def answers(self) -> list[Answer]:
        return read_answers(bytes(self.received), closed=self.over)

    @property
    def answer(self) -> Answer:
        """The only final one."""
        (found,) = [one for one in self.answers if one.status >= 200]
        return found

    def has(self, count: int = 1) -> bool:
        """Whether so many final answers are complete."""
        return sum(one.status >= 200 and one.whole for one in self.answers) >= count


class Turns:
    """The loop's turns: how many there were, and who waits for what after each."""

    def __init__(self, loop: Any) -> None:
        self.count = 0
        self._loop = loop
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._once: Callable[[], None] = self._loop._run_once
        self._loop._run_once = self._turn

    def close(self) -> None:
        del self._loop._run_once

    def _turn(self) -> None:
        self._once()
        self.count += 1
        for holds, future in self._waiting:
            if not future.done() and holds():
                future.set_result(None)

    async def until(self, holds: Callable[[], bool], within: float = LIFETIME_S) -> None:
        """Wait until a turn of the loop has made something true."""
        if holds():
            return
        future = asyncio.get_running_loop().create_future()
        entry = (holds, future)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(within):
                await future
        finally:
            self._waiting.remove(entry)


class World:
    """A gateway, its engine and its callers."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.get_running_loop()
        self.turns = Turns(self.loop)
        self.until = self.turns.until
        self.callers: list[Caller] = []
        self.engine = Server(lambda: None, self._behave)
        self.behave: Callable[[Peer], None] = silent
        """What the engine does with each request, but for those that ask after its health."""
        self._journal = folder / "journal"
        self._gateway: Gateway | None = None
        self._sock: socket.socket | None = None
        self._running: asyncio.Task[bool] | None = None

    @property
    def gateway(self) -> Gateway:
        assert self._gateway is not None
        return self._gateway

    @property
    def pools(self) -> list[Pool]:
        """The connections to the engine, by replica that it is taken for."""
        found = []
        for engine in self.gateway.driver._engines.values():
            assert isinstance(engine, RemoteEngine)
            found.append(engine.upstream.pool)
        return found

    @property
    def pool(self) -> Pool:
        """The only ones."""
        (found,) = self.pools
        return found

    @property
    def idle(self) -> int:
        """How many of them nobody uses."""
        return sum(pool.idle for pool in self.pools)

    @property
    def busy(self) -> int:
        """How many of them somebody uses, or waits for."""
        return sum(pool.busy for pool in self.pools)

    async def start(
        self,
        behave: Callable[[Peer], None],
        *,
        upstream: dict[str, Any] | None = None,
        poll_ms: float = 60_000.0,
        replicas: int = 1,
        early_200: bool = False,
        **server: Any,
    ) -> None:
        """Start everything, and wait until the engine is up."""
        self.behave = behave
        await self.engine.listen()
        spec = {"pool": "p", "key_env": "PITFALLS_ENGINE_KEY", **(upstream or {})}
        config = deployment(replicas=replicas)
        settings = Settings(
            deployment=replace(
                config,
                reports=Reports(poll_ms=poll_ms, stale_ms=poll_ms),
                classes=tuple(replace(one, early_200=early_200) for one in config.classes),
            ),
            keys=keys(),
            server=ServerSpec(**{"port": 0, "drain_s": 0.0, **server}),
            upstreams=(
                UpstreamSpec(
                    url=f"http://127.0.0.1:{self.engine.port}", kind=EngineKind.OPENAI, **spec
                ),
            )
            * replicas,
            journal=JournalSpec(path=str(self._journal), segment_mib=16),
        )
        self._gateway = Gateway(settings, LoopClock(self.loop))
        self._sock = listen("127.0.0.1", 0)
        self._running = self.loop.create_task(self._gateway.serve(self._sock))
        await self.until(lambda: self.gateway.driver.ready_replicas == replicas)

    def _behave(self, peer: Peer) -> None:
        if is_look(peer.requests[-1]):
            peer.say(look(peer.requests.pop()))
        else:
            self.behave(peer)

    # Callers ----------------------------------------------------------------------------------

    async def dial(self, *data: bytes, window: int = 0) -> Caller:
        """Connect, with a receive buffer of `window` bytes if given, and say something."""
        assert self._sock is not None
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if window:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.setblocking(False)
        await self.loop.sock_connect(sock, self._sock.getsockname())
        _, caller = await self.loop.create_connection(Caller, sock=sock)
        self.callers.append(caller)
        caller.say(*data)
        return caller

    async def ask(self, *data: bytes) -> Answer:
        """Say something on a connection of its own; return the answer."""
        caller = await self.dial(*data)
        await self.until(lambda: caller.has() or caller.over)
        answer = caller.answer
        caller.leave()
        return answer

    async def answered(self, caller: Caller, count: int = 1) -> list[Answer]:
        """Wait for so many answers in all; return them."""
        await self.until(lambda: caller.has(count) or caller.over)
        found = caller.answers
        assert sum(one.whole for one in found) >= count
        return found

    async def sent(self, requests: int = 1) -> Peer:
        """Wait until the engine has been sent so many requests; return the last one's connection."""
        await self.until(lambda: self.engine.requests >= requests)
        return max(self.engine.peers, key=lambda peer: len(peer.requests))

    async def settled(self) -> None:
        """Wait until no request is left: everywhere, and without a word of anybody."""
        await self.until(lambda: not self.gateway.driver.live and not self.busy)

    async def pass_time(self, seconds: float) -> None:
        """Let virtual time pass."""
        passed = self.loop.create_future()
        self.loop.call_later(seconds, passed.set_result, None)
        await passed

    # The end ----------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Assert that nothing is left: no booking, no connection, no task."""
        if self._gateway is None:
            self.turns.close()
            return
        await self.settled()
        # None that nobody keeps.
        await self.until(lambda: len(self.engine.open_peers) == self.idle, within=1.0)
        self._assert_accounts()
        for caller in self.callers:
            caller.leave()
        state = self.gateway.server.server_state
        await self.until(lambda: not state.connections and not state.tasks, within=1.0)
        await self.until(lambda: not any(caller.is_open for caller in self.callers), within=1.0)
        own = {asyncio.current_task(), self._running}
        assert await self._tasks_beside(own) == set()
        self.gateway.stop()
        assert self._running is not None
        assert await self._running
        await self.until(lambda: not self.engine.open_peers, within=1.0)
        self.engine.stop_listening()
        assert await self._tasks_beside({asyncio.current_task()}) == set()
        assert isinstance(verify(segments(self._journal)), Verified)
        self.turns.close()

    def _assert_accounts(self) -> None:
        driver = self.gateway.driver
        assert driver.broken is None
        assert_books_closed(driver.plane)
        assert not driver._flights
        assert (driver.live, self.busy) == (0, 0)
        limit = self.gateway.app._limits.concurrency
        assert (self.gateway.app._open._free, self.gateway.app._reading._free) == (limit, limit)

    async def _tasks_beside(self, own: set[Any]) -> set[Any]:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return asyncio.all_tasks() - own


def silent(_: Peer) -> None:
    """Answer nothing."""


def says(*replies: bytes) -> Callable[[Peer], None]:
    """Return a behaviour that gives one reply after the other, the last one for ever."""
    left = list(replies)

    def behave(peer: Peer) -> None:
        peer.say(left.pop(0) if len(left) > 1 else left[0])

    return behave


class Pouring:
    """Says pieces for as long as the gateway takes them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pieces: Iterable[bytes]) -> None:
        self._loop, self._pieces = loop, pieces
        self.poured = 0
        """Bytes that were given to the socket, or wait before it."""

    def __call__(self, peer: Peer) -> None:
        self._pour(peer, iter(self._pieces))

    def _pour(self, peer: Peer, pieces: Iterator[bytes]) -> None:
        if not peer.is_open:
            return
        piece = None if peer.is_stalled else next(pieces, b"")
        if piece:
            self.poured += len(piece)
            peer.say(piece)
        if piece != b"":
            # A stalled one looks again in a while, in virtual time.
            self._loop.call_later(0.0 if piece else 0.01, self._pour, peer, pieces)
