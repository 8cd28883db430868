"""At which level of its ladder is a class served now?

Stepping down one by one as each request is refused would serve the first comers in full and refuse those
who come after them. So what comes in is held against what can be done, as it would be at each level: under
sustained overload everybody who agreed starts at the level at which all fit. Up at once, down only after a
stretch in which less would have done, so that a class does not go back and forth with every burst.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.ladder import Pressure
from headrace.units import MICRO, NS_PER_MS, NS_PER_S, DurationNs, seconds

Share = Annotated[float, Meta(gt=0, le=2)]


class Degrading(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When classes that have a ladder go down it, and up again."""

    high: Share = 0.95
    """Work that comes in, over what ready replicas do, beyond which a level is too little. 0.95: beyond it
    a queue grows in every burst."""
    low: Share = 0.8
    """The same below which the level above would do. 0.8: far enough under `high` that chance alone, over
    the ten seconds that work is counted, seldom crosses both."""
    recover_s: Annotated[float, Meta(gt=0, le=3_600)] = 10.0
    """How long that must hold for one step up. 10: as long as work is counted, so that each step is judged
    by what came after the one before."""
    wait_ms: Annotated[float, Meta(gt=0, le=60_000)] = 500.0
    """A queue that takes longer is not over it yet. 500: a quarter of the default first-token bound."""

    def __post_init__(self) -> None:
        """Refuse marks upside down, at which a class would go back and forth."""
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")

    def level(self, seen: Pressure) -> int:
        """Return the level of a class from now on."""
        at = min(seen.level, seen.lowest)
        if not seen.rate_micro:  # nobody is served at any level
            return at
        fitting = (nth for nth in range(seen.lowest) if self._fits(seen, nth, self.high))
        wanted = next(fitting, seen.lowest)
        if wanted > at:
            return wanted
        if seen.refused:
            return min(at + 1, seen.lowest)
        if at and seen.calm_ns >= seconds(self.recover_s):
            return at - 1
        return at

    def is_calm(self, seen: Pressure) -> bool:
        """Return whether the level above its own would do as well."""
        at = min(seen.level, seen.lowest)
        if not at:
            return True
        waits = seen.wait_ns > self.wait_ms * NS_PER_MS
        return not seen.refused and not waits and self._fits(seen, at - 1, self.low)

    def _fits(self, seen: Pressure, level: int, mark: float) -> bool:
        return seen.offered[level] * MICRO <= seen.rate_micro * round(mark * MICRO)


SETTLE_NS = DurationNs(5 * NS_PER_S)
"""A refusal sooner after a step says nothing of the level: the queue is still that of the one before."""
