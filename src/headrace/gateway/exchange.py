"""One request and its answer: what is sent, and when.

Nothing is sent before admission is settled; the head of a stream goes out with its first token, so
that whatever fails before still has a status of its own (ADM-5).
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from itertools import count

from headrace.gateway.bodies import body, broken
from headrace.gateway.errors import Edge, Fault, Headers, headers
from headrace.gateway.http import (
    Receive,
    Scope,
    Send,
    answer,
    begin_events,
    cut,
    send_events,
)
from headrace.gateway.stream import Chunk, Cut, Done, End, Left, Stream
from headrace.gateway.wire import WIRE, Wire
from headrace.model.ids import TenantId
from headrace.ports.engine import Refusal, Route
from headrace.units import InstantNs, to_ms

KEEP_ALIVE_S = 10.0
"""Between comments on a stream that waits for its first token. 10: proxies give up after 30 or 60."""
COMMENT = b": keep-alive\n\n"
LEVEL, REASON = b"x-headrace-degrade-level", b"x-headrace-degrade-reason"
_ID_MAX = 128
_PROCESS, _NUMBERS = secrets.token_hex(10).encode(), count(1)
"""What ids that we mint are made of: no two processes draw the same, no process counts twice."""
_PRINTABLE = range(0x21, 0x7F)

Instead = Callable[[Fault], Awaitable[bool]]
"""Answers otherwise than with a refusal, or returns False."""


class Exchange:
    """One request and its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, below: Callable[[int], int]
    ) -> None:
        """Take the request's id over, or mint one; `below(n)` draws from 0 to n-1."""
        self._below = below
        self.scope, self.receive, self.send = scope, receive, send
        self.wire: Wire = scope["extensions"][WIRE]
        self.told: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        """The caller's headers; of one that is told twice, the first."""
        self.headers: Headers = [(b"x-request-id", _request_id(self.told.get(b"x-request-id")))]
        self.route: Route | None = None
        """In whose words errors are told."""
        self.refused: Fault | None = None
        """What it was refused with, if the plane never saw it."""
        self.tenant: TenantId | None = None
        """Whose key it showed, once that is known."""
        self.read_at = InstantNs(0)
        """When its body was read."""

    def header(self, *names: bytes) -> bytes | None:
        """Return the value of the leftmost of the names that is there."""
        for name in names:
            if (value := self.told.get(name)) is not None:
                return value
        return None

    async def content(self, body: bytes, status: int = 200, *more: tuple[bytes, bytes]) -> None:
        """Answer with JSON that no admission was needed for."""
        await answer(self.wire, self.send, status, [*self.headers, *more], body)

    async def refuse(self, fault: Fault, *more: tuple[bytes, bytes]) -> None:
        """Turn away a request that the plane never saw."""
        self.refused = fault
        await self.tell(fault, *more)

    async def tell(self, fault: Fault, *more: tuple[bytes, bytes]) -> None:
        """Answer with an error."""
        fields = [*self.headers, *headers(fault, self._below), *more]
        await answer(self.wire, self.send, fault.face.status, fields, body(fault, self.route))

    async def whole(self, stream: Stream, instead: Instead | None = None) -> None:
        """Answer in one piece; `instead` is tried where it is refused and may be answered later."""
        pieces: list[bytes] = []
        end: End | None = None
        while end is None:
            chunk = await stream.chunk()
            pieces.append(chunk.data)
            end = chunk.end
        if isinstance(end, Done):
            await answer(self.wire, self.send, 200, self._settled(stream), b"".join(pieces))
        elif not (
            stream.deferrable
            and instead is not None
            and isinstance(end, Fault)
            and await instead(end)
        ):
            await self._fail(stream, end)

    async def early(self, stream: Stream) -> None:
        """Answer in events that begin before anything is known of the answer."""
        await begin_events(self.send, self.headers)
        first = asyncio.ensure_future(stream.chunk())
        try:
            while not (await asyncio.wait({first}, timeout=KEEP_ALIVE_S))[0]:
                await send_events(self.send, COMMENT, more=True)
        finally:
            first.cancel()
        if stream.lesser is not None:  # the head is gone; comments are what SDKs skip
            said = b"".join(b": %s: %s\n" % field for field in form(stream))
            await send_events(self.send, said + b"\n", more=True)
        await self._go_on(stream, first.result())

    async def stream(self, stream: Stream) -> None:
        """Answer in events."""
        chunk = await stream.chunk()
        if chunk.end is not None and not isinstance(chunk.end, Done):
            await self._fail(stream, chunk.end)  # whatever was made, nothing was sent
            return
        await begin_events(self.send, self._settled(stream))
        await self._go_on(stream, chunk)

    async def _go_on(self, stream: Stream, chunk: Chunk) -> None:
        """Send what comes, until the end."""
        stream.sink = self.wire.write
        while chunk.end is None:
            await send_events(self.send, chunk.data, more=True)
            chunk = await stream.chunk()
        await self._finish(stream, chunk.data, chunk.end)

    async def _finish(self, stream: Stream, data: bytes, end: End) -> None:
        """Send the last of a stream."""
        match end:
            case Done():
                await send_events(self.send, data, more=False)
            case Fault():
                assert self.route is not None, "only routes are answered in events"
                await send_events(self.send, data + broken(end, self.route), more=False)
            case Cut():
                await send_events(self.send, data, more=True)
                await cut(self.wire, self.receive)
            case Refusal():
                assert self.route is not None, "as above"
                fault = stream.fault(Edge.UPSTREAM)
                await send_events(self.send, broken(fault, self.route), more=False)
            case Left():
                pass

    async def _fail(self, stream: Stream, end: End) -> None:
        """Answer a request that nothing was sent for yet."""
        match end:
            case Fault():
                await self.tell(end)
            case Refusal():
                fields = [*self._settled(stream), (b"x-should-retry", b"false")]
                await answer(self.wire, self.send, end.status, fields, end.body)
            case Cut() | Done():
                await self.tell(stream.fault(Edge.UPSTREAM))
            case Left():
                pass

    def _settled(self, stream: Stream) -> Headers:
        """Return the headers of an admitted request."""
        return [*self.headers, *settled(stream)]


def settled(stream: Stream, attempts: int = 1) -> Headers:
    """Return what is told of how an answer was made."""
    found = [
        (b"x-headrace-decision-id", b"%d" % (stream.decision or 0)),
        (b"x-headrace-queue-ms", b"%.3f" % to_ms(stream.queue_ns)),
        (b"x-headrace-attempts", b"%d" % attempts),
        (b"openai-processing-ms", b"%d" % to_ms(stream.took_ns)),
    ]
    if stream.model_revision is not None:
        found.append((b"x-headrace-model-revision", stream.model_revision))
    return found + form(stream)


def form(stream: Stream) -> Headers:
    """Return what is told of the form in which a request is served (DEG-3): nothing that we measured."""
    lesser, limit = stream.lesser, stream.output_limit
    found = [] if limit is None else [(b"x-headrace-output-limit", b"%d" % limit)]
    if lesser is None:
        return [*found, (LEVEL, b"0")]
    found += [(LEVEL, b"%d" % lesser.level), (REASON, stream.why)]
    if most := stream.optional:
        kept = most if lesser.kept is None else min(lesser.kept, most)
        found.append((b"x-headrace-optional-kept", b"%d/%d" % (kept, most)))
    return found


def _request_id(told: bytes | None) -> bytes:
    """Return the caller's own id if it is short and plain, else a fresh one."""
    if told and len(told) <= _ID_MAX and all(byte in _PRINTABLE for byte in told):
        return told
    return b"req-%s%012x" % (_PROCESS, next(_NUMBERS))
