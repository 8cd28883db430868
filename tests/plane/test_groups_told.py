"""Groups as others tell of them: late, twice, lost, unknown; and what is no demand for them."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec, PoolSpec, TenantSpec
from headrace.model.effect import DrainGroup, StopGroup, WakeGroup
from headrace.model.event import GroupTold
from headrace.model.group import GroupShape, GroupStep
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.scaling import Standing
from headrace.model.scaling_spec import Scaling
from headrace.model.stages import Stage
from tests.plane.scenes import H100, Driver, S, config, patient
from tests.plane.test_groups import (
    QUICK,
    TIMES,
    P,
    asked,
    books,
    changed,
    drained,
    listing,
    load,
    of,
    records,
    scaled,
    standing,
    thawed,
    told,
)

# What is told late, twice, or of somebody else's ---------------------------------------------


def stopped(made: Driver) -> list[str]:
    return [one.group for one in of(made, StopGroup)]


def test_a_start_is_counted_once_however_often_it_is_told() -> None:
    made = scaled(min=2)
    made.wait(15 * S)
    (name,) = asked(made)
    for _ in range(3):
        told(made, name, GroupStep.READY)
    made.up(name)
    told(made, name, GroupStep.READY)
    thawed(made)
    made.tell(listing(("r0", GroupStep.READY, 1), (name, GroupStep.READY, 1)))
    made.up("r0")
    made.up(name)
    assert (books(made).risen, books(made).failed) == (1, 0)


def test_a_group_that_served_and_is_lost_is_no_start_that_failed() -> None:
    made = scaled(replicas=2, min=2)
    for name, step in (("r0", GroupStep.LOST), ("r1", GroupStep.GIVEN_UP)):
        made.down(name, made.known.fleet.replicas[ReplicaName(name)].incarnation)
        told(made, name, step, gpus=0)
    assert books(made).failed == 0
    told(made, "r0", GroupStep.LOST, gpus=0)
    assert books(made).failed == 1, "it was lost again, before it was ready"


def test_what_is_told_of_the_start_of_a_group_that_serves_comes_late() -> None:
    made = scaled(min=2)
    made.wait(15 * S)
    (name,) = asked(made)
    told(made, name, GroupStep.READY)
    made.up(name)
    told(made, name, GroupStep.COMING, stage=Stage.WARM)
    assert standing(made, name) is Standing.READY
    changed(made, None)
    assert made.known.fleet.ready == {P: 2}, "it is kept, since it serves"
    assert stopped(made) == []


def test_a_wake_that_nobody_heard_is_said_again() -> None:
    made = scaled(standby=1)
    made.wait(15 * S)
    (name,) = asked(made)
    told(made, name, GroupStep.ASLEEP)
    load(made, seconds=16)
    assert [one.group for one in of(made, WakeGroup)] == [name]
    thawed(made)
    made.tell(listing(("r0", GroupStep.READY, 1), (name, GroupStep.ASLEEP, 1)))
    made.up("r0")
    assert standing(made, name) is Standing.STANDBY
    load(made, seconds=31)
    assert name in [one.group for one in of(made, WakeGroup)]
    assert (books(made).risen, books(made).failed) == (1, 0)


def test_a_sleeper_that_the_checkpoint_does_not_know_sleeps_on() -> None:
    made = scaled()
    thawed(made)
    made.tell(listing(("r0", GroupStep.READY, 1), ("p-0.1", GroupStep.COMING, 1)))
    made.up("r0")
    told(made, "p-0.1", GroupStep.ASLEEP)
    assert standing(made, "p-0.1") is Standing.STANDBY


def test_what_goes_and_the_checkpoint_does_not_know_is_counted_until_it_is_gone() -> None:
    made = scaled(max_gpus=1)
    thawed(made)
    made.tell(listing(("r0", GroupStep.READY, 1), ("p-0.1", GroupStep.STOPPING, 1)))
    made.up("r0")
    assert standing(made, "p-0.1") is Standing.STOPPING
    made.wait(15 * S)
    assert records(made)[-1].decision.supply.gpus_held == 2
    told(made, "p-0.1", GroupStep.STOPPED, gpus=0)
    assert list(books(made).groups) == ["r0"]


@pytest.mark.parametrize("step", [GroupStep.STOPPING, GroupStep.STOPPED, GroupStep.GIVEN_UP])
def test_the_end_of_a_group_that_nobody_knows_is_no_news(step: GroupStep) -> None:
    made = scaled()
    told(made, "g", step, gpus=0)
    assert list(books(made).groups) == ["r0"]
    assert made.plane.state.ignored == {"group": 1}


def test_a_draining_group_that_somebody_stops_is_not_stopped_again() -> None:
    made, request = drained()
    (going,) = of(made, DrainGroup)
    told(made, going.group, GroupStep.STOPPING)
    assert made.plane.state.leaving == {}
    made.wait(200 * S)
    assert stopped(made) == []
    made.down(going.group, made.known.fleet.replicas[going.group].incarnation)
    told(made, going.group, GroupStep.STOPPED, gpus=0)
    assert going.group not in books(made).groups
    assert request not in made.plane.state.live


@pytest.mark.parametrize("told_first", [False, True])
def test_what_a_crash_takes_during_a_drain_was_lost_and_not_drained(*, told_first: bool) -> None:
    made, request = drained()
    (going,) = of(made, DrainGroup)
    life = made.known.fleet.replicas[going.group].incarnation
    if told_first:
        told(made, going.group, GroupStep.GIVEN_UP, gpus=0)
    made.down(going.group, life)
    (row,) = [one for one in made.rows() if one.request == request]
    assert row.reason is Reason.REPLICA_LOST


def test_a_name_is_of_one_group_whatever_pool_is_told_of_it() -> None:
    made = scaled()
    before = made.plane.settings.config
    (pool,) = before.pools
    made.configure(replace(before, pools=(pool, replace(pool, name="q"))), revision=2)
    made.tell(GroupTold(group=ReplicaName("r0"), pool=PoolName("q"), step=GroupStep.COMING, gpus=1))
    assert made.plane.state.pools[PoolName("q")].groups == {}
    assert made.plane.state.ignored == {"group": 1}


# What is no demand ---------------------------------------------------------------------------


def test_what_a_tenants_own_limits_refuse_asks_for_no_groups() -> None:
    given: dict[str, Any] = {"times": TIMES, "max": 4} | QUICK
    limited = TenantSpec(name="a", rpm_limit=1)
    made = Driver(
        config(
            tenants=(limited,),
            pools=(PoolSpec(name="p", model="m", profile=H100, scaling=Scaling(**given)),),
            classes=(ClassSpec(name="chat"), patient()),
        ),
        replicas=0,
    )
    told(made, "r0", GroupStep.READY)
    made.up("r0")
    load(made, seconds=61)
    assert len(made.refused()) > 1_000
    assert {one.rejection.reason for one in made.refused()} == {Reason.REQUEST_RATE}
    assert asked(made) == []


# More changes of the configuration -----------------------------------------------------------


def test_a_name_never_comes_again_though_its_pool_was_gone() -> None:
    made = scaled(replicas=0, min=1)
    made.wait(15 * S)
    config_before = made.plane.settings.config
    changed(made, None, pool="other")
    told(made, "p-0.1", GroupStep.STOPPED, gpus=0)
    assert made.plane.state.pools == {}
    made.configure(config_before, revision=3)
    made.wait(15 * S)
    assert asked(made) == ["p-0.1", "p-0.2"]


def test_a_group_keeps_the_shape_that_it_was_asked_for_with() -> None:
    made = scaled(replicas=0, min=1, shape=GroupShape(tp=2))
    made.wait(15 * S)
    (name,) = asked(made)
    told(made, name, GroupStep.READY, gpus=2)
    made.up(name)
    (pool,) = made.plane.settings.config.pools
    assert pool.scaling is not None
    changed(made, replace(pool.scaling, shape=GroupShape(tp=4)))
    told(made, name, GroupStep.READY, gpus=2)
    assert standing(made, name) is Standing.READY
    told(made, name, GroupStep.COMING, gpus=1)
    assert standing(made, name) is Standing.COMING


def test_groups_of_another_model_go_and_are_asked_for_anew() -> None:
    made = scaled(min=1)
    before = made.plane.settings.config
    other = replace(before.models[0], name="n", aliases=())
    pools = (replace(before.pools[0], model="n"),)
    made.configure(replace(before, models=(other,), pools=pools), revision=2)
    assert stopped(made) == ["r0"]
    told(made, "r0", GroupStep.STOPPED, gpus=0)
    made.wait(15 * S)
    assert asked(made) == ["p-0.1"]


def test_sleepers_go_when_the_budget_of_gpus_falls_below_what_is_held() -> None:
    made = scaled(replicas=2, min=2, standby=2)
    made.wait(15 * S)
    sleepers = asked(made)
    for name in sleepers:
        told(made, name, GroupStep.ASLEEP)
    (pool,) = made.plane.settings.config.pools
    assert pool.scaling is not None
    changed(made, replace(pool.scaling, max_gpus=3))
    for _ in range(3):
        made.wait(15 * S)
    assert len(stopped(made)) == 1
    assert set(stopped(made)) < set(sleepers)
    assert made.known.fleet.ready == {P: 2}


def test_groups_beyond_the_budget_that_serve_are_drained_at_once() -> None:
    made = scaled(replicas=3, min=1, in_window_s=600.0)
    (pool,) = made.plane.settings.config.pools
    assert pool.scaling is not None
    changed(made, replace(pool.scaling, max_gpus=1))
    for _ in range(4):
        made.wait(15 * S)
    assert len(stopped(made)) == 2
    assert made.known.fleet.ready == {P: 1}


def test_what_comes_up_while_it_goes_takes_nothing_once_its_pool_scales_again() -> None:
    made = scaled(min=2)
    made.wait(15 * S)
    (name,) = asked(made)
    (pool,) = made.plane.settings.config.pools
    changed(made, None)
    assert stopped(made) == [name]
    made.up(name)
    made.configure(replace(made.plane.settings.config, pools=(pool,)), revision=3)
    assert made.known.fleet.ready == {P: 1}


def test_whoever_refuses_for_ever_is_asked_ever_less_often_until_a_group_is_placed() -> None:
    made = scaled(min=3)
    times = []
    for _ in range(200):
        before = len(asked(made))
        made.wait(15 * S)
        if new := asked(made)[before:]:
            times.append(made.now // (15 * S))
            assert len(new) == 2
        for name in new:
            told(made, name, GroupStep.REFUSED, gpus=0)
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert gaps[:5] == [1, 2, 4, 8, 16]
    assert set(gaps[5:]) == {16}
    assert list(books(made).groups) == ["r0"]
    while len(asked(made)) == before + len(new):
        made.wait(15 * S)
    told(made, asked(made)[-1], GroupStep.COMING, stage=Stage.IMAGE)
    told(made, asked(made)[-2], GroupStep.REFUSED, gpus=0)
    before = len(asked(made))
    made.wait(15 * S)
    assert len(asked(made)) == before + 1, "some are placed: the rest is worth asking for"
