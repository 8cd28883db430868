"""How long do callers of one class wait, for the first token and between tokens?

Distributions of first tokens are over OFFERED requests: a curve that ends below 100 % shows what
was refused or lost, where one over admitted requests would flatter whoever refuses most.
"""

from collections.abc import Sequence

from headrace.model.effect import Concluded
from headrace.model.ids import ClassName
from headrace.model.meter import GAP_BUCKETS, GAP_EDGES_NS
from headrace.report.charts import POINTS, Figure, lines_legend
from headrace.report.run import RunRecord
from headrace.report.stats import add_counts
from headrace.report.summary import Summary
from headrace.report.svg import (
    Chart,
    Guide,
    Point,
    Series,
    line_chart,
    log_axis,
    share_axis,
)
from headrace.units import NS_PER_MS, NS_PER_S, to_ms, to_seconds

CLASSES = 4
"""Classes shown, those with most offered work; the tables hold all."""
_LEAST = 1e-5
"""The least share of gaps worth showing."""
_SHOWN = 1e-3
"""The share down to which is always shown, so that the 1 % line is on the chart."""


def wait_figures(runs: Sequence[RunRecord], told: Sequence[Summary]) -> list[Figure | None]:
    """Return first-token and gap distributions of each class."""
    asked: dict[ClassName, int] = {}
    for one in told:
        for group in one.by_class:
            assert group.slo_class is not None
            asked[group.slo_class] = asked.get(group.slo_class, 0) + group.work_ns
    figures: list[Figure | None] = []
    for place, name in enumerate(sorted(asked, key=lambda c: (-asked[c], c))[:CLASSES]):
        rows = [_of_class(run, name) for run in runs]
        labels = [run.label for run in runs]
        figures += [_ttft(place, name, labels, rows), _gaps(place, name, labels, rows)]
    return figures


def _of_class(run: RunRecord, name: ClassName) -> list[Concluded]:
    """Return how the requests ended that were offered in a class."""
    offered = {one.request for one in run.offered if one.slo_class == name}
    return [row for row in run.rows if row.request in offered]


Rows = Sequence[Sequence[Concluded]]


def _ttft(place: int, name: ClassName, labels: Sequence[str], rows: Rows) -> Figure | None:
    measured = [
        sorted(row.indicators.ttft_ns for row in mine if row.indicators is not None)
        for mine in rows
    ]
    seen = [values for values in measured if values]
    if not seen:
        return None
    bound = _bound([row.bounds.ttft_ns for mine in rows for row in mine])
    low = min(values[0] for values in seen)
    high = max([values[-1] for values in seen] + [round(guide.value) for guide in bound])
    x = log_axis("time to first token", max(low, NS_PER_MS), max(high, 2 * NS_PER_MS), _time)
    chart = Chart(
        id=f"ttft-{place}",
        title=f"Time to first token, {name}",
        description=f"Share of offered {name} requests with a first token within a time, by run.",
        x=x,
        y=share_axis("share of offered requests"),
        guides=bound,
    )
    series = [
        Series(
            label=label,
            points=_cdf(values, len(mine), x.low, x.high),
            colour=index,
            step=True,
        )
        for index, (label, values, mine) in enumerate(zip(labels, measured, rows, strict=True))
    ]
    return Figure(
        heading=f"Time to first token, {name}",
        remark="Where a curve levels off below 100 %, the rest was refused or lost before a token.",
        svg=line_chart(chart, series),
        legend=lines_legend(labels),
    )


def _cdf(ordered: Sequence[int], of: int, low: float, high: float) -> tuple[Point, ...]:
    """Return a step curve of at most `POINTS` ranks, held to the right edge."""
    if not ordered:
        return ()
    number = min(POINTS, len(ordered))
    ranks = [(i + 1) * len(ordered) // number for i in range(number)]
    first = (max(low, float(ordered[0])), 0.0)
    points = [(float(ordered[rank - 1]), rank / of) for rank in ranks]
    return (first, *points, (high, len(ordered) / of))


def _gaps(place: int, name: ClassName, labels: Sequence[str], rows: Rows) -> Figure | None:
    tails = [_tail(mine) for mine in rows]
    seen = [points for points in tails if points]
    if not seen:
        return None
    bound = _bound([row.bounds.gap_ns for mine in rows for row in mine])
    longest = max([points[-1][0] for points in seen] + [guide.value for guide in bound])
    least = min(share for points in seen for _, share in (*points, (0.0, _SHOWN)) if share)
    chart = Chart(
        id=f"gaps-{place}",
        title=f"Gaps between tokens, {name}, pooled",
        description=f"Share of all {name} gaps longer than a time, by run, both logarithmic.",
        x=log_axis("gap between tokens", float(GAP_EDGES_NS[0]), longest * 1.2, _time),
        y=log_axis("share of gaps that are longer", max(least, _LEAST), 1.0, _power),
        guides=(Guide(value=0.01, label="1 % of gaps: p99", vertical=False), *bound),
    )
    series = [
        Series(label=label, points=points, colour=index, step=True)
        for index, (label, points) in enumerate(zip(labels, tails, strict=True))
    ]
    return Figure(
        heading=f"Gaps between tokens, {name}",
        remark="From a histogram: each step is a bucket's upper edge. Means per answer hide these.",
        svg=line_chart(chart, series),
        legend=lines_legend(labels),
    )


def _tail(rows: Sequence[Concluded]) -> tuple[Point, ...]:
    """Return (edge, share of gaps above) until nothing is above."""
    counts = [0] * GAP_BUCKETS
    for row in rows:
        if row.timing is not None:
            add_counts(counts, row.timing.gap_counts)
    total = above = sum(counts)
    points: list[Point] = []
    for edge, number in zip(GAP_EDGES_NS, counts, strict=False):
        if not above:
            break
        above -= number
        points.append((float(edge), above / total))
    return tuple(points)


def _bound(bounds: Sequence[int | None]) -> tuple[Guide, ...]:
    """Return a guide at the bound that all of a class were promised; none where they differ."""
    if not bounds or bounds[0] is None or any(bound != bounds[0] for bound in bounds):
        return ()
    return (Guide(value=float(bounds[0]), label=f"bound {_time(bounds[0])}"),)


def _time(nanoseconds: float) -> str:
    if nanoseconds >= NS_PER_S:
        return f"{to_seconds(round(nanoseconds)):g} s"
    return f"{to_ms(round(nanoseconds)):g} ms"


def _power(share: float) -> str:
    return f"{share * 100:g} %"
