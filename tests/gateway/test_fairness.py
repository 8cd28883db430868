"""Shares, starvation and counters that never fall: what two looks at a plane tell."""

import pytest

from headrace.gateway.fairness import (
    WINDOW_NS,
    Rising,
    Shares,
    Standing,
    Who,
    competing,
    counters,
    in_flight,
)
from headrace.gateway.labels import Labels, kept, opened
from headrace.model.deployment import ClassSpec, PoolSpec, TenantSpec
from headrace.model.ids import TenantId
from headrace.plane.accounts import Served
from headrace.units import NS_PER_S, InstantNs
from tests.plane.scenes import MODEL, Driver, S, config, small, usage

A, B, C = ((MODEL, TenantId(name)) for name in "abc")


def look(**weighted: int) -> dict[Who, Standing]:
    """Return what competes: `a` of weight 3, others of weight 1."""
    return {
        (MODEL, TenantId(name)): Standing("chat", 3 if name == "a" else 1, had, 0)
        for name, had in weighted.items()
    }


def at(seconds: float) -> InstantNs:
    return InstantNs(round(seconds * NS_PER_S))


def test_equal_progress_by_weight_is_no_deviation() -> None:
    shares = Shares()
    assert shares.deviations(look(a=10, b=500), at(1)) == {}
    assert shares.deviations(look(a=60, b=550), at(60)) == {}, "a minute is not over"
    assert shares.deviations(look(a=110, b=600), at(61)) == {A: 0, B: 0}


def test_a_deviation_is_share_less_fair_share() -> None:
    shares = Shares()
    shares.deviations(look(a=0, b=0), at(0))
    assert shares.deviations(look(a=100, b=300), at(60)) == pytest.approx({A: -0.25, B: 0.25})


def test_only_those_who_competed_all_the_while_are_compared() -> None:
    shares = Shares()
    shares.deviations(look(a=0, b=0), at(0))
    gap = look(a=100, b=100, c=900)
    gap[A] = Standing("chat", 3, 100, 1)
    assert shares.deviations(gap, at(60)) == {}, "a's queue was empty meanwhile, c was not there"
    assert shares.deviations(look(a=1, b=2), at(60.5)) == pytest.approx({A: -0.15, B: 0.15})


def test_nothing_served_tells_nothing() -> None:
    shares = Shares()
    shares.deviations(look(a=5, b=5), at(0))
    assert shares.deviations(look(a=5, b=5), at(60)) == {}


def test_looks_are_bounded_whatever_the_number_of_scrapes() -> None:
    shares = Shares()
    for nth in range(2_000):
        shares.deviations(look(a=nth, b=nth), at(nth / 10))
    assert len(shares._looks) <= WINDOW_NS // NS_PER_S + 2
    assert shares.deviations(look(a=2_000, b=2_000), at(200)) == {A: 0, B: 0}


def test_sparse_scrapes_compare_over_what_there_is() -> None:
    shares = Shares()
    for nth, when in enumerate((0, 45)):
        assert shares.deviations(look(a=nth, b=nth), at(when)) == {}
    assert shares.deviations(look(a=2, b=2), at(90)) == {A: 0, B: 0}


def test_who_lends_its_turn_does_not_compete() -> None:
    pool = PoolSpec(name="p", model="m", profile=small(8_192, running=1))
    made = Driver(config(pools=(pool,)))
    for tenant in "aab":
        made.arrive(tenant, 100)
    made.arrive("c", 100, slo_class="batch")
    named = [TenantId(name) for name in "abcz"]
    assert list(competing(made.plane, {}, named)) == [A, B]


def test_what_goes_on_counts_as_far_as_the_last_tick_told() -> None:
    heavy = ClassSpec(name="heavy", ttft_ms=60_000.0, weight=2)
    made = Driver(config(classes=(heavy,), tenants=(TenantSpec(name="a", weight=3),)), replicas=2)
    price = made.plane.settings.prices[MODEL]
    attempts = [made.live(made.arrive()).attempt for _ in range(2)]
    assert in_flight(made.plane) == {}, "no first token, no service yet"
    made.first(attempts[0])
    assert in_flight(made.plane)[A].service == price.service(1_000, 0, 1)
    made.tick((attempts[0], 40))
    live = in_flight(made.plane)[A]
    assert (live.uncached, live.output) == (1_000, 40)
    assert (live.service, live.weighted) == (
        price.service(1_000, 0, 40),
        price.service(1_000, 0, 40) // 3,
    )
    made.end(attempts[0], usage=usage(1_000, 41))
    assert in_flight(made.plane) == {}
    labels = Labels(made.plane.settings.config, 1)
    found = labels.served(opened(kept(made.plane.state.accounts)), {A: live, B: live})
    assert found["m", "a"].output == 81
    assert found["m", "other"].output == 40


def test_counters_are_read_of_those_asked_for() -> None:
    made = Driver()
    made.serve(made.arrive(), 10)
    found = counters(made.plane, [TenantId("a"), TenantId("z")])
    assert found == {A: made.counter("a")}


def test_a_counter_never_falls() -> None:
    rising = Rising()
    shown = [rising.at_least(value, "service", "m", "a") for value in (5, 9, 7, 8, 12)]
    assert shown == [5, 9, 9, 9, 12]
    assert rising.at_least(1, "service", "m", "b") == 1


def test_of_two_equal_lives_the_sum_is_kept() -> None:
    one = Served()
    one.add((3, 2, 1), 10, 5)
    one.add((1, 1, 1), 2, 1)
    assert (one.uncached, one.cached, one.output, one.service, one.weighted) == (4, 3, 2, 12, 6)
    assert S == NS_PER_S
