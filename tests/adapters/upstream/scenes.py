"""A raw server on loopback that says what a test wants, and a listener that remembers."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import uvloop

from headrace.adapters.upstream.exchange import Exchange, Request, Result, Timeouts
from headrace.adapters.upstream.pool import DEFAULT_LIMITS, Limits, Origin, Pool
from headrace.adapters.upstream.response import Headers
from headrace.gateway.clock import LoopClock, MonotonicClock
from headrace.ports.clock import Clock
from headrace.units import DurationNs, InstantNs

PATIENCE_S = 20.0
"""Only a test that fails waits so long."""
LIFETIME_S = 2_000.0
"""The same in virtual time: beyond whatever a test lives through."""

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
EVENTS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST = b"0\r\n\r\n"
WORD = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """Frame a chunk of a body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


UNHEALTHY = OK.replace(b"200", b"500")
KEY_TAKEN = b"HTTP/1.1 400 X\r\nContent-Length: 0\r\n\r\n"


def is_look(request: bytes) -> bool:
    """Return whether a request only looks at an engine: at its health, or whether it takes the key."""
    return request.startswith(b"GET /health ") or request.endswith(b"\r\n\r\n{}")


def look(request: bytes, health: bytes = b"", key: bytes = KEY_TAKEN) -> bytes:
    """Return the answer to a look."""
    return (health or OK) if request.startswith(b"GET ") else key


def anonymous(protocol: int) -> ssl.SSLContext:
    """Return a side of TLS without certificates, so that a test needs none."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES128-SHA:@SECLEVEL=0")
    return context


class Peer(asyncio.Protocol):
    """One connection as the server sees it."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self.transport: asyncio.Transport | None = None
        self.received = b""
        self.requests: list[bytes] = []
        self.is_open = False
        self.is_stalled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.is_open = cast("asyncio.Transport", transport), True
        self._server.peers.append(self)
        self._server.changed()
        if self._server.on_connect is not None:
            self._server.on_connect(self)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self._server.early is not None:
            early, self._server.early = self._server.early, None
            early(self)
        while (size := _request_size(self.received)) is not None and len(self.received) >= size:
            request, self.received = self.received[:size], self.received[size:]
            self.requests.append(request)
            self._server.behave(self)
        self._server.changed()

    def connection_lost(self, _: Exception | None) -> None:
        self.is_open = False
        self._server.changed()

    def pause_writing(self) -> None:
        self.is_stalled = True
        self._server.changed()

    def resume_writing(self) -> None:
        self.is_stalled = False
        self._server.changed()

    def say(self, *data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(b"".join(data))

    def close(self, *data: bytes) -> None:
        assert self.transport is not None
        self.say(*data)
        self.transport.close()

    def reset(self) -> None:
        """Close so that the other side sees a reset, not an end."""
        assert self.transport is not None
        option = self.transport.get_extra_info("socket")
        option.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SOL_SOCKET, SO_LINGER: on, no time
        self.transport.abort()


class Server:
    """A server; `behave` is called with each whole request."""

    def __init__(self, changed: Callable[[], None], behave: Callable[[Peer], None]) -> None:
        self.changed, self.behave = changed, behave
        self.peers: list[Peer] = []
        self.early: Callable[[Peer], None] | None = None  # called with the first bytes, once
        self.on_connect: Callable[[Peer], None] | None = None
        self.port = 0
        self._server: asyncio.Server | None = None

    async def listen(self, port: int = 0, ssl: Any = None) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Peer(self), "127.0.0.1", port, ssl=ssl, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def peer(self) -> Peer:
        """The newest connection."""
        return self.peers[-1]

    @property
    def open_peers(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.is_open]

    @property
    def requests(self) -> int:
        return sum(len(peer.requests) for peer in self.peers)


class Call:
    """A listener that remembers. Its `on_*` hooks are called in the midst of each callback."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.exchange: Exchange | None = None
        self.status = 0
        self.headers: Headers = []
        self.pieces: list[bytes] = []
        self.frames = 0
        self.results: list[Result] = []
        self.hook: Callable[[str], None] | None = None

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    def on_head(self, status: int, headers: Headers) -> None:
        assert self.exchange is not None, "told before `open` returned"
        assert not self.status
        assert not self.results
        self.status, self.headers = status, headers
        self._told("head")

    def on_frames(self, data: bytes, frames: int) -> None:
        assert self.status
        assert not self.results
        self.pieces.append(data)
        self.frames += frames
        self._told("frames")

    def on_end(self, result: Result) -> None:
        assert self.exchange is not None, "told before `open` returned"
        assert not self.results, "ended twice"
        self.results.append(result)
        self._told("end")

    def pause(self) -> None:
        assert self.exchange is not None
        self.exchange.pause()

    def resume(self) -> None:
        assert self.exchange is not None
        self.exchange.resume()

    def abort(self) -> None:
        assert self.exchange is not None
        self.exchange.abort()

    def _told(self, what: str) -> None:
        if self.hook is not None:
            self.hook(what)
        self._changed()


class Scene:
    """One loop's servers, pools and calls."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock: Clock = (
            MonotonicClock(self.loop)
            if isinstance(self.loop, uvloop.Loop)
            else LoopClock(self.loop)
        )
        self.servers: list[Server] = []
        self.pools: list[Pool] = []
        self._waiter: asyncio.Future[None] | None = None

    async def server(self, behave: Callable[[Peer], None], ssl: Any = None) -> Server:
        """Start a server."""
        server = Server(self.changed, behave)
        await server.listen(ssl=ssl)
        self.servers.append(server)
        return server

    def pool(
        self,
        server: Server,
        limits: Limits = DEFAULT_LIMITS,
        tls: Any = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> Pool:
        """Make a pool of connections to a server."""
        origin = Origin(host="127.0.0.1", port=server.port, tls=tls, headers=headers)
        pool = Pool(origin, self.clock, limits)
        self.pools.append(pool)
        return pool

    def ask(
        self,
        pool: Pool,
        method: str = "POST",
        *,
        hook: Callable[[str], None] | None = None,
        **more: Any,
    ) -> Call:
        """Open an exchange."""
        call = Call(self.changed)
        call.hook = hook
        request = Request(method=method, path="/v1/chat/completions", **more)
        call.exchange = pool.open(request, call)
        return call

    async def result(self, call: Call) -> Result:
        """Wait for a call's end."""
        await self.until(lambda: bool(call.results))
        return call.results[0]

    async def get(self, pool: Pool, method: str = "POST", **more: Any) -> tuple[Call, Result]:
        """Ask and wait for the end."""
        call = self.ask(pool, method, **more)
        return call, await self.result(call)

    def changed(self) -> None:
        """Something happened: look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that happens makes the condition true."""
        is_virtual = getattr(self.loop, "looptime_on", False)
        async with asyncio.timeout(LIFETIME_S if is_virtual else PATIENCE_S):
            while not condition():
                self._waiter = self.loop.create_future()
                await self._waiter

    async def turns(self, count: int = 10) -> None:
        """Let the loop go round: what can happen without time happens."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def assert_nothing_left(self) -> None:
        """Close all pools; assert that no connection, task or exchange is left."""
        for pool in self.pools:
            assert pool.busy == 0
            pool.close()
            assert (pool.busy, pool.idle) == (0, 0)
        await self.until(lambda: not any(server.open_peers for server in self.servers))
        for server in self.servers:
            server.stop_listening()
        await self.turns()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not tasks, tasks


class CountingClock:
    """Another clock, and how many timers were asked of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.armed = 0

    def now(self) -> InstantNs:
        return self._clock.now()

    def wall(self) -> int:
        return self._clock.wall()

    def call_at(self, when: InstantNs, callback: Callable[[], None]) -> Any:
        self.armed += 1
        return self._clock.call_at(when, callback)


def timeouts(
    *,
    first_byte_s: float | None = None,
    gap_s: float | None = None,
    deadline_s: float | None = None,
) -> Timeouts:
    """Return limits given in seconds, the deadline from the loop's zero."""

    def ns(value: float | None) -> DurationNs | None:
        return None if value is None else DurationNs(round(value * 1e9))

    deadline = ns(deadline_s)
    return Timeouts(
        first_byte_ns=ns(first_byte_s),
        gap_ns=ns(gap_s),
        deadline=None if deadline is None else InstantNs(deadline),
    )


def answers(*replies: bytes) -> Callable[[Peer], None]:
    """Return a behaviour that gives one reply after the other, the last one for ever."""
    left = list(replies)

    def behave(peer: Peer) -> None:
        peer.say(left.pop(0) if len(left) > 1 else left[0])

    return behave


def _request_size(received: bytes) -> int | None:
    head, found, _ = received.partition(b"\r\n\r\n")
    if not found:
        return None
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            with suppress(ValueError):
                length = int(value)
    return len(head) + 4 + length
