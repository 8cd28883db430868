"""One connection: how long its heads may be and take, and that nobody answers one that is gone.

uvicorn bounds neither. A connection that sends nothing is closed without a word, as is one that goes
on sending a body after its answer; half a head gets 408, one too long 431.
"""

import asyncio
from enum import Enum, auto
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.gateway.errors import EDGES, Edge, body, edge, headers
from headrace.gateway.http import CUT, HEAD_BYTES_MAX, Receive, Scope, Send

_PHRASES = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class _Reading(Enum):
    """What of a request comes next."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with bounds."""

    # With attributes of ours in it, the dict of each connection would not share its keys with others'.
    __slots__ = ("_alarm", "_cycles", "_given", "_head_bytes", "_heads", "_reading", "_stall")

    patience_s = 10.0
    """Seconds that a head may take, and what is left of a body after its answer."""
    stall_s = 60.0
    """Seconds in which what waits for a slow caller must shrink from full to nearly empty."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """Wrap the application, so that nothing is written once the connection closes."""
        super().__init__(*args, **named)
        self._given, self.app = self.app, self._guarded
        self._cycles: list[RequestResponseCycle] = []
        self._reading = _Reading.HEAD
        self._heads = 0
        self._head_bytes = 0  # since the read in which it began
        self._alarm: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection, the running and the waiting."""
        self._rest()
        self._unstall()
        self._abandon()
        super().connection_lost(exc)
        self.app = self._given  # its own method would keep it for the garbage collector

    def data_received(self, data: bytes) -> None:
        """Read on; a head that grows too long ends the connection."""
        if self._reading is _Reading.NOTHING:
            self._reading = _Reading.HEAD
            self._wait()
        heads = self._heads
        super().data_received(data)
        if self._reading is not _Reading.HEAD or self._heads != heads:
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._end(Edge.HEAD_TOO_LARGE)

    def pause_writing(self) -> None:
        """Give a caller that does not read some time."""
        super().pause_writing()
        self._unstall()
        self._stall = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        self._unstall()
        super().resume_writing()

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self.scope["extensions"] = {CUT: {"close": self.transport.close}}
        self._reading = _Reading.HEAD
        self._heads += 1
        self._head_bytes = 0
        self._wait()

    def on_headers_complete(self) -> None:
        """Go on to the body."""
        self._reading = _Reading.BODY
        self._rest()
        super().on_headers_complete()
        self._cycles = [one for one in self._cycles if not one.response_complete]
        self._cycles.append(self.cycle)

    def on_message_complete(self) -> None:
        """Have all of a request."""
        self._reading = _Reading.NOTHING
        self._rest()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the rest of a body that nobody reads."""
        super().on_response_complete()
        if self._reading is _Reading.BODY and not self._answering():
            self._wait()

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Any) -> None:
            if self.transport.is_closing():
                self._abandon()
            await send(message)

        await self._given(scope, receive, sent)

    def _abandon(self) -> None:
        """Have every request that is not answered see that its caller is gone."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _answering(self) -> bool:
        return any(not cycle.response_complete for cycle in self._cycles)

    def _unstall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _wait(self) -> None:
        self._rest()
        self._alarm = self.loop.call_later(self.patience_s, self._waited)

    def _rest(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _waited(self) -> None:
        """End the connection, after the answer if one is under way."""
        self._alarm = None
        if self.transport.is_closing():
            return
        if self._answering():
            self.cycle.keep_alive = False
        elif self._reading is _Reading.HEAD and self._heads:
            self._end(Edge.REQUEST_TIMEOUT)
        else:
            self.transport.close()

    def _end(self, cause: Edge) -> None:
        """Answer without the application, unless it is answering itself, and close."""
        if not self._answering():
            status, content = EDGES[cause].status, body(edge(cause))
            fields = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(content)),
                (b"connection", b"close"),
                *headers(edge(cause), lambda _: 0),
            ]
            head = [b"HTTP/1.1 %d %s" % (status, _PHRASES[status])]
            head += [name + b": " + value for name, value in fields]
            self.transport.write(b"\r\n".join([*head, b"", content]))
        self.transport.close()


def patient(patience_s: float, stall_s: float = Connection.stall_s) -> type[Connection]:
    """Return connections that wait so long."""
    bounds = {"patience_s": patience_s, "stall_s": stall_s}
    return type("PatientConnection", (Connection,), {"__slots__": (), **bounds})
