"""The largest number wins, growing has limits, shrinking needs every permission, the clamp comes last."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.ids import ReplicaName
from headrace.model.scaling import (
    Brake,
    GoodputFacts,
    GroupFacts,
    RuleFacts,
    ScaleDecision,
    ScaleEvidence,
    ScaleMemory,
    Signal,
    Standing,
    Steps,
)
from headrace.model.scaling_spec import By, Day, Mode, Scaling, Schedule
from headrace.policy.scaling.decide import decide, remembered
from headrace.units import MICRO
from tests.policy.scaling.made import (
    LONG_AGO,
    NOW,
    S,
    decided,
    demand,
    evidence,
    group,
    groups,
    reading,
    sample,
)

PLAIN = Scaling(headroom=1.0)


def memory(*keeps: tuple[int, int], **changes: Any) -> ScaleMemory:
    """Return memory of numbers that were needed so many seconds ago."""
    given_: dict[str, Any] = {"since": 0, "keeps": tuple((NOW - ago * S, n) for ago, n in keeps)}
    return ScaleMemory(**(given_ | changes))


def test_the_largest_number_wins() -> None:
    full = tuple(sample(f"r{i}", 980) for i in range(2))
    said = decided(PLAIN, urgent=5.0, samples=full)
    assert [reading(said, one).desired for one in (Signal.WORK, Signal.KV)] == [5, 3]
    assert (said.winner, said.need, said.steps.ask) == (Signal.WORK, 5, 3)


def test_every_signal_is_in_every_decision_once() -> None:
    ours = [one for one in Signal if one.value not in list(By)]
    assert [one.signal for one in decided().readings] == ours


def test_nothing_known_of_demand_or_envelopes_still_keeps_the_floor() -> None:
    for mode in Mode:
        said = decided(Scaling(min=3, mode=mode), groups=(), envelope_micro=None)
        assert (said.desired, said.winner) == (3, None)
        assert said.steps.ask == (3 if mode is Mode.ACT else 0)


def test_an_empty_pool_answers_from_its_queue() -> None:
    waiting = demand(0.0, urgent_ns=S, waiting=1)
    said = decided(Scaling(min=0), demand=waiting, groups=())
    assert said.steps.ask == 1
    idle = decided(Scaling(min=0), groups=())
    assert (idle.desired, idle.steps) == (0, Steps())


def test_growing_is_limited_by_pace_maximum_and_gpus() -> None:
    burst = decided(PLAIN, urgent=50.0)
    assert burst.steps.ask == 4
    assert Brake.RATE in burst.brakes
    assert decided(Scaling(max=100), urgent=50.0, groups=groups(12)).steps.ask == 12, "it doubles"
    most = decided(Scaling(max=4), urgent=50.0)
    assert most.steps.ask == 2
    assert Brake.MAXIMUM in most.brakes
    partial = (*groups(2), group("x", Standing.STOPPING, gpus=3))
    gpus = decided(Scaling(max_gpus=6), urgent=50.0, groups=partial)
    assert gpus.steps.ask == 1
    assert Brake.GPUS in gpus.brakes


def test_groups_come_from_drains_called_off_then_sleepers_then_anew() -> None:
    there = (
        *groups(1), group("d0", Standing.DRAINING, prefix_ns=1), group("d1", Standing.DRAINING),
        group("s0", Standing.STANDBY, arrival_p50_ns=5 * S),
        group("s1", Standing.STANDBY, arrival_p50_ns=3 * S),
    )  # fmt: skip
    settings = Scaling(headroom=1.0, standby=2)

    def steps(urgent: float) -> Steps:
        return decided(settings, urgent=urgent, groups=there).steps

    assert steps(1.0) == Steps()
    assert steps(2.0).recall == ("d0",)
    assert (steps(4.0).recall, steps(4.0).wake) == (("d0", "d1"), ("s1",))
    assert (steps(5.0).wake, steps(5.0).ask, steps(5.0).standby) == (("s1", "s0"), 0, 2)
    assert Scaling(standby=0).standby == 0
    assert decided(PLAIN, urgent=1.0, groups=there).steps.cancel == ("s0", "s1")


def test_reserve_is_what_is_left_after_losing_a_domain() -> None:
    there = tuple(group(f"r{i}", domain="ab"[i % 2]) for i in range(4))
    zones = ("a", "b")
    said = decided(Scaling(headroom=1.0, reserve=1), urgent=3.0, groups=there, domains=zones)
    assert (said.need, said.reserve, said.steps.ask) == (3, 3, 2)
    assert said.supply.left_micro == 2 * MICRO
    one = decided(Scaling(headroom=1.0, reserve=1), urgent=3.0, groups=there[::2], domains=("a",))
    assert Brake.RESERVE in one.brakes
    assert one.reserve == 1


def test_a_group_goes_only_after_a_window_in_which_nobody_needed_it() -> None:
    assert decided(groups=groups(4)).steps.drain == ("r0",)
    recent = decided(groups=groups(4), memory=memory((119, 4)))
    assert recent.steps == Steps()
    assert Brake.WINDOW in recent.brakes
    assert decided(groups=groups(4), memory=memory((120, 4))).steps.drain
    assert decided(groups=groups(4), memory=memory((119, 3))).steps.drain
    assert not decided(groups=groups(4), memory=memory(out_at=NOW - 119 * S)).steps.drain
    assert not decided(groups=groups(4), memory=ScaleMemory()).steps.drain, "just started"


def test_thresholds_to_grow_and_to_shrink_are_apart() -> None:
    # Three are asked for at 2.05; three are kept down to 1.8.
    assert decided(PLAIN, urgent=2.05, groups=groups(2)).steps.ask == 1
    assert not decided(PLAIN, urgent=1.81, groups=groups(3)).steps.drain
    assert decided(PLAIN, urgent=1.79, groups=groups(3)).steps.drain


def test_so_many_go_at_once() -> None:
    assert len(decided(groups=groups(8)).steps.drain) == 1
    many = decided(
        Scaling(max=64), groups=groups(40), samples=tuple(sample(f"r{i}", 0) for i in range(40))
    )
    assert len(many.steps.drain) == 4
    assert Brake.RATE in many.brakes


def test_young_groups_stay() -> None:
    young = groups(4, since=NOW - 119 * S)
    said = decided(groups=young)
    assert said.steps.drain == ()
    assert Brake.YOUNG in said.brakes
    assert decided(groups=(*young[:3], group("r3"))).steps.drain == ("r3",)


def test_a_start_that_is_overdue_is_not_given_up_for_one_that_has_just_begun() -> None:
    late = {"arrival_p50_ns": 90 * S, "arrival_p90_ns": 180 * S, "since": NOW - 90 * S}
    fresh = {"arrival_p50_ns": 10 * S, "arrival_p90_ns": 12 * S, "since": NOW - 15 * S}
    there = tuple(
        group(name, Standing.COMING, progress=2, **told)
        for name, told in (("c0", late), ("c1", fresh), ("c2", late))
    )
    given_up = decided(urgent=2.5, groups=(*groups(2), *there)).steps.cancel
    assert given_up[0] == "c1"
    assert len(given_up) < len(there)


def test_falling_demand_gives_up_those_least_far_first() -> None:
    rising = tuple(group(f"c{i}", Standing.COMING, progress=5 - i) for i in range(3))
    there = (*groups(2), *rising)
    assert decided(urgent=2.5, groups=there).steps.cancel == ("c2",)
    fallen = decided(urgent=0.5, groups=there).steps
    assert fallen.cancel == ("c2", "c1", "c0")
    assert fallen.drain == ("r0",)
    just = decided(urgent=0.5, groups=there, memory=memory(out_at=NOW - 59 * S))
    assert just.steps == Steps()
    soon = decided(urgent=0.5, groups=there, memory=memory(out_at=NOW - 60 * S)).steps
    assert (soon.cancel, soon.drain) == (("c2", "c1", "c0"), ())


def test_groups_on_their_way_do_not_let_ready_ones_go() -> None:
    there = groups(2, 2)
    held = memory((100, 2))  # two were needed lately: those on their way may go, those ready not
    said = decided(urgent=0.1, groups=there, memory=held)
    assert (said.steps.cancel, said.steps.drain) == (("c0", "c1"), ())
    patient = Scaling(cancel_window_s=600.0)  # those on their way stay: they do not stand in
    added = memory(out_at=NOW - 300 * S)
    two = decided(patient, urgent=1.5, groups=there, memory=added)
    assert two.steps == Steps()
    one = decided(patient, urgent=0.5, groups=there, memory=added)
    assert one.steps == Steps(drain=(ReplicaName("r0"),))


def test_a_group_that_is_never_placed_blocks_nothing() -> None:
    stuck = group("c0", Standing.COMING, overdue=True, gpus=8)
    said = decided(groups=(*groups(3), stuck))
    assert said.steps.release == ("c0",)
    assert said.steps.drain == ("r0",)
    waiting = group("c0", Standing.COMING, arrival_p50_ns=10_000 * S)
    assert decided(groups=(*groups(3), waiting)).steps.cancel == ("c0",)
    needed = decided(PLAIN, urgent=4.0, groups=(*groups(3), stuck))
    assert (needed.steps.release, needed.steps.ask) == (("c0",), 1)


@pytest.mark.parametrize(
    "samples",
    [
        (),
        (sample("r0"),),
        (sample("r0"), sample("r1", age_ns=16 * S), sample("r2")),
        (sample("r0"), sample("r1", incarnation=0), sample("r2")),
        (sample("r0"), sample("r1"), sample("gone")),
    ],
    ids=["none", "missing", "old", "of another life", "of another group"],
)
def test_what_is_not_known_takes_nothing_away(samples: tuple[Any, ...]) -> None:
    said = decided(groups=groups(3, 1), samples=samples)
    assert not said.steps.shrinks
    assert Brake.STALE in said.brakes
    grown = decided(PLAIN, urgent=7.0, groups=groups(3, 1), samples=samples)
    assert grown.steps.ask == 3, "our own queue is known all the same"


def test_deleted_groups_do_not_vote() -> None:
    ghosts = tuple(sample(f"ghost{i}", 1_000) for i in range(9))
    live = tuple(sample(f"r{i}") for i in range(2))
    assert decided(samples=(*ghosts, *live)) == decided(samples=live)


def test_freeze_and_kill_switch_do_nothing_and_say_what_they_would() -> None:
    overdue = group("x", Standing.COMING, overdue=True)
    for urgent, there in ((5.0, groups(2)), (0.0, groups(6)), (1.0, (*groups(2), overdue))):
        free = decided(urgent=urgent, groups=there)
        assert free.steps != Steps()
        for brake, settings, frozen in (
            (Brake.OFF, Scaling(mode=Mode.OFF), False),
            (Brake.ADVICE, Scaling(mode=Mode.ADVISE), False),
            (Brake.FROZEN, Scaling(), True),
        ):
            held = decided(settings, urgent=urgent, groups=there, frozen=frozen)
            assert held.steps == Steps()
            assert brake in held.brakes
            assert (held.need, held.desired) == (free.need, free.desired)


def test_schedules_are_met_when_they_begin() -> None:
    settings = Scaling(floor=(Schedule(start="08:00", end="20:00", groups=5, days=(Day.TUE,)),))
    at = 24 * 60 + 8 * 60

    def floor(minute: int) -> int:
        return decided(settings, minute=minute, groups=groups(1)).floor

    assert [floor(at - 3), floor(at - 2), floor(at), floor(at + 719), floor(at + 720)] == [
        1, 5, 5, 5, 1
    ]  # fmt: skip
    assert floor(at + 24 * 60) == 1
    said = decided(settings, minute=at, groups=groups(1))
    assert (said.winner, said.steps.ask) == (None, 4)


def test_a_lowered_maximum_is_reached_whatever_is_needed() -> None:
    said = decided(Scaling(max=2), urgent=5.0, groups=groups(4, 1), samples=())
    assert said.desired == 2
    assert said.steps.cancel == ("c0",)
    assert len(said.steps.drain) == 1


def test_victims_are_lame_then_crowded_then_cheap() -> None:
    def first(*there: GroupFacts) -> str:
        samples = tuple(sample(one.group, 0) for one in there)
        return decided(groups=there, samples=samples).steps.drain[0]

    cheap = group("c", prefix_ns=S)
    assert first(group("a", prefix_ns=9 * S), group("b", remaining_ns=5 * S), cheap) == "c"
    zones = (group("a", domain="z1", prefix_ns=9 * S), group("b", domain="z1", prefix_ns=8 * S))
    assert first(*zones, group("c", domain="z2")) == "b"
    assert first(*zones, group("c", domain="z2", effective_ppm=100_000)) == "c"


def test_memory_keeps_the_largest_of_a_window_and_no_more() -> None:
    settings, facts = Scaling(), evidence()
    kept = ScaleMemory()
    for tick, urgent in enumerate([1.0, 5.0, 3.0, 4.0, 2.0] * 40):
        facts = evidence(urgent, now=NOW + tick * 15 * S, memory=kept)
        kept = remembered(settings, facts, decide(settings, facts))
    values = [keep for _, keep in kept.keeps]
    assert values == sorted(set(values), reverse=True)
    assert len(values) <= settings.max
    assert kept.since == NOW


@dataclass
class Drawn:
    """Evidence of any kind."""

    settings: Scaling
    facts: ScaleEvidence


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Draw whatever may stand in evidence, and settings."""
    low = draw(st.integers(0, 4))
    settings = Scaling(
        min=low, max=draw(st.integers(max(1, low), 12)), standby=draw(st.integers(0, 2)),
        reserve=draw(st.integers(0, 2)), max_gpus=draw(st.none() | st.integers(8, 40)),
        mode=draw(st.sampled_from(Mode)),
        by=draw(st.sampled_from([one for one in By if low or one is not By.UTILIZATION])),
    )  # fmt: skip
    count = draw(st.integers(0, 10))
    there = tuple(
        group(
            f"g{i}", draw(st.sampled_from(Standing)), overdue=draw(st.booleans()),
            domain=draw(st.sampled_from(["", "a", "b"])), since=draw(st.sampled_from([0, NOW])),
            effective_ppm=draw(st.none() | st.integers(0, MICRO)),
            envelope_micro=draw(st.none() | st.integers(1, 2 * MICRO)),
            success_ppm=draw(st.integers(0, MICRO)), gpus=draw(st.integers(0, 4)),
        )
        for i in range(count)
    )  # fmt: skip
    samples = tuple(
        sample(
            f"g{i}", draw(st.integers(0, 1_000)), age_ns=draw(st.integers(0, 30)) * S,
            utilization_ppm=draw(st.none() | st.integers(0, MICRO)),
        )
        for i in draw(st.sets(st.integers(0, 12)))
    )  # fmt: skip
    amount = st.integers(0, 10**6)
    rule = st.builds(
        RuleFacts, waiting=amount, backlog_tokens=amount, reserved_tokens=amount, input_tokens=amount,
        output_tokens=amount, span_ns=st.integers(0, 30 * S),
    )  # fmt: skip
    facts = evidence(
        demand=demand(
            draw(st.integers(0, 20)), urgent_ns=draw(st.integers(0, 500)) * S,
            expires=draw(st.booleans()), waiting=draw(st.integers(0, 50)),
            low_slack=draw(st.integers(0, 50)), low_slack_ns=draw(st.integers(0, 100)) * S,
            budget_ns=draw(st.none() | st.integers(0, 5 * S)),
        ),
        gpus=draw(st.integers(1, 4)), groups=there, samples=samples,
        lowest_micro=draw(st.none() | st.integers(1, MICRO)),
        domains=draw(st.sampled_from([(), ("a",), ("a", "b"), ("a", "b", "c")])),
        goodput=draw(
            st.none()
            | st.builds(
                GoodputFacts, offered=st.just(500), met=st.integers(0, 500),
                target_ppm=st.just(990_000), window_ns=st.just(60 * S),
            )
        ),
        rule=draw(rule), frozen=draw(st.booleans()), memory=draw(st.sampled_from([LONG_AGO, ScaleMemory()])),
    )  # fmt: skip
    return Drawn(settings, facts)


def served(facts: ScaleEvidence, said: ScaleDecision) -> int:
    """Return how many groups serve or are on their way once it is done."""
    steps = said.steps
    more = len(steps.recall) + len(steps.wake) + steps.ask
    there = [one for one in facts.groups if one.standing in (Standing.READY, Standing.COMING)]
    left = {one.group for one in there} - {*steps.cancel, *steps.release, *steps.drain}
    return len(left) + more


@given(drawn())
def test_whatever_is_known_the_number_is_within_bounds_and_the_same_again(it: Drawn) -> None:
    said = decide(it.settings, it.facts)
    assert min(said.floor, said.ceiling) <= said.desired <= said.ceiling <= it.settings.max
    encoded = msgspec.json.encode(it.facts)
    again = decide(it.settings, msgspec.json.decode(encoded, type=ScaleEvidence))
    assert msgspec.json.encode(again) == msgspec.json.encode(said)
    steps = said.steps
    named = [*steps.recall, *steps.wake, *steps.cancel, *steps.release, *steps.drain]
    assert len(named) == len(set(named))
    held = it.facts.frozen or it.settings.mode is not Mode.ACT
    if held:
        assert steps == Steps()
    if steps.grows:
        assert served(it.facts, said) <= said.ceiling
        assert not steps.drain
    if steps.drain or (steps.cancel and it.settings.standby == 0):
        assert served(it.facts, said) >= min(said.floor, said.ordered)
    if it.settings.max_gpus is not None and (steps.ask or steps.standby):
        sums = sum(
            max(one.gpus, it.facts.gpus)
            if one.standing in (Standing.COMING, Standing.STANDBY)
            else one.gpus
            for one in it.facts.groups
        )
        assert sums + (steps.ask + steps.standby) * it.facts.gpus <= it.settings.max_gpus
