"""Bounded exceptions from shares: minimum, maximum, age and deadlines."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.paths import ROOT, Path, path
from headrace.policy.fairness.costs import SERVICE_MAX, Linear, Price
from headrace.policy.fairness.forecast import debt
from headrace.policy.fairness.shares import Rules, Shares, Side
from headrace.policy.ordering.orders import TenantFirst
from headrace.units import DurationNs
from tests.policy.fairness.line import (
    BATCH,
    CHAT,
    Line,
    S,
    batch,
    busy,
    chat,
    klass,
    lane,
    org,
    parts,
    tenant,
)
from tests.policy.fairness.sound import shares_are_sound

A, B = chat("a"), chat("b")


# Minimum and maximum -------------------------------------------------------------------------


def crowd(count: int) -> tuple[Path, ...]:
    return tuple(chat(f"t{nth:02}") for nth in range(count))


def test_a_minimum_is_had_whoever_else_waits() -> None:
    line = Line()
    mine, others = chat("least", least=0.1), crowd(20)
    turns = busy(line, (mine, *others), 1_000)
    for upto in range(20, 1_000, 20):
        assert turns[:upto].count(mine) >= upto * 0.1 - 1
    assert turns.count(mine) <= 101, "and no more than that, as its weight gives it less"


def test_without_it_the_weight_alone_counts() -> None:
    line = Line()
    mine, others = chat("least"), crowd(20)
    assert busy(line, (mine, *others), 1_050).count(mine) == 50


def test_a_minimum_is_no_more_than_the_weight_gives_anyway() -> None:
    line = Line()
    mine = chat("least", 3, least=0.1)
    assert busy(line, (mine, A), 400).count(mine) == pytest.approx(300, abs=2)


def test_an_idle_minimum_is_lent_and_not_had_later() -> None:
    line = Line()
    mine, others = chat("least", least=0.1), crowd(20)
    busy(line, others, 2_000)
    assert busy(line, (mine, *others), 200).count(mine) <= 22


def test_minimums_together_are_had_by_all() -> None:
    line = Line()
    ways = tuple(chat(f"m{nth}", least=least) for nth, least in enumerate((0.3, 0.2, 0.1)))
    turns = busy(line, (*ways, *crowd(60)), 1_000)
    assert parts(turns, ways) == pytest.approx([0.3, 0.2, 0.1], abs=0.005)


def test_a_maximum_is_kept_while_others_wait() -> None:
    line = Line()
    mine = chat("most", 9, most=0.25)
    turns = busy(line, (mine, A, B), 1_000)
    for upto in range(1, 1_000, 13):
        assert turns[:upto].count(mine) <= upto * 0.25 + 1
    assert turns.count(mine) == pytest.approx(250, abs=2)


def test_a_maximum_leaves_nothing_undone() -> None:
    line = Line()
    mine = chat("most", most=0.25)
    assert set(busy(line, (mine,), 50)) == {mine}
    other = chat("too", most=0.25)
    turns = busy(line, (mine, other), 400)
    assert turns.count(other) >= 200, "of several over it, the one that is so least goes"


@pytest.mark.parametrize("memory", [4_000, 40_000])
def test_what_was_used_alone_is_held_against_it_no_longer_than_remembered(memory: int) -> None:
    line = Line(rules=Rules(memory=memory))
    mine = chat("most", 9, most=0.25)
    busy(line, (mine,), 500)
    line.shares.counters[A[-1].key] = line.counter(mine)
    turns = busy(line, (mine, A, B), 400)
    wait = next(nth for nth, way in enumerate(turns) if way == mine)
    assert wait == pytest.approx(memory / 1_000 / 0.25, abs=2)
    assert turns[wait:].count(mine) == pytest.approx((400 - wait) * 0.25, abs=3)


@pytest.mark.parametrize("memory", [4_000, 40_000])
def test_what_was_had_beyond_a_minimum_is_held_against_it_no_longer_than_remembered(
    memory: int,
) -> None:
    line = Line(rules=Rules(memory=memory))
    mine = chat("least", least=0.1)
    busy(line, (mine,), 500)
    others = crowd(20)
    turns = busy(line, (mine, *others), 1_200)
    # It still has the part of its weight, so that the excess shrinks by the difference alone.
    held = round(memory / 1_000 / (0.1 - 1 / 21))
    assert turns[:held].count(mine) == pytest.approx(held / 21, abs=2)
    assert turns[held:].count(mine) >= (1_200 - held) * 0.1 - 1


@pytest.mark.parametrize("limits", [{"least": 0.1}, {"most": 0.1}])
def test_refunds_of_what_was_forgiven_give_no_right_to_everything(limits: dict[str, Any]) -> None:
    memory = 40_000
    line = Line(rules=Rules(memory=memory))
    mine, others = chat("mine", **limits), crowd(20)
    line.add(mine)  # else it is lifted when it comes back
    for _ in range(20):  # sent together, and left before their first tokens
        for _ in range(50):
            line.shares.charge(mine, 0, 10_000)
        for _ in range(50):
            line.shares.charge(mine, 10_000, 0)
    assert not line.shares.counter(mine[-1].key)
    turns = busy(line, (mine, *others), 2_000)
    assert turns.count(mine) <= 2_000 * 0.1 + memory / 1_000


def test_the_least_parts_and_the_longest_memory_can_be_written_down() -> None:
    line = Line(rules=Rules(memory=10**15))
    ways = chat("least", least=1e-6), chat("most", most=1e-6)
    for way in ways:
        line.add(way)
        for _ in range(4):
            line.shares.charge(way, 0, SERVICE_MAX)
        for _ in range(4):
            line.shares.charge(way, SERVICE_MAX, 0)
    content = msgspec.msgpack.encode(line.shares)
    assert msgspec.msgpack.decode(content, type=Shares) == line.shares


def test_limits_hold_between_inner_nodes() -> None:
    line = Line()
    admin = path(lane("admin", least=0.05), klass("ops"), tenant("a"))
    capped = path(klass("bulk", 50, most=0.2), org("o"), tenant("a"))
    rest = tuple(path(klass(f"c{nth}", 4), tenant("b")) for nth in range(15))
    turns = busy(line, (admin, capped, *rest), 1_000)
    assert turns.count(admin) == pytest.approx(50, abs=2)
    assert turns.count(capped) == pytest.approx(200, abs=2)


# Aging and boost -----------------------------------------------------------------------------


def test_a_boost_moves_a_turn_by_no_more_than_configured() -> None:
    line = Line(rules=Rules(boost=300, boost_ns=DurationNs(2 * S)))
    near, far = chat("a", 3), chat("b", 3)
    line.add(near, 2)
    line.add(far, 8)
    line.charge(near, 300)
    assert line.turn() == 1, "100 ahead, and by name"
    line.charge(near, 3)
    assert line.turn() == 2
    assert line.counter(near) == 101, "the counter itself stands"
    line.wait(6)
    line.charge(far, 300)
    assert line.turn() == 2, "both are near now"


def test_a_boost_comes_when_the_deadline_is_near() -> None:
    line = Line(rules=Rules(boost=300, boost_ns=DurationNs(2 * S)))
    line.add(A, 5)
    line.add(B, 9)
    line.charge(A, 200)
    line.wait(2.999999999)
    assert line.turn() == 2
    line.wait(0.000000001)
    assert line.turn() == 1
    line.take(1)
    line.add(A, 9)
    assert line.turn() == 2, "it was that request's"


def test_work_that_lends_no_longer_is_not_near_its_deadline_for_that() -> None:
    line = Line(rules=Rules(boost=300, boost_ns=DurationNs(2 * S)))
    line.add_for_ever(A, starve_s=60)
    line.add(B, 100)
    line.charge(A, 100)
    line.wait(95)
    line.add(B, 5)
    assert line.turn() == 2


def test_a_turn_ages_by_so_much_a_second_and_is_had_when_that_says() -> None:
    """What is 900 behind goes after nine seconds at 100 a second, whoever else comes."""
    line = Line(TenantFirst(lend_after_ms=None), Rules(aging=100))
    starving, rush, seconds = line.add(A, 60), line.add(B, 5), 0
    line.charge(A, 900)
    while line.turn() != starving:
        assert line.turn() == rush
        following = line.add(B, 5)
        line.take(rush)
        rush = following
        line.wait(1)
        seconds += 1
    assert seconds == 10, "nine, and the second that the other's first has waited"


def test_an_inner_node_is_as_old_as_what_goes_next_below_it() -> None:
    line = Line(TenantFirst(lend_after_ms=None), Rules(aging=100))
    first, second = (path(klass(CHAT), org("o"), tenant(name)) for name in "ab")
    line.add(first, 60)
    line.wait(2)
    other = line.add(batch("c"), 60)
    line.wait(3)
    following = line.add(second, 60)
    line.charge(first, 900)
    line.charge(batch("c"), 1_100)
    shares_are_sound(line.shares, line.backlog)
    assert line.turn() == other, "1,100 + 200 of age against 900 + 500, not 900 + 0"
    line.charge(batch("c"), 200)
    assert line.turn() == following


def test_age_is_kept_on_each_side_of_a_node() -> None:
    """A class with urgent and with patient work has two ages, and each stands where it counts."""
    line = Line(rules=Rules(aging=100))
    line.add(A, 1_000)
    line.wait(50)
    line.add(B, 5)
    shares_are_sound(line.shares, line.backlog)
    urgent = line.shares.sides[Side.URGENT][ROOT].marks[A[0].key]
    lending = line.shares.sides[Side.LENDING][ROOT].marks[A[0].key]
    assert urgent.since - lending.since == 50 * S
    terms = line.backlog.terms(line.order, line.shares, B[-1].key)
    assert [term.ahead for term in terms] == [0, 0], "age is no boost"


# The bound on starving -----------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3_000)), min_size=1, max_size=6),
    st.integers(0, 9_000),
    st.integers(0, 9_000),
)
@settings(max_examples=60)
def test_what_has_starved_starts_after_what_it_is_ahead_by_and_no_later(
    rivals: list[tuple[int, int]], own: int, beside: int
) -> None:
    """Others are urgent throughout, in its class and in another of more weight."""
    line = Line()
    mine = path(klass(BATCH), tenant("me"))
    ways = tuple(path(klass(CHAT, 4), tenant(f"t{n}", w)) for n, (w, _) in enumerate(rivals))
    other = path(klass(BATCH), tenant("other", 2))
    starving = line.add_for_ever(mine, starve_s=60)
    busy(line, (*ways, other), 5, service=100)
    for way, (_, had) in zip(ways, rivals, strict=True):
        line.charge(way, had)
    line.charge(mine, own)
    line.charge(other, beside)
    line.wait(59)
    for _ in range(400):  # all that came before is hopeless by now
        for way in (*ways, other):
            line.add(way, 9, work=100)
    line.wait(1)
    promised = debt(line.shares, mine, Price("plain", Linear()), frozenset({CHAT, BATCH}), line.now)
    spent = 0
    while line.turn() != starving:
        line.serve(100)
        spent += 100
    # A turn is a whole request: one for each of those that it waits for, at both levels.
    assert spent <= promised + 100 * (len(ways) + 2) * 5


def test_what_lent_all_along_is_next_when_it_has_starved() -> None:
    line = Line()
    mine, others = path(klass(BATCH), tenant("me")), crowd(20)
    starving = line.add_for_ever(mine, starve_s=60)
    for _ in range(15):
        assert mine not in busy(line, others, 60)
        line.wait(4)
    assert line.turn() == starving
    shares_are_sound(line.shares, line.backlog)
