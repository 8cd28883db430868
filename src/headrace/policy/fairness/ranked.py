"""A sorted collection of (key, id) with a weight each: O(log n) to find, cheap to change.

Pairs live in short sorted runs, each with the sum of its weights, so that "how much work has an
earlier key?" adds a few run sums and part of one run. Plain lists, so that a plane can be frozen.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

from msgspec import Struct

K = TypeVar("K", int, str)

RUN = 128
"""Longest run; a longer one is halved. 128: moving it costs less than finding it."""


class Ranked(Struct, Generic[K]):
    """Pairs (key, id), smallest first; ids are unique, keys need not be."""

    runs: list[list[tuple[int, K]]] = []
    weights: list[list[int]] = []
    sums: list[int] = []
    size: int = 0
    total: int = 0
    """Sum of all weights."""

    def add(self, key: int, ident: K, weight: int = 0) -> None:
        """Insert a pair that is not there."""
        pair = (key, ident)
        if not self.runs:
            self.runs, self.weights, self.sums = [[]], [[]], [0]
        at = min(self._run_of(pair), len(self.runs) - 1) if self.size else 0
        run = self.runs[at]
        place = bisect_left(run, pair)
        assert place == len(run) or run[place] != pair, f"{pair} is there already"
        run.insert(place, pair)
        self.weights[at].insert(place, weight)
        self.sums[at] += weight
        self.size += 1
        self.total += weight
        if len(run) > RUN:
            self._split(at)

    def remove(self, key: int, ident: K) -> int:
        """Take a pair out and return its weight; it must be there."""
        pair = (key, ident)
        at = self._run_of(pair)
        assert at < len(self.runs), f"{pair} is not there"
        run = self.runs[at]
        place = bisect_left(run, pair)
        assert run[place] == pair, f"{pair} is not there"
        del run[place]
        weight = self.weights[at].pop(place)
        self.sums[at] -= weight
        self.size -= 1
        self.total -= weight
        if not run:
            del self.runs[at], self.weights[at], self.sums[at]
        return weight

    def move(self, old: int, new: int, ident: K) -> None:
        """Give a pair another key; cheap if that leaves it where it stands."""
        pair, moved = (old, ident), (new, ident)
        at = self._run_of(pair)
        assert at < len(self.runs), f"{pair} is not there"
        run = self.runs[at]
        place = bisect_left(run, pair)
        assert run[place] == pair, f"{pair} is not there"
        last = len(run) - 1
        stays = 0 < place < last or len(self.runs) == 1  # else its neighbours are in other runs
        stays = stays and (not place or run[place - 1] < moved)
        if stays and (place == last or moved < run[place + 1]):
            run[place] = moved
        else:
            self.add(new, ident, self.remove(old, ident))

    def first(self) -> tuple[int, K] | None:
        """Return the smallest pair, or None."""
        return self.runs[0][0] if self.runs else None

    def last(self) -> tuple[int, K] | None:
        """Return the largest pair, or None."""
        return self.runs[-1][-1] if self.runs else None

    def ahead(self, key: int, ident: K) -> int:
        """Return the weight of all pairs before (key, ident), which need not be there."""
        pair = (key, ident)
        at = self._run_of(pair)
        before = sum(self.sums[:at])
        if at == len(self.runs):
            return before
        return before + sum(self.weights[at][: bisect_left(self.runs[at], pair)])

    def __iter__(self) -> Iterator[tuple[int, K]]:
        """Yield all pairs, smallest first; the collection must not change meanwhile."""
        for run in self.runs:
            yield from run

    def backwards(self) -> Iterator[tuple[int, K]]:
        """Yield all pairs, largest first; the collection must not change meanwhile."""
        for run in reversed(self.runs):
            yield from reversed(run)

    def _run_of(self, pair: tuple[int, K]) -> int:
        """Return the first run whose last pair is not before `pair`."""
        runs = self.runs
        low, high = 0, len(runs)
        while low < high:
            middle = (low + high) // 2
            if runs[middle][-1] < pair:
                low = middle + 1
            else:
                high = middle
        return low

    def _split(self, at: int) -> None:
        run, weights = self.runs[at], self.weights[at]
        half = len(run) // 2
        self.runs.insert(at + 1, run[half:])
        self.weights.insert(at + 1, weights[half:])
        del run[half:], weights[half:]
        self.sums.insert(at + 1, sum(self.weights[at + 1]))
        self.sums[at] -= self.sums[at + 1]
