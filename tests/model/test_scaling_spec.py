"""What an operator may declare, and what is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.scaling_spec import (
    WEEK_MINUTES,
    Cover,
    Day,
    Scaling,
    Schedule,
)
from headrace.units import NS_PER_S, DurationNs

S = NS_PER_S


def test_defaults_are_valid_and_come_back_from_their_bytes() -> None:
    content = msgspec.json.encode(Scaling())
    assert msgspec.json.decode(content, type=Scaling) == Scaling()


@pytest.mark.parametrize(
    "text",
    [
        '{"min": 9}',
        '{"unknown": 1}',
        '{"max": 0}',
        '{"headroom": 0.5}',
        '{"floor": [{"start": "24:00", "end": "01:00", "groups": 1}]}',
        '{"floor": [{"start": "8:00", "end": "01:00", "groups": 1}]}',
        '{"floor": [{"start": "08:00", "end": "01:00", "groups": 9}]}',
        '{"floor": [{"start": "08:00", "end": "01:00", "groups": 2, "days": []}]}',
    ],
)
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Scaling)


@given(st.integers(0, 1_439), st.integers(0, 1_439), st.sampled_from(Day))
def test_a_schedule_holds_as_long_as_it_says(start: int, end: int, day: Day) -> None:
    clock = [f"{minute // 60:02}:{minute % 60:02}" for minute in (start, end)]
    one = Schedule(start=clock[0], end=clock[1], groups=1, days=(day,))
    length = ((end - start - 1) % 1_440) + 1
    begin = tuple(Day).index(day) * 1_440 + start
    ends = [(begin + off) % WEEK_MINUTES for off in (-1, 0, length - 1, length)]
    assert [one.holds(minute) for minute in ends] == [False, True, True, False]
    assert [one.begins_within((begin - off) % WEEK_MINUTES, 5) for off in (-1, 0, 5, 6)] == [
        False, True, True, False
    ]  # fmt: skip


def test_a_night_goes_on_into_the_next_day_and_week() -> None:
    night = Schedule(start="22:00", end="06:00", groups=1, days=(Day.SUN,))
    assert night.holds(6 * 1_440 + 22 * 60)
    assert night.holds(5 * 60 + 59)
    assert not night.holds(6 * 60)


def test_hours_are_the_operators() -> None:
    early = Schedule(start="08:00", end="09:00", groups=4)
    settings = Scaling(floor=(early,), utc_offset_min=120)
    nothing = DurationNs(0)
    assert settings.floor_at(6 * 60, nothing) == 4
    assert settings.floor_at(8 * 60, nothing) == 1


def test_money_is_of_all_gpu_time_that_is_held() -> None:
    assert Scaling().cost(S) is None
    assert Scaling(gpu_hour_usd=3.6).cost(16 * 3_600 * S) == 57_600_000


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        (Scaling(), False),
        (Scaling(burst_horizon_s=300.0), False),
        (Scaling(burst_horizon_s=10.0), True),
        (Scaling(burst_horizon_s=10.0, standby=1), False),
        (Scaling(burst_horizon_s=5.0, standby=1), True),
        (Scaling(burst_horizon_s=10.0, covers=(Cover.WARM,)), False),
        (
            Scaling(burst_horizon_s=10.0, floor=(Schedule(start="08:00", end="09:00", groups=2),)),
            False,
        ),
    ],
)
def test_bursts_shorter_than_a_start_need_a_cover(settings: Scaling, lacks: bool) -> None:
    assert settings.uncovered(DurationNs(120 * S), DurationNs(8 * S)) == lacks
