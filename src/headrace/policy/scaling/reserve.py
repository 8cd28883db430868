"""How many groups are enough even when failure domains are lost?

N+k by what is left: not k groups more, but as many as it takes that the rest holds the need, however
many groups the largest domains have (SCALE-9).
"""

from collections.abc import Iterable, Mapping


def left_of(by_domain: Mapping[str, int], lost: int) -> int:
    """Return what is left of a sum over domains after the loss of the `lost` largest."""
    ordered = sorted(by_domain.values(), reverse=True)
    return sum(ordered[lost:])


def with_reserve(
    need: int, lost: int, there: Iterable[str], may: Iterable[str], most: int
) -> int | None:
    """Return the fewest groups, at least `need`, of which `need` are left after losing `lost` domains.

    `there`: the domain of each group that is there, empty where it is not known; `may`: domains that
    further groups may be placed in, each time where the fewest are; none given: each is a domain of its
    own. Up to `most` groups; None: no such number helps.
    """
    if need <= 0 or lost <= 0:
        return max(0, need)
    names, open_to = list(there), sorted(set(may))
    if open_to and len({*names, *open_to} - {""}) <= lost:
        return None
    for count in range(need, most + 1):
        if left_of(_spread(count, names, open_to), lost) >= need:
            return count
    return None


def _spread(count: int, there: list[str], may: list[str]) -> dict[str, int]:
    """Return how so many groups are spread: the fullest domains give, the emptiest take."""
    spread = dict.fromkeys(may, 0)
    strangers = 0
    for name in there:
        if name:
            spread[name] = spread.get(name, 0) + 1
    for _ in range(count - sum(spread.values())):
        if may:
            least = min(may, key=lambda one: (spread[one], one))
            spread[least] += 1
        else:
            strangers += 1
            spread[f"\0{strangers}"] = 1
    for _ in range(sum(spread.values()) - count):
        fullest = max(spread, key=lambda one: (spread[one], one))
        spread[fullest] -= 1
    return spread
