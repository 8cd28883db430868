"""Worked examples of demand: one unit of work and of memory for every decider."""

import pytest

from headrace.config.profiles import load_profile
from headrace.model.deployment import ModelSpec, PoolSpec
from headrace.model.ids import ModelName, RequestId, TenantId
from headrace.model.request import Request
from headrace.policy.fairness.costs import TokenCost, price
from headrace.policy.predict.demand import demand
from headrace.units import BLOCK_TOKENS, MIB, Tokens, ceil_div, mib_ceil
from tests.plane.scenes import Driver, config

PROFILE = load_profile("h100-8b-tp1")
MODEL = ModelSpec(name="m")
POOL = PoolSpec(name="p", model="m", profile=PROFILE)
SHORT, LONG = (100, 20), (32_768, 4_096)


def asked(tokens: int) -> Request:
    return Request(
        id=RequestId(1), tenant=TenantId("a"), model=ModelName("m"), input_tokens=Tokens(tokens)
    )


def test_ex_4_a_short_question_holds_15_mib_and_a_long_document_4608() -> None:
    short, long = (
        demand(asked(tokens), MODEL, POOL, (output, output)) for tokens, output in (SHORT, LONG)
    )
    assert short.kv_bytes == 15 * MIB
    assert long.kv_bytes == 4_608 * MIB


def test_ex_4_at_batch_32_the_long_one_is_over_a_thousand_times_the_work() -> None:
    short, long = (PROFILE.work_ns(tokens, 0, output, batch=32) for tokens, output in (SHORT, LONG))
    assert long > 1_000 * short


def test_ex_4_gates_fairness_and_router_see_it() -> None:
    made = Driver(config(pools=(POOL,)), replicas=2)
    made.arrive("a", SHORT[0], max_output=SHORT[1], slo_class="batch")
    made.arrive("b", LONG[0], max_output=LONG[1], slo_class="batch")
    short, long = (record.evidence for record in made.entries())
    assert long.demand.kv_blocks > 250 * short.demand.kv_blocks
    assert long.demand.work_p50_ns > 30 * short.demand.work_p50_ns
    assert long.budget.tokens_needed == sum(LONG)
    assert made.counter("b", "batch") > 100 * made.counter("a", "batch") > 0
    routed = [route.evidence.blocks for route in made.routes()]
    assert routed == [short.demand.kv_blocks, long.demand.kv_blocks]
    tokens = price(TokenCost(), "m", PROFILE)
    assert tokens.service(LONG[0], 0, LONG[1]) > 100 * tokens.service(SHORT[0], 0, SHORT[1])


def test_ex_8_replicas_are_rounded_up_and_exact_quotients_are_not() -> None:
    """R = ceil((s * lambda_w + Q / T_d) / C), in whole numbers: s 1.2, lambda 3, Q 45, T 30, C .8."""
    s_milli, lambda_milli, c_milli = 1_200, 3_000, 800
    queued_ms, drain_ms = 45_000, 30_000
    offered = s_milli * lambda_milli // 1_000
    drain = queued_ms * 1_000 // drain_ms
    assert (offered, drain) == (3_600, 1_500)
    assert ceil_div(offered + drain, c_milli) == 7
    assert ceil_div(7 * c_milli, c_milli) == 7, "exact"
    assert ceil_div(7 * c_milli + 1, c_milli) == 8
    assert ceil_div(1_200 + 400, 800) == 2, "where (1.2 + .4) / .8 in binary may say 3"


@pytest.mark.parametrize(("tokens", "p90"), [(8_200, 480)])
def test_ex_9_kv_is_1085_mib_and_1086_in_blocks(tokens: int, p90: int) -> None:
    pool = PoolSpec(name="p", model="m", profile=PROFILE)
    assert PROFILE.kv_bytes_per_token == 131_072
    found = demand(asked(tokens), MODEL, pool, (200, p90))
    assert mib_ceil(found.kv_bytes) == 1_085
    assert mib_ceil(found.kv_blocks * BLOCK_TOKENS * PROFILE.kv_bytes_per_token) == 1_086


def test_ex_9_the_memory_gate_compares_whole_blocks() -> None:
    made = Driver(config(pools=(POOL,)))
    made.arrive("a", 8_200)
    memory = made.entries()[0].decision.verdicts[2]
    assert memory.measured == ceil_div(8_200 + 480, 16) == 543
