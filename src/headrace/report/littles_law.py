"""Do the records agree with Little's law, L = lambda * W? (DEM-6)

A consistency check beside the tail percentiles, never a promise about them: the number inside is
counted by walking through arrivals and departures, the time by adding up what each request took.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from headrace.model.effect import Concluded
from headrace.report.stats import rounded
from headrace.units import NS_PER_S


class LittleCheck(Struct, frozen=True, kw_only=True):
    """L, lambda and W of one place, each measured on its own."""

    place: str
    """`system` (from arrival to end) or `queue` (from arrival to dispatch)."""
    requests: int
    unknown: int
    """Admitted requests whose time there is not in the records, left out of all three."""
    mean_inside: float
    """L: the time-average of how many were inside."""
    rate: float
    """lambda: arrivals per second, over the time from the first arrival to the last departure."""
    mean_time_s: float
    """W: what the requests took on average."""
    predicted_time_s: float
    """L / lambda: what W must be."""
    consistent: bool
    """Whether the two agree, exactly: in whole nanoseconds."""


def little(inside: float, rate: float) -> float:
    """Return the mean time in a place, W = L / lambda (EX-5)."""
    return inside / rate


def little_checks(rows: Iterable[Concluded]) -> tuple[LittleCheck, ...]:
    """Return the checks of system and queue over the admitted requests; none of nothing."""
    admitted = [row for row in rows if row.admitted]
    system = [(row.entry.arrived_at, row.ended_at) for row in admitted]
    queue = [stay for row in admitted if (stay := _queued(row)) is not None]
    found = (
        _check("system", system, 0),
        _check("queue", queue, len(admitted) - len(queue)),
    )
    return tuple(check for check in found if check is not None)


def _queued(row: Concluded) -> tuple[int, int] | None:
    """Return when a request came and left the queue; None if its dispatch was not recorded."""
    arrived = row.entry.arrived_at
    if row.replica is None:
        return arrived, row.ended_at
    if row.indicators is None:
        return None
    return arrived, arrived + row.indicators.route_ns + row.indicators.queue_ns


def _check(place: str, stays: Sequence[tuple[int, int]], unknown: int) -> LittleCheck | None:
    if not stays:
        return None
    span = max(left for _, left in stays) - min(came for came, _ in stays)
    if span <= 0:
        return None
    area, total = _area(stays), sum(left - came for came, left in stays)
    inside, rate = area / span, len(stays) * NS_PER_S / span
    return LittleCheck(
        place=place,
        requests=len(stays),
        unknown=unknown,
        mean_inside=rounded(inside),
        rate=rounded(rate),
        mean_time_s=rounded(total / len(stays) / NS_PER_S),
        predicted_time_s=rounded(little(inside, rate)),
        consistent=area == total and all(left >= came for came, left in stays),
    )


def _area(stays: Sequence[tuple[int, int]]) -> int:
    """Return the integral of how many are inside, by walking through every move in time."""
    moves = sorted([(came, 1) for came, _ in stays] + [(left, -1) for _, left in stays])
    area = inside = 0
    before = moves[0][0]
    for at, step in moves:
        area += inside * (at - before)
        inside += step
        before = at
    return area
