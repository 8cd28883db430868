"""A subscriber before a real publisher's sockets: gaps, answers, other lives, garbage, and its end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.adapters.engines.kv import subscriber as module
from headrace.adapters.engines.kv.follower import Reset
from headrace.adapters.engines.kv.index import BlockIndex
from headrace.adapters.engines.kv.subscriber import Source, Subscriber
from tests.adapters.kv.publisher import TOPIC, Noted, Publisher
from tests.adapters.kv.scenes import CLEARED, batch, prompt, removed, store

pytestmark = pytest.mark.asyncio


class Line:
    """A publisher, a subscriber to it and what it made of what came."""

    def __init__(self, folder: Path, *, replays: bool) -> None:
        self.folder, self.publisher = folder, Publisher(folder)
        self.resets: list[Reset] = []
        source = Source(
            endpoint=self.publisher.endpoint,
            replay_endpoint=self.publisher.replay_endpoint if replays else None,
            topic=TOPIC.decode(),
        )
        self.subscriber = Subscriber(source)
        ask = self.subscriber.ask if replays else None
        self.follower = Noted(BlockIndex(b"k"), self.resets.append, ask)
        self.follower.changed = asyncio.Event()

    async def begin(self) -> "Line":
        self.subscriber.start(self.follower)
        assert await self.publisher.subscribed() == TOPIC
        return self

    async def tell(self, *prompts: int, lost: bool = False) -> None:
        for nth in prompts:
            await self.publisher.publish(batch(store(nth)), lost=lost)

    async def holds(self, *prompts: int) -> None:
        """Wait until exactly these prompts are known."""
        index = self.follower.index
        await self.follower.until(
            lambda: (
                len(index) == len(prompts)
                and all(index.cached_tokens(prompt(nth, 1)) for nth in prompts)
            )
        )

    async def restart(self) -> None:
        """Have another life of the engine at the same place."""
        self.publisher.close()
        self.publisher = Publisher(self.folder)
        await self.publisher.subscribed()


@asynccontextmanager
async def line(folder: Path, *, replays: bool = True) -> AsyncIterator[Line]:
    made = Line(folder, replays=replays)
    try:
        yield await made.begin()
    finally:
        made.subscriber.close()
        made.publisher.close()


async def test_what_is_published_is_known(tmp_path: Path) -> None:
    async with line(tmp_path, replays=False) as one:
        await one.tell(1, 2, 3)
        await one.holds(1, 2, 3)
        await one.publisher.publish(batch(removed(200)))
        await one.holds(1, 3)
        await one.publisher.publish(batch(CLEARED, store(4)))
        await one.holds(4)
        assert one.resets == [Reset.CLEARED]


@pytest.mark.parametrize("topics", [True, False])
async def test_what_was_missed_is_asked_for(tmp_path: Path, topics: bool) -> None:
    async with line(tmp_path) as one:
        await one.tell(1, 2)
        await one.tell(3, lost=True)
        await one.tell(4)
        who, start = await one.publisher.asked()
        assert start == 1
        await one.tell(5)
        await one.publisher.answer(who, start, topics=topics)
        await one.holds(1, 2, 3, 4, 5)
        assert not one.resets
        assert one.follower.counts.gaps == 1


async def test_without_an_answer_a_gap_ends_what_was_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    async with line(tmp_path) as one:
        await one.tell(1)
        await one.tell(2, lost=True)
        await one.tell(3)
        await one.publisher.asked()
        await one.holds(3)
        assert one.resets == [Reset.LOST]
        await one.tell(4)
        await one.holds(3, 4)


async def test_another_life_is_found_after_the_connection_came_back(tmp_path: Path) -> None:
    async with line(tmp_path, replays=False) as one:
        await one.tell(1, 2)
        await one.holds(1, 2)
        await one.restart()
        await one.tell(3)
        await one.holds(3)
        assert one.resets == [Reset.RESTARTED]


@pytest.mark.parametrize("replays", [True, False])
async def test_another_life_that_seems_to_go_on_is_another_all_the_same(
    tmp_path: Path, replays: bool
) -> None:
    async with line(tmp_path, replays=replays) as one:
        await one.tell(1)
        await one.holds(1)
        await one.restart()
        await one.tell(2, lost=True)
        await one.tell(3)
        if replays:
            for expected in (0, 0):
                who, start = await one.publisher.asked()
                assert start == expected
                await one.publisher.answer(who, start)
        await one.holds(*((2, 3) if replays else (3,)))
        assert one.resets == [Reset.RESTARTED if replays else Reset.LOST]


async def test_the_same_life_behind_a_broken_connection_is_the_same() -> None:
    resets: list[Reset] = []
    asked: list[int] = []
    follower = Noted(BlockIndex(b"k"), resets.append, asked.append)
    follower.changed = asyncio.Event()
    for number in (0, 1):
        follower.heard(number, batch(store(number)))
    follower.interrupted()
    follower.heard(2, batch(store(2)))
    assert asked == [1]
    for number in (1, 2):
        follower.replayed(number, batch(store(number)))
    follower.replay_over()
    follower.heard(3, batch(store(3)))
    assert (len(follower.index), resets, asked) == (4, [], [1])


async def test_a_life_that_was_not_heard_begin_is_no_gap_of_the_one_before(tmp_path: Path) -> None:
    async with line(tmp_path) as one:
        await one.tell(1, 2)
        await one.holds(1, 2)
        await one.restart()
        await one.tell(3, 4, 5, lost=True)
        await one.tell(6)
        who, start = await one.publisher.asked()
        assert start == 1
        await one.publisher.answer(who, start)
        who, start = await one.publisher.asked()
        assert start == 0
        await one.publisher.answer(who, start)
        await one.holds(3, 4, 5, 6)
        assert one.resets == [Reset.RESTARTED]


async def test_garbage_is_counted_and_what_follows_is_heard(tmp_path: Path) -> None:
    async with line(tmp_path, replays=False) as one:
        await one.tell(1)
        await one.publisher.send([TOPIC])
        await one.publisher.send([TOPIC, b"short", batch(store(8))])
        await one.publisher.send([TOPIC, (1).to_bytes(8, "big"), batch(store(8)), b"more"])
        await one.publisher.send([b"other", (1).to_bytes(8, "big"), batch(store(8))])
        await one.tell(2)
        await one.holds(1, 2)
        assert one.follower.counts.malformed == 3
        assert not one.resets
        await one.publisher.publish(b"\xc1")
        await one.tell(3)
        await one.holds(3)
        assert one.resets == [Reset.LOST]


async def test_garbage_for_an_answer_is_no_answer(tmp_path: Path) -> None:
    async with line(tmp_path) as one:
        await one.tell(1)
        await one.tell(2, lost=True)
        await one.tell(3)
        who, start = await one.publisher.asked()
        await one.publisher.tell(who, [])
        await one.publisher.tell(who, [TOPIC, b"short", b""])
        await one.publisher.answer(who, start)
        await one.holds(1, 2, 3)
        assert one.follower.counts.malformed == 2


async def test_an_engine_that_comes_later_is_heard(tmp_path: Path) -> None:
    made = Line(tmp_path, replays=False)
    made.publisher.close()
    made.subscriber.start(made.follower)
    made.publisher = Publisher(tmp_path)
    try:
        await made.publisher.subscribed()
        await made.tell(1)
        await made.holds(1)
    finally:
        made.subscriber.close()
        made.publisher.close()


async def test_a_closed_one_leaves_no_task_behind(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with line(tmp_path) as one:
        await one.tell(1)
        await one.tell(2, lost=True)
        await one.tell(3)
        await one.publisher.asked()  # and does not answer
        ours = asyncio.all_tasks() - before
        assert len(ours) == 3
    await asyncio.wait(ours)
    assert all(task.cancelled() for task in ours)
    one.subscriber.close()
