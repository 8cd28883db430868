"""Few numbers for many: each percentile was measured, each interval has its table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.meter import GAP_BUCKETS, GAP_EDGES_NS
from headrace.report.stats import (
    decile_edges,
    decile_of,
    gap_quantiles,
    interval,
    nearest_rank,
    quantiles,
    ratio,
    rounded,
    student_t,
)
from headrace.units import ms


@pytest.mark.parametrize(
    ("percent", "expected"), [(5, 15), (30, 20), (40, 20), (50, 35), (99, 50), (100, 50)]
)
def test_a_percentile_is_the_value_of_nearest_rank(percent: int, expected: int) -> None:
    assert nearest_rank([15, 20, 35, 40, 50], percent) == expected


@given(st.lists(st.integers(0, 10**12), min_size=1), st.integers(1, 100))
def test_at_least_that_share_does_not_exceed_a_percentile(values: list[int], percent: int) -> None:
    ordered = sorted(values)
    found = nearest_rank(ordered, percent)
    assert found in values
    assert sum(v <= found for v in values) * 100 >= percent * len(values)
    assert sum(v < found for v in values) * 100 < percent * len(values)


def test_nothing_has_no_percentiles() -> None:
    assert quantiles([]) is None
    assert gap_quantiles([0] * GAP_BUCKETS, 0) is None
    assert decile_edges([]) == ()


def test_pooled_gaps_are_told_by_the_upper_edge_of_their_bucket() -> None:
    counts = [0] * GAP_BUCKETS
    counts[0], counts[10], counts[-1] = 50, 49, 1
    told = gap_quantiles(counts, ms(45_000))
    assert told is not None
    assert (told.count, told.p50_le_ns, told.p99_le_ns) == (100, GAP_EDGES_NS[0], GAP_EDGES_NS[10])
    assert told.max_ns == ms(45_000)


def test_above_the_last_edge_the_largest_gap_stands_for_the_bucket() -> None:
    counts = [0] * GAP_BUCKETS
    counts[-1] = 3
    told = gap_quantiles(counts, ms(45_000))
    assert told is not None
    assert told.p50_le_ns == told.p99_le_ns == ms(45_000)


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=200))
def test_every_value_is_in_one_decile_and_equal_values_share_it(values: list[int]) -> None:
    edges = decile_edges(values)
    assert len(edges) == 10
    assert max(values) == edges[-1]
    for value in values:
        tenth = decile_of(edges, value)
        assert value <= edges[tenth]
        assert tenth == 0 or edges[tenth - 1] < value


def test_the_interval_of_five_values_is_students() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3
    assert found.half_width == pytest.approx(2.776 * (2.5 / 5) ** 0.5)
    assert (found.low, found.high) == (3 - found.half_width, 3 + found.half_width)


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (20, 2.086), (24, 2.086), (25, 2.060), (10**6, 1.980)]
)
def test_between_rows_of_the_table_the_wider_one_counts(freedom: int, value: float) -> None:
    assert student_t(freedom) == value


def test_written_floats_have_six_digits_and_no_negative_zero() -> None:
    assert rounded(1 / 3) == 0.333333
    assert str(rounded(-1e-9)) == "0.0"
    assert ratio(1, 0) is None
