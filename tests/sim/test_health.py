"""A pool that scales, one group of which is slow: seen by its pace, sent less, and made up for."""

from collections import Counter

import pytest
from msgspec.structs import replace

from headrace.model.evidence import RouteRecord
from headrace.model.ids import ReplicaName
from headrace.model.scaling import Signal
from headrace.model.scaling_spec import Scaling
from headrace.sim.faults import Fault, Slow
from headrace.units import MICRO, NS_PER_S
from tests.sim.scaled import records, run, scaled, starts, steady
from tests.sim.scenes import Ran

SLOW = ReplicaName("pool-0")
QUICK = Scaling(max=6, times=starts(25), forecast=None)


def loaded(*faults: Fault, rate: float = 6.3) -> Ran:
    rows = [
        replace(row, output_tokens=row.output_tokens * 3) for row in steady(((0.0, 150.0, rate),))
    ]
    return run(scaled(QUICK, replicas=3, faults=faults), rows=rows)


def met(ran: Ran, since_s: float, until_s: float) -> float:
    rows = [row for row in ran.rows() if since_s <= row.entry.arrived_at / NS_PER_S < until_s]
    return sum(row.met for row in rows) / len(rows)


def test_a_group_that_is_slow_counts_at_its_part_is_sent_less_and_is_made_up_for() -> None:
    ran = loaded(Slow(replica=0, factor=3.0))
    (asked,) = [one for one in records(ran) if one.decision.steps.ask]
    seen = {one.group: one.effective_ppm for one in asked.evidence.groups}
    assert seen.pop(SLOW) == pytest.approx(MICRO / 3, rel=0.1)
    assert set(seen.values()) == {MICRO}
    assert asked.decision.winner is Signal.LOST_CAPACITY
    assert asked.decision.desired == 4
    sent = Counter(r.placement.replica for r in ran.decisions if isinstance(r, RouteRecord))
    assert sent[SLOW] * 2 < sent[ReplicaName("pool-1")]
    assert met(ran, 0.0, 90.0) < met(ran, 90.0, 150.0)


def test_the_same_load_on_groups_as_fast_as_they_should_be_asks_for_none() -> None:
    ran = loaded()
    assert not any(one.decision.steps.ask for one in records(ran))
    assert all(
        one.effective_ppm in (None, 1_000_000)
        for record in records(ran)
        for one in record.evidence.groups
    )


def test_a_pool_whose_profile_is_wrong_throughout_is_not_condemned() -> None:
    ran = loaded(*(Slow(replica=nth, factor=1.5) for nth in range(3)), rate=3.0)
    lost = [
        r.desired
        for one in records(ran)
        for r in one.decision.readings
        if r.signal is Signal.LOST_CAPACITY
    ]
    assert set(lost) == {0}
