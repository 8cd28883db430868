"""Shares divide by weight, and a lift never lowers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.fairness.costs import TokenCost
from headrace.policy.fairness.vtc import Vtc, lifted, share
from headrace.units import MICRO
from tests.plane.scenes import H100


@pytest.mark.parametrize(
    ("service", "weight", "expected"), [(10, 1, 10), (10, 3, 3), (2, 3, 0), (0, 5, 0)]
)
def test_a_share_is_rounded_down(service: int, weight: int, expected: int) -> None:
    assert share(service, weight) == expected


@pytest.mark.parametrize(
    ("own", "least", "last_out", "expected"),
    [
        (5, None, None, 5),
        (5, 9, None, 9),
        (5, 9, 100, 9),  # somebody waits: who left last does not matter
        (5, None, 7, 7),
        (5, 3, None, 5),
        (5, None, 3, 5),
        (0, 0, 8, 0),
    ],
)
def test_a_tenant_back_from_idle_has_earned_no_credit(
    own: int, least: int | None, last_out: int | None, expected: int
) -> None:
    assert lifted(own, least, last_out) == expected


@given(st.integers(0), st.none() | st.integers(0), st.none() | st.integers(0))
def test_a_counter_is_never_lowered(own: int, least: int | None, last: int | None) -> None:
    assert lifted(own, least, last) >= own


def test_exceptions_are_told_in_tokens_and_counted_in_service() -> None:
    weighed = TokenCost(input_weight=2)
    price = Vtc(cost=weighed).price("m", H100)
    asked = Vtc(aging_tokens_per_s=3, boost_tokens=500, memory_tokens=10, cost=weighed)
    assert asked.exceptions(price) == (6 * MICRO, 1_000 * MICRO, 20 * MICRO)
    assert Vtc().exceptions(price)[:2] == (0, 0), "none by default"


@given(st.integers(1, 10**12), st.integers(1, 100), st.integers(0, 10**12))
def test_a_share_is_whole_and_never_more_than_its_part(
    service: int, weight: int, more: int
) -> None:
    assert 0 <= service - share(service, weight) * weight < weight
    assert share(service + more, weight) >= share(service, weight)
