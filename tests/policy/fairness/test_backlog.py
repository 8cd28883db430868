"""Whose turn it is: by share, by urgency, by class; and when time alone changes that."""

from typing import Any

import msgspec
import pytest

from headrace.model.ids import ClassName, RequestId
from headrace.model.paths import Band, Level, path
from headrace.policy.fairness.backlog import NONE, Backlog, is_patient
from headrace.policy.fairness.shares import Rules, Shares, Side
from headrace.policy.ordering.orders import (
    EarliestDeadline,
    Fifo,
    LeastSlack,
    Niyama,
    Score,
    ShortestFirst,
    TenantFirst,
    VtcOrder,
)
from headrace.units import InstantNs
from tests.policy.fairness.line import (
    BATCH,
    BEGIN,
    CHAT,
    Line,
    S,
    batch,
    chat,
    klass,
    lane,
    org,
    tenant,
    user,
)
from tests.policy.fairness.sound import shares_are_sound

A, B, C = chat("a"), chat("b"), chat("c")


def test_the_tenant_furthest_under_its_share_goes_first() -> None:
    line = Line()
    of_a, of_b, of_c = line.add(A), line.add(B), line.add(C)
    for way, service in ((A, 30), (B, 10), (C, 20)):
        line.charge(way, service)
    assert line.turn() == of_b
    line.charge(B, 15)
    assert line.turn() == of_c
    line.charge(C, 90)
    line.charge(B, 90)
    assert line.turn() == of_a


def test_equal_counters_go_by_name_not_by_chance() -> None:
    line = Line()
    for name in ("zoe", "amy", "bob"):
        line.add(chat(name))
    assert line.turn() == 2


def test_within_a_queue_the_earliest_deadline_goes_first_and_no_length_is_favoured() -> None:
    line = Line()
    line.add(A, 3)
    long = line.add(A, 1, work=5 * S)
    first = line.add(A, 2)
    assert line.turn() == first
    assert line.wait(1.5) == [RequestId(long)], "what it takes tells when it is hopeless"


def test_a_tenant_that_can_wait_ten_seconds_lends_its_turn() -> None:
    line = Line()
    patient = line.add(A, 10.000000001)
    urgent = line.add(B, 10)
    line.charge(B, 10**9)
    found = line.look()
    assert found is not None
    assert (found.request, found.lent, found.patient) == (urgent, True, False)
    assert line.counter(A) == 0, "its counter stays"
    line.take(urgent)
    found = line.look()
    assert found is not None
    assert (found.request, found.lent, found.patient) == (patient, False, True)


def test_a_lender_takes_its_turn_when_its_work_becomes_urgent() -> None:
    line = Line()
    patient = line.add(A, 12)
    urgent = line.add(B, 9)
    line.charge(B, 10**9)
    assert line.backlog.next_change() == BEGIN + 2 * S
    line.wait(1.999999999)
    assert line.turn() == urgent
    line.wait(0.000000001)
    found = line.look()
    assert found is not None
    assert (found.request, found.lent) == (patient, False)


def test_lenders_go_when_nobody_is_urgent() -> None:
    line = Line()
    line.add(A, 100)
    second = line.add(B, 200)
    line.charge(A, 5)
    found = line.look()
    assert found is not None
    assert (found.request, found.lent, found.patient) == (second, False, True)


def test_the_hopeless_lend_their_turn_and_wait_behind_their_own() -> None:
    line = Line()
    lost = line.add(A, 1)
    other = line.add(B, 5)
    line.charge(B, 100)
    assert line.turn() == lost
    assert line.wait(1) == [], "at its latest start it can still make it"
    assert line.wait(0.000000001) == [RequestId(lost)]
    assert line.turn() == other
    fresh = line.add(A, 3)
    assert line.turn() == fresh
    line.take(fresh)
    line.take(other)
    found = line.look()
    assert found is not None
    assert (found.tenant, found.request, found.relegated) == ("a", lost, True)
    assert line.take(lost) is None
    assert line.turn() is None


def test_without_lending_the_hopeless_compete_for_their_turns_as_others_do() -> None:
    line = Line(TenantFirst(lend_after_ms=None))
    lost = line.add(A, 1)
    line.add(B, 50)
    line.charge(B, 100)
    assert line.wait(2) == [RequestId(lost)]
    found = line.look()
    assert found is not None
    assert (found.request, found.relegated, found.patient) == (lost, True, False)
    mine = line.add(A, 5)
    assert line.turn() == mine, "but they are behind their own"


def test_relegation_is_once() -> None:
    line = Line()
    line.add(A, 1)
    assert line.wait(2) == [RequestId(1)]
    assert line.backlog.next_change() is None, "nothing more can happen to it by time alone"
    assert line.wait(1_000) == []


def test_a_blocked_class_holds_up_no_other() -> None:
    line = Line()
    line.add(A, 1)
    second = line.add(batch("b"), 50)
    line.charge(batch("b"), 5)
    assert line.turn(CHAT) == second
    own = line.add(batch("a"), 60)
    assert line.turn(CHAT) == own
    assert line.turn(CHAT, BATCH) is None


def test_one_waiting_class_is_found_behind_any_number_of_blocked_tenants() -> None:
    line = Line()
    for nth in range(500):
        line.add(chat(f"chat-{nth:03}"))
    wanted = line.add(batch("last"))
    line.charge(batch("last"), 10**12)
    assert line.turn(CHAT) == wanted


def test_a_lane_whose_class_is_blocked_holds_up_no_other_class_of_it() -> None:
    line = Line()
    ops, probe = (path(lane("admin"), klass(name), tenant("a")) for name in ("ops", "probe"))
    line.add(ops)
    second = line.add(probe)
    third = line.add(A)
    line.charge(probe, 7)
    assert line.turn() == third
    line.charge(A, 9)
    assert line.turn() == 1
    assert line.turn(ClassName("ops")) == second
    assert line.turn(ClassName("ops"), ClassName("probe")) == third


def test_urgency_is_judged_by_class() -> None:
    """A tenant with urgent chat that is blocked does not push its patient batch before others."""
    line = Line()
    line.add(A, 1)
    line.add(batch("a"), 100)
    urgent = line.add(batch("b"), 5)
    line.charge(batch("b"), 5)
    assert line.turn(CHAT) == urgent


def served(line: Line) -> list[int]:
    found = []
    while (request := line.turn()) is not None:
        found.append(request)
        line.take(request)
    return found


def test_first_come_first_served_knows_no_tenants_and_no_deadlines() -> None:
    line = Line(Fifo())
    hog = chat("hog")
    line.charge(hog, 10**9)
    line.add(hog, 100)
    line.add(B, 0.001)
    line.add(hog, 1)
    assert line.backlog.next_change() is None
    assert served(line) == [1, 2, 3]


def test_first_come_first_served_goes_by_class_where_some_are_blocked() -> None:
    line = Line(Fifo())
    line.add(A)
    first = line.add(batch("b"))
    line.add(batch("a"))
    assert line.turn(CHAT) == first


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Fifo(), [1, 2, 3, 4]),
        (ShortestFirst(), [4, 3, 2, 1]),
        (EarliestDeadline(), [4, 2, 1, 3]),
        (LeastSlack(), [2, 4, 1, 3]),
        (Niyama(), [4, 2, 3, 1]),
        (Niyama(ms_per_token=0), [4, 2, 1, 3]),
        # By share the one charged most goes last.
        (VtcOrder(), [1, 3, 4, 2]),
        (TenantFirst(), [1, 4, 3, 2]),
        (TenantFirst(lend_after_ms=None), [1, 4, 3, 2]),
        (TenantFirst(lend_after_ms=5_600.0), [4, 2, 1, 3]),
        (Score(), [1, 4, 3, 2]),
    ],
    ids=[
        "fifo",
        "sjf",
        "edf",
        "slack",
        "niyama",
        "niyama-0",
        "vtc",
        "first",
        "first-none",
        "first-5.6",
        "score",
    ],
)
def test_one_small_table_under_every_order(order: Any, expected: list[int]) -> None:
    line = Line(order)
    line.add(A, 6.0, work=5 * S, tokens=500)
    line.add(B, 4.0, work=4 * S, tokens=400)
    line.add(C, 9.0, work=3 * S)
    line.add(C, 5.5, work=2 * S)
    for way, service in ((A, 1), (B, 3), (C, 2)):
        line.charge(way, service)
    assert served(line) == expected


def test_niyama_sets_the_hopeless_behind_everybody() -> None:
    line = Line(Niyama())
    lost = line.add(A, 1, tokens=1)
    line.add(B, 5, tokens=4_000)
    line.add(A, 6, tokens=8_000)
    assert line.wait(1.5) == [RequestId(lost)]
    assert served(line) == [2, 3, lost]


# The tree ------------------------------------------------------------------------------------


def hold(line: Line, *ways: Any) -> None:
    """Let enough wait on each way for a test's turns."""
    for way in ways:
        for _ in range(40):
            line.add(way, 5)


def test_each_level_shares_by_its_own_weights() -> None:
    """Classes 4 : 1, then organisations 2 : 1, then tenants 1 : 1."""
    line = Line()
    ways = [
        path(klass(CHAT, 4), org("big", 2), tenant("a")),
        path(klass(CHAT, 4), org("big", 2), tenant("b")),
        path(klass(CHAT, 4), org("small"), tenant("c")),
        path(klass(BATCH), tenant("d")),
    ]
    hold(line, *ways)
    turns = [ways.index(line.serve(1_000)) for _ in range(60)]
    assert [turns.count(nth) for nth in range(4)] == [16, 16, 16, 12]
    shares_are_sound(line.shares, line.backlog)


def test_users_of_a_tenant_have_equal_parts_of_its_own() -> None:
    line = Line()
    ways = [path(klass(CHAT), tenant("a"), user(f"u{nth}")) for nth in range(9)]
    hold(line, *ways, B)
    turns = [line.serve(100) for _ in range(36)]
    assert turns.count(B) == 18
    assert {turns.count(way) for way in ways} == {2}
    assert line.backlog.tenants[ways[0][1].key] == 9 * 40 - 18, "counted for the tenant"


def test_a_lane_is_apart_from_all_classes() -> None:
    line = Line()
    ops = path(lane("admin", least=0.1), klass("ops"), tenant("a"))
    hold(line, *(path(klass(f"c{nth:02}"), tenant("a")) for nth in range(30)), ops)
    turns = [line.serve(100) for _ in range(100)]
    assert turns.count(ops) >= 10


def test_a_turn_is_explained_level_by_level() -> None:
    line = Line(rules=Rules(boost=70, boost_ns=seconds_(3)))
    mine = path(klass(CHAT, 2), org("o", least=0.5), tenant("a", 7))
    other = path(klass(CHAT, 2), org("p", most=0.2), tenant("b"))
    line.add(mine, 2)
    line.add(other, 5)
    line.add(batch("b"), 5)
    line.charge(mine, 700)
    line.charge(other, 300)
    line.charge(batch("b"), 450)
    terms = line.backlog.terms(line.order, line.shares, mine[-1].key)
    assert [(t.level, t.name, t.counter, t.least, t.weight) for t in terms] == [
        (Level.CLASS, "chat", 500, 450, 2),
        (Level.ORGANISATION, "o", 700, 700, 1),
        (Level.TENANT, "a", 100, 100, 7),
    ]
    assert [t.band for t in terms] == [Band.FAIR, Band.FAIR, Band.FAIR]
    assert [t.ahead for t in terms] == [0, 0, 10]
    line.charge(other, 900)
    assert line.backlog.terms(line.order, line.shares, mine[-1].key)[1].band is Band.MINIMUM
    assert line.backlog.terms(line.order, line.shares, other[-1].key)[1].band is Band.CAPPED
    one_line = Line(Fifo())
    one_line.add(mine)
    assert one_line.backlog.terms(Fifo(), one_line.shares, mine[-1].key) == ()


def seconds_(count: int) -> Any:
    return count * S


def test_candidates_are_the_lowest_queues_of_each_class_not_blocked() -> None:
    line = Line(Score())
    ways = [chat(f"t{nth}") for nth in range(6)]
    for nth, way in enumerate(ways):
        line.add(way)
        line.charge(way, 10 * (nth + 1))
    other = batch("b")
    line.add(other)
    keys = [way[-1].key for way in ways]
    found = line.backlog.candidates(line.shares, NONE, 3)
    assert found == (other[-1].key, *keys[:3]), "class by class, in the order of their turns"
    assert line.backlog.candidates(line.shares, frozenset({BATCH}), 1) == (keys[0],)
    assert line.backlog.candidates(line.shares, frozenset({BATCH, CHAT}), 3) == ()


def test_candidates_are_urgent_if_any_are() -> None:
    line = Line(Score())
    line.add(A, 1)
    line.wait(2)
    hopeless = A[-1].key
    assert line.backlog.candidates(line.shares, NONE, 8) == (hopeless,)
    line.add(B, 1)
    assert line.backlog.candidates(line.shares, NONE, 8) == (B[-1].key,)


# Who makes room ------------------------------------------------------------------------------


def over(line: Line, slo_class: ClassName = CHAT) -> str:
    return line.backlog.furthest_over(line.order, line.shares, slo_class).way[-1].name


def test_the_furthest_over_its_share_is_the_largest_counter_in_that_class() -> None:
    line = Line()
    line.add(A)
    line.add(batch("b"))
    line.add(C, 100)
    for way, service in ((A, 10), (batch("b"), 30), (C, 20)):
        line.charge(way, service)
    assert over(line) == "c", "lending or not"
    assert over(line, BATCH) == "b"
    line.charge(A, 30)
    assert over(line) == "a"


def test_of_equals_the_one_with_most_work_waiting_for_its_weight_is_furthest_over() -> None:
    line = Line()
    for _ in range(3):
        line.add(chat("hog"))
    line.add(chat("late"), 100)
    line.add(chat("zoe"))
    assert over(line) == "hog"
    for _ in range(8):
        line.add(chat("rich", 3))
    assert over(line) == "hog", "80 / 3 is less than 30"
    for _ in range(3):
        line.add(chat("late"), 100)
    assert over(line) == "late", "lending or not"


def test_whoever_is_over_its_maximum_makes_room_before_all_others() -> None:
    """Those over it are ranked by how far they are, not by their turns."""
    line = Line()
    ways = {name: chat(name, 9, most=0.1) for name in "xyz"}
    for way in (*ways.values(), A):
        line.add(way)
    for name, service in (("x", 900), ("y", 600), ("z", 700)):
        line.charge(ways[name], service)
    line.charge(A, 500)
    assert line.counter(A) > line.counter(ways["x"])
    assert over(line) == "x"
    line.take(1)
    assert over(line) == "z"


@pytest.mark.parametrize("order", [Fifo(), ShortestFirst(), EarliestDeadline(), LeastSlack()])
def test_in_one_line_the_last_of_it_makes_room(order: Any) -> None:
    line = Line(order)
    line.add(A, 1, work=1)
    line.add(B, 2, work=2)
    line.add(C, 3, work=3)
    assert over(line) == "c"


def test_in_one_line_the_hopeless_make_room_first() -> None:
    line = Line(Niyama())
    line.add(A, 1, starve_s=60)
    line.wait(2)
    line.add(B, 5, tokens=100_000)
    assert over(line) == "a"


# Weights of those who compete ----------------------------------------------------------------


def competing(line: Line) -> int:
    siblings = line.shares.sides[Side.URGENT].get(A[0].key)
    return 0 if siblings is None else siblings.weight


def test_weights_are_those_of_competing_tenants() -> None:
    line = Line()
    rich = chat("a", 3)
    first = line.add(rich)
    second = line.add(rich)
    line.add(B)
    line.add(chat("lender", 50), 100)
    assert competing(line) == 4
    assert line.take(first) is not None
    assert line.take(second) is None
    assert competing(line) == 1


def test_a_lenders_weight_counts_once_it_competes_and_no_longer() -> None:
    line = Line()
    rich = chat("lender", 50)
    lender = line.add(rich, 12)
    line.add(chat("a", 2), 9)
    assert competing(line) == 2
    line.wait(2)
    assert competing(line) == 52
    line.charge(rich, 7)
    assert competing(line) == 52
    line.wait(7.000000001)
    assert competing(line) == 50, "what is late competes for nothing"
    assert line.take(lender) is None
    assert competing(line) == 0


# Bounds on waiting ---------------------------------------------------------------------------


def test_a_lender_without_a_deadline_lets_others_pass_for_so_long_only() -> None:
    """Then it has its turn by its share, and is not taken for hopeless."""
    line = Line()
    work = line.add_for_ever(A, starve_s=60)
    urgent = [line.add(B, 200, starve_s=None) for _ in range(3)]
    line.add(C, 1_000)
    line.charge(B, 50)
    assert line.turn() == work, "all can wait: it is the least counter's turn"
    line.wait(59.999999999)
    rush = line.add(B, 2)
    assert line.turn() == rush
    line.wait(0.000000001)
    found = line.look()
    assert found is not None
    assert (found.request, found.relegated, found.patient) == (work, False, False)
    assert line.wait(120) == [RequestId(rush)], "what waits without a deadline is never hopeless"
    found = line.look()
    assert found is not None
    assert (found.request, found.relegated) == (work, False)
    assert urgent


def test_the_hopeless_let_others_pass_for_so_long_only() -> None:
    line = Line()
    lost = line.add(A, 1, starve_s=60)
    line.wait(2)
    rush = line.add(B, 50)
    line.charge(B, 5)
    line.add(A, 100)
    line.wait(57.999999999)
    line.add(B, 5)
    assert line.turn() != lost
    line.wait(0.000000001)
    found = line.look()
    assert found is not None
    assert (found.request, found.patient) == (lost, False)
    assert not found.relegated, "who has starved is sent as work that is due"
    assert rush


def test_who_has_starved_goes_by_its_share_and_not_before() -> None:
    line = Line()
    starving = line.add_for_ever(A, starve_s=60)
    rush = line.add(B, 5)
    line.charge(A, 201)
    line.charge(B, 100)
    line.wait(5)
    line.take(rush)
    line.wait(55)
    rush = line.add(B, 5)
    assert line.counter(B) == 201, "lifted to the one that waits"
    line.charge(A, 1)
    assert line.turn() == rush
    line.charge(B, 2)
    assert line.turn() == starving


def test_patience_is_told_by_the_key() -> None:
    assert is_patient(TenantFirst(), 10 * S + 1, InstantNs(0))
    assert not is_patient(TenantFirst(), 10 * S, InstantNs(0))
    assert not is_patient(TenantFirst(lend_after_ms=None), 10**18, InstantNs(0))
    assert not is_patient(Fifo(), 10**18, InstantNs(0))


def test_a_wait_ends_when_its_caller_says() -> None:
    line = Line()
    first = line.add(A, 50, until_s=3)
    line.add(A, 50)
    line.add(A, 50, until_s=2)
    assert line.backlog.next_change() == BEGIN + 2 * S
    assert line.backlog.overdue(line.now) is None
    line.wait(2)
    assert line.backlog.overdue(line.now) == 3
    line.take(3)
    assert line.backlog.overdue(line.now) is None
    line.wait(1)
    assert line.backlog.overdue(line.now) == first


def test_it_comes_back_from_bytes_as_it_was() -> None:
    line = Line(rules=Rules(aging=3, boost=500, boost_ns=seconds_(2), memory=10_000))
    ways = [
        path(klass(CHAT, 4), org("o", least=0.2), tenant("a"), user("u")),
        path(klass(CHAT, 4), tenant("b", most=0.3)),
        path(lane("admin"), klass("ops"), tenant("a")),
        batch("c"),
    ]
    for nth, way in enumerate(ways * 3):
        line.add(way, 3 * nth + 1, starve_s=60 if nth % 4 == 3 else None, until_s=90)
        line.charge(way, 100 * nth + 7)
    line.wait(3)
    state = msgspec.msgpack.encode((line.shares, line.backlog))
    shares, backlog = msgspec.msgpack.decode(state, type=tuple[Shares, Backlog])
    assert (shares, backlog) == (line.shares, line.backlog)
    assert shares.sides[0][ways[1][0].key] is not line.shares.sides[0][ways[1][0].key]
    other = Line(rules=line.shares.rules)
    other.shares, other.backlog, other.now, other.ids = shares, backlog, line.now, line.ids
    for _ in range(12):
        assert other.look() == line.look()
        assert other.serve(50) == line.serve(50)
        assert other.wait(1) == line.wait(1)
        shares_are_sound(shares, backlog)


@pytest.mark.parametrize("least", [5.0, 10.5, 14.0, 40.0])
def test_a_queue_lends_no_turn_once_any_of_its_requests_must_go(least: float) -> None:
    """A long prompt with a later deadline than the head's has to be sent sooner."""
    line = Line()
    line.add(A, 60.0)
    line.add(A, least, work=61 * S - round(least * S))
    rival = line.add(B, 1_000.0)
    side = Side.LENDING if least > 10 else Side.URGENT
    assert line.backlog.queues[A[-1].key].side is side
    line.take(rival)
    line.wait(max(0.0, least - 10.001))
    assert line.backlog.queues[A[-1].key].side is side
    line.wait(0.002)
    assert line.backlog.queues[A[-1].key].side is Side.URGENT
    assert line.turn() == 1, "the earliest deadline goes first, and the others the sooner for it"
