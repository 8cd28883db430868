"""A driver killed at each step of a scale-out and of a scale-in comes back, and nothing is leaked."""

from functools import cache

import pytest
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec
from headrace.model.ids import PoolName
from headrace.model.scaling import Standing
from headrace.model.scaling_spec import Scaling
from headrace.model.slo import Outcome
from headrace.model.stages import Spread
from headrace.plane.groups import standing
from headrace.sim.scenario import Scenario
from headrace.trace.row import TraceRow
from tests.sim.dying import Age, Death, Dying
from tests.sim.scaled import scaled, starts, steady

POOL = PoolName("pool")
STAGES = {"node_held": Spread(1.0, 1.0), "image": Spread(2.0, 2.0), "warm": Spread(2.0, 2.0)}
QUICK = Scaling(
    max=3, times=replace(starts(9.0), **STAGES), tick_s=5.0, in_window_s=20.0,
    cancel_window_s=10.0, min_life_s=5.0, drain_s=60.0, in_groups=2, forecast=None,
)  # fmt: skip
STANDBY = replace(QUICK, standby=1)
SLOW = replace(QUICK, times=replace(starts(60.0), **STAGES))
CLASSES = (
    ClassSpec(name="chat", weight=4),
    ClassSpec(name="batch", ttft_ms=None, itl_ms=2_000.0, expire=False),
)


def story(settings: Scaling) -> tuple[Scenario, list[TraceRow]]:
    """Return a burst that asks for two more groups, with long answers that run when they go."""
    short = steady(((0.0, 10.0, 0.5), (10.0, 30.0, 2.0), (30.0, 130.0, 0.25)), given=1_000)
    long = [
        replace(row, output_tokens=row.output_tokens * 30)
        for row in steady(((28.0, 52.0, 0.25),), "batch", given=100)
    ]
    one = scaled(settings, classes=CLASSES)
    (pool,) = one.deployment.pools
    slow = replace(one.deployment, pools=(replace(pool, work_rate=0.012),))
    return replace(one, deployment=slow), sorted([*short, *long], key=lambda row: row.at)


def ran(death: Death | None, settings: Scaling = QUICK) -> Dying:
    """Return a run with all that it went through, in which the driver may die."""
    world = Dying(*story(settings), death)
    world.run()
    world.checker.finish(world)
    return world


@cache
def told(settings: Scaling = QUICK) -> tuple[str, ...]:
    """Return the steps of a run in which nobody dies."""
    world = ran(None, settings)
    ended_well(world)
    return tuple(world.steps)


def ended_well(world: Dying) -> None:
    """What there is, what is known and what should be are the same; only the death cut streams."""
    facts = world.plane.settings.scaled[POOL]
    books, real = world.plane.state.pools[POOL].groups, world.provider.groups
    assert sorted(books) == sorted(real)
    known = world.plane.state.models[facts.model]
    stand = [standing(known, one) for one in books.values()]
    assert stand.count(Standing.READY) == facts.settings.min
    assert (
        stand.count(Standing.STANDBY) == len(stand) - facts.settings.min <= facts.settings.standby
    )
    assert {one.gpus for one in real.values()} == {facts.gpus}
    assert world.plane.state.leaving == {}
    cut = [row for row in world.concluded.values() if row.outcome is not Outcome.SUCCESS]
    assert {row.reason for row in cut} <= {Reason.RESTARTED}
    for row in world.concluded.values():
        if row.timing is not None and row.usage is not None:
            assert row.timing.tokens == row.usage.output_tokens


def survives(death: Death, settings: Scaling) -> None:
    try:
        ended_well(ran(death, settings))
    except BaseException as failed:
        failed.add_note(f"{death!r}: {told(settings)[death.step]}")
        raise


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (QUICK, ("AskGroup", "image", "warm", "READY", "ReplicaUp", "DrainGroup", "StopGroup",
                 "STOPPING", "ReplicaDown", "STOPPED")),
        (STANDBY, ("AskGroup", "ASLEEP", "WakeGroup", "READY", "ReplicaUp", "DrainGroup", "STOPPED")),
        (SLOW, ("AskGroup", "image", "StopGroup", "STOPPED")),
    ],
    ids=["growing and shrinking", "sleeping and waking", "asking and cancelling"],
)  # fmt: skip
def test_the_stories_go_through_every_step(settings: Scaling, steps: tuple[str, ...]) -> None:
    whole = "\n".join(told(settings))
    assert [step for step in steps if step not in whole] == []


@pytest.mark.parametrize(
    ("age", "away_s"), [(Age.NOW, 0.0), (Age.BEFORE, 3.0), (Age.OLDER, 3.0), (Age.OLDER, 20.0)]
)
def test_a_driver_that_dies_at_any_step_leaks_nothing_and_stops_nobody(
    age: Age, away_s: float
) -> None:
    for step in range(len(told())):
        survives(Death(step, age, 1.0, away_s), QUICK)


@pytest.mark.parametrize("settings", [STANDBY, SLOW], ids=["standby", "cancelled"])
def test_so_does_one_that_dies_while_groups_sleep_or_are_given_up(settings: Scaling) -> None:
    """Deaths of each age by turns: whatever the step, the neighbouring ones have the others."""
    ages = ((Age.NOW, 0.0), (Age.BEFORE, 3.0), (Age.OLDER, 1.0))
    for step in range(len(told(settings))):
        age, away_s = ages[step % 3]
        survives(Death(step, age, 1.0, away_s), settings)


@pytest.mark.parametrize("settings", [QUICK, STANDBY, SLOW], ids=["plain", "standby", "cancelled"])
@pytest.mark.parametrize("heard", [0.0, 0.5])
def test_what_was_wanted_and_not_done_is_done_after_all(settings: Scaling, heard: float) -> None:
    for step, what in enumerate(told(settings)):
        if not what.endswith("[]"):
            survives(Death(step, Age.NOW, heard), settings)
