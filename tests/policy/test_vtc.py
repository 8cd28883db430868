"""Service is exact integers, shares divide by weight, and a lift never lowers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.fairness.vtc import Cost, Rates, Vtc, Worked, lifted, share
from headrace.units import MICRO
from tests.plane.scenes import H100


def test_an_output_token_weighs_what_the_profile_measured() -> None:
    rates = Vtc().rates(H100)
    step_ms = 6.06 + 0.0079 * 256 + 4.32e-5 * 256 * 1_024
    assert rates.uncached == MICRO
    assert rates.output == pytest.approx(MICRO * step_ms / 256 / 0.0143, abs=1)
    assert rates.cached == MICRO // 10


def test_declared_weights_replace_the_measured_ones() -> None:
    rates = Vtc(input_weight=1.5, output_weight=2, cached_weight=0).rates(H100)
    assert (rates.uncached, rates.cached, rates.output) == (1_500_000, 0, 2_000_000)


def test_no_token_is_free_however_small_its_weight() -> None:
    rates = Vtc(input_weight=1e-9, output_weight=1e-9).rates(H100)
    assert (rates.uncached, rates.output) == (1, 1)


def test_service_is_the_sum_of_its_parts() -> None:
    rates = Rates(uncached=10, cached=1, output=30)
    assert rates.service(7, 3, 2) == 133
    assert rates.service(0, 0, 0) == 0


def test_a_tenant_pays_in_tokens_unless_told_to_pay_by_gpu_time() -> None:
    assert Vtc().price(H100) == Vtc().rates(H100)
    assert Vtc(cost=Cost.WORK).price(H100) == Worked(H100)


def test_paid_by_gpu_time_attention_and_context_are_not_free() -> None:
    price = Worked(H100)
    assert price.service(9_000, 100, 50) == int(H100.work_ns(9_000, 100, 50))
    assert price.service(64_000, 0, 1) > 2 * price.service(32_000, 0, 1)
    assert price.service(100, 64_000, 1) > price.service(100, 0, 1)
    assert price.service(0, 0, 0) == 1, "what is computed at all is never free"
    assert price.work_ns(1_234) == 1_234


def test_service_in_tokens_stands_for_about_its_gpu_time() -> None:
    rates = Vtc().rates(H100)
    work = H100.work_ns(1_000, 0, 200)
    assert rates.work_ns(rates.service(1_000, 0, 200)) == pytest.approx(work, rel=0.15)
    assert rates.work_ns(0) == 0


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
