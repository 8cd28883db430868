"""What is foreseen is what a season and a trend say, and how far off that was is known."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.scaling import ForecastFacts
from headrace.model.scaling_spec import Forecasting
from headrace.policy.scaling.forecast import History, believed
from headrace.units import MICRO, NS_PER_S, InstantNs

S = NS_PER_S
HOURLY = Forecasting(interval_s=30.0, season_s=3_600.0)
AHEAD = 300 * S


def taught(rates: list[float], history: History | None = None, start: int = 0) -> History:
    """Return a history of an interval for each work rate."""
    made = history or History()
    for number, rate in enumerate([*rates, 0.0], start):
        made.add(HOURLY, round(rate * 30 * S), InstantNs(number * 30 * S), AHEAD)
    return made


def foreseen(made: History) -> ForecastFacts:
    """Return the forecast, which must be there."""
    facts = made.facts(HOURLY, AHEAD)
    assert facts is not None
    return facts


def test_nothing_is_foreseen_of_nothing() -> None:
    assert History().facts(HOURLY, AHEAD) is None
    assert taught([]).facts(HOURLY, AHEAD) is None


def test_a_steady_load_is_foreseen_to_stay() -> None:
    facts = foreseen(taught([2.0] * 100))
    assert facts.at_landing_micro == pytest.approx(2 * MICRO, rel=0.01)
    assert facts.error_ppm is not None
    assert facts.error_ppm < 1_000
    assert facts.checked == 64


def test_a_trend_goes_on_for_a_while_and_not_for_ever() -> None:
    rising = taught([1.0 + 0.05 * step for step in range(40)])
    facts = foreseen(rising)
    last = 1.0 + 0.05 * 39
    assert last * MICRO < facts.at_landing_micro < (last + 10 * 0.05) * MICRO
    far = rising.facts(HOURLY, 100 * AHEAD)
    assert far is not None
    assert far.at_landing_micro < (last + 0.5) * MICRO


def test_what_came_at_the_same_time_before_is_foreseen() -> None:
    hour = [1.0] * 60 + [5.0] * 30 + [1.0] * 30
    seen = taught(hour * 3)
    before = taught(hour[:40], seen, start=360)
    assert foreseen(before).at_landing_micro < 1.5 * MICRO  # ten intervals ahead: not yet
    upon = taught(hour[40:55], before, start=400)
    assert foreseen(upon).at_landing_micro > 2.5 * MICRO


def test_a_morning_after_an_empty_night_is_foreseen() -> None:
    hour = [0.0] * 60 + [5.0] * 60
    upon = taught(hour[:55], taught(hour * 3), start=360)
    assert foreseen(upon).at_landing_micro > 2 * MICRO


def test_a_season_that_begins_to_be_known_is_no_rise() -> None:
    made = History()
    for number in range(3 * HOURLY.slots):
        made.add(HOURLY, 4 * 30 * S, InstantNs(number * 30 * S), AHEAD)
        if number > 20:
            assert foreseen(made).at_landing_micro == pytest.approx(4 * MICRO, rel=0.001)


def test_errors_are_those_of_the_distance_that_is_used() -> None:
    wild = taught([1.0, 9.0, 1.0, 1.0, 9.0, 9.0, 1.0, 9.0] * 20)
    calm = taught([4.0, 4.2, 3.9, 4.1] * 40)
    assert (foreseen(wild).error_ppm or 0) > 3 * (foreseen(calm).error_ppm or 0)


def test_a_forecast_that_was_never_checked_has_no_error() -> None:
    assert foreseen(taught([2.0] * 12)).error_ppm is None
    assert believed(HOURLY, foreseen(taught([1.0, 2.0, 3.0])), MICRO) == MICRO


def test_one_that_was_just_wrong_is_not_believed_for_its_past() -> None:
    calm = taught([2.0] * 100)
    upset = taught([8.0] * 10, calm, start=100)
    assert foreseen(upset).error_ppm is not None
    assert (foreseen(upset).error_ppm or 0) > MICRO // 2
    calmed = taught([8.0] * 30, upset, start=110)
    assert (foreseen(calmed).error_ppm or 0) < MICRO // 4


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 30))
def test_after_a_burst_no_rise_is_foreseen(high: int, long: int, after: int) -> None:
    burst = [1.0] * 40 + [1.0 + high / 4] * long + [1.0] * (after + 1)
    facts = foreseen(taught(burst))
    assert believed(HOURLY, facts, MICRO) <= 1.1 * MICRO


def test_nobody_counting_for_a_season_forgets_it() -> None:
    made = taught([2.0] * 50)
    made.add(HOURLY, 0, InstantNs(1_000 * 30 * S), AHEAD)
    assert made.facts(HOURLY, AHEAD) is None


@given(st.lists(st.integers(0, 20), max_size=300), st.integers(0, 3_600))
def test_memory_is_bounded_and_thaws_as_it_was(rates: list[int], ahead_s: int) -> None:
    made = taught([float(rate) for rate in rates])
    assert len(made.season) in (0, HOURLY.slots)
    assert len(made.recent) <= 4
    assert len(made.errors) <= 64
    assert len(made.made) <= 11
    thawed = msgspec.json.decode(msgspec.json.encode(made), type=History)
    assert thawed == made
    facts = made.facts(HOURLY, ahead_s * S)
    if facts is not None:
        most = max([made.level * HOURLY.rise_limit, *made.season])
        assert 0 <= facts.at_landing_micro <= most
