"""A real engine behind HTTP, any that speaks OpenAI's words: attempts over its pool, and its health.

Knows no vendor. It is up once it answers `/health` (or anything below 500 there: not all serve it) and
takes our key, and down once it cannot be reached, refuses the key, or three probes in a row end
otherwise. Whether it takes the key, an empty request tells: it is refused for that, or for the key.
"""

import logging
import secrets
from collections.abc import Callable

from msgspec import Struct

from headrace.adapters.engines.outgoing import edited
from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.exchange import Exchange, Result, Timeouts
from headrace.adapters.upstream.response import Headers
from headrace.adapters.upstream.usage import EachUsage
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName
from headrace.model.meter import NO_STREAM
from headrace.model.slo import Outcome
from headrace.ports.clock import Clock
from headrace.ports.engine import Call, Ending, Listener, Refusal, Route
from headrace.ports.upstream import PoolFullError, UnreachableError, UpstreamError
from headrace.units import NS_PER_S, DurationNs, InstantNs, later

LOG = "headrace.engines"
"""Where engines are told to be ready, and why they are not."""
_log = logging.getLogger(LOG)
PROBE_NS = DurationNs(NS_PER_S)
"""Between two looks at an engine's health. 1 s: a dead one gets no newcomers a second later."""
_EMPTY = b"{}"
_PROBE_WAIT_NS = DurationNs(2 * NS_PER_S)
FAILURES = 3
"""Probes in a row that end in an error or in silence, before an engine counts as down. A name that
cannot be looked up is one of them: resolvers fail for a moment, and open connections go on."""
DENIED_NS = DurationNs(10 * NS_PER_S)
"""Between two looks at an engine that refuses our key. 10 s: engines count wrong keys too."""
_AGAIN_NS = DurationNs(60 * NS_PER_S)
_OK, _BROKEN, _TOO_MANY = 200, 500, 429
_DENIED = frozenset({401, 403})
"""Answers that blame our key, if an empty request gets them too."""
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
        continuous_usage: bool = False,
        incarnation: int = 0,
    ) -> None:
        """Know a server, not yet up; `model` is its own name of it, `incarnation` its last life.

        `continuous_usage`: it takes `stream_options.continuous_usage_stats`.
        """
        self.name, self.pool = name, pool
        self.incarnation = Incarnation(incarnation)
        self.upstream = upstream
        self._clock, self.model = clock, model
        self._continuous = continuous_usage
        self._timeouts = Timeouts(first_byte_ns=patience.first_byte_ns, gap_ns=patience.gap_ns)
        self._mark = f"headrace-{secrets.token_hex(6)}".encode()
        self._listener: Listener | None = None
        self._flights: dict[AttemptId, _Flight] = {}
        self._probe: _Probe | None = None
        self._probe_at = InstantNs(0)
        self._failures = 0
        self._doubted, self._denied = True, False  # whether our key is to be tried, and was refused
        self._fault, self._told_at = "", InstantNs(-_AGAIN_NS)
        self.tells_first = False
        """An unstreamed answer comes whole."""
        self.is_up = False
        """Whether it serves, as far as is known."""
        self.trouble: str | None = None
        """Why it does not serve, once that is known."""

    def connect(self, listener: Listener) -> None:
        """Say who listens; it is up after the first probe that finds it so."""
        self._listener = listener

    def submit(self, call: Call) -> None:
        """Start an attempt."""
        flight = _Flight(self, call)
        self._flights[call.dispatch.attempt] = flight
        ask, each_usage = call.ask, EachUsage.NOBODY
        if call.request.fan_out == 1:  # of several answers, each tells but its own
            if ask.each_usage_shown:
                each_usage = EachUsage.CALLER
            elif self._continuous and ask.stream:
                each_usage = EachUsage.WE
        headers = [(b"x-request-id", b"%s-%012d" % (self._mark, call.dispatch.attempt))]
        if ask.session is not None:
            headers.append((b"x-session-id", ask.session))
        flight.exchange = self.upstream.ask(
            ask.route,
            edited(ask, call.dispatch, self.model, continuous=each_usage is EachUsage.WE),
            flight,
            hide_usage=not ask.usage_shown,
            each_usage=each_usage,
            timeouts=self._timeouts,
            meter=call.meter,
            headers=tuple(headers),
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
            self._probe = _Probe(self._probed)
            self._probe.exchange = self.upstream.get("/health", self._probe, self._waits())

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
            self._fall(str(error))
        else:
            flight = self._flights.pop(attempt, None)
            if flight is not None:
                del flight.exchange
            self.tell.ended(attempt, ending)

    def doubt(self) -> None:
        """It refused a request as if our key were wrong: ask once the next probe is over."""
        self._doubted = True

    def _probed(self, result: Result) -> None:
        """A look at its health is over."""
        self._probe = None
        if isinstance(result.error, PoolFullError):
            return  # all connections are at work: it lives
        if result.error is None and result.status < _BROKEN:
            self._failures = 0
            if result.status in _DENIED:
                self._deny(result.status)
            elif self._doubted or not self.is_up:
                self._probe = _Probe(self._keyed)
                self._probe.exchange = self.upstream.ask(
                    Route.CHAT, _EMPTY, self._probe, timeouts=self._waits()
                )
            return
        self._failures += 1
        fault = str(result.error or f"its health is {result.status}")
        self.note(fault)
        if self._failures >= FAILURES or isinstance(result.error, UnreachableError):
            self._fall(fault)

    def _keyed(self, result: Result) -> None:
        """An empty request was refused: for its want of content, or of the right key."""
        self._probe = None
        if isinstance(result.error, UnreachableError):
            self._fall(str(result.error))
        elif result.error is None and result.status in _DENIED:
            self._deny(result.status)
        elif result.error is None and result.status != _TOO_MANY:
            self._doubted = self._denied = False
            self._rise()
        elif self._denied:  # this tells nothing new
            self._probe_at = later(self.now(), DENIED_NS)
        else:
            self._rise()

    def _deny(self, status: int) -> None:
        self._doubted = self._denied = True
        self._probe_at = later(self.now(), DENIED_NS)
        fault = f"it refuses our key, with {status}: see `key_env` of its upstream"
        self.note(fault)
        self._fall(fault)

    def _rise(self) -> None:
        if self.is_up:
            return
        self.is_up, self.trouble = True, None
        _log.info("engine %s: ready", self.name)
        self.incarnation = Incarnation(self.incarnation + 1)
        self.tell.up(self)

    def _fall(self, why: str) -> None:
        self.trouble = why
        if not self.is_up:
            return
        self.is_up = False
        self._let_go()
        self.tell.down(self)

    def _waits(self) -> Timeouts:
        """Return how long a probe that starts now may take."""
        end = later(self.now(), DurationNs(2 * _PROBE_WAIT_NS))
        return Timeouts(first_byte_ns=_PROBE_WAIT_NS, deadline=end)

    def _let_go(self) -> None:
        """Stop every attempt and forget it."""
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.abort()


class _Flight:
    """One attempt under way; it and its exchange know each other until then, and no longer."""

    __slots__ = ("_attempt", "_body", "_engine", "_meter", "_status", "exchange")

    exchange: Exchange

    def __init__(self, engine: RemoteEngine, call: Call) -> None:
        self._engine, self._attempt, self._meter = engine, call.dispatch.attempt, call.meter
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
            self._engine.tell.produced(self._attempt, data)
        else:
            self._body += data

    def on_end(self, result: Result) -> None:
        error = result.error
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
            if error is None and self._status in _DENIED:
                self._engine.doubt()
        ending = Ending(
            outcome=outcome,
            usage=result.usage,
            timing=NO_STREAM,
            refusal=refusal,
            whole=result.whole,
        )
        self._engine.over(self._attempt, ending, error)

    def _hand_whole(self, body: bytes, result: Result) -> None:
        """Hand an answer over that came in one piece; its tokens are seen all at once."""
        made = 1 if result.usage is None else max(1, result.usage.output_tokens)
        self._meter.note(self._engine.now(), made)
        self._engine.tell.produced(self._attempt, body)


class _Probe:
    """One look at an engine."""

    __slots__ = ("_told", "exchange")

    exchange: Exchange

    def __init__(self, told: Callable[[Result], None]) -> None:
        self._told = told

    def on_head(self, status: int, headers: Headers) -> None:
        pass

    def on_frames(self, data: bytes, frames: int) -> None:
        pass

    def on_end(self, result: Result) -> None:
        del self.exchange
        self._told(result)
