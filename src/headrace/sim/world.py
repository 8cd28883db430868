"""One run: arrivals, emulated replicas and the plane, in virtual time.

A driver like the gateway: it turns what happens into events, carries out effects, and keeps only
what it needs for that. True output lengths and chunk identities live here.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from msgspec.structs import replace

from headrace.model.effect import Cancel, Concluded, Decided, Dispatch, Effect, Migrate, Refuse
from headrace.model.engine import Snapshot
from headrace.model.event import (
    CallerLeft,
    ConfigChanged,
    Ended,
    Event,
    GroupsListed,
    ProgressTick,
    ReplicaDown,
    ReplicaReported,
    ReplicaUp,
    RequestArrived,
    Restarted,
    TimerDue,
)
from headrace.model.evidence import DecisionRecord
from headrace.model.ids import (
    AttemptId,
    Incarnation,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.plane.journal import Recorder
from headrace.plane.state import Live, Phase
from headrace.policy.catalog import PlaneConfig, canonical
from headrace.replica.rules import NO_RULES, Rules
from headrace.sim.agenda import Agenda, Kind
from headrace.sim.draws import deliveries
from headrace.sim.engines import Engines, Node
from headrace.sim.faults import Leavers, Repeaters, Restart
from headrace.sim.groups import Provided, Provider, by_name
from headrace.sim.mishaps import Mishaps
from headrace.sim.requests import forgotten, request_of
from headrace.sim.scenario import Scenario
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import NS_PER_MS, DurationNs, InstantNs, later, ms, seconds

TICK_NS = 100 * NS_PER_MS
"""Progress of all streams is told at multiples of this, live and simulated alike."""


class World:
    """A scenario being run."""

    def __init__(  # noqa: PLR0913 - what a run consists of
        self,
        scenario: Scenario,
        rows: Sequence[TraceRow],
        seed: int,
        *,
        sink: Callable[[bytes, bool], None] | None = None,
        decisions: Callable[[DecisionRecord], None] | None = None,
        after: Callable[["World", list[Effect]], None] | None = None,
        fast_forward: bool = True,
        segment_bytes: int | None = None,
        changes: Sequence[tuple[InstantNs, PlaneConfig]] = (),
        rules: Rules = NO_RULES,
    ) -> None:
        """Prepare a run; `sink` gets the journal's frames, `after` looks on after each step.

        `changes`: configurations of the same pools that come into force later. `rules`: whom the
        replicas let in, see `Rules`.
        """
        self.scenario, self.rows, self.seed = scenario, rows, seed
        self.now = InstantNs(0)
        self.concluded: dict[RequestId, Concluded] = {}
        self.offered = 0
        self.served: dict[TenantId, int] = {}
        """Work of ended answers by tenant, for observers."""
        self.epoch = 0
        """Restarts so far."""
        self.announced: dict[ReplicaName, Incarnation] = {}
        """The lives that the plane was told of and whose end it was not told of."""
        self.draining: set[ReplicaName] = set()
        """Of these, the ones that take nothing new."""
        self._refusals: dict[RequestId, int] = {}
        """How often callers that ask again were refused."""
        self.away: dict[RequestId, Concluded | None] = {}
        """Of these, the ones that will come again, with the row of their last refusal."""
        self.cut_off: list[RequestId] = []
        """Requests that had not ended when the run had to."""
        self._sink, self._decisions, self._after = sink, decisions, after
        self._segment_bytes = segment_bytes
        self._changes, self._revision = changes, 0
        self._agenda: Agenda[object] = Agenda()
        self._tick_planned = False
        self._timer: InstantNs | None = None
        self._saved: bytes | None = None
        self._left_to_offer = len(rows)
        self.engines = Engines(
            scenario, seed, self._agenda, self.tell, fast_forward=fast_forward, rules=rules
        )
        self.provider = Provider(scenario, seed, self._agenda, self.tell, self.draining)
        self.provider.on_up, self.provider.on_down = self._serves, self._stops
        self.listed = True
        """Whether the plane was told what groups there are, since the driver came back."""
        self.plane = Plane()
        self._recorder = self._record(resumed=False)

    @property
    def nodes(self) -> list[Node]:
        """The replicas' places."""
        return self.engines.nodes

    def _record(self, *, resumed: bool) -> Recorder | None:
        if self._sink is None:
            return None
        if self._segment_bytes is None:
            return Recorder(self.plane, self._sink, resumed=resumed)
        return Recorder(self.plane, self._sink, resumed=resumed, segment_bytes=self._segment_bytes)

    # Running ---------------------------------------------------------------------------------

    def run(self) -> "World":
        """Run until everything offered has ended, and return itself."""
        self._begin()
        last = self.rows[-1].at if self.rows else 0
        end = last + seconds(self.scenario.drain_s)
        agenda = self._agenda
        while len(agenda) and (self._left_to_offer or self.plane.state.live or self.away):
            at, kind, entity, event = agenda.pop()
            if at > end:
                break
            assert at >= self.now, "time ran backwards"
            self.now = at
            self._steps[kind](self, entity, event)
        self._finish()
        return self

    def _begin(self) -> None:
        self._configure(self.scenario.deployment)
        scaled = self.plane.settings.scaled
        for at, node in enumerate(self.nodes):
            if node.pool in scaled:
                self.provider.own(node.name, node.pool, self.now)
            self.start(at)
        self._mishaps = Mishaps(self, self._agenda, self.scenario.faults, len(self.nodes))
        entity = self._mishaps.entities
        for nth, (when, config) in enumerate(self._changes):
            self._agenda.push(when, Kind.FAULT, entity + nth, config)
        if self.rows:
            self._agenda.push(self.rows[0].at, Kind.ARRIVAL, 0, None)

    def _configure(self, config: PlaneConfig) -> None:
        """Bring a configuration into force."""
        self.scenario = replace(self.scenario, deployment=config)
        self._revision += 1
        self.tell(ConfigChanged(revision=self._revision, config=canonical(config)))

    def tell(self, event: Event) -> None:
        """Give the plane an event and carry out what it wants."""
        if self._recorder is None:
            effects = self.plane.handle(event, now=self.now)
        else:
            effects = self._recorder.handle(event, now=self.now)
        for effect in effects:
            self._carry_out(effect)
        if self._after is not None:
            self._after(self, effects)
        when = self.plane.next_timer()
        if when is not None and (self._timer is None or when < self._timer):
            self._timer = when
            self._agenda.push(when, Kind.TIMER, 0, None)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Dispatch():
                self.engines.submit(effect, self.rows[effect.request - 1], self.now)
                self._plan_tick()
            case Cancel():
                self.engines.stop(effect.attempt, self.now)
                self.engines.drop(effect.attempt)
            case Migrate():
                self.engines.moving.begin(effect, self.now)
            case Refuse():
                self._refused(effect)
            case Concluded():
                self._conclude(effect)
            case Decided() if self._decisions is not None:
                self._decisions(effect.record)
            case _:  # callers here do not wait for words
                self.provider.carry_out(effect, self.now)

    # Arrivals and callers --------------------------------------------------------------------

    def _arrive(self, entity: int, event: object) -> None:
        if event is not None:  # it was refused, and comes again
            del self.away[RequestId(entity + 1)]
            request = request_of(self.scenario, self.rows, entity, repeat=True)
            self.tell(RequestArrived(request))
            return
        row = self.rows[entity]
        if entity + 1 < len(self.rows):
            self._agenda.push(self.rows[entity + 1].at, Kind.ARRIVAL, entity + 1, None)
        self._left_to_offer -= 1
        self.offered += 1
        request = request_of(self.scenario, self.rows, entity)
        for fault in self.scenario.faults:
            if isinstance(fault, Leavers):
                rng = stream(self.seed, "leave", entity)
                if rng.random() < fault.share:
                    when = later(row.at, seconds(rng.uniform(0, fault.within_s)))
                    self._agenda.push(when, Kind.LEAVE, entity, request.id)
        self.tell(RequestArrived(request))

    def _refused(self, effect: Refuse) -> None:
        """Have a caller come again, if it is one that does and was told that it helps."""
        told = effect.rejection.retry_after_ns
        for fault in self.scenario.faults:
            if isinstance(fault, Repeaters) and told is not None:
                nth = self._refusals[effect.request] = self._refusals.get(effect.request, 0) + 1
                if nth <= fault.times:
                    self.away[effect.request] = None
                    rng = stream(self.seed, "again", effect.request, nth)
                    when = later(self.now, fault.delay_ns(nth, told, rng))
                    self._agenda.push(when, Kind.ARRIVAL, effect.request - 1, "again")

    def _leave(self, _entity: int, event: object) -> None:
        """A stream is stopped where it is made first: what it has shown goes with its caller."""
        assert isinstance(event, int)
        live = self.plane.state.live.get(RequestId(event))
        if live is not None and event not in self.concluded:
            self.tell(CallerLeft(live.request.id, self._stopped(live)))

    def _stopped(self, live: Live) -> StreamTiming:
        """Stop a live request's attempt, if it has one, and return what it has shown."""
        return NO_STREAM if live.attempt is None else self.engines.stop(live.attempt, self.now)

    # Replicas --------------------------------------------------------------------------------

    def start(self, at: int) -> None:
        """Bring a replica up in a new life; it reports from now on."""
        incarnation = self.engines.start(at, self.now)
        self._announce(self.nodes[at], incarnation)
        self._agenda.push(self.now, Kind.REPORT, at, incarnation)

    def _serves(self, group: Provided) -> None:
        """A group is ready: its replica comes up."""
        deployment = self.scenario.deployment
        spec = deployment.window.stepped(by_name(deployment, group.pool))
        self.start(self.engines.add(group.name, spec))

    def _stops(self, group: Provided) -> None:
        """A group that served is stopped, with what still runs there."""
        at = self.engines.at(group.name)
        engine = None if at is None else self.nodes[at].engine
        if at is not None and engine is not None:
            self.engines.crash(at, self.now)
            self.down(group.name, engine.incarnation)

    def _group(self, _entity: int, event: object) -> None:
        self.provider.advance(event, self.now)

    def _announce(self, node: Node, incarnation: Incarnation) -> None:
        before = self.announced.get(node.name)
        if before is not None and self.engines.shown(before):
            self.down(node.name, before)  # the new life tells of the old one's end
        self.announced[node.name] = incarnation
        self.draining.discard(node.name)
        up = ReplicaUp(
            replica=node.name,
            incarnation=incarnation,
            pool=node.pool,
            migrates=self.scenario.migration is not None,
        )
        self.tell(up)

    def _engine(self, entity: int, event: object) -> None:
        self.engines.advance(entity, event, self.now)

    def _move(self, entity: int, event: object) -> None:
        self.engines.moving.advance(AttemptId(entity), event, self.now)

    def _plan_tick(self) -> None:
        if not self._tick_planned:
            self._tick_planned = True
            at = InstantNs((self.now // TICK_NS + 1) * TICK_NS)
            self._agenda.push(at, Kind.TICK, 0, None)

    def _tick(self, _entity: int, _event: object) -> None:
        self._tick_planned = False
        moved = self.engines.progress(self.now)
        if moved:
            self.tell(ProgressTick(moved))
        if self.engines.attempts:
            self._plan_tick()

    def _due(self, _entity: int, _event: object) -> None:
        if self._timer is not None and self._timer <= self.now:
            self._timer = None
            self.tell(TimerDue())

    def _report(self, entity: int, event: object) -> None:
        if isinstance(event, Snapshot):
            self.tell(ReplicaReported(event))
            return
        snapshot = self.engines.report(entity, event, self.now)
        if snapshot is None:
            return
        for delay in deliveries(self.scenario.faults, self.seed, entity, self.now):
            self._agenda.push(later(self.now, delay), Kind.REPORT, entity, snapshot)
        period = ms(self.scenario.deployment.reports.poll_ms)
        if self.plane.state.live or self.away or self.plane.state.pools:
            self._agenda.push(later(self.now, period), Kind.REPORT, entity, event)
        elif self._left_to_offer:
            # Nothing happens before the next arrival: go on with the last report that it can find.
            idle = self.rows[self.offered].at - self.now
            skipped = DurationNs(period * max(1, idle // period))
            self._agenda.push(later(self.now, skipped), Kind.REPORT, entity, event)

    # Faults ----------------------------------------------------------------------------------

    def _fault(self, entity: int, event: object) -> None:
        match event:
            case Restart():
                self._restart()
            case PlaneConfig():
                self._configure(event)
            case "save":
                self._saved = self.plane.freeze()
            case _:
                self._mishaps.strike(entity, event)

    def end(self, attempt: AttemptId, outcome: Outcome) -> None:
        """Tell of an attempt that ended without success, with what its stream had shown."""
        shown = self.engines.stop(attempt, self.now)
        self.engines.drop(attempt)
        self.tell(Ended(attempt=attempt, outcome=outcome, usage=None, timing=shown))

    def down(self, replica: ReplicaName, incarnation: Incarnation) -> None:
        """Tell the plane what it may know already, from a later life."""
        if self.announced.get(replica) == incarnation:
            del self.announced[replica]
            self.draining.discard(replica)
        timings = self.engines.shown(incarnation)
        self.tell(ReplicaDown(replica=replica, incarnation=incarnation, timings=timings))
        self.engines.forget(incarnation)

    def _restart(self) -> None:
        """The driver is gone and back: streams cut, the plane thawed, replicas announced anew."""
        assert self._saved is not None, "a restart follows its checkpoint"
        self.engines.cut(self.now)
        self.announced.clear()
        self.draining.clear()
        self.epoch += 1
        self.plane = Plane.thaw(self._saved)
        self._timer = None
        self._recorder = self._record(resumed=True)
        for request in map(RequestId, range(1, self.offered + 1)):
            if request not in self.concluded and request not in self.plane.state.live:
                self._conclude(forgotten(self.scenario, self.rows, request, self.now))
        self.listed = False
        self.tell(Restarted(self.epoch))
        self.listed = True
        if self.plane.state.pools:
            self.tell(GroupsListed(groups=self.provider.listing()))
        for node, engine in self.engines.alive():
            self._announce(node, engine.incarnation)

    # Endings ---------------------------------------------------------------------------------

    def _conclude(self, row: Concluded) -> None:
        """Keep a request's row; after a restart an old one may be concluded again, and is not."""
        if row.request in self.away:
            self.away[row.request] = row
            return
        if row.request in self.concluded:
            assert self.epoch, f"INV-10 at {self.now}: {row.request} concluded twice"
            return
        self.concluded[row.request] = row
        if row.work_ns:
            self.served[row.tenant] = self.served.get(row.tenant, 0) + row.work_ns

    def _finish(self) -> None:
        """Cut off what has not ended, so that every offered request has its row.

        Those on a replica time out. For those that wait the plane knows no end but their caller's.
        """
        live = self.plane.state.live
        away, self.away = self.away, {}
        for row in away.values():
            assert row is not None, "each refusal is followed by its row"
            self._conclude(row)
        self.cut_off = list(live)
        for request in self.cut_off:
            if live[request].phase is Phase.QUEUED:
                self.tell(CallerLeft(request))
        for request in [one for one in self.cut_off if one in live]:
            attempt = live[request].attempt
            assert attempt is not None, f"{request} waits again"
            self.end(attempt, Outcome.TIMEOUT)
        self.engines.retire(self.now)
        self.provider.close(self.now)

    _steps: ClassVar[dict[Kind, Callable[["World", int, object], None]]] = {
        Kind.ENGINE: _engine,
        Kind.MOVE: _move,
        Kind.FAULT: _fault,
        Kind.GROUP: _group,
        Kind.REPORT: _report,
        Kind.TICK: _tick,
        Kind.TIMER: _due,
        Kind.LEAVE: _leave,
        Kind.ARRIVAL: _arrive,
    }
