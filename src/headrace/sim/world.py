"""One run: arrivals, emulated replicas and the plane, in virtual time.

A driver like the gateway: it turns what happens into events, carries out effects, and keeps only
what it needs for that. True output lengths and chunk identities live here.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.effect import Cancel, Concluded, Decided, Dispatch, Effect, Entry
from headrace.model.engine import Snapshot
from headrace.model.event import (
    CallerLeft,
    ConfigChanged,
    Ended,
    Event,
    FirstToken,
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
    ClassName,
    Incarnation,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.meter import NO_STREAM
from headrace.model.profile import Calibration, Profile
from headrace.model.request import Request
from headrace.model.slo import Bounds, Outcome
from headrace.plane.core import Plane
from headrace.plane.journal import Recorder
from headrace.policy.catalog import canonical
from headrace.replica.core import Replica
from headrace.replica.job import Finished, FirstTokenMade, Job
from headrace.sim.agenda import Agenda, Kind
from headrace.sim.faults import Crash, Leavers, Reports, Restart, Slow
from headrace.sim.scenario import Scenario
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import (
    MICRO,
    NS_PER_MS,
    DurationNs,
    InstantNs,
    Tokens,
    WorkNs,
    later,
    ms,
    seconds,
)

TICK_NS = 100 * NS_PER_MS
"""Progress of all streams is told at multiples of this, live and simulated alike."""
PREFIX_MAX = 512
"""Leading chunks whose identity a request carries at most."""


class Node(Struct):
    """One replica's place: it may be up, and in which life."""

    name: ReplicaName
    pool: PoolName
    profile: Profile
    """As it really is, a slow one included; the plane believes its pool's."""
    engine: Replica | None = None
    planned: InstantNs | None = None
    """The engine event that counts; others in the agenda are stale."""
    up_since: InstantNs = InstantNs(0)
    up_ns: int = 0
    past: list["EngineTotals"] = []


class EngineTotals(Struct, frozen=True, kw_only=True, gc=False):
    """What one life of an engine did."""

    busy_ns: int
    steps: int
    prefill_tokens: int
    output_tokens: int
    preemptions: int
    queried: int
    hit: int


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
    ) -> None:
        """Prepare a run; `sink` gets the journal's frames, `after` looks on after each step."""
        self.scenario, self.rows, self.seed = scenario, rows, seed
        self.now = InstantNs(0)
        self.concluded: dict[RequestId, Concluded] = {}
        self.offered = 0
        self.served: dict[TenantId, int] = {}
        """Work of ended answers by tenant, for observers."""
        self._sink, self._decisions, self._after = sink, decisions, after
        self._fast_forward, self._segment_bytes = fast_forward, segment_bytes
        self._agenda: Agenda[object] = Agenda()
        self._incarnations = count(1)
        self._attempts: dict[AttemptId, RequestId] = {}
        self._tick_planned = False
        self._timer: InstantNs | None = None
        self.epoch = 0
        """Restarts so far."""
        self._saved: bytes | None = None
        self._left_to_offer = len(rows)
        self.nodes = [self._node(*place) for place in self._places()]
        self._node_of = {node.name: at for at, node in enumerate(self.nodes)}
        self.plane = Plane()
        self._recorder = self._record(resumed=False)

    # Building --------------------------------------------------------------------------------

    def _places(self) -> Iterator[tuple[int, str, str, Profile]]:
        at = 0
        for pool in self.scenario.deployment.pools:
            for nth in range(pool.replicas):
                yield at, f"{pool.name}-{nth}", pool.name, pool.profile
                at += 1

    def _node(self, at: int, name: str, pool: str, profile: Profile) -> Node:
        for fault in self.scenario.faults:
            if isinstance(fault, Slow) and fault.replica == at:
                known = profile.calibration or Calibration()
                slower = Calibration(
                    offset_ms=known.offset_ms * fault.factor, scale=known.scale * fault.factor
                )
                profile = replace(profile, calibration=slower)
        return Node(name=ReplicaName(name), pool=PoolName(pool), profile=profile)

    def _record(self, *, resumed: bool) -> Recorder | None:
        if self._sink is None:
            return None
        if self._segment_bytes is None:
            return Recorder(self.plane, self._sink, resumed=resumed)
        return Recorder(self.plane, self._sink, resumed=resumed, segment_bytes=self._segment_bytes)

    # Running ---------------------------------------------------------------------------------

    def run(self) -> "World":
        """Run to the end and return itself."""
        self._begin()
        last = self.rows[-1].at if self.rows else 0
        end = last + seconds(self.scenario.drain_s)
        agenda = self._agenda
        while len(agenda):
            at, kind, entity, event = agenda.pop()
            if at > end:
                break
            assert at >= self.now, "time ran backwards"
            self.now = at
            self._steps[kind](self, entity, event)
        self._finish()
        return self

    def _begin(self) -> None:
        config = canonical(self.scenario.deployment)
        self.tell(ConfigChanged(revision=1, config=config))
        for at in range(len(self.nodes)):
            self._start(at)
        for at, fault in enumerate(self.scenario.faults):
            if isinstance(fault, Crash) and fault.replica < len(self.nodes):
                self._agenda.push(InstantNs(seconds(fault.at_s)), Kind.FAULT, at, fault)
            elif isinstance(fault, Restart):
                when = max(0.0, fault.at_s - fault.checkpoint_age_s)
                self._agenda.push(InstantNs(seconds(when)), Kind.FAULT, at, "save")
                self._agenda.push(InstantNs(seconds(fault.at_s)), Kind.FAULT, at, fault)
        if self.rows:
            self._agenda.push(self.rows[0].at, Kind.ARRIVAL, 0, None)

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
                self._submit(effect)
            case Cancel():
                self._abort(effect)
            case Concluded():
                self._conclude(effect)
            case Decided() if self._decisions is not None:
                self._decisions(effect.record)
            case _:
                pass  # callers here do not wait for words

    # Arrivals and callers --------------------------------------------------------------------

    def _arrive(self, entity: int, _event: object) -> None:
        row = self.rows[entity]
        if entity + 1 < len(self.rows):
            self._agenda.push(self.rows[entity + 1].at, Kind.ARRIVAL, entity + 1, None)
        self._left_to_offer -= 1
        self.offered += 1
        request = self.request(entity)
        for fault in self.scenario.faults:
            if isinstance(fault, Leavers):
                rng = stream(self.seed, "leave", entity)
                if rng.random() < fault.share:
                    when = later(row.at, seconds(rng.uniform(0, fault.within_s)))
                    self._agenda.push(when, Kind.LEAVE, entity, request.id)
        self.tell(RequestArrived(request))

    def request(self, at: int) -> Request:
        """Return what the plane may know of a row; ids count from 1 in order of arrival."""
        row = self.rows[at]
        return Request(
            id=RequestId(at + 1),
            tenant=row.tenant or TenantId(self.scenario.deployment.tenants[0].name),
            model=row.model or ModelName(self.scenario.deployment.models[0].name),
            input_tokens=row.input_tokens,
            max_output=row.max_tokens,
            slo_class=row.slo_class,
            prefix=row.prefix[:PREFIX_MAX],
            prefix_tokens=Tokens(row.prefix_tokens),
        )

    def _leave(self, _entity: int, event: object) -> None:
        assert isinstance(event, int)
        if event not in self.concluded:
            self.tell(CallerLeft(RequestId(event)))

    # Engines ---------------------------------------------------------------------------------

    def _start(self, at: int) -> None:
        """Bring a replica up in a new life."""
        node = self.nodes[at]
        incarnation = Incarnation(next(self._incarnations))
        node.engine = Replica(
            node.name,
            incarnation,
            node.profile,
            self.scenario.batching,
            noise_seed=stream(self.seed, "noise", at, incarnation).getrandbits(62),
            noise_ppm=round(self.scenario.noise_percent * MICRO / 100),
            fast_forward=self._fast_forward,
        )
        node.up_since, node.planned = self.now, None
        self.tell(ReplicaUp(replica=node.name, incarnation=incarnation, pool=node.pool))
        self._agenda.push(self.now, Kind.REPORT, at, incarnation)

    def _submit(self, effect: Dispatch) -> None:
        at = self._node_of[effect.replica]
        engine = self.nodes[at].engine
        if engine is None or engine.incarnation != effect.incarnation:
            self._attempts[effect.attempt] = effect.request
            return  # sent to a replica that died unnoticed: the driver hears of it soon
        row = self.rows[effect.request - 1]
        self._attempts[effect.attempt] = effect.request
        job = Job(
            attempt=effect.attempt,
            prompt_tokens=row.input_tokens,
            output_tokens=Tokens(min(row.output_tokens, effect.output_limit)),
            prefix=row.prefix,
            prefix_tokens=Tokens(row.prefix_tokens or PREFIX_MAX),
            gap_bound_ns=effect.gap_ns,
            tenant=effect.tenant,
            deadline=effect.deadline,
            relegated=effect.relegated,
            counter=effect.counter,
            weight=effect.weight,
        )
        refused = engine.submit(job, self.now)
        assert refused is None, f"the plane sent what {effect.replica} cannot hold: {refused}"
        self._plan(at)
        self._plan_tick()

    def _abort(self, effect: Cancel) -> None:
        at = self._node_of[effect.replica]
        engine = self.nodes[at].engine
        self._attempts.pop(effect.attempt, None)
        if engine is not None and engine.incarnation == effect.incarnation:
            engine.abort(effect.attempt, self.now)
            self._plan(at)

    def _engine(self, entity: int, event: object) -> None:
        node = self.nodes[entity]
        engine = node.engine
        if engine is None or node.planned != self.now or event != engine.incarnation:
            return  # planned anew meanwhile
        node.planned = None
        for done in engine.advance(self.now):
            if isinstance(done, FirstTokenMade):
                self.tell(FirstToken(done.attempt))
            else:
                self._ended(done, Outcome.SUCCESS)
        self._plan(entity)

    def _ended(self, done: Finished, outcome: Outcome) -> None:
        self._attempts.pop(done.attempt, None)
        self.tell(
            Ended(attempt=done.attempt, outcome=outcome, usage=done.usage, timing=done.timing)
        )

    def _plan(self, at: int) -> None:
        """Plan an engine's next event, unless that is planned already."""
        node = self.nodes[at]
        if node.engine is None:
            return
        when = node.engine.next_event()
        if when is not None and when != node.planned:
            node.planned = when
            self._agenda.push(when, Kind.ENGINE, at, node.engine.incarnation)

    def _plan_tick(self) -> None:
        if not self._tick_planned:
            self._tick_planned = True
            at = InstantNs((self.now // TICK_NS + 1) * TICK_NS)
            self._agenda.push(at, Kind.TICK, 0, None)

    def _tick(self, _entity: int, _event: object) -> None:
        self._tick_planned = False
        moved: list[tuple[AttemptId, int]] = []
        for node in self.nodes:
            if node.engine is not None:
                moved += node.engine.progress(self.now)
        if moved:
            self.tell(ProgressTick(tuple(moved)))
        if self._attempts:
            self._plan_tick()

    def _due(self, _entity: int, _event: object) -> None:
        if self._timer is not None and self._timer <= self.now:
            self._timer = None
            self.tell(TimerDue())

    # Reports and faults ----------------------------------------------------------------------

    def _report(self, entity: int, event: object) -> None:
        if isinstance(event, Snapshot):
            self.tell(ReplicaReported(event))
            return
        engine = self.nodes[entity].engine
        if engine is None or engine.incarnation != event:
            return
        rng = stream(self.seed, "report", entity, self.now)
        snapshot = engine.report(self.now)
        for delay in self._deliveries(rng.random(), rng.random(), rng.random()):
            self._agenda.push(later(self.now, delay), Kind.REPORT, entity, snapshot)
        if self._left_to_offer or self.plane.state.live:
            period = ms(self.scenario.deployment.reports.poll_ms)
            self._agenda.push(later(self.now, period), Kind.REPORT, entity, event)

    def _deliveries(self, lost: float, twice: float, late: float) -> tuple[int, ...]:
        """Return after how long one snapshot arrives: not at all, once or twice."""
        for fault in self.scenario.faults:
            if isinstance(fault, Reports):
                delay = seconds(late * fault.delay_s)
                if lost < fault.lost:
                    return ()
                return (delay, 2 * delay) if twice < fault.twice else (delay,)
        return (0,)

    def _fault(self, _entity: int, event: object) -> None:
        match event:
            case Crash():
                self._crash(event)
            case Restart():
                self._restart()
            case "save":
                self._saved = self.plane.freeze()
            case ("down", int(at), int(incarnation)):
                name = self.nodes[at].name
                self.tell(ReplicaDown(replica=name, incarnation=Incarnation(incarnation)))
                self._lose_unsent()
            case ("back", int(at)):
                if self.nodes[at].engine is None:
                    self._start(at)
            case _:
                raise AssertionError(event)

    def _crash(self, fault: Crash) -> None:
        at = fault.replica
        node = self.nodes[at]
        if node.engine is None:
            return
        engine = node.engine
        incarnation = engine.incarnation
        lost = self._retire(node)
        when = later(self.now, seconds(fault.noticed_after_s))
        self._agenda.push(
            when, Kind.FAULT, len(self.scenario.faults) + at, ("down", at, incarnation)
        )
        if fault.back_after_s is not None:
            back = later(self.now, seconds(fault.back_after_s))
            self._agenda.push(back, Kind.FAULT, len(self.scenario.faults) + at, ("back", at))
        if fault.streams_break:
            for attempt in lost:
                self._break(attempt)

    def _break(self, attempt: AttemptId) -> None:
        """An attempt's connection broke: the driver ends it, with the tokens it saw if any."""
        if self._attempts.pop(attempt, None) is not None:
            self.tell(Ended(attempt=attempt, outcome=Outcome.ERROR, usage=None, timing=NO_STREAM))

    def _lose_unsent(self) -> None:
        """Forget attempts whose requests are over: their replica was lost."""
        live = self.plane.state.ledger.flights
        for attempt in [a for a in self._attempts if a not in live]:
            del self._attempts[attempt]

    def _retire(self, node: Node) -> list[AttemptId]:
        engine = node.engine
        assert engine is not None
        lost = engine.fail(self.now)
        totals, report = engine.totals(self.now), engine.report(self.now)
        node.past.append(
            EngineTotals(
                busy_ns=totals.busy_ps // 1_000,
                steps=totals.steps,
                prefill_tokens=totals.prompt_tokens_computed,
                output_tokens=totals.tokens_made,
                preemptions=totals.preemptions,
                queried=report.prefix_tokens_queried or 0,
                hit=report.prefix_tokens_hit or 0,
            )
        )
        node.up_ns += self.now - node.up_since
        node.engine, node.planned = None, None
        return lost

    def _restart(self) -> None:
        """The driver is gone and back: streams cut, the plane thawed, replicas announced anew."""
        if self._saved is None:
            return
        for node in self.nodes:
            if node.engine is not None:
                for attempt in list(self._attempts):
                    node.engine.abort(attempt, self.now)
        self._attempts.clear()
        self.epoch += 1
        self.plane = Plane.thaw(self._saved)
        self._timer = None
        self._recorder = self._record(resumed=True)
        for request in map(RequestId, range(1, self.offered + 1)):
            if request not in self.concluded and request not in self.plane.state.live:
                self._conclude(self._forgotten(request))
        self.tell(Restarted(self.epoch))
        for at, node in enumerate(self.nodes):
            if node.engine is not None:
                incarnation = node.engine.incarnation
                self.tell(ReplicaUp(replica=node.name, incarnation=incarnation, pool=node.pool))
                self._plan(at)

    def _forgotten(self, request: RequestId) -> Concluded:
        """Return the row of a request that came after the checkpoint and fell with the driver."""
        asked = self.request(request - 1)
        return Concluded(
            request=request,
            tenant=asked.tenant,
            slo_class=asked.slo_class or ClassName(self.scenario.deployment.classes[0].name),
            model=asked.model,
            entry=Entry(
                arrived_at=self.rows[request - 1].at,
                input_tokens=asked.input_tokens,
                predicted_output=Tokens(0),
                work_ns=WorkNs(0),
            ),
            admitted=True,
            reason=Reason.RESTARTED,
            outcome=Outcome.ERROR,
            bounds=Bounds(ttft_ns=None, gap_ns=DurationNs(0), tpot_ns=DurationNs(0)),
            ended_at=self.now,
        )

    # Endings ---------------------------------------------------------------------------------

    def _conclude(self, row: Concluded) -> None:
        """Keep a request's row; after a restart an old one may be concluded again, and is not."""
        if row.request in self.concluded:
            assert self.epoch, f"{row.request} concluded twice"
            return
        self.concluded[row.request] = row
        if row.work_ns:
            self.served[row.tenant] = self.served.get(row.tenant, 0) + row.work_ns

    def _finish(self) -> None:
        """Cut off what has not ended, so that every offered request has its row."""
        for request in list(self.plane.state.live):
            self.tell(CallerLeft(request))
        for node in self.nodes:
            if node.engine is not None:
                self._retire(node)

    _steps: ClassVar[dict[Kind, Callable[["World", int, object], None]]] = {
        Kind.ENGINE: _engine,
        Kind.FAULT: _fault,
        Kind.REPORT: _report,
        Kind.TICK: _tick,
        Kind.TIMER: _due,
        Kind.LEAVE: _leave,
        Kind.ARRIVAL: _arrive,
    }
