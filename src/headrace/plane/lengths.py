"""Are a tenant's long prompts let in about as often as its others?

A gate that asks whether the first token comes in time lives on short prompts once more is offered than
served: they fit where no long one does. So what was offered and let in is counted by length, over about
the last minute. Lengths are told apart by quarters of an octave; the long ones are the topmost that make
up a tenth of what was offered. Counts only: what follows from them is the gate's.
"""

from msgspec import Struct, field

from headrace.units import MICRO, NS_PER_S, InstantNs, Tokens

_KEEP, _OF = 59, 60
"""Forgetting per second: all of it together weighs a minute."""
_GONE_S = 1_200
"""Nothing is left after so long."""
_LONG = 10
"""One in so many of the offered requests is a long one."""


class Count(Struct):
    """Requests that were offered and let in, in millionths, and the prompt tokens of the offered."""

    offered: int = 0
    admitted: int = 0
    tokens: int = 0

    def add(self, tokens: int, *, admitted: bool) -> None:
        """Count one request."""
        self.offered += MICRO
        self.admitted += MICRO if admitted else 0
        self.tokens += tokens * MICRO

    def decay(self, keep: int, of: int) -> None:
        """Keep a part of each count."""
        self.offered = self.offered * keep // of
        self.admitted = self.admitted * keep // of
        self.tokens = self.tokens * keep // of

    def merge(self, other: "Count") -> None:
        """Add another's counts."""
        self.offered += other.offered
        self.admitted += other.admitted
        self.tokens += other.tokens


class Lengths(Struct):
    """What was offered and let in, by prompt length."""

    buckets: dict[int, Count] = {}
    whole: Count = field(default_factory=Count)
    """All of them together."""
    long: Count = field(default_factory=Count)
    """Those from `long_from` on."""
    long_from: int = 0
    """The least bucket of the long ones, as of the last whole second; 0: nothing is known."""
    at: InstantNs = InstantNs(0)
    """Up to when it has been decayed."""

    def add(self, tokens: int, *, admitted: bool) -> None:
        """Count a request that was decided on; `forget` comes first."""
        bucket = bucket_of(tokens)
        count = self.buckets.get(bucket)
        if count is None:
            count = self.buckets[bucket] = Count()
        count.add(tokens, admitted=admitted)
        self.whole.add(tokens, admitted=admitted)
        if bucket >= self.long_from:
            self.long.add(tokens, admitted=admitted)

    def forget(self, now: InstantNs) -> None:
        """Decay by the whole seconds that have passed, and tell anew which are the long ones."""
        passed = (now - self.at) // NS_PER_S
        if not passed:
            return
        self.at = InstantNs(self.at + passed * NS_PER_S)
        if passed > _GONE_S:
            self.buckets.clear()
        else:
            keep, of = _KEEP**passed, _OF**passed
            for count in self.buckets.values():
                count.decay(keep, of)
        self.buckets = {nth: count for nth, count in self.buckets.items() if count.offered}
        self._part()

    def is_long(self, tokens: int) -> bool:
        """Return whether a prompt is one of the long ones."""
        return bucket_of(tokens) >= self.long_from

    def long_tokens(self) -> Tokens:
        """Return the mean length of the long ones; 0 if there was none."""
        return Tokens(self.long.tokens // self.long.offered if self.long.offered else 0)

    def _part(self) -> None:
        """Tell the long ones from the others."""
        self.whole, self.long, self.long_from = Count(), Count(), 0
        for count in self.buckets.values():
            self.whole.merge(count)
        for bucket in sorted(self.buckets, reverse=True):
            self.long.merge(self.buckets[bucket])
            self.long_from = bucket
            if self.long.offered * _LONG >= self.whole.offered:
                break


def bucket_of(tokens: int) -> int:
    """Return the quarter of an octave that a length of at least one token falls into, from 4 on."""
    octave = max(1, tokens).bit_length()
    return 4 * octave + (tokens * 4 >> (octave - 1) & 3)
