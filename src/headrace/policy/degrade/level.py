"""At which level of its ladder is a class served now?

Stepping down one by one as each request is refused would serve the first comers in full and refuse those
who come after them. So once there is not enough for all, what comes in is held against what can be done, as
it would be at each level, and everybody who agreed starts at the level at which all fit. Down at once, up
again only after a stretch in which more would have done: a class does not go back and forth with every burst.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.ladder import Pressure
from headrace.units import MICRO, NS_PER_MS, NS_PER_S, DurationNs, seconds

Share = Annotated[float, Meta(gt=0, le=2)]


class Degrading(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When classes that have a ladder go down it, and up again."""

    high: Share = 0.95
    """Work that comes in, over what ready replicas do, beyond which a level gives up too little. 0.95: beyond
    it a queue grows in every burst."""
    low: Share = 0.8
    """The same below which the level above would do. 0.8: far enough under `high` that chance alone, over
    the ten seconds that work is counted, seldom crosses both."""
    wait_ms: Annotated[float, Meta(gt=0, le=60_000)] = 500.0
    """A queue that takes longer is a sign of too little, as a refusal is. 500: a quarter of the default
    first-token bound."""
    recover_s: Annotated[float, Meta(gt=0, le=3_600)] = 10.0
    """How long the level above must have done for one step up. 10: as long as work is counted, so that each
    step is judged by what came after the one before."""
    probe_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    """Without any such sign for so long, one step up is tried whatever the forecast says, which may be too
    dark; for twice as long after each such step in a row that was too early. 60: a step too early then
    costs a class a few seconds of some minutes."""

    def __post_init__(self) -> None:
        """Refuse marks upside down, at which a class would go back and forth."""
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")

    def level(self, seen: Pressure) -> int:
        """Return the level of a class from now on."""
        at = min(seen.level, seen.lowest)
        if not seen.rate_micro:  # nobody is served at any level
            return at
        if self.is_short(seen):
            fitting = (nth for nth in range(seen.lowest) if self._fits(seen, nth, self.high))
            wanted = next(fitting, seen.lowest)
            return max(wanted, min(at + self._are_refused(seen), seen.lowest))
        return at - 1 if at and (self._recovered(seen) or self._may_try(seen)) else at

    def is_try(self, seen: Pressure) -> bool:
        """Return whether a step up from here is one that the forecast does not promise to hold."""
        return not self._recovered(seen)

    def _recovered(self, seen: Pressure) -> bool:
        return seen.calm_ns >= seconds(self.recover_s)

    def _may_try(self, seen: Pressure) -> bool:
        return seen.quiet_ns >= seconds(self.probe_s) << min(seen.failed, _DOUBLED)

    def is_short(self, seen: Pressure) -> bool:
        """Return whether there are signs that not all can be served at this level."""
        return self._are_refused(seen) or seen.wait_ns > self.wait_ms * NS_PER_MS

    def _are_refused(self, seen: Pressure) -> bool:
        """Return whether refusals are such a sign.

        One is chance while little comes in, as two long prompts at once; several are none.
        """
        at = min(seen.level, seen.lowest)
        return seen.refused >= REFUSED or (seen.refused > 0 and not self._fits(seen, at, self.low))

    def is_calm(self, seen: Pressure) -> bool:
        """Return whether the level above its own would do as well."""
        at = min(seen.level, seen.lowest)
        return not at or (not self.is_short(seen) and self._fits(seen, at - 1, self.low))

    def _fits(self, seen: Pressure, level: int, mark: float) -> bool:
        return seen.offered[level] * MICRO <= seen.rate_micro * round(mark * MICRO)


_DOUBLED = 5
"""So often at most: half an hour by default."""
SETTLE_NS = DurationNs(5 * NS_PER_S)
"""A refusal sooner after a step down says nothing of the level: the queue is still that of the one before."""
REFUSED, SIGN_NS = 3, DurationNs(10 * NS_PER_S)
"""Refusals at one level that are looked at, and for how long each is a sign: as long as work is counted."""
