"""Future events in a total order that does not depend on how they came to be planned."""

from enum import IntEnum
from heapq import heappop, heappush
from typing import Generic, TypeVar

from headrace.units import InstantNs

E = TypeVar("E")


class Kind(IntEnum):
    """The rank of simultaneous events, each with its reason."""

    ENGINE = 0
    """What an engine finished by this instant is known before anything else looks at it."""
    MOVE = 1
    """A request that moves takes with it what was made by this instant; a crash finds it where it is then."""
    FAULT = 2
    """A crash comes after the step that ended, before anybody acts on it."""
    GROUP = 3
    """A group comes to its next stage, or goes, after what went wrong at this instant."""
    REPORT = 4
    """Reports show the engines after step and fault."""
    TICK = 5
    TIMER = 6
    LEAVE = 7
    """A caller that leaves at the instant of another's arrival makes room for it."""
    ARRIVAL = 8
    """Newcomers see everything that has happened."""


class Agenda(Generic[E]):
    """Events by (time, kind, entity, that entity's own counter): no two tie.

    A global counter would make results depend on how many internal events were planned.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._made: dict[tuple[int, int], int] = {}
        self._heap: list[tuple[InstantNs, Kind, int, int, E]] = []

    def push(self, at: InstantNs, kind: Kind, entity: int, event: E) -> None:
        """Plan an event; its place among ties depends on its own entity alone."""
        who = (kind, entity)
        self._made[who] = nth = self._made.get(who, 0) + 1
        heappush(self._heap, (at, kind, entity, nth, event))

    def pop(self) -> tuple[InstantNs, Kind, int, E]:
        """Take the next event: (time, kind, entity, event)."""
        at, kind, entity, _, event = heappop(self._heap)
        return at, kind, entity, event

    def __len__(self) -> int:
        """Return how many events are planned."""
        return len(self._heap)
