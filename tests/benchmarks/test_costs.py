"""The benchmark of costs: shares add up, and a claim fails where a cost is not even in what it counts."""

import pytest

from benchmarks import costs
from headrace.policy.fairness.costs import RequestCost


def even() -> costs.Shares:
    return {name: dict.fromkeys(costs.TENANTS, costs.EVEN) for name in (*costs.COSTS, costs.HELD)}


def test_shares_are_of_all_tenants_and_add_up() -> None:
    watch = costs.watched(RequestCost(), 20.0, 0)
    found = costs.shares(watch, 2, 19)
    assert set(found) == {*costs.COSTS, costs.HELD}
    for of in found.values():
        assert set(of) == set(costs.TENANTS)
        assert sum(of.values()) == pytest.approx(1)
    assert not watch.starved


def test_a_mean_of_runs_lies_between_them() -> None:
    other = even() | {"work": dict.fromkeys(costs.TENANTS, 0.1)}
    assert costs.mean([even(), other])["work"] == dict.fromkeys(costs.TENANTS, 0.15)


def test_how_far_one_is_off_is_told_as_a_part_of_an_even_share() -> None:
    assert costs.off(dict.fromkeys(costs.TENANTS, costs.EVEN)) == 0
    assert costs.off({"chat": 0.25, "reader": 0.15}) == pytest.approx(0.25)


def test_where_no_cost_leaves_anything_out_no_trap_is_claimed() -> None:
    matrix = {name: even() for name in costs.COSTS}
    made = costs.claims(matrix, matrix, dict.fromkeys(costs.COSTS, 0.2), {"chat"}, quick=False)
    held = {claim.claim for claim in made if claim.holds}
    assert {claim.partition(":")[0] for claim in held} == {"mix"}
