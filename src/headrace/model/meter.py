"""How evenly did one stream's tokens come?

Tokens never enter the plane singly (journal volume, fast-forward and CPU forbid it): a `Meter` per
stream counts them where they pass, and its `StreamTiming` travels once, when the stream ends.
"""

from bisect import bisect_left

from msgspec import Struct
from msgspec.structs import replace

from headrace.units import NS_PER_MS, DurationNs, InstantNs, Tokens

_EDGES_MS = (
    2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 25, 30, 35, 40, 50, 60, 70, 80, 90, 100, 120, 150,
    200, 300, 400, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000, 30_000,
)  # fmt: skip
GAP_EDGES_NS: tuple[int, ...] = tuple(edge * NS_PER_MS for edge in _EDGES_MS)
"""Upper edges, inclusive, of the gap buckets; one more bucket holds what is larger."""
GAP_BUCKETS = len(GAP_EDGES_NS) + 1


def gap_bucket(gap_ns: int) -> int:
    """Return the index of the bucket that holds a gap: the first whose edge is not below it."""
    return bisect_left(GAP_EDGES_NS, gap_ns)


class StreamTiming(Struct, frozen=True, kw_only=True):
    """What one attempt's stream looked like from where its tokens were counted (SLO-2)."""

    tokens: Tokens
    """Output tokens made, the first one included."""
    first_at: InstantNs | None
    """When the first token came; None if none did."""
    last_at: InstantNs | None
    """When the last token came; the sum of the gaps is `last_at - first_at`."""
    max_gap_ns: DurationNs
    """The largest gap between two tokens (max stall); 0 below two tokens."""
    gaps_over: int
    """How many gaps were above the stream's own bound: exact for any bound."""
    gap_counts: tuple[int, ...]
    """Gaps by bucket of `GAP_EDGES_NS`, for percentiles and plots; sums to tokens - 1."""

    def counted(self, told: int) -> "StreamTiming":
        """Return it with the `told` tokens of a stream whose chunks held several: those came together."""
        if not self.tokens or told <= self.tokens:
            return self
        counts = list(self.gap_counts or (0,) * GAP_BUCKETS)
        counts[0] += told - self.tokens
        return replace(self, tokens=Tokens(told), gap_counts=tuple(counts))


NO_STREAM = StreamTiming(
    tokens=Tokens(0),
    first_at=None,
    last_at=None,
    max_gap_ns=DurationNs(0),
    gaps_over=0,
    gap_counts=(),
)
"""The timing of an attempt that made no token."""


class Meter(Struct):
    """Counts one stream's tokens and gaps; about 0.3 us a chunk."""

    bound_ns: DurationNs
    """The gap bound of the stream's class."""
    tokens: int = 0
    first_at: InstantNs | None = None
    last_at: InstantNs | None = None
    max_gap_ns: int = 0
    gaps_over: int = 0
    gap_counts: list[int] | None = None

    def note(self, now: InstantNs, tokens: int = 1) -> None:
        """Count `tokens` that came together at `now`: one gap, the rest zero apart."""
        counts = self.gap_counts
        if counts is None:
            counts = self.gap_counts = [0] * GAP_BUCKETS
        if self.last_at is None:
            self.first_at = now
        else:
            gap = now - self.last_at
            counts[bisect_left(GAP_EDGES_NS, gap)] += 1
            if gap > self.max_gap_ns:  # noqa: PLR1730 - a call less, on the path of every chunk
                self.max_gap_ns = gap
            if gap > self.bound_ns:
                self.gaps_over += 1
        if tokens != 1:
            counts[0] += tokens - 1
        self.last_at = now
        self.tokens += tokens

    def timing(self) -> StreamTiming:
        """Return the record of the stream so far."""
        return StreamTiming(
            tokens=Tokens(self.tokens),
            first_at=self.first_at,
            last_at=self.last_at,
            max_gap_ns=DurationNs(self.max_gap_ns),
            gaps_over=self.gaps_over,
            gap_counts=tuple(self.gap_counts or ()),
        )
