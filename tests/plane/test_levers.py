"""Levers of an operator in the plane: whom a budget of output caps, and what smaller steps change."""

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.deployment import ClassSpec, TenantSpec
from headrace.model.ids import TenantId
from headrace.policy.catalog import PlaneConfig, Window
from headrace.policy.fairness.costs import Cost
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.predict.ceiling import OutputBudget
from headrace.policy.predict.output import OutputPrediction
from headrace.units import BLOCK_TOKENS
from tests.plane.scenes import COSTS, MODEL, Driver, config

PATIENT = (ClassSpec(name="chat", ttft_ms=60_000.0),)
TENANT = TenantSpec(name="a", tpm_limit=1_000_000)


def budgeted(**told: Any) -> Driver:
    classes = (ClassSpec(name="chat"), ClassSpec(name="long"))
    return Driver(config(tenants=(TENANT,), classes=classes, output_budget=OutputBudget(**told)))


def test_who_names_no_limit_is_sent_predicted_and_charged_by_the_budget() -> None:
    plain, made = budgeted(), budgeted(tokens=100)
    free, capped = (one.live(one.arrive("a", 1_000)) for one in (plain, made))
    assert made.sent()[0].output_limit == 100
    assert (capped.demand.output_p50, capped.demand.output_p90) == (100, 100)
    prior = OutputPrediction().prior_p90
    assert free.demand.kv_blocks - capped.demand.kv_blocks == (prior - 100) // BLOCK_TOKENS + 1
    assert made.plane.state.ledger.quotas[TenantId("a")].reserved == 1_100
    assert plain.plane.state.ledger.quotas[TenantId("a")].reserved == 1_000 + prior


@pytest.mark.parametrize("asked", [50, 3_000])
def test_who_names_a_limit_keeps_it_and_its_predicted_reserve(asked: int) -> None:
    plain, made = budgeted(), budgeted(tokens=100)
    before = plain.live(plain.arrive("a", 1_000, max_output=asked))
    live = made.live(made.arrive("a", 1_000, max_output=asked))
    assert made.sent()[0].output_limit == asked
    assert live.demand == before.demand


@pytest.mark.parametrize(
    ("told", "chat", "long"),
    [
        ({}, 16_384, 16_384),
        ({"tokens": 500}, 500, 500),
        ({"tokens": 500, "classes": {"long": 4_000}}, 500, 4_000),
        ({"tokens": 500, "classes": {"long": None}}, 500, 16_384),
        ({"tokens": 500, "models": {"m": 300}, "classes": {"long": None}}, 300, 300),
        ({"models": {"m": 30_000}}, 16_384, 16_384),
        ({"classes": {"chat": 1}}, 1, 16_384),
    ],
)
def test_the_class_overrules_the_common_number_and_the_model_is_beside_it(
    told: dict[str, Any], chat: int, long: int
) -> None:
    made = budgeted(**told)
    for name in ("chat", "long"):
        made.arrive("a", 1_000, slo_class=name)
    assert [one.output_limit for one in made.sent()] == [chat, long]


def test_what_waits_through_a_change_is_sent_under_the_budget_it_came_under() -> None:
    def settings(tokens: int) -> PlaneConfig:
        return config(classes=PATIENT, output_budget=OutputBudget(tokens=tokens))

    made = Driver(settings(700))
    first, second, waiting = (made.arrive("a", tokens) for tokens in (60_000, 20_000, 1_000))
    assert made.live(waiting).attempt is None
    made.configure(settings(20), revision=2)
    for one in (first, second, waiting):
        made.first(made.live(one).attempt)
    last = made.arrive("a", 1_000)
    sent = [(one.request, one.output_limit) for one in made.sent()]
    assert sent == [(first, 700), (second, 700), (waiting, 700), (last, 20)]


def test_what_is_known_of_a_request_beforehand_goes_by_the_budget() -> None:
    plain, made = budgeted(), budgeted(tokens=10)
    request = replace(plain.live(plain.arrive("a", 1_000)).request, id=99)
    assert made.plane.quote(request).service < plain.plane.quote(request).service


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_smaller_steps_change_forecasts_and_no_counters_unit(cost: Cost) -> None:
    def settings(tokens: int | None) -> PlaneConfig:
        return config(fairness=Vtc(cost=cost), window=Window(step_tokens={"p": tokens}))

    made = Driver(settings(None))
    whole = made.live(made.arrive("a", 4_000))
    counter = dict(made.plane.state.ledger.shares[MODEL].counters)
    prices = made.plane.settings.prices
    made.configure(settings(64), revision=2)
    assert made.plane.settings.prices == prices
    assert made.plane.state.ledger.shares[MODEL].counters == counter
    small = made.live(made.arrive("a", 4_000))
    assert small.demand.prefill_ns > whole.demand.prefill_ns
