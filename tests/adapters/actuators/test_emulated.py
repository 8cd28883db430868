"""Emulated groups come up stage by stage, sleep, wake and go, in virtual time."""

import asyncio

import pytest

from headrace.adapters.actuators.emulated import RELEASE_NS, EmulatedActuator, Start, Way
from headrace.gateway.clock import LoopClock
from headrace.model.group import LIVES, Domain
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.stages import Spread, StageTimes, StartOptions
from headrace.ports.actuator import GroupEvent, Stage, stage_seconds
from headrace.units import MICRO, NS_PER_S, elapsed

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
POOL, A, B = PoolName("p"), ReplicaName("a"), ReplicaName("b")
TIMES = StageTimes(wake=Spread(3.0, 6.0))
PARTS = [
    "provision", "image", "weights", "ranks", "compile", "warm", "unattributed", "register",
]  # fmt: skip


class Scene:
    def __init__(
        self, seed: int = 0, success_ppm: int = MICRO, domains: tuple[str, ...] = ()
    ) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        start = Start(
            cold=TIMES.stages(StartOptions()),
            waking=TIMES.waking(),
            ranks=4,
            success_ppm=success_ppm,
            domains=domains,
            domain=Domain.ZONE,
        )
        self.actuator = EmulatedActuator(self.clock, {POOL: start}, seed)
        self.told: list[GroupEvent] = []
        self.actuator.connect(self.told.append)

    def stages(self) -> list[Stage]:
        return [event.stage for event in self.told]

    async def wait(self, seconds_: float) -> None:
        await asyncio.sleep(seconds_)  # virtual

    @property
    def running(self) -> list[int]:
        return [group.running for group in self.actuator.groups()]


async def test_a_start_goes_through_all_stages_and_they_add_up() -> None:
    made = Scene()
    made.actuator.start(A, POOL)
    assert made.running == [0], "nothing is placed yet"
    await made.wait(600)
    assert [event.step for event in made.told] == [*PARTS, ""]
    assert made.stages()[-1] is Stage.READY
    assert made.running == [4]
    whole = elapsed(made.told[0].at, made.told[-1].at) / NS_PER_S
    assert sum(stage_seconds(made.told).values()) == pytest.approx(whole)


async def test_starts_differ_by_name_and_seed_and_by_nothing_else() -> None:
    found = []
    for seed, name in ((0, A), (0, A), (0, B), (1, A)):
        made = Scene(seed)
        made.actuator.start(name, POOL)
        await made.wait(600)
        found.append([elapsed(made.told[0].at, event.at) for event in made.told])
    assert found[0] == found[1]
    assert len({tuple(one) for one in found}) == 3


async def test_a_sleeper_stops_before_it_registers_and_wakes_sooner_than_another_starts() -> None:
    made = Scene()
    made.actuator.start(A, POOL, standby=True)
    await made.wait(600)
    assert made.stages()[-1] is Stage.ASLEEP
    assert made.running == [4], "it holds what it has"
    seen = len(made.told)
    made.actuator.wake(A)
    made.actuator.wake(A)
    await made.wait(60)
    assert [event.step for event in made.told[seen:]] == ["warm", "register", ""]
    assert made.stages()[-1] is Stage.READY
    cold, waking = made.told[:seen], made.told[seen:]
    took = elapsed(waking[0].at, waking[-1].at)
    assert took < elapsed(cold[0].at, cold[-1].at)


async def test_a_sleeper_that_is_woken_on_its_way_serves_at_its_end() -> None:
    made = Scene()
    made.actuator.start(A, POOL, standby=True)
    await made.wait(5)
    made.actuator.wake(A)
    await made.wait(600)
    assert Stage.ASLEEP not in made.stages()
    assert made.stages()[-1] is Stage.READY


@pytest.mark.parametrize("after_s", [0, 15, 600])
async def test_one_that_is_stopped_goes_once_from_wherever_it_is(after_s: float) -> None:
    made = Scene()
    made.actuator.start(A, POOL)
    await made.wait(after_s)
    seen = len(made.told)
    made.actuator.stop(A)
    made.actuator.stop(A)
    made.actuator.wake(A)
    await made.wait(600)
    gone = made.told[seen:]
    assert [event.stage for event in gone] == [Stage.STOPPING, Stage.STOPPED]
    assert elapsed(gone[0].at, gone[1].at) == RELEASE_NS
    assert made.actuator.groups() == ()


async def test_one_that_is_refused_holds_nothing_and_its_name_is_free() -> None:
    made = Scene(success_ppm=0)
    made.actuator.start(A, POOL)
    await made.wait(600)
    assert made.stages() == [Stage.ASKED, Stage.REFUSED]
    assert made.actuator.groups() == ()
    made.actuator.start(A, POOL)
    assert made.stages()[-1] is Stage.ASKED


async def test_groups_are_spread_over_the_domains_that_there_are() -> None:
    made = Scene(domains=("eu/a", "eu/b"))
    for name in (A, B, ReplicaName("c")):
        made.actuator.own(name, POOL)
    there = [group.places[0].within(Domain.ZONE) for group in made.actuator.groups()]
    assert there == ["eu/a", "eu/b", "eu/a"]
    assert made.stages() == [Stage.READY] * 3


async def test_a_group_that_is_lost_starts_anew_and_is_given_up_at_the_third_loss() -> None:
    made = Scene()
    made.actuator.own(A, POOL)
    for _ in range(LIVES - 1):
        made.actuator.lose(A, "gone", again=True)
        assert made.running == [0]
        await made.wait(600)
        assert made.stages()[-1] is Stage.READY
    assert [event.life for event in made.told if event.stage is Stage.READY] == [1, 2, 3]
    made.actuator.lose(A, "gone", again=True)
    assert made.stages()[-1] is Stage.GIVEN_UP
    assert made.running == []


async def test_what_is_left_of_a_group_is_held_until_it_is_whole_again() -> None:
    made = Scene()
    made.actuator.own(A, POOL)
    back = Way(plan=(("provision", 5), ("image", 5)))
    made.actuator.lose(A, "a rank", again=True, left=3, way=back)
    assert made.running == [3]
    await made.wait(600)
    assert (made.running, made.stages()[-1]) == ([4], Stage.READY)
    made.actuator.lose(A, "a rank", again=True, left=3, way=Way(plan=()))
    await made.wait(600)
    assert (made.running, made.stages()[-1]) == ([3], Stage.ASKED)


async def test_nothing_is_placed_in_a_domain_that_is_shut() -> None:
    made = Scene(domains=("eu/a", "eu/b"))
    made.actuator.shut(Domain.ZONE, "eu/a")
    made.actuator.own(A, POOL)
    made.actuator.start(B, POOL)
    assert made.actuator.groups()[0].places[0].zone == "b"
    made.actuator.shut(Domain.ZONE, "eu/b")
    await made.wait(600)
    assert made.stages()[-1] is Stage.REFUSED, "there is nowhere left"
    made.actuator.reopen(Domain.ZONE, "eu/a")
    made.actuator.start(B, POOL)
    await made.wait(600)
    assert [group.places[0].zone for group in made.actuator.groups()] == ["b", "a"]


async def test_one_that_is_lost_while_it_stops_is_stopped_and_one_for_good_is_given_up() -> None:
    made = Scene()
    made.actuator.own(A, POOL)
    made.actuator.own(B, POOL)
    made.actuator.stop(A)
    made.actuator.lose(A, "gone", again=True)
    made.actuator.lose(B, "gone", again=False)
    await made.wait(600)
    assert made.stages()[2:] == [Stage.STOPPING, Stage.STOPPED, Stage.GIVEN_UP]


@pytest.mark.parametrize(
    ("way", "stages", "running"),
    [
        (Way(plan=(("provision", 5),), end=Stage.REFUSED), [Stage.REFUSED], []),
        (Way(plan=(("provision", 5),), end=None), [], [0]),
        (Way(plan=(("provision", 5), ("image", 5)), running=2), [Stage.ASKED], [2]),
        (Way(plan=(("provision", 5), ("image", 5))), [Stage.PLACED, Stage.READY], [4]),
    ],
)
async def test_a_start_may_be_bent(way: Way, stages: list[Stage], running: list[int]) -> None:
    made = Scene()
    made.actuator.bend = lambda _name, _life, _usual: way
    made.actuator.start(A, POOL)
    await made.wait(600)
    assert made.stages() == [Stage.ASKED, *stages]
    assert made.running == running
