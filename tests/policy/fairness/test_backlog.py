"""Whose turn it is: by share, by urgency, by class; and when time alone changes that."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import Struct

from headrace.model.ids import ClassName, RequestId, TenantId
from headrace.policy.contracts import Order
from headrace.policy.fairness.backlog import LOOKED_AT, NONE, Backlog
from headrace.policy.ordering.orders import Fifo, TenantFirst
from headrace.units import InstantNs
from tests.plane.scenes import S

ORDER = TenantFirst()
CHAT, BATCH = ClassName("chat"), ClassName("batch")
BEGIN = InstantNs(100 * S)


class Queue:
    """A backlog with counters, as the plane keeps it."""

    def __init__(self, order: Order = ORDER) -> None:
        self.backlog = Backlog()
        self.order = order
        self.now = BEGIN
        self.counters: dict[str, int] = {}
        self.placed: dict[int, tuple[str, ClassName, int]] = {}
        self.ids = 0

    def add(
        self, tenant: str, latest_s: float, slo_class: ClassName = CHAT, *, weight: int = 1
    ) -> int:
        """Queue a request that must start within so many seconds; return its id."""
        self.ids += 1
        latest = InstantNs(self.now + round(latest_s * S))
        key = self.order.key(latest, self.ids)
        self.backlog.add(TenantId(tenant), weight, slo_class, (key, self.ids), 10)
        self.placed[self.ids] = (tenant, slo_class, key)
        self.refresh(tenant)
        return self.ids

    def take(self, request: int, *, late: bool = False) -> bool:
        tenant, slo_class, key = self.placed.pop(request)
        emptied = self.backlog.take(TenantId(tenant), slo_class, (key, request), late=late)
        if not emptied:
            self.refresh(tenant)
        return emptied

    def refresh(self, tenant: str) -> None:
        counter = self.counters.get(tenant, 0)
        self.backlog.refresh(self.order, TenantId(tenant), counter, self.now)

    def charge(self, tenant: str, counter: int) -> None:
        self.counters[tenant] = counter
        self.refresh(tenant)

    def wait(self, seconds: float) -> list[RequestId]:
        """Let time pass as the plane does; return what was relegated."""
        self.now = InstantNs(self.now + round(seconds * S))
        moved: list[RequestId] = []
        while (tenant := self.backlog.due(self.now)) is not None:
            moved += self.backlog.relegate(self.order, tenant, self.now)
            self.refresh(tenant)
        return moved

    def turn(self, *blocked: ClassName) -> tuple[str, int] | None:
        turn = self.backlog.next_turn(frozenset(blocked))
        return None if turn is None else (turn.tenant, turn.request)


def test_the_tenant_furthest_under_its_share_goes_first() -> None:
    queue = Queue()
    queue.counters = {"a": 30, "b": 10, "c": 20}
    for tenant in "abc":
        queue.add(tenant, 1)
    assert queue.turn() == ("b", 2)
    queue.charge("b", 25)
    assert queue.turn() == ("c", 3)
    assert queue.backlog.least() == "c"


def test_equal_counters_go_by_name_not_by_chance() -> None:
    queue = Queue()
    for tenant in ("zoe", "amy", "bob"):
        queue.add(tenant, 1)
    assert queue.turn() == ("amy", 2)


def test_within_a_tenant_the_least_slack_goes_first() -> None:
    queue = Queue()
    queue.add("a", 3)
    tight = queue.add("a", 1)
    queue.add("a", 2, BATCH)
    assert queue.turn() == ("a", tight)


def test_a_tenant_that_can_wait_ten_seconds_lends_its_turn() -> None:
    queue = Queue()
    queue.counters = {"patient": 0, "urgent": 10**9}
    queue.add("patient", 10.000000001)
    queue.add("urgent", 10)
    turn = queue.backlog.next_turn(NONE)
    assert turn is not None
    assert (turn.tenant, turn.lent) == ("urgent", True)
    assert queue.counters["patient"] == 0, "its counter stays"
    assert queue.backlog.least() == "urgent", "the least of those that compete"
    queue.take(2)
    assert queue.backlog.least() == "patient", "nobody else is there"


def test_a_lender_takes_its_turn_when_its_work_becomes_urgent() -> None:
    queue = Queue()
    queue.counters = {"patient": 0, "urgent": 10**9}
    queue.add("patient", 12)
    queue.add("urgent", 9)
    assert queue.backlog.next_change() == BEGIN + 2 * S
    queue.wait(1.999999999)
    assert queue.turn() == ("urgent", 2)
    queue.wait(0.000000001)
    assert queue.turn() == ("patient", 1)
    turn = queue.backlog.next_turn(NONE)
    assert turn is not None
    assert not turn.lent


def test_lenders_go_when_nobody_is_urgent() -> None:
    queue = Queue()
    queue.counters = {"a": 5, "b": 3}
    queue.add("a", 100)
    queue.add("b", 200)
    assert queue.turn() == ("b", 2)
    turn = queue.backlog.next_turn(NONE)
    assert turn is not None
    assert not turn.lent


def test_the_hopeless_lend_their_turn_and_wait_behind_their_own() -> None:
    queue = Queue()
    queue.counters = {"a": 0, "b": 100}
    lost = queue.add("a", 1)
    queue.add("b", 5)
    assert queue.turn() == ("a", lost)
    assert queue.wait(1) == [], "at its latest start it can still make it"
    assert queue.wait(0.000000001) == [RequestId(lost)]
    assert queue.turn() == ("b", 2)
    fresh = queue.add("a", 3)
    assert queue.turn() == ("a", fresh)
    queue.take(fresh)
    queue.take(2)
    turn = queue.backlog.next_turn(NONE)
    assert turn is not None
    assert (turn.tenant, turn.request, turn.relegated) == ("a", lost, True)
    assert queue.take(lost, late=True)
    assert queue.turn() is None


def test_relegation_is_once() -> None:
    queue = Queue()
    queue.add("a", 1)
    assert queue.wait(2) == [RequestId(1)]
    assert queue.backlog.next_change() is None, "nothing more can happen to it by time alone"
    assert queue.wait(1_000) == []


def test_a_blocked_class_holds_up_no_other() -> None:
    queue = Queue()
    queue.counters = {"a": 0, "b": 5}
    queue.add("a", 1, CHAT)
    queue.add("b", 50, BATCH)
    assert queue.turn(CHAT) == ("b", 2)
    own = queue.add("a", 60, BATCH)
    assert queue.turn(CHAT) == ("a", own)
    assert queue.turn(CHAT, BATCH) is None


def test_one_waiting_class_is_found_behind_any_number_of_blocked_tenants() -> None:
    queue = Queue()
    for nth in range(500):
        queue.add(f"chat-{nth:03}", 1, CHAT)
    queue.counters["last"] = 10**12
    wanted = queue.add("last", 1, BATCH)
    assert queue.turn(CHAT) == ("last", wanted)


def test_urgency_is_judged_by_class() -> None:
    """A tenant with urgent chat that is blocked does not push its patient batch before others."""
    queue = Queue()
    queue.counters = {"a": 0, "b": 5}
    queue.add("a", 1, CHAT)
    queue.add("a", 100, BATCH)
    urgent = queue.add("b", 5, BATCH)
    assert queue.turn(CHAT) == ("b", urgent)


def test_first_come_first_served_knows_no_tenants_and_no_deadlines() -> None:
    queue = Queue(Fifo())
    queue.counters = {"hog": 10**9}
    queue.add("hog", 100)
    queue.add("other", 0.001)
    queue.add("hog", 1)
    assert queue.backlog.next_change() is None
    served = []
    while (turn := queue.turn()) is not None:
        served.append(turn[1])
        queue.take(turn[1])
    assert served == [1, 2, 3]


def test_first_come_first_served_goes_by_class_where_some_are_blocked() -> None:
    queue = Queue(Fifo())
    queue.add("a", 1, CHAT)
    first = queue.add("b", 1, BATCH)
    queue.add("a", 1, BATCH)
    assert queue.turn(CHAT) == ("b", first)


def test_the_furthest_over_its_share_is_the_largest_counter_in_that_class() -> None:
    queue = Queue()
    queue.counters = {"a": 10, "b": 30, "c": 20}
    queue.add("a", 1)
    queue.add("b", 1, BATCH)
    queue.add("c", 100)
    assert queue.backlog.furthest_over(CHAT) == "c", "lending or not"
    assert queue.backlog.furthest_over(BATCH) == "b"
    assert queue.backlog.furthest_over(ClassName("none")) is None
    queue.charge("a", 40)
    assert queue.backlog.furthest_over(CHAT) == "a"
    assert Backlog().furthest_over(CHAT) is None
    assert Backlog().least() is None


def test_of_equals_the_one_with_most_work_waiting_for_its_weight_is_furthest_over() -> None:
    queue = Queue()
    for _ in range(3):
        queue.add("hog", 1)
    queue.add("late", 100)
    queue.add("zoe", 1)
    assert queue.backlog.furthest_over(CHAT) == "hog"
    for _ in range(8):
        queue.add("rich", 1, weight=3)
    assert queue.backlog.furthest_over(CHAT) == "hog", "80 / 3 is less than 30"
    for _ in range(3):
        queue.add("late", 100)
    assert queue.backlog.furthest_over(CHAT) == "late", "lending or not"


def test_weights_are_those_of_competing_tenants() -> None:
    queue = Queue()
    first = queue.add("a", 1, weight=3)
    second = queue.add("a", 1, weight=3)
    queue.add("b", 1)
    queue.add("lender", 100, weight=50)
    assert queue.backlog.weights == {CHAT: 4}
    assert not queue.take(first)
    assert queue.take(second)
    assert queue.backlog.weights == {CHAT: 1}


def test_a_lenders_weight_counts_once_it_competes_and_no_longer() -> None:
    queue = Queue()
    lender = queue.add("lender", 12, weight=50)
    queue.add("a", 9, weight=2)
    assert queue.backlog.weights == {CHAT: 2}
    queue.wait(2)
    assert queue.backlog.weights == {CHAT: 52}
    queue.charge("lender", 7)
    assert queue.backlog.weights == {CHAT: 52}
    queue.wait(7.000000001)
    assert queue.backlog.weights == {CHAT: 50}, "what is late competes for nothing"
    assert queue.take(lender)
    assert queue.backlog.weights == {CHAT: 0}


PRICE = Price("test", Linear(uncached=1))
"""One unit of service is one nanosecond."""


def test_what_goes_before_a_tenant_is_what_lifts_the_others_to_it_and_no_more_than_waits() -> None:
    queue = Queue()
    queue.counters = {"a": 99, "b": 95, "c": 0, "d": 100, "lender": 0}
    for tenant in "abcd":
        queue.add(tenant, 1, weight=2)
    queue.add("lender", 100)
    assert queue.backlog.before(CHAT, 100, PRICE, 1) == 2 + 10 + 10
    assert queue.backlog.before(CHAT, 100, PRICE, 3) == 6 + 10 + 10
    assert queue.backlog.before(CHAT, 0, PRICE, 1) == 0
    assert queue.backlog.before(BATCH, 100, PRICE, 1) == 0, "nobody waits there"


def test_beyond_the_first_few_the_rest_is_taken_together_and_never_for_too_little() -> None:
    queue = Queue()
    for nth in range(LOOKED_AT + 30):
        queue.counters[f"t{nth:02}"] = 80 + nth
        queue.add(f"t{nth:02}", 1)
    exact = sum(min(10, max(0, 100 - 80 - nth)) for nth in range(LOOKED_AT + 30))
    found = queue.backlog.before(CHAT, 100, PRICE, 1)
    assert exact < found <= queue.backlog.work[CHAT]
    assert queue.backlog.before(CHAT, 88, PRICE, 1) == 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=20),
    st.integers(0, 60),
    st.integers(1, 4),
)
def test_what_goes_before_never_exceeds_what_waits(
    others: list[tuple[int, int]], counter: int, class_weight: int
) -> None:
    queue = Queue()
    for nth, (theirs, weight) in enumerate(others):
        queue.counters[f"t{nth:02}"] = theirs
        queue.add(f"t{nth:02}", 1, weight=weight)
    found = queue.backlog.before(CHAT, counter, PRICE, class_weight)
    exact = sum(
        min(10, max(0, counter - theirs) * weight * class_weight) for theirs, weight in others
    )
    under = sum(theirs < counter for theirs, _ in others)
    assert 0 <= found <= queue.backlog.work.get(CHAT, 0)
    assert found == exact if under <= LOOKED_AT else found >= exact


class Model(Struct):
    """One request, as a plain list knows it."""

    tenant: str
    slo_class: ClassName
    latest: int
    late: bool = False


class AgainstPlainLists(RuleBasedStateMachine):
    """Turns are those that reading every request anew would give."""

    @initialize()
    def begin(self) -> None:
        self.queue = Queue()
        self.all: dict[int, Model] = {}

    @rule(
        tenant=st.sampled_from("abcd"),
        slo_class=st.sampled_from((CHAT, BATCH, ClassName("third"))),
        latest=st.sampled_from((-1, 0, 0.5, 3, 9, 10, 11, 40)),
    )
    def add(self, tenant: str, slo_class: ClassName, latest: float) -> None:
        request = self.queue.add(tenant, latest, slo_class)
        self.all[request] = Model(tenant, slo_class, self.queue.now + round(latest * S))
        moved = self.queue.backlog.relegate(ORDER, TenantId(tenant), self.queue.now)
        self.relegated(moved)
        self.queue.refresh(tenant)

    def relegated(self, moved: list[RequestId]) -> None:
        for request in moved:
            one = self.all[request]
            assert one.latest < self.queue.now
            assert not one.late
            one.late = True

    @precondition(lambda self: self.all)
    @rule(nth=st.integers(0, 20))
    def take(self, nth: int) -> None:
        request = sorted(self.all)[nth % len(self.all)]
        one = self.all.pop(request)
        emptied = self.queue.take(request, late=one.late)
        assert emptied is (one.tenant not in {other.tenant for other in self.all.values()})

    @rule(tenant=st.sampled_from("abcd"), counter=st.integers(0, 5))
    def charge(self, tenant: str, counter: int) -> None:
        self.queue.counters[tenant] = counter
        if any(one.tenant == tenant for one in self.all.values()):
            self.queue.refresh(tenant)

    @rule(seconds=st.sampled_from((0.0, 0.25, 1, 5, 31)))
    def wait(self, seconds: float) -> None:
        self.relegated(self.queue.wait(seconds))
        following = self.queue.backlog.next_change()
        assert following is None or following > self.queue.now

    def expected(self, blocked: frozenset[ClassName]) -> tuple[str, int] | None:
        now = self.queue.now
        best: tuple[bool, int, str] | None = None
        for one in self.all.values():
            if one.slo_class in blocked:
                continue
            urgent = not one.late and one.latest - now <= 10 * S
            rank = (not urgent, self.queue.counters.get(one.tenant, 0), one.tenant)
            best = rank if best is None else min(best, rank)
        if best is None:
            return None
        mine = [
            (one.late, one.latest, request)
            for request, one in self.all.items()
            if one.tenant == best[2] and one.slo_class not in blocked
        ]
        return best[2], min(mine)[2]

    @invariant()
    def turns_are_right(self) -> None:
        for blocked in (NONE, frozenset({CHAT}), frozenset({CHAT, BATCH})):
            assert self.queue.turn(*blocked) == self.expected(blocked)

    @invariant()
    def lateness_is_right(self) -> None:
        for one in self.all.values():
            assert one.late is (one.latest < self.queue.now)


TestAgainstPlainLists = AgainstPlainLists.TestCase
TestAgainstPlainLists.settings = settings(max_examples=150, stateful_step_count=30)
