"""Service-level indicators, objectives and agreements, and the arithmetic of meeting them.

An indicator (SLI) is a measured value, an objective (SLO) an internal target on indicators, an
agreement (SLA) a contract with a customer that binds objectives to a credit: three records, and no
objective is an agreement by default (SLO-1).
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.meter import GAP_EDGES_NS, StreamTiming
from headrace.units import MICRO, NS_PER_MS, DurationNs, InstantNs

FORMULA_REVISION = "goodput-1"
"""Revision of the goodput and attainment formulas below; printed beside every figure (SLO-4)."""


class Indicator(StrEnum):
    """What an objective measures (SLO-2)."""

    TTFT = "ttft"
    TPOT = "tpot"
    GAP = "gap"
    MAX_STALL = "max_stall"
    E2E = "e2e"


class Per(StrEnum):
    """What an objective counts: its population is requests, or their pooled gaps or tokens."""

    REQUEST = "request"
    GAP = "gap"
    TOKEN = "token"  # noqa: S105 - a unit of counting, not a secret


class Outcome(StrEnum):
    """How an admitted request ended. Everything but `SUCCESS` is a miss (SLO-4)."""

    SUCCESS = "success"
    CLIENT_CANCEL = "client_cancel"
    TIMEOUT = "timeout"
    ERROR = "error"


class Exclusion(StrEnum):
    """What may be left out of an objective's population; nothing else ever is."""

    LEFT_BEFORE_ADMISSION = "left_before_admission"


class Bounds(Struct, frozen=True, kw_only=True, gc=False):
    """The bounds one request was promised: its class's, or tighter ones of the caller."""

    ttft_ns: DurationNs | None
    """First content-bearing token; None for classes judged by completion alone."""
    gap_ns: DurationNs
    """Each inter-token gap; judged pooled over gaps, not per request."""
    tpot_ns: DurationNs
    """Mean time per output token after the first."""
    stall_ns: DurationNs | None = None
    """Largest single gap."""
    e2e_ns: DurationNs | None = None
    """Completion."""

    @property
    def mean_ns(self) -> DurationNs:
        """The bound on the mean time per token, where it asks for more than that of each gap; else 0."""
        return self.tpot_ns if self.tpot_ns < self.gap_ns else DurationNs(0)


class Indicators(Struct, frozen=True, kw_only=True, gc=False):
    """The measured values of one request that made at least one token (SLO-2).

    `route + queue + prefill + first_decode = ttft` and `ttft + gaps + postprocess = e2e`, exactly.
    """

    route_ns: DurationNs
    queue_ns: DurationNs
    prefill_ns: DurationNs
    first_decode_ns: DurationNs
    inferred: bool
    """Whether the split between engine queue, prefill and first decode is inferred, not seen."""
    ttft_ns: DurationNs
    gaps_ns: DurationNs
    """Sum of all inter-token gaps."""
    postprocess_ns: DurationNs
    e2e_ns: DurationNs
    tokens: int
    max_stall_ns: DurationNs
    gaps_over: int

    def tpot_ns(self) -> float | None:
        """Return mean ns per output token after the first; None for one token."""
        return self.gaps_ns / (self.tokens - 1) if self.tokens > 1 else None


class Moments(Struct, frozen=True, kw_only=True, gc=False):
    """The instants of one request's life, as the gateway saw them."""

    arrived_at: InstantNs
    decided_at: InstantNs
    dispatched_at: InstantNs
    ended_at: InstantNs
    first_decode_ns: DurationNs
    """Predicted length of the step that made the first token: the inferred last part of TTFT."""


def indicators(moments: Moments, timing: StreamTiming) -> Indicators | None:
    """Return a request's indicators, or None if it made no token.

    The gateway sees dispatch and first token; the split of the time between into prefill and first
    decode is inferred from the predicted step and marked so. The parts sum exactly either way.
    """
    if timing.first_at is None or timing.last_at is None:
        return None
    in_engine = timing.first_at - moments.dispatched_at
    first_decode = min(moments.first_decode_ns, in_engine)
    return Indicators(
        route_ns=DurationNs(moments.decided_at - moments.arrived_at),
        queue_ns=DurationNs(moments.dispatched_at - moments.decided_at),
        prefill_ns=DurationNs(in_engine - first_decode),
        first_decode_ns=DurationNs(first_decode),
        inferred=True,
        ttft_ns=DurationNs(timing.first_at - moments.arrived_at),
        gaps_ns=DurationNs(timing.last_at - timing.first_at),
        postprocess_ns=DurationNs(moments.ended_at - timing.last_at),
        e2e_ns=DurationNs(moments.ended_at - moments.arrived_at),
        tokens=timing.tokens,
        max_stall_ns=timing.max_gap_ns,
        gaps_over=timing.gaps_over,
    )


def misses(seen: Indicators, bounds: Bounds) -> tuple[Indicator, ...]:
    """Return the per-request bounds that were missed; a bound that is undefined counts as met.

    Gaps are not among them: they are pooled over the population (`Per.GAP`), and an average TPOT
    never stands in for them.
    """
    found: list[Indicator] = []
    if bounds.ttft_ns is not None and seen.ttft_ns > bounds.ttft_ns:
        found.append(Indicator.TTFT)
    if seen.gaps_ns > bounds.tpot_ns * (seen.tokens - 1):
        found.append(Indicator.TPOT)
    if bounds.stall_ns is not None and seen.max_stall_ns > bounds.stall_ns:
        found.append(Indicator.MAX_STALL)
    if bounds.e2e_ns is not None and seen.e2e_ns > bounds.e2e_ns:
        found.append(Indicator.E2E)
    return tuple(found)


class Population(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom an objective is about; an empty selector selects everyone."""

    slo_class: ClassName | None = None
    tenant: TenantId | None = None
    model: ModelName | None = None
    model_revision: str | None = None
    region: str | None = None


class Objective(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One indicator, its threshold, what it counts and which share must hold it.

    `indicator: gap, per: gap, threshold_ms: 80, target: 0.99` reads "99 % of gaps <= 80 ms".
    """

    indicator: Indicator
    threshold_ms: Annotated[float, Meta(gt=0, le=86_400_000)]
    target: Annotated[float, Meta(gt=0, le=1)] = 0.99
    per: Per = Per.REQUEST

    def __post_init__(self) -> None:
        """Refuse a count that the indicator does not have."""
        if self.per is Per.GAP and self.indicator is not Indicator.GAP:
            raise ValueError(f"per: gap needs indicator gap, not {self.indicator}")
        if self.indicator is Indicator.GAP and self.per is Per.REQUEST:
            raise ValueError(
                "indicator gap counts per: gap or per: token; max_stall is per request"
            )


class Slo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An internal target: population, window, objectives, exclusions, revision (SLO-1)."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    objectives: tuple[Objective, ...]
    population: Population = Population()
    window_days: Annotated[float, Meta(gt=0, le=366)] = 28.0
    exclusions: tuple[Exclusion, ...] = (Exclusion.LEFT_BEFORE_ADMISSION,)
    revision: Annotated[int, Meta(ge=1)] = 1


class Sla(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A contract with a customer: objectives by name, and what a breach costs us."""

    customer: TenantId
    slos: tuple[str, ...]
    credit_percent: Annotated[float, Meta(ge=0, le=100)] = 0.0
    revision: Annotated[int, Meta(ge=1)] = 1


class Attainment(Struct, frozen=True, kw_only=True, gc=False):
    """A share with its denominator: never one without the other (SLO-5)."""

    met: int
    counted: int

    def ratio(self) -> float | None:
        """Return met / counted, or None of nothing."""
        return self.met / self.counted if self.counted else None

    def holds(self, target: float) -> bool:
        """Return whether the target is met, exactly: nothing counted holds any target."""
        return self.met * MICRO >= round(target * MICRO) * self.counted


def attain(objective: Objective, seen: Iterable[tuple[Indicators, StreamTiming]]) -> Attainment:
    """Return an objective's attainment over what its population measured (EX-1).

    Pooled gaps are exact where the threshold is a bucket edge; else a bucket that the threshold
    cuts counts as over, never as met.
    """
    met = counted = 0
    for one, timing in seen:
        good, total = count(objective, one, timing)
        met += good
        counted += total
    return Attainment(met=met, counted=counted)


def count(
    objective: Objective, one: Indicators, timing: StreamTiming, bound_ns: int | None = None
) -> tuple[int, int]:
    """Return how many requests, gaps or tokens of one request held an objective, and of how many.

    `bound_ns` is the gap bound that the stream itself was counted by; where it is the objective's
    threshold, gaps are exact whatever the buckets.
    """
    limit = round(objective.threshold_ms * NS_PER_MS)
    if objective.indicator is Indicator.GAP:
        good = gaps_within(timing, limit, bound_ns)
        if objective.per is Per.TOKEN:  # the first token has no gap: it counts as met
            return good + min(1, one.tokens), one.tokens
        return good, max(0, one.tokens - 1)
    value = {
        Indicator.TTFT: one.ttft_ns,
        Indicator.TPOT: one.tpot_ns() or 0,
        Indicator.MAX_STALL: one.max_stall_ns,
        Indicator.E2E: one.e2e_ns,
    }[objective.indicator]
    weight = one.tokens if objective.per is Per.TOKEN else 1
    return (weight if value <= limit else 0), weight


def gaps_within(timing: StreamTiming, limit_ns: int, bound_ns: int | None = None) -> int:
    """Return how many gaps surely are <= `limit_ns`: whole buckets below it, or all not over.

    Exact where the limit is a bucket edge or `bound_ns`, the bound the stream was counted by.
    """
    if limit_ns == bound_ns:
        return sum(timing.gap_counts) - timing.gaps_over
    return sum(
        number
        for edge, number in zip(GAP_EDGES_NS, timing.gap_counts, strict=False)
        if edge <= limit_ns
    )
