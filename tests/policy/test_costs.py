"""Every cost is whole numbers that never fall, and says by its revision what it counts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.config.profiles import load_profile
from headrace.model.price import PriceSpec
from headrace.model.profile import Profile
from headrace.policy.catalog import canonical, decode
from headrace.policy.fairness.costs import (
    SERVICE_MAX,
    Cost,
    KvCost,
    Linear,
    MixCost,
    MoneyCost,
    RequestCost,
    TokenCost,
    WorkCost,
    price,
    revision,
)
from headrace.policy.fairness.vtc import Vtc
from headrace.units import MICRO, NS_PER_S, REQUEST_TOKENS_MAX
from tests.plane.scenes import COSTS, H100, config

PROFILES = (H100, load_profile("a100-70b-tp4"), replace(H100, reference_batch=2, token_budget=2))
every_cost = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
counts = st.integers(0, REQUEST_TOKENS_MAX)


def service(cost: Cost, *tokens: int, profile: Profile = H100) -> int:
    return price(cost, "m", profile).service(*tokens)


@every_cost
@given(
    profile=st.sampled_from(PROFILES),
    tokens=st.tuples(counts, counts, counts),
    where=st.integers(0, 2),
    more=st.integers(1, 5_000),
)
def test_more_of_anything_never_costs_less(
    cost: Cost, profile: Profile, tokens: tuple[int, int, int], where: int, more: int
) -> None:
    larger = list(tokens)
    larger[where] += more
    assert service(cost, *tokens, profile=profile) >= 1
    assert service(cost, *tokens, profile=profile) <= service(cost, *larger, profile=profile)


@every_cost
@given(
    profile=st.sampled_from(PROFILES),
    tokens=st.tuples(counts, counts, counts),
    found=st.integers(0, 5_000),
)
def test_what_was_found_never_costs_more_than_what_was_computed(
    cost: Cost, profile: Profile, tokens: tuple[int, int, int], found: int
) -> None:
    uncached, cached, output = tokens
    computed = service(cost, uncached + found, cached, output, profile=profile)
    assert service(cost, uncached, cached + found, output, profile=profile) <= computed


@every_cost
@pytest.mark.parametrize("tokens", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 9_999, 1)])
def test_nothing_that_is_served_is_free(cost: Cost, tokens: tuple[int, int, int]) -> None:
    for profile in PROFILES:
        found = service(cost, *tokens, profile=profile)
        assert type(found) is int
        assert found >= 1
    free = PriceSpec(input=0, output=0)
    assert service(MoneyCost(as_of="gift", price=free), *tokens) == 1
    assert service(TokenCost(input_weight=1e-9, output_weight=1e-9, cached_weight=0), *tokens) == 1


@every_cost
def test_an_engine_that_lies_costs_its_tenant_no_more_than_a_bound(cost: Cost) -> None:
    most = REQUEST_TOKENS_MAX
    slow = replace(H100, kv_bytes_per_token=10**9)
    assert service(cost, most, most, most, profile=slow) <= SERVICE_MAX


@every_cost
def test_service_stands_for_the_gpu_time_of_the_reference_request(cost: Cost) -> None:
    made = price(cost, "m", H100)
    work = H100.work_ns(1_024, 0, 256)
    assert made.work_ns(made.service(1_024, 0, 256)) == work
    assert made.work_ns(10 * made.service(1_024, 0, 256)) == 10 * work
    assert made.work_ns(0) == 0


# What each counts ----------------------------------------------------------------------------


def test_by_the_request_length_is_ignored() -> None:
    assert service(RequestCost(), 1, 0, 1) == service(RequestCost(), 32_768, 0, 4_096) == MICRO


def test_an_output_token_weighs_what_the_profile_measured() -> None:
    step_ms = 6.06 + 0.0079 * 256 + 4.32e-5 * 256 * 1_024
    weight = pytest.approx(MICRO * step_ms / 256 / 0.0143, abs=1)
    assert service(TokenCost(), 0, 0, 1) == weight
    assert service(TokenCost(), 1, 0, 0) == MICRO
    assert service(TokenCost(), 0, 1, 0) == MICRO // 10


def test_declared_weights_replace_the_measured_ones() -> None:
    cost = TokenCost(input_weight=1.5, output_weight=2, cached_weight=0)
    assert service(cost, 1, 0, 0) == 1_500_000
    assert service(cost, 3, 100, 2) == 3 * 1_500_000 + 2 * 2_000_000


def test_paid_by_gpu_time_attention_and_context_are_not_free() -> None:
    assert service(WorkCost(), 9_000, 100, 50) == int(H100.work_ns(9_000, 100, 50))
    assert service(WorkCost(), 64_000, 0, 1) > 2 * service(WorkCost(), 32_000, 0, 1)
    assert service(WorkCost(), 100, 64_000, 1) > service(WorkCost(), 100, 0, 1)


def stepped(profile: Profile, uncached: int, cached: int, output: int) -> float:
    """Return byte-seconds held, token by token."""
    batch, costs = profile.reference_batch, profile.costs
    step = costs.step_ps(batch, batch * 1_024, 0, 0) / 1e12
    pace = profile.full_step_ns(0, 0) / 1e9 / profile.token_budget
    held = 0.0
    for context in range(cached, cached + uncached):
        held += (context + 0.5) * (pace + 2 * costs.mixed_half_e / 1e12 * (context + 0.5))
    held += sum((cached + uncached + made + 0.5) * step for made in range(output))
    return held * profile.kv_bytes_per_token


@pytest.mark.parametrize(
    "tokens", [(1_000, 0, 200), (1_000, 3_000, 0), (0, 4_000, 100), (16_384, 0, 1), (1, 0, 1)]
)
def test_kv_is_bytes_times_the_seconds_they_are_held(tokens: tuple[int, int, int]) -> None:
    found = service(KvCost(), *tokens) * 1_024
    assert found == pytest.approx(stepped(H100, *tokens), rel=1e-4, abs=1_024)


def test_in_memory_a_found_prefix_saves_the_time_to_compute_it_and_no_more() -> None:
    computed, found = service(KvCost(), 8_000, 0, 200), service(KvCost(), 0, 8_000, 200)
    assert found == pytest.approx(
        8_100 * 131_072 * 200 * H100.reference_step_ns / 1e9 / 1_024, 1e-3
    )
    assert computed > found


def test_money_is_the_price_list_in_billionths_of_a_dollar() -> None:
    listed = MoneyCost(
        as_of="2025-01",
        price=PriceSpec(input=0.5, output=1.5),
        models={"dear": PriceSpec(input=3, cached=0.3, output=15)},
    )
    assert price(listed, "m", H100).service(1_000, 100, 200) == 1_100 * 500 + 200 * 1_500
    assert price(listed, "dear", H100).service(1_000, 100, 200) == 3_000_000 + 30_000 + 3_000_000


def test_a_list_by_which_a_found_token_is_dearer_than_a_computed_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cached 2 is dearer than input 1"):
        MoneyCost(as_of="x", price=PriceSpec(input=1, cached=2, output=1))


def test_in_a_mix_a_full_pool_for_a_second_weighs_as_much_as_a_second_of_the_gpu() -> None:
    tokens = 2_000, 500, 300
    held = H100.held_token_ns(*tokens) / H100.kv_capacity_tokens
    assert held > NS_PER_S // 1_000
    prefill, decode = H100.work_ns(2_000, 500, 0), H100.work_ns(0, 2_500, 300)
    assert service(MixCost(), *tokens) == pytest.approx(prefill + decode + held, abs=2)
    parts = {"prefill_weight": prefill, "decode_weight": decode, "kv_weight": held}
    for name, expected in parts.items():
        alone = dict.fromkeys(parts, 0.0) | {name: 3.0}
        assert service(MixCost(**alone), *tokens) == pytest.approx(3 * expected, abs=3)


def test_a_mix_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one weight"):
        MixCost(prefill_weight=0, decode_weight=0, kv_weight=0)


# Revisions -----------------------------------------------------------------------------------


def test_a_revision_names_the_kind_and_tells_settings_apart() -> None:
    assert revision(TokenCost()) == "tokens-1"
    assert [revision(cost) for cost in (RequestCost(), WorkCost(), KvCost(), MixCost())] == [
        "request-1", "work-1", "kv-1", "mix-1",
    ]  # fmt: skip
    old = MoneyCost(as_of="2025-01", price=PriceSpec(input=1, output=3))
    others = (
        replace(old, as_of="2025-02"),
        replace(old, price=PriceSpec(input=1, output=2)),
        replace(old, models={"m": PriceSpec(input=1, output=3)}),
        TokenCost(cached_weight=0.2),
        TokenCost(output_weight=2),
        MixCost(kv_weight=2),
    )
    found = [revision(cost) for cost in (old, *others)]
    assert len(set(found)) == len(found)
    assert all(len(one) <= 24 for one in found)
    assert found[0].startswith("money-1-")
    written = MoneyCost(as_of="2025-01", price=PriceSpec(input=1.0, output=3.0))
    assert found[0] == revision(written), "1 and 1.0 are one price"


@every_cost
def test_a_price_carries_its_revision_and_survives_canonical_bytes(cost: Cost) -> None:
    content = canonical(config(fairness=Vtc(cost=cost)))
    back = decode(content).fairness
    assert back.cost == cost
    assert back.price("m", H100) == price(cost, "m", H100)
    assert back.price("m", H100).revision == revision(cost)


def test_a_kind_nobody_knows_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'gold'"):
        msgspec.json.decode(b'{"cost":{"kind":"gold"}}', type=Vtc)


def test_linear_is_the_sum_of_its_parts() -> None:
    assert Linear(request=5, uncached=10, cached=1, output=30).amount(7, 3, 2) == 138
