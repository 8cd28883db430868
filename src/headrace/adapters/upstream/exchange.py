"""One request to an engine and its answer: when is it sent, retried, held back, given up?

Tells its listener what came, in order, and how it ended, exactly once; after `abort()`, nothing. An
event stream is handed over as it comes; any other answer in one piece, once all of it came.
Knows no sockets (connection), keeps no connections (pool), and does not read frames (sse, dialects).
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from headrace.adapters.upstream.connection import Connection
from headrace.adapters.upstream.counting import ByUsage
from headrace.adapters.upstream.dialects import scanner_for
from headrace.adapters.upstream.response import Headers, Response
from headrace.adapters.upstream.sse import Scanner
from headrace.adapters.upstream.usage import EachUsage, usage_of
from headrace.adapters.upstream.watch import Watch
from headrace.model.engine import Usage
from headrace.model.meter import Meter
from headrace.ports.clock import Clock
from headrace.ports.engine import Route
from headrace.ports.upstream import (
    CutError,
    LostError,
    MalformedError,
    ReportedError,
    SilentError,
    UpstreamError,
    Wait,
)
from headrace.units import DurationNs, InstantNs

QUEUE_HIGH = 262_144
"""Bytes held for a listener that paused, at which the engine is held back too. 256 KiB: with one
read more (256 KiB) and the socket's buffer, well under 1 MiB for each stalled stream."""
QUEUE_LOW = 65_536
"""Bytes below which the engine may go on, and about what is handed over in one piece."""
ANSWER_MAX = 67_108_864
"""Bytes of an answer without frames, all of which is held. 64 MiB: some thousand embeddings as text."""
_STALE = (ConnectionResetError, BrokenPipeError)
_OK = 200


class Timeouts(Struct, frozen=True, kw_only=True):
    """How long an engine may stay silent. None: as long as it likes."""

    first_byte_ns: DurationNs | None = None
    """From sending to the first frame with content, or to the head of an answer without frames."""
    gap_ns: DurationNs | None = None
    """From there on between two frames with data, or pieces of such an answer; comments and pings do
    not count, nor time in which we did not read."""
    deadline: InstantNs | None = None
    """When the whole exchange ends at the latest."""


NO_TIMEOUTS = Timeouts()


class Request(Struct, frozen=True, kw_only=True):
    """What is asked of an engine, once; a second time only if a pooled connection proved stale."""

    method: str
    path: str
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Without host, length, connection, and credentials: those are the pool's."""
    body: bytes = b""
    route: Route = Route.CHAT
    """Whose words the answer uses; `path` is where it is asked for."""
    hide_usage: bool = False
    """We asked for usage in the stream and the caller did not: keep it out of the frames."""
    each_usage: EachUsage = EachUsage.NOBODY
    """Who asked for it in each frame: then tokens are counted by it, not frames."""
    answer_limit: int = ANSWER_MAX
    """Bytes of an answer without frames, at most."""
    timeouts: Timeouts = NO_TIMEOUTS
    meter: Meter | None = None
    """Counts frames with content as they arrive, whether or not the listener takes them."""


class Result(Struct, frozen=True, kw_only=True):
    """How an exchange ended."""

    error: UpstreamError | None
    """None: the answer is complete, whatever its status."""
    status: int
    """0: no head came."""
    attempts: int
    """How often it was sent, or tried to be: 2 if a pooled connection proved stale. An engine may
    have begun work each time, so each counts against the retry budget (RET-1)."""
    reused: bool
    """The last attempt went over a connection that had carried another."""
    whole: bool = True
    """Nothing, or all of an answer, or whole frames were handed over: an event of our own may follow."""
    frames: int = 0
    """Frames that carried content."""
    done: bool = False
    """The stream's end mark came."""
    usage: Usage | None = None
    """The latest that was told."""


class Listener(Protocol):
    """Whom does an exchange tell? Never before the call that opened it has returned."""

    def on_head(self, status: int, headers: Headers) -> None:
        """The answer begins; header names are in lower case."""
        ...

    def on_frames(self, data: bytes, frames: int) -> None:
        """Whole frames came, `frames` of them with content; or, of an answer without, all of it."""
        ...

    def on_end(self, result: Result) -> None:
        """It is over."""
        ...


class Keeper(Protocol):
    """Where do connections come from, and where do they go?"""

    def acquire(self, exchange: "Exchange", *, fresh: bool = False) -> None:
        """Have a connection given to `connected`, now or later, or an error to `failed`.

        `fresh`: none that was used before.
        """
        ...

    def withdraw(self, exchange: "Exchange") -> None:
        """It wants no connection any more."""
        ...

    def release(self, connection: Connection, *, reusable: bool) -> None:
        """The exchange over it ended."""
        ...

    def drop_idle(self) -> None:
        """One connection proved stale: suspect all that idle."""
        ...


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_answer", "_answer_left", "_clock", "_connect_ns", "_connection", "_each_usage", "_heard",
        "_hide_usage", "_keeper", "_listener", "_meter", "_over", "_queue", "_response", "_result",
        "_resuming", "_reused", "_route", "_scanner", "_silent", "_timeouts", "_usage", "_watch",
        "_wire", "attempts", "paused_since", "queued",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        listener: Listener,
        keeper: Keeper,
        clock: Clock,
        *,
        head: bytes,
        connect_ns: DurationNs,
    ) -> None:
        """Wait to be started; `head` is the request's, ready to be sent."""
        self._listener, self._keeper, self._clock = listener, keeper, clock
        self._wire = (head, request.body)
        self._timeouts = request.timeouts
        self._meter: Meter | ByUsage | None = request.meter
        self._route, self._hide_usage = request.route, request.hide_usage
        self._each_usage = request.each_usage
        self._answer: list[bytes] = []  # what came of an answer without frames
        self._answer_left = request.answer_limit
        self._usage: Usage | None = None  # what such an answer told
        self._connect_ns = connect_ns
        self._watch = Watch(clock, self._silence, request.timeouts.deadline)
        self._connection: Connection | None = None
        self._reused = False
        self._heard = False  # a byte of the answer came
        self._silent = True  # nothing came yet that ends the wait for the first byte
        self._response = Response(is_head=request.method == "HEAD")
        self._scanner: Scanner | None = None
        self._queue: list[tuple[bytes, int]] = []  # an empty deque takes ten times the memory
        self._resuming = False
        self._result: Result | None = None
        self._over = False
        self.attempts = 0
        """How often it was sent, or tried to be."""
        self.queued = 0
        """Bytes held for the listener while it pauses."""
        self.paused_since: InstantNs | None = None
        """Since when the listener pauses: for whoever limits how long it may."""

    # The listener's side ----------------------------------------------------------------------

    def pause(self) -> None:
        """Hand over nothing for now."""
        if self.paused_since is None:
            self.paused_since = self._clock.now()

    def resume(self) -> None:
        """Hand over what came meanwhile, in pieces of about `QUEUE_LOW`, until paused again."""
        self.paused_since = None
        if self._resuming:
            return
        self._resuming = True
        try:
            while self._queue and not self._is_held():
                self._hand_over()
        finally:
            self._resuming = False
        if self._result is not None:
            self._conclude(self._result)

    def abort(self) -> None:
        """End it now; nothing is told any more."""
        if self._over:
            return
        self._over = True
        self._queue.clear()
        self.queued = 0
        if self._result is None:
            self._let_go(reusable=False)

    # The pool's side --------------------------------------------------------------------------

    def start(self) -> None:
        """Ask for a connection."""
        self.attempts += 1
        self._keeper.acquire(self, fresh=self.attempts > 1)
        if self._connection is None:
            self._watch.expect(Wait.CONNECT, self._connect_ns, self._clock.now())

    def connected(self, connection: Connection, *, reused: bool) -> None:
        """Send over a connection that is this exchange's own from now on."""
        self._connection, self._reused = connection, reused
        connection.user = self
        self._await(self._clock.now())
        connection.send(*self._wire)

    def failed(self, error: UpstreamError) -> None:
        """There is no connection to be had."""
        self._end(error)

    # The connection's side --------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Read what came."""
        if not self._heard:
            self._heard = True
            self._wire = (b"", b"")  # it is never sent again, and a long stream need not keep it
        now = self._clock.now()
        response = self._response
        was_headed = response.headed
        try:
            body = response.feed(data)
        except UpstreamError as error:
            self._end(error)
            return
        if not was_headed and response.headed:
            self._begin(now)
        if body and not self._over:
            self._take(body, now)
        if response.complete and not self._over:
            self._complete()

    def eof(self) -> None:
        """Judge an end that the server made: it may be the answer's own."""
        try:
            self._response.eof()
        except CutError:
            self.lost(None)
        else:
            self._complete()

    def lost(self, error: Exception | None) -> None:
        """Send again if a pooled connection was stale; else it is over."""
        if self._heard:
            self._end(CutError("the connection ended within the answer"))
        elif self._reused and self.attempts == 1 and (error is None or isinstance(error, _STALE)):
            self._disconnect(reusable=False)
            self._keeper.drop_idle()
            self.start()
        else:
            self._end(LostError("the connection ended before an answer"))

    # What comes -------------------------------------------------------------------------------

    def _begin(self, now: InstantNs) -> None:
        """The head is known."""
        headers = self._response.headers
        if any(n == b"content-type" and _is_events(value) for n, value in headers):
            self._scanner = scanner_for(
                self._route, hide_usage=self._hide_usage, each_usage=self._each_usage
            )
            if self._each_usage is not EachUsage.NOBODY and isinstance(self._meter, Meter):
                self._meter = ByUsage(self._meter, self._scanner)
        else:
            self._progress(now)
        self._listener.on_head(self._response.status, headers)

    def _take(self, body: bytes, now: InstantNs) -> None:
        """Take a piece of the body."""
        scanner = self._scanner
        if scanner is None:
            self._progress(now)
            self._hold(body)
            return
        events, marks = scanner.events, scanner.marks
        out = scanner.feed(body)
        frames = scanner.frames - events + marks
        # An engine that begins its stream at once still has the prompt to read: no content, no word.
        if frames or (not self._silent and (scanner.events != events or not scanner.whole)):
            self._progress(now)
        self._note(out, frames, now)

    def _hold(self, body: bytes) -> None:
        """Keep a piece of an answer that is handed over whole."""
        self._answer.append(body)
        self._answer_left -= len(body)
        if self._answer_left < 0:
            self._answer.clear()
            self._end(MalformedError("the answer is too large"))

    def _note(self, out: bytes, frames: int, now: InstantNs) -> None:
        """Count frames, and give what may go on."""
        if frames and self._meter is not None:
            self._meter.note(now, frames)
        if out:
            self._give(out, frames)

    def _progress(self, now: InstantNs) -> None:
        """Something came that ends a wait."""
        if self._silent:
            self._silent = False
            self._await(now)
        else:
            self._watch.last = now

    def _await(self, now: InstantNs) -> None:
        """Wait for the engine's first or next word from now on."""
        if self._silent:
            self._watch.expect(Wait.FIRST_BYTE, self._timeouts.first_byte_ns, now)
        else:
            self._watch.expect(Wait.GAP, self._timeouts.gap_ns, now)

    def _give(self, data: bytes, frames: int) -> None:
        """Hand over, or hold for a listener that pauses."""
        if self.paused_since is None and not self._queue:
            self._listener.on_frames(data, frames)
            return
        self._queue.append((data, frames))
        self.queued += len(data)
        if self.queued >= QUEUE_HIGH and self._connection is not None:
            self._connection.pause()
            self._watch.suspend()

    def _hand_over(self) -> None:
        """Hand over one piece of what is held."""
        pieces: list[bytes] = []
        size = frames = 0
        for data, count in self._queue:
            if size >= QUEUE_LOW:
                break
            pieces.append(data)
            size += len(data)
            frames += count
        del self._queue[: len(pieces)]
        self.queued -= size
        connection = self._connection
        if connection is not None and connection.is_paused and self.queued < QUEUE_LOW:
            self._await(self._clock.now())
            connection.resume()
        self._listener.on_frames(b"".join(pieces), frames)

    def _is_held(self) -> bool:
        """Whether nothing may be handed over: the listener paused, or wants no more."""
        return self._over or self.paused_since is not None

    # Its end ----------------------------------------------------------------------------------

    def _complete(self) -> None:
        """All of the answer came."""
        self._disconnect(reusable=self._response.reusable)
        if self._scanner is None:
            self._complete_whole()
            self._end(None)
        else:
            self._end(self._complete_stream(self._scanner))

    def _complete_whole(self) -> None:
        """Hand over an answer without frames."""
        body = b"".join(self._answer)
        self._answer.clear()
        if self._response.status == _OK:
            self._usage = usage_of(self._route, body)
        if body:
            self._give(body, 0)

    def _complete_stream(self, scanner: Scanner) -> UpstreamError | None:
        """Hand over the last of a stream, if it ended as it should; return what it ended with."""
        frames = scanner.frames
        tail = scanner.finish(framed=not self._response.until_close)
        self._note(tail, scanner.frames - frames, self._clock.now())
        if scanner.fault is not None:
            return ReportedError(scanner.fault)
        return CutError("the stream ended before its end mark") if scanner.cut else None

    def _silence(self, wait: Wait) -> None:
        self._end(SilentError(wait))

    def _end(self, error: UpstreamError | None) -> None:
        """Let go of the connection, and tell once all that came is handed over."""
        if self._over or self._result is not None:
            return
        self._let_go(reusable=False)
        scanner = self._scanner
        result = Result(
            error=error,
            status=self._response.status if self._response.headed else 0,
            attempts=self.attempts,
            reused=self._reused,
            whole=scanner is None or scanner.whole,
            frames=0 if scanner is None else scanner.frames,
            done=scanner is not None and scanner.done,
            usage=self._usage if scanner is None else scanner.usage,
        )
        if self._queue:
            self._result = result
        else:
            self._conclude(result)

    def _conclude(self, result: Result) -> None:
        if not self._queue and not self._over:
            self._over = True
            self._listener.on_end(result)

    def _let_go(self, *, reusable: bool) -> None:
        self._watch.stop()
        self._response.drop()
        self._disconnect(reusable=reusable)

    def _disconnect(self, *, reusable: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            self._keeper.withdraw(self)
            return
        connection.user = None
        self._keeper.release(connection, reusable=reusable and connection.is_sent)


def _is_events(value: bytes) -> bool:
    """Return whether a content type is that of an event stream."""
    return value.partition(b";")[0].strip().lower() == b"text/event-stream"
