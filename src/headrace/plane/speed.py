"""How fast does each replica of a pool that scales go, beside what its profile says and beside the others?

Over spans between two ticks at both of which something ran there, the time that its steps should have taken
is held against the time that passed. Steps are told by tokens: so many streams make one each in a step, and
a prompt adds what it takes beyond the steps of those it runs beside. Only a replica that is loaded is
known, none during its warm-up (trap 49), and what is known belongs to one life of it (trap 50).
"""

from collections.abc import Iterable

from msgspec import Struct

from headrace.model.profile import Profile
from headrace.plane.ledger import Load
from headrace.units import MICRO, NS_PER_MS, NS_PER_S, DurationNs, InstantNs, ceil_div, elapsed

_KEEP, _OF = 255, 256
"""Forgetting per tick of 100 ms: half is forgotten in about 18 s, so that a long prompt is no slowness."""
_SPAN_MAX = NS_PER_S
"""A longer pause between ticks is no measurement."""
_ENOUGH = 5 * NS_PER_S
"""Loaded time, decayed, from which on a pace says anything: a fifth of what a busy replica has."""
_SEEN = MICRO // 4
"""Part of the profile's pace below which a pool's usual one says nothing: most of its answers come in one
piece and show no tokens."""
_WELL = MICRO * 4 // 5
"""Part of the usual pace from which on a replica is as fast as any: what is less is no chance."""


class Speed(Struct):
    """What one life of a replica should have taken for what it did, and what it took."""

    due_ns: int = 0
    """Time its steps should have taken, decayed."""
    took_ns: int = 0
    """Time it was loaded, decayed."""
    fresh_ns: int = 0
    """What prompts should have taken since the last tick, beyond the steps of what ran beside them."""
    tokens: int = 0
    """Tokens it had made at the last tick."""
    at: InstantNs = InstantNs(0)
    """The last tick."""
    loaded: bool = False
    """Whether anything ran there then."""

    def prefilled(self, profile: Profile, load: Load, uncached: int, cached: int) -> None:
        """Count a prompt whose first token is about to be booked."""
        decodes, context, budget = load.decodes, load.context_tokens, profile.token_budget
        took = profile.prefill_ns(uncached, cached, decodes, context, budget)
        if decodes:
            steps = ceil_div(uncached, max(1, budget - decodes))
            took = DurationNs(max(0, took - steps * profile.decode_step_ns(decodes, context)))
        self.fresh_ns += took

    def tick(self, profile: Profile, load: Load, now: InstantNs, *, warming: bool) -> None:
        """Close a span: count it if something ran there at both its ends."""
        span, made, loaded = (
            elapsed(self.at, now),
            load.tokens_made - self.tokens,
            load.attempts > 0,
        )
        self.due_ns = self.due_ns * _KEEP // _OF
        self.took_ns = self.took_ns * _KEEP // _OF
        if warming:
            self.due_ns = self.took_ns = 0
        elif self.loaded and loaded and NS_PER_MS <= span <= _SPAN_MAX:
            decodes = load.decodes
            if made and decodes:
                self.due_ns += (
                    made * profile.decode_step_ns(decodes, load.context_tokens) // decodes
                )
            self.due_ns += self.fresh_ns
            self.took_ns += span
        self.fresh_ns, self.tokens, self.at, self.loaded = 0, load.tokens_made, now, loaded

    def ppm(self) -> int | None:
        """Return the part of its profile's pace that it goes at; None: it was not loaded enough to know."""
        if self.took_ns < _ENOUGH:
            return None
        return self.due_ns * MICRO // self.took_ns


def usual(paces: Iterable[int | None]) -> int | None:
    """Return the median of the paces that are known, of two in the middle the faster; None: too few are.

    A profile that is wrong is so for all of them: who is no slower than that is as it should be.
    """
    known = sorted(one for one in paces if one is not None)
    middle = known[len(known) // 2] if len(known) > 1 else 0
    return middle if middle >= _SEEN else None


def part(pace: int | None, typical: int | None) -> int | None:
    """Return the part of its envelope that a replica does, in millionths; None: nobody knows."""
    if pace is None or typical is None:
        return None
    found = min(MICRO, pace * MICRO // typical)
    return MICRO if found >= _WELL else found
