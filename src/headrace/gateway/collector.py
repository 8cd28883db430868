"""When does the garbage collector run? Between events, never inside one.

What the plane keeps has no cycles, but thousands of lists and dicts that a collection looks through:
milliseconds in the midst of a decision. The process therefore collects when its loop turns to it.
"""

import asyncio
import gc

YOUNG_S = 0.5
"""Between collections of what is young: a few milliseconds each under load."""
FULL_EVERY = 600
"""One in so many looks at everything that was not there at the start."""


class Collector:
    """Collects garbage from the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep what is there now out of every collection, and collect by hand from here on."""
        self._loop = loop
        self._turns = 0
        gc.collect()
        gc.freeze()
        gc.disable()
        self._timer = loop.call_later(YOUNG_S, self._turn)

    def stop(self) -> None:
        """Leave it to Python again."""
        self._timer.cancel()
        gc.enable()
        gc.unfreeze()

    def _turn(self) -> None:
        self._turns += 1
        gc.collect(2 if self._turns % FULL_EVERY == 0 else 0)
        self._timer = self._loop.call_later(YOUNG_S, self._turn)
