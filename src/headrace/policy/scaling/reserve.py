"""How many groups are enough even when failure domains are lost?

N+k by what is left: not k groups more, but as many as it takes that the rest holds the need, however
many groups the largest domains have (SCALE-9).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable


def left_of(domains: Iterable[int], lost: int) -> int:
    """Return what is left of what domains have, after the loss of the `lost` largest."""
    return sum(sorted(domains, reverse=True)[lost:])


def with_reserve(
    need: int, lost: int, there: Iterable[str], may: Iterable[str], most: int
) -> int | None:
    """Return the fewest groups, at least `need`, of which `need` are left after losing `lost` domains.

    `there`: the domain of each group that is there, empty where it is not known; `may`: domains that
    further groups may be placed in, each time where the fewest are; none given: each is a domain of its
    own. Where there are too many, the fullest domains give. Up to `most` groups; None: no number helps.
    """
    if need <= 0 or lost <= 0:
        return max(0, need)
    known = Counter(name for name in there if name)
    open_to = {name: known.pop(name, 0) for name in may}
    closed = list(known.values())

    def left(count: int) -> int:
        return left_of(_spread(count, list(open_to.values()), closed), lost)

    # One group more never leaves less.
    numbers = range(need, most + 1)
    found = bisect_left(numbers, need, key=left)
    return numbers[found] if found < len(numbers) else None


def _spread(count: int, open_to: list[int], closed: list[int]) -> list[int]:
    """Return how so many groups are spread over domains, some of which take none."""
    more = count - sum(open_to) - sum(closed)
    if more < 0:
        cut = [-one for one in (*open_to, *closed)]
        return [-one for one in _raised(cut, -more)]
    if not open_to:
        return [*closed, *[1] * more]
    return [*closed, *_raised(open_to, more)]


def _raised(counts: list[int], more: int) -> list[int]:
    """Return counts after `more` ones were added, each to the least of them."""
    levels = range(min(counts), max(counts) + more + 2)
    # The first level that it takes more to reach, less one, is the last that all are raised to.
    level = levels[bisect_left(levels, more + 1, key=lambda at: _up_to(counts, at)) - 1]
    over = more - _up_to(counts, level)
    raised = sorted(max(one, level) for one in counts)
    return [one + 1 if place < over else one for place, one in enumerate(raised)]


def _up_to(counts: list[int], level: int) -> int:
    """Return how many ones it takes to raise all counts to a level."""
    return sum(level - one for one in counts if one < level)
