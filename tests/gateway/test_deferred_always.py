"""Whatever happens to jobs, each ends once: callers and processes that come and go at random."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from headrace.gateway.jobs.desk import JOBS, Desk
from headrace.gateway.jobs.dispatcher import Dispatcher
from headrace.ports.job import JobId, Lease, State, UnixNs
from headrace.ports.jobs import Ending, Finished
from headrace.units import NS_PER_MS
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.gateway.deferring import Deferring
from tests.gateway.scenes import Caller, emulated

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class Witness(NaiveBatches):
    """Counts the ends that were stored by a worker's word."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: Counter[JobId] = Counter()

    async def finish(self, endings: Sequence[tuple[Lease, Ending]], now: UnixNs) -> list[Finished]:
        found = await super().finish(endings, now)
        for (lease, _), end in zip(endings, found, strict=True):
            self.stored[lease.job] += end is Finished.STORED
        return found


class Story:
    """One gateway, and what a test knows of its jobs."""

    def __init__(self, seed: int) -> None:
        self.draw, self.store = Random(seed), Witness()
        self.gateway = Deferring(
            lambda clock: [emulated(clock), emulated(clock, 1)], store=self.store, lease_s=5.0
        )
        self.places: list[str] = []
        self.cancelled: set[str] = set()
        self.live: list[Caller] = []
        self.lives = 1

    async def defer(self) -> None:
        headers = {"x-llm-d-inference-ttl": "1s"} if self.draw.random() < 0.2 else {}
        self.places.append(
            await self.gateway.deferred(headers, max_tokens=self.draw.randint(1, 200))
        )

    async def cancel(self) -> None:
        if self.places:
            place = self.draw.choice(self.places)
            caller = await self.gateway.ask(path=place, method="DELETE").done()
            if caller.json["status"] == "cancelled":
                self.cancelled.add(place)

    async def live_request(self) -> None:
        self.live.append(self.gateway.ask(max_tokens=20))

    async def crash(self) -> None:
        """Have the dispatcher die where it stands, and another life of the process take over."""
        gateway, tasks = self.gateway, list(self.gateway.dispatcher._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.lives += 1
        await self.store.recover(gateway.wall(), frozenset())
        gateway.dispatcher = Dispatcher(
            self.store,
            gateway.spec,
            gateway.driver,
            gateway.app.intake,
            gateway.clock,
            wall=gateway.wall,
            owner=f"life {self.lives}",
        )
        gateway.app.desk = Desk(
            self.store, gateway.spec, gateway.driver, gateway.dispatcher, gateway.wall
        )
        gateway.dispatcher.start()

    async def leave_alone(self) -> None:
        """Have time pass, long enough for what nobody renews to be taken back."""
        await self.gateway.until(self.gateway.clock.now() / NS_PER_MS + 700)

    async def lose_a_lease(self) -> None:
        """Have a lease end early, as a clock that is set forward would."""
        claimed = [e for e in self.store.naive.entries.values() if e.state is State.CLAIMED]
        if claimed:
            self.draw.choice(claimed).until = self.gateway.wall()


@pytest.mark.parametrize("seed", range(6))
async def test_every_job_ends_once_and_the_unwanted_never_answer(seed: int) -> None:
    story = Story(seed)
    weighted = [
        *[story.defer] * 8,
        *[story.cancel] * 3,
        *[story.live_request] * 4,
        *[story.leave_alone] * 2,
        story.lose_a_lease,
        story.crash,
    ]
    for _ in range(120):
        await story.draw.choice(weighted)()
        now_ms = story.gateway.clock.now() / NS_PER_MS
        await story.gateway.until(now_ms + story.draw.randint(0, 120))
    for place in story.places:
        assert (await story.gateway.look(place, wait=60)).status in (200, 410, 502, 504)

    entries = story.store.naive.entries
    for place in story.places:
        entry = entries[place.removeprefix(JOBS)]
        assert entry.job().is_over
        assert story.store.stored[entry.spec.id] <= 1
        assert (entry.result is not None) == (entry.state is State.DONE)
        assert entry.state is not State.DONE or story.store.stored[entry.spec.id] == 1
        if place in story.cancelled:
            assert entry.state is State.CANCELLED
    states = Counter(entry.state for entry in entries.values())
    assert states[State.DONE] > len(story.places) // 3
    for caller in story.live:
        assert (await caller.done()).status == 200
    await story.gateway.end()
