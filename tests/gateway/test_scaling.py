"""Pools that scale behind a gateway: groups are asked for, serve, are drained, and outlive no process."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.adapters.journal.ring import segments
from headrace.gateway.shadow import Beside
from headrace.model.event import GroupsListed, ReplicaUp, Restarted, WallTold
from headrace.model.group import Life
from headrace.model.scaling import Standing
from headrace.model.scaling_spec import Mode
from headrace.model.slo import Outcome
from headrace.plane.journal import Record, Verified, frames, verify
from headrace.ports.actuator import Stage
from headrace.report.decisions import Verified as DecisionsVerified
from headrace.report.decisions import verify_decisions
from tests.gateway.managed import value
from tests.gateway.scaled import MORE, POOL, QUICK, TIMES, Scaled, scaling

LONG = 16_000
"""Tokens of an answer that takes about two minutes."""
pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


async def test_load_brings_groups_that_serve_and_its_end_drains_them_without_a_lost_token() -> None:
    made = Scaled()
    callers = await made.load(60)
    assert made.ready > 1
    assert {row.replica for row in made.rows} > {"p-0"}, "what was asked for serves"
    await made.wait(120)
    assert made.ready == 1
    assert len(made.driver.engines) == 1, "what is drained is given back"
    assert len(made.books.groups) == 1
    assert [caller.status for caller in callers] == [200] * len(callers)
    assert len(made.rows) == len(callers)
    assert {row.outcome for row in made.rows} == {Outcome.SUCCESS}
    assert {row.usage.output_tokens for row in made.rows if row.usage is not None} == {100}
    assert made.groups.drains[POOL] > 0
    made.finish()


async def test_a_long_answer_holds_its_group_until_it_is_whole() -> None:
    made = Scaled(replace(QUICK, drain_s=3_600.0), replicas=2, each=MORE)
    long = [made.ask(LONG) for _ in range(2)]  # one on each
    await made.wait(60)
    (leaving,) = [one for one in made.books.groups.values() if one.life is Life.DRAINING]
    assert leaving.name in {engine.name for engine in made.driver.engines}
    for caller in long:
        await caller.done()
    await made.wait(5)
    assert leaving.name not in made.books.groups
    assert [row.outcome for row in made.rows] == [Outcome.SUCCESS] * 2
    assert [row.usage.output_tokens for row in made.rows if row.usage] == [LONG] * 2
    made.finish()


async def test_what_is_left_when_a_drain_is_over_ends_with_an_error_and_is_counted() -> None:
    made = Scaled(replace(QUICK, drain_s=10.0), replicas=2, each=MORE)
    for caller in [made.ask(LONG) for _ in range(2)]:
        await caller.done()
    await made.wait(1)
    assert sorted(str(row.reason) for row in made.rows) == ["None", "drained"]
    assert len(made.driver.engines) == 1
    made.finish()


async def test_demand_that_returns_calls_a_drain_off() -> None:
    made = Scaled(replace(QUICK, drain_s=600.0), replicas=2, each=MORE)
    long = [made.ask(LONG) for _ in range(2)]
    await made.wait(60)
    assert Life.DRAINING in {one.life for one in made.books.groups.values()}
    callers = await made.load(30, per_s=4, tokens=1_000)
    assert Life.DRAINING not in {one.life for one in made.books.groups.values()}
    for caller in (*long, *callers):
        await caller.done()
    assert {row.outcome for row in made.rows} == {Outcome.SUCCESS}
    made.finish()


async def test_a_start_that_is_refused_is_asked_for_again() -> None:
    never = replace(TIMES, success=1e-9)
    made = Scaled(replace(QUICK, times=never))
    await made.load(80)
    assert made.ready == 1
    assert made.books.failed > 1
    made.finish()


async def test_a_sleeper_is_woken_before_a_group_is_started() -> None:
    made = Scaled(replace(QUICK, standby=1))
    await made.wait(20)
    (asleep,) = made.actuator.groups()
    assert asleep.stage is Stage.ASLEEP
    assert made.ready == 1
    await made.load(60)
    assert {engine.name for engine in made.driver.engines} >= {"p-0", asleep.name}
    made.finish()


async def test_a_pool_at_zero_is_ready_for_callers_and_rises_for_the_first() -> None:
    made = Scaled(replace(QUICK, min=0), replicas=0)
    await made.wait(30)
    assert made.ready == 0
    assert (await made.look("/ready")).status == 200
    first = await made.ask().done()
    assert first.status == 200
    await made.wait(400)
    assert made.ready == 0, "and falls again"
    assert list(made.actuator.groups()) == []
    await made.order("/scale", frozen=True)
    assert (await made.look("/ready")).status == 503
    made.finish()


async def test_decisions_of_the_scaler_are_in_the_log_and_verify(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    made = Scaled(log=path)
    await made.load(40)
    made.finish()
    made.gateway._files.close()
    found = verify_decisions(path)
    assert isinstance(found, DecisionsVerified), found
    assert b'"scale"' in path.read_bytes()


@pytest.mark.parametrize("mode", [Mode.ADVISE, Mode.OFF])
async def test_advice_is_told_and_nothing_is_done(mode: Mode) -> None:
    made = Scaled(replace(QUICK, mode=mode))
    await made.load(40)
    assert [engine.name for engine in made.driver.engines] == ["p-0"]
    (pool,) = (await made.look("/scale")).json["pools"]
    newest = pool["decisions"][0]
    assert (newest["brakes"], newest["steps"]) == (["advice" if mode is Mode.ADVISE else "off"], {})
    made.finish()


# Restarts ------------------------------------------------------------------------------------


async def test_a_process_that_follows_a_killed_one_starts_from_what_is_there(
    tmp_path: Path,
) -> None:
    first = Scaled(folder=tmp_path)
    await first.load(60)
    before = set(first.books.groups)
    assert len(before) > 1
    first.kill()
    second = Scaled(folder=tmp_path)
    there = {engine.name for engine in second.driver.engines}
    assert set(second.books.groups) == there == {"p-0"}, "emulated groups end with their process"
    assert second.books.groups[next(iter(second.books.groups))].life is Life.WANTED
    callers = await second.load(60)
    assert second.ready > 1
    new = set(second.books.groups) - before
    assert new, "names are never used again"
    for caller in callers:
        await caller.done()
    second.finish()
    assert isinstance(verify(segments(tmp_path)), Verified)


async def test_a_drain_that_a_kill_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    slow = replace(QUICK, drain_s=3_600.0)
    first = Scaled(slow, folder=tmp_path, replicas=2, each=MORE)
    callers = [first.ask(LONG) for _ in range(2)]
    await first.wait(60)
    assert Life.DRAINING in {one.life for one in first.books.groups.values()}
    first.kill()
    second = Scaled(slow, folder=tmp_path, replicas=2, each=MORE)
    await second.wait(60)
    assert set(second.books.groups) == {engine.name for engine in second.driver.engines}
    assert second.ready == 1, "it goes on to be one too many"
    assert not second.driver.plane.state.leaving
    for caller in callers:
        await caller.done()
    second.finish()


async def test_time_and_groups_are_told_before_the_first_replica(tmp_path: Path) -> None:
    Scaled(folder=tmp_path).kill()
    second, told = Scaled(folder=tmp_path), list[type]()
    second.finish()
    for segment in segments(tmp_path):
        told += [type(one.event) for one in frames(segment) if isinstance(one, Record)]
    last = told[len(told) - told[::-1].index(Restarted) - 1 :]
    order = [kind for kind in last if kind in (Restarted, WallTold, GroupsListed, ReplicaUp)]
    assert order[:4] == [Restarted, WallTold, GroupsListed, ReplicaUp]


# Operators -----------------------------------------------------------------------------------


async def test_operators_see_groups_and_decisions_and_may_freeze_them() -> None:
    made = Scaled()
    assert (await made.order("/scale", frozen=True)).json == {"frozen": True}
    await made.load(40)
    assert made.ready == 1, "frozen"
    found = (await made.look("/scale")).json
    assert found["frozen"] is True
    (pool,) = found["pools"]
    assert [group["group"] for group in pool["groups"]] == ["p-0"]
    newest = pool["decisions"][0]
    assert (newest["reason"], newest["brakes"], newest["steps"]) == ("work", ["frozen"], {})
    assert newest["desired"] >= 1
    assert (await made.order("/scale", frozen=False)).json == {"frozen": False}
    await made.load(40)
    assert made.ready > 1
    assert made.admin_changes() == {("scale", "made"): 2}
    made.finish()


async def test_all_that_is_frozen_includes_the_scale_and_only_thawing_all_thaws_it() -> None:
    made = Scaled()
    await made.order("/freeze")
    refused = await made.order("/scale", frozen=False)
    assert (refused.status, refused.error["code"]) == (409, "frozen")
    assert made.driver.plane.state.scale_frozen
    await made.order("/freeze", frozen=False)
    assert not made.driver.plane.state.scale_frozen
    made.finish()


async def test_a_scale_that_is_frozen_stays_so_through_a_kill(tmp_path: Path) -> None:
    first = Scaled(folder=tmp_path)
    await first.order("/scale", frozen=True)
    first.kill()
    second = Scaled(folder=tmp_path)
    assert (await second.look("/scale")).json["frozen"] is True
    second.finish()


async def test_metrics_tell_groups_gpus_drains_and_reasons() -> None:
    made = Scaled()
    await made.load(60)
    samples = await made.scrape()
    ready = value(samples, "headrace_groups", pool="p", standing=Standing.READY)
    assert ready == made.ready > 1
    assert value(samples, "headrace_desired_groups", pool="p") == ready
    assert value(samples, "headrace_urgent_work_rate", pool="p", tries="first")
    assert value(samples, "headrace_urgent_work_rate", pool="p", tries="repeats") == 0
    assert value(samples, "headrace_group_gpus", pool="p") == ready
    assert (value(samples, "headrace_group_gpu_seconds_total", pool="p") or 0) > 60
    assert (value(samples, "headrace_scale_steps_total", pool="p", step="ask") or 0) >= 1
    assert (value(samples, "headrace_scale_decisions_total", pool="p", reason="work") or 0) > 5
    await made.wait(120)
    samples = await made.scrape()
    assert value(samples, "headrace_group_drains_total", pool="p") == ready - 1
    assert (value(samples, "headrace_decisions_total", decision="scale") or 0) > 20
    made.finish()


# Beside and aside ----------------------------------------------------------------------------


async def test_a_shadow_of_a_pool_that_scales_goes_on_and_starts_nothing() -> None:
    wide = replace(QUICK, min=3)
    made = Scaled(beside=Beside(config=scaling(wide), name="wide"))
    await made.load(60)
    shadow = made.driver.shadow
    assert shadow.broken is None
    assert made.ready > 1
    assert set(shadow.plane.state.pools[POOL].groups) == set(made.books.groups)
    await made.wait(120)
    assert shadow.broken is None
    assert made.ready == 1, "what the shadow wants is nobody's order"
    made.finish()


async def test_a_process_that_stands_aside_leaves_the_number_of_groups_alone() -> None:
    made = Scaled()
    made.gateway._scale_aside(aside=True)
    await made.load(60)
    assert made.ready == 1
    made.gateway._scale_aside(aside=False)
    await made.load(30)
    assert made.ready > 1
    made.finish()


async def test_one_that_was_frozen_comes_back_frozen() -> None:
    made = Scaled()
    await made.order("/scale", frozen=True)
    for aside in (True, False):
        made.gateway._scale_aside(aside=aside)
    assert made.driver.plane.state.scale_frozen
    made.finish()
