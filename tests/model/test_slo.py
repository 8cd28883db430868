"""Indicators add up, bounds are judged per request, objectives over their own denominators."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert
from msgspec.structs import replace

from headrace.model.meter import NO_STREAM
from headrace.model.slo import (
    Attainment,
    Bounds,
    Indicator,
    Moments,
    Objective,
    Per,
    attain,
    count,
    gaps_within,
    indicators,
    misses,
)
from headrace.units import DurationNs, InstantNs, ms
from tests.report.making import BOUNDS, served, stream


def moments(**changed: int) -> Moments:
    times = {"arrived_at": 0, "decided_at": 1, "dispatched_at": 3, "ended_at": 10**12}
    return convert(times | {"first_decode_ns": 7} | changed, Moments)


@given(
    route=st.integers(0, 10**9),
    queue=st.integers(0, 10**12),
    engine=st.integers(0, 10**12),
    first_decode=st.integers(0, 10**10),
    gaps=st.lists(st.integers(0, 5_000), max_size=20),
    post=st.integers(0, 10**9),
)
def test_parts_sum_to_ttft_and_to_end_to_end(
    route: int, queue: int, engine: int, first_decode: int, gaps: list[int], post: int
) -> None:
    first = 5 + route + queue + engine
    timing = stream(InstantNs(first), gaps)
    assert timing.last_at is not None
    seen = indicators(
        moments(
            arrived_at=5,
            decided_at=5 + route,
            dispatched_at=5 + route + queue,
            ended_at=timing.last_at + post,
            first_decode_ns=first_decode,
        ),
        timing,
    )
    assert seen is not None
    parts = (seen.route_ns, seen.queue_ns, seen.prefill_ns, seen.first_decode_ns)
    assert min(parts) >= 0
    assert sum(parts) == seen.ttft_ns
    assert seen.ttft_ns + seen.gaps_ns + seen.postprocess_ns == seen.e2e_ns
    assert seen.inferred


def test_a_request_without_a_token_has_no_indicators() -> None:
    assert indicators(moments(), NO_STREAM) is None


def test_time_per_output_token_is_undefined_for_one_token_and_counts_as_met() -> None:
    _, row = served(1, gaps_ms=())
    assert row.indicators is not None
    assert row.indicators.tpot_ns() is None
    assert misses(row.indicators, replace(BOUNDS, tpot_ns=DurationNs(0))) == ()


@pytest.mark.parametrize(
    ("bounds", "missed"),
    [
        (BOUNDS, ()),
        (replace(BOUNDS, ttft_ns=ms(100)), ()),
        (replace(BOUNDS, ttft_ns=DurationNs(ms(100) - 1)), (Indicator.TTFT,)),
        (replace(BOUNDS, ttft_ns=None), ()),
        (replace(BOUNDS, tpot_ns=ms(30)), ()),
        (replace(BOUNDS, tpot_ns=DurationNs(ms(30) - 1)), (Indicator.TPOT,)),
        (replace(BOUNDS, stall_ns=ms(50)), ()),
        (replace(BOUNDS, stall_ns=DurationNs(ms(50) - 1)), (Indicator.MAX_STALL,)),
        (replace(BOUNDS, e2e_ns=ms(161)), ()),
        (replace(BOUNDS, e2e_ns=DurationNs(ms(161) - 1)), (Indicator.E2E,)),
        (replace(BOUNDS, gap_ns=DurationNs(1)), ()),
    ],
)
def test_a_bound_is_held_up_to_and_including_itself(
    bounds: Bounds, missed: tuple[Indicator, ...]
) -> None:
    _, row = served(1, gaps_ms=(10, 50))
    assert row.indicators is not None
    assert misses(row.indicators, bounds) == missed


@pytest.mark.parametrize(
    ("indicator", "per"),
    [
        (Indicator.TTFT, Per.GAP),
        (Indicator.MAX_STALL, Per.GAP),
        (Indicator.GAP, Per.REQUEST),
    ],
)
def test_an_objective_counts_only_what_its_indicator_has(indicator: Indicator, per: Per) -> None:
    with pytest.raises(ValueError, match="per: gap"):
        Objective(indicator=indicator, threshold_ms=80, per=per)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Objective(indicator=Indicator.TTFT, threshold_ms=100), (1, 1)),
        (Objective(indicator=Indicator.TTFT, threshold_ms=99), (0, 1)),
        (Objective(indicator=Indicator.TTFT, threshold_ms=99, per=Per.TOKEN), (0, 4)),
        (Objective(indicator=Indicator.TPOT, threshold_ms=50), (1, 1)),
        (Objective(indicator=Indicator.TPOT, threshold_ms=49), (0, 1)),
        (Objective(indicator=Indicator.MAX_STALL, threshold_ms=90), (1, 1)),
        (Objective(indicator=Indicator.E2E, threshold_ms=250), (0, 1)),
        (Objective(indicator=Indicator.GAP, threshold_ms=80, per=Per.GAP), (2, 3)),
        (Objective(indicator=Indicator.GAP, threshold_ms=80, per=Per.TOKEN), (3, 4)),
    ],
)
def test_each_objective_counts_in_its_own_unit(
    objective: Objective, expected: tuple[int, int]
) -> None:
    _, row = served(1, gaps_ms=(20, 40, 90))
    assert row.indicators is not None
    assert row.timing is not None
    assert count(objective, row.indicators, row.timing) == expected
    assert attain(objective, [(row.indicators, row.timing)]) == Attainment(
        met=expected[0], counted=expected[1]
    )


def test_a_bucket_that_the_threshold_cuts_counts_as_over_unless_it_is_the_streams_own_bound() -> (
    None
):
    timing = stream(InstantNs(0), (72, 74, 76), replace(BOUNDS, gap_ns=ms(75)))
    assert gaps_within(timing, ms(75)) == 0
    assert gaps_within(timing, ms(80)) == 3
    assert gaps_within(timing, ms(75), bound_ns=ms(75)) == 2


@pytest.mark.parametrize(
    ("met", "counted", "target", "holds"),
    [
        (99, 100, 0.99, True),
        (989, 1_000, 0.99, False),
        (0, 0, 1.0, True),
        (10**9 - 1, 10**9, 1.0, False),
        (9, 10, 0.9, True),
    ],
)
def test_a_target_is_held_exactly(met: int, counted: int, target: float, holds: bool) -> None:
    assert Attainment(met=met, counted=counted).holds(target) is holds


def test_a_share_of_nothing_is_no_share() -> None:
    assert Attainment(met=0, counted=0).ratio() is None
    assert Attainment(met=1, counted=4).ratio() == 0.25
