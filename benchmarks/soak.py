"""Does a gateway keep its memory, its files and its books over thousands of streams that come and go?

2,000 streams that fall silent after a token and 200 that go on, for three minutes; all leave at once.
Then 10,000 short requests, of which most are given up at a random moment, and nothing is left over.
"""

import asyncio
import random
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import uvloop
from msgspec import Struct

from benchmarks.harness import Result, at_least, at_most, calibration
from benchmarks.soak_parts import (
    ACTIVE_FRAMES,
    ENGINES,
    FRAMES,
    Caller,
    Engines,
    Served,
    ask,
    configured,
    raise_limit,
    until,
)
from headrace.adapters.journal.ring import segments
from headrace.plane.journal import Verified, verify

IDLE, ACTIVE = 2_000, 200
MEMORY_MB = 25.0
"""Most that 1,000 streams may occupy."""
GROWTH_MB = 2.0
"""Most that the streams' memory may grow while they run: an allocator's grain, not a leak's."""
CLEAN_S = 1.0
AT_ONCE = 64
"""Short requests under way together."""
SETTLE_S = 6.0
"""After which connections that nobody uses are closed on both sides (4 and 5 s)."""
SPARE_FILES = 4
"""A probe under way to each engine, and a look through the admin listener."""
SEED = 100
_SHORT = ask("short")


class Sizes(Struct, frozen=True):
    """How much is done."""

    seconds: float
    requests: int


FULL, QUICK = Sizes(seconds=180.0, requests=10_000), Sizes(seconds=12.0, requests=2_000)


class Active:
    """Streams that go on, each followed by another."""

    def __init__(self, served: Served) -> None:
        """Start with none."""
        self._served = served
        self._tasks: list[asyncio.Task[None]] = []
        self._callers: dict[Caller, None] = {}
        self._going = True
        self.whole = self.broken = 0
        """Answers that were, and were not, as they should be."""

    def start(self, count: int) -> None:
        """Begin."""
        self._tasks = [asyncio.create_task(self._go_on(nth / count)) for nth in range(count)]

    @property
    def begun(self) -> int:
        """Streams whose first word came."""
        return sum(caller.begun.done() for caller in self._callers)

    def leave(self) -> None:
        """Close every connection."""
        self._going = False
        for caller in self._callers:
            caller.leave()

    async def gone(self) -> None:
        """Wait for the last to see that it is over."""
        await asyncio.gather(*self._tasks)

    async def _go_on(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while self._going:
            caller = await self._served.call("active")
            self._callers[caller] = None
            await caller.over
            del self._callers[caller]
            if self._going:
                is_whole = caller.whole and caller.frames == ACTIVE_FRAMES
                self.whole += is_whole
                self.broken += not is_whole
            caller.leave()


async def _idle(served: Served, count: int) -> list[Caller]:
    """Return so many streams that fell silent after their first word."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one() -> Caller:
        async with turn:
            caller = await served.call("idle")
            await caller.begun
        assert caller.frames == 1, f"an idle stream did not begin: {caller.status!r}"
        return caller

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def _burst(served: Served, rng: random.Random, count: int) -> dict[str, int]:
    """Send short requests, most of them given up somewhere; return how they went."""
    turn = asyncio.Semaphore(AT_ONCE)
    found = dict.fromkeys(("left", "whole", "broken"), 0)

    async def one() -> None:
        async with turn:
            found[await _short(served, rng)] += 1

    await asyncio.gather(*(one() for _ in range(count)))
    return found


async def _short(served: Served, rng: random.Random) -> str:
    """Ask for a short answer and leave, if at all: before, amid or after the request, or the answer."""
    stage = rng.choice(("stay", "silent", "half", "sent", "early", "first", "later"))
    cut = {"silent": 0, "half": rng.randrange(1, len(_SHORT))}.get(stage, len(_SHORT))
    caller = await served.call("short", _SHORT[:cut])
    if stage in ("half", "early"):
        await asyncio.sleep(rng.uniform(0, 0.02))
    elif stage in ("first", "later"):
        await caller.begun
        await asyncio.sleep(rng.uniform(0, 0.1) if stage == "later" else 0)
    elif stage == "stay":
        await caller.over
    caller.leave()
    if stage != "stay":
        return "left"
    return "whole" if caller.whole and caller.frames == FRAMES else "broken"


async def _clean(served: Served, engines: Engines, within_s: float) -> float:
    """Return the seconds until nobody holds anything, here or at the engines; infinite if too long."""
    began = time.perf_counter()
    while (took := time.perf_counter() - began) < within_s:
        if not engines.answering and not await served.held():
            return took
        await asyncio.sleep(0.01)
    return float("inf")


async def _crowd(
    served: Served, engines: Engines, seconds: float, detail: dict[str, Any]
) -> dict[str, float]:
    """Have the crowd come, stay and leave; return memory, growth, broken answers and cleaning."""
    before = served.rss_mb
    active = Active(served)
    idle = await _idle(served, IDLE)
    active.start(ACTIVE)
    assert await until(lambda: active.begun >= ACTIVE * 0.95, 30), "the active ones did not begin"
    used, began = served.cpu_s, time.perf_counter()
    samples: list[float] = []
    while time.perf_counter() - began < seconds:
        await asyncio.sleep(0.5)
        samples.append(served.rss_mb)
    # Until a third of the time is over, what is kept of the newest requests fills up.
    third = len(samples) // 3
    part = max(1, third // 2)
    full = fmean(samples[-part:])
    detail["cpu_of_a_core"] = (served.cpu_s - used) / (time.perf_counter() - began)
    detail["active_whole"], detail["streams_at_engines"] = active.whole, engines.answering
    every = max(1, len(samples) // 18)
    detail["rss_mb"] = {"before": before, "in_the_crowd": samples[::every], "last": samples[-1]}
    detail["files_in_the_crowd"] = served.files
    stayed = sum(not caller.over.done() for caller in idle)
    active.leave()
    for caller in idle:
        caller.leave()
    cleaned = await _clean(served, engines, 10.0)
    await active.gone()
    return {
        "memory": (full - before) / (IDLE + ACTIVE) * 1_000,
        "growth": full - fmean(samples[third : third + part]),
        "broken": active.broken + IDLE - stayed,
        "cleaned": cleaned,
    }


async def _soak(sizes: Sizes, folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the figures that are claimed, and what explains them."""
    engines, rng = Engines(), random.Random(SEED)
    await engines.start()
    served = await Served.start(configured(engines, folder), folder, replicas=ENGINES)
    detail: dict[str, Any] = {}
    status = -1
    try:
        await _burst(served, rng, 300)  # whatever is made once
        await _clean(served, engines, 10.0)
        await asyncio.sleep(SETTLE_S)
        files = served.files
        found = await _crowd(served, engines, sizes.seconds, detail)
        await asyncio.sleep(SETTLE_S)
        detail["files"] = [files, served.files]
        detail["rss_mb"]["after_the_crowd"] = served.rss_mb
        began = time.perf_counter()
        went = await _burst(served, rng, sizes.requests)
        detail["burst"] = {**went, "seconds": time.perf_counter() - began}
        detail["burst"]["cleaned_s"] = await _clean(served, engines, 10.0)
        await asyncio.sleep(SETTLE_S)
        detail["files"].append(served.files)
        detail["rss_mb"]["after_the_burst"] = served.rss_mb
        left = await served.held()
        detail["held"] = left
        found["broken"] += went["broken"]
        found["whole"] = went["whole"]
        found["held"] = sum(left.values())
        found["files"] = max(detail["files"]) - files
        found["lost"] = _lost(await served.state(), detail)
    finally:
        status = await served.stop()
        engines.stop()
    found["status"] = status
    return found, detail


def _lost(state: dict[str, Any], detail: dict[str, Any]) -> int:
    """Return how many requests the books lack: offered, less those with a known end."""
    rows = state["tenants"]
    told = {
        "offered": sum(row["offered"] for row in rows),
        "refused": sum(sum(row["rejected"].values()) for row in rows),
        "left_before": sum(row["left_before"] for row in rows),
        "outcomes": {
            name: sum(row["outcomes"].get(name, 0) for row in rows)
            for name in sorted({name for row in rows for name in row["outcomes"]})
        },
    }
    detail["books"] = told
    ended = told["refused"] + told["left_before"] + sum(told["outcomes"].values())
    return abs(int(told["offered"] - ended))


def run(quick: bool) -> Result:
    """Soak a gateway: three minutes, or seconds."""
    limit = raise_limit()
    sizes = QUICK if quick else FULL
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as name,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        folder = Path(name)
        found, detail = runner.run(_soak(sizes, folder))
        journal = verify(segments(folder / "journal"))
        detail["journal"] = repr(journal)
    # A neighbour's burst is no leak: quick runs on shared machines show the direction.
    room = 1.5 if quick else 1.0
    return Result(
        name="soak",
        seeds=[SEED],
        claims=[
            at_most("MB of memory for 1,000 streams", found["memory"], MEMORY_MB * room),
            at_most("MB that it grows while they run", found["growth"], GROWTH_MB * room),
            at_most("s until 2,200 that leave at once are gone", found["cleaned"], CLEAN_S * room),
            at_most("answers that were not whole", found["broken"], 0),
            at_least("short answers that were", found["whole"], sizes.requests / 10),
            at_most("held once all have left, summed over the books", found["held"], 0),
            at_most("requests without an end in the books", found["lost"], 0),
            at_most("file descriptors more than before", found["files"], SPARE_FILES),
            at_most("exit status of the gateway", found["status"], 0),
            at_least("the journal replays", isinstance(journal, Verified), 1),
        ],
        detail={**detail, "file_limit": limit, "calibration_s": calibration()},
    )
