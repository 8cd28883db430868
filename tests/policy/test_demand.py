"""What one request costs: one record that every decider reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.deployment import ModelSpec, PoolSpec
from headrace.model.ids import ModelName, RequestId, TenantId
from headrace.model.request import GIVEN, Request
from headrace.policy.predict.demand import demand, output_limit
from headrace.units import Tokens, blocks_for
from tests.plane.scenes import H100, small

MODEL = ModelSpec(name="m", context_limit=10_000, output_limit=2_000, quantization="fp8")
POOL = PoolSpec(name="p", model="m", profile=H100, revision="7")


def asked(
    tokens: int, max_output: int | None = None, fan_out: int = 1, revision: str = GIVEN
) -> Request:
    return Request(
        id=RequestId(1),
        tenant=TenantId("a"),
        model=ModelName("m"),
        input_tokens=Tokens(tokens),
        max_output=None if max_output is None else Tokens(max_output),
        fan_out=fan_out,
        input_revision=revision,
    )


@pytest.mark.parametrize(
    ("tokens", "max_output", "limit"),
    [
        (100, None, 2_000),
        (100, 50, 50),
        (100, 9_999, 2_000),
        (9_500, None, 500),
        (9_500, 400, 400),
        (9_999, None, 1),
        (99_999, None, 1),  # the contract gate refuses it; the arithmetic still holds
        (100, 0, 1),
    ],
)
def test_the_caller_the_model_and_the_context_cap_the_answer(
    tokens: int, max_output: int | None, limit: int
) -> None:
    assert output_limit(asked(tokens, max_output), MODEL, POOL) == limit


def test_a_forecast_is_capped_by_what_the_caller_allows() -> None:
    free = demand(asked(100), MODEL, POOL, (200, 480))
    assert (free.output_p50, free.output_p90) == (200, 480)
    capped = demand(asked(100, 300), MODEL, POOL, (200, 480))
    assert (capped.output_p50, capped.output_p90) == (200, 300)
    tight = demand(asked(100, 20), MODEL, POOL, (200, 480))
    assert (tight.output_p50, tight.output_p90) == (20, 20)


def test_each_part_follows_its_formula() -> None:
    found = demand(asked(1_000), MODEL, POOL, (200, 480))
    assert found.prefill_ns == H100.prefill_ns(1_000, 0, 0, 0, 512)
    assert found.work_p50_ns == H100.work_ns(1_000, 0, 200)
    assert found.work_p90_ns == H100.work_ns(1_000, 0, 480)
    assert found.kv_blocks == blocks_for(1_480) == 93
    assert found.kv_bytes == 1_480 * 131_072
    step = H100.decode_step_ns(256, 256 * 1_024)
    assert found.residency_ns == found.prefill_ns + 200 * step
    assert found.kv_byte_seconds == found.kv_bytes * found.residency_ns // 10**9
    assert found.cached_tokens == 0, "prefix credit belongs to routing"


def test_every_part_names_its_predictor() -> None:
    found = demand(asked(1_000), MODEL, POOL, (200, 480))
    assert (found.profile_revision, found.model_revision) == ("h100-8b-tp1", "7")
    assert (found.quantization, found.input_revision) == ("fp8", "given")
    assert found.output_revision
    assert demand(asked(1_000, revision="x-1"), MODEL, POOL, (1, 1)).input_revision == "x-1"


def test_parallel_answers_cost_as_many_times() -> None:
    one, three = (demand(asked(1_000, fan_out=n), MODEL, POOL, (200, 480)) for n in (1, 3))
    assert three.work_p50_ns == 3 * one.work_p50_ns
    assert three.kv_bytes == 3 * one.kv_bytes
    assert three.kv_blocks == blocks_for(3 * 1_480)
    assert three.fan_out == 3


@given(st.integers(1, 7_000), st.integers(1, 2_000), st.integers(1, 2_000))
def test_more_tokens_never_cost_less(tokens: int, p50: int, more: int) -> None:
    small, large = (
        demand(asked(n), MODEL, POOL, (p50, p50 + more)) for n in (tokens, tokens + 500)
    )
    assert small.work_p50_ns < large.work_p50_ns
    assert small.prefill_ns <= large.prefill_ns
    assert small.kv_blocks <= large.kv_blocks
    assert small.work_p50_ns <= small.work_p90_ns
    assert small.output_p50 <= small.output_p90


@pytest.mark.parametrize(
    ("capacity", "tokens", "max_output", "limit"),
    [
        (4_096, 3_000, None, 1_096),
        (4_111, 3_000, None, 1_096),  # a part of a block holds nothing
        (4_096, 3_000, 400, 400),
        (4_096, 4_096, None, 1),
        (430_000, 3_000, None, 2_000),
    ],
)
def test_an_answer_ends_where_its_pool_ends(
    capacity: int, tokens: int, max_output: int | None, limit: int
) -> None:
    pool = PoolSpec(name="p", model="m", profile=small(capacity))
    assert output_limit(asked(tokens, max_output), MODEL, pool) == limit
    found = demand(asked(tokens, max_output), MODEL, pool, (9_000, 9_000))
    assert found.output_p50 == found.output_p90 == limit
