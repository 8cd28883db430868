"""The connection under a request: what ASGI has no words for.

An application finds it in the scope's extensions; only our own connections give one.
"""

from collections.abc import Callable
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from headrace.gateway.errors import Headers
from headrace.gateway.plain import HTTP_1_0

WIRE = "headrace.wire"
"""In a scope's extensions: the `Wire` under a request."""


class Wire(Protocol):
    """What the connection under a request can do that ASGI has no words for.

    What it writes past ASGI costs half; where it returns False, nothing was written and ASGI must do.
    """

    is_gone: bool
    """Its caller has left."""
    on_gone: Callable[[], None] | None
    """Called, once, when its caller leaves: that spares each request a task that waits for it."""

    @property
    def has_all(self) -> bool:
        """Whether the whole body is there already, as it mostly is."""
        ...

    def answer(self, status: int, fields: Headers, content: bytes) -> bool:
        """Give a whole answer, with exactly these headers."""
        ...

    def write(self, data: bytes) -> bool:
        """Give a piece of an answer that has begun; False also while its caller is slow."""
        ...

    def cut(self) -> None:
        """Close the connection under an answer that cannot be completed."""
        ...


class Owner(Protocol):
    """The connection that a line is held on."""

    flow: FlowControl

    def written(self, data: bytes) -> bool:
        """Write, unless nothing more is to be said."""
        ...

    def cut(self) -> None:
        """Close under the answer that is being given, without its end."""
        ...


class Line:
    """One request's hold on its connection, a `Wire`."""

    __slots__ = ("_owner", "cycle", "is_gone", "on_gone")

    def __init__(self, owner: Owner, cycle: RequestResponseCycle) -> None:
        """Hold a request's connection."""
        self._owner, self.cycle = owner, cycle
        self.is_gone = False
        self.on_gone: Callable[[], None] | None = None

    @property
    def has_all(self) -> bool:
        """Whether the whole body is there."""
        return not self.cycle.more_body

    def write(self, data: bytes) -> bool:
        """Write a chunk of the answer under way, unless its caller is slow or gone or knows no chunks."""
        cycle, owner = self.cycle, self._owner
        if owner.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        return owner.written(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self, status: int, fields: Headers, content: bytes) -> bool:
        """Give a whole answer at once, if it is a plain case: uvicorn searches each header twice."""
        cycle = self.cycle
        if cycle.more_body or cycle.response_started or cycle.disconnected or not cycle.keep_alive:
            return False
        if cycle.scope["method"] != "POST" or cycle.scope["http_version"] == HTTP_1_0:
            return False
        lines = [b"%b: %b\r\n" % field for field in (*cycle.default_headers, *fields)]
        head = STATUS_LINE[status] + b"".join(lines)
        assert head.count(b"\n") == head.count(b"\r") == len(lines) + 1, "a line break in a header"
        if self._owner.flow.write_paused:
            return False
        if not self._owner.written(b"%b\r\n%b" % (head, content)):
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True

    def cut(self) -> None:
        """Close the connection without the end of the answer."""
        self._owner.cut()

    def lose(self) -> None:
        """Have its caller be gone."""
        self.cycle.disconnected = self.is_gone = True
        self.cycle.message_event.set()
        told, self.on_gone = self.on_gone, None
        if told is not None:
            told()
