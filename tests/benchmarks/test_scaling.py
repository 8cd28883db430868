"""What could not have been served and what a clairvoyant holds come out as by hand; logs are read right."""

import pytest

from benchmarks.scaling import worse
from benchmarks.scaling_runs import logged, settings
from benchmarks.yardstick import Asked, Fleet, clairvoyant_s, unavoidable
from headrace.model.scaling import ScaleRecord
from headrace.model.scaling_spec import By, Scaling
from headrace.units import MICRO, NS_PER_MS, NS_PER_S, InstantNs
from tests.sim.scaled import records, run, scaled, starts, steady

BURSTS = ((0, 300, 10), (300, 600, 34), (600, 900, 10), (900, 960, 45), (960, 1_300, 10))
"""(from, to, requests a second), each of a ninth of a group's second."""
END_S = 1_300.0


def asked(*spans: tuple[int, int, int]) -> list[Asked]:
    return [
        Asked(InstantNs(begin * NS_PER_S + nth * NS_PER_S // rate), NS_PER_S // 9)
        for begin, end, rate in spans
        for nth in range((end - begin) * rate)
    ]


def fleet(start_s: float, floor: int = 2) -> Fleet:
    return Fleet(floor=floor, ceiling=8, each_micro=MICRO, start_s=start_s, tick_s=15.0)


@pytest.mark.parametrize(
    ("start_s", "requests", "spans_s"),
    [
        (10.0, (34 - 18) * 30 + (45 - 18) * 30, 60),
        (90.0, (34 - 18) * 105 + (45 - 18) * 60, 165),
        # The four groups that the end of the first burst called for are there 15 s into the second one.
        (300.0, (34 - 18) * 300 + (45 - 18) * 45 + (45 - 36) * 15, 360),
    ],
)
def test_what_two_bursts_lose_is_what_comes_until_groups_are_ready(
    start_s: float, requests: int, spans_s: int
) -> None:
    found = unavoidable(asked(*BURSTS), fleet(start_s), END_S)
    assert found.work_s == pytest.approx(requests / 9, rel=0.01)
    assert found.spans_s == spans_s
    assert found.inside(InstantNs(310 * NS_PER_S))
    assert not found.inside(InstantNs(299 * NS_PER_S))


def test_what_was_needed_lately_is_warm_and_after_that_is_not() -> None:
    again = asked((0, 300, 34), (300, 500, 10), (500, 600, 34))
    assert unavoidable(again, fleet(90.0), 600.0).spans_s == 105.0
    later = asked((0, 300, 34), (300, 800, 10), (800, 860, 34))
    assert unavoidable(later, fleet(90.0), 900.0).spans_s == 105.0 + 60.0


@pytest.mark.parametrize("start_s", [10.0, 90.0])
def test_who_knows_the_bursts_holds_a_start_more_than_they_last(start_s: float) -> None:
    # 34 / 9 takes four groups, 45 / 9 five.
    held = clairvoyant_s(asked(*BURSTS), fleet(start_s), END_S)
    assert held == 2 * END_S + 2 * (300 + start_s) + 3 * (60 + start_s)


def test_what_is_needed_again_before_a_start_is_over_is_kept() -> None:
    twice = asked((0, 60, 10), (60, 120, 34), (120, 180, 10), (180, 240, 34))
    assert clairvoyant_s(twice, fleet(90.0), 240.0) == 2 * 240 + 2 * 240
    assert clairvoyant_s(twice, fleet(10.0), 240.0) == 2 * 240 + 4 * (60 + 10)


def test_nothing_beyond_the_ceiling_is_asked_of_anybody() -> None:
    much = asked((0, 60, 200))
    assert clairvoyant_s(much, fleet(10.0), 60.0) == 8 * 60
    assert unavoidable(asked((0, 300, 200)), fleet(10.0), 300.0).work_s > 14 * 270


def log() -> tuple[list[ScaleRecord], Scaling]:
    chosen = Scaling(times=starts(10.0), in_window_s=30.0, min_life_s=0.0, headroom=1.0)
    rows = steady([(0, 60, 0.5), (60, 180, 6), (180, 600, 0.5)])
    return records(run(scaled(chosen), rows=rows)), chosen


def test_a_log_of_ours_has_nothing_it_should_not_have() -> None:
    decided, chosen = log()
    assert any(one.decision.steps.grows for one in decided)
    assert any(one.decision.steps.drain for one in decided)
    found = logged(decided, chosen)
    assert (found.reversals, found.over_asked, found.served_first) == (0, 0, 0)


def test_what_a_log_should_not_have_is_found() -> None:
    decided, chosen = log()
    hasty = logged(decided, Scaling(times=chosen.times, in_window_s=1_000.0))
    assert hasty.reversals > 0
    grown = next(one for one in decided if one.decision.steps.grows)
    needless = ScaleRecord(
        decision_id=grown.decision_id,
        at=grown.at,
        policy_revision=grown.policy_revision,
        evidence=grown.evidence,
        decision=type(grown.decision)(
            **{name: getattr(grown.decision, name) for name in grown.decision.__struct_fields__}
            | {"need": 1, "floor": 0}
        ),
    )
    assert logged([needless], chosen).over_asked == 1


def test_other_rules_have_our_floor_ceiling_tick_and_window() -> None:
    mine = settings(By.SLO, 90.0)
    for by in By:
        other = settings(by, 90.0)
        assert (other.min, other.max, other.tick_s, other.in_window_s) == (
            mine.min, mine.max, mine.tick_s, mine.in_window_s
        )  # fmt: skip
    assert NS_PER_MS * 1_000 == NS_PER_S


def test_the_worse_end_of_an_interval_is_claimed() -> None:
    assert worse([1.0], 1) == worse([1.0], -1) == 1.0
    assert worse([1.0, 1.2], 1) > 1.2
    assert worse([1.0, 1.2], -1) < 1.0
