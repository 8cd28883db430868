"""One request and its answer: what is sent, and when.

Nothing is sent before admission is settled; the head of a stream goes out with its first token, so
that whatever fails before still has a status of its own (ADM-5).
"""

import secrets
from collections.abc import Callable

from headrace.gateway.completion import Writer, broken
from headrace.gateway.errors import Fault, Headers, body, headers
from headrace.gateway.http import Receive, Scope, Send, answer, begin_events, header, send_events
from headrace.gateway.stream import Done, Left, Stream
from headrace.units import to_ms

_ID_MAX = 128
_PRINTABLE = range(0x21, 0x7F)


class Exchange:
    """One request and its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, below: Callable[[int], int]
    ) -> None:
        """Take the request's id over, or mint one; `below(n)` draws from 0 to n-1."""
        self._below = below
        self.scope, self.receive, self.send = scope, receive, send
        self.headers: Headers = [(b"x-request-id", _request_id(scope))]
        self.refused: Fault | None = None
        """What it was refused with, if it was."""

    def header(self, *names: bytes) -> bytes | None:
        """Return the value of the leftmost of the names that is there."""
        return header(self.scope, *names)

    async def content(self, body: bytes, status: int = 200) -> None:
        """Answer with JSON that no admission was needed for."""
        await answer(self.send, status, self.headers, body)

    async def refuse(self, fault: Fault, *more: tuple[bytes, bytes]) -> None:
        """Answer with an error."""
        self.refused = fault
        fields = [*self.headers, *headers(fault, self._below), *more]
        await answer(self.send, fault.face.status, fields, body(fault))

    async def whole(self, stream: Stream, writer: Writer) -> None:
        """Answer in one piece."""
        texts: list[str] = []
        while True:
            chunk = await stream.chunk()
            texts.append(chunk.text)
            match chunk.end:
                case Done() as done:
                    content = writer.whole("".join(texts), done)
                    await answer(self.send, 200, self._settled(stream), content)
                    return
                case Fault() as fault:
                    await self.refuse(fault)
                    return
                case Left():
                    return
                case None:
                    pass

    async def stream(self, stream: Stream, writer: Writer) -> None:
        """Answer in events."""
        begun = False
        while True:
            chunk = await stream.chunk()
            events = writer.delta(chunk.text) if chunk.text else b""
            match chunk.end:
                case Done() as done:
                    events += writer.end(done)
                case Fault() as fault:
                    if not begun:  # whatever was made, nothing was sent
                        await self.refuse(fault)
                        return
                    events += broken(fault)
                case Left():
                    return
                case None:
                    pass
            if not begun:
                await begin_events(self.send, self._settled(stream))
                begun = True
            await send_events(self.send, events, more=chunk.end is None)
            if chunk.end is not None:
                return

    def _settled(self, stream: Stream) -> Headers:
        """Return the headers of an admitted request."""
        return [
            *self.headers,
            (b"x-headrace-decision-id", b"%d" % (stream.decision or 0)),
            (b"x-headrace-queue-ms", f"{to_ms(stream.queue_ns):.3f}".encode()),
        ]


def _request_id(scope: Scope) -> bytes:
    """Return the caller's own id if it is short and plain, else a fresh one."""
    told = header(scope, b"x-request-id")
    if told and len(told) <= _ID_MAX and all(byte in _PRINTABLE for byte in told):
        return told
    return f"req-{secrets.token_hex(16)}".encode()
