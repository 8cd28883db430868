"""How long does something run on a replica?"""

from msgspec import Struct

from headrace.units import DurationNs, InstantNs


class Busy(Struct):
    """Attempts that were sent to one life of a replica and have not ended, and how long there were some."""

    attempts: int = 0
    busy_ns: int = 0
    """How long there were, up to `busy_since`, since somebody last asked."""
    busy_since: InstantNs = InstantNs(0)
    """Since when there are; of no meaning while there are none."""

    def enter(self, now: InstantNs) -> None:
        """Count one more attempt."""
        if not self.attempts:
            self.busy_since = now
        self.attempts += 1

    def leave(self, now: InstantNs) -> None:
        """Count one attempt less."""
        self.attempts -= 1
        if not self.attempts:
            self.busy_ns += now - self.busy_since

    def take_busy(self, now: InstantNs) -> DurationNs:
        """Return how long something was there since this was last asked."""
        found = self.busy_ns
        if self.attempts:
            found, self.busy_since = found + now - self.busy_since, now
        self.busy_ns = 0
        return DurationNs(found)
