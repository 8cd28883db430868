"""Callers who were refused and come again: served as anybody, and no reason to grow beyond the retry budget."""

from headrace.model.event import RequestArrived
from headrace.model.scaling_spec import Scaling
from headrace.sim.faults import Fault, Repeaters
from tests.sim.scaled import records, run, scaled, starts, steady
from tests.sim.scenes import Ran

SETTINGS = Scaling(max=40, out_groups=40, times=starts(90), forecast=None)
BURST = ((0.0, 30.0, 2.0), (30.0, 130.0, 30.0))


def burst(*faults: Fault) -> Ran:
    return run(scaled(SETTINGS, faults=faults), rows=steady(BURST))


def most(ran: Ran) -> int:
    return max(one.decision.need for one in records(ran))


def test_a_storm_of_repeats_asks_for_no_more_than_the_retry_budget() -> None:
    calm, storm = burst(), burst(Repeaters(times=2))
    demands = [one.evidence.demand for one in records(storm)]
    assert any(one.retries_micro > one.urgent_micro // 2 for one in demands)
    assert most(storm) <= most(calm) * (1 + SETTINGS.retry_budget) + 1
    assert [one.urgent_micro for one in demands] == [
        one.evidence.demand.urgent_micro for one in records(calm)[: len(demands)]
    ]


def test_only_what_comes_again_is_a_repeat() -> None:
    ran = burst(Repeaters(times=2))
    seen: set[int] = set()
    for event in ran.events(RequestArrived):
        assert event.request.repeat is (event.request.id in seen)
        seen.add(event.request.id)
