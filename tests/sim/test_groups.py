"""A pool that scales, in virtual time: bursts, starts that fail, drains, restarts, and what it all costs."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.model.deployment import ClassSpec
from headrace.model.group import GroupShape
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.scaling_spec import Scaling
from headrace.model.slo import Outcome
from headrace.plane import groups
from headrace.plane.journal import Verified, verify
from headrace.plane.machine import Machine
from headrace.plane.scale_state import Group
from headrace.policy.catalog import PlaneConfig
from headrace.report.summary import summarise
from headrace.report.tables import render_summary
from headrace.sim import holdings
from headrace.sim.books import Broken
from headrace.sim.experiment import simulate
from headrace.sim.faults import Crash, Fault, Restart, Starts
from headrace.units import NS_PER_S
from tests.sim.scaled import records, run, scaled, starts, steady
from tests.sim.scenes import Ran

POOL = PoolName("pool")
BURST = ((0.0, 30.0, 1.0), (30.0, 120.0, 10.0), (120.0, 420.0, 1.0))
QUICK = Scaling(
    max=5, times=starts(25), in_window_s=60.0, cancel_window_s=30.0, min_life_s=30.0, forecast=None
)


def burst(faults: Sequence[Fault] = (), settings: Scaling = QUICK, seed: int = 0) -> Ran:
    return run(scaled(settings, faults=faults), seed, rows=steady(BURST))


def test_a_burst_brings_groups_and_its_end_takes_them_away_without_a_lost_stream() -> None:
    ran = burst()
    ready = [one.decision.supply.ready for one in records(ran)]
    assert max(ready) > 1
    assert ready[-1] == 1
    assert ran.rows(outcome=Outcome.ERROR) == []
    assert all(
        row.usage is not None and row.usage.output_tokens == 100
        for row in ran.rows(outcome=Outcome.SUCCESS)
    )
    assert list(ran.world.plane.state.pools[POOL].groups) == list(ran.world.provider.groups)


def test_a_run_is_its_seed_and_its_journal_replays_to_the_byte() -> None:
    one, other = burst(seed=3), burst(seed=3)
    assert one.journal == other.journal
    assert isinstance(verify(one.segments), Verified)


def test_fast_forward_is_exact_for_a_pool_that_scales() -> None:
    scenario, rows = scaled(QUICK), steady(((0.0, 60.0, 5.0), (60.0, 240.0, 0.5)))
    assert run(scenario, rows=rows).journal == run(scenario, rows=rows, fast_forward=False).journal


@pytest.mark.parametrize(
    "fault",
    [
        Starts(refused=1.0), Starts(never=1.0), Starts(partial=1.0), Starts(lost=1.0),
        Starts(slow=1.0, factor=4.0), Starts(refused=0.3, never=0.2, partial=0.2, lost=0.2),
    ],
)  # fmt: skip
def test_starts_that_go_wrong_leak_nothing_and_block_no_shrinking(fault: Starts) -> None:
    settings = replace(QUICK, shape=GroupShape(tp=2), partial_s=40.0)
    ran = burst([fault], settings)
    left = ran.world.plane.state.pools[POOL].groups
    assert len(left) == 1
    assert [one.gpus for one in ran.world.provider.groups.values()] == [2]


@pytest.mark.parametrize("at_s", [14.9, 46.0, 50.0, 71.0, 181.0, 196.0, 227.0])
@pytest.mark.parametrize("age_s", [0.0, 20.0])
def test_a_driver_that_dies_at_any_step_comes_back_without_a_leak(
    at_s: float, age_s: float
) -> None:
    ran = burst([Restart(at_s=at_s, checkpoint_age_s=age_s)])
    books, real = ran.world.plane.state.pools[POOL], ran.world.provider.groups
    assert sorted(books.groups) == sorted(real)
    assert len(real) == 1
    assert records(ran)[-1].decision.supply.ready == 1


def test_a_group_that_is_lost_comes_back_as_a_whole_or_is_replaced() -> None:
    for back in (None, 1.0):
        crash = Crash(replica=0, at_s=20.0, back_after_s=back)
        ran = run(scaled(QUICK, faults=[crash]), rows=steady(((0.0, 120.0, 1.0),)))
        assert len(ran.world.provider.groups) == 1
        (row,) = ran.rows()[-1:]
        assert row.outcome is Outcome.SUCCESS


def long_answers(ran: Ran) -> list[int]:
    return [row.request for row in ran.rows(outcome=Outcome.ERROR)]


def test_what_runs_at_the_end_of_a_drain_ends_with_an_error_and_is_counted() -> None:
    patient = ClassSpec(name="chat", ttft_ms=None, itl_ms=2_000.0, expire=False)
    rows = [
        replace(row, output_tokens=row.output_tokens * 150)
        for row in steady(((0.0, 2.0, 1.0),), given=500)
    ]
    settings = replace(QUICK, drain_s=5.0)
    ran = run(scaled(settings, replicas=2, classes=(patient,)), rows=rows)
    assert len(long_answers(ran)) == 1
    (row,) = ran.rows(outcome=Outcome.ERROR)
    assert row.reason is not None
    assert row.reason.value == "drained"
    assert row.timing is not None
    assert row.timing.tokens > 1_000


def test_the_most_there_may_be_is_kept_while_groups_are_slow_to_come() -> None:
    ran = burst([Starts(slow=1.0, factor=20.0)], replace(QUICK, max=3))
    assert max(one.decision.desired for one in records(ran)) == 3
    asked = ran.world.provider.asked[POOL]
    assert asked <= 2 + sum(len(one.decision.steps.cancel) for one in records(ran))


def test_what_is_held_costs_from_placing_to_giving_back() -> None:
    settings = replace(QUICK, gpu_hour_usd=3.6)
    record = simulate(scaled(settings), 0, steady(BURST))
    (pool,) = record.pools
    assert pool.gpu_ns > pool.serving_ns > 0
    assert pool.micro_usd == settings.cost(pool.gpu_ns)
    told = summarise(record).cost
    assert told is not None
    met = sum(row.met for row in record.rows)
    assert pool.micro_usd is not None
    assert told.usd_per_thousand_met == pytest.approx(1_000 * pool.micro_usd / 1e6 / met, rel=1e-3)
    assert told.gpu_s_per_met == pytest.approx(pool.gpu_ns / NS_PER_S / met, rel=1e-3)
    shown = render_summary(summarise(record))
    assert "cost per 1,000 requests that met" in shown


def test_a_pool_of_a_fixed_number_costs_what_its_replicas_hold() -> None:
    record = simulate(replace(scaled(QUICK), deployment=fixed()), 0, steady(((0.0, 5.0, 4.0),)))
    (pool,) = record.pools
    assert pool.gpu_ns == pool.serving_ns == sum(one.up_ns for one in record.replicas)
    assert pool.micro_usd is None


def fixed() -> PlaneConfig:
    deployment = scaled(QUICK).deployment
    return replace(deployment, pools=tuple(replace(one, scaling=None) for one in deployment.pools))


# Planted bugs --------------------------------------------------------------------------------


def test_a_group_that_the_plane_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(m: Machine, pool: PoolName, group: Group, _now: int) -> None:
        m.state.leaving.pop(group.name, None)
        del m.state.pools[pool].groups[group.name]

    monkeypatch.setattr(groups, "stop", forget)
    with pytest.raises(Broken, match="INV-14"):
        burst()


def test_a_drain_that_ends_streams_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_runs", lambda *_: False)
    with pytest.raises(Broken, match="INV-17"):
        run(scaled(QUICK, replicas=3), rows=steady(((0.0, 100.0, 12.0),), given=2_000))


def test_a_partial_group_that_serves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "open_or_close", lambda *_: False)
    with pytest.raises(Broken, match="INV-15"):
        run(scaled(QUICK, replicas=3), rows=steady(((0.0, 100.0, 12.0),), given=2_000))


def test_more_groups_than_there_may_be_are_found() -> None:
    ran = burst()
    books = ran.world.plane.state.pools[POOL]
    (group,) = books.groups.values()
    more = (ReplicaName(str(nth)) for nth in range(9))
    books.groups |= {name: replace(group, name=name) for name in more}
    with pytest.raises(Broken, match="INV-16"):
        holdings.pools_keep_their_limits(ran.world, {})
