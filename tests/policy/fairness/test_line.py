"""The line in front of an engine's slots: whose turn it is, and what its counters hold."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.ids import TenantId
from headrace.model.paths import Level, Link, Path, step_down
from headrace.policy.fairness.costs import Linear
from headrace.policy.fairness.line import LATE_NS, Line, Seat
from headrace.policy.ordering.orders import (
    EarliestDeadline,
    Fifo,
    LeastSlack,
    Niyama,
    Order,
    Score,
    ShortestFirst,
    TenantFirst,
    VtcOrder,
)
from headrace.units import NS_PER_MS, InstantNs, Tokens, seconds
from tests.policy.fairness.line import BEGIN, chat

RATES = Linear(uncached=10, cached=1, output=30)
TOKEN_NS = 1_000
ORDERS: tuple[Order, ...] = (
    Fifo(), ShortestFirst(), EarliestDeadline(), LeastSlack(), Niyama(), VtcOrder(), TenantFirst(),
    Score(),
)  # fmt: skip
BY_SHARE = [order for order in ORDERS if order.by_share]
A, B = chat("a"), chat("b")


def line(order: Order | None = None) -> Line:
    return Line(order or TenantFirst(), RATES, TOKEN_NS)


def seat(
    serial: int,
    way: Path = A,
    *,
    left_ms: int = 1_000,
    prompt: int = 10,
    relegated: bool = False,
    counters: tuple[int, ...] = (),
) -> Seat:
    return Seat(
        serial=serial,
        tenant=TenantId(way[-1].name),
        way=way,
        counters=counters,
        arrived_at=BEGIN,
        deadline=InstantNs(BEGIN + left_ms * NS_PER_MS),
        prompt_tokens=Tokens(prompt),
        target=prompt,
        relegated=relegated,
    )


def waiting(order: Order | None, seats: Iterable[Seat]) -> Line:
    """Return a line in which these wait."""
    one = line(order)
    for each in seats:
        one.push(each, BEGIN)
    return one


def drain(one: Line, now: InstantNs = BEGIN) -> list[int]:
    found = []
    while (serial := one.head(now)) is not None:
        one.take(serial, now)
        found.append(serial)
    return found


SEATS = st.lists(
    st.builds(
        lambda way, left_ms, prompt, relegated: (way, left_ms, prompt, relegated),
        st.sampled_from([A, B, chat("c", 3)]),
        st.integers(-100, 20_000),
        st.integers(1, 5_000),
        st.booleans(),
    ),
    max_size=20,
)


@given(st.sampled_from(ORDERS), SEATS, st.integers(0, 30_000))
def test_whoever_waits_gets_one_turn(
    order: Order, drawn: list[tuple[Path, int, int, bool]], later_ms: int
) -> None:
    one = waiting(
        order,
        (
            seat(nth, way, left_ms=left_ms, prompt=prompt, relegated=relegated)
            for nth, (way, left_ms, prompt, relegated) in enumerate(drawn, 1)
        ),
    )
    assert one.count == len(drawn)
    assert set(one.first()) <= set(range(1, len(drawn) + 1))
    now = InstantNs(BEGIN + later_ms * NS_PER_MS)
    assert sorted(drain(one, now)) == list(range(1, len(drawn) + 1))
    assert (one.count, one.head(now)) == (0, None)


WITH_USERS = (A, B, *(step_down(way, Link(Level.USER, user)) for way in (A, B) for user in "uv"))
"""A tenant as gateways tell of it that know of its users, and as others do."""


@given(
    st.sampled_from(ORDERS),
    st.lists(st.tuples(st.sampled_from(WITH_USERS), st.integers(-100, 20_000), st.booleans())),
    st.data(),
)
def test_users_and_whole_tenants_wait_beside_each_other(
    order: Order, drawn: list[tuple[Path, int, bool]], data: st.DataObject
) -> None:
    one, found = line(order), []
    for nth, (way, left_ms, goes) in enumerate(drawn, 1):
        one.push(seat(nth, way, left_ms=left_ms, counters=(0,) * len(way)), BEGIN)
        assert set(one.first()) <= set(range(1, nth + 1))
        if goes and (serial := one.head(BEGIN)) is not None:
            one.take(serial, BEGIN)
            one.charge_prompt(drawn[serial - 1][0], data.draw(st.integers(0, 99)), 0)
            found.append(serial)
    assert sorted(found + drain(one)) == list(range(1, len(drawn) + 1))


def test_a_users_tenant_is_charged_whoever_tells_of_it() -> None:
    user = step_down(A, Link(Level.USER, "u"))
    for first, second in ((A, user), (user, A)):
        one = waiting(TenantFirst(), [seat(1, first), seat(2, second), seat(3, B)])
        one.charge_prompt(user, 10, 0)
        one.charge_prompt(A, 10, 0)
        assert one.counter(A) == one.counter(user) == RATES.amount(20, 0, 0)
        assert one.head(BEGIN) == 3


@pytest.mark.parametrize("order", ORDERS)
def test_equals_go_in_order_of_arrival(order: Order) -> None:
    assert drain(waiting(order, map(seat, (1, 2, 3)))) == [1, 2, 3]


def test_relegated_goes_behind_its_own_tenants_and_not_behind_others() -> None:
    seats = [seat(1, relegated=True, left_ms=1), seat(2), seat(3, B)]
    assert drain(waiting(TenantFirst(), seats)) == [2, 3, 1]


def test_past_its_latest_start_it_lets_others_pass_but_not_for_ever() -> None:
    one = waiting(TenantFirst(), [seat(1, left_ms=1), seat(2, left_ms=60_000)])
    soon = InstantNs(BEGIN + seconds(1))
    assert one.next_change() is not None
    assert one.head(soon) == 2
    assert one.head(InstantNs(BEGIN + LATE_NS)) == 1


@pytest.mark.parametrize("order", BY_SHARE)
def test_turns_go_by_what_was_charged(order: Order) -> None:
    one = waiting(order, [seat(1, A), seat(2, B), seat(3, A), seat(4, B)])
    assert not one.is_fixed()
    one.charge_prompt(A, 10, 0)
    assert one.head(BEGIN) == 2
    one.charge_output(B, 0, 10)
    assert one.head(BEGIN) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_charges_move_nothing_where_the_first_is_fixed(order: Order) -> None:
    one = waiting(order, [seat(1, A), seat(2, A)])
    assert one.is_fixed()
    before = one.head(BEGIN)
    one.charge_prompt(A, 1_000, 0)
    assert one.head(BEGIN) == before


def test_prompt_costs_what_was_not_found_and_output_what_was_made() -> None:
    one = waiting(None, [seat(1, A)])
    one.charge_prompt(A, 60, 40)
    one.charge_output(A, 0, 5)
    one.charge_output(A, 5, 7)
    assert one.counter(A) == RATES.amount(60, 40, 7)


def test_weight_divides_what_is_charged() -> None:
    heavy = chat("heavy", 4)
    one = waiting(None, [seat(1, heavy)])
    one.charge_prompt(heavy, 100, 0)
    assert one.counter(heavy) == RATES.amount(100, 0, 0) // 4


def test_who_was_idle_is_lifted_and_who_waits_once_more_is_not() -> None:
    for again, expected in ((False, 1_000), (True, 0)):
        one = waiting(None, [seat(1, A), seat(2, B)])
        one.take(1, BEGIN)
        one.charge_prompt(B, 100, 0)
        one.push(seat(1, A), BEGIN, again=again)
        assert one.counter(A) == expected


def test_the_greater_of_what_a_gateway_told_and_what_happened_here_stands() -> None:
    one = waiting(None, [seat(1, A), seat(2, B)])
    one.charge_prompt(A, 100, 0)
    one.push(seat(3, A, counters=(0, 700)), BEGIN)
    one.push(seat(4, B, counters=(0, 800)), BEGIN)
    assert (one.counter(A), one.counter(B)) == (1_000, 800)
    one.charge_prompt(B, 100, 0)
    assert one.counter(B) == 1_800, "counted on from there"


def test_counters_are_kept_for_each_node_that_was_told() -> None:
    one = waiting(None, [seat(1, A), seat(2, B)])
    drain(one)
    assert one.nodes == 3
