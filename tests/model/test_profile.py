"""Step times and request costs are exact, and add up."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.profile import Calibration, DecodeFit, MixedFit, Profile
from headrace.units import MICRO, Tokens, ps_to_ns

H100 = Profile(
    name="h100-8b-tp1",
    source="test",
    hardware="H100",
    model="llama-3.1-8b",
    kv_bytes_per_token=131_072,
    kv_capacity_tokens=Tokens(430_000),
    reference_batch=256,
    decode=DecodeFit(a_ms=6.06, c_ms=0.0079, d_ms=4.32e-5),
    mixed=MixedFit(a_ms=6.15, knee=115, b_ms=0.0143, c_ms=0.0012, d_ms=4.25e-5, e_ms=2.19e-6),
)


def test_decode_step_follows_its_formula() -> None:
    expected_ns = round((6.06 + 0.0079 * 32 + 4.32e-5 * 32 * 1024) * 1e6)
    assert H100.decode_step_ns(32, 32 * 1024) == pytest.approx(expected_ns, abs=1)


def test_mixed_step_follows_its_formula() -> None:
    span = 512**2 - 32**2
    expected = 6.15 + 0.0143 * (512 - 115) + 0.0012 * 32 + 4.25e-5 * 9_000 + 2.19e-6 * span / 2
    assert H100.step_ps(32, 9_000, 480, span) == pytest.approx(expected * 1e9)


def test_tokens_below_the_knee_ride_free() -> None:
    assert H100.step_ps(0, 0, 10, 0) == H100.step_ps(0, 0, 115, 0) == 6_150_000_000


def test_a_long_document_is_over_a_thousand_short_questions() -> None:
    # EX-4
    short = H100.work_ns(100, 0, 20, batch=32)
    long = H100.work_ns(32_768, 0, 4_096, batch=32)
    assert long > 1_000 * short
    assert 100 * H100.kv_bytes_per_token + 20 * H100.kv_bytes_per_token == 15 * 2**20
    assert (32_768 + 4_096) * H100.kv_bytes_per_token == 4_608 * 2**20


def test_work_follows_its_formula() -> None:
    attention = 2.19e-6 * (1_200**2 - 200**2) / 2
    each = 6.06 / 256 + 0.0079 + 4.32e-5 * (1_200 + 50)
    assert H100.work_ns(1_000, 200, 100) == pytest.approx(
        (0.0143 * 1_000 + attention + 100 * each) * 1e6, abs=2
    )


def test_output_work_is_that_of_its_tokens_at_their_mean_context() -> None:
    whole = H100.work_ns(1_000, 0, 100) - H100.work_ns(1_000, 0, 0)
    assert 100 * H100.token_ns(1_050) == pytest.approx(whole, abs=100)


def test_cached_prompt_costs_less_than_computed_prompt() -> None:
    assert H100.work_ns(500, 500, 10) < H100.work_ns(1_000, 0, 10)
    assert H100.work_ns(0, 0, 0) == 0


@given(
    uncached=st.integers(0, 5_000),
    cached=st.integers(0, 5_000),
    decodes=st.integers(0, 300),
    context=st.integers(0, 400_000),
    budget=st.integers(1, 600),
)
def test_prefill_time_is_the_sum_of_its_steps(
    uncached: int, cached: int, decodes: int, context: int, budget: int
) -> None:
    total, at = 0, cached
    chunk = max(1, budget - decodes)
    for step, left in enumerate(range(uncached, 0, -chunk)):
        tokens = min(left, chunk)
        span = (at + tokens) ** 2 - at**2
        total += H100.step_ps(decodes, context + step * decodes, tokens, span)
        at += tokens
    assert H100.prefill_ns(uncached, cached, decodes, context, budget) == ps_to_ns(total)


def test_output_token_weighs_its_share_of_a_reference_step() -> None:
    w_p, w_d = H100.service_weights()
    assert w_p == MICRO
    assert w_d / MICRO == pytest.approx((6.06 / 256 + 0.0079 + 4.32e-5 * 1_024) / 0.0143)


def test_calibration_is_linear_in_step_time() -> None:
    served = msgspec.structs.replace(H100, calibration=Calibration(offset_ms=-0.22, scale=1.27))
    for args in ((32, 30_000, 0, 0), (32, 30_000, 480, 480**2)):
        raw = H100.step_ps(*args)
        # The small coefficients are a few thousand ps: rounding shows in the sixth digit.
        assert served.step_ps(*args) == pytest.approx(-0.22e9 + 1.27 * raw, rel=1e-5)


def test_a_slower_replica_takes_longer_for_every_step() -> None:
    served = msgspec.structs.replace(H100, calibration=Calibration(offset_ms=0.5, scale=1.27))
    for args in ((32, 30_000, 0, 0), (32, 30_000, 480, 480**2)):
        for profile in (H100, served):
            slower = profile.paced(2.5).step_ps(*args)
            assert slower == pytest.approx(2.5 * profile.step_ps(*args), rel=1e-5)
    with pytest.raises(ValueError, match="must take time"):
        H100.paced(0.0)


def test_scaling_scales_every_coefficient() -> None:
    twice = H100.costs.scaled(2 * MICRO)
    for args in ((32, 30_000, 0, 0), (32, 30_000, 480, 480**2)):
        assert twice.step_ps(*args) == 2 * H100.costs.step_ps(*args)
    assert H100.costs.scaled(MICRO) == H100.costs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_running": 8}, "above max_running"),
        ({"kv_capacity_tokens": Tokens(1_024)}, "does not fit"),
        ({"calibration": Calibration(offset_ms=-7.0)}, "must take time"),
    ],
)
def test_profile_no_engine_could_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(H100, **changes)


def test_unknown_coefficient_is_refused_with_its_path() -> None:
    raw = msgspec.to_builtins(H100)
    raw["mixed"]["f_ms"] = 1.0
    with pytest.raises(msgspec.ValidationError, match=r"f_ms.*\$\.mixed"):
        msgspec.convert(raw, Profile)
