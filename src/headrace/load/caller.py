"""One caller of an OpenAI-compatible API: asks once over its own connection and measures.

Sees what a user sees: status, time to the first token, gaps, tokens, and whether the stream ended as
it should. Loopback only in what this project runs; no retries, since retries are new offers.
"""

import asyncio
from collections.abc import Mapping

import httptools
import msgspec
from msgspec import Struct

from headrace.model.meter import Meter, StreamTiming
from headrace.units import DurationNs, InstantNs, Tokens, seconds

_READ = 65_536
_ERROR_MAX = 65_536
_DATA = b"data: "


class Answer(Struct, frozen=True, kw_only=True):
    """What came back, as the caller saw it."""

    status: int
    """0: the connection failed or ended without an answer."""
    code: str | None = None
    """The error body's or error event's code."""
    sent_at: InstantNs
    ended_at: InstantNs
    timing: StreamTiming
    """Chunks as they arrived; the last field of the usage says how many tokens those were."""
    output_tokens: Tokens | None = None
    complete: bool = False
    """The stream ended with its end mark, and without an error event."""

    @property
    def ttft_ns(self) -> DurationNs | None:
        """Time from sending to the first token; None if none came."""
        first = self.timing.first_at
        return None if first is None else DurationNs(first - self.sent_at)


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(Struct):
    completion_tokens: int = 0


class _Fault(Struct):
    code: str | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Fault | None = None


_EVENT = msgspec.json.Decoder(_Event)


class _Reading:
    """One response while it is read."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.status = 0
        self.code: str | None = None
        self.output_tokens: Tokens | None = None
        self.marked = self.over = False
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b""
        self._error = b""
        self._now = InstantNs(0)

    def feed(self, content: bytes, now: InstantNs) -> None:
        """Read what arrived at `now`."""
        self._now = now
        self._parser.feed_data(content)

    def on_headers_complete(self) -> None:
        """The status is known."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Read events, or collect an error's body."""
        if self.status != 200:  # noqa: PLR2004 - the one status of a stream
            self._error = (self._error + body)[:_ERROR_MAX]
            return
        *frames, self._tail = (self._tail + body).split(b"\n\n")
        for frame in frames:
            self._frame(frame)

    def on_message_complete(self) -> None:
        """The response is over."""
        self.over = True
        if self._error:
            self._told(self._error)

    def _frame(self, frame: bytes) -> None:
        if not frame.startswith(_DATA):
            return  # a comment that keeps the connection alive
        data = frame[len(_DATA) :]
        if data == b"[DONE]":
            self.marked = True
        else:
            self._told(data)

    def _told(self, data: bytes) -> None:
        try:
            event = _EVENT.decode(data)
        except msgspec.DecodeError:
            self.code = "unreadable"
            return
        if event.error is not None:
            self.code = event.error.code or "error"
        if event.usage is not None:
            self.output_tokens = Tokens(event.usage.completion_tokens)
        if any(choice.delta.content for choice in event.choices):
            self.meter.note(self._now)


async def ask(
    host: str,
    port: int,
    body: bytes,
    headers: Mapping[str, str],
    *,
    gap_bound_ns: DurationNs,
    patience_s: float,
) -> Answer:
    """Send one chat request and read its answer to the end, or until patience runs out."""
    loop = asyncio.get_running_loop()
    sent_at = InstantNs(seconds(loop.time()))
    reading = _Reading(Meter(bound_ns=gap_bound_ns))
    try:
        async with asyncio.timeout(patience_s):
            await _exchange(host, port, _head(host, port, len(body), headers) + body, reading)
    except (OSError, TimeoutError, httptools.HttpParserError):
        pass  # as much as came is in the reading
    return Answer(
        status=reading.status,
        code=reading.code,
        sent_at=sent_at,
        ended_at=InstantNs(seconds(loop.time())),
        timing=reading.meter.timing(),
        output_tokens=reading.output_tokens,
        complete=reading.marked and reading.code is None,
    )


async def _exchange(host: str, port: int, content: bytes, reading: _Reading) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(content)
        while not reading.over and (part := await reader.read(_READ)):
            reading.feed(part, InstantNs(seconds(loop.time())))
    finally:
        writer.close()


def _head(host: str, port: int, length: int, headers: Mapping[str, str]) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
