"""Each signal asks for what its numbers say, and utilization asks for nothing."""

from typing import Any

import pytest

from headrace.model.scaling import ForecastFacts, GoodputFacts, Signal, Standing
from headrace.model.scaling_spec import Forecasting, Scaling
from headrace.units import MICRO
from tests.policy.scaling.made import (
    NOW,
    S,
    decided,
    demand,
    group,
    groups,
    reading,
    sample,
)

PLAIN = Scaling(headroom=1.0)


def falling(met: int, **changes: Any) -> GoodputFacts:
    said = {"offered": 1_000, "met": met, "target_ppm": 990_000, "window_ns": 60 * S, **changes}
    return GoodputFacts(**said)


UTILIZATION: dict[str, tuple[dict[str, Any], Signal | None]] = {
    "KV full": (
        {
            "urgent": 0.6,
            "samples": tuple(sample(f"r{i}", 980, utilization_ppm=400_000) for i in range(2)),
        },
        Signal.KV,
    ),
    # Steps of few decodes leave a GPU idle, but the gaps they must keep allow no larger batch: the
    # envelope of such a mix is low.
    "small-batch decode": (
        {
            "urgent": 0.9,
            "envelope_micro": 300_000,
            "groups": groups(2, envelope_micro=300_000),
            "samples": tuple(sample(f"r{i}", utilization_ppm=250_000) for i in range(2)),
        },
        Signal.WORK,
    ),
    "a rank waits on a collective": (
        {
            "urgent": 1.5,
            "groups": (group("r0"), group("r1", effective_ppm=200_000)),
            "samples": (
                sample("r0", utilization_ppm=700_000),
                sample("r1", utilization_ppm=100_000),
            ),
        },
        Signal.LOST_CAPACITY,
    ),
    # Prompts wait to be parsed: none of it is GPU time, all of it is time to first token.
    "CPU parsing blocked": (
        {
            "demand": demand(
                1.0,
                waiting=40,
                low_slack=30,
                low_slack_ns=50 * S,
                least_slack_ns=-S,
                urgent_ns=60 * S,
            ),
            "samples": tuple(sample(f"r{i}", utilization_ppm=200_000) for i in range(2)),
        },
        Signal.SLACK,
    ),
    "one replica hot by prefix": (
        {
            "urgent": 0.8,
            "goodput": falling(900),
            "samples": (
                sample("r0", utilization_ppm=950_000),
                sample("r1", utilization_ppm=50_000),
            ),
        },
        Signal.GOODPUT,
    ),
    "95 % utilization, interactive queue empty": (
        {
            "demand": demand(0.2, leftover_ns=10_000 * S),
            "samples": tuple(sample(f"r{i}", utilization_ppm=950_000) for i in range(2)),
        },
        None,
    ),
}


@pytest.mark.parametrize("name", UTILIZATION)
def test_utilization_says_neither_yes_nor_no(name: str) -> None:
    changes, winner = UTILIZATION[name]
    decision = decided(PLAIN, **changes)
    assert decision.steps.grows == (winner is not None)
    if winner is not None:
        assert decision.winner is winner


@pytest.mark.parametrize("utilization", [None, 0, 400_000, MICRO])
def test_utilization_alone_changes_nothing(utilization: int | None) -> None:
    told = tuple(sample(f"r{i}", utilization_ppm=utilization) for i in range(2))
    assert decided(urgent=1.5, samples=told).readings == decided(urgent=1.5).readings


def test_work_is_counted_as_it_is_offered() -> None:
    assert reading(decided(PLAIN, urgent=5.0), Signal.WORK).desired == 5
    queued = demand(1.0, urgent_ns=90 * S, expires=False)
    assert reading(decided(PLAIN, demand=queued), Signal.WORK).desired == 4
    assert reading(decided(Scaling(headroom=1.2), urgent=5.0), Signal.WORK).desired == 6


def test_repeats_count_up_to_the_retry_budget() -> None:
    few, storm = demand(1.0, retries_micro=50_000), demand(1.0, retries_micro=9 * MICRO)
    assert (
        dict(reading(decided(PLAIN, demand=few), Signal.WORK).numbers)["counted_micro"] == 1_050_000
    )
    found = reading(decided(PLAIN, demand=storm), Signal.WORK)
    assert dict(found.numbers)["counted_micro"] == 1_100_000
    assert dict(found.numbers)["retries_micro"] == 9 * MICRO


def test_patient_work_takes_what_its_bound_leaves_it() -> None:
    patient = demand(1.0, patient_ns=7_200 * S, patient_left_ns=3_600 * S)
    assert reading(decided(PLAIN, demand=patient), Signal.WORK).desired == 3
    unbound = demand(1.0, leftover_ns=7_200 * S)
    assert reading(decided(PLAIN, demand=unbound), Signal.WORK).desired == 1


def test_running_work_is_counted_as_queued_only_if_asked_for() -> None:
    running = demand(1.0, active_ns=90 * S)
    assert reading(decided(PLAIN, demand=running), Signal.WORK).desired == 1
    counting = Scaling(headroom=1.0, active_part=1.0)
    assert reading(decided(counting, demand=running), Signal.WORK).desired == 4


def test_a_group_without_an_envelope_counts_at_the_lowest_of_its_kind() -> None:
    unknown = groups(2, envelope_micro=None)
    said = decided(PLAIN, urgent=1.5, groups=unknown, lowest_micro=500_000)
    assert said.supply.now_micro == MICRO
    assert said.need == 3, "two do 1.0 together, a new one does 1.0"
    never = decided(PLAIN, urgent=1.5, groups=unknown, envelope_micro=None)
    assert never.supply.now_micro == 1_400_000
    assert never.need == 3


def test_a_wait_is_predicted_for_when_a_new_group_would_be_ready() -> None:
    # 3 s/s against 2: 90 s later 90 s of work wait.
    rising = demand(3.0, expires=False)
    said = reading(decided(PLAIN, demand=rising), Signal.QUEUE_WAIT)
    assert dict(said.numbers)["queue_ns"] == 90 * S
    assert said.desired == 6
    # One more is there after 40 s: 40 s of work wait, and no more come.
    helped = decided(PLAIN, demand=rising, groups=groups(2, 1))
    assert dict(reading(helped, Signal.QUEUE_WAIT).numbers)["queue_ns"] == 40 * S


def test_no_more_waits_than_can_still_meet_its_bound() -> None:
    said = reading(decided(PLAIN, urgent=30.0), Signal.QUEUE_WAIT)
    assert dict(said.numbers)["queue_ns"] == 30 * 2 * S


@pytest.mark.parametrize("queued", [0, S])
def test_a_queue_that_has_its_turn_in_time_asks_for_nothing(queued: int) -> None:
    said = reading(decided(demand=demand(1.0, urgent_ns=queued)), Signal.QUEUE_WAIT)
    assert said.desired == 0


def test_low_slack_counts_from_a_share_of_several_on() -> None:
    def slack(waiting: int, low: int) -> int | None:
        said = demand(1.0, waiting=waiting, low_slack=low, low_slack_ns=90 * S)
        return reading(decided(PLAIN, demand=said), Signal.SLACK).desired

    assert [slack(4, 4), slack(100, 20), slack(100, 21)] == [0, 0, 4]


def test_kv_blocks_of_what_waits_count_as_well() -> None:
    waiting = demand(0.5, waiting_blocks=1_600)
    assert reading(decided(demand=waiting), Signal.KV).desired == 3  # (200 + 1,600) / 850


def foreseen(ahead: float, error: int | None, level: float = 1.0) -> ForecastFacts:
    """Return a forecast of a rate, from where it stands now."""
    return ForecastFacts(
        level_micro=round(level * MICRO),
        at_landing_micro=round(ahead * MICRO),
        error_ppm=error,
        checked=64,
    )


def test_a_forecast_that_has_not_followed_a_fall_yet_is_no_rise() -> None:
    found = reading(decided(PLAIN, urgent=1.0, forecast=foreseen(3.0, 0, 3.2)), Signal.FORECAST)
    assert (found.desired, found.why) == (0, "no rise is foreseen")
    rising = reading(decided(PLAIN, urgent=1.0, forecast=foreseen(5.2, 0, 3.2)), Signal.FORECAST)
    assert dict(rising.numbers)["used_micro"] == 3 * MICRO


def test_forecast_is_used_as_far_as_its_error_allows() -> None:
    def used(error: int | None, ahead: float = 5.0) -> int:
        said = foreseen(ahead, error)
        found = reading(decided(PLAIN, urgent=1.0, forecast=said), Signal.FORECAST)
        return dict(found.numbers)["used_micro"]

    assert [used(0), used(250_000), used(500_000), used(900_000), used(None)] == [
        5 * MICRO, 3 * MICRO, MICRO, MICRO, MICRO
    ]  # fmt: skip
    assert used(0, ahead=0.1) == MICRO, "it never lowers"


def test_forecast_that_is_not_believed_says_so_and_one_that_is_wins() -> None:
    said = foreseen(5.0, 0)
    assert decided(PLAIN, urgent=1.0, forecast=said).winner is Signal.FORECAST
    unsure = decided(PLAIN, urgent=1.0, forecast=foreseen(5.0, None))
    assert "not to be trusted" in reading(unsure, Signal.FORECAST).why
    off = decided(Scaling(forecast=None), urgent=1.0, forecast=said)
    assert reading(off, Signal.FORECAST).desired == 0
    assert Forecasting().slots == 2_880


def test_goodput_asks_for_a_little_beyond_the_others_and_no_more() -> None:
    said = decided(
        Scaling(max=50),
        urgent=0.5,
        groups=groups(20),
        goodput=falling(100),
        samples=tuple(sample(f"r{i}", 0) for i in range(20)),
    )
    assert said.need == 1 + Scaling().goodput_extra
    assert said.keep >= 20, "none goes while attainment is low"
    assert not said.steps.shrinks


@pytest.mark.parametrize(
    "facts", [None, falling(985), falling(1_000), falling(0, offered=49)], ids=str
)
def test_goodput_is_quiet_while_it_holds_or_too_little_was_seen(facts: GoodputFacts | None) -> None:
    assert not reading(decided(urgent=0.5, goodput=facts), Signal.GOODPUT).desired


def test_goodput_of_before_the_last_group_was_ready_is_no_reason_for_another() -> None:
    fresh = (group("r0"), group("r1", since=NOW - 30 * S))
    said = reading(decided(urgent=0.5, groups=fresh, goodput=falling(100)), Signal.GOODPUT)
    assert (said.desired, said.keep) == (0, 2)


def test_lost_capacity_is_what_ready_groups_do_less_than_was_measured() -> None:
    slow = groups(4, effective_ppm=500_000)
    said = decided(PLAIN, urgent=4.0, groups=slow)
    assert reading(said, Signal.WORK).desired == 4
    assert reading(said, Signal.LOST_CAPACITY).desired == 6


def test_first_steps_of_a_new_group_do_not_lower_what_it_can_do() -> None:
    new = groups(4, effective_ppm=100_000, since=NOW - 10 * S)
    assert decided(PLAIN, urgent=4.0, groups=new).need == 4


def test_groups_on_their_way_count_once_and_as_far_as_they_succeed() -> None:
    assert decided(PLAIN, urgent=4.0, groups=groups(2, 2)).steps.ask == 0
    flaky = tuple(group(f"c{i}", Standing.COMING, success_ppm=400_000) for i in range(2))
    said = decided(PLAIN, urgent=4.0, groups=(*groups(2), *flaky))
    assert said.supply.counted == 1
    assert said.steps.ask == 1
    late = group("c0", Standing.COMING, arrival_p50_ns=91 * S)
    assert decided(PLAIN, urgent=3.0, groups=(*groups(2), late)).steps.ask == 1


@pytest.mark.parametrize("standing", [Standing.STANDBY, Standing.DRAINING, Standing.STOPPING])
def test_only_ready_groups_and_those_on_their_way_are_supply(standing: Standing) -> None:
    there = (*groups(1), group("x", standing))
    said = decided(urgent=0.5, groups=there)
    assert said.supply.now_micro == said.supply.landing_micro == MICRO
    assert said.ordered == 1
