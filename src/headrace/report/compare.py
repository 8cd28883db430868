"""Which of two policies is better on the same offered requests?

Judged by work goodput over offered: a policy that refuses nearly everything attains 1.0 of what it
admits and is worse all the same (EX-13). Refuses to compare different populations. What was measured
live before and after a change never was the same population: there the mixes must agree, and the
verdict needs an interval that leaves zero out (SLO-5).
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec import Struct

from headrace.report.groups import EntryResult
from headrace.report.live import Report, difference
from headrace.report.mix import Check, checks
from headrace.report.run import RunRecord
from headrace.report.stats import interval, rounded
from headrace.report.summary import Summary, summarise


class NotComparable(Exception):  # noqa: N818 - the name says what is wrong
    """Two runs whose difference would mean nothing; the text says why."""


class Verdict(StrEnum):
    """What the other run is, held against the base."""

    BETTER = "better"
    WORSE = "worse"
    EQUAL = "equal"
    UNCLEAR = "unclear"
    """The interval of the difference holds zero."""


class Change(Struct, frozen=True, kw_only=True, gc=False):
    """One figure of both runs side by side."""

    name: str
    unit: str
    base: float | None
    other: float | None
    difference: float | None
    """other - base; None if one of them is undefined."""
    relative: float | None
    """difference / base."""


class Comparison(Struct, frozen=True, kw_only=True):
    """Two runs on one trace, denominators first."""

    base: str
    other: str
    scenario: str
    trace_hash: str
    formula: str
    changes: tuple[Change, ...]
    verdict: Verdict
    """By work goodput over offered; of live runs by its interval over parts of the span."""
    interval: tuple[float, float] | None = None
    """Of live runs: the 95 % interval of the deciding difference."""
    mix: tuple[Check, ...] = ()
    """Of live runs of different requests: how their mixes were found to agree."""


class MeanChange(Struct, frozen=True, kw_only=True, gc=False):
    """One figure over several pairs of runs: means, and the difference with its 95 % interval."""

    name: str
    unit: str
    base: float
    other: float
    difference: float
    low: float
    high: float


class ManyComparison(Struct, frozen=True, kw_only=True):
    """Two policies over several traces or seeds, paired."""

    base: str
    other: str
    scenario: str
    seeds: tuple[int, ...]
    formula: str
    changes: tuple[MeanChange, ...]
    verdict: Verdict
    """By work goodput over offered; unclear if its interval holds zero."""


def compare(base: RunRecord | Summary, other: RunRecord | Summary) -> Comparison:
    """Return both runs' figures and whether `other` is better than `base` (SLO-5, EX-13).

    Raises `NotComparable` unless both were offered the same requests, or live the same mix, and
    judged by one formula.
    """
    one, two = _summary(base), _summary(other)
    mix = _refuse_different(one, two)
    verdict, spread = _judged(one, two)
    return Comparison(
        base=one.label,
        other=two.label,
        scenario=one.scenario,
        trace_hash=one.trace_hash,
        formula=one.formula,
        changes=tuple(
            _change(name, unit, figure(one), figure(two))
            for name, unit, figure in FIGURES
            if name not in COSTS or (figure(one), figure(two)) != (None, None)
        ),
        verdict=verdict,
        interval=spread,
        mix=mix,
    )


def _judged(one: Summary, two: Summary) -> tuple[Verdict, tuple[float, float] | None]:
    """Return the verdict on two runs; where something was measured live, with its interval."""
    live = [run for run in (one, two) if isinstance(run, Report) and run.windows]
    if len(live) == 2:  # noqa: PLR2004 - both
        found = difference(live[0].windows, live[1].windows)
        if found is None:
            return Verdict.UNCLEAR, None
        _, low, high = found
        return _by_interval(low, high), (rounded(low), rounded(high))
    done = two.total.met_work_ns - one.total.met_work_ns
    return Verdict.BETTER if done > 0 else Verdict.WORSE if done < 0 else Verdict.EQUAL, None


def compare_many(
    pairs: Sequence[tuple[RunRecord | Summary, RunRecord | Summary]],
) -> ManyComparison:
    """Return the mean difference of each figure with its 95 % interval (Student t, paired).

    Each pair shares one trace; the pairs are independent draws of one scenario. A figure that is
    undefined in some pair is left out. Raises `NotComparable`.
    """
    if len(pairs) < 2:  # noqa: PLR2004 - one difference has no spread
        raise NotComparable(f"{len(pairs)} pair: an interval needs at least two")
    told = [(_summary(base), _summary(other)) for base, other in pairs]
    first = told[0]
    for pair in told:
        _refuse_different(*pair)
        for mine, its in zip(first, pair, strict=True):
            if (mine.label, mine.scenario, mine.formula) != (its.label, its.scenario, its.formula):
                raise NotComparable(f"{_called(its)} among pairs of {_called(mine)}")
    changes = tuple(
        change
        for name, unit, figure in FIGURES
        if (change := _mean_change(name, unit, figure, told)) is not None
    )
    return ManyComparison(
        base=first[0].label,
        other=first[1].label,
        scenario=first[0].scenario,
        seeds=tuple(base.seed for base, _ in told),
        formula=first[0].formula,
        changes=changes,
        verdict=_verdict(next((c for c in changes if c.name == DECIDING), None)),
    )


Figure = Callable[[Summary], float | None]
DECIDING = "work goodput over offered"
"""The figure that verdicts are made by."""
FIGURES: tuple[tuple[str, str, Figure], ...] = (
    ("offered", "requests", lambda s: s.total.offered),
    ("admitted", "requests", lambda s: s.total.admitted),
    ("of them degraded", "requests", lambda s: s.total.entry[EntryResult.DEGRADED]),
    ("rejected", "requests", lambda s: s.total.rejected),
    ("met", "requests", lambda s: s.total.met),
    ("attainment over admitted", "", lambda s: s.total.attained_admitted),
    ("attainment over offered", "", lambda s: s.total.attained_offered),
    (DECIDING, "", lambda s: s.total.work_attained),
    ("work goodput", "GPU-s/s", lambda s: s.total.work_goodput),
    ("request goodput", "requests/s", lambda s: s.total.request_goodput),
    ("token goodput", "tokens/s", lambda s: s.total.token_goodput),
    ("success per request", "", lambda s: s.total.success_per_request),
    ("attempts per request (no retries yet)", "", lambda s: s.total.retry_amplification),
    (
        "GPU time per request that met",
        "GPU-s",
        lambda s: None if s.cost is None else s.cost.gpu_s_per_met,
    ),
    (
        "cost per 1,000 that met",
        "USD",
        lambda s: None if s.cost is None else s.cost.usd_per_thousand_met,
    ),
)
"""What is shown of both runs, denominators first: attainment and goodput, never one alone."""


COSTS = tuple(name for name, _, _ in FIGURES[-2:])
"""Those that are left out where neither run counted them: nobody knows, or no price is declared (OPS-3)."""


def _summary(run: RunRecord | Summary) -> Summary:
    return run if isinstance(run, Summary) else summarise(run)


def _called(summary: Summary) -> str:
    return f"{summary.label!r} on {summary.scenario} seed {summary.seed} ({summary.formula})"


def _refuse_different(one: Summary, two: Summary) -> tuple[Check, ...]:
    """Raise `NotComparable` for different populations; return what live ones were found equal by."""
    if one.formula != two.formula:
        raise NotComparable(f"different formulas: {one.formula} and {two.formula}")
    _refuse_unmeasured(one, two)
    if one.trace_hash != two.trace_hash:
        return _same_mix(one, two)
    for name, mine, its in (
        ("requests", one.total.offered, two.total.offered),
        ("work", one.total.work_ns, two.total.work_ns),
        ("span", one.span_ns, two.span_ns),
    ):
        if mine != its:
            raise NotComparable(f"one trace hash, yet the offered {name} differ: {mine} and {its}")
    return ()


def _refuse_unmeasured(*runs: Summary) -> None:
    """Refuse what a client spoilt, and two live runs whose work is priced differently."""
    clients = [run.client for run in runs if isinstance(run, Report) and run.client is not None]
    for client in clients:
        if not client.valid:
            raise NotComparable(
                f"the client that called {client.url} lagged by {client.loop_lag_p99_ns / 1e6:.1f}"
                f" ms (p99, limit {client.loop_lag_limit_ns / 1e6:.0f} ms) and measured itself"
            )
    prices = sorted({client.profile: None for client in clients})
    if len(prices) > 1:
        raise NotComparable(f"work is priced by {' and by '.join(prices)}")


def _same_mix(one: Summary, two: Summary) -> tuple[Check, ...]:
    """Return the checks by which two live runs were offered the same mix, or refuse."""
    mixes = [run.mix for run in (one, two) if isinstance(run, Report) and run.mix is not None]
    if len(mixes) < 2:  # noqa: PLR2004 - both, or the requests must be identical
        raise NotComparable(
            f"different offered requests: trace {one.trace_hash[:12]} of {_called(one)}, "
            f"{two.trace_hash[:12]} of {_called(two)}"
        )
    found = checks(*mixes)
    wrong = [
        f"{check.name} differ by {check.difference:.3f} (limit {check.limit:.3f})"
        for check in found
        if not check.agrees
    ]
    if wrong:
        raise NotComparable(f"different mixes were offered: {'; '.join(wrong)}")
    return tuple(found)


def _change(name: str, unit: str, base: float | None, other: float | None) -> Change:
    difference = None if base is None or other is None else other - base
    relative = difference / base if difference is not None and base else None
    return Change(
        name=name,
        unit=unit,
        base=base,
        other=other,
        difference=None if difference is None else rounded(difference),
        relative=None if relative is None else rounded(relative),
    )


def _mean_change(
    name: str, unit: str, figure: Figure, told: Sequence[tuple[Summary, Summary]]
) -> MeanChange | None:
    bases: list[float] = []
    others: list[float] = []
    for one, two in told:
        base, other = figure(one), figure(two)
        if base is None or other is None:
            return None
        bases.append(base)
        others.append(other)
    spread = interval([other - base for base, other in zip(bases, others, strict=True)])
    return MeanChange(
        name=name,
        unit=unit,
        base=rounded(interval(bases).mean),
        other=rounded(interval(others).mean),
        difference=rounded(spread.mean),
        low=rounded(spread.low),
        high=rounded(spread.high),
    )


def _verdict(change: MeanChange | None) -> Verdict:
    if change is None:
        return Verdict.UNCLEAR
    return _by_interval(change.low, change.high)


def _by_interval(low: float, high: float) -> Verdict:
    if low == high == 0:
        return Verdict.EQUAL
    if low > 0:
        return Verdict.BETTER
    return Verdict.WORSE if high < 0 else Verdict.UNCLEAR
