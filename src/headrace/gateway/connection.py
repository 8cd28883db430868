"""One connection: what it may ask, how long and how much it may take, and that nobody answers one
that is gone.

uvicorn bounds none of it. What two readers could understand differently is refused here, before an
application sees it. A connection that sends nothing is closed without a word; half a head gets 408,
one too long 431. Who is answered before its body was read may still read the answer: what it sends is
thrown away for a while, since closing on unread input would reset the connection.

A caller that closes its sending side has left. Requests may be sent ahead of answers, a few: beyond,
the connection closes after the answer at hand, and the rest is for the caller to send again.
"""

import asyncio
import socket
import struct
import sys
from enum import Enum, auto
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.gateway.bodies import body
from headrace.gateway.errors import EDGES, Edge, edge, headers
from headrace.gateway.http import HEAD_BYTES_MAX, Receive, Scope, Send
from headrace.gateway.plain import HTTP_1_0, is_plain, without_offer
from headrace.gateway.wire import WIRE, Line
from headrace.units import MIB

RETIRED_S = 2.0
"""How long a connection that is to close stays open for a request that may be on its way."""
_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
}
_NO_LINGERING = struct.pack("ii", 1, 0)


class _Reading(Enum):
    """What of a request comes next."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class _Refused(Exception):  # noqa: N818 - stops the parser, is no error of ours
    """A request is not to be read on."""


class _Polite:
    """A transport whose `close` first lets the other side read what was said."""

    def __init__(self, transport: asyncio.Transport, connection: "Connection") -> None:
        self._transport = transport
        self.connection: Connection | None = connection
        """None once it is gone: what refers to each other would wait for the garbage collector."""
        self.write = transport.write  # on the path of every chunk
        self.get_extra_info = transport.get_extra_info
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading

    def is_closing(self) -> bool:
        connection = self.connection
        return connection is None or connection.is_hung_up or self._transport.is_closing()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.hang_up()

    def cut(self) -> None:
        if self.connection is not None:
            self.connection.cut()


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with bounds."""

    # With attributes of ours in it, the dict of each connection would not share its keys with others'.
    __slots__ = ("_alarm", "_given", "_head_bytes", "_heads", "_lines", "_reading", "_stall")

    is_retired = False
    """Whether it closes after one more answer."""
    patience_s = 10.0
    """Seconds that a head may take, and what is left of a body after its answer."""
    stall_s = 60.0
    """Seconds in which what waits for a slow caller must shrink from full to nearly empty."""
    head_bytes_max = HEAD_BYTES_MAX
    """Bytes of a head; also of what frames a body without adding to it."""
    headers_max = 100
    """Lines of a head. 100: Apache's limit; browsers send 30."""
    ahead_max = 8
    """Requests that wait for the answer to an earlier one. 8: clients that send ahead send a few."""
    ahead_bytes_max = 65_536
    """Bytes of the body of one that waits."""
    drain_bytes_max = 4 * MIB
    """Bytes that are thrown away of a body nobody reads. 4 MiB: clients that send all of it before
    they look get to read the answer; more is not worth receiving."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """Wrap the application, so that nothing is written once the connection closes."""
        super().__init__(*args, **named)
        self._given, self.app = self.app, self._guarded
        self._socket: asyncio.Transport
        self._polite: _Polite
        self._lines: list[Line] = []
        self._reading = _Reading.HEAD
        self._heads = 0
        self._arriving = 0  # bytes of reads that made up one head, or that added nothing to a body
        self._head_bytes = 0  # of the lines of a head that were read
        self._read = b""
        self._fault = Edge.MALFORMED
        self._deaf: int | None = None  # what comes is thrown away: how much more
        self._alarm: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self.is_hung_up = False
        """Nothing more is said on it."""

    # What the loop calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._socket, self._polite = transport, _Polite(transport, self)
        self.transport = self._polite  # type: ignore[assignment]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection, the running and the waiting."""
        self.is_hung_up = True
        self._rest()
        self._unstall()
        self._abandon()
        super().connection_lost(exc)
        self.app = self._given  # its own method would keep it for the garbage collector
        self._unset_keepalive_if_required()
        self._polite.connection = None
        self._lines = []  # they refer back

    def eof_received(self) -> None:
        """Take a caller that closed its sending side for gone: what it was sent is written, no more."""
        self._abandon()
        self.flow.resume_writing()  # nobody waits any more to say more
        self._limit_flush()

    def data_received(self, data: bytes) -> None:
        """Read on; a head that grows too long ends the connection."""
        if self._deaf is not None:
            self._ignore(len(data))
            return
        if self._reading is _Reading.NOTHING:
            self._reading = _Reading.HEAD
        before = self._heads
        self._arriving += len(data)
        self._read = data
        super().data_received(data)
        if self._reading is _Reading.HEAD and self._alarm is None and not self.is_hung_up:
            self._wait()
        if self._reading is _Reading.NOTHING or self._heads != before:
            self._arriving = 0
        elif self._arriving > self.head_bytes_max and self._deaf is None:
            self._refuse(Edge.HEAD_TOO_LARGE)

    def pause_writing(self) -> None:
        """Give a caller that does not read some time."""
        super().pause_writing()
        self._unstall()
        self._stall = self.loop.call_later(self.stall_s, self._socket.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        self._unstall()
        super().resume_writing()
        if self.is_hung_up:
            self._limit_flush()

    # What the parser calls --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a head."""
        if self._deaf is not None:
            raise _Refused
        super().on_message_begin()
        self._reading = _Reading.HEAD
        self._heads += 1
        self._head_bytes = 0
        self._rest()  # anew, if more of the head than this is to come

    def on_url(self, url: bytes) -> None:
        """Take some of the path."""
        self._head_bytes += len(url)
        if self._head_bytes > self.head_bytes_max:
            self._fault = Edge.HEAD_TOO_LARGE
            raise _Refused
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; those after the body are dropped, they are nobody's."""
        if self._reading is _Reading.BODY:
            return
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self.head_bytes_max or len(self.headers) == self.headers_max:
            self._fault = Edge.HEAD_TOO_LARGE
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Go on to the body."""
        if self.parser.should_upgrade():
            return  # to be read once more, without the offer
        if not is_plain(self.headers, self.parser.get_http_version()):
            raise _Refused
        self._reading = _Reading.BODY
        self._rest()
        super().on_headers_complete()
        if self.is_retired:
            self.cycle.keep_alive = False
        self._lines = [*self._owed(), Line(self, self.cycle)]
        if self.pipeline:
            self.flow.resume_reading()  # else it would not be seen to leave
            if len(self.pipeline) > self.ahead_max:
                self._drop_last()

    def on_body(self, body: bytes) -> None:
        """Take some of a body."""
        if self._deaf is not None:
            return
        self._arriving = 0
        super().on_body(body)
        if len(self._owed()) > 1 and len(self.cycle.body) > self.ahead_bytes_max:
            self._drop_last()

    def on_message_complete(self) -> None:
        """Have all of a request."""
        if self._reading is _Reading.HEAD:
            return  # one that offers another protocol
        self._reading = _Reading.NOTHING
        self._rest()
        if self._deaf is None:
            super().on_message_complete()

    # What uvicorn calls -----------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - ours is in the callers' words
        """Refuse what cannot be read."""
        self._refuse(self._fault)

    def _unsupported_upgrade_warning(self) -> None:
        """Read a request that offers another protocol as if it did not: callers may, and go on in ours.

        The parser would take what follows the head for words of the other one.
        """
        error = sys.exception()
        assert isinstance(error, HttpParserUpgrade)
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(Edge.MALFORMED)
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version), *without_offer(self.headers)]
        self.parser = HttpRequestParser(self)
        self._heads -= 1
        super().data_received(b"\r\n".join([*lines, b"", b""]) + self._read[error.args[0] :])

    def retire(self) -> None:
        """Close after one more answer: to what was asked already, or is asked soon."""
        self.is_retired = True
        if self._owed():
            self.cycle.keep_alive = False
        elif self._reading is _Reading.NOTHING or not self._heads:
            self._wait(min(RETIRED_S, self.patience_s))

    def shutdown(self) -> None:
        """Close when nothing is asked, unless it retires by itself; who was answered is not waited for."""
        if self.is_hung_up:
            self._socket.close()
        elif not self.is_retired:
            super().shutdown()

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = next((one for one in self._lines if one.cycle.scope is scope), None)
        if line is None:
            return  # refused by what came with its head
        cycle = line.cycle

        async def sent(message: Any) -> None:
            if self.transport.is_closing():
                self._abandon()
            elif message["type"] == "http.response.start":
                self._begin(cycle, message)
            elif cycle.scope["http_version"] == HTTP_1_0:
                cycle.expected_content_length = len(message["body"])
            await send(message)

        scope["extensions"] = {WIRE: line}
        try:
            await self._given(scope, receive, sent)
        finally:
            del scope["extensions"]  # it refers back

    def written(self, data: bytes) -> bool:
        """Write, unless nothing more is to be said."""
        if self.is_hung_up or self._socket.is_closing():
            return False
        self._socket.write(data)
        return True

    def _begin(self, cycle: RequestResponseCycle, message: Any) -> None:
        """Say in an answer's head how it will end."""
        if cycle.more_body:
            message["headers"] = [
                *(one for one in message["headers"] if one[0] != b"connection"),
                (b"connection", b"close"),
            ]
        if cycle.scope["http_version"] == HTTP_1_0:
            cycle.chunked_encoding = False  # of unknown length, it ends with the connection

    # How it ends ------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Say nothing more, and close once the other side may have read what was said."""
        if self.is_hung_up or self._socket.is_closing():
            return
        self.is_hung_up = True
        self._unset_keepalive_if_required()
        self._rest()
        self._limit_flush()
        is_within = self._reading is _Reading.BODY or self._arriving or self._deaf is not None
        if not is_within:
            self._socket.close()
            return
        self._ignore(0)
        self._wait()
        if self._socket.can_write_eof():
            try:
                self._socket.write_eof()
            except OSError:  # gone already, though nobody told yet
                self._socket.abort()

    def cut(self) -> None:
        """Close under the answer that is being given, without its end."""
        if any(line.cycle.scope["http_version"] == HTTP_1_0 for line in self._owed()[:1]):
            # A mere close would be a clean end: reset it.
            sock = self._socket.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
            self._socket.abort()
        else:
            self.transport.close()
        self._abandon()

    def _refuse(self, cause: Edge) -> None:
        """Read no more, and say why, after the answers that are owed."""
        self._ignore(0)
        if self._reading is _Reading.BODY and self._owed():
            cycle = self.cycle
            self._drop_last()
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
        self._rest()
        if self._owed():
            self.cycle.keep_alive = False
            return
        if not self.transport.is_closing():
            self.transport.write(_refusal(cause))
            self.transport.close()

    def _drop_last(self) -> None:
        """Forget the last request, and read no more: it cannot be answered."""
        self._ignore(0)
        self.pipeline = type(self.pipeline)(
            one for one in self.pipeline if one[0] is not self.cycle
        )
        self._lines.pop()
        if self._lines:
            self.cycle = self._lines[-1].cycle
            self.cycle.keep_alive = False

    def _ignore(self, size: int) -> None:
        """Throw away what comes, up to a limit."""
        self._deaf = (self.drain_bytes_max if self._deaf is None else self._deaf) - size
        if self._deaf < 0:
            self._socket.close()
        else:
            self.flow.resume_reading()  # a paused socket would hide that the caller leaves

    def _abandon(self) -> None:
        """Have every request that is not answered see that its caller is gone."""
        for line in self._owed():
            line.lose()

    def _owed(self) -> list[Line]:
        """Return the requests that are not answered."""
        return [line for line in self._lines if not line.cycle.response_complete]

    # Bounds -----------------------------------------------------------------------------------

    def _limit_flush(self) -> None:
        """Give what is still unsent, of what no more is added to, some time."""
        if self._stall is None and self._socket.get_write_buffer_size():
            self._stall = self.loop.call_later(self.stall_s, self._socket.abort)

    def _unstall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _wait(self, patience_s: float | None = None) -> None:
        self._rest()
        self._alarm = self.loop.call_later(
            self.patience_s if patience_s is None else patience_s, self._waited
        )

    def _rest(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _waited(self) -> None:
        """End the connection, after the answer if one is under way."""
        self._alarm = None
        if self._socket.is_closing():
            return
        if self.is_hung_up:
            self._socket.close()
        elif self._owed():
            self.cycle.keep_alive = False
        elif self._reading is _Reading.HEAD and self._heads:
            self._refuse(Edge.REQUEST_TIMEOUT)
        else:
            self._socket.close()


def _refusal(cause: Edge) -> bytes:
    """Return an answer without the application's help."""
    status, content = EDGES[cause].status, body(edge(cause))
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
        (b"connection", b"close"),
        *headers(edge(cause), lambda _: 0),
    ]
    head = [b"HTTP/1.1 %d %s" % (status, _PHRASES[status])]
    head += [name + b": " + value for name, value in fields]
    return b"\r\n".join([*head, b"", content])


def patient(patience_s: float, stall_s: float = Connection.stall_s) -> type[Connection]:
    """Return connections that wait so long."""
    bounds = {"patience_s": patience_s, "stall_s": stall_s}
    return type("PatientConnection", (Connection,), {"__slots__": (), **bounds})
