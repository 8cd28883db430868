"""How many are inside, how fast do they come, how long do they stay: L = lambda * W (DEM-6).

Means beside the tail percentiles, never a promise about them. Over a run that begins and ends empty
Little's law is an identity, so these figures check nothing: they say what the means were.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from headrace.model.effect import Concluded
from headrace.report.stats import rounded
from headrace.units import NS_PER_S


class Means(Struct, frozen=True, kw_only=True):
    """L, lambda and W of one place."""

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
    """W: what the requests took on average, which is L / lambda."""


def little(inside: float, rate: float) -> float:
    """Return the mean time in a place, W = L / lambda (EX-5)."""
    return inside / rate


def means(rows: Iterable[Concluded]) -> tuple[Means, ...]:
    """Return the means of system and queue over the admitted requests; none of nothing."""
    admitted = [row for row in rows if row.admitted]
    system = [(row.entry.arrived_at, row.ended_at) for row in admitted]
    queue = [stay for row in admitted if (stay := _queued(row)) is not None]
    found = (
        _means("system", system, 0),
        _means("queue", queue, len(admitted) - len(queue)),
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


def _means(place: str, stays: Sequence[tuple[int, int]], unknown: int) -> Means | None:
    if not stays:
        return None
    span = max(left for _, left in stays) - min(came for came, _ in stays)
    if span <= 0:
        return None
    inside = sum(left - came for came, left in stays) / span
    rate = len(stays) * NS_PER_S / span
    return Means(
        place=place,
        requests=len(stays),
        unknown=unknown,
        mean_inside=rounded(inside),
        rate=rounded(rate),
        mean_time_s=rounded(little(inside, rate)),
    )
