"""Which connection carries the next exchange with one server, and when is one made or dropped?

The one used last is used next (LIFO), so that those not needed grow old and are dropped. Every count
is bounded: who finds the pool full is told so, and who waits for a dial waits no longer than for the
connection itself.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from headrace.adapters.upstream.connection import Connection
from headrace.adapters.upstream.exchange import Exchange, Listener, Request
from headrace.ports.clock import Clock, Timer
from headrace.ports.upstream import (
    LostError,
    PoolFullError,
    UnreachableError,
    UnresolvedError,
    UpstreamError,
)
from headrace.units import NS_PER_S, DurationNs, later

_OURS = {b"host", b"content-length", b"connection", b"transfer-encoding", b"expect", b"upgrade"}
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""What a connection fails with for want of files, memory or ports of our own."""


class Origin(Struct, frozen=True, kw_only=True):
    """A server, and how it knows us."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Credentials: added to every request, in place of what it may have under those names."""


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of one pool."""

    connections: int = 1_024
    """Open, being made and waited for, together. 1024: an engine runs some hundred requests."""
    dials: int = 32
    """Connections being made at once. 32: well within an engine's backlog of 128 or more."""
    connect_ns: DurationNs = DurationNs(2 * NS_PER_S)
    """For the connection, TLS and a turn to dial included. 2 s: one lost SYN is sent again at 1 s."""
    idle_ns: DurationNs = DurationNs(4 * NS_PER_S)
    """How long an unused connection is kept. 4 s: uvicorn, which most engines run, closes at 5."""


DEFAULT_LIMITS = Limits()


class Pool:
    """The connections to one server. Made within the loop that runs it."""

    def __init__(self, origin: Origin, clock: Clock, limits: Limits = DEFAULT_LIMITS) -> None:
        """Start without a connection."""
        self._origin, self._clock, self._limits = origin, clock, limits
        self._loop = asyncio.get_running_loop()
        self._fixed = _fixed_headers(origin)
        self._replaced = frozenset(name.lower() for name, _ in origin.headers)
        self._idle: dict[Connection, None] = {}  # the one used last comes last
        self._busy: dict[Connection, Exchange] = {}
        self._waiting: dict[Exchange, bool] = {}  # whether it needs a fresh one; first come first
        self._dials: dict[Exchange, asyncio.Task[Connection]] = {}
        self._sweeper: Timer | None = None
        self._closed = False
        self.dialled = 0
        """Connections made so far: redialling shows nowhere else."""

    @property
    def idle(self) -> int:
        """Connections that nobody uses."""
        return len(self._idle)

    @property
    def busy(self) -> int:
        """Exchanges that have a connection, or wait for one."""
        return len(self._busy) + len(self._dials) + len(self._waiting)

    def open(self, request: Request, listener: Listener) -> Exchange:
        """Start an exchange. The listener is told nothing before this returns."""
        exchange = Exchange(
            request,
            listener,
            self,
            self._clock,
            head=self._head(request),
            connect_ns=self._limits.connect_ns,
        )
        exchange.start()
        return exchange

    def close(self) -> None:
        """Close everything; nothing is told any more. The loop needs a turn to close sockets."""
        self._closed = True
        for exchange in [*self._waiting, *self._dials, *self._busy.values()]:
            exchange.abort()
        self.drop_idle()

    # What exchanges ask -----------------------------------------------------------------------

    def acquire(self, exchange: Exchange, *, fresh: bool = False) -> None:
        """Give a connection, now or later, or say why there is none."""
        connection = None if fresh else self._take_idle()
        if connection is not None:
            self._hand(connection, exchange, reused=True)
        elif self._closed:
            self._loop.call_soon(exchange.failed, UnreachableError("the pool is closed"))
        elif self.busy + self.idle >= self._limits.connections:
            self._loop.call_soon(exchange.failed, PoolFullError("all connections are busy"))
        else:
            self._waiting[exchange] = fresh
            self._dial_more()

    def withdraw(self, exchange: Exchange) -> None:
        """Forget whoever waits; its dial, if there is one, ends."""
        self._waiting.pop(exchange, None)
        task = self._dials.pop(exchange, None)
        if task is not None:
            task.cancel()
            self._dial_more()

    def release(self, connection: Connection, *, reusable: bool) -> None:
        """Keep a connection for the next exchange, or close it."""
        self._busy.pop(connection, None)
        if not reusable or not connection.is_good or self._closed:
            connection.abort()
            return
        connection.resume()
        for exchange, fresh in self._waiting.items():
            if not fresh:
                del self._waiting[exchange]
                self._hand(connection, exchange, reused=True)
                return
        connection.idle_since = self._clock.now()
        self._idle[connection] = None
        self._arm()

    def drop_idle(self) -> None:
        """Close every connection that nobody uses."""
        for connection in list(self._idle):
            connection.abort()

    # What connections tell --------------------------------------------------------------------

    def gone(self, connection: Connection) -> None:
        """Forget a connection."""
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)
        if not self._idle and self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # Making connections -------------------------------------------------------------------------

    def _hand(self, connection: Connection, exchange: Exchange, *, reused: bool) -> None:
        self._busy[connection] = exchange
        exchange.connected(connection, reused=reused)

    def _dial_more(self) -> None:
        while self._waiting and len(self._dials) < self._limits.dials:
            exchange = next(iter(self._waiting))
            del self._waiting[exchange]
            task = self._loop.create_task(self._dial())
            self._dials[exchange] = task
            task.add_done_callback(partial(self._dialled, exchange))

    async def _dial(self) -> Connection:
        origin = self._origin
        _, connection = await self._loop.create_connection(
            lambda: Connection(self), origin.host, origin.port, ssl=origin.tls
        )
        return connection

    def _dialled(self, exchange: Exchange, task: asyncio.Task[Connection]) -> None:
        """A dial is over: whoever wanted it may be gone."""
        wanted = self._dials.pop(exchange, None) is not None
        if not task.cancelled():
            error = task.exception()
            if error is None:
                self.dialled += 1
                self._use(task.result(), exchange if wanted else None)
            elif not isinstance(error, OSError | UnicodeError):
                raise error
            elif wanted:
                exchange.failed(_unmade(error))
        self._dial_more()

    def _use(self, connection: Connection, exchange: Exchange | None) -> None:
        """Use a new connection for whom it was made, or keep it."""
        if exchange is None:
            self.release(connection, reusable=True)
        elif connection.is_good:
            self._hand(connection, exchange, reused=False)
        else:
            exchange.failed(LostError("the server closed the connection at once"))

    # Idle connections ---------------------------------------------------------------------------

    def _take_idle(self) -> Connection | None:
        """Return the connection used last, if it is not too old."""
        if not self._idle:
            return None
        connection, _ = self._idle.popitem()
        if self._clock.now() < later(connection.idle_since, self._limits.idle_ns):
            return connection
        connection.abort()
        self.drop_idle()  # the others are older
        return None

    def _arm(self) -> None:
        if self._sweeper is None and self._idle:
            oldest = next(iter(self._idle))
            due = later(oldest.idle_since, self._limits.idle_ns)
            self._sweeper = self._clock.call_at(due, self._sweep)

    def _sweep(self) -> None:
        """Close what was not used for too long, and come back for the next."""
        self._sweeper = None
        now = self._clock.now()
        for connection in list(self._idle):
            if now < later(connection.idle_since, self._limits.idle_ns):
                break
            connection.abort()
        self._arm()

    # Requests -----------------------------------------------------------------------------------

    def _head(self, request: Request) -> bytes:
        """Return a request's head; a line break in one of its parts is a bug of ours."""
        lines = [f"{request.method} {request.path} HTTP/1.1\r\n".encode("ascii"), self._fixed]
        fixed = self._fixed.count(b"\n")
        for name, value in request.headers:
            assert name.lower() not in _OURS, f"{name!r} is not the request's to say"
            if name.lower() not in self._replaced:
                lines.append(b"%s: %s\r\n" % (name, value))
        if request.body or request.method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d\r\n" % len(request.body))
        head = b"".join(lines)
        breaks = len(lines) - 1 + fixed
        assert head.count(b"\n") == head.count(b"\r") == breaks, "a line break in a header"
        assert request.path.startswith("/"), f"no path: {request.path}"
        assert " " not in request.path, f"a space in {request.path}"
        return head + b"\r\n"


def _unmade(error: OSError | UnicodeError) -> UpstreamError:
    """Return why there is no connection: what this machine or a resolver lacks is not the server's."""
    if isinstance(error, OSError) and error.errno in _SHORT:
        return PoolFullError(f"none can be made here: {error!r}")
    if isinstance(error, socket.gaierror):
        return UnresolvedError(f"no address: {error!r}")
    return UnreachableError(f"no connection: {error!r}")


def _fixed_headers(origin: Origin) -> bytes:
    """Return the lines that every request to a server has."""
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    lines = [
        b"host: %s:%d\r\n" % (host.encode("idna" if ":" not in host else "ascii"), origin.port)
    ]
    lines += [b"%s: %s\r\n" % header for header in origin.headers]
    return b"".join(lines)
