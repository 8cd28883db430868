"""One caller of an OpenAI-compatible API: asks once over its own connection and measures.

Sees what a user sees: status, time to the first token, gaps, tokens, and whether the stream ended as
it should. No retries, since retries are new offers.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache

import httptools
import msgspec
from msgspec import Struct

from headrace.model.meter import Meter, StreamTiming
from headrace.units import DurationNs, InstantNs, Tokens, ms, seconds

_READ = 65_536
_ERROR_MAX = 65_536
_DATA = b"data: "
_OK = 200
_QUEUE_MS = b"x-headrace-queue-ms"

Now = Callable[[], InstantNs]
"""Tells the time."""


class Place(Struct, frozen=True, kw_only=True):
    """Where an API is."""

    host: str
    port: int
    path: str = "/v1"
    """What stands before `/chat/completions`."""
    tls: bool = False


class Failure(StrEnum):
    """Why an answer is not whole, where no server said so."""

    CONNECT = "connect"
    """Nobody took the connection."""
    BROKEN = "broken"
    """The connection ended first."""
    UNREADABLE = "unreadable"
    """What came is no HTTP."""
    TIMEOUT = "timeout"
    """Patience ran out."""
    STOPPED = "stopped"
    """The caller was told to stop."""
    LIMIT = "limit"
    """Never sent: too many connections were open."""


class Answer(Struct, frozen=True, kw_only=True):
    """What came back, as the caller saw it."""

    status: int
    """0: the connection failed or ended without an answer."""
    code: str | None = None
    """The error body's or error event's code."""
    reason: str | None = None
    """Why, in Headrace's own words, where the error has them."""
    entered: bool = False
    """Whether an error came after admission, where it tells: a `fail`, not a `reject`."""
    failure: Failure | None = None
    sent_at: InstantNs
    ended_at: InstantNs
    timing: StreamTiming
    """Chunks as they arrived; the last field of the usage says how many tokens those were."""
    queue_ns: DurationNs | None = None
    """How long it waited for a replica, where the answer tells."""
    input_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    """As the server counted them."""
    words: int = 0
    """Of the text, as it came: emulated engines make one a token."""
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


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Own(Struct):
    reason: str | None = None
    outcome: str | None = None


class _Fault(Struct):
    code: str | int | None = None
    headrace: _Own | None = None


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
        self.own = _Own()
        self.usage: _Usage | None = None
        self.queue_ns: DurationNs | None = None
        self.words = 0
        self.marked = self.over = False
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b""
        self._error = b""
        self._now = InstantNs(0)

    def feed(self, content: bytes, now: InstantNs) -> None:
        """Read what arrived at `now`."""
        self._now = now
        self._parser.feed_data(content)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take the one header that measures something."""
        if name.lower() == _QUEUE_MS:
            try:
                self.queue_ns = ms(float(value))
            except (ValueError, OverflowError):
                self.queue_ns = None

    def on_headers_complete(self) -> None:
        """The status is known."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Read events, or collect an error's body."""
        if self.status != _OK:
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
            self.code = str(event.error.code or "error")
            self.own = event.error.headrace or self.own
        if event.usage is not None:
            self.usage = event.usage
        text = [choice.delta.content for choice in event.choices if choice.delta.content]
        if text:
            self.meter.note(self._now)
            self.words += sum(len(part.split()) for part in text)

    def answer(self, sent_at: InstantNs, ended_at: InstantNs, failure: Failure | None) -> Answer:
        """Return what was read so far."""
        usage, details = self.usage, None
        if usage is not None and usage.prompt_tokens_details is not None:
            details = usage.prompt_tokens_details.cached_tokens
        given = None if usage is None else usage.prompt_tokens
        return Answer(
            status=self.status,
            code=self.code,
            reason=self.own.reason,
            entered=self.own.outcome == "fail",
            failure=failure,
            sent_at=sent_at,
            ended_at=ended_at,
            timing=self.meter.timing(),
            queue_ns=self.queue_ns,
            input_tokens=None if given is None else Tokens(given),
            cached_tokens=None if details is None else Tokens(details),
            output_tokens=None if usage is None else Tokens(usage.completion_tokens),
            words=self.words,
            complete=self.marked and self.code is None,
        )


def loop_time() -> InstantNs:
    """Return the running loop's time."""
    return InstantNs(seconds(asyncio.get_running_loop().time()))


def unsent(now: InstantNs) -> Answer:
    """Return what becomes of a request that the caller has no connection for."""
    return _Reading(Meter(bound_ns=DurationNs(0))).answer(now, now, Failure.LIMIT)


async def ask(
    place: Place,
    body: bytes,
    headers: Mapping[str, str],
    *,
    gap_bound_ns: DurationNs,
    patience_s: float,
    now: Now = loop_time,
) -> Answer:
    """Send one chat request and read its answer to the end, or until patience runs out.

    Whoever cancels it gets what had come as well: nothing is offered that has no answer.
    """
    sent_at = now()
    reading = _Reading(Meter(bound_ns=gap_bound_ns))
    failure = None
    try:
        async with asyncio.timeout(patience_s):
            failure = await _exchange(place, _head(place, len(body), headers) + body, reading, now)
    except TimeoutError:
        failure = Failure.TIMEOUT
    except httptools.HttpParserError:
        failure = Failure.UNREADABLE
    except OSError:
        failure = Failure.BROKEN
    except asyncio.CancelledError:
        failure = Failure.STOPPED
    return reading.answer(sent_at, now(), failure)


async def _exchange(place: Place, content: bytes, reading: _Reading, now: Now) -> Failure | None:
    secure = _trusting() if place.tls else None
    try:
        reader, writer = await asyncio.open_connection(place.host, place.port, ssl=secure)
    except OSError:
        return Failure.CONNECT
    try:
        writer.write(content)
        while not reading.over and (part := await reader.read(_READ)):
            reading.feed(part, now())
    finally:
        writer.close()
    # A stream may end with its connection; whether it ended well, its end mark says.
    whole = reading.over or reading.marked
    return None if whole else Failure.BROKEN


@cache
def _trusting() -> ssl.SSLContext:
    """Return what this machine believes certificates by; loading it costs milliseconds."""
    return ssl.create_default_context()


def _head(place: Place, length: int, headers: Mapping[str, str]) -> bytes:
    host = f"[{place.host}]" if ":" in place.host else place.host
    lines = [
        f"POST {place.path}/chat/completions HTTP/1.1",
        f"Host: {host}:{place.port}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
