"""What the scaler does in a closed loop: its promises, for demand of any shape."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.scaling import Standing, Steps
from headrace.model.scaling_spec import Forecasting, Mode, Scaling
from headrace.units import NS_PER_S
from tests.policy.scaling.fluid import TICK_S, Tick, World

S = NS_PER_S
PLAIN = Scaling(headroom=1.0, max=20, forecast=None)
LEVELS = st.lists(
    st.tuples(st.integers(0, 60).map(lambda tenths: tenths / 10), st.integers(1, 30)),
    min_size=1,
    max_size=8,
)
STARTS = st.sampled_from([5, 10, 40, 90, 300])
SOME = settings(max_examples=60)


def rates(levels: list[tuple[float, int]]) -> list[float]:
    """Return a rate for each tick: each level for its ticks."""
    return [rate for rate, ticks in levels for _ in range(ticks)]


def since(log: list[Tick], at: Tick, seconds: float) -> list[Tick]:
    """Return the ticks before one, within so many seconds."""
    return [one for one in log if at.at - seconds < one.at < at.at]


@SOME
@given(LEVELS, STARTS, st.booleans())
def test_nothing_is_reversed_within_a_stabilization_window(
    levels: list[tuple[float, int]], start: int, expires: bool
) -> None:
    log = World(PLAIN, start, expires=expires).run(rates(levels)).log
    for one in log:
        steps = one.said.steps
        window = since(log, one, PLAIN.in_window_s)
        if steps.drain:
            assert not any(past.said.steps.grows for past in window)
            assert one.at >= PLAIN.in_window_s
        if steps.cancel:
            soon = since(log, one, PLAIN.cancel_window_s)
            assert not any(past.said.steps.grows for past in soon)
        shrunk = [past for past in window if past.said.steps.drain]
        if steps.grows and shrunk:
            # Only for more than anybody needed in the whole window before, at the lower threshold.
            last = shrunk[-1]
            before = [past.said.keep for past in since(log, last, PLAIN.in_window_s)]
            assert one.said.need > max([last.said.keep, *before])


@SOME
@given(LEVELS, STARTS, st.booleans(), st.integers(0, 2))
def test_no_more_is_asked_for_than_the_need_and_the_reserve(
    levels: list[tuple[float, int]], start: int, expires: bool, reserve: int
) -> None:
    chosen = Scaling(headroom=1.0, max=20, reserve=reserve, forecast=None)
    world = World(chosen, start, expires=expires).run(rates(levels))
    for one in world.log:
        said, steps = one.said, one.said.steps
        if steps.grows:
            more = len(steps.recall) + len(steps.wake) + steps.ask
            assert said.ordered + more <= max(said.need + said.reserve, said.floor)
        assert said.floor <= said.desired <= said.ceiling


@SOME
@given(LEVELS, STARTS, st.integers(0, 3), st.integers(3, 6))
def test_never_below_the_floor_nor_above_the_maximum(
    levels: list[tuple[float, int]], start: int, least: int, most: int
) -> None:
    world = World(Scaling(min=least, max=most), start, warm=least)
    for rate in rates(levels):
        world.run([rate])
        serving = world.count(Standing.READY)
        assert serving >= least
        assert world.count(Standing.READY, Standing.COMING) <= most


@SOME
@given(LEVELS, STARTS)
def test_what_is_on_its_way_goes_before_what_serves(
    levels: list[tuple[float, int]], start: int
) -> None:
    for one in World(PLAIN, start).run(rates(levels)).log:
        coming = {name.group for name in one.facts.groups if name.standing is Standing.COMING}
        if one.said.steps.drain:
            assert coming <= set(one.said.steps.cancel)


@SOME
@given(LEVELS, STARTS)
def test_five_minutes_of_stale_metrics_take_nothing_away(
    levels: list[tuple[float, int]], start: int
) -> None:
    world = World(PLAIN, start, warm=4).run(rates(levels))
    before = world.count(Standing.READY, Standing.COMING)
    world.run([0.0] * (300 // TICK_S), stale=True)
    assert world.count(Standing.READY, Standing.COMING) >= before
    grown = world.run([before + 3.0] * 3, stale=True)
    assert grown.count(Standing.READY, Standing.COMING) >= min(PLAIN.max, before + 3)


@SOME
@given(LEVELS, st.sampled_from([Mode.OFF, Mode.ADVISE]), st.booleans())
def test_frozen_or_switched_off_nothing_is_done(
    levels: list[tuple[float, int]], mode: Mode, frozen: bool
) -> None:
    chosen = Scaling(mode=Mode.ACT if frozen else mode)
    world = World(chosen, 10, warm=2).run(rates(levels), frozen=frozen)
    assert all(one.said.steps == Steps() for one in world.log)
    assert world.count(Standing.READY) == 2


@pytest.mark.parametrize("start", [10, 90, 300])
def test_a_second_surge_adds_while_the_first_is_on_its_way(start: int) -> None:
    world = World(PLAIN, start).run([0.5] * 4 + [3.0])
    assert world.log[-1].said.steps.ask == 2
    world.run([3.0] * 3)
    assert [one.said.steps.ask for one in world.log[-3:]] == [0, 0, 0]
    world.run([6.0])
    assert world.log[-1].said.steps.ask == 3


def test_falling_demand_gives_up_what_is_on_its_way_and_keeps_what_serves() -> None:
    world = World(PLAIN, 300, warm=2).run([2.0] * 30 + [6.0] * 4 + [1.5] * 6)
    assert world.count(Standing.COMING) == 0
    assert world.count(Standing.READY) == 2
    given_up = [name for one in world.log for name in one.said.steps.cancel]
    assert len(given_up) == 4


def test_a_drain_is_called_off_when_demand_returns() -> None:
    world = World(PLAIN, 90, warm=3).run([0.5] * 9)
    assert world.count(Standing.DRAINING) == 1
    world.run([4.0])
    assert len(world.log[-1].said.steps.recall) == 1


@SOME
@given(st.integers(1, 8), st.integers(2, 12), st.sampled_from([10, 90, 300]))
def test_a_step_is_unserved_only_until_a_start_is_over(low: int, high: int, start: int) -> None:
    high = low + high
    chosen = Scaling(headroom=1.0, max=40, out_groups=40)
    world = World(chosen, start, warm=low).run([low] * 25)
    ticks = -(-start // TICK_S) + 4
    before = len(world.log)
    world.run([high] * ticks)
    burst = world.log[before:]
    unserved = sum(one.offered - one.served for one in burst)
    assert unserved <= (high - low) * (start + TICK_S) * S
    assert all(one.offered <= one.served for one in burst[-2:])


@pytest.mark.parametrize("start", [10, 90, 300])
def test_two_bursts_cost_little_more_than_who_knows_them(start: int) -> None:
    # Two bursts, of 300 and 60 s, on a calm load; whoever knows them holds 2, 4 and 6 groups.
    pattern = [1.1] * 20 + [3.7] * 20 + [1.1] * 20 + [4.9] * 4 + [1.1] * 23
    world = World(Scaling(min=2), start, warm=2).run(pattern)
    unserved = sum(max(0, one.offered - one.served) for one in world.log)
    unavoidable = sum(
        max(0.0, rate - 2) * min(start + TICK_S, ticks * TICK_S) * S
        for rate, ticks in ((3.7, 20), (4.9, 4))
    )
    assert unserved <= 1.3 * unavoidable
    known = (2 * 67 + 4 * 20 + 6 * 4) * TICK_S + (2 + 4) * start
    assert sum(one.gpu_s for one in world.log) <= 1.5 * known


def test_a_burst_that_comes_each_hour_is_met_by_groups_asked_for_before() -> None:
    hour = [1.0] * 160 + [4.0] * 40 + [1.0] * 40
    foreseeing = Forecasting(season_s=3_600.0)

    def unserved(chosen: Scaling) -> list[int]:
        world = World(chosen, 300).run(hour * 4)
        lost = [max(0, one.offered - one.served) // S for one in world.log]
        return [sum(lost[at : at + len(hour)]) for at in range(0, len(lost), len(hour))]

    blind = unserved(Scaling(headroom=1.0, forecast=None))
    seeing = unserved(Scaling(headroom=1.0, forecast=foreseeing))
    assert seeing[0] == blind[0]
    assert seeing[-1] < blind[-1] / 2


@SOME
@given(LEVELS, STARTS)
def test_steady_demand_comes_to_rest(levels: list[tuple[float, int]], start: int) -> None:
    world = World(PLAIN, start).run(rates(levels))
    last = levels[-1][0]
    world.run([last] * 200)
    assert not any(one.said.steps != Steps() for one in world.log[-20:])
    for one, other in pairwise(world.log[-20:]):
        assert one.said.desired == other.said.desired
