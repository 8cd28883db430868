"""The one real clock; nothing else in the process reads the time."""

import asyncio
import time
from collections.abc import Callable

from headrace.units import NS_PER_MS, NS_PER_S, NS_PER_US, InstantNs, ceil_div

_US_PER_S = 1_000_000
_MS_PER_S = 1_000


def wall() -> int:
    """Return whole seconds since 1970, where no loop runs."""
    return int(time.time())


class LoopClock:
    """The time of an event loop, to its last digit: plain asyncio, or virtual time in tests."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the time of `loop`."""
        self._loop = loop
        self._ahead_ns = 0
        self.on_error: Callable[[Exception], None] | None = None
        """Told what a call failed with; else the loop logs it and goes on as if nothing were."""

    def now(self) -> InstantNs:
        """Return the loop's time."""
        return InstantNs(round(self._loop.time() * NS_PER_S) + self._ahead_ns)

    def go_on_from(self, instant: InstantNs) -> None:
        """Be at `instant` now, as the time of an earlier process went on; before anybody asks."""
        self._ahead_ns += instant - self.now()

    def wall(self) -> int:
        """Return whole seconds since 1970."""
        return wall()

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970, as files are dated."""
        return time.time_ns()

    def call_at(self, when: InstantNs, callback: Callable[[], None]) -> "Alarm":
        """Call once `now()` is `when` or later."""
        return Alarm(self, when, callback)

    def arm(self, when: InstantNs, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Have the loop call at `when`, rounded up to whole microseconds."""
        at = when - self._ahead_ns
        return self._loop.call_at(ceil_div(at, NS_PER_US) / _US_PER_S, callback)


class MonotonicClock(LoopClock):
    """The machine's clock for uvloop, whose own time stands still within an iteration."""

    def now(self) -> InstantNs:
        """Return the machine's monotonic time."""
        return InstantNs(time.monotonic_ns() + self._ahead_ns)

    def arm(self, when: InstantNs, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Have the loop call at `when`, rounded up to the whole milliseconds that uvloop knows."""
        left = max(0, when - self.now())
        return self._loop.call_later(ceil_div(left, NS_PER_MS) / _MS_PER_S, callback)


class Alarm:
    """One call to come. A loop may call early by its clock's grain: then it is asked again."""

    def __init__(self, clock: LoopClock, when: InstantNs, callback: Callable[[], None]) -> None:
        """Arm for `when`."""
        self._clock, self._when, self._callback = clock, when, callback
        self._handle = clock.arm(when, self._fire)

    def cancel(self) -> None:
        """Make the call never come."""
        self._handle.cancel()

    def _fire(self) -> None:
        if self._clock.now() < self._when:
            self._handle = self._clock.arm(self._when, self._fire)
            return
        try:
            self._callback()
        except Exception as error:
            if self._clock.on_error is None:
                raise
            self._clock.on_error(error)
