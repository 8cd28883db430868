"""How long may an exchange stay silent?

One timer for each exchange. Whoever hears something stores the time in `last`, and the timer, when it
comes, looks how much is left and goes on: nothing is armed per chunk.
"""

from collections.abc import Callable

from headrace.ports.clock import Clock, Timer
from headrace.ports.upstream import Wait
from headrace.units import DurationNs, InstantNs, later


class Watch:
    """Waits for one thing after the other, and for one deadline all the while."""

    __slots__ = ("_armed", "_clock", "_deadline", "_limit", "_timer", "_told", "_wait", "last")

    def __init__(
        self, clock: Clock, told: Callable[[Wait], None], deadline: InstantNs | None
    ) -> None:
        """Tell `told`, at most once, what was waited for in vain."""
        self._clock, self._told, self._deadline = clock, told, deadline
        self._wait = Wait.DEADLINE
        self._limit: DurationNs | None = None
        self._timer: Timer | None = None
        self._armed = InstantNs(0)
        self.last = InstantNs(0)
        """When something was last heard."""

    def expect(self, wait: Wait, limit: DurationNs | None, now: InstantNs) -> None:
        """Wait for something from now on, `limit` at a time; None: only for the deadline."""
        self._wait, self._limit, self.last = wait, limit, now
        if self._timer is None or (limit is not None and now + limit < self._armed):
            due = self._due()
            if due is not None:
                self._arm(due)

    def suspend(self) -> None:
        """Wait for the deadline alone, until something is expected again."""
        self._limit = None

    def stop(self) -> None:
        """Wait for nothing any more, and know nobody: whoever waited need not be collected."""
        self._limit = self._deadline = None
        self._told = _nobody
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> InstantNs | None:
        if self._limit is None:
            return self._deadline
        due = later(self.last, self._limit)
        return due if self._deadline is None else min(due, self._deadline)

    def _arm(self, due: InstantNs) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = due
        self._timer = self._clock.call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        due = self._due()
        if due is None:
            return
        if due > self._clock.now():
            self._arm(due)
            return
        wait, told = Wait.DEADLINE if due == self._deadline else self._wait, self._told
        self.stop()
        told(wait)


def _nobody(_: Wait) -> None:
    """Hear of nothing."""
