"""A real engine behind HTTP, any that speaks OpenAI's words: attempts over its pool, and its health.

Knows no vendor. It is up once it answers `/health` (or anything below 500 there: not all serve it),
and down once it cannot be reached, or three probes in a row end otherwise.
"""

import logging
import secrets

from msgspec import Struct

from headrace.adapters.engines.outgoing import edited
from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.exchange import Exchange, Result, Timeouts
from headrace.adapters.upstream.response import Headers
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName
from headrace.model.meter import NO_STREAM
from headrace.model.slo import Outcome
from headrace.ports.clock import Clock
from headrace.ports.engine import Call, Ending, Listener, Refusal
from headrace.ports.upstream import PoolFullError, UnreachableError, UpstreamError
from headrace.units import NS_PER_S, DurationNs, InstantNs, later

_log = logging.getLogger(__name__)
PROBE_NS = DurationNs(NS_PER_S)
"""Between two looks at an engine's health. 1 s: a dead one gets no newcomers a second later."""
_PROBE_WAIT_NS = DurationNs(2 * NS_PER_S)
FAILURES = 3
"""Probes in a row that end in an error or in silence, before an engine counts as down."""
_AGAIN_NS = DurationNs(60 * NS_PER_S)
_OK, _BROKEN = 200, 500
_BLAMED = frozenset({400, 404, 413, 422})
"""Answers that blame the request: the caller gets them as they stand. Others are between us and the
engine (its key, its limits, its bugs), and nobody else's business."""


class Patience(Struct, frozen=True, kw_only=True):
    """How long an engine may stay silent."""

    first_byte_ns: DurationNs
    gap_ns: DurationNs


class RemoteEngine:
    """One server, through all of its lives."""

    def __init__(  # noqa: PLR0913 - what a server is known by
        self,
        name: ReplicaName,
        pool: PoolName,
        upstream: Upstream,
        clock: Clock,
        *,
        model: str,
        patience: Patience,
        incarnation: int = 0,
        proven: bool = False,
    ) -> None:
        """Know a server; `model` is its own name of it, `incarnation` its last life.

        `proven`: whoever started it has seen it serve, so that it is up at once, without a probe.
        """
        self.name, self.pool = name, pool
        self.incarnation = Incarnation(incarnation)
        self.upstream = upstream
        self._clock, self._model = clock, model
        self._timeouts = Timeouts(first_byte_ns=patience.first_byte_ns, gap_ns=patience.gap_ns)
        self._mark = f"headrace-{secrets.token_hex(6)}".encode()
        self._listener: Listener | None = None
        self._flights: dict[AttemptId, _Flight] = {}
        self._probe: _Probe | None = None
        self._probe_at = InstantNs(0)
        self._failures = 0
        self._proven = proven
        self._fault, self._told_at = "", InstantNs(-_AGAIN_NS)
        self.tells_first = False
        """An unstreamed answer comes whole."""
        self.is_up = False
        """Whether it serves, as far as is known."""

    def connect(self, listener: Listener) -> None:
        """Say who listens; it is up after the first probe that finds it so, or at once if proven."""
        self._listener = listener
        if self._proven:
            self._rise()

    def submit(self, call: Call) -> None:
        """Start an attempt."""
        flight = _Flight(self, call)
        self._flights[call.dispatch.attempt] = flight
        ask = call.ask
        flight.exchange = self.upstream.ask(
            ask.route,
            edited(ask, call.dispatch, self._model),
            flight,
            hide_usage=not ask.usage_shown,
            timeouts=self._timeouts,
            meter=call.meter,
            headers=((b"x-request-id", b"%s-%012d" % (self._mark, call.dispatch.attempt)),),
        )

    def abort(self, attempt: AttemptId) -> None:
        """Stop an attempt: its connection is closed, which engines take as a cancel."""
        flight = self._flights.pop(attempt, None)
        if flight is not None:
            flight.abort()

    def pause(self, attempt: AttemptId) -> None:
        """Hold the engine back once enough is queued."""
        if (flight := self._flights.get(attempt)) is not None:
            flight.exchange.pause()

    def resume(self, attempt: AttemptId) -> None:
        """Go on."""
        if (flight := self._flights.get(attempt)) is not None:
            flight.exchange.resume()

    def poll(self) -> None:
        """Look after its health, at most once in `PROBE_NS`."""
        now = self._clock.now()
        if self._probe is None and now >= self._probe_at:
            self._probe_at = later(now, PROBE_NS)
            self._probe = _Probe(self)
            waits = Timeouts(
                first_byte_ns=_PROBE_WAIT_NS, deadline=later(now, DurationNs(2 * _PROBE_WAIT_NS))
            )
            self._probe.exchange = self.upstream.get("/health", self._probe, waits)

    def close(self) -> None:
        """Close every connection."""
        self._let_go()
        if self._probe is not None:
            self._probe.exchange.abort()
        self._probe, self._probe_at = None, InstantNs(1 << 62)
        self.upstream.close()

    # What is found ------------------------------------------------------------------------------

    @property
    def tell(self) -> Listener:
        """Who listens."""
        assert self._listener is not None, "connect first"
        return self._listener

    def now(self) -> InstantNs:
        """Return the present instant."""
        return self._clock.now()

    def note(self, fault: str) -> None:
        """Tell operators what keeps it from answering: the same once a minute, another once a second."""
        now = self.now()
        if now >= later(self._told_at, DurationNs(NS_PER_S) if fault != self._fault else _AGAIN_NS):
            self._fault, self._told_at = fault, now
            _log.warning("engine %s: %s", self.name, fault)

    def over(self, attempt: AttemptId, ending: Ending, error: UpstreamError | None) -> None:
        """An attempt ended; one that found nobody there takes the engine down, and ends with it.

        Told to have ended first, it would have the next one sent after it.
        """
        if isinstance(error, UnreachableError) and self.is_up:
            self._fall()
        else:
            flight = self._flights.pop(attempt, None)
            if flight is not None:
                del flight.exchange
            self.tell.ended(attempt, ending)

    def probed(self, result: Result) -> None:
        """A probe is over."""
        self._probe = None
        if isinstance(result.error, PoolFullError):
            return  # all connections are at work: it lives
        if result.error is None and result.status < _BROKEN:
            self._failures = 0
            if not self.is_up:
                self._rise()
            return
        self._failures += 1
        self.note(str(result.error or f"its health is {result.status}"))
        if self._failures >= FAILURES or isinstance(result.error, UnreachableError):
            self._fall()

    def _rise(self) -> None:
        self.is_up = True
        self.incarnation = Incarnation(self.incarnation + 1)
        self.tell.up(self)

    def _fall(self) -> None:
        if not self.is_up:
            return
        self.is_up = False
        self._let_go()
        self.tell.down(self)

    def _let_go(self) -> None:
        """Stop every attempt and forget it."""
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.abort()


class _Flight:
    """One attempt under way; it and its exchange know each other until then, and no longer."""

    __slots__ = ("_body", "_call", "_engine", "_status", "exchange")

    exchange: Exchange

    def __init__(self, engine: RemoteEngine, call: Call) -> None:
        self._engine, self._call = engine, call
        self._status = 0
        self._body: bytes | None = None

    def abort(self) -> None:
        self.exchange.abort()
        del self.exchange

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        if status != _OK or not any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        ):
            self._body = b""

    def on_frames(self, data: bytes, frames: int) -> None:  # noqa: ARG002 - the meter has them
        if self._body is None:
            self._engine.tell.produced(self._call.dispatch.attempt, data)
        else:
            self._body += data

    def on_end(self, result: Result) -> None:
        attempt, error = self._call.dispatch.attempt, result.error
        outcome, refusal = Outcome.ERROR, None
        # After the end mark its caller has all of it, however the connection ends.
        complete = error is None or result.done
        if complete and self._status == _OK:
            outcome = Outcome.SUCCESS
            if self._body is not None:
                self._hand_whole(self._body, result)
        elif error is None and self._status in _BLAMED:
            refusal = Refusal(status=self._status, body=self._body or b"")
        else:
            self._engine.note(str(error or f"it answers {self._status}"))
        ending = Ending(
            outcome=outcome,
            usage=result.usage,
            timing=NO_STREAM,
            refusal=refusal,
            whole=result.whole,
        )
        self._engine.over(attempt, ending, error)

    def _hand_whole(self, body: bytes, result: Result) -> None:
        """Hand an answer over that came in one piece; its tokens are seen all at once."""
        made = 1 if result.usage is None else max(1, result.usage.output_tokens)
        self._call.meter.note(self._engine.now(), made)
        self._engine.tell.produced(self._call.dispatch.attempt, body)


class _Probe:
    """One look at an engine's health."""

    __slots__ = ("_engine", "exchange")

    exchange: Exchange

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def on_head(self, status: int, headers: Headers) -> None:
        pass

    def on_frames(self, data: bytes, frames: int) -> None:
        pass

    def on_end(self, result: Result) -> None:
        del self.exchange
        self._engine.probed(result)
