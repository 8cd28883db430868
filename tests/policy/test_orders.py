"""Orders give keys that time does not change."""

import pytest

from headrace.policy.contracts import Order
from headrace.policy.ordering.orders import FAR, Fifo, TenantFirst
from headrace.units import InstantNs, seconds


@pytest.mark.parametrize("order", [Fifo(), TenantFirst()])
def test_every_order_answers_the_same_questions(order: Order) -> None:
    assert isinstance(order.relegates, bool)
    assert isinstance(order.key(InstantNs(5), 1), int)
    assert isinstance(order.turn(3, 4), int)
    assert order.lend_after_ns is None or order.lend_after_ns > 0


def test_first_come_first_served_looks_at_arrival_alone() -> None:
    order = Fifo()
    assert order.key(InstantNs(10**18), 7) == order.key(InstantNs(0), 7) == 7
    assert order.turn(counter=10**9, head=7) == 7
    assert not order.relegates
    assert order.lend_after_ns is None


def test_tenant_first_ranks_tenants_by_counter_and_requests_by_latest_start() -> None:
    order = TenantFirst()
    assert order.turn(counter=12, head=7) == 12
    assert order.key(InstantNs(99), 7) == 99
    assert order.relegates
    assert order.lend_after_ns == seconds(10)
    assert TenantFirst(lend_after_ms=1.5).lend_after_ns == 1_500_000


def test_work_without_a_deadline_lends_its_turn_for_a_year() -> None:
    assert seconds(365 * 24 * 3_600) == FAR
