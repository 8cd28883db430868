"""What is left of a start is told from what it has taken, and stages sum to the whole."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.stages import (
    SHIPPED,
    UNATTRIBUTED,
    Spread,
    Stage,
    StageTimes,
    StartOptions,
    ready_time,
    remaining,
    shipped,
    success_ppm,
    unattributed,
)
from headrace.units import MICRO, NS_PER_S

SPREADS = st.tuples(st.integers(0, 500), st.integers(0, 500)).map(
    lambda pair: Spread(pair[0] / 10, (pair[0] + pair[1]) / 10)
)


@given(SPREADS, st.integers(0, MICRO), st.integers(0, MICRO))
def test_quantiles_rise_and_chances_undo_them(spread: Spread, one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert spread.at(low) <= spread.at(high)
    assert spread.chance(spread.at(low)) >= low - 1_000 or spread.p50_s == spread.p90_s
    assert spread.at(MICRO // 2) == round(spread.p50_s * NS_PER_S)
    assert spread.at(MICRO * 9 // 10) == round(spread.p90_s * NS_PER_S)


def test_the_tail_is_that_of_a_fleet() -> None:
    fleet = Spread(22.7, 42.0)
    assert fleet.at(MICRO * 99 // 100) / NS_PER_S == pytest.approx(51.9, rel=0.01)
    assert fleet.at(MICRO) / NS_PER_S == pytest.approx(79.4, rel=0.02)


def test_falling_quantiles_are_refused() -> None:
    with pytest.raises(ValueError, match="is below p50_s"):
        Spread(2.0, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        StartOptions(),
        StartOptions(compile_cache=False),
        StartOptions(node_held=False, compile_cache=False),
        StartOptions(preloaded=True),
    ],
)
def test_quantiles_of_the_whole_are_those_of_many_starts(options: StartOptions) -> None:
    stages = StageTimes().stages(options)
    stream = random.Random(1)
    starts = sorted(
        sum(spread.at(stream.randrange(MICRO)) for _, spread in stages) for _ in range(10_000)
    )
    ahead = ready_time(stages)
    assert ahead.p50_ns == pytest.approx(starts[5_000], rel=0.02)
    assert ahead.p90_ns == pytest.approx(starts[9_000], rel=0.02)


def test_what_is_left_is_that_of_the_starts_that_took_as_long() -> None:
    stages = StageTimes().stages(StartOptions(node_held=False))
    stream, spent = random.Random(2), 130 * NS_PER_S
    left = []
    for _ in range(20_000):
        first = stages[0][1].at(stream.randrange(MICRO))
        rest = sum(spread.at(stream.randrange(MICRO)) for _, spread in stages[1:])
        if first > spent:
            left.append(first - spent + rest)
    left.sort()
    ahead = remaining(stages, Stage.PROVISION, spent)
    assert ahead.p50_ns == pytest.approx(left[len(left) // 2], rel=0.03)
    assert ahead.p90_ns == pytest.approx(left[len(left) * 9 // 10], rel=0.03)


def test_a_stage_that_is_overdue_is_expected_to_last() -> None:
    stages = ((Stage.WEIGHTS, Spread(10.0, 20.0)),)
    waits = [remaining(stages, Stage.WEIGHTS, s * NS_PER_S).p50_ns for s in (0, 30, 60, 200)]
    assert waits[0] == pytest.approx(10 * NS_PER_S, rel=0.02)
    assert waits[3] == 160 * NS_PER_S > waits[2] > 0


@given(st.sampled_from(list(Stage)), st.integers(0, 10**12))
def test_stages_that_are_over_are_not_waited_for(stage: Stage, spent: int) -> None:
    stages = StageTimes().stages(StartOptions())
    ahead = remaining(stages, stage, spent)
    assert 0 <= ahead.p50_ns <= ahead.p90_ns
    later = [name for name, _ in stages].index(stage)
    assert ahead.p50_ns >= ready_time(stages[later + 1 :]).p50_ns * 99 // 100


def test_a_stage_that_is_not_gone_through_is_refused() -> None:
    with pytest.raises(ValueError, match="provision is none of warm, register"):
        remaining(StageTimes().waking(), Stage.PROVISION, 0)


def test_what_is_made_ready_beforehand_is_sooner_ready() -> None:
    times = StageTimes()
    cold = StartOptions(node_held=False, compile_cache=False)
    faster = [
        StartOptions(node_held=True, compile_cache=False),
        StartOptions(node_held=True),
        StartOptions(local_cache=True),
        StartOptions(preloaded=True),
    ]
    took = [ready_time(times.stages(options)).p90_ns for options in (cold, *faster)]
    took.append(ready_time(times.waking()).p90_ns)
    assert took == sorted(took, reverse=True)
    assert len(set(took)) == len(took)


@pytest.mark.parametrize("hardware", [*SHIPPED, "B300 SXM x8"])
def test_shipped_times_name_every_stage_and_the_rest(hardware: str) -> None:
    stages = shipped(f"{hardware} 80 GB x1").stages(StartOptions())
    assert {name for name, _ in stages} == {*Stage, UNATTRIBUTED}


def test_start_of_a_7b_model_on_an_a100_is_as_measured() -> None:
    # 45 s with and 104 s without compile cache, without placing, communicators and registering.
    with_cache = ready_time(shipped("A100 SXM 80 GB x1").stages(StartOptions())).p50_ns
    without = ready_time(shipped("A100").stages(StartOptions(compile_cache=False))).p50_ns
    assert with_cache / NS_PER_S == pytest.approx(45 + 4, rel=0.1)
    assert without / NS_PER_S == pytest.approx(104 + 4, rel=0.1)


@given(
    st.dictionaries(st.sampled_from(list(Stage)), st.integers(0, 10**12)), st.integers(0, 10**12)
)
def test_stages_and_the_rest_sum_to_the_whole(taken: dict[Stage, int], rest: int) -> None:
    whole = sum(taken.values()) + rest
    assert unattributed(whole, {str(stage): took for stage, took in taken.items()}) == rest


def test_starts_that_were_seen_outweigh_what_was_declared() -> None:
    times = StageTimes(success=0.9)
    assert success_ppm(times, 0, 0) == 900_000
    assert success_ppm(times, 0, 20) == 450_000
    assert success_ppm(times, 980, 0) > 990_000
