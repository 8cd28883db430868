"""Groups of a pool that scales, in the plane's books: from asking for one until nothing of it is left."""

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec, PoolSpec
from headrace.model.effect import (
    AskGroup,
    Decided,
    DrainGroup,
    RecallGroup,
    StopGroup,
    WakeGroup,
)
from headrace.model.event import GroupsListed, GroupTold, ScaleFrozen, WallTold
from headrace.model.group import Domain, GroupShape, GroupStep, Place
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.scaling import Brake, ScaleRecord, Standing
from headrace.model.scaling_spec import Day, Mode, Scaling, Schedule
from headrace.model.slo import Outcome
from headrace.model.stages import Spread, Stage, StageTimes
from headrace.plane import groups, scale_facts
from headrace.plane.core import Plane
from headrace.plane.scale_state import Group, PoolScale
from tests.plane.scenes import H100, Driver, S, config, patient

TIMES = StageTimes(
    node_held=Spread(20.0, 20.0), image=Spread(0.0, 0.0), weights=Spread(1.0, 1.0),
    ranks=Spread(0.0, 0.0), compile_cache=Spread(0.0, 0.0), warm=Spread(0.0, 0.0),
    unattributed=Spread(0.0, 0.0), register=Spread(1.0, 1.0), wake=Spread(2.0, 2.0),
)  # fmt: skip
"""22 s, always."""
P = PoolName("p")
QUICK = {"in_window_s": 30.0, "cancel_window_s": 15.0, "min_life_s": 0.0, "forecast": None}


def scaled(replicas: int = 1, classes: tuple[ClassSpec, ...] | None = None, **more: Any) -> Driver:
    """Return a driver of one pool that scales, with groups that were there before."""
    given: dict[str, Any] = {"times": TIMES, "max": 4} | QUICK | more
    settings = config(
        pools=(PoolSpec(name="p", model="m", profile=H100, scaling=Scaling(**given)),),
        classes=classes or (ClassSpec(name="chat"), patient()),
    )
    made = Driver(settings, replicas=0)
    for nth in range(replicas):
        told(made, f"r{nth}", GroupStep.READY)
        made.up(f"r{nth}")
    return made


def books(made: Driver) -> PoolScale:
    return made.plane.state.pools[P]


def group(made: Driver, name: str) -> Group:
    return books(made).groups[ReplicaName(name)]


def of(made: Driver, kind: type) -> list[Any]:
    return [effect for effect in made.seen if isinstance(effect, kind)]


def records(made: Driver) -> list[ScaleRecord]:
    return [one.record for one in of(made, Decided) if isinstance(one.record, ScaleRecord)]


def told(made: Driver, name: str, step: GroupStep, gpus: int = 1, **more: Any) -> None:
    made.tell(GroupTold(group=ReplicaName(name), pool=P, step=step, gpus=gpus, **more))


def standing(made: Driver, name: str) -> Standing:
    return groups.standing(made.known, group(made, name))


def load(made: Driver, *, each: int = 40, seconds: int = 15) -> None:
    """Offer more than one group does: requests of 2,000 tokens that are over at once."""
    for _ in range(seconds * each):
        request = made.arrive(tokens=2_000, slo_class="chat")
        live = made.plane.state.live.get(request)
        if live is not None and live.attempt is not None:
            made.serve(request, 100)
        elif live is not None:
            made.leave(request)
        made.wait(S // each)


def arrival(made: Driver, name: str) -> int:
    facts = made.plane.settings.scaled[P]
    return scale_facts.arrival(facts, group(made, name), made.now).p90_ns


def asked(made: Driver) -> list[str]:
    return [one.group for one in of(made, AskGroup)]


def test_offered_work_beyond_what_there_is_asks_for_groups_at_once_and_once() -> None:
    made = scaled()
    load(made, seconds=31)
    assert len(asked(made)) >= 1
    assert asked(made)[0] == "p-0.1"
    first, second = records(made)[:2]
    assert first.decision.steps.ask > 0
    assert second.decision.steps.ask == 0
    assert second.decision.supply.coming == first.decision.steps.ask
    assert standing(made, "p-0.1") is Standing.COMING


def test_what_no_group_would_change_is_neither_offered_nor_missed() -> None:
    made = scaled(min=1)
    for _ in range(200):
        made.arrive(tokens=100_000, slo_class="chat")
        made.wait(S // 10)
    reasons = {one.rejection.reason for one in made.refused()}
    assert reasons == {Reason.DEADLINE_IMPOSSIBLE}
    assert (books(made).over, asked(made)) == (0, [])
    demand = records(made)[-1].evidence.demand
    assert demand.urgent_micro == 0
    assert records(made)[-1].evidence.goodput is None


def test_a_start_is_followed_stage_by_stage_and_expected_in_what_is_left_of_it() -> None:
    made = scaled(min=2)
    made.wait(15 * S)
    (name,) = asked(made)
    made.wait(5 * S)
    told(made, name, GroupStep.COMING, stage=Stage.REGISTER)
    told(made, name, GroupStep.COMING, stage=Stage.REGISTER)  # said twice: it began when it began
    made.wait(S // 4)
    assert arrival(made, name) == S * 3 // 4
    told(made, name, GroupStep.READY)
    made.up(name)
    assert standing(made, name) is Standing.READY
    assert (books(made).risen, books(made).failed) == (1, 0)


def test_a_group_that_lacks_ranks_takes_nothing_though_its_leader_is_up() -> None:
    made = scaled(replicas=0, shape=GroupShape(tp=4))
    told(made, "g", GroupStep.COMING, gpus=3, stage=Stage.WARM)
    made.up("g")
    assert made.known.fleet.ready == {}
    assert made.refused() == []
    made.arrive(slo_class="chat")
    assert made.refused()[0].rejection.reason is Reason.NO_READY_REPLICA
    told(made, "g", GroupStep.READY, gpus=4)
    made.arrive(slo_class="chat")
    assert made.places() == ["g"]
    told(made, "g", GroupStep.COMING, gpus=3)
    made.arrive(slo_class="chat")
    assert made.places() == ["g"]


def test_a_partial_group_is_released_after_its_time_and_asked_for_anew() -> None:
    made = scaled(replicas=0, min=1, shape=GroupShape(tp=4), partial_s=60.0)
    made.wait(15 * S)
    (name,) = asked(made)
    told(made, name, GroupStep.COMING, gpus=2, stage=Stage.PROVISION)
    made.wait(61 * S)
    assert [one.group for one in of(made, StopGroup)] == [name]
    told(made, name, GroupStep.STOPPED, gpus=0)
    assert asked(made)[1:], "it was late, and not counted on"


@pytest.mark.parametrize("step", [GroupStep.REFUSED, GroupStep.GIVEN_UP])
def test_what_cannot_be_had_is_forgotten_counted_and_asked_for_again(step: GroupStep) -> None:
    made = scaled(min=2)
    made.wait(15 * S)
    (name,) = asked(made)
    told(made, name, step, gpus=0)
    assert name not in books(made).groups
    assert books(made).failed == 1
    made.wait(15 * S)
    assert asked(made) == ["p-0.1", "p-0.2"]


def drained(**more: Any) -> tuple[Driver, int]:
    """Return a pool of which one group of two goes, with a stream on each."""
    made = scaled(replicas=2, **more)
    for _ in range(2):
        made.arrive(slo_class="patient")
    assert sorted(made.places()) == ["r0", "r1"]
    made.first(made.sent()[0].attempt)
    made.first(made.sent()[1].attempt)
    made.wait(60 * S)
    (effect,) = of(made, DrainGroup)
    request = next(one.request for one in made.sent() if one.replica == effect.group)
    return made, request


def test_a_drain_closes_the_door_and_waits_for_what_runs() -> None:
    made, request = drained()
    (going,) = of(made, DrainGroup)
    assert standing(made, going.group) is Standing.DRAINING
    for _ in range(3):
        made.arrive(slo_class="patient")
    assert all(place != going.group for place in made.places()[2:])
    assert of(made, StopGroup) == []
    made.end(made.live(request).attempt, timing=made.timing(5))
    assert [one.group for one in of(made, StopGroup)] == [going.group]
    assert made.failed() == []


def test_what_is_left_at_the_end_of_a_drain_ends_with_an_error_of_its_own() -> None:
    made, request = drained(drain_s=20.0)
    (going,) = of(made, DrainGroup)
    life = made.known.fleet.replicas[going.group].incarnation
    made.wait(21 * S)
    assert [one.group for one in of(made, StopGroup)] == [going.group]
    made.down(going.group, life)
    (row,) = [one for one in made.rows() if one.request == request]
    assert (row.outcome, row.reason) == (Outcome.ERROR, Reason.DRAINED)
    assert made.failed()[-1].reason is Reason.DRAINED


def test_a_drain_is_called_off_when_demand_returns() -> None:
    made, _ = drained(headroom=1.0)
    (going,) = of(made, DrainGroup)
    load(made, each=40, seconds=16)
    assert [one.group for one in of(made, RecallGroup)] == [going.group]
    assert standing(made, going.group) is Standing.READY
    assert made.known.fleet.ready == {P: 2}
    assert of(made, StopGroup) == []
    assert made.plane.state.leaving == {}


def test_a_drain_that_somebody_else_ordered_is_theirs_to_end() -> None:
    made = scaled(replicas=2, min=2)
    life = made.known.fleet.replicas[ReplicaName("r0")].incarnation
    made.drain("r0", life)
    made.wait(60 * S)
    assert standing(made, "r0") is Standing.STOPPING
    assert of(made, RecallGroup) == []
    assert of(made, StopGroup) == []
    made.down("r0", life)
    told(made, "r0", GroupStep.STOPPED, gpus=0)
    assert ReplicaName("r0") not in books(made).groups


def test_stale_engines_keep_all_that_there_is() -> None:
    made = scaled(replicas=3)
    made.report("r0", 1)
    made.wait(300 * S)
    assert of(made, DrainGroup) == []
    assert Brake.STALE in records(made)[-1].decision.brakes


def test_groups_that_are_not_needed_any_more_are_cancelled_before_any_is_drained() -> None:
    made = scaled(replicas=1)
    load(made, seconds=31)
    made.wait(120 * S)
    assert sorted(one.group for one in of(made, StopGroup)) == sorted(asked(made))
    assert of(made, DrainGroup) == []
    assert standing(made, "r0") is Standing.READY


def test_standby_groups_are_asked_for_and_woken_before_any_is_new() -> None:
    made = scaled(standby=1)
    made.wait(15 * S)
    (effect,) = of(made, AskGroup)
    assert effect.standby
    told(made, effect.group, GroupStep.ASLEEP)
    assert standing(made, effect.group) is Standing.STANDBY
    load(made, seconds=16)
    assert [one.group for one in of(made, WakeGroup)] == [effect.group]
    made.up(effect.group)
    assert standing(made, effect.group) is Standing.READY


@pytest.mark.parametrize("mode", [Mode.ADVISE, Mode.OFF])
def test_a_mode_that_does_not_act_still_says_what_it_would_do(mode: Mode) -> None:
    made = scaled(min=2, mode=mode)
    made.wait(60 * S)
    assert asked(made) == []
    assert records(made)[-1].decision.desired == 2


def test_a_frozen_fleet_stays_as_it_is_and_goes_on_when_it_is_let_go() -> None:
    made = scaled(min=2)
    made.tell(ScaleFrozen(frozen=True))
    made.wait(60 * S)
    assert asked(made) == []
    assert Brake.FROZEN in records(made)[-1].decision.brakes
    made.tell(ScaleFrozen(frozen=False))
    made.wait(15 * S)
    assert len(asked(made)) == 1


def test_schedules_go_by_the_time_of_day_that_was_told() -> None:
    floor = (Schedule(start="08:00", end="18:00", groups=3, days=(Day.FRI,)),)
    made = scaled(floor=floor)
    # 2025-01-03 was a Friday; 7:58:30 UTC
    made.tell(WallTold(1_735_891_110))
    made.wait(15 * S)
    assert records(made)[-1].evidence.minute == 4 * 1_440 + 7 * 60 + 58
    assert asked(made) == []
    made.wait(16 * S)
    assert len(asked(made)) == 2


def test_where_groups_stand_is_kept_by_the_domain_that_the_reserve_is_for() -> None:
    made = scaled(reserve_domain=Domain.ZONE)
    told(made, "g", GroupStep.COMING, places=(Place(node="n", zone="a", region="eu"),))
    assert group(made, "g").domain == "eu/a"


# Restarts ------------------------------------------------------------------------------------


def listing(*steps: tuple[str, GroupStep, int]) -> GroupsListed:
    return GroupsListed(
        groups=tuple(
            GroupTold(group=ReplicaName(name), pool=P, step=step, gpus=gpus)
            for name, step, gpus in steps
        )
    )


def thawed(made: Driver) -> Driver:
    """Return the driver after it died and came back from its present state."""
    made.plane = Plane.thaw(made.plane.freeze())
    made.seen = []
    made.restart()
    return made


def test_an_ask_that_nobody_heard_is_forgotten_and_made_again_by_another_name() -> None:
    made = scaled(min=2)
    made.wait(15 * S)
    thawed(made)
    made.tell(listing(("r0", GroupStep.READY, 1)))
    made.up("r0")
    assert list(books(made).groups) == ["r0"]
    made.wait(30 * S)
    assert asked(made) == ["p-1.1"]


def test_a_group_that_the_checkpoint_does_not_know_is_taken_over() -> None:
    made = scaled(min=2)
    thawed(made)
    made.tell(listing(("r0", GroupStep.READY, 1), ("p-0.1", GroupStep.COMING, 0)))
    made.up("r0")
    made.wait(30 * S)
    assert asked(made) == []
    assert standing(made, "p-0.1") is Standing.COMING


def test_a_start_goes_on_through_a_restart() -> None:
    made = scaled(min=2)
    made.wait(15 * S)
    thawed(made)
    made.tell(listing(("r0", GroupStep.READY, 1), ("p-0.1", GroupStep.COMING, 1)))
    made.up("r0")
    made.up("p-0.1")
    assert standing(made, "p-0.1") is Standing.READY
    made.wait(60 * S)
    assert asked(made) == []


def test_a_drain_goes_on_through_a_restart_and_ends_at_once_for_nothing_runs() -> None:
    made, _ = drained()
    (going,) = of(made, DrainGroup)
    thawed(made)
    made.tell(listing(("r0", GroupStep.READY, 1), ("r1", GroupStep.READY, 1)))
    made.up("r0")
    made.up("r1")
    assert going.group in [one.group for one in of(made, StopGroup)]
    made.arrive(slo_class="patient")
    assert made.places() == [{"r0": "r1", "r1": "r0"}[going.group]]
    told(made, going.group, GroupStep.STOPPED, gpus=0)
    assert standing(made, going.group) is Standing.STOPPING, "its replica seems to be up"
    made.down(going.group, made.known.fleet.replicas[going.group].incarnation)
    assert going.group not in books(made).groups


def test_a_stop_that_nobody_heard_is_said_again() -> None:
    made = scaled()
    load(made, seconds=31)
    made.wait(120 * S)
    stopped = sorted(one.group for one in of(made, StopGroup))
    assert stopped
    thawed(made)
    there = [(name, GroupStep.COMING, 1) for name in stopped]
    made.tell(listing(("r0", GroupStep.READY, 1), *there))
    assert sorted(one.group for one in of(made, StopGroup)) == stopped
    for name in stopped:
        told(made, name, GroupStep.STOPPED, gpus=0)
    made.up("r0")
    assert list(books(made).groups) == ["r0"]


def test_a_state_with_groups_is_the_same_after_a_thaw() -> None:
    made, _ = drained()
    again = Plane.thaw(made.plane.freeze())
    assert again.freeze() == made.plane.freeze()
    assert again.next_timer() == made.plane.next_timer()


# Changes of the configuration ----------------------------------------------------------------


def changed(made: Driver, scaling: Scaling | None, pool: str = "p") -> None:
    before = made.plane.settings.config
    pools = tuple(replace(one, name=pool, scaling=scaling) for one in before.pools)
    made.configure(replace(before, pools=pools), revision=2)


def test_a_pool_that_scales_no_more_keeps_what_serves_and_gives_back_the_rest() -> None:
    made, request = drained()
    load(made, each=1, seconds=1)
    told(made, "coming", GroupStep.COMING, stage=Stage.IMAGE)
    changed(made, None)
    assert made.known.fleet.ready == {P: 2}
    assert request in made.plane.state.live
    assert [one.group for one in of(made, StopGroup)] == ["coming"]
    told(made, "coming", GroupStep.STOPPED, gpus=0)
    assert made.plane.state.pools == {}
    assert made.plane.next_timer() is None


def test_all_groups_of_a_pool_that_is_gone_go() -> None:
    made = scaled(replicas=0, min=2)
    made.wait(15 * S)
    changed(made, None, pool="other")
    assert sorted(one.group for one in of(made, StopGroup)) == ["p-0.1", "p-0.2"]
    for name in ("p-0.1", "p-0.2"):
        told(made, name, GroupStep.STOPPED, gpus=0)
    assert made.plane.state.pools == {}


def test_a_pool_that_begins_to_scale_counts_what_serves_already() -> None:
    made = Driver(replicas=2)
    assert made.plane.state.pools == {}
    changed(made, Scaling(min=2, times=TIMES))
    assert [standing(made, name) for name in ("r0", "r1")] == [Standing.READY] * 2
    made.wait(30 * S)
    assert asked(made) == []


def test_what_nobody_here_scales_is_not_listened_to() -> None:
    made = Driver()
    told(made, "g", GroupStep.COMING)
    assert made.plane.state.pools == {}
    assert made.plane.state.ignored == {"group": 1}


# What admission knows of it ------------------------------------------------------------------


def test_who_has_the_time_waits_for_the_group_that_is_on_its_way() -> None:
    made = scaled(replicas=0, min=1)
    made.wait(15 * S)
    made.arrive(slo_class="chat")
    (refused,) = made.refused()
    assert refused.rejection.reason is Reason.NO_READY_REPLICA
    assert refused.rejection.retry_after_ns == 22 * S
    request = made.arrive(slo_class="patient")
    assert request in made.plane.state.live
    made.wait(10 * S)
    told(made, "p-0.1", GroupStep.READY)
    made.up("p-0.1")
    assert made.places() == ["p-0.1"]


def test_a_pool_at_zero_starts_from_what_waits() -> None:
    made = scaled(replicas=0, min=0)
    made.arrive(slo_class="chat")
    assert made.refused()[0].rejection.retry_after_ns == (15 + 22) * S
    made.wait(15 * S)
    assert len(asked(made)) == 1


def test_without_anything_on_its_way_nobody_waits() -> None:
    made = scaled(replicas=0, min=0, mode=Mode.OFF)
    made.arrive(slo_class="patient")
    assert made.refused()[0].rejection.reason is Reason.NO_READY_REPLICA
    assert made.refused()[0].rejection.retry_after_ns == S
