"""How far apart did the tokens of each stream come, without counting them one by one?

Every decode makes one token a step, so a step's length is a gap of each. The log adds up the gaps
of all steps; a stream's own are what was added between its joining and its leaving. A jump is an
arithmetic progression of steps, added in as many operations as it touches buckets. Gaps are those
of instants rounded down to ns, exactly as a `Meter` beside the stream would see them.

While the decodes stand still for prompts, no gap ends. The first one after that runs from where they
began to stand, but for a stream that joined meanwhile, whose own is counted by itself.
"""

from bisect import bisect_right
from operator import add, sub

from headrace.model.meter import GAP_BUCKETS, GAP_EDGES_NS, gap_bucket
from headrace.units import PS_PER_NS, InstantNs


class Account:
    """One stream's gaps: those closed, and what the log showed when the open stretch began."""

    __slots__ = ("base", "base_over", "base_stretch", "bound", "counts", "max_gap", "over")

    def __init__(self, bound: int) -> None:
        """Start without a gap; `bound` ns is the stream's own."""
        self.bound = bound
        self.counts = [0] * GAP_BUCKETS
        self.over = 0
        self.max_gap = 0
        self.base: list[int] = []
        self.base_over = 0
        self.base_stretch = 0

    def add(self, gap: int) -> None:
        """Count one gap that was not a step of the log: the pause of a preemption."""
        self.counts[gap_bucket(gap)] += 1
        self.over += gap > self.bound
        self.max_gap = max(self.max_gap, gap)


class GapLog:
    """The gaps of all steps so far, in every form an account needs."""

    __slots__ = (
        "_bounds", "_counts", "_late", "_maxima", "_over", "_stood_at", "_stretch", "_stretches",
    )  # fmt: skip

    def __init__(self) -> None:
        """Start at a replica that has made no step."""
        self._counts = [0] * GAP_BUCKETS
        self._bounds: list[int] = []
        self._over: dict[int, int] = {}  # gaps above each bound, since it was first asked for
        self._stretch = 0
        # Maxima of later stretches that none after them reaches: strictly falling. Cleared when
        # the batch is empty; until then no longer than its streams can make the steps fall.
        self._stretches: list[int] = []
        self._maxima: list[int] = []
        self._stood_at: InstantNs | None = None
        self._late: dict[Account, InstantNs] = {}  # joined since then, and when

    def stand(self, now: InstantNs) -> None:
        """Let the open accounts make no gap from the boundary `now` to the next that is noted."""
        if self._stood_at is None:
            self._stood_at = now

    def open(self, account: Account, now: InstantNs) -> None:
        """Let a stream count the steps from its token at `now` on."""
        if self._stood_at is not None:
            self._late[account] = now
        else:
            self._open(account)

    def _open(self, account: Account) -> None:
        """Remember what the log shows as a stream joins."""
        bound = account.bound
        if bound not in self._over:
            self._over[bound] = 0
            self._bounds = sorted(self._over)
        account.base = self._counts[:]
        account.base_over = self._over[bound]
        account.base_stretch = self._stretch

    def close(self, account: Account, now: InstantNs) -> InstantNs:
        """Add to a stream's account what came since it was opened; return when its last token came.

        `now` is the last boundary.
        """
        joined = self._late.pop(account, None)
        if joined is not None:
            return joined
        since = map(sub, self._counts, account.base)
        account.counts = list(map(add, account.counts, since))
        account.over += self._over[account.bound] - account.base_over
        first = bisect_right(self._stretches, account.base_stretch)
        if first < len(self._maxima):
            account.max_gap = max(account.max_gap, self._maxima[first])
        return now if self._stood_at is None else self._stood_at

    def clear(self) -> None:
        """Forget the maxima and where they stood: no account is open."""
        self._stood_at = None
        self._stretches.clear()
        self._maxima.clear()

    def note(self, start: int, alpha: int, beta: int, steps: int) -> None:
        """Count `steps` steps from `start` ps on, the j-th (from 0) alpha + beta*j ps long."""
        if self._stood_at is not None:
            self._resume(self._stood_at, InstantNs((start + alpha) // PS_PER_NS))
            start, alpha, steps = start + alpha, alpha + beta, steps - 1
            if not steps:
                return
        if steps == 1:
            self._one((start + alpha) // PS_PER_NS - start // PS_PER_NS)
        elif beta < PS_PER_NS:
            # Flat enough for rounding to make a gap smaller than the one before: no progression.
            for _ in range(steps):
                self.note(start, alpha, 0, 1)
                start += alpha
                alpha += beta
        else:
            self._progression(start, alpha, beta, steps)

    def _one(self, gap: int) -> None:
        """Count one gap, in ns, of every open account."""
        self._counts[gap_bucket(gap)] += 1
        for bound in self._bounds:
            if gap <= bound:
                break
            self._over[bound] += 1
        self._raise_to(gap)

    def _resume(self, stood_at: InstantNs, end: InstantNs) -> None:
        """Count the gaps that end with the first step after the decodes stood still."""
        self._one(end - stood_at)
        for account, joined in self._late.items():
            account.add(end - joined)
            self._open(account)
        self._late.clear()
        self._stood_at = None

    def _progression(self, start: int, alpha: int, beta: int, steps: int) -> None:
        """Count gaps that grow by at least 1 ns a step, so that rounding keeps their order."""
        low = (start + alpha) // PS_PER_NS - start // PS_PER_NS
        high = _gap(start, alpha, beta, steps - 1)
        bucket, done = gap_bucket(low), 0
        while bucket < len(GAP_EDGES_NS) and high > GAP_EDGES_NS[bucket]:
            upto = _within(GAP_EDGES_NS[bucket], start, alpha, beta, steps)
            self._counts[bucket] += upto - done
            bucket, done = bucket + 1, upto
        self._counts[bucket] += steps - done
        for bound in self._bounds:
            if high <= bound:
                break
            self._over[bound] += steps - _within(bound, start, alpha, beta, steps)
        self._raise_to(high)

    def _raise_to(self, gap: int) -> None:
        """Note the largest gap of a new stretch."""
        self._stretch += 1
        maxima, stretches = self._maxima, self._stretches
        while maxima and maxima[-1] <= gap:
            maxima.pop()
            stretches.pop()
        maxima.append(gap)
        stretches.append(self._stretch)


def _gap(start: int, alpha: int, beta: int, nth: int) -> int:
    """Return the gap in ns that the nth step (from 0) of a progression makes."""
    begin = start + alpha * nth + beta * (nth * (nth - 1) // 2)
    return (begin + alpha + beta * nth) // PS_PER_NS - begin // PS_PER_NS


def _within(edge: int, start: int, alpha: int, beta: int, steps: int) -> int:
    """Return how many gaps of a progression are at most `edge` ns: its first ones."""
    upto = min(max((edge * PS_PER_NS - alpha) // beta + 1, 0), steps)
    # A step up to 1 ns longer than the edge may still show a gap of the edge: at most one does.
    if upto < steps and _gap(start, alpha, beta, upto) <= edge:
        upto += 1
    return upto
