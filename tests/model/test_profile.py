"""Step times and request costs are exact, and add up."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.profile import Calibration, DecodeFit, MixedFit, Profile
from headrace.model.table import TableFit
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

POINTS = ((1, 13.2), (64, 13.4), (128, 15.1), (512, 33.2), (2_048, 109.7))
STAIRS = msgspec.structs.replace(
    H100,
    name="stairs",
    decode=None,
    mixed=None,
    table=TableFit(points=POINTS, h_ms=0.6, c_ms=0.0053, d_ms=8.1e-5, e_ms=3.1e-6),
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
    profile=st.sampled_from([H100, STAIRS]),
    uncached=st.integers(0, 5_000),
    cached=st.integers(0, 5_000),
    decodes=st.integers(0, 300),
    context=st.integers(0, 400_000),
    budget=st.integers(1, 600),
)
def test_prefill_time_is_the_sum_of_its_steps(
    profile: Profile, uncached: int, cached: int, decodes: int, context: int, budget: int
) -> None:
    total, at = 0, cached
    chunk = max(1, budget - decodes)
    for step, left in enumerate(range(uncached, 0, -chunk)):
        tokens = min(left, chunk)
        span = (at + tokens) ** 2 - at**2
        total += profile.step_ps(decodes, context + step * decodes, tokens, span)
        at += tokens
    assert profile.prefill_ns(uncached, cached, decodes, context, budget) == ps_to_ns(total)


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
        for profile in (H100, served, STAIRS):
            slower = profile.paced(2.5).step_ps(*args)
            assert slower == pytest.approx(2.5 * profile.step_ps(*args), rel=1e-5)
    with pytest.raises(ValueError, match="must take time"):
        H100.paced(0.0)


@pytest.mark.parametrize("profile", [H100, STAIRS])
def test_scaling_scales_every_coefficient(profile: Profile) -> None:
    twice = profile.costs.scaled(2 * MICRO)
    for args in ((32, 30_000, 0, 0), (32, 30_000, 480, 480**2)):
        assert twice.step_ps(*args) == pytest.approx(2 * profile.costs.step_ps(*args), rel=1e-9)
    assert profile.costs.scaled(MICRO) == profile.costs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_running": 8}, "above max_running"),
        ({"kv_capacity_tokens": Tokens(1_024)}, "does not fit"),
        ({"calibration": Calibration(offset_ms=-7.0)}, "must take time"),
        ({"mixed": None}, "alone"),
        ({"decode": None, "mixed": None}, "alone"),
        ({"table": STAIRS.table}, "alone"),
    ],
)
def test_profile_no_engine_could_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(H100, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode": H100.decode}, "alone"),
        ({"calibration": Calibration(offset_ms=-14.0)}, "must take time"),
        ({"token_budget": 64, "table": TableFit(points=((1, 5.0), (64, 5.0)), c_ms=0, d_ms=0, e_ms=0)},
         "prompt token must take time"),
    ],
)  # fmt: skip
def test_table_no_engine_could_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(STAIRS, **changes)


@pytest.mark.parametrize(
    "points", [((1, 2.0), (1, 3.0)), ((5, 2.0), (1, 3.0)), ((1, 2.0), (2, 1.0))]
)
def test_table_must_rise(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="points must rise"):
        TableFit(points=points, c_ms=0, d_ms=0, e_ms=0)


def test_table_is_read_with_the_place_of_its_error() -> None:
    raw = msgspec.to_builtins(STAIRS)
    assert msgspec.convert(raw, Profile) == STAIRS
    raw["table"]["points"] = [[1, 2.0]]
    with pytest.raises(msgspec.ValidationError, match=r"length >= 2.*\$\.table\.points"):
        msgspec.convert(raw, Profile)


@pytest.mark.parametrize(
    ("tokens", "level"),
    [(1, 13.2), (64, 13.4), (96, 14.25), (512, 33.2), (1_280, 71.45), (4_096, 211.7)],
)
def test_table_step_lies_on_the_line_between_its_points(tokens: int, level: float) -> None:
    assert STAIRS.step_ps(0, 0, tokens, 0) == pytest.approx(level * 1e9)
    attention = 3.1e-6 * tokens**2 / 2
    assert STAIRS.step_ps(0, 0, tokens, tokens**2) == pytest.approx((level + attention) * 1e9)
    # Decodes count as tokens too, alone or beside a prompt.
    own = 0.6 + 0.0053 + 8.1e-5 * 900
    assert STAIRS.step_ps(1, 900, tokens - 1, 0) == pytest.approx((level + own) * 1e9)


@given(tokens=st.integers(1, 5_000), more=st.integers(0, 5_000), decodes=st.integers(0, 200))
def test_more_tokens_never_make_a_table_step_shorter(tokens: int, more: int, decodes: int) -> None:
    for profile in (STAIRS, STAIRS.paced(0.37)):
        less = profile.step_ps(decodes, 0, tokens, 0)
        assert less <= profile.step_ps(decodes, 0, tokens + more, 0)


def test_estimates_of_a_table_are_its_own_steps_where_it_works() -> None:
    batch, context = STAIRS.reference_batch, STAIRS.reference_context
    step = STAIRS.step_ps(batch, batch * context, 0, 0)
    assert batch * STAIRS.token_ns(context) == pytest.approx(ps_to_ns(step), abs=batch)
    assert STAIRS.service_weights()[1] == pytest.approx(
        MICRO * step / batch / ((33.2e9 - 13.2e9) / 511), rel=1e-6
    )
    # A full step is the sum of what its tokens cost: the base and its decodes, then each prompt token.
    full = ps_to_ns(STAIRS.step_ps(256, 256 * 1_024, 256, 0))
    assert STAIRS.full_step_ns(256, 256 * 1_024) == full
    costed = 256 * STAIRS.token_ns(1_024) + STAIRS.work_ns(256, 0, 0)
    assert costed == pytest.approx(full, rel=0.1)


def test_unknown_coefficient_is_refused_with_its_path() -> None:
    raw = msgspec.to_builtins(H100)
    raw["mixed"]["f_ms"] = 1.0
    with pytest.raises(msgspec.ValidationError, match=r"f_ms.*\$\.mixed"):
        msgspec.convert(raw, Profile)
