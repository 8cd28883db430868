"""How are many numbers told in few?

Percentiles are nearest-rank on sorted integers: the least value that at least that share of all
values does not exceed. No interpolation, so every percentile was really measured. Knows nothing of
requests.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import fsum, sqrt

from msgspec import Struct

from headrace.model.meter import GAP_BUCKETS, GAP_EDGES_NS
from headrace.units import ceil_div

PERCENTILES = "nearest rank"
"""How percentiles are defined; printed beside them."""
DIGITS = 6
"""Digits that written floats are rounded to, so that equal runs give equal bytes."""


class Quantiles(Struct, frozen=True, kw_only=True, gc=False):
    """Percentiles of measured durations, with how many there were."""

    count: int
    p50_ns: int
    p90_ns: int
    p95_ns: int
    p99_ns: int
    max_ns: int


class GapQuantiles(Struct, frozen=True, kw_only=True, gc=False):
    """Percentiles of pooled gaps, from a histogram: upper bucket edges, so "at most"."""

    count: int
    p50_le_ns: int
    p99_le_ns: int
    max_ns: int
    """The largest gap, exactly."""


class Interval(Struct, frozen=True, kw_only=True, gc=False):
    """A mean with the half width of its 95 % interval (Student t)."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width


def nearest_rank(ordered: Sequence[int], percent: int) -> int:
    """Return a percentile of sorted values: the one of rank ceil(percent / 100 * count)."""
    assert ordered, "nothing has no percentile"
    return ordered[max(1, ceil_div(len(ordered) * percent, 100)) - 1]


def quantiles(values: Iterable[int]) -> Quantiles | None:
    """Return the percentiles of durations in ns, or None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Quantiles(
        count=len(ordered),
        p50_ns=nearest_rank(ordered, 50),
        p90_ns=nearest_rank(ordered, 90),
        p95_ns=nearest_rank(ordered, 95),
        p99_ns=nearest_rank(ordered, 99),
        max_ns=ordered[-1],
    )


def gap_quantiles(counts: Sequence[int], max_ns: int) -> GapQuantiles | None:
    """Return the percentiles of a gap histogram, or None of nothing.

    Each is the upper edge of the bucket that the nearest rank falls into; the last bucket has no
    edge, and the largest gap stands for it.
    """
    total = sum(counts)
    if not total:
        return None
    return GapQuantiles(
        count=total,
        p50_le_ns=_edge_at(counts, ceil_div(total * 50, 100), max_ns),
        p99_le_ns=_edge_at(counts, ceil_div(total * 99, 100), max_ns),
        max_ns=max_ns,
    )


def _edge_at(counts: Sequence[int], rank: int, max_ns: int) -> int:
    below = 0
    for edge, number in zip(GAP_EDGES_NS, counts, strict=False):
        below += number
        if below >= rank:
            return edge
    return max_ns


def add_counts(total: list[int], counts: Sequence[int]) -> None:
    """Add one stream's gap histogram to a total of `GAP_BUCKETS` buckets."""
    assert len(total) == GAP_BUCKETS
    for bucket, number in enumerate(counts):
        total[bucket] += number


def decile_edges(values: Iterable[int]) -> tuple[int, ...]:
    """Return the ten upper edges, inclusive, of a population's deciles."""
    ordered = sorted(values)
    return tuple(nearest_rank(ordered, 10 * tenth) for tenth in range(1, 11)) if ordered else ()


def decile_of(edges: Sequence[int], value: int) -> int:
    """Return which decile a value is in, from 0: the first whose edge is not below it.

    Equal values are never parted, so a decile may be empty where one value is very common.
    """
    return bisect_left(edges, value)


def rounded(value: float) -> float:
    """Return a float as it is written: rounded, and never a negative zero."""
    return round(value, DIGITS) + 0.0


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole as it is written, or None of nothing."""
    return rounded(part / whole) if whole else None


def interval(values: Sequence[float]) -> Interval:
    """Return mean and 95 % interval of at least two independent values."""
    number = len(values)
    assert number >= 2, "one value has no interval"  # noqa: PLR2004 - the word says it
    mean = fsum(values) / number
    variance = fsum((value - mean) ** 2 for value in values) / (number - 1)
    return Interval(mean=mean, half_width=student_t(number - 1) * sqrt(variance / number))


def student_t(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t; between rows the wider one."""
    return next(value for least, value in reversed(_STUDENT) if least <= freedom)


_STUDENT = (
    (1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306),
    (9, 2.262), (10, 2.228), (11, 2.201), (12, 2.179), (13, 2.160), (14, 2.145), (15, 2.131),
    (16, 2.120), (17, 2.110), (18, 2.101), (19, 2.093), (20, 2.086), (25, 2.060), (30, 2.042),
    (40, 2.021), (60, 2.000), (120, 1.980),
)  # fmt: skip
