"""How does a policy bear more load? One point for each run of a sweep.

Goodput and attainment always travel together, and attainment over both denominators.
"""

from collections.abc import Sequence

from msgspec import Struct

from headrace.report.run import RunRecord
from headrace.report.summary import Summary, summarise


class SweepPoint(Struct, frozen=True, kw_only=True):
    """One run at one load. Points of one label and load are seeds of each other."""

    label: str
    load: float
    """What the sweep varies, such as offered work in GPU-seconds per second."""
    seed: int
    offered: int
    admitted: int
    met: int
    request_goodput: float
    work_rate: float
    """Offered work, GPU-seconds per second."""
    work_goodput: float
    work_attained: float
    """Work goodput over offered."""
    attained_admitted: float | None
    attained_offered: float | None


def sweep_point(run: RunRecord | Summary, load: float | None = None) -> SweepPoint:
    """Return a run as a point; its load is the offered work rate unless told."""
    told = run if isinstance(run, Summary) else summarise(run)
    total = told.total
    rate = total.work_rate or 0.0
    return SweepPoint(
        label=told.label,
        load=rate if load is None else load,
        seed=told.seed,
        offered=total.offered,
        admitted=total.admitted,
        met=total.met,
        request_goodput=total.request_goodput or 0.0,
        work_rate=rate,
        work_goodput=total.work_goodput or 0.0,
        work_attained=total.work_attained or 0.0,
        attained_admitted=total.attained_admitted,
        attained_offered=total.attained_offered,
    )


def by_load(points: Sequence[SweepPoint]) -> dict[str, dict[float, list[SweepPoint]]]:
    """Return points by label, in order of first appearance, then by load, ascending."""
    labels: dict[str, list[SweepPoint]] = {}
    for point in points:
        labels.setdefault(point.label, []).append(point)
    return {
        label: {
            load: sorted((p for p in mine if p.load == load), key=lambda p: p.seed)
            for load in sorted({p.load: None for p in mine})
        }
        for label, mine in labels.items()
    }
