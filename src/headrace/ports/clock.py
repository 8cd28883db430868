"""What time is it, and who wakes me then?"""

from collections.abc import Callable
from typing import Protocol

from headrace.units import InstantNs


class Timer(Protocol):
    """A call that is still to come."""

    def cancel(self) -> None:
        """Make it never come; after it has come, do nothing."""
        ...


class Clock(Protocol):
    """Monotonic time for decisions, wall time for people, and wake-ups."""

    def now(self) -> InstantNs:
        """Return the present instant, never before an earlier one."""
        ...

    def wall(self) -> int:
        """Return seconds since 1970 (UTC), for answers and names; decides nothing."""
        ...

    def call_at(self, when: InstantNs, callback: Callable[[], None]) -> Timer:
        """Call once `now()` is `when` or later; late is possible, early is not."""
        ...
