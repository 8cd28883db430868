"""Who has had how much: shares by weight at every level, with bounded exceptions."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.model.paths import ROOT, Path, path
from headrace.policy.fairness import shares as shares_module
from headrace.policy.fairness.ranked import Ranked
from headrace.policy.fairness.shares import Rules, Shares, Side
from headrace.policy.fairness.vtc import share
from headrace.policy.ordering.orders import TenantFirst, VtcOrder
from headrace.units import MICRO, DurationNs
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
    user,
)
from tests.policy.fairness.sound import rankings_are_the_marks, shares_are_sound

A, B, C = chat("a"), chat("b"), chat("c")


# Idle time earns no credit -------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_idle_time_earns_no_credit_at_any_level(depth: int) -> None:
    """The one that was idle parts from the busy one at each level in turn."""
    links = (lane("l"), klass(CHAT), org("o"), tenant("t"))
    others = (lane("m"), klass(BATCH), org("p"), tenant("u"))
    there = path(*links)
    late = path(*links[:depth], *others[depth:])
    line = Line()
    busy(line, (there,), 50)
    turns = busy(line, (there, late), 20)
    assert turns.count(late) == 10


def test_a_node_keeps_what_it_had_too_much() -> None:
    line = Line()
    line.add(A, 5)
    line.add(B, 5)
    line.charge(B, 5_000)
    line.take(2)
    line.add(B, 5)
    assert line.counter(B) == 5_000, "leaving and coming back forgives nothing"


def test_the_first_to_come_back_stands_where_the_last_one_left() -> None:
    line = Line()
    busy(line, (A,), 30)
    line.take(31)
    line.add(C, 5)
    assert line.counter(C) == line.counter(A) == 30_000


def test_who_comes_back_is_lifted_to_those_that_compete_not_to_lenders() -> None:
    line = Line()
    line.add(A, 1_000)
    line.add(B, 5)
    line.charge(B, 700)
    line.add(C, 5)
    assert (line.counter(A), line.counter(C)) == (0, 700)


def test_a_lender_has_back_what_it_lent_as_far_as_that_is_remembered() -> None:
    """Else whoever has lent for minutes would then have everything for minutes."""
    line = Line(rules=Rules(memory=6_000))
    lender = chat("a", 2)
    line.add(lender, 15)
    busy(line, (B,), 30)
    assert line.counter(lender) == 0
    line.wait(4.9)
    assert busy(line, (B,), 5) == [B] * 5, "it still can wait"
    line.wait(0.1)
    line.add(B, 5)
    assert line.counter(lender) == 35_000 - 6_000 // 2
    turns = busy(line, (lender, B), 36)
    assert turns[:5] == [lender] * 5, "its part of the present comes with it"
    assert turns.count(lender) == 6 + 20


def test_a_class_that_lends_has_no_more_back_than_a_tenant() -> None:
    line = Line(rules=Rules(memory=2_000))
    line.add(batch("a"), 12)
    busy(line, (A,), 50)
    line.wait(2)
    line.add(A, 5)
    turns = busy(line, (A, batch("a")), 30)
    assert turns.count(batch("a")) == 16


def test_what_nobody_else_wants_goes_to_who_does() -> None:
    line = Line()
    ways = (chat("a", 1), chat("b", 9), batch("c"))
    assert set(busy(line, ways[:1], 9)) == {ways[0]}
    turns = busy(line, ways, 200)
    assert parts(turns, ways) == pytest.approx([0.05, 0.45, 0.5], abs=0.01)


# Shares by weight ----------------------------------------------------------------------------

TREE = (
    path(klass(CHAT, 4), org("big", 2), tenant("a")),
    path(klass(CHAT, 4), org("big", 2), tenant("b")),
    path(klass(CHAT, 4), org("small", 1), tenant("c")),
    path(klass(CHAT, 4), org("small", 1), tenant("d", 3)),
    path(klass(BATCH, 1), tenant("e")),
    path(klass(BATCH, 1), tenant("f", 2), user("u")),
    path(klass(BATCH, 1), tenant("f", 2), user("v")),
)


@given(
    st.lists(st.integers(1, 900), min_size=60, max_size=90), st.sets(st.integers(0, 6), min_size=2)
)
@settings(max_examples=40)
def test_two_nodes_that_are_busy_stay_within_the_methods_bound(
    services: list[int], who: set[int]
) -> None:
    """At any level, for every span of time, by 2 U / weight: U is the largest single charge.

    Turns are single here, so that what runs at once is one request.
    """
    ways = tuple(TREE[nth] for nth in sorted(who))
    line = Line()
    for way in ways * 2:
        line.add(way, 5)
    nodes: dict[str, dict[str, int]] = {}
    for way in ways:
        for parent, step in pairwise((None, *way)):
            assert step is not None
            nodes.setdefault(ROOT if parent is None else parent.key, {})[step.key] = step.weight
    at = []
    for service in services:
        line.add(line.serve(service), 5)
        at.append(dict(line.served))
    bound = 2 * max(services)
    for siblings in nodes.values():
        for one in siblings:
            for other in siblings:
                gaps = [
                    now.get(one, 0) / siblings[one] - now.get(other, 0) / siblings[other]
                    for now in at
                ]
                # A counter is rounded down at each charge, by less than one.
                assert max(gaps) - min(gaps) <= bound + len(services)


def test_shares_are_those_of_the_weights_at_each_level() -> None:
    line = Line()
    turns = busy(line, TREE, 1_500, service=700)
    expected = [
        0.8 * 2 / 3 / 2, 0.8 * 2 / 3 / 2, 0.8 / 3 / 4, 0.8 / 3 * 3 / 4, 0.2 / 3, 0.2 / 3, 0.2 / 3,
    ]  # fmt: skip
    assert parts(turns, TREE) == pytest.approx(expected, abs=0.004)


# Charges -------------------------------------------------------------------------------------

Charges = list[tuple[int, list[int]]]


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(0, 10**6), min_size=1, max_size=4)),
        min_size=1, max_size=8,
    ),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_charges_that_are_taken_back_leave_every_counter_as_it_was(
    charges: Charges, order: Any
) -> None:
    """Whatever the weights, in whatever order, by whatever steps."""
    line = Line()
    for way in TREE:
        line.add(way, 5)
    line.charge(TREE[0], 12_345)
    before, marks = dict(line.shares.counters), line.shares.served.copy()
    # Each flight's charges in their order, flights in any.
    steps = [flight for flight, (_, levels) in enumerate(charges) for _ in (*levels, 0)]
    order.shuffle(steps)
    stands = [0] * len(charges)
    left = [[*levels, 0] for _, levels in charges]
    for flight in steps:
        after = left[flight].pop(0)
        line.shares.charge(TREE[charges[flight][0]], stands[flight], after)
        stands[flight] = after
        shares_are_sound(line.shares, line.backlog)
    assert line.shares.counters == before
    assert {key: at for key, at in line.shares.served.items() if at} == {
        key: at for key, at in marks.items() if at
    }


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 1_000))
def test_a_charge_in_steps_is_that_of_its_end(first: int, last: int, weight: int) -> None:
    line = Line()
    way = chat("a", weight)
    line.add(way, 5)
    line.shares.charge(way, 0, first)
    line.shares.charge(way, first, last)
    assert line.counter(way) == share(last, weight)


def test_a_charge_from_before_a_change_of_weights_leaves_the_ranking_alone() -> None:
    """What a flight began with settles it; what is listed is as it is configured now."""
    old = path(klass(CHAT, 4), org("o"), tenant("a", 2))
    now = path(klass(CHAT, 2, most=0.5), org("o", 3, least=0.2), tenant("a", 5, least=0.1))
    line = Line()
    line.add(old, 5)
    line.shares.charge(old, 0, 80)
    line.take(1)
    line.add(now, 5)
    line.add(path(klass(CHAT, 2, most=0.5), tenant("b")), 5)
    line.shares.charge(old, 80, 40)
    shares_are_sound(line.shares, line.backlog)
    assert line.counter(now) == 20
    marks = line.shares.sides[Side.URGENT][now[1].key].marks
    assert marks[now[2].key].weight == 5
    assert marks[now[2].key].low is not None
    line.take(2)
    shares_are_sound(line.shares, line.backlog)


def test_a_node_may_be_joined_under_other_weights_than_it_is_listed_with() -> None:
    """An engine hears of a change by what comes next, while older work still waits."""
    line = Line()
    line.add(path(klass(CHAT, 4), tenant("a")), 5)
    line.add(path(klass(CHAT, 1, least=0.1, most=0.5), tenant("b")), 5)
    shares_are_sound(line.shares, line.backlog)
    assert line.shares.sides[Side.URGENT][ROOT].weight == 1
    line.add(path(klass(CHAT, 4), tenant("c")), 5)
    shares_are_sound(line.shares, line.backlog)
    for request in (2, 1, 3):
        for siblings in line.shares.sides[Side.URGENT].values():
            rankings_are_the_marks(siblings)
        line.take(request)
    assert not any(line.shares.sides)


def test_counters_told_by_another_are_taken_over_and_ranked() -> None:
    line = Line()
    line.add(A, 5)
    line.add(B, 5)
    line.shares.receive(A, (50, 40))
    shares_are_sound(line.shares, line.backlog)
    assert line.turn() == 2
    line.shares.receive(A, (10, 10))
    assert line.counter(A) == 40, "a counter is behind if anything"


def test_counters_start_anew_under_another_cost() -> None:
    line = Line()
    busy(line, (A, batch("b")), 9)
    for request in list(line.backlog.slots):
        line.take(request)
    line.shares.rebase()
    assert set(line.shares.counters.values()) == {0}
    assert not line.shares.served


def test_nodes_that_are_declared_no_more_are_forgotten() -> None:
    line = Line()
    ways = (chat("a", least=0.1, most=0.9), B)
    busy(line, ways, 9)
    for request in list(line.backlog.slots):
        line.take(request)
    gone = ways[0][-1].key
    line.shares.keep(lambda key: key != gone)
    kept = (line.shares.counters, line.shares.served, line.shares.lows, line.shares.highs)
    assert not any(gone in marks for marks in kept)
    assert gone not in line.shares.last_out.values()
    line.shares.charge(ways[0], 900, 0)
    assert not any(gone in marks for marks in kept), "what was still under way counts for nobody"


def test_users_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "USERS", 3)
    line = Line()
    ways = [path(klass(CHAT), tenant("a"), user(f"u{nth}")) for nth in range(6)]
    for nth, way in enumerate(ways):
        line.add(way, 5)
        line.charge(way, 100 * nth)
    for request in range(1, 6):
        line.take(request)
    idle = [way[-1].key for way in ways[2:5]]
    assert list(line.shares.idle_users) == idle, "idle longest first"
    assert {key for key in line.shares.counters if "u" in key[-2:]} == {*idle, ways[5][-1].key}
    line.charge(ways[0], 1_000)
    assert ways[0][-1].key not in line.shares.counters
    line.add(ways[2], 5)
    assert list(line.shares.idle_users) == idle[1:]
    assert line.counter(ways[2]) == 500, "lifted as anybody"
    shares_are_sound(line.shares, line.backlog)


# How much is done ----------------------------------------------------------------------------


def test_what_a_request_costs_does_not_grow_with_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rankings that are touched for each request: as many with 100,000 waiting as with ten."""
    touched = 0

    def counted(name: str) -> Any:
        plain = getattr(Ranked, name)

        def call(self: Any, *args: Any) -> Any:
            nonlocal touched
            touched += 1
            return plain(self, *args)

        return call

    for name in ("add", "remove", "move", "first", "last", "ahead", "__iter__"):
        monkeypatch.setattr(Ranked, name, counted(name))

    def costs(tenants: int, queued: int) -> tuple[int, int]:
        nonlocal touched
        line = Line()
        ways = [
            path(klass(CHAT, 4), org(f"o{nth % 100:02}"), tenant(f"t{nth:05}", least=1e-5))
            for nth in range(tenants)
        ]
        adding = serving = 0
        for nth in range(queued):
            touched = 0
            line.add(ways[nth * 7 % tenants], 5)
            adding = max(adding, touched)
        for _ in range(1_000 if queued > 1_000 else 20):
            touched = 0
            line.serve(1_000)
            serving = max(serving, touched)
        return adding, serving

    few = costs(10, 100)
    many = costs(10_000, 100_000)
    assert many[0] <= few[0] + 2
    assert many[1] <= few[1] + 8
    assert max(few + many) < 80


def test_a_ranking_is_found_in_few_steps() -> None:
    line = Ranked[int]()
    for nth in range(100_000):
        line.add(nth * 7_919 % 100_003, nth)
    assert max(len(run) for run in line.runs) <= 128
    assert len(line.runs) <= 2 * 100_000 // 64


# Whatever happens ----------------------------------------------------------------------------


class WhateverHappens(RuleBasedStateMachine):
    """Listings, sums and rankings agree with the counters, and counters with plain arithmetic."""

    @initialize(
        rules=st.sampled_from(
            (Rules(), Rules(memory=300), Rules(aging=7, boost=90, boost_ns=DurationNs(4 * S)))
        ),
        order=st.sampled_from((TenantFirst(), VtcOrder())),
    )
    def begin(self, rules: Rules, order: Any) -> None:
        self.line = Line(order, rules)
        self.flights: list[tuple[Path, int]] = []

    @rule(way=st.sampled_from(TREE), latest=st.sampled_from((-1, 2, 8, 30)))
    def add(self, way: Path, latest: float) -> None:
        before = dict(self.line.shares.counters)
        busy_ones = set(self.line.shares.waiting)
        self.line.add(way, latest)
        for key, counter in self.line.shares.counters.items():
            assert counter >= before.get(key, 0), "a lift never lowers"
            limited = self.line.shares.rules.memory < MICRO
            assert key not in busy_ones or limited or counter == before[key]

    @precondition(lambda self: self.line.backlog.size)
    @rule(service=st.integers(0, 500))
    def dispatch(self, service: int) -> None:
        way = self.line.serve(service)
        self.flights.append((way, service))

    @precondition(lambda self: self.flights)
    @rule(nth=st.integers(0, 9), service=st.integers(0, 900))
    def settle(self, nth: int, service: int) -> None:
        way, charged = self.flights.pop(nth % len(self.flights))
        self.line.shares.charge(way, charged, service)

    @precondition(lambda self: self.line.backlog.size)
    @rule(nth=st.integers(0, 9))
    def cancel(self, nth: int) -> None:
        self.line.take(sorted(self.line.backlog.slots)[nth % self.line.backlog.size])

    @rule(seconds=st.sampled_from((0.5, 3, 40)))
    def wait(self, seconds: float) -> None:
        self.line.wait(seconds)

    @rule()
    def freeze(self) -> None:
        self.line.shares = msgspec.msgpack.decode(
            msgspec.msgpack.encode(self.line.shares), type=Shares
        )

    @invariant()
    def is_sound(self) -> None:
        shares_are_sound(self.line.shares, self.line.backlog)
        assert (self.line.look() is None) is not bool(self.line.backlog.size)


TestWhateverHappens = WhateverHappens.TestCase
TestWhateverHappens.settings = settings(max_examples=80, stateful_step_count=30)
