"""Who waits for which job to be over? Whoever hears of it here is woken; other processes' ends are looked for."""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.gateway.exchange import Exchange
from headrace.gateway.http import CallerGoneError, watching
from headrace.ports.job import Job, JobId

LOOK_S = 1.0
"""How often a job is looked at by those who wait for it: another process may have ended it."""


class Waiters:
    """Callers that wait, each until its job is over, its time is, or it has left."""

    def __init__(
        self, over: Callable[[Callable[[JobId | None], None]], None], closing: Callable[[], bool]
    ) -> None:
        """Hear of ends by what is registered with `over` (None: of all); `closing`: nobody waits any more."""
        self._closing = closing
        self._waiting: dict[JobId, set[asyncio.Event]] = {}
        over(self._told)

    def _told(self, job: JobId | None) -> None:
        jobs = list(self._waiting) if job is None else [job]
        for one in jobs:
            for event in self._waiting.get(one, ()):
                event.set()

    async def wait(
        self, exchange: Exchange, job: JobId, bound_s: float, look: Callable[[], Awaitable[Job]]
    ) -> Job:
        """Return a job as it stands once it is over or `bound_s` is; raises `CallerGoneError`."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        until = loop.time() + bound_s
        self._waiting.setdefault(job, set()).add(event)
        try:
            with watching(exchange.wire, event.set):
                while True:
                    event.clear()
                    found = await look()
                    if exchange.wire.is_gone:
                        raise CallerGoneError
                    left = until - loop.time()
                    if found.is_over or left <= 0 or self._closing():
                        return found
                    try:
                        async with asyncio.timeout(min(left, LOOK_S)):
                            await event.wait()
                    except TimeoutError:
                        pass
        finally:
            mine = self._waiting[job]
            mine.discard(event)
            if not mine:
                del self._waiting[job]
