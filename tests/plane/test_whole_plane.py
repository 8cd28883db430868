"""Whatever happens in whatever order, the plane neither leaks, nor forgets, nor contradicts itself."""

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec.structs import replace

from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import (
    AskGroup,
    Cancel,
    Concluded,
    Dispatch,
    DrainGroup,
    Effect,
    Fail,
    RecallGroup,
    Refuse,
    StopGroup,
    WakeGroup,
)
from headrace.model.engine import Snapshot
from headrace.model.event import (
    CallerLeft,
    ConfigChanged,
    Ended,
    Event,
    FirstToken,
    GroupsListed,
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
from headrace.model.group import Ail, GroupShape, GroupStep
from headrace.model.ids import (
    AttemptId,
    Incarnation,
    PoolName,
    ReplicaName,
    RequestId,
)
from headrace.model.ladder import LadderSpec
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.price import PriceSpec
from headrace.model.request import Request
from headrace.model.scaling_spec import Scaling
from headrace.model.slo import Outcome
from headrace.model.stages import Stage
from headrace.plane.core import Plane
from headrace.plane.journal import Recorder, Verified, verify
from headrace.plane.state import Phase
from headrace.policy.admission.gates import GateMode, Gates, Mode, Modes
from headrace.policy.catalog import PlaneConfig, Window, canonical
from headrace.policy.fairness.costs import KvCost, WorkCost
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.ordering.orders import Fifo, TenantFirst
from headrace.policy.predict.ceiling import OutputBudget
from headrace.policy.routing.seconds import Seconds
from headrace.units import Blocks, DurationNs, InstantNs, Tokens
from tests.plane import invariants, trees
from tests.plane.scenes import MS, S, small, usage

CLASSES = (
    ClassSpec(name="interactive", weight=4, queue=6, tenant_queue=4),
    ClassSpec(name="tight", ttft_ms=400.0, itl_ms=20.0),
    ClassSpec(name="batch", ttft_ms=None, itl_ms=1_000.0, completion_ms=60_000.0, expire=False),
    ClassSpec(name="late", ttft_ms=30_000.0, expire=True),
)
POOLS = (
    PoolSpec(name="any", model="m", profile=small(8_192, running=4)),
    PoolSpec(name="own", model="m", profile=small(24_576), classes=("batch", "late")),
    PoolSpec(name="other", model="n", profile=small(16_384)),
)
EAGER = Scaling(
    min=0, max=3, standby=1, reserve=1, in_window_s=10.0, cancel_window_s=5.0, min_life_s=0.0,
    tick_s=2.0, drain_s=6.0, partial_s=8.0, shape=GroupShape(tp=2),
)  # fmt: skip
LAZY = Scaling(min=2, max=2, max_gpus=2, in_window_s=0.0, cancel_window_s=0.0, drain_s=0.0)
PRICE = PriceSpec(input=2.0, output=8.0)
TENANTS = (
    TenantSpec(
        name="a",
        max_parallel_sessions=2,
        budgets=(
            WindowSpec(unit=Unit.TOKENS, per=Per.MINUTE, hard=90_000.0, soft=2_000.0),
            WindowSpec(unit=Unit.WORK, per=Per.HOUR, hard=100.0),
            WindowSpec(unit=Unit.USD, per=Per.DAY, hard=1.0, soft=0.5),
            WindowSpec(unit=Unit.REQUESTS, per=Per.MONTH, hard=60.0),
        ),
    ),
    TenantSpec(name="b", weight=3, tpm_limit=20_000, rpm_limit=90),
    TenantSpec(name="c", max_parallel_requests=3, classes=("batch", "interactive")),
    TenantSpec(name="d", models=("n",)),
)
BASE = PlaneConfig(
    models=(
        ModelSpec(name="m", aliases=("old",), context_limit=40_000, price=PRICE),
        ModelSpec(name="n"),
    ),
    pools=POOLS,
    tenants=TENANTS,
    classes=CLASSES,
    admission=Gates(mode=GateMode.AUDIT),
)


def _without(**changes: Any) -> PlaneConfig:
    given = {name: getattr(BASE, name) for name in BASE.__struct_fields__}
    return PlaneConfig(**(given | changes))


LADDERS: dict[str, Any] = {
    "classes": (
        replace(
            CLASSES[0],
            ttft_ms=300.0,
            degrade=LadderSpec(level=3, model="n", keep=1, defer=True),
        ),
        replace(CLASSES[1], degrade=LadderSpec(level=1, output_part=0.01)),
        *CLASSES[2:],
    ),
    "tenants": tuple(replace(one, degrade=3) for one in TENANTS),
}
FREE = tuple(TenantSpec(name=one.name, degrade=3) for one in TENANTS)
CONFIGS = (
    BASE,
    _without(admission=Gates()),
    _without(admission=Gates(modes=Modes(budget=Mode.AUDIT, memory=Mode.AUDIT))),
    _without(ordering=Fifo()),
    _without(ordering=TenantFirst(lend_after_ms=500.0)),
    _without(tenants=TENANTS[:2], classes=CLASSES[:3]),
    _without(pools=POOLS[:1]),
    _without(pools=POOLS[1:]),
    _without(models=BASE.models[1:], pools=POOLS[2:]),
    _without(fairness=Vtc(cost=WorkCost())),
    _without(fairness=Vtc(cost=KvCost())),
    _without(output_budget=OutputBudget(tokens=40, classes={"batch": None})),
    _without(window=Window(prefill_ms=20.0, step_tokens={"any": 64, "own": None})),
    _without(
        window=Window(prefill_ms=1e-9, kv_reserve=0.5, step_tokens={"any": 1, "other": 10**6})
    ),
    _without(window=Window(unbounded=True), routing=Seconds(candidates=1, prefix_reliability=0.0)),
    _without(admission=Gates(mode=GateMode.OBSERVE, modes=Modes(contract=Mode.AUDIT))),
    _without(tenants=tuple(TenantSpec(name=one.name) for one in TENANTS)),
    _without(tenants=tuple(replace(one, tpm_limit=500, rpm_limit=1) for one in TENANTS)),
    _without(**LADDERS, admission=Gates()),
    _without(**(LADDERS | {"tenants": FREE}), admission=Gates()),
    _without(**LADDERS),
    _without(**LADDERS, admission=Gates(modes=Modes(budget=Mode.AUDIT, memory=Mode.AUDIT))),
    _without(pools=(replace(POOLS[0], scaling=EAGER), *POOLS[1:])),
    _without(pools=(replace(POOLS[0], scaling=LAZY), replace(POOLS[1], scaling=EAGER))),
)
LADDERED, SCALED = CONFIGS[-6:-2], CONFIGS[-2:]
NAMES = ("r0", "r1", "r2", "r3")
OUTCOMES = (Outcome.SUCCESS, Outcome.SUCCESS, Outcome.ERROR, Outcome.TIMEOUT)


class WholePlane(RuleBasedStateMachine):
    """Legal, late, repeated, unknown and out-of-phase events against the plane's own books."""

    @initialize(
        first=st.one_of(
            st.sampled_from((*CONFIGS[:4], *LADDERED, *LADDERED[:2], *SCALED)), trees.grown(BASE)
        ),
        pools=st.lists(st.sampled_from(("any", "own")), min_size=1, max_size=3),
    )
    def begin(self, first: PlaneConfig, pools: list[str]) -> None:
        self.segments: list[bytearray] = []
        self.plane = Plane()
        self.recorder = Recorder(self.plane, self.sink, segment_bytes=40_000)
        self.now = InstantNs(0)
        self.requests = 0
        self.epoch = 0
        self.life = 0
        self.lives: list[tuple[str, int, str]] = []
        self.drained: set[int] = set()
        self.attempts: list[AttemptId] = []
        self.made: Counter[AttemptId] = Counter()
        self.offered: set[RequestId] = set()
        self.over: set[RequestId] = set()
        self.snapshots: list[Snapshot] = []
        self.revision = 0
        self.groups: list[tuple[ReplicaName, PoolName]] = []
        self.settled: dict[tuple[str, str], int] = {}
        self.change(first)
        for name, pool in zip(NAMES, pools, strict=False):
            self.up(name, pool)

    def sink(self, frame: bytes, opens: bool) -> None:
        if opens:
            self.segments.append(bytearray())
        self.segments[-1] += frame

    def tell(self, event: Event) -> None:
        before = self.plane.freeze()
        effects = self.recorder.handle(event, now=self.now)
        for effect in effects:
            self.note(effect)
        self.settle(anew=isinstance(event, ConfigChanged))
        if self.requests % 7 == 0:  # a thawed plane goes on alike
            twin = Plane.thaw(before)
            assert twin.freeze() == before
            assert twin.handle(event, now=self.now) == effects
            assert twin.freeze() == self.plane.freeze()

    def settle(self, *, anew: bool) -> None:
        """No node is ever given back more than it was charged; another cost or shape starts anew."""
        settled = invariants.settled_service(self.plane.state)
        for node, value in settled.items():
            assert value >= (0 if anew else self.settled.get(node, 0)), node
        self.settled = settled

    def note(self, effect: Effect) -> None:
        match effect:
            case Concluded():
                assert effect.request in self.offered
                assert effect.request not in self.over, "two outcomes"
                self.over.add(effect.request)
            case Dispatch():
                assert effect.attempt not in self.attempts
                assert effect.request in self.offered - self.over
                assert (effect.replica, effect.incarnation) in {x[:2] for x in self.lives}
                assert effect.incarnation not in self.drained
                live = self.plane.state.live[effect.request]
                assert live.output_cap is None or effect.output_limit <= live.output_cap
                self.attempts.append(effect.attempt)
            case Cancel():
                assert effect.attempt in self.attempts
                assert (effect.replica, effect.incarnation) in {x[:2] for x in self.lives}
            case Refuse() | Fail():
                assert effect.request in self.offered - self.over
            case AskGroup():
                assert (effect.group, effect.pool) not in self.groups, "a name that is not new"
                self.groups.append((effect.group, effect.pool))
            case WakeGroup() | DrainGroup() | RecallGroup() | StopGroup():
                assert effect.group in self.plane.state.pools[effect.pool].groups
            case _:
                pass

    # What happens ----------------------------------------------------------------------------

    @rule(ns=st.sampled_from((0, 1, MS, 30 * MS, 300 * MS, 2 * S, 15 * S)))
    def pass_time(self, ns: int) -> None:
        self.now = InstantNs(self.now + ns)

    @rule()
    def timer(self) -> None:
        when = self.plane.next_timer()
        if when is not None:
            self.now = max(self.now, when)
        self.tell(TimerDue())
        following = self.plane.next_timer()
        assert following is None or following > self.now

    @rule(
        burst=st.lists(
            st.tuples(
                st.sampled_from("aabbc"),
                st.sampled_from(("interactive", "interactive", "batch", "late", "tight")),
                st.sampled_from((100, 1_500, 3_000, 6_000, 12_000)),
                st.integers(0, 4),
                st.sampled_from((None, None, 1, 600)),
                st.sampled_from((None, None, 1, 300 * MS)),
                st.sampled_from(trees.USERS),
            ),
            min_size=1,
            max_size=8,
        )
    )
    def burst(
        self, burst: list[tuple[str, str, int, int, int | None, int | None, str | None]]
    ) -> None:
        for tenant, slo_class, tokens, prefix, output, ttl, user in burst:
            self.offer(
                prefix,
                tenant=tenant,
                user=user,
                model="m",
                slo_class=slo_class,
                input_tokens=tokens,
                max_output=output,
                ttl_ns=ttl,
            )

    @rule(
        asked=st.fixed_dictionaries(
            {
                "tenant": st.sampled_from(("a", "b", "c", "d", "stranger")),
                "model": st.sampled_from(("m", "m", "old", "n", "unknown")),
                "slo_class": st.sampled_from((None, "interactive", "tight", "batch", "odd")),
                "input_tokens": st.sampled_from((0, 1, 100, 20_000, 90_000)),
                "max_output": st.sampled_from((None, None, 1, 10**12)),
                "ttft_ns": st.sampled_from((None, 50 * MS, 1_000 * S)),
                "gap_ns": st.sampled_from((None, 1, 8 * MS)),
                "ttl_ns": st.sampled_from((None, 1, 10**18)),
                "user": st.sampled_from(trees.USERS),
                "session": st.sampled_from((None, "s", "t", "u")),
                "deferred": st.sampled_from((False, False, True)),
            }
        )
    )
    def arrive(self, asked: dict[str, Any]) -> None:
        self.offer(**asked)

    def offer(self, prefix: int = 0, **asked: Any) -> None:
        self.requests += 1
        request = RequestId(self.requests)
        self.offered.add(request)
        first = 100 * (asked["input_tokens"] % 3)
        chunks: dict[str, Any] = {
            "prefix": tuple(range(first, first + prefix)),
            "prefix_tokens": Tokens(256 if prefix else 0),
            "lowest": (3, 3, 1, 3, 0)[self.requests % 5],
        }
        if self.requests % 2:
            part = asked["input_tokens"] // 4
            chunks |= {"optional": (Tokens(part), Tokens(part // 2)), "prefix_kept": prefix // 2}
        self.tell(RequestArrived(Request(id=request, **chunks, **asked)))
        assert request in self.over or request in self.plane.state.live

    @rule(
        tenant=st.sampled_from(("a", "b", "stranger")),
        model=st.sampled_from(("m", "old", "unknown")),
        slo_class=st.sampled_from((None, "batch", "odd")),
    )
    def put_aside(self, **asked: Any) -> None:
        request = Request(id=RequestId(10**12), input_tokens=Tokens(100), **asked)
        self.tell(RequestDeferred(request))

    @rule(nth=st.integers(0, 30), streamed=st.booleans())
    def leave(self, nth: int, streamed: bool) -> None:
        request = RequestId(max(0, self.requests - nth))
        live = self.plane.state.live.get(request)
        sent = live.attempt if live is not None else None
        timing = self.shown(sent) if streamed and sent is not None else NO_STREAM
        event = ShutDown if request % 2 else CallerLeft
        self.tell(event(request, timing=timing))

    def shown(self, attempt: AttemptId) -> StreamTiming:
        """Return the timing of a running attempt, a token further than any tick told."""
        flight = self.plane.state.ledger.flights[attempt]
        return StreamTiming(
            tokens=Tokens(self.made[attempt] + 1),
            first_at=self.plane.state.live[flight.request].dispatched_at,
            last_at=self.now,
            max_gap_ns=DurationNs(0),
            gaps_over=0,
            gap_counts=(self.made[attempt],),
        )

    def attempt(self, back: int) -> AttemptId:
        """Return an attempt that runs; beyond those a recent one, or one that never was."""
        running = list(self.plane.state.ledger.flights)
        if back < len(running):
            return running[back]
        return self.attempts[-1 - back] if back < len(self.attempts) else AttemptId(10**6 + back)

    @rule(back=st.integers(0, 6))
    def first(self, back: int) -> None:
        self.tell(FirstToken(self.attempt(back)))

    @rule()
    def first_of_all(self) -> None:
        for attempt in list(self.plane.state.ledger.flights):
            self.tell(FirstToken(attempt))

    @rule(moves=st.lists(st.tuples(st.integers(0, 6), st.integers(-3, 900)), max_size=4))
    def tick(self, moves: list[tuple[int, int]]) -> None:
        moved = []
        for back, more in moves:
            attempt = self.attempt(back)
            made = max(0, self.made[attempt] + more)
            self.made[attempt] = max(made, self.made[attempt])
            moved.append((attempt, made))
        self.tell(ProgressTick(tuple(moved)))

    @rule(
        back=st.integers(0, 6),
        outcome=st.sampled_from(OUTCOMES),
        counted=st.sampled_from((None, (10, 0, 0), (1_500, 1_500, 30), (400, 5_000, 2_000))),
        streamed=st.booleans(),
    )
    def end(
        self, back: int, outcome: Outcome, counted: tuple[int, int, int] | None, streamed: bool
    ) -> None:
        attempt = self.attempt(back)
        flight = self.plane.state.ledger.flights.get(attempt)
        timing = self.shown(attempt) if streamed and flight is not None else NO_STREAM
        used = None if counted is None else usage(counted[0], counted[2], counted[1])
        self.tell(Ended(attempt=attempt, outcome=outcome, usage=used, timing=timing))

    @rule(
        name=st.sampled_from(NAMES),
        pool=st.sampled_from(("any", "any", "any", "own", "own", "other", "none")),
    )
    def up(self, name: str, pool: str) -> None:
        self.life += 1
        self.lives.append((name, self.life, pool))
        self.tell(
            ReplicaUp(
                replica=ReplicaName(name), incarnation=Incarnation(self.life), pool=PoolName(pool)
            )
        )

    @precondition(lambda self: self.lives)
    @rule(back=st.integers(0, 5))
    def up_again(self, back: int) -> None:
        """Repeat an old announcement: it changes nothing unless that life never was."""
        name, life, pool = self.lives[-1 - back % len(self.lives)]
        known = {
            x.incarnation
            for m in self.plane.state.models.values()
            for x in m.fleet.replicas.values()
        }
        if life not in known:  # it was lost, as with its pool, and comes back as it was at first
            self.drained.discard(life)
        self.tell(
            ReplicaUp(replica=ReplicaName(name), incarnation=Incarnation(life), pool=PoolName(pool))
        )
        if life in known:
            assert Incarnation(life) in self.plane.state.ledger.loads

    @precondition(lambda self: self.lives)
    @rule(back=st.integers(0, 5), told=st.integers(0, 3))
    def down(self, back: int, told: int) -> None:
        name, life, _ = self.lives[-1 - back % len(self.lives)]
        running = list(self.plane.state.ledger.flights)[:told]
        self.tell(
            ReplicaDown(
                replica=ReplicaName(name),
                incarnation=Incarnation(life),
                timings=tuple((attempt, self.shown(attempt)) for attempt in running),
            )
        )
        assert Incarnation(life) not in self.plane.state.ledger.loads

    @precondition(lambda self: self.lives)
    @rule(back=st.integers(0, 5), really=st.booleans())
    def drain(self, back: int, really: bool) -> None:
        name, life, _ = self.lives[-1 - back % len(self.lives)]
        if not really:
            return
        held = {a for a, f in self.plane.state.ledger.flights.items() if f.incarnation == life}
        if Incarnation(life) in self.plane.state.ledger.loads:
            self.drained.add(life)
        self.tell(ReplicaDraining(replica=ReplicaName(name), incarnation=Incarnation(life)))
        assert held <= set(self.plane.state.ledger.flights), "what runs there goes on"

    @precondition(lambda self: self.lives)
    @rule(
        back=st.integers(0, 5),
        ago=st.sampled_from((-MS, 0, MS, 10 * S)),
        running=st.sampled_from((None, 0, 3)),
        used=st.sampled_from((None, 0, 10**6)),
        hits=st.sampled_from((None, 0, 50, 100)),
    )
    def report(
        self, back: int, ago: int, running: int | None, used: int | None, hits: int | None
    ) -> None:
        name, life, _ = self.lives[-1 - back % len(self.lives)]
        snapshot = Snapshot(
            replica=ReplicaName(name),
            incarnation=Incarnation(life),
            observed_at=InstantNs(self.now - ago),
            running=running,
            kv_blocks_used=None if used is None else Blocks(used),
            prefix_tokens_hit=hits,
        )
        self.snapshots.append(snapshot)
        self.tell(ReplicaReported(snapshot))

    @precondition(lambda self: self.lives)
    @rule(back=st.integers(0, 5))
    def forget(self, back: int) -> None:
        name, life, _ = self.lives[-1 - back % len(self.lives)]
        self.tell(ReplicaForgot(replica=ReplicaName(name), incarnation=Incarnation(life)))
        for known in self.plane.state.models.values():
            there = known.fleet.replicas.get(ReplicaName(name))
            assert there is None or there.incarnation != life or not there.prefixes

    @precondition(lambda self: self.snapshots)
    @rule(back=st.integers(0, 3))
    def report_again(self, back: int) -> None:
        self.tell(ReplicaReported(self.snapshots[-1 - back % len(self.snapshots)]))

    @rule(nth=st.integers(0, len(CONFIGS) - 1), really=st.sampled_from((False, False, True)))
    def configure(self, nth: int, really: bool) -> None:
        if really:
            self.change(CONFIGS[nth])

    @rule(config=trees.grown(BASE))
    def regrow(self, config: PlaneConfig) -> None:
        """Give everybody another place in the tree, other limits, order and cost, or none at all."""
        self.change(config)

    def change(self, config: PlaneConfig) -> None:
        self.revision += 1
        self.tell(ConfigChanged(revision=self.revision, config=canonical(config)))

    @rule(
        back=st.integers(0, 6),
        step=st.sampled_from((GroupStep.COMING, GroupStep.COMING, GroupStep.READY, *GroupStep)),
        stage=st.sampled_from((None, *Stage)),
        gpus=st.sampled_from((0, 1, 2, 2, 2)),
        serves=st.booleans(),
        ails=st.sampled_from((None, None, (), *((one,) for one in Ail))),
    )
    def group(
        self, back: int, step: GroupStep, stage: Stage | None, gpus: int, serves: bool,
        ails: tuple[Ail, ...] | None,
    ) -> None:  # fmt: skip
        """Tell of a group: one that was asked for, a replica as one, or one that nobody knows."""
        name, pool = self.some_group(back)
        self.tell(GroupTold(group=name, pool=pool, step=step, stage=stage, gpus=gpus, ails=ails))
        if serves:
            self.up(name, pool)

    def some_group(self, back: int) -> tuple[ReplicaName, PoolName]:
        if back < len(self.groups):
            return self.groups[-1 - back]
        return ReplicaName(NAMES[back % len(NAMES)]), PoolName("any")

    @rule(
        there=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(tuple(GroupStep))), max_size=4)
    )
    def groups_listed(self, there: list[tuple[int, GroupStep]]) -> None:
        named = {self.some_group(back): step for back, step in there}
        told = [
            GroupTold(group=name, pool=pool, step=step, gpus=2)
            for (name, pool), step in named.items()
        ]
        self.tell(GroupsListed(groups=tuple(told)))

    @rule(frozen=st.booleans(), wall=st.sampled_from((None, 0, 1_735_891_110)))
    def freeze(self, frozen: bool, wall: int | None) -> None:
        self.tell(ScaleFrozen(frozen) if wall is None else WallTold(wall))

    @rule(really=st.sampled_from((False, False, False, True)))
    def restart(self, really: bool) -> None:
        if not really:
            return
        self.epoch += 1
        self.tell(Restarted(self.epoch))
        invariants.over(self.plane)
        for name in NAMES[:2]:
            self.up(name, "any")

    # What holds ------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        invariants.hold(self.plane, self.now)
        live = set(self.plane.state.live)
        assert live | self.over == self.offered
        assert not live & self.over

    def teardown(self) -> None:
        if not hasattr(self, "plane"):
            return
        for request, live in list(self.plane.state.live.items()):
            if live.phase is Phase.QUEUED or request % 2:
                self.tell(CallerLeft(request))
        for attempt in list(self.plane.state.ledger.flights):
            self.tell(Ended(attempt=attempt, outcome=Outcome.ERROR, usage=None, timing=NO_STREAM))
        for request in list(self.plane.state.live):
            self.tell(CallerLeft(request))
        invariants.over(self.plane)
        assert self.over == self.offered
        found = verify([bytes(segment) for segment in self.segments])
        assert isinstance(found, Verified), found
        last = verify([bytes(self.segments[-1])])
        assert isinstance(last, Verified), last


TestWholePlane = WholePlane.TestCase
TestWholePlane.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)


def test_a_turn_that_a_booking_moved_is_given_in_the_same_breath() -> None:
    """Who was sent pays, so that a class with no place for one tenant's work may have it for another's."""
    plane = WholePlane()
    plane.begin(CONFIGS[3], pools=["own"])
    plane.burst(
        burst=[
            ("a", "interactive", 1_500, 0, 1, None, None),
            ("c", "late", 6_000, 4, 600, None, None),
            ("b", "late", 3_000, 4, 600, None, None),
            ("a", "late", 12_000, 4, 600, None, None),
            ("a", "interactive", 3_000, 4, None, None, None),
            ("b", "batch", 1_500, 3, 1, None, None),
            ("c", "tight", 3_000, 2, 1, None, None),
            ("c", "interactive", 12_000, 3, 600, None, None),
        ]
    )
    plane.up(name="r3", pool="any")
    for one in (
        ("b", "interactive", 6_000, 0, 1, None, None),
        ("a", "interactive", 12_000, 1, None, None, None),
        ("b", "interactive", 1_500, 4, None, None, None),
        ("b", "late", 100, 2, None, None, None),
        ("c", "interactive", 100, 3, 600, None, None),
        ("a", "batch", 12_000, 1, None, None, None),
        ("a", "interactive", 100, 3, 600, None, None),
        ("a", "tight", 12_000, 4, 600, None, None),
    ):
        plane.burst(burst=[one])
        plane.books_balance()
    plane.teardown()
