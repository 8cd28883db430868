"""A stream's gaps are counted exactly, in buckets and against its own bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.meter import GAP_BUCKETS, GAP_EDGES_NS, NO_STREAM, Meter, gap_bucket
from headrace.units import NS_PER_MS, InstantNs, ms


def meter(bound_ms: float = 80) -> Meter:
    return Meter(bound_ns=ms(bound_ms))


def test_edges_rise_and_are_inclusive() -> None:
    assert list(GAP_EDGES_NS) == sorted(set(GAP_EDGES_NS))
    for index, edge in enumerate(GAP_EDGES_NS):
        assert gap_bucket(edge) == index
        assert gap_bucket(edge + 1) == index + 1
    assert gap_bucket(0) == 0
    assert gap_bucket(10 * GAP_EDGES_NS[-1]) == GAP_BUCKETS - 1


def test_a_stream_of_no_token_has_no_times() -> None:
    assert meter().timing() == NO_STREAM


def test_the_first_token_makes_no_gap() -> None:
    one = meter()
    one.note(InstantNs(5))
    timing = one.timing()
    assert (timing.tokens, timing.first_at, timing.last_at) == (1, 5, 5)
    assert sum(timing.gap_counts) == 0
    assert timing.max_gap_ns == timing.gaps_over == 0


@pytest.mark.parametrize(("gap_ns", "over"), [(80 * NS_PER_MS, 0), (80 * NS_PER_MS + 1, 1)])
def test_a_gap_at_its_bound_holds_and_one_ns_more_does_not(gap_ns: int, over: int) -> None:
    one = meter()
    one.note(InstantNs(0))
    one.note(InstantNs(gap_ns))
    assert one.timing().gaps_over == over


def test_tokens_that_come_together_are_one_gap_and_zeros() -> None:
    one = meter()
    one.note(InstantNs(0))
    one.note(InstantNs(int(ms(30))), tokens=3)
    timing = one.timing()
    assert timing.tokens == 4
    assert timing.gap_counts[0] == 2
    assert timing.gap_counts[gap_bucket(ms(30))] == 1


@given(
    chunks=st.lists(st.tuples(st.integers(0, 10**11), st.integers(1, 5)), min_size=1, max_size=30),
    bound=st.integers(0, 10**10),
)
def test_gaps_sum_to_the_time_between_first_and_last_token(
    chunks: list[tuple[int, int]], bound: int
) -> None:
    one = Meter(bound_ns=ms(bound / NS_PER_MS))
    now, gaps = 1_000, [0] * sum(tokens - 1 for _, tokens in chunks)
    for place, (gap, tokens) in enumerate(chunks):
        now += gap
        one.note(InstantNs(now), tokens)
        gaps += [gap] if place else []
    timing = one.timing()
    assert timing.first_at is not None
    assert timing.last_at is not None
    assert timing.last_at - timing.first_at == sum(gaps)
    assert timing.tokens == len(gaps) + 1
    assert sum(timing.gap_counts) == timing.tokens - 1
    assert timing.max_gap_ns == max(gaps, default=0)
    assert timing.gaps_over == sum(gap > one.bound_ns for gap in gaps)
    for bucket, number in enumerate(timing.gap_counts):
        assert number == sum(gap_bucket(gap) == bucket for gap in gaps)
