"""Shares compare only while tenants wait, over windows, by weight."""

import pytest

from headrace.model.ids import TenantId
from headrace.report.fairness import Fairness, fairness
from headrace.report.run import ServiceSample
from headrace.units import NS_PER_S, InstantNs, seconds
from tests.report.making import run, served


def samples(
    shares: list[tuple[int, int]], waiting: list[tuple[int, int]] | None = None
) -> list[ServiceSample]:
    """Return one sample a second of tenants a and b, from the work each got in that second."""
    found, done = [], [0, 0]
    for second, both in enumerate(shares):
        done = [done[0] + both[0], done[1] + both[1]]
        queued = (1, 1) if waiting is None else waiting[second]
        found.append(
            ServiceSample(
                at=InstantNs(second * NS_PER_S),
                work_ns={TenantId("a"): done[0], TenantId("b"): done[1]},
                waiting={TenantId("a"): queued[0], TenantId("b"): queued[1]},
            )
        )
    return found


def told(found: list[ServiceSample], weights: dict[str, int] | None = None) -> Fairness:
    named = {TenantId(name): weight for name, weight in (weights or {}).items()}
    return fairness([], [], found, named, seconds(10))


def test_equal_service_strays_nowhere() -> None:
    one = told(samples([(5, 5)] * 21))
    assert one.windows == 11
    assert one.deviation_max == 0


def test_the_worst_window_names_tenant_and_time() -> None:
    one = told(samples([(5, 5)] * 11 + [(9, 1)] * 10))
    assert one.deviation_max == 0.4
    assert one.worst_tenant == "a"
    assert one.worst_at == 20 * NS_PER_S


def test_fair_shares_go_by_weight() -> None:
    assert told(samples([(6, 2)] * 11), {"a": 3}).deviation_max == 0
    assert told(samples([(6, 2)] * 11)).deviation_max == 0.25


@pytest.mark.parametrize("idle_at", [0, 4, 10])
def test_a_window_in_which_one_did_not_wait_says_nothing(idle_at: int) -> None:
    waiting = [(1, 0 if second == idle_at else 1) for second in range(11)]
    one = told(samples([(10, 0)] * 11, waiting))
    assert one.windows == 0
    assert one.deviation_max is None


def test_a_window_in_which_nothing_was_served_says_nothing() -> None:
    assert told(samples([(0, 0)] * 20)).windows == 0


def test_a_run_shorter_than_the_window_says_nothing() -> None:
    assert told(samples([(9, 1)] * 5)).windows == 0


def test_shares_are_of_what_was_offered_and_of_what_was_served() -> None:
    record = run([served(0, tenant="a", work_ms=30), served(1, tenant="b", work_ms=10)])
    one = fairness(record.offered, record.rows[:1], [], {TenantId("b"): 2})
    assert [(t.tenant, t.weight, t.offered_share, t.served_share) for t in one.tenants] == [
        ("a", 1, 0.75, 1.0),
        ("b", 2, 0.25, 0.0),
    ]
