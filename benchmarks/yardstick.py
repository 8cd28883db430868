"""What could a scaler have done at best? From the trace alone: whoever scales is held against the same.

*Offered work* is that of the true lengths, per tick. What a group that carries C could not serve without any wait
is left out and told apart: prompts that take longer than the first-token bound beside its streams.

*U*, the unavoidable: the integral of (offered work - warm capacity)+. Warm at an instant is the floor, and
what the load of a start and a tick ago or earlier called for, ceil(work / C) groups of C each, kept for
`KEPT_S`. So a burst counts from its beginning until a group asked for at its first tick is ready. Ticks in
which U grows are the *spans*; what goes unserved there is held against U, and attainment is over the rest.

The *clairvoyant* knows the work offered in each minute and holds ceil(work / C) groups, at least the floor
and at most the ceiling, with no margin for chance. It asks a start ahead, pays from then on, and keeps what
it would need again before a start is over. Its capacity is that of 90 % attainment, as everywhere.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from headrace.units import MICRO, NS_PER_S, InstantNs, ceil_div

KEPT_S = 300.0
"""How long what a load called for counts as warm. 300: what horizontal autoscalers keep unless told."""
MINUTE_S = 60.0


class Asked(Struct, frozen=True, gc=False):
    """One request that groups could serve: when, and its work."""

    at: InstantNs
    work_ns: int


class Fleet(Struct, frozen=True, kw_only=True):
    """What any scaler has to do with."""

    floor: int
    ceiling: int
    each_micro: int
    """C: work rate of a group, in millionths."""
    start_s: float
    """How long a start takes."""
    tick_s: float

    def groups(self, work_ns: int, within_s: float) -> int:
        """Return the groups that do some work within a time, between floor and ceiling."""
        needed = ceil_div(work_ns * MICRO, round(within_s * NS_PER_S) * self.each_micro)
        return min(self.ceiling, max(self.floor, needed))


class Unavoidable(Struct, frozen=True, kw_only=True):
    """What is lost whoever scales, by ticks."""

    tick_s: float
    lacking_ns: tuple[int, ...]
    """Work of each tick beyond what could have been warm."""

    @property
    def work_s(self) -> float:
        """U, in GPU-seconds."""
        return sum(self.lacking_ns) / NS_PER_S

    @property
    def spans_s(self) -> float:
        """How long all spans are together."""
        return self.tick_s * sum(one > 0 for one in self.lacking_ns)

    def inside(self, at: InstantNs) -> bool:
        """Return whether an instant lies in a span."""
        return self.lacking_ns[int(at / (self.tick_s * NS_PER_S))] > 0


def by_bins(asked: Iterable[Asked], bin_s: float, span_s: float) -> list[int]:
    """Return the work offered in each bin of a trace; the last one may be short."""
    width = round(bin_s * NS_PER_S)
    found = [0] * ceil_div(round(span_s * NS_PER_S), width)
    for one in asked:
        found[one.at // width] += one.work_ns
    return found


def unavoidable(asked: Sequence[Asked], fleet: Fleet, span_s: float) -> Unavoidable:
    """Return U of a trace."""
    works = by_bins(asked, fleet.tick_s, span_s)
    called = [fleet.groups(work, fleet.tick_s) for work in works]
    late = ceil_div(
        round((fleet.start_s + fleet.tick_s) * NS_PER_S), round(fleet.tick_s * NS_PER_S)
    )
    kept = round(KEPT_S / fleet.tick_s)
    lacking = []
    for nth, work in enumerate(works):
        known = called[max(0, nth - max(kept, late)) : max(0, nth - late + 1)]
        warm = max([fleet.floor, *known])
        can = round(warm * fleet.each_micro * fleet.tick_s * NS_PER_S) // MICRO
        lacking.append(max(0, work - can))
    return Unavoidable(tick_s=fleet.tick_s, lacking_ns=tuple(lacking))


def clairvoyant_s(asked: Sequence[Asked], fleet: Fleet, span_s: float) -> float:
    """Return the group-seconds that the clairvoyant holds over a trace."""
    works = by_bins(asked, MINUTE_S, span_s)
    ends = [*(MINUTE_S * nth for nth in range(len(works))), span_s]
    needed = [
        fleet.groups(work, until - since)
        for work, (since, until) in zip(works, pairwise(ends), strict=True)
    ]
    held = fleet.floor * span_s
    for level in range(fleet.floor + 1, max(needed, default=0) + 1):
        over = -2 * fleet.start_s  # when the last group of this level was over
        for count, (since, until) in zip(needed, pairwise(ends), strict=True):
            if count < level:
                continue
            begins = over if since - over <= fleet.start_s else max(0.0, since - fleet.start_s)
            held += until - begins
            over = until
    return held
