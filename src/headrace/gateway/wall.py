"""Tells a plane that scales what the time of day is, again whenever the machine's clock was set.

Schedules go by it, and the plane counts on from what it was told last.
"""

from headrace.gateway.driver import Driver
from headrace.gateway.hand import scales
from headrace.model.event import WallTold
from headrace.ports.clock import Clock
from headrace.units import NS_PER_S, DurationNs, later

LOOK_NS = DurationNs(60 * NS_PER_S)
"""Between two looks: schedules know minutes."""
_SLIP_S = 1
"""Both clocks are read in whole seconds."""


class WallWatch:
    """Looks for as long as a driver runs."""

    def __init__(self, clock: Clock, driver: Driver) -> None:
        """Begin after the driver told the time for the first time."""
        self._clock, self._driver = clock, driver
        self._ahead_s = self._ahead()
        if scales(driver.plane):
            self._arm()

    def _ahead(self) -> int:
        return self._clock.wall() - self._clock.now() // NS_PER_S

    def _arm(self) -> None:
        self._clock.call_at(later(self._clock.now(), LOOK_NS), self._look)

    def _look(self) -> None:
        if not self._driver.runs:
            return
        ahead_s = self._ahead()
        if abs(ahead_s - self._ahead_s) > _SLIP_S:
            self._ahead_s = ahead_s
            self._driver.tell(WallTold(self._clock.wall()))
        self._arm()
