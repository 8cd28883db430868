"""How many deferred jobs run beside live traffic."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policy.fairness.leftover import Leftover, Pace, Room, Seen

RULE = Leftover(at_once=16)


def seen(**changed: Any) -> Seen:
    plain: dict[str, Any] = {
        "waiting": 0,
        "refused": 0,
        "slack_ppm": None,
        "open": 2,
        "running": 0,
        "stuck": 0,
        "more": True,
    }
    return Seen(**(plain | changed))


def test_one_more_runs_for_each_look_while_nobody_is_in_the_way() -> None:
    pace, running, grown = Pace(), 0, []
    for _ in range(40):
        room = RULE.room(pace, seen(running=running))
        pace, running = room.pace, running + room.take
        grown.append(running)
    assert grown[:16] == list(range(1, 17))
    assert grown[-1] == RULE.at_once


def test_the_limit_stays_where_it_is_not_what_holds_jobs_back() -> None:
    assert RULE.room(Pace(8), seen(running=3)) == Room(Pace(8, full=True), take=5)
    assert RULE.room(Pace(8, full=True), seen(running=8, more=False)) == Room(Pace(8))
    few = Leftover(at_once=100, burst=2)
    assert few.room(Pace(50), seen(running=3, open=4)) == Room(Pace(50), take=8)


def test_it_grows_where_it_was_reached_whatever_has_ended_since() -> None:
    """Jobs shorter than the time between two looks must not keep it small."""
    pace = Pace()
    for _ in range(30):
        pace = RULE.room(pace, seen(running=0)).pace
    assert pace.limit == RULE.burst * 2 + 1, "what two open replicas take at a time"


@pytest.mark.parametrize("way", [{"refused": 1}, {"slack_ppm": 99_999}, {"slack_ppm": -5}])
def test_whoever_is_in_the_way_halves_it_at_once_and_once(way: dict[str, int]) -> None:
    room = RULE.room(Pace(12), seen(running=10, **way))
    assert room == Room(Pace(5, disturbed=True))
    again = RULE.room(room.pace, seen(running=10, **way))
    assert again == room
    after = RULE.room(again.pace, seen(running=10))
    assert after.take == 0, "more run than may, from before"
    assert not after.pace.disturbed


def test_who_still_waits_the_next_time_halves_it_once() -> None:
    first = RULE.room(Pace(12), seen(running=10, waiting=1))
    assert first == Room(Pace(12, waited=True)), "nothing is taken up, and no job is too many yet"
    again = RULE.room(first.pace, seen(running=10, waiting=1))
    assert again == Room(Pace(5, disturbed=True, waited=True))
    assert RULE.room(again.pace, seen(running=10, waiting=1)) == again
    assert RULE.room(again.pace, seen(running=10)).pace == Pace(5, full=True)


def test_who_waited_only_once_costs_no_job() -> None:
    pace = Pace(12)
    for _ in range(5):
        pace = RULE.room(pace, seen(running=10, waiting=1)).pace
        pace = RULE.room(pace, seen(running=10)).pace
    assert pace.limit >= 12


def test_who_waits_on_after_somebody_was_refused_halves_it_no_more() -> None:
    refused = RULE.room(Pace(12), seen(running=10, refused=1))
    waiting = RULE.room(refused.pace, seen(running=10, waiting=1))
    assert waiting == Room(Pace(5, disturbed=True, waited=True))
    assert RULE.room(waiting.pace, seen(running=10, waiting=1)) == waiting


def test_slack_enough_disturbs_nobody() -> None:
    assert RULE.room(Pace(4, full=True), seen(running=4, slack_ppm=100_000)).take == 1


def test_jobs_that_wait_for_a_replica_give_way_to_live_ones() -> None:
    assert RULE.room(Pace(4), seen(running=4, stuck=2, waiting=1)).withdraw
    assert not RULE.room(Pace(4), seen(running=4, waiting=1)).withdraw
    alone = RULE.room(Pace(4), seen(running=2, stuck=2))
    assert alone == Room(Pace(4)), "they wait, and nothing is taken up behind them"


def test_nothing_is_taken_up_without_an_open_replica() -> None:
    assert RULE.room(Pace(4), seen(open=0)) == Room(Pace(4))


_SEEN = st.builds(
    Seen,
    waiting=st.integers(0, 3),
    refused=st.integers(0, 3),
    slack_ppm=st.none() | st.integers(-1_000_000, 1_000_000),
    open=st.integers(0, 8),
    running=st.integers(0, 40),
    stuck=st.integers(0, 3),
    more=st.booleans(),
)


@settings(max_examples=200)
@given(st.integers(1, 40), st.booleans(), st.booleans(), st.booleans(), _SEEN)
def test_bounds_hold_whatever_is_seen(
    limit: int, full: bool, disturbed: bool, waited: bool, looked: Seen
) -> None:
    pace = Pace(limit, full, disturbed, waited)
    room = RULE.room(pace, looked)
    assert 1 <= room.pace.limit <= max(limit, RULE.at_once)
    assert 0 <= room.take <= RULE.burst * looked.open
    assert looked.running + room.take <= max(looked.running, RULE.at_once)
    assert room.pace.limit <= limit + 1
    if looked.waiting or looked.refused:
        assert not room.take
        assert room.pace.limit <= limit
    assert RULE.room(pace, looked) == room
