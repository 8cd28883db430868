"""Groups become engines and cease to be, in virtual time, by an actuator that does as it is told."""

import asyncio
from typing import Any, cast

import pytest

from headrace.config.schema import UpstreamSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.groups import FAILED_KEPT, Groups
from headrace.gateway.server import Gateway
from headrace.model.engine import EngineKind
from headrace.model.ids import PoolName, ReplicaName
from headrace.ports.actuator import Group, GroupEvent, Listener, Stage
from headrace.units import NS_PER_MS, seconds
from tests.gateway.scenes import reach

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
POOL, A, B = PoolName("p"), ReplicaName("a"), ReplicaName("b")


class Actuator:
    """Remembers what it is asked for, and tells what the test says."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.tell: Listener = lambda _: None

    def connect(self, listener: Listener) -> None:
        self.tell = listener

    def start(
        self,
        name: ReplicaName,
        pool: PoolName,  # noqa: ARG002 - there is one
        *,
        standby: bool = False,
    ) -> None:
        self.asked.append(("sleeper" if standby else "start", name))

    def wake(self, name: ReplicaName) -> None:
        self.asked.append(("wake", name))

    def stop(self, name: ReplicaName) -> None:
        self.asked.append(("stop", name))

    def groups(self) -> tuple[Group, ...]:
        return tuple(
            Group(
                name=name,
                pool=POOL,
                stage=Stage.READY,
                url="http://127.0.0.1:9",
                kind=EngineKind.LLAMACPP,
                ranks=1,
                running=1,
            )
            for name in (A, B)
        )


class Served:
    """A gateway, and its driver, as far as groups know them."""

    def __init__(self) -> None:
        self.driver = self
        self.engines: list[str] = []
        self.specs: list[UpstreamSpec] = []
        self.draining: dict[str, Any] = {}
        self.runs = False  # its plane hears nothing yet

    def join(self, spec: UpstreamSpec) -> None:
        assert spec.name is not None
        self.engines.append(spec.name)
        self.specs.append(spec)

    def drain(self, name: str, done: Any) -> None:
        self.draining[name] = done

    def remove(self, name: str) -> None:
        self.engines.remove(name)


class Scene:
    def __init__(self, *, attached: bool = True) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.actuator, self.served = Actuator(), Served()
        self.groups = Groups(self.actuator, self.clock, drain_ns=seconds(30))
        if attached:
            self.attach()

    def attach(self) -> None:
        self.groups.attach(cast("Gateway", self.served))

    def tell(self, name: ReplicaName, *stages: Stage, life: int = 1, why: str = "") -> None:
        for stage in stages:
            now = self.clock.now()
            self.actuator.tell(GroupEvent(group=name, life=life, stage=stage, at=now, why=why))


async def test_a_group_serves_from_ready_on_and_no_sooner() -> None:
    made = Scene()
    risen = made.groups.grow(A, POOL)
    made.tell(A, Stage.ASKED, Stage.PLACED, Stage.LISTENING, Stage.HEALTHY, Stage.LOADED)
    assert made.served.engines == []
    assert not risen.done()
    made.tell(A, Stage.READY)
    assert made.served.engines == ["a"]
    assert (await risen).stage is Stage.READY
    (spec,) = made.served.specs
    assert (spec.url, spec.kind) == ("http://127.0.0.1:9", EngineKind.LLAMACPP)


async def test_what_was_ready_before_there_was_a_gateway_serves_from_its_first_moment() -> None:
    made = Scene(attached=False)
    made.groups.grow(A, POOL)
    made.tell(A, Stage.READY)
    made.attach()
    assert made.served.engines == ["a"]
    made.groups.detach()
    made.tell(A, Stage.LOST)
    assert made.served.engines == ["a"], "a gateway that ends is told nothing"


@pytest.mark.parametrize("end", [Stage.REFUSED, Stage.GIVEN_UP, Stage.STOPPED])
async def test_who_waits_for_a_group_hears_of_its_end_too(end: Stage) -> None:
    made = Scene()
    risen = made.groups.grow(A, POOL)
    made.tell(A, Stage.PLACED, end)
    assert (await risen).stage is end
    assert made.served.engines == []


async def test_one_that_is_lost_leaves_at_once_and_joins_again_with_its_next_life() -> None:
    made = Scene()
    made.groups.grow(A, POOL)
    made.tell(A, Stage.READY, Stage.LOST)
    assert made.served.engines == []
    made.tell(A, Stage.PLACED, Stage.READY, life=2)
    assert made.served.engines == ["a"]
    assert made.actuator.asked == [("start", "a")]


async def test_one_that_is_to_go_is_drained_then_stopped_then_forgotten() -> None:
    made = Scene()
    made.groups.grow(A, POOL)
    made.groups.grow(B, POOL)
    made.tell(A, Stage.READY)
    made.tell(B, Stage.READY)
    gone = made.groups.shrink(A)
    assert made.groups.shrink(A) is gone
    assert ("stop", "a") not in made.actuator.asked
    assert made.served.engines == ["a", "b"], "what runs there goes on"
    made.served.draining["a"]()
    assert made.actuator.asked[-1] == ("stop", "a")
    made.tell(A, Stage.STOPPING)
    assert made.served.engines == ["b"]
    assert not gone.done()
    made.tell(A, Stage.STOPPED)
    assert (await gone).stage is Stage.STOPPED
    made.groups.grow(A, POOL)
    await reach(made.clock, 60_000)
    assert made.actuator.asked.count(("stop", "a")) == 1, "its deadline went with it"


async def test_a_drain_has_a_deadline() -> None:
    made = Scene()
    made.groups.grow(A, POOL)
    made.tell(A, Stage.READY)
    made.groups.shrink(A)
    await reach(made.clock, 29_999)
    assert ("stop", "a") not in made.actuator.asked
    await reach(made.clock, 30_001)
    assert made.actuator.asked[-1] == ("stop", "a")
    assert made.clock.now() < 31_000 * NS_PER_MS


async def test_one_on_its_way_up_is_stopped_without_a_drain() -> None:
    made = Scene()
    risen = made.groups.grow(A, POOL)
    gone = made.groups.shrink(A)
    assert made.actuator.asked == [("start", "a"), ("stop", "a")]
    made.tell(A, Stage.STOPPING, Stage.STOPPED)
    assert (await risen).stage is (await gone).stage is Stage.STOPPED


async def test_one_that_is_lost_while_it_drains_does_not_come_back() -> None:
    made = Scene()
    made.groups.grow(A, POOL)
    made.tell(A, Stage.READY)
    gone = made.groups.shrink(A)
    made.tell(A, Stage.LOST)
    assert made.served.engines == []
    assert made.actuator.asked[-1] == ("stop", "a")
    made.tell(A, Stage.STOPPING, Stage.STOPPED)
    assert gone.done()


async def test_each_stage_of_the_present_life_is_told_with_its_seconds() -> None:
    made = Scene()
    made.groups.grow(A, POOL)
    assert made.groups.states() == []
    for at, stage in enumerate((Stage.ASKED, Stage.PLACED, Stage.READY)):
        await reach(made.clock, at * 1_000)
        made.tell(A, stage)
    await reach(made.clock, 5_000)
    (state,) = made.groups.states()
    assert (state.group, state.pool, state.life, state.stage) == ("a", "p", 1, "ready")
    assert (state.for_s, state.seconds) == (3.0, {"placed": 1.0, "ready": 1.0})
    made.tell(A, Stage.LOST, why="rank 0 ended")
    (state,) = made.groups.states()
    assert (state.stage, state.why) == ("lost", "rank 0 ended")
    await reach(made.clock, 7_000)
    made.tell(A, Stage.PLACED, life=2)
    (state,) = made.groups.states()
    assert (state.life, state.stage, state.seconds) == (2, "placed", {"placed": 2.0})


async def test_a_group_that_failed_is_told_of_until_others_did_and_one_given_back_is_not() -> None:
    made = Scene()
    for nth in range(FAILED_KEPT + 5):
        made.groups.grow(ReplicaName(f"r-{nth}"), POOL)
        made.tell(ReplicaName(f"r-{nth}"), Stage.ASKED, Stage.REFUSED, why="no place")
    made.groups.grow(A, POOL)
    made.tell(A, Stage.ASKED, Stage.STOPPING)
    states = made.groups.states()
    assert [state.group for state in states] == [
        *(f"r-{nth}" for nth in range(5, FAILED_KEPT + 5)),
        "a",
    ]
    assert {state.why for state in states[:-1]} == {"no place"}
    made.tell(A, Stage.STOPPED)
    made.groups.grow(ReplicaName("r-5"), POOL)
    made.tell(ReplicaName("r-5"), Stage.ASKED)
    states = made.groups.states()
    assert len(states) == FAILED_KEPT
    assert (states[-1].group, states[-1].stage) == ("r-5", "asked")
