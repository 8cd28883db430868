"""Which groups a process begins with, and what becomes of those that cannot come up."""

import asyncio
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.config.schema import GroupsSpec, Settings
from headrace.gateway.clock import LoopClock
from headrace.gateway.providing import first, provided
from headrace.model.scaling_spec import Scaling
from headrace.ports.actuator import Stage
from tests.gateway.scaled import POOL
from tests.gateway.scenes import deployment

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def settings(scaling: Scaling | None) -> Settings:
    base = deployment(replicas=1)
    pool = replace(base.pools[0], scaling=scaling)
    return Settings(
        deployment=replace(base, pools=(pool, *base.pools[1:])),
        groups=(GroupsSpec(pool="p", command=("no-such-program", "{port}")),),
    )


@pytest.mark.parametrize(
    ("scaling", "wanted", "count"),
    [
        (Scaling(max=8), 0, 1),
        (Scaling(max=8), 3, 3),
        (Scaling(max=2), 3, 2),
        (None, 3, 1),
    ],
)
async def test_a_process_begins_with_as_many_groups_as_the_one_before_wanted(
    tmp_path: Path, scaling: Scaling | None, wanted: int, count: int
) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    made = settings(scaling)
    async with provided(made, clock, tmp_path, {POOL: wanted}) as groups:
        assert groups is not None
        assert list(groups.names) == [f"p-{nth}" for nth in range(count)]
        first(groups, made, {POOL: wanted})
        assert len(groups.names) == count, "those are asked for once"


async def test_whoever_takes_over_knows_that_none_came_up_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    with caplog.at_level(logging.WARNING):
        async with provided(settings(Scaling()), clock, tmp_path, {POOL: 2}) as groups:
            assert groups is not None
            await groups.risen()
            assert groups.barren == (POOL,)
            assert {one.stage for one in groups.states()} == {Stage.REFUSED}
    assert caplog.messages == [
        f"group p-{nth} is refused: no such program: no-such-program" for nth in range(2)
    ]
