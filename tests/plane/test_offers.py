"""Offered work is a mean until it changes by more than chance: then it is what it has become."""

from random import Random

import pytest

from headrace.plane.scale_state import Offers
from headrace.units import MICRO, NS_PER_S, InstantNs

TICK_S = 15
EACH_NS = NS_PER_S // 10


def offered(offers: Offers, tick: int, rate: float, rng: Random) -> float:
    """Offer one tick of independent requests, so many a second; return the work rate that is told after it."""
    at = tick * TICK_S + rng.expovariate(rate) if rate else float("inf")
    while at < (tick + 1) * TICK_S:
        offers.come(EACH_NS, InstantNs(round(at * NS_PER_S)))
        at += rng.expovariate(rate)
    return offers.look(InstantNs((tick + 1) * TICK_S * NS_PER_S)) / MICRO


def taught(rng: Random, rate: float, ticks: int = 20) -> Offers:
    offers = Offers(looked_at=InstantNs(0))
    for tick in range(ticks):
        offered(offers, tick, rate, rng)
    return offers


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("before", "after"), [(10.0, 40.0), (40.0, 10.0), (10.0, 0.0), (3.0, 0.5)])
def test_a_rise_and_a_fall_are_followed_within_a_tick(
    seed: int, before: float, after: float
) -> None:
    rng = Random(f"{seed}")
    told = offered(taught(rng, before), 20, after, rng)
    assert abs(told - after / 10) < 0.25 * abs(before - after) / 10


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.2, 2.0, 20.0])
def test_chance_is_neither_a_rise_nor_a_fall(seed: int, rate: float) -> None:
    rng = Random(f"{seed}")
    offers = taught(rng, rate)
    told = [offered(offers, tick, rate, rng) for tick in range(20, 120)]
    spread = (sum((one - rate / 10) ** 2 for one in told) / len(told)) ** 0.5
    # A decayed mean of a minute spreads by this; single ticks by nearly three times as much.
    assert spread < 1.7 * (rate / 120) ** 0.5 / 10


def test_few_requests_that_fail_to_come_are_no_fall() -> None:
    rng = Random("one")
    offers = taught(rng, 0.05)
    offers.come(EACH_NS, InstantNs(20 * TICK_S * NS_PER_S))
    before = offers.look(InstantNs(21 * TICK_S * NS_PER_S))
    after = offers.look(InstantNs(22 * TICK_S * NS_PER_S))
    assert before / 2 < after < before


def test_what_is_kept_is_bounded_whatever_comes() -> None:
    offers = Offers(looked_at=InstantNs(0))
    for nth in range(1_000):
        offers.come(10**15, InstantNs(nth))
    offers.look(InstantNs(TICK_S * NS_PER_S))
    assert all(0 <= kept < 1 << 63 for kept in offers.work_ns.values())
