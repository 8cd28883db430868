"""The listed children of one node of the share tree, in the order in which their turns come.

First those under their minimum, then by turn those within their maximum, then the rest. Knows keys and
the parent's clock, no tree.
"""

from collections.abc import Iterator

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.model.paths import Band
from headrace.policy.fairness.ranked import Ranked

TIED = 64
"""Siblings with equal turns that are compared when one must make room."""


class Mark(Struct, gc=False):
    """Under which keys a node is listed among its siblings."""

    weight: int
    turn: int
    bias: int
    """The turn less the counter."""
    since: int = 0
    """When the first request below it came; kept only where turns age."""
    capped: bool = False
    """It is over its maximum."""
    high: int | None = None
    """None: it has no maximum."""
    low: int | None = None
    """None: it has no minimum."""


class Siblings(Struct):
    """The listed children of one node on one side."""

    fair: Ranked[str] = field(default_factory=Ranked)
    """By turn: those not over their maximum."""
    capped: Ranked[str] = field(default_factory=Ranked)
    """Those over it, by how soon they are not."""
    floors: Ranked[str] = field(default_factory=Ranked)
    """Those with a minimum, by how far they are under it."""
    marks: dict[str, Mark] = {}
    weight: int = 0
    """Of all of them."""

    def order(self, clock: int) -> Iterator[tuple[str, Band]]:
        """Yield them in the order in which they go while their parent's service stands at `clock`."""
        first: set[str] = set()
        for low, name in self.floors:
            if low >= clock:
                break
            first.add(name)
            yield name, Band.MINIMUM
        for _, name in self.fair:
            if name not in first:
                yield name, Band.FAIR
        for _, name in self.capped:
            if name not in first:
                yield name, Band.CAPPED

    def first(self, clock: int) -> tuple[str, Band] | None:
        """Return the one that goes first."""
        if self.floors.size or not self.fair.size:
            return next(self.order(clock), None)
        found = self.fair.first()
        return None if found is None else (found[1], Band.FAIR)

    def last(self) -> Iterator[tuple[bool, int, str]]:
        """Yield (capped, rank, name), the one furthest over its share first.

        Those over their maximum before all others; ranks compare among either.
        """
        for capped, ranked in ((True, self.capped), (False, self.fair)):
            for rank, name in ranked.backwards():
                yield capped, rank, name

    def put(self, key: str, mark: Mark) -> None:
        """List a child, or move it to where it stands now."""
        old = self.marks.get(key)
        self.weight += mark.weight
        if old is None:
            self._enter(key, mark)
        else:
            self.weight -= old.weight
            self._move(key, old, mark)
        self.marks[key] = mark

    def _move(self, key: str, old: Mark, mark: Mark) -> None:
        if old.capped or mark.capped or (old.low is None) is not (mark.low is None):
            self._unlist(key, old)
            self._enter(key, mark)
            return
        if mark.turn != old.turn:
            self.fair.move(old.turn, mark.turn, key)
        if mark.low is not None and old.low is not None and mark.low != old.low:
            self.floors.move(old.low, mark.low, key)

    def drop(self, key: str) -> None:
        """Take a listed child off."""
        mark = self.marks.pop(key)
        self.weight -= mark.weight
        self._unlist(key, mark)

    def shifted(self, turn: int, clock: int) -> "Siblings":
        """Return the same with all turns and all clocks set back by so much."""
        moved = Siblings()
        for key, mark in self.marks.items():
            high = None if mark.high is None else mark.high - clock
            low = None if mark.low is None else mark.low - clock
            moved.put(key, replace(mark, turn=mark.turn - turn, high=high, low=low))
        return moved

    def release(self, clock: int) -> None:
        """Let those back that others' service has brought within their maximum."""
        while (found := self.capped.first()) is not None and found[0] <= clock:
            self.capped.remove(*found)
            mark = self.marks[found[1]]
            mark.capped = False
            self.fair.add(mark.turn, found[1])

    def _enter(self, key: str, mark: Mark) -> None:
        if mark.capped:
            self.capped.add(mark.high or 0, key)
        else:
            self.fair.add(mark.turn, key)
        if mark.low is not None:
            self.floors.add(mark.low, key)

    def _unlist(self, key: str, mark: Mark) -> None:
        if mark.capped:
            self.capped.remove(mark.high or 0, key)
        else:
            self.fair.remove(mark.turn, key)
        if mark.low is not None:
            self.floors.remove(mark.low, key)
