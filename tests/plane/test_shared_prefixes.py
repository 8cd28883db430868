"""Who computes a prefix pays for computing it, who finds it pays for finding it, as the engine says."""

from typing import Any

import pytest

from headrace.model.slo import Outcome
from headrace.policy.fairness.costs import Cost, KvCost, RequestCost, TokenCost, price
from headrace.policy.fairness.vtc import Vtc
from tests.plane import invariants
from tests.plane.scenes import COSTS, H100, Driver, config, usage

EVERY = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
PROMPT, SHARED, OUTPUT, WEIGHT = 4_500, 4_096, 50, 1
PREFIX: dict[str, Any] = {"prefix": tuple(range(8)), "prefix_tokens": 512}


def paid(cost: Cost, cached: int, output: int = OUTPUT) -> int:
    """Return what a prompt costs of which so much was found."""
    return price(cost, "m", H100).service(PROMPT - cached, cached, output) // WEIGHT


def two(cost: Cost) -> Driver:
    """Return a plane in which a's prompt was computed, and b's, which begins alike, is on its way."""
    made = Driver(config(fairness=Vtc(cost=cost)))
    first = made.arrive("a", PROMPT, **PREFIX)
    made.first(made.live(first).attempt)
    made.end(made.live(first).attempt, usage=usage(PROMPT, OUTPUT), timing=made.timing(OUTPUT))
    made.arrive("b", PROMPT, **PREFIX)
    return made


def end(made: Driver, cached: int) -> None:
    attempt = made.live(2).attempt
    made.first(attempt)
    told = usage(PROMPT, OUTPUT, cached)
    made.end(attempt, usage=told, timing=made.timing(OUTPUT))
    invariants.over(made.plane)


@EVERY
def test_what_is_expected_to_be_found_is_charged_as_found_at_dispatch(cost: Cost) -> None:
    made = two(cost)
    assert made.counter("a") == paid(cost, 0)
    (flight,) = made.plane.state.ledger.flights.values()
    assert flight.cached_tokens == SHARED
    assert flight.charged == paid(cost, SHARED, flight.predicted)


@EVERY
@pytest.mark.parametrize("found", [0, 1_024, SHARED, PROMPT - 1], ids="found_{}".format)
def test_a_wrong_expectation_is_charged_or_refunded_by_what_the_engine_found(
    cost: Cost, found: int
) -> None:
    made = two(cost)
    before = made.counter("b") - next(iter(made.plane.state.ledger.flights.values())).charged
    end(made, found)
    assert made.counter("b") - before == paid(cost, found)


@EVERY
def test_what_another_finds_costs_whoever_computed_it_nothing_and_gives_nothing_back(
    cost: Cost,
) -> None:
    made = two(cost)
    before = made.counter("a")
    end(made, SHARED)
    for _ in range(3):
        found = made.arrive("c", PROMPT, **PREFIX)
        made.first(made.live(found).attempt)
        told = usage(PROMPT, OUTPUT, SHARED)
        made.end(made.live(found).attempt, usage=told, timing=made.timing(OUTPUT))
    assert made.counter("a") == before == paid(cost, 0)


@EVERY
def test_a_prefix_that_was_sent_for_and_never_computed_is_not_paid_for(cost: Cost) -> None:
    made = Driver(config(fairness=Vtc(cost=cost)))
    first = made.arrive("a", PROMPT, **PREFIX)
    made.leave(first)
    assert made.counter("a") == 0
    second = made.arrive("a", PROMPT, **PREFIX)
    made.end(made.live(second).attempt, Outcome.ERROR)
    assert made.counter("a") == 0
    invariants.over(made.plane)


def test_riding_is_cheap_in_tokens_and_never_free() -> None:
    rest = paid(TokenCost(), 0) - paid(TokenCost(), SHARED)
    assert rest == SHARED * 900_000 // WEIGHT, "nine tenths of the prefix"
    assert paid(TokenCost(cached_weight=1.0), SHARED) == paid(TokenCost(), 0)
    nothing = TokenCost(cached_weight=0)
    assert 0 < paid(nothing, SHARED) < paid(TokenCost(), SHARED)
    assert paid(RequestCost(), 0) == paid(RequestCost(), SHARED)


def test_in_memory_a_rider_pays_for_the_whole_context_that_it_holds() -> None:
    """Whoever else holds the blocks: its share would hang on when others come and go."""
    decode = KvCost()
    longer, shorter = paid(decode, SHARED, 2_000), paid(decode, SHARED, 1_000)
    alone = price(decode, "m", H100)
    assert longer - shorter > (PROMPT * 1_000 * H100.reference_step_ns) * 128 // 10**9 // WEIGHT
    assert longer == alone.service(PROMPT - SHARED, SHARED, 2_000) // WEIGHT
