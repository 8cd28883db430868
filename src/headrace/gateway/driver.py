"""Runs the plane live: events in from callers, engines and the clock, effects out to them.

Callbacks give the plane their events directly; effects are carried out after `handle` returned, and
events that come meanwhile wait their turn, so the plane is never re-entered. One timer wakes it all.
A plane that fails an assertion is never asked again: everybody is told, and the process ends.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from headrace.gateway.errors import Edge, Fault, edge
from headrace.gateway.flights import Flight, Flights
from headrace.gateway.hand import Hand, Idle, opening
from headrace.gateway.limits import turned_away
from headrace.gateway.past import Past
from headrace.gateway.roster import Roster
from headrace.gateway.shadow import Shadow
from headrace.gateway.stream import Cut, Done, Left, Stream
from headrace.model.effect import Cancel, Concluded, Decided, Dispatch, Effect, Fail, Refuse
from headrace.model.engine import Snapshot
from headrace.model.event import (
    CallerLeft,
    ConfigChanged,
    Ended,
    Event,
    FirstToken,
    GroupTold,
    ProgressTick,
    ReplicaDown,
    ReplicaDraining,
    ReplicaForgot,
    ReplicaReported,
    ReplicaUp,
    RequestArrived,
    RequestDeferred,
    Restarted,
    ScaleFrozen,
    ShutDown,
    TimerDue,
    WallTold,
)
from headrace.model.evidence import DecisionRecord, EntryRecord
from headrace.model.ids import AttemptId, ReplicaName, RequestId, TenantId
from headrace.model.meter import Meter
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.plane.journal import SEGMENT_BYTES, Recorder
from headrace.policy.catalog import PlaneConfig, canonical
from headrace.ports.clock import Clock, Timer
from headrace.ports.engine import Ask, Call, Ending, EngineClient
from headrace.ports.journal import Journal
from headrace.units import NS_PER_MS, DurationNs, InstantNs, later, ms, sooner

TICK_NS = DurationNs(100 * NS_PER_MS)
"""Progress of all streams is told at multiples of this, live and simulated alike."""
RECENT = 1_000
"""Requests that the live table shows after they ended."""
_log = logging.getLogger(__name__)


class Driver:
    """Owns the plane, its time and the streams of all callers."""

    def __init__(  # noqa: PLR0913 - the neighbours it stands between
        self,
        clock: Clock,
        engines: Sequence[EngineClient],
        *,
        journal: Journal | None = None,
        past: Past | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        decided: Callable[[DecisionRecord], None] | None = None,
        concluded: Callable[[Concluded], None] | None = None,
        on_broken: Callable[[], None] | None = None,
        shadow: Shadow | None = None,
    ) -> None:
        """Stand between callers and engines.

        `past`: earlier lives of the journal, from which this one goes on. `decided` gets each
        decision, `concluded` each request that is over; `on_broken` is called when the plane has
        failed and the process must end. `shadow` sees every event after the plane.
        """
        past = past or Past()
        self.plane, self._epoch = past.plane, past.epoch
        self._handle = self.plane.handle
        self._segment_bytes = segment_bytes
        self._recorder: Recorder | None = None
        if journal is not None:
            self.record(journal, resumed=past.epoch > 0)
        self._clock, self._decided, self._on_broken = clock, decided, on_broken
        self._concluded = concluded
        self.shadow = shadow
        """What decides beside the plane without effect, if anything does."""
        self.hand: Hand = Idle()
        """Who does with groups what the plane wants."""
        self._roster = Roster(engines)
        self._engines = self._roster.engines
        self._last = self.plane.state.now
        self._index = 0
        self._revision = 0
        self._requests = past.first_id
        self._events: deque[Event] = deque()
        self._running = False
        self._timer: Timer | None = None
        self._due: InstantNs | None = None
        self._poll_ns = DurationNs(0)
        self._poll_at: InstantNs | None = None
        self._tick_at: InstantNs | None = None
        self._streams: dict[RequestId, Stream] = {}
        self._flights = Flights()
        self.closed: Fault | None = None
        """What newcomers are told, once it takes none."""
        self.broken: Exception | None = None
        """What the plane failed with."""
        self.recent: deque[Concluded] = deque(maxlen=RECENT)
        """The newest requests that are over, for the live table."""
        self.outcomes: Counter[str] = Counter()
        """Requests that are over, by outcome, or by reason if they were refused."""

    @property
    def engines(self) -> Collection[EngineClient]:
        """Every engine, up or not."""
        return self._engines.values()

    @property
    def live(self) -> int:
        """How many requests wait or run."""
        return len(self._streams)

    @property
    def revision(self) -> int:
        """The policy revision that newcomers are decided on by."""
        return self._revision

    @property
    def draining(self) -> bool:
        """Whether newcomers are refused while who is in goes on."""
        return self.closed is not None and self.broken is None

    @property
    def ready_replicas(self) -> int:
        """How many replicas are ready, of whatever model."""
        return sum(sum(known.fleet.ready.values()) for known in self.plane.state.models.values())

    # What callers' handlers do ----------------------------------------------------------------

    def mint(self) -> RequestId:
        """Return a fresh request id."""
        self._requests += 1
        return RequestId(self._requests)

    def turns_away(self, tenant: TenantId) -> bool:
        """Return whether a tenant's limits refuse whatever it asks for now; it is offered all the same."""
        return turned_away(self.plane, tenant, self._now())

    def offer(self, request: Request, ask: Ask) -> Stream:
        """Ask for an answer; a refusal is the stream's end. What `ask` holds only the engine sees."""
        stream = Stream(request, ask, self._now(), revision=self._revision)
        if self.closed is not None:
            stream.finish(self.closed)
            return stream
        self._streams[request.id] = stream
        self._post(RequestArrived(request))
        return stream

    def defer(self, request: Request) -> None:
        """Tell of a request that was put aside, once; it is offered again as `deferred`."""
        self._post(RequestDeferred(request))

    def leave(self, request: RequestId) -> None:
        """The caller is gone; a request that is over already has nobody to leave."""
        stream = self._streams.get(request)
        if stream is not None and self.broken is None:
            stream.finish(Left())
            self._post(CallerLeft(request, self._flights.shown(stream.attempt)))

    # What engines tell ------------------------------------------------------------------------

    def up(self, engine: EngineClient) -> None:
        """Tell of a replica that is ready."""
        if self.broken is None and engine.name not in self._roster.leaving:
            self._post(
                ReplicaUp(replica=engine.name, incarnation=engine.incarnation, pool=engine.pool)
            )

    def down(self, engine: EngineClient) -> None:
        """Tell of a replica that is gone; the plane fails what it had."""
        lost = self._flights.shown_by(engine)
        self._post(ReplicaDown(replica=engine.name, incarnation=engine.incarnation, timings=lost))

    def produced(self, attempt: AttemptId, data: bytes) -> None:
        """Pass an answer on; its first token is told to the plane, the rest counted for the tick."""
        flight = self._flights.get(attempt)
        if flight is None or self.broken is not None:
            return
        # A whole answer that comes in one piece ends in the same breath: that end says it all.
        if flight.meter.tokens != flight.told and (
            flight.stream.streamed or flight.engine.tells_first
        ):
            self._count(attempt, flight)
        flight.stream.push(data)

    def ended(self, attempt: AttemptId, ending: Ending) -> None:
        """An attempt is over; success completes the answer, the plane says what an error does."""
        flight = self._flights.forget(attempt)
        if flight is None or self.broken is not None:
            return
        if ending.refusal is not None:
            flight.stream.finish(ending.refusal)
        elif ending.full:
            stream = flight.stream
            full = edge(Edge.ENGINE_FULL, decision=stream.decision, revision=stream.revision)
            stream.finish(full)
        elif not ending.whole:
            flight.stream.finish(Cut())
        self._post(
            Ended(
                attempt=attempt,
                outcome=ending.outcome,
                usage=ending.usage,
                timing=ending.timing if ending.timing.tokens else flight.meter.timing(),
            )
        )
        if ending.outcome is Outcome.SUCCESS:
            flight.stream.clocked(self._now())
            flight.stream.finish(Done())
        elif ending.outcome is not Outcome.ERROR:  # of which the plane tells nobody
            flight.stream.finish(flight.stream.fault(Edge.UPSTREAM))

    def reported(self, snapshot: Snapshot) -> None:
        """Pass an engine's report on."""
        self._post(ReplicaReported(snapshot))

    def forgot(self, engine: EngineClient) -> None:
        """Tell of a replica whose cache is not what it was."""
        self._post(ReplicaForgot(replica=engine.name, incarnation=engine.incarnation))

    # Its life ---------------------------------------------------------------------------------

    def start(self, config: PlaneConfig, revision: int = 1, source: bytes = b"") -> None:
        """Configure the plane and announce the engines; first of all end what an earlier life left.

        `source`: digest of what the configuration file says.
        """
        self._revision = revision
        self._poll_ns = ms(config.reports.poll_ms)
        if self._epoch:
            self._post(Restarted(self._epoch))
        if self.plane.state.revision != revision:
            self._configure(config, revision, source)
        for event in opening(self.plane, self.hand, self._clock.wall()):
            self._post(event)
        for engine in self._engines.values():
            engine.connect(self)
        self._poll()
        self._arm()

    @property
    def runs(self) -> bool:
        """Whether it was started, and neither stopped nor broken since."""
        return self._poll_at is not None

    def tell(self, event: GroupTold | ScaleFrozen | WallTold) -> None:
        """Tell of a group, of an operator's wish, or the time of day; whoever does not run hears nothing."""
        if self.runs:
            self._post(event)

    def add(self, engine: EngineClient) -> None:
        """Take one more engine, of a name that is free; it serves once it says that it is up."""
        self._roster.add(engine)
        if self._poll_at is not None:  # else `start` does so
            engine.connect(self)

    def drain(self, name: ReplicaName, done: Callable[[], None]) -> None:
        """Send an engine nothing new; `done` is called once nothing of ours runs there."""
        self._roster.leaving[name] = done
        life = self._engines[name].incarnation
        self._post(ReplicaDraining(replica=name, incarnation=life))

    def remove(self, name: ReplicaName) -> None:
        """Let go of an engine; what still runs there ends with an error."""
        engine = self._engines[name]
        self.down(engine)
        engine.close()
        self._roster.remove(name)

    def reconfigure(self, config: PlaneConfig, revision: int, source: bytes = b"") -> None:
        """Decide by another configuration; requests that are in end under their own (ADM-6)."""
        assert self.broken is None, "a broken plane is never asked again"
        assert revision > self._revision, "revisions only grow"
        self._revision = revision
        self._poll_ns = ms(config.reports.poll_ms)
        self._configure(config, revision, source)

    def _configure(self, config: PlaneConfig, revision: int, source: bytes) -> None:
        self._post(ConfigChanged(revision=revision, config=canonical(config), source=source))

    def refuse_newcomers(self) -> None:
        """Let nobody in any more; who is in goes on."""
        if self.closed is None:
            self.closed = edge(Edge.SHUTTING_DOWN)

    def end_all(self) -> None:
        """End every request that is live, with an error to its caller."""
        self.refuse_newcomers()
        # Those that wait go first: what ends before them would have them sent.
        waiting_first = sorted(self._streams.items(), key=lambda one: one[1].attempt is not None)
        for request, stream in waiting_first:
            if self.broken is None:
                self._post(ShutDown(request, self._flights.shown(stream.attempt)))

    def stop(self) -> None:
        """End every request and let go of engines and timer."""
        self.end_all()
        self._silence()

    def record(self, journal: Journal, *, resumed: bool) -> None:
        """Record all that happens from here on; `resumed`: behind earlier lives."""
        self._recorder = Recorder(
            self.plane, journal.put, segment_bytes=self._segment_bytes, resumed=resumed
        )
        self._handle = self._recorder.handle

    def unrecord(self) -> None:
        """End the record with a checkpoint of this instant; nothing is recorded from here on."""
        if self._recorder is not None and self.broken is None:
            self._post(TimerDue())
        if self._recorder is not None and self.broken is None:
            self._recorder.checkpoint()
        self._recorder, self._handle = None, self.plane.handle

    def fail(self, error: Exception) -> None:
        """Something of ours is broken, in an engine or a timer: tell everybody, go on never."""
        if self.broken is None:
            self._break(error, None)

    # Events and effects -----------------------------------------------------------------------

    def _now(self) -> InstantNs:
        self._last = max(self._last, self._clock.now())
        return self._last

    def _post(self, event: Event) -> None:
        """Have the plane take an event, now or after the one at hand; a broken one takes none."""
        if self.broken is not None:
            return
        self._events.append(event)
        if self._running:
            return
        self._running = True
        try:
            while self._events:
                event = self._events.popleft()
                now = self._now()
                effects = self._handle(event, now=now)
                for effect in effects:
                    self._carry_out(effect)
                if self.shadow is not None:
                    self.shadow.saw(event, effects, now)
                self._index += 1
        except Exception as error:  # noqa: BLE001 - our bug, whatever it is: stop, go on never
            self._break(error, event)
        finally:
            self._running = False
        if self._roster.leaving:
            for done in self._roster.empty(self.plane.state.ledger.loads):
                self._clock.call_at(self._last, done)
        self._arm()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Dispatch():
                self._submit(effect)
            case Refuse():
                self._streams[effect.request].refuse(effect, self._last)
            case Fail():
                self._streams[effect.request].fail(effect, self._last)
            case Cancel():
                flight = self._flights.forget(effect.attempt)
                if flight is not None:
                    flight.engine.abort(effect.attempt)
            case Decided():
                record = effect.record
                if isinstance(record, EntryRecord) and (at := self._streams.get(record.request_id)):
                    at.decided(record.decision)
                if self._decided is not None:
                    self._decided(record)
            case Concluded():
                self._conclude(effect)
            case _:
                self.hand.carry_out(effect)

    def _submit(self, effect: Dispatch) -> None:
        engine = self._engines[ReplicaName(effect.replica)]
        assert engine.incarnation == effect.incarnation, f"sent to a past life of {engine.name}"
        stream = self._streams[effect.request]
        stream.sent(effect, self._last, self.plane.settings.models)
        meter = Meter(bound_ns=effect.gap_ns)
        attempt = effect.attempt
        told = stream.streamed or engine.tells_first
        guess = None if told else later(self._last, effect.first_ns)
        self._flights.start(attempt, Flight(stream, engine, meter), guess)
        stream.on_held = lambda held: self._hold(attempt, held=held)
        engine.submit(
            Call(dispatch=effect, request=stream.request, ask=stream.asked(), meter=meter)
        )

    def _hold(self, attempt: AttemptId, *, held: bool) -> None:
        """Hold an engine back whose caller is slow, or let it go on."""
        if (flight := self._flights.get(attempt)) is not None:
            (flight.engine.pause if held else flight.engine.resume)(attempt)

    def _count(self, attempt: AttemptId, flight: Flight) -> None:
        first = self._flights.count(attempt, flight)
        if self._tick_at is None:
            self._tick_at = InstantNs((self._now() // TICK_NS + 1) * TICK_NS)
        if first:
            flight.stream.clocked(self._now())
            self._post(FirstToken(attempt))

    def _conclude(self, row: Concluded) -> None:
        stream = self._streams.pop(row.request, None)  # an earlier life's callers are gone
        if stream is not None and stream.attempt is not None:
            self._flights.forget(stream.attempt)
        self.recent.append(row)
        if self._concluded is not None:
            self._concluded(row)
        self.outcomes[row.outcome or row.reason or "left"] += 1

    def _break(self, error: Exception, event: Event | None) -> None:
        """Tell everybody, once, and have the process end."""
        self.broken = error
        self.closed = edge(Edge.INTERNAL)
        _log.critical("broken at journal index %d, on %r", self._index, event, exc_info=error)
        self._events.clear()
        live = self.plane.state.live
        for request, stream in self._streams.items():
            admitted = live.get(request)
            decision = None if admitted is None else admitted.decision
            stream.finish(edge(Edge.INTERNAL, decision=decision, revision=stream.revision))
        self._silence()
        if self._on_broken is not None:
            self._on_broken()

    def _silence(self) -> None:
        """Hear and plan nothing any more."""
        for engine in self._engines.values():
            engine.close()
        self._poll_at = self._tick_at = None
        self._flights.guess_no_more()
        self._poll_ns = DurationNs(0)
        self._arm()

    # Time -------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Wake when the plane, the tick or the reports are due, whichever is first."""
        due = self._poll_at
        if due is not None:  # else it has stopped
            due = sooner(due, self.plane.next_timer())
            due = sooner(due, self._tick_at)
            due = sooner(due, self._flights.next_guess)
            if self.shadow is not None:
                due = sooner(due, self.shadow.next_timer())
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = None if due is None else self._clock.call_at(due, self._wake)

    def _wake(self) -> None:
        """Do what is due, then arm anew."""
        self._timer = self._due = None
        now = self._now()
        if self._poll_at is not None and self._poll_at <= now:
            self._poll()
        if self._tick_at is not None and self._tick_at <= now:
            self._tick(now)
        while self.broken is None and (attempt := self._flights.guessed(now)) is not None:
            self._post(FirstToken(attempt))
        when = self.plane.next_timer()
        if when is not None and when <= now and self.broken is None:
            self._post(TimerDue())
        if self.shadow is not None and self.broken is None:
            self.shadow.wake(self._now())
        self._arm()

    def _poll(self) -> None:
        self._poll_at = InstantNs((self._now() // self._poll_ns + 1) * self._poll_ns)
        for engine in self._engines.values():
            engine.poll()

    def _tick(self, now: InstantNs) -> None:
        """Tell of every stream that moved; go on while any is in flight."""
        moved = self._flights.moved()
        self._tick_at = InstantNs((now // TICK_NS + 1) * TICK_NS) if self._flights else None
        if moved:
            self._post(ProgressTick(moved))
