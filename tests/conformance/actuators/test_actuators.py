"""What holds of every actuator, whoever its groups are."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.adapters.actuators.emulated import EmulatedActuator, Start
from headrace.adapters.actuators.process.actuator import ProcessActuator, Recipe
from headrace.gateway.clock import LoopClock
from headrace.gateway.providing import ByPool
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.stages import StageTimes, StartOptions
from headrace.ports.actuator import OVER, Actuator, Group, GroupEvent, Stage
from tests.adapters.actuators.scenes import PATIENCE_S, recipe

POOL, NEVER = PoolName("p"), PoolName("never")
A, B, C = (ReplicaName(name) for name in "abc")
Make = Callable[[LoopClock, Path], Actuator]


class Scene:
    """One actuator, and what it told."""

    def __init__(self, made: Actuator) -> None:
        self.actuator, self.told = made, list[GroupEvent]()
        self._more = asyncio.Event()
        made.connect(self._hear)

    def _hear(self, event: GroupEvent) -> None:
        self.told.append(event)
        self._more.set()

    def stages(self, name: ReplicaName) -> list[Stage]:
        return [one.stage for one in self.told if one.group == name]

    def group(self, name: ReplicaName) -> Group:
        (found,) = (one for one in self.actuator.groups() if one.name == name)
        return found

    async def until(self, *wanted: Stage, name: ReplicaName = A) -> Stage:
        """Wait for a group to be at one of some stages."""
        async with asyncio.timeout(PATIENCE_S):
            while not (seen := self.stages(name)) or seen[-1] not in wanted:
                self._more.clear()
                await self._more.wait()
        return seen[-1]


def emulated(clock: LoopClock, _folder: Path) -> Actuator:
    times = StageTimes()
    start = Start(cold=times.stages(StartOptions()), waking=times.waking(), ranks=2)
    never = Start(cold=start.cold, waking=start.waking, ranks=2, success_ppm=0)
    return EmulatedActuator(clock, {POOL: start, NEVER: never})


def processes(clock: LoopClock, folder: Path) -> Actuator:
    never = Recipe(command=("no-such-program",), model="m")
    return ProcessActuator(clock, folder, {POOL: recipe(ranks=2), NEVER: never})


def several(clock: LoopClock, folder: Path) -> Actuator:
    pools: Mapping[PoolName, Actuator] = {
        POOL: emulated(clock, folder), NEVER: processes(clock, folder)
    }  # fmt: skip
    return ByPool(pools)


@asynccontextmanager
async def scene(make: Make, folder: Path) -> AsyncIterator[Scene]:
    made = Scene(make(LoopClock(asyncio.get_running_loop()), folder))
    try:
        yield made
    finally:
        for one in made.actuator.groups():
            made.actuator.stop(one.name)
            await made.until(*OVER, name=one.name)


pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.parametrize(
        "make",
        [
            pytest.param(emulated, marks=pytest.mark.looptime),
            pytest.param(processes, marks=pytest.mark.service),
            pytest.param(several, marks=pytest.mark.looptime),
        ],
    ),
]


async def test_a_start_is_told_of_at_once_and_in_order_until_all_ranks_serve(
    make: Make, tmp_path: Path
) -> None:
    async with scene(make, tmp_path) as made:
        made.actuator.start(A, POOL)
        assert made.stages(A) == [Stage.ASKED], "told from within"
        assert (made.group(A).stage, made.group(A).running) == (Stage.ASKED, 0)
        await made.until(Stage.READY)
        order = [list(Stage).index(stage) for stage in made.stages(A)]
        assert order == sorted(order)
        times = [one.at for one in made.told]
        assert times == sorted(times)
        assert made.stages(A).count(Stage.READY) == 1
        group = made.group(A)
        assert (group.pool, group.stage, group.running) == (POOL, Stage.READY, group.ranks)


@pytest.mark.parametrize("reached", [Stage.ASKED, Stage.PLACED, Stage.READY])
async def test_a_stop_is_told_of_twice_from_wherever_it_comes_and_frees_the_name(
    make: Make, tmp_path: Path, reached: Stage
) -> None:
    async with scene(make, tmp_path) as made:
        made.actuator.start(A, POOL)
        await made.until(reached)
        before = len(made.told)
        made.actuator.stop(A)
        made.actuator.stop(A)
        made.actuator.wake(A)
        assert made.group(A).stage is Stage.STOPPING, "it is there until nothing of it is left"
        await made.until(Stage.STOPPED)
        made.actuator.stop(A)
        assert made.stages(A)[before:] == [Stage.STOPPING, Stage.STOPPED]
        assert made.actuator.groups() == ()
        made.actuator.start(A, POOL)
        assert made.stages(A)[-1] is Stage.ASKED


async def test_what_is_refused_is_over_says_why_and_holds_nothing(
    make: Make, tmp_path: Path
) -> None:
    async with scene(make, tmp_path) as made:
        made.actuator.start(A, NEVER)
        await made.until(*OVER)
        assert made.stages(A)[-1] is Stage.REFUSED
        assert made.told[-1].why
        assert made.actuator.groups() == ()
        made.actuator.start(A, NEVER)
        assert made.stages(A)[-1] is Stage.ASKED, "its name is free"


async def test_groups_are_listed_as_they_were_asked_for_and_names_are_taken(
    make: Make, tmp_path: Path
) -> None:
    async with scene(make, tmp_path) as made:
        for name in (B, A):
            made.actuator.start(name, POOL)
        with pytest.raises(AssertionError):
            made.actuator.start(A, POOL)
        made.actuator.stop(C)
        made.actuator.wake(C)
        made.actuator.wake(B)
        assert [one.name for one in made.actuator.groups()] == [B, A]
        assert {one.group for one in made.told} == {A, B}, "of what is not there nothing is told"
