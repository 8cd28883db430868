"""Who does with groups what the plane wants done, and what is told of them as a driver begins?"""

from collections import Counter
from typing import Protocol

from headrace.model.effect import Effect
from headrace.model.event import Event, GroupsListed, GroupTold, WallTold
from headrace.model.group import Life
from headrace.model.ids import PoolName
from headrace.plane.core import Plane


class Hand(Protocol):
    """Whoever has the groups of a gateway's pools."""

    drains: Counter[PoolName]
    """Drains that were carried to their end, by pool."""
    drain_ns: Counter[PoolName]
    """How long they took, all together."""

    def listing(self) -> tuple[GroupTold, ...]:
        """Return all groups that there are, of pools that scale."""
        ...

    def carry_out(self, effect: Effect) -> None:
        """Do what the plane wants of groups; whatever else it wants is not for here."""
        ...


class Idle:
    """Has none, and gets none."""

    def __init__(self) -> None:
        """Have no groups."""
        self.drains: Counter[PoolName] = Counter()
        self.drain_ns: Counter[PoolName] = Counter()

    def listing(self) -> tuple[GroupTold, ...]:
        """Return none."""
        return ()

    def carry_out(self, effect: Effect) -> None:
        """Do nothing."""


def wanted(plane: Plane) -> dict[PoolName, int]:
    """Return how many groups of each pool are to serve: what a process that follows begins with."""
    return {
        name: sum(one.life is Life.WANTED for one in books.groups.values())
        for name, books in plane.state.pools.items()
    }


def scales(plane: Plane) -> bool:
    """Return whether any pool of a plane scales, or has groups left from when it did."""
    return bool(plane.settings.scaled or plane.state.pools)


def opening(plane: Plane, hand: Hand, wall_s: int) -> tuple[Event, ...]:
    """Return what a plane that scales is told before any replica is: the time, and which groups there are."""
    return (WallTold(wall_s), GroupsListed(groups=hand.listing())) if scales(plane) else ()
