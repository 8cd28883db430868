"""Which groups go, and which come back? The order among those that could."""

from collections.abc import Iterable

from headrace.model.ids import ReplicaName
from headrace.model.scaling import GroupFacts
from headrace.model.scaling_spec import Scaling
from headrace.policy.scaling.supply import Supply
from headrace.units import MICRO, elapsed, seconds

_LAME = MICRO // 2
"""A group that does less of its envelope than this goes first."""


def to_drain(settings: Scaling, supply: Supply, count: int) -> list[ReplicaName]:
    """Return so many of the ready groups that have lived long enough, the first to go first.

    Lame groups; then those of the fullest domain, so that its loss takes no more than it must; of these
    the one whose cached prefixes and running work are worth least. Each choice empties its domain by one.
    """
    now, least = supply.evidence.now, seconds(settings.min_life_s)
    left = [one for one in supply.ready if elapsed(one.since, now) >= least]
    inside: dict[str, int] = {}
    for one in supply.ready:
        inside[one.domain] = inside.get(one.domain, 0) + 1
    found: list[ReplicaName] = []
    while left and len(found) < count:
        first = min(left, key=lambda one: (*_rank(one, inside), one.group))
        left.remove(first)
        inside[first.domain] -= 1
        found.append(first.group)
    return found


def _rank(group: GroupFacts, inside: dict[str, int]) -> tuple[bool, int, int]:
    lame = group.effective_ppm is not None and group.effective_ppm < _LAME
    crowd = inside[group.domain] if group.domain else 0
    return not lame, -crowd, group.prefix_ns + group.remaining_ns


def to_cancel(coming: Iterable[GroupFacts]) -> list[ReplicaName]:
    """Return groups on their way, the first to be given up first: the least far, the last asked for.

    Not the one that is expected last: a start that is overdue is expected ever later, and would be given up
    for one just begun, that will be overdue in its turn.
    """
    order = sorted(coming, key=lambda one: (one.progress, -one.since, one.group))
    return [one.group for one in order]


def to_recall(draining: Iterable[GroupFacts]) -> list[ReplicaName]:
    """Return draining groups, the first to be called back first: those worth most."""
    order = sorted(draining, key=lambda one: (-(one.prefix_ns + one.remaining_ns), one.group))
    return [one.group for one in order]


def to_wake(standby: Iterable[GroupFacts]) -> list[ReplicaName]:
    """Return standby groups, the first to be woken first: the soonest there."""
    return [one.group for one in sorted(standby, key=lambda one: (one.arrival_p50_ns, one.group))]
