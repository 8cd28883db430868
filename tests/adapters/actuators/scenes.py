"""Groups of fake engines, and what one hears of them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.adapters.actuators.process.actuator import ProcessActuator, Recipe
from headrace.adapters.actuators.process.records import stat
from headrace.gateway.clock import LoopClock
from headrace.model.ids import PoolName, ReplicaName
from headrace.ports.actuator import Group, GroupEvent, Stage

FAKE = Path(__file__).parent / "fake_engine.py"
POOL = PoolName("p")
PATIENCE_S = 60.0
"""After which a test gives up."""


def recipe(*wrong: str, **more: Any) -> Recipe:
    """Return how a fake engine is started, with what is wrong with it."""
    command = (sys.executable, "-I", str(FAKE), "{port}", "{rank}", *wrong)
    given: dict[str, Any] = {"command": command, "model": "m", "stop_s": 0.5} | more
    return Recipe(**given)


class Scene:
    """One actuator, and what it told."""

    def __init__(self, folder: Path, given: Recipe) -> None:
        clock = LoopClock(asyncio.get_running_loop())
        self.actuator = ProcessActuator(clock, folder, {POOL: given})
        self.heard: list[GroupEvent] = []
        self._more = asyncio.Event()
        self.actuator.connect(self.hear)

    def hear(self, event: GroupEvent) -> None:
        self.heard.append(event)
        self._more.set()

    def start(self, *names: str) -> None:
        for name in names:
            self.actuator.start(ReplicaName(name), POOL)

    def stop(self, name: str) -> None:
        self.actuator.stop(ReplicaName(name))

    def group(self, name: str) -> Group:
        (found,) = (one for one in self.actuator.groups() if one.name == name)
        return found

    def stages(self, name: str, life: int | None = None) -> list[Stage]:
        return [
            event.stage
            for event in self.heard
            if event.group == name and life in (None, event.life)
        ]

    async def until(self, name: str, stage: Stage, life: int = 1) -> GroupEvent:
        """Wait for a group to reach a stage."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.heard:
                    if (event.group, event.stage, event.life) == (name, stage, life):
                        return event
                self._more.clear()
                await self._more.wait()

    def pids(self, name: str) -> list[int]:
        """Return the processes of a group, by rank."""
        ranks = self.actuator._held[ReplicaName(name)].ranks
        assert ranks is not None
        return [process.pid for process in ranks._processes]

    def said(self, name: str) -> str:
        return self.actuator.log_path(ReplicaName(name)).read_text()


@asynccontextmanager
async def scene(folder: Path, *wrong: str, **more: Any) -> AsyncIterator[Scene]:
    """Yield an actuator of fake engines; whatever happens, none outlives the test."""
    made = Scene(folder, recipe(*wrong, **more))
    try:
        yield made
    finally:
        made.actuator.kill()
        await made.actuator.close()


def lives(pid: int) -> bool:
    """Return whether a process runs: one that nobody has reaped yet does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return stat(pid) is not None and state != "Z"


async def until(true: Callable[[], bool]) -> None:
    """Look until something is so of which nobody tells."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - a process that ends sets no event
            await asyncio.sleep(0.02)
