"""One cell of the overload table: a mix at a load, under our plane and under every limit without one.

Limits are swept in steps of at most a quarter, and the best of each kind is known in hindsight only. The
sweep is on the first seed; the best few of it then on all seeds. Ours has one configuration for all cells.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import fmean

from msgspec import Struct

from benchmarks.doors import TPOT_NS, TTFT_NS, Door, bucket, inside_below, stand, waiting_below
from benchmarks.mixes import ENGINE, Came, Load, came
from benchmarks.scenes import CHAT, MODEL
from benchmarks.tenants import A, B, C
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.evidence import DecisionRecord
from headrace.model.ids import ClassName
from headrace.policy.admission.gates import Gates, Length
from headrace.policy.batching import ChunkedPrefill
from headrace.policy.catalog import PlaneConfig
from headrace.report.run import RunRecord
from headrace.sim.experiment import simulate
from headrace.sim.faults import Repeaters
from headrace.sim.scenario import Scenario
from headrace.trace.mix import Fixed, Mix, Poisson, TenantSource
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_MS

KINDS = ("inside", "waiting", "tokens")
FINALISTS = 3
BUCKET_TOKENS = 16_384
"""What a token bucket holds when it is full: the longest document."""
SOON, HASTY, BATCH = ClassName("soon"), ClassName("hasty"), ClassName("batch")
"""The classes of the three tenants with a hog among them, beside that of all else."""


@cache
def ours(length: Length) -> PlaneConfig:
    """Return the one configuration of all mixes and of tenants, with its policy for lengths."""
    gap_ms = TPOT_NS / NS_PER_MS
    classes = (
        ClassSpec(name=CHAT, ttft_ms=TTFT_NS / NS_PER_MS, itl_ms=gap_ms),
        ClassSpec(name=SOON, ttft_ms=1_000.0, itl_ms=gap_ms),
        ClassSpec(name=HASTY, ttft_ms=500.0, itl_ms=gap_ms),
        ClassSpec(name=BATCH, ttft_ms=120_000.0, itl_ms=1_000.0),
    )
    pool = PoolSpec(name="pool", model=MODEL, profile=ENGINE.profile)
    return PlaneConfig(
        models=(ModelSpec(name=MODEL),),
        pools=(pool,),
        tenants=tuple(TenantSpec(name=name) for name in ("tenant", A, B, C)),
        classes=classes,
        admission=Gates(length=length),
    )


def under_ours(
    rows: Sequence[TraceRow], seed: int, length: Length, repeaters: Repeaters | None = None
) -> RunRecord:
    """Run a trace through our plane, before the same engine as every limit."""
    return under(ours(length), rows, seed, repeaters)


def under(
    deployment: PlaneConfig,
    rows: Sequence[TraceRow],
    seed: int,
    repeaters: Repeaters | None = None,
    decisions: Callable[[DecisionRecord], None] | None = None,
) -> RunRecord:
    """Run a trace through a plane of ours as it is configured."""
    nothing = TenantSource(tenant=A, arrivals=Poisson(1.0), lengths=Fixed(1, 1))
    scene = Scenario(
        name="overload",
        deployment=deployment,
        mix=Mix(sources=(nothing,), rows=1),  # `rows` stand for it
        batching=ChunkedPrefill(token_budget=ENGINE.profile.token_budget),
        noise_percent=0.0,
        faults=() if repeaters is None else (repeaters,),
    )
    return simulate(scene, seed, rows, rules=ENGINE.rules, decisions=decisions)


def ours_came(
    load: Load, rate: float, seed: int, length: Length, repeaters: Repeaters | None
) -> Came:
    """Return what came of a mix under our plane."""
    rows = load.rows(rate, seed)
    admitted, met = [False] * len(rows), [False] * len(rows)
    for row in under_ours(rows, seed, length, repeaters).rows:
        admitted[row.request - 1], met[row.request - 1] = row.admitted, row.met
    return came(load, rows, admitted, met)


Settings = dict[tuple[str, float], Callable[[], Door]]


def settings(stride: int = 1) -> Settings:
    """Return every limit by (kind, setting); with a stride, one in so many."""
    found: Settings = {}
    for limit in _counts(256)[::stride]:
        found["inside", limit] = partial(inside_below, limit)
    for limit in _counts(80)[::stride]:
        found["waiting", limit] = partial(waiting_below, limit)
    for nth in range(0, 26, stride):
        rate = round(50 * 1.25**nth)
        found["tokens", rate] = partial(bucket, rate, BUCKET_TOKENS)
    return found


def _counts(most: int) -> list[int]:
    """Return whole numbers from 1 up, each at most a quarter above the one before, or one more."""
    found = [1]
    while found[-1] < most:
        found.append(max(found[-1] + 1, found[-1] * 5 // 4))
    return found


class Cell(Struct, frozen=True, kw_only=True):
    """What came of one mix at one load, by seed."""

    load: float
    ours: dict[Length, list[Came]]
    swept: dict[tuple[str, float], float]
    """Work that met its bounds under each setting, on the first seed."""
    best: dict[str, tuple[float, list[Came]]]
    """By kind of limit, the setting that is best over all seeds, and what came under it."""

    def work(self, length: Length) -> float:
        """Return our work that met its bounds, over seeds."""
        return fmean(one.work() for one in self.ours[length])

    def best_work(self, *kinds: str) -> float:
        """Return the most that limits of some kinds had, over seeds."""
        return max(fmean(one.work() for one in self.best[kind][1]) for kind in kinds)

    def longest(self, length: Length) -> float:
        """Return the longest tenth's admission rate over that of all, over seeds."""
        return fmean(one.longest() for one in self.ours[length])


def measure(
    load: Load,
    times: float,
    capacity: float,
    seeds: Sequence[int],
    swept: Settings,
    repeaters: Repeaters | None = None,
) -> Cell:
    """Measure one cell."""
    rate = times * capacity
    mine = {
        length: [ours_came(load, rate, seed, length, repeaters) for seed in seeds]
        for length in Length
    }

    def tried(setting: tuple[str, float], seed: int) -> Came:
        rows = load.rows(rate, seed)
        found = stand(ENGINE, rows, swept[setting](), repeaters=repeaters, seed=seed)
        return came(load, rows, found.admitted, found.met)

    first = {setting: tried(setting, seeds[0]) for setting in swept}
    best = {}
    for kind in KINDS:
        ranked = sorted((s for s in swept if s[0] == kind), key=lambda s: -first[s].work())
        finals = [
            (setting[1], [first[setting], *(tried(setting, seed) for seed in seeds[1:])])
            for setting in ranked[:FINALISTS]
        ]
        best[kind] = max(finals, key=lambda one: fmean(each.work() for each in one[1]))
    works = {setting: each.work() for setting, each in first.items()}
    return Cell(load=times, ours=mine, swept=works, best=best)
