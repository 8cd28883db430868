"""How many groups each pool has and is to have, and why: kept of the decisions, for people and metrics."""

from collections import Counter, deque

from msgspec import Struct

from headrace.gateway.cost import CostState
from headrace.gateway.driver import Driver
from headrace.model.ids import ModelName, PoolName
from headrace.model.scaling import Reading, ScaleRecord
from headrace.plane.groups import standing
from headrace.units import InstantNs, elapsed, to_seconds

KEPT = 20
"""Decisions of a pool that are shown: the last ones."""
FLOOR = "floor"
"""Why so many are to be there, where no signal asks for them."""


class ScaleFeed:
    """What the decisions of the scaler come to, by pool."""

    def __init__(self) -> None:
        """Have seen none."""
        self.begun: InstantNs | None = None
        """Since when groups are paid for here; None: since the first decision."""
        self.last: dict[PoolName, deque[ScaleRecord]] = {}
        self.reasons: Counter[tuple[PoolName, str]] = Counter()
        """Decisions by what asked for most."""
        self.brakes: Counter[tuple[PoolName, str]] = Counter()
        """Decisions by what kept them from what was asked for."""
        self.steps: Counter[tuple[PoolName, str]] = Counter()
        """Groups asked for, woken, drained and so on."""
        self.gpu_ns: Counter[PoolName] = Counter()
        """GPU time held: what each decision found, from the one before it on."""

    @property
    def held(self) -> dict[PoolName, tuple[int, InstantNs]]:
        """GPU time held up to the last decision, in ns, and when that was, by pool."""
        return {pool: (self.gpu_ns[pool], kept[-1].at) for pool, kept in self.last.items()}

    def decided(self, record: ScaleRecord) -> None:
        """Count a decision."""
        decision, pool = record.decision, record.decision.pool
        kept = self.last.setdefault(pool, deque(maxlen=KEPT))
        since = kept[-1].at if kept else self.begun
        if since is not None:
            held = sum(group.gpus for group in record.evidence.groups)
            self.gpu_ns[pool] += held * (record.at - since)
        kept.append(record)
        self.reasons[pool, decision.winner or FLOOR] += 1
        for brake in decision.brakes:
            self.brakes[pool, brake] += 1
        steps = decision.steps
        for step, count in (
            ("ask", steps.ask), ("standby", steps.standby), ("wake", len(steps.wake)),
            ("recall", len(steps.recall)), ("cancel", len(steps.cancel)),
            ("release", len(steps.release)), ("drain", len(steps.drain)),
        ):  # fmt: skip
            if count:
                self.steps[pool, step] += count


class GroupRow(Struct, frozen=True, kw_only=True):
    """One group, as the plane knows it."""

    group: str
    standing: str
    stage: str
    """Of its start; empty: it serves, or has."""
    for_s: float
    """How long it has stood so."""
    gpus: int
    """GPUs it holds."""
    domain: str


class Decision(Struct, frozen=True, kw_only=True):
    """One decision, in short; `headrace scale explain` tells all of one."""

    decision_id: int
    ago_s: float
    desired: int
    ordered: int
    reason: str
    brakes: tuple[str, ...]
    readings: tuple[Reading, ...]
    steps: dict[str, int | list[str]]


class PoolRow(Struct, frozen=True, kw_only=True):
    """One pool that scales, or whose groups are not all gone yet."""

    pool: str
    mode: str | None
    """None: it scales no more."""
    groups: list[GroupRow]
    decisions: list[Decision]
    """The newest first."""


class ScaleState(Struct, frozen=True, kw_only=True):
    """What `GET /scale` answers."""

    frozen: bool
    pools: list[PoolRow]
    cost: CostState
    """Of all pools since this process began."""


def scale_state(driver: Driver, feed: ScaleFeed, now: InstantNs, cost: CostState) -> ScaleState:
    """Return how all pools stand that scale."""
    state = driver.plane.state
    now = max(now, state.now)
    rows = []
    for pool in state.pools:
        facts = driver.plane.settings.scaled.get(pool)
        told = [_short(record, now) for record in reversed(feed.last.get(pool, ()))]
        rows.append(
            PoolRow(
                pool=pool,
                mode=None if facts is None else facts.settings.mode,
                groups=_groups(driver, pool, now),
                decisions=told,
            )
        )
    return ScaleState(frozen=state.scale_frozen, pools=rows, cost=cost)


def standings(driver: Driver, pool: PoolName) -> Counter[str]:
    """Return how many groups of a pool stand how."""
    return Counter(row.standing for row in _groups(driver, pool, driver.plane.state.now))


def _groups(driver: Driver, pool: PoolName, now: InstantNs) -> list[GroupRow]:
    plane = driver.plane
    spec = plane.settings.pools.get(pool)
    known = None if spec is None else plane.state.models.get(ModelName(spec.spec.model))
    return [
        GroupRow(
            group=one.name,
            standing="stopping" if known is None else standing(known, one),
            stage=one.stage,
            for_s=to_seconds(elapsed(one.since, now)),
            gpus=one.gpus,
            domain=one.domain,
        )
        for one in plane.state.pools[pool].groups.values()
    ]


def _short(record: ScaleRecord, now: InstantNs) -> Decision:
    found, steps = record.decision, record.decision.steps
    done: dict[str, int | list[str]] = {
        name: list(value) if isinstance(value, tuple) else value
        for name in steps.__struct_fields__
        if (value := getattr(steps, name))
    }
    return Decision(
        decision_id=record.decision_id,
        ago_s=to_seconds(elapsed(record.at, now)),
        desired=found.desired,
        ordered=found.ordered,
        reason=found.winner or FLOOR,
        brakes=tuple(map(str, found.brakes)),
        readings=found.readings,
        steps=done,
    )
