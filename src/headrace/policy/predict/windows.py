"""What did the last few of a group come to? Quantiles of sliding windows, finest group first.

A group that has seen too little leaves the answer to the next coarser one. Memory is bounded twice:
by the samples of a window and by the number of groups.
"""

from bisect import bisect_left, insort

from msgspec import Struct


class Window(Struct):
    """The last samples of one group, in order of arrival and of size."""

    recent: list[int] = []
    ordered: list[int] = []
    oldest: int = 0
    """Where in `recent` the next one is overwritten."""

    def add(self, sample: int, size: int) -> None:
        """Remember one sample, forgetting the oldest beyond `size`."""
        if len(self.recent) != size and (self.oldest or len(self.recent) > size):
            self._resize(size)
        if len(self.recent) < size:
            self.recent.append(sample)
        else:
            gone = self.recent[self.oldest]
            del self.ordered[bisect_left(self.ordered, gone)]
            self.recent[self.oldest] = sample
            self.oldest = (self.oldest + 1) % size
        insort(self.ordered, sample)

    def _resize(self, size: int) -> None:
        """Keep the newest `size`, the oldest of them first: the configured window has changed."""
        self.recent = (self.recent[self.oldest :] + self.recent[: self.oldest])[-size:]
        self.ordered, self.oldest = sorted(self.recent), 0


class Windows(Struct):
    """All groups, the one longest untaught first."""

    windows: dict[str, Window] = {}

    def quantiles(self, groups: tuple[str, ...], enough: int) -> tuple[int, int] | None:
        """Return (p50, p90) of the finest group that has `enough` samples; None if none has."""
        for group in groups:
            seen = self.windows.get(group)
            if seen is not None and len(seen.ordered) >= enough:
                ordered = seen.ordered
                count = len(ordered)
                return ordered[count // 2], ordered[count * 9 // 10]
        return None

    def teach(self, groups: tuple[str, ...], sample: int, *, size: int, most: int) -> None:
        """Add a sample to windows of `size`; of more than `most` the longest untaught go."""
        windows = self.windows
        for group in groups:
            seen = windows.pop(group, None) or Window()
            windows[group] = seen  # most recently taught last
            seen.add(sample, size)
        while len(windows) > most:
            del windows[next(iter(windows))]
