"""Counters stay in 64 bits for ever, and nobody's turn changes when they are brought down."""

import msgspec
import pytest

from headrace.model.paths import ROOT, Level, Link, Path, path
from headrace.policy.fairness.shares import SINK_AT, SUNK, Shares, Side
from headrace.units import MICRO

CHAT = Link(Level.CLASS, "chat")


def way(tenant: str, **limits: int) -> Path:
    return path(CHAT, Link(Level.TENANT, tenant, **limits))


def waiting(*ways: Path) -> Shares:
    shares = Shares()
    for one in ways:
        shares.join(one)
        shares.enlist(one, Side.URGENT, 0)
    return shares


@pytest.mark.parametrize("limits", [{}, {"minimum": MICRO // 5}, {"maximum": MICRO // 2}], ids=str)
def test_the_order_of_those_that_wait_and_their_distances_stay(limits: dict[str, int]) -> None:
    a, b, c = way("a"), way("b", weight=2, **limits), way("c", weight=7)
    shares = waiting(a, b, c)
    for nth, one in enumerate((a, b, c)):
        shares.charge(one, 0, SUNK * (nth + 3))
    distances = [shares.counter(one[-1].key) - shares.counter(a[-1].key) for one in (b, c)]
    order = list(shares.lowest(Side.URGENT, ROOT, 3))
    together = SINK_AT  # by weight alike, so that distances stay
    for one, weight in ((a, 1), (b, 2), (c, 7)):
        shares.charge(one, 0, together * weight)
    assert shares.served[ROOT] <= SINK_AT
    assert max(shares.counters.values()) < SINK_AT
    assert distances == [shares.counter(one[-1].key) - shares.counter(a[-1].key) for one in (b, c)]
    if not limits:
        assert list(shares.lowest(Side.URGENT, ROOT, 3)) == order


def test_who_was_idle_meanwhile_comes_back_no_lower_than_before() -> None:
    a, idle = way("a"), way("idle")
    shares = waiting(a)
    shares.join(idle)
    shares.leave(idle)
    shares.charge(a, 0, SINK_AT + 1)
    shares.join(idle)
    assert shares.counter(idle[-1].key) == shares.counter(a[-1].key)


def test_a_refund_after_it_leaves_no_counter_below_nothing() -> None:
    a = way("a")
    shares = waiting(a)
    for _ in range(5):
        shares.charge(a, 0, SINK_AT // 2)
    shares.charge(a, MICRO * 10**6, 0)
    assert all(value >= 0 for value in shares.counters.values())


def test_weeks_of_a_large_fleet_can_be_written_down() -> None:
    a, b = way("a"), way("b")
    shares = waiting(a, b)
    for nth in range(400):
        shares.charge((a, b)[nth % 2], 0, SINK_AT // 7)
    content = msgspec.msgpack.encode(shares)
    assert msgspec.msgpack.decode(content, type=Shares).counters == shares.counters
