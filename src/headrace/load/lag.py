"""How late does this process's event loop come to what is due?

What lag there is falls on the measured and the measuring alike, so a run in which it was large
measured itself: neither good nor bad.
"""

import asyncio

from headrace.load.caller import Now, loop_time
from headrace.report.stats import nearest_rank
from headrace.units import NS_PER_MS, DurationNs, InstantNs, ms, to_seconds

PERIOD_NS = 10 * NS_PER_MS
"""Between two looks."""
LIMIT_NS = ms(20)
"""p99 beyond which a run is invalid."""


class LoopLag:
    """Asks to be called every 10 ms and notes how much later it was.

    Through a long stall it would have looked again and again: those looks count as well.
    """

    def __init__(self, now: Now = loop_time) -> None:
        """Start in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._now = now
        self._seen: list[int] = []
        self._due = InstantNs(0)
        self._arm()

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def p99_ns(self) -> DurationNs:
        """Return the lag that all but one in a hundred looks stayed within."""
        return DurationNs(nearest_rank(sorted(self._seen), 99) if self._seen else 0)

    def _arm(self) -> None:
        self._due = InstantNs(self._now() + PERIOD_NS)
        self._timer = self._loop.call_later(to_seconds(PERIOD_NS), self._look)

    def _look(self) -> None:
        late = self._now() - self._due
        self._seen.append(max(0, late))
        while (late := late - PERIOD_NS) > 0:
            self._seen.append(late)
        self._arm()
