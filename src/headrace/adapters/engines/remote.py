"""A real engine behind HTTP, any that speaks OpenAI's words: attempts over its pool, and its health.

Knows no vendor: what kinds differ in is in their table. It is up once it answers `/health` (or anything
below 500 there: not all serve it), takes our key and made a token, and down once it cannot be reached,
refuses the key, has no model of that name, or three probes in a row end otherwise. Whether it takes the key, an empty request tells:
it is refused for that, or for the key.
"""

import logging
import secrets

import msgspec
from msgspec import Struct

from headrace.adapters.engines.detect import Detection
from headrace.adapters.engines.exposition import Load
from headrace.adapters.engines.fetch import Answer, Fetch, brief, look
from headrace.adapters.engines.kinds import KINDS, Feature, Traits
from headrace.adapters.engines.listed import MODELS_PATH, is_listed, is_unserved
from headrace.adapters.engines.outgoing import edited, marked
from headrace.adapters.engines.overload import is_full
from headrace.adapters.engines.scrape import Scrape
from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.exchange import Exchange, Result, Timeouts
from headrace.adapters.upstream.response import Headers
from headrace.adapters.upstream.usage import EachUsage
from headrace.model.engine import EngineKind
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName
from headrace.model.meter import Meter, StreamTiming
from headrace.model.slo import Outcome
from headrace.ports.clock import Clock
from headrace.ports.engine import Call, Ending, Listener, Refusal, Route
from headrace.ports.upstream import (
    CutError,
    LostError,
    PoolFullError,
    UnreachableError,
    UpstreamError,
)
from headrace.units import NS_PER_S, DurationNs, InstantNs, later

LOG = "headrace.engines"
"""Where engines are told to be ready, and why they are not."""
_log = logging.getLogger(LOG)
PROBE_NS = DurationNs(NS_PER_S)
"""Between two looks at an engine's health. 1 s: a dead one gets no newcomers a second later."""
_EMPTY = b"{}"
_EARLY_NS = DurationNs(NS_PER_S // 10)
"""By so much a look may come before its time: polls come once a second, some a little early, and one that
is missed is a second lost."""
FAILURES = 3
"""Probes in a row that end in an error or in silence, before an engine counts as down. A name that
cannot be looked up is one of them: resolvers fail for a moment, and open connections go on."""
DENIED_NS = DurationNs(10 * NS_PER_S)
"""Between two looks at an engine that refuses our key. 10 s: engines count wrong keys too."""
_AGAIN_NS = DurationNs(60 * NS_PER_S)
_OK, _REFUSED, _BROKEN, _TOO_MANY = 200, 400, 500, 429
_DENIED = frozenset({401, 403})
"""Answers that blame our key, if an empty request gets them too."""
_NO_SERVER = frozenset({405, 501})
"""Answers to an empty chat of servers that have no such thing, whatever else they say."""
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
        kind: EngineKind | None = EngineKind.OPENAI,
        priority: bool = False,
        continuous_usage: bool | None = None,
        incarnation: int = 0,
        proven: bool = False,
    ) -> None:
        """Know a server; `model` is its own name of it, `incarnation` its last life.

        `kind` None: it is found out. `priority`: it was started to run requests by theirs.
        `continuous_usage`: it takes `stream_options.continuous_usage_stats`; None: as its kind does.
        `proven`: whoever started it has seen it serve, so that it is up at once, without a probe.
        """
        self.name, self.pool = name, pool
        self.incarnation = Incarnation(incarnation)
        self.upstream = upstream
        self._clock, self.model = clock, model
        self._timeouts = Timeouts(first_byte_ns=patience.first_byte_ns, gap_ns=patience.gap_ns)
        self._mark = f"headrace-{secrets.token_hex(6)}".encode()
        self._listener: Listener | None = None
        self._flights: dict[AttemptId, _Flight] = {}
        self._kind, self._priority, self._continuous = kind, priority, continuous_usage
        self._probe: Fetch | Detection | None = None
        self._probe_at, self._closed = InstantNs(0), False
        self._failures = 0
        self._doubted, self._denied = True, False  # whether our key is to be tried, and was refused
        self._stranger = False  # it said that it has no model of this name: to be made sure of
        self._undetected, self._detect_at = 0, InstantNs(0)
        self._proven = proven
        self._fault, self._told_at = "", InstantNs(-_AGAIN_NS)
        self._scrape = Scrape(name, upstream, clock, self._loaded)
        self.tells_first = False
        """An unstreamed answer comes whole."""
        self.is_up = False
        """Whether it serves, as far as is known."""
        self.trouble: str | None = None
        """Why it does not serve, once that is known."""

    @property
    def traits(self) -> Traits:
        """What it is able to do; as little as any, until its kind is known."""
        return KINDS[self._kind or EngineKind.OPENAI]

    @property
    def missing(self) -> tuple[str, ...]:
        """What of its load it should tell and does not."""
        return self._scrape.missing

    def connect(self, listener: Listener) -> None:
        """Say who listens; it is up after the first probe that finds it so, or at once if proven."""
        self._listener = listener
        if self._proven:
            self._rise()

    def submit(self, call: Call) -> None:
        """Start an attempt."""
        flight = _Flight(self, call)
        self._flights[call.dispatch.attempt] = flight
        ask, each_usage = call.ask, self._each_usage(call)
        headers = [(b"x-request-id", b"%s-%012d" % (self._mark, call.dispatch.attempt))]
        if ask.session is not None:
            headers.append((b"x-session-id", ask.session))
        flight.exchange = self.upstream.ask(
            ask.route,
            self._body(call, continuous=each_usage is EachUsage.WE),
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
        """Look after its health, about once in `PROBE_NS`, and ask for its load."""
        if self._clock.now() >= self._probe_at:
            self._look()
        if self.is_up and not self._closed:
            self._scrape.ask(self.traits)

    def _look(self) -> None:
        """Look after its health, unless that is under way."""
        now = self._clock.now()
        if self._probe is None and not self._closed:
            self._probe_at = later(now, PROBE_NS - _EARLY_NS)
            path = self.traits.health_path
            self._probe = look(self.upstream, self._clock, path, self._probed)

    def close(self) -> None:
        """Close every connection."""
        self._let_go()
        if self._probe is not None:
            self._probe.abort()
        self._probe, self._closed = None, True
        self.upstream.close()

    def _each_usage(self, call: Call) -> EachUsage:
        """Return who wants the usage in every frame; of several answers, each tells but its own."""
        if call.request.fan_out != 1:
            return EachUsage.NOBODY
        if call.ask.each_usage_shown:
            return EachUsage.CALLER
        takes = self._continuous
        if takes is None:
            takes = self.traits.has(Feature.CONTINUOUS_USAGE)
        return EachUsage.WE if takes and call.ask.stream else EachUsage.NOBODY

    def _body(self, call: Call, *, continuous: bool) -> bytes:
        """Return what is sent: the caller's words, as this engine must be told them."""
        marks = marked(
            call.dispatch,
            self._clock.now(),
            priority=self.traits.priority if self._priority else None,
            metadata=self.traits.has(Feature.METADATA),
        )
        return edited(call.ask, call.dispatch, self.model, marks, continuous=continuous)

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
            if isinstance(error, CutError | LostError):
                self._look()  # one request's bad luck, or the end of them all

    def doubt(self) -> None:
        """It refused a request as if our key were wrong: ask once the next probe is over."""
        self._doubted = True

    def doubt_model(self) -> None:
        """It refused a request as if it had no such model: look at once whether it lists it."""
        self._doubted = self._stranger = True
        self._look()

    def _probed(self, answer: Answer) -> None:
        """A look at its health is over."""
        self._probe = None
        if isinstance(answer.error, PoolFullError):
            return  # all connections are at work: it lives
        if answer.error is None and answer.status < _BROKEN:
            self._failures = 0
            if answer.status in _DENIED:
                self._deny(answer.status)
            elif self._doubted or not self.is_up or self._detects():
                self._probe = Fetch(
                    lambda listener: self.upstream.ask(
                        Route.CHAT, _EMPTY, listener, timeouts=brief(self._clock)
                    ),
                    self._keyed,
                )
            return
        self._failures += 1
        fault = str(answer.error or f"its health is {answer.status}")
        self.note(fault)
        if self._failures >= FAILURES or isinstance(answer.error, UnreachableError):
            self._fall(fault)

    def _keyed(self, answer: Answer) -> None:
        """An empty request was refused: for its want of content, or of the right key."""
        self._probe = None
        if isinstance(answer.error, UnreachableError):
            self._fall(str(answer.error))
        elif answer.error is None and answer.status in _DENIED:
            self._deny(answer.status)
        elif answer.error is None and answer.status in _NO_SERVER:
            fault = f"it answers a chat with {answer.status}: is this an engine?"
            self.note(fault)
            self._fall(fault)
        elif answer.error is None and answer.status != _TOO_MANY:
            self._doubted = self._denied = False
            self._try()
        elif self._denied:  # this tells nothing new
            self._probe_at = later(self.now(), DENIED_NS)
        else:
            self._try()

    def _deny(self, status: int) -> None:
        self._doubted = self._denied = True
        self._probe_at = later(self.now(), DENIED_NS)
        fault = f"it refuses our key, with {status}: see `key_env` of its upstream"
        self.note(fault)
        self._fall(fault)

    def _try(self) -> None:
        """It says that it is well: find out what it is, and have it make a token before it is up."""
        if self._stranger:
            self._list(None)
        elif self._detects():
            self._probe = Detection(self.upstream, self._clock, self._detected)
        elif self.is_up:
            return
        elif self.traits.ready_by_token:
            self._probe = Fetch(
                lambda listener: self.upstream.ask(
                    Route.COMPLETIONS,
                    _first_question(self.model),
                    listener,
                    timeouts=self._timeouts,
                ),
                self._tasted,
            )
        else:
            self._rise()

    def _detects(self) -> bool:
        """Return whether it is time to find out what it is."""
        return self._kind is None and self.now() >= self._detect_at

    def _detected(self, kind: EngineKind | None) -> None:
        """What it is was found out, or whatever would tell failed: then it is asked again and again.

        It may rise meanwhile, as little as any is known of.
        """
        self._probe, self._kind = None, kind
        if kind is not None:
            _log.info("engine %s is taken for %s", self.name, kind)
            self._try()
            return
        self._undetected += 1
        self._troubled("its kind cannot be told: what tells it fails")
        if self._undetected >= FAILURES:
            self._detect_at = later(self.now(), _AGAIN_NS)
            self._try()

    def _tasted(self, answer: Answer) -> None:
        """It made a token, or does not complete texts at all; else it is not ready, whatever it says."""
        self._probe = None
        if answer.error is not None or answer.status >= _BROKEN:
            self._troubled(f"no token yet: {answer.error or f'it answers {answer.status}'}")
        elif answer.status < _REFUSED:
            self._rise()
        else:
            self._list(answer)

    def _list(self, refusal: Answer | None) -> None:
        """Ask which models it has: it refused the first question, or a request."""
        self._probe = look(
            self.upstream, self._clock, MODELS_PATH, lambda listed: self._listed(listed, refusal)
        )

    def _listed(self, answer: Answer, refusal: Answer | None) -> None:
        """It told its models, or not; where it does not, what it said when it refused counts."""
        self._probe = None
        listed = is_listed(answer, self.model)
        if listed is None and refusal is not None:
            listed = not is_unserved(refusal.status, refusal.body, self.model)
        self._doubted = self._stranger = listed is False
        if listed is False:
            fault = f"it has no model named {self.model!r}"
            self.note(fault)
            self._fall(fault)
        elif refusal is None:
            self._try()
        else:
            self._rise()

    def _troubled(self, why: str) -> None:
        """It is not ready, for a reason that operators are told."""
        self.note(why)
        if not self.is_up:
            self.trouble = why

    def _rise(self) -> None:
        self.is_up, self.trouble = True, None
        self._fault = ""  # whatever ends this life is news
        _log.info("engine %s: ready", self.name)
        self.incarnation = Incarnation(self.incarnation + 1)
        self.tell.up(self)

    def _loaded(self, load: Load, asked_at: InstantNs) -> None:
        """It told its load."""
        self.tell.reported(load.snapshot(self.name, self.incarnation, asked_at))

    def _fall(self, why: str) -> None:
        self.trouble = why
        if not self.is_up:
            return
        self.is_up = False
        self._undetected, self._detect_at = 0, InstantNs(0)
        self._let_go()
        self.tell.down(self)

    def _let_go(self) -> None:
        """Stop every attempt and forget it; ask for no load."""
        self._scrape.stop()
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
        body, model = self._body, self._engine.model
        unserved = error is None and is_unserved(self._status, body or b"", model)
        if complete and self._status == _OK and body != b"":
            outcome = Outcome.SUCCESS
            if body is not None:
                self._hand_whole(body, result)
        elif error is None and self._status in _BLAMED and not unserved:
            refusal = Refusal(status=self._status, body=body or b"")
        else:
            more = " with nothing" * (self._status == _OK) + ": no such model" * unserved
            self._engine.note(str(error or f"it answers {self._status}{more}"))
            if error is None and self._status in _DENIED:
                self._engine.doubt()
        ending = Ending(
            outcome=outcome,
            usage=result.usage,
            timing=_timing(self._meter, result),
            refusal=refusal,
            whole=result.whole,
            full=not self._meter.tokens and is_full(self._status, error),
        )
        self._engine.over(self._attempt, ending, error)
        if unserved:
            self._engine.doubt_model()

    def _hand_whole(self, body: bytes, result: Result) -> None:
        """Hand an answer over that came in one piece; its tokens are seen all at once."""
        made = 1 if result.usage is None else max(1, result.usage.output_tokens)
        self._meter.note(self._engine.now(), made)
        self._engine.tell.produced(self._attempt, body)


def _timing(meter: Meter, result: Result) -> StreamTiming:
    """Return what a stream looked like, in the engine's own count of its tokens where that is larger."""
    return meter.timing().counted(0 if result.usage is None else result.usage.output_tokens)


def _first_question(model: str) -> bytes:
    """Return what is asked of an engine before it counts as up."""
    return msgspec.json.encode({"model": model, "prompt": "Hello", "max_tokens": 1})
