"""Conversions are exact, and rounding happens once and in the direction that is said."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.units import (
    BLOCK_TOKENS,
    MIB,
    MICRO,
    NS_PER_S,
    PS_PER_NS,
    DurationNs,
    InstantNs,
    blocks_for,
    ceil_div,
    elapsed,
    later,
    mib_ceil,
    ms,
    ps_from_ms,
    ps_to_ns,
    seconds,
    time_for,
    to_ms,
    to_seconds,
)


def test_a_clock_that_ran_backwards_is_refused() -> None:
    assert elapsed(InstantNs(3), InstantNs(10)) == 7
    assert elapsed(InstantNs(3), InstantNs(3)) == 0
    with pytest.raises(AssertionError, match="clock ran backwards"):
        elapsed(InstantNs(10), InstantNs(9))


def test_an_instant_moves_both_ways() -> None:
    assert later(InstantNs(10), DurationNs(5)) == 15
    assert later(InstantNs(10), -15) == -5


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (1, 1_000_000), (0.5, 500_000), (2.0000004, 2_000_000), (2.0000006, 2_000_001)],
)
def test_milliseconds_are_rounded_once_to_nanoseconds(value: float, expected: int) -> None:
    assert ms(value) == expected
    assert isinstance(ms(value), int)


def test_seconds_and_milliseconds_agree() -> None:
    assert seconds(1.5) == ms(1_500) == 1_500_000_000
    assert to_seconds(seconds(2.25)) == 2.25
    assert to_ms(ms(0.125)) == 0.125


def test_coefficients_are_whole_picoseconds() -> None:
    assert ps_from_ms(6.06) == 6_060_000_000
    assert ps_from_ms(4.32e-5) == 43_200


@given(st.integers(0, 10**18))
def test_an_engine_event_shows_outside_at_the_nanosecond_it_has_reached(value: int) -> None:
    assert ps_to_ns(value) * PS_PER_NS <= value < (ps_to_ns(value) + 1) * PS_PER_NS


def test_work_divided_by_a_rate_is_a_duration() -> None:
    assert time_for(NS_PER_S, MICRO) == NS_PER_S
    assert time_for(NS_PER_S, MICRO // 2) == 2 * NS_PER_S
    assert time_for(10, 3 * MICRO) == 3
    with pytest.raises(AssertionError, match="no capacity"):
        time_for(1, 0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_a_block_begun_is_a_block_taken(tokens: int, blocks: int) -> None:
    assert BLOCK_TOKENS == 16
    assert blocks_for(tokens) == blocks


@pytest.mark.parametrize(("size", "mib"), [(0, 0), (1, 1), (MIB, 1), (MIB + 1, 2)])
def test_mebibytes_are_rounded_up(size: int, mib: int) -> None:
    assert mib_ceil(size) == mib


@given(st.integers(0, 10**30), st.integers(1, 10**20))
def test_quotients_round_up_exactly_at_any_size(numerator: int, denominator: int) -> None:
    assert ceil_div(numerator, denominator) == ceil(Fraction(numerator, denominator))


@given(st.integers(0, 10**12), st.integers(1, 10**9))
def test_exact_quotients_do_not_round_up(quotient: int, denominator: int) -> None:
    assert ceil_div(quotient * denominator, denominator) == quotient
