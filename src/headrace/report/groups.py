"""What became of a group of offered requests?

Counts, rates and percentiles of one population: all requests, a class, a tenant, or a tenant's
class. Every share stands beside what it is a share of (SLO-5).
"""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from headrace.model.effect import Concluded
from headrace.model.ids import ClassName, TenantId
from headrace.model.meter import GAP_BUCKETS
from headrace.model.slo import Outcome
from headrace.report.run import Offered
from headrace.report.stats import (
    GapQuantiles,
    Quantiles,
    add_counts,
    gap_quantiles,
    quantiles,
    ratio,
)
from headrace.units import NS_PER_S, DurationNs, ceil_div


class EntryResult(StrEnum):
    """How an offered request entered: each has exactly one, so they sum to offered (SLO-4)."""

    ADMITTED = "admitted"
    DEGRADED = "degraded"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    LEFT_BEFORE = "left_before"


class Latency(Struct, frozen=True, kw_only=True):
    """Percentiles of what admitted requests measured; each has its own count."""

    queue: Quantiles | None
    """From decision to dispatch; for those never dispatched, until they ended."""
    ttft: Quantiles | None
    """Of all that made a token, however they ended."""
    tpot: Quantiles | None
    """Of answers of at least two tokens; whole ns, rounded up."""
    stall: Quantiles | None
    """The largest gap of each answer of at least two tokens."""
    e2e: Quantiles | None
    """Of successes: a stream cut short has no end-to-end time."""
    gaps: GapQuantiles | None
    """All gaps pooled."""


class Group(Struct, frozen=True, kw_only=True):
    """One population with all its denominators."""

    tenant: TenantId | None
    """None: all tenants."""
    slo_class: ClassName | None
    """None: all classes."""
    offered: int
    input_tokens: int
    predicted_output_tokens: int
    """p50 at arrival."""
    output_tokens: int
    """True lengths, alike for every policy."""
    work_ns: int
    """Work of the true lengths as if nothing were cached."""
    entry: dict[EntryResult, int]
    """How they entered; sums to `offered`."""
    waiting: int = 0
    """Of the deferred, those that were not sent to a replica: neither admitted nor over."""
    admitted: int
    """The denominator of attainment: admitted as asked, degraded, or deferred and dispatched."""
    degraded_by: dict[str, int] = {}
    """Of the admitted, those in a lesser form, by level of the ladder; sums to the degraded."""
    rejected_by: dict[str, int]
    """By reason; sums to the rejected."""
    outcomes: dict[Outcome, int]
    """How the admitted ended; sums to `admitted`."""
    ended_by: dict[str, int]
    """Admitted that ended early, by reason."""
    met: int
    """Admitted, succeeded, inside every declared bound."""
    met_output_tokens: int
    met_work_ns: int
    """Their work: of the true lengths, or of what was served in a lesser form."""
    admitted_work_ns: int
    """The same of the admitted; the rest was refused, given up in lesser forms, or left."""
    missed_by: dict[str, int]
    """Admitted that missed a per-request bound, by indicator; one may miss several."""
    attained_admitted: float | None
    """met / admitted."""
    attained_offered: float | None
    """met / offered."""
    request_goodput: float | None
    """Requests that met, per second of `Summary.served_ns`."""
    token_goodput: float | None
    """Their output tokens, per second."""
    work_goodput: float | None
    """Their work, GPU-seconds per second."""
    work_rate: float | None
    """Work offered, GPU-seconds per second of arrivals."""
    work_attained: float | None
    """Work that met / work offered."""
    attempts: int
    retry_amplification: float | None
    """Attempts per logical request: 1, as nothing is retried yet."""
    success_per_request: float | None
    """Successes per logical request."""
    cached_tokens: int
    """Input tokens that engines found in their prefix caches."""
    usage_input_tokens: int
    """Input tokens of requests whose usage is known: what `cached_tokens` is a share of."""
    latency: Latency

    @property
    def rejected(self) -> int:
        """How many were refused at the door."""
        return self.entry[EntryResult.REJECTED]

    @property
    def unmet_work_ns(self) -> int:
        """Offered work that did not meet its objective: who suffers most has most of it."""
        return self.work_ns - self.met_work_ns


class Times(Struct, frozen=True, kw_only=True, gc=False):
    """What rates are per; the same for every part of a run, so that parts add up."""

    span_ns: DurationNs
    """From the first arrival to the last."""
    served_ns: DurationNs
    """From the first arrival to the end of the last request that met, and no less than the span.

    Dividing what drains after the last arrival by the span would credit machines with more than
    they can do.
    """


def times_of(span_ns: DurationNs, rows: Iterable[Concluded]) -> Times:
    """Return what the rates of a run are per."""
    first = last = None
    for row in rows:
        arrived = row.entry.arrived_at
        first = arrived if first is None else min(first, arrived)
        if row.met:
            last = row.ended_at if last is None else max(last, row.ended_at)
    drained = 0 if first is None or last is None else last - first
    return Times(span_ns=span_ns, served_ns=DurationNs(max(span_ns, drained)))


class Cell:
    """Sums up requests of one population as they come; cells of parts merge into the whole's."""

    def __init__(self) -> None:
        """Start with nobody."""
        self.offered = self.input = self.predicted = self.output = self.work = 0
        self.met = self.met_output = self.met_work = self.admitted_work = 0
        self.cached = self.usage_input = self.max_gap = self.waiting = 0
        self.entry = dict.fromkeys(EntryResult, 0)
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.degraded_by: dict[str, int] = {}
        self.rejected_by: dict[str, int] = {}
        self.ended_by: dict[str, int] = {}
        self.missed_by: dict[str, int] = {}
        self.gaps = [0] * GAP_BUCKETS
        self.measured: dict[str, list[int]] = {name: [] for name in _MEASURED}

    def add(self, offered: Offered, row: Concluded) -> None:
        """Count one request."""
        self.offered += 1
        self.input += offered.input_tokens
        self.predicted += row.entry.predicted_output
        self.output += offered.output_tokens
        self.work += offered.work_ns
        result = entry_result(row)
        self.entry[result] += 1
        if not row.admitted:
            if row.deferred:
                self.waiting += 1
            elif row.reason is not None:
                _bump(self.rejected_by, row.reason)
            return
        assert row.outcome is not None, f"{row.request=} was admitted and has no outcome"
        self.outcomes[row.outcome] += 1
        if row.level:
            _bump(self.degraded_by, f"level {row.level}")
        work = row.work_ns if row.level and row.work_ns else offered.work_ns
        self.admitted_work += work
        if row.reason is not None:
            _bump(self.ended_by, row.reason)
        for indicator in row.missed:
            _bump(self.missed_by, indicator)
        if row.met:
            self.met += 1
            self.met_work += work
            self.met_output += _tokens_made(row)
        if row.usage is not None:
            self.cached += row.usage.cached_tokens
            self.usage_input += row.usage.input_tokens
        self._measure(row)

    def _measure(self, row: Concluded) -> None:
        measured, seen = self.measured, row.indicators
        if row.replica is None:
            measured["queue"].append(row.ended_at - row.entry.arrived_at)
        if seen is None:
            return
        measured["queue"].append(seen.queue_ns)
        measured["ttft"].append(seen.ttft_ns)
        if seen.tokens > 1:
            measured["tpot"].append(ceil_div(seen.gaps_ns, seen.tokens - 1))
            measured["stall"].append(seen.max_stall_ns)
            self.max_gap = max(self.max_gap, seen.max_stall_ns)
        if row.outcome is Outcome.SUCCESS:
            measured["e2e"].append(seen.e2e_ns)
        if row.timing is not None:
            add_counts(self.gaps, row.timing.gap_counts)

    def merge(self, part: "Cell") -> None:
        """Add another population's requests to this one's."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(part, name))
        self.max_gap = max(self.max_gap, part.max_gap)
        for result, number in part.entry.items():
            self.entry[result] += number
        for outcome, number in part.outcomes.items():
            self.outcomes[outcome] += number
        for mine, theirs in (
            (self.degraded_by, part.degraded_by),
            (self.rejected_by, part.rejected_by),
            (self.ended_by, part.ended_by),
            (self.missed_by, part.missed_by),
        ):
            for key, number in theirs.items():
                mine[key] = mine.get(key, 0) + number
        add_counts(self.gaps, part.gaps)
        for name, values in part.measured.items():
            self.measured[name] += values

    def group(self, tenant: TenantId | None, slo_class: ClassName | None, times: "Times") -> Group:
        """Return the population's figures: what was offered per span, what met per time served."""
        admitted = sum(self.outcomes.values())
        rejected = self.entry[EntryResult.REJECTED]
        assert sum(self.entry.values()) == self.offered, "an offered request has one entry result"
        assert sum(self.rejected_by.values()) == rejected, "a rejection has one reason"
        entered = admitted + rejected + self.waiting + self.entry[EntryResult.LEFT_BEFORE]
        assert entered == self.offered, "an admitted request has one outcome"
        span, served = times.span_ns / NS_PER_S, times.served_ns / NS_PER_S
        return Group(
            tenant=tenant,
            slo_class=slo_class,
            offered=self.offered,
            input_tokens=self.input,
            predicted_output_tokens=self.predicted,
            output_tokens=self.output,
            work_ns=self.work,
            entry=self.entry,
            waiting=self.waiting,
            admitted=admitted,
            degraded_by=dict(sorted(self.degraded_by.items())),
            rejected_by=_sorted(self.rejected_by),
            outcomes=self.outcomes,
            ended_by=_sorted(self.ended_by),
            met=self.met,
            met_output_tokens=self.met_output,
            met_work_ns=self.met_work,
            admitted_work_ns=self.admitted_work,
            missed_by=_sorted(self.missed_by),
            attained_admitted=ratio(self.met, admitted),
            attained_offered=ratio(self.met, self.offered),
            request_goodput=ratio(self.met, served),
            token_goodput=ratio(self.met_output, served),
            work_goodput=ratio(self.met_work / NS_PER_S, served),
            work_rate=ratio(self.work / NS_PER_S, span),
            work_attained=ratio(self.met_work, self.work),
            attempts=self.offered,
            retry_amplification=ratio(self.offered, self.offered),
            success_per_request=ratio(self.outcomes[Outcome.SUCCESS], self.offered),
            cached_tokens=self.cached,
            usage_input_tokens=self.usage_input,
            latency=self._latency(),
        )

    def _latency(self) -> Latency:
        found = {name: quantiles(values) for name, values in self.measured.items()}
        return Latency(**found, gaps=gap_quantiles(self.gaps, self.max_gap))


_MEASURED = ("queue", "ttft", "tpot", "stall", "e2e")
_SUMS = (
    "offered",
    "waiting",
    "input",
    "predicted",
    "output",
    "work",
    "met",
    "met_output",
    "met_work",
    "admitted_work",
    "cached",
    "usage_input",
)


def entry_result(row: Concluded) -> EntryResult:
    """Return how a request entered."""
    if row.deferred:
        return EntryResult.DEFERRED
    if row.admitted:
        return EntryResult.DEGRADED if row.level else EntryResult.ADMITTED
    return EntryResult.LEFT_BEFORE if row.reason is None else EntryResult.REJECTED


def merged(cells: Iterable[Cell]) -> Cell:
    """Return one cell of several parts."""
    whole = Cell()
    for cell in cells:
        whole.merge(cell)
    return whole


def _tokens_made(row: Concluded) -> int:
    if row.usage is not None:
        return row.usage.output_tokens
    return row.indicators.tokens if row.indicators is not None else 0


def _bump(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _sorted(counts: dict[str, int]) -> dict[str, int]:
    """Return counts by size, the largest first, ties by name."""
    return {str(k): n for k, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))}
