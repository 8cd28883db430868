"""Turns are those that reading every waiting request anew would give, under every order."""

from collections.abc import Iterator
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import Struct

from headrace.model.ids import ClassName, RequestId
from headrace.model.paths import ROOT, Level, Path, Step, class_key, class_of, path
from headrace.policy.fairness.backlog import NEVER, NONE
from headrace.policy.fairness.shares import Rules
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
from headrace.units import MICRO, DurationNs
from tests.policy.fairness.line import BATCH, CHAT, Line, S, klass, lane, org, tenant, user
from tests.policy.fairness.sound import shares_are_sound

ORDERS = (
    Fifo(),
    ShortestFirst(),
    EarliestDeadline(),
    LeastSlack(),
    Niyama(),
    VtcOrder(),
    TenantFirst(),
    TenantFirst(lend_after_ms=None),
    Score(),
)
RULES = (
    Rules(),
    Rules(memory=50),
    Rules(aging=4, boost=30, boost_ns=DurationNs(2 * S)),
)
OPS, BACK = ClassName("ops"), ClassName("background")
WAYS = (
    path(klass(CHAT, 4), tenant("a")),
    path(klass(CHAT, 4), tenant("b", 3, most=0.5)),
    path(klass(CHAT, 4), org("o", 2), tenant("c", least=0.3)),
    path(klass(CHAT, 4), org("o", 2), tenant("d")),
    path(klass(BATCH, least=0.1), tenant("a"), user("u")),
    path(klass(BATCH, least=0.1), tenant("a"), user("v")),
    path(klass(BATCH, least=0.1), tenant("b")),
    path(lane("admin", least=0.05, most=0.3), klass(OPS), tenant("a")),
    path(lane("admin", least=0.05, most=0.3), klass(BACK, most=0.5), tenant("a")),
)
STARVES = {BATCH: 20.0, BACK: 5.0}
"""After how many seconds, by class; the others for ever."""


class Model(Struct):
    """One request, as a plain list knows it."""

    way: Path
    key: int
    start: int
    arrived: int
    starve_at: int
    """Without a bound so far off that only the order of arrival counts."""
    work: int
    late: bool = False


class Known(Struct):
    """What reading a queue's requests says of it."""

    way: Path
    urgent: bool
    turn: int
    """For one line."""
    request: int
    boosted: bool
    since: int


class AgainstPlainLists(RuleBasedStateMachine):
    """A backlog and the requests in it, side by side."""

    @initialize(order=st.sampled_from(ORDERS), rules=st.sampled_from(RULES))
    def begin(self, order: Any, rules: Rules) -> None:
        self.line = Line(order, rules)
        self.all: dict[int, Model] = {}

    @rule(
        way=st.sampled_from(WAYS),
        latest=st.sampled_from((-1, 0, 0.5, 3, 9, 10, 11, 40)),
        work=st.one_of(st.integers(0, 30), st.just(25 * S)),
        tokens=st.sampled_from((1, 4_000)),
    )
    def add(self, way: Path, latest: float, work: int, tokens: int) -> None:
        line, starve_s = self.line, STARVES.get(class_of(class_key(way)))
        # Only its own queue is brought up to date; others wait for their time, as in the plane.
        request = line.add(way, latest, work=work, tokens=tokens, starve_s=starve_s)
        waiting = line.backlog.slots[request]
        starve_at = NEVER + request if starve_s is None else line.now + round(starve_s * S)
        start = line.now + round(latest * S)
        self.all[request] = Model(way, waiting.key, start, line.now, starve_at, work)
        self.learn(way)

    def learn(self, way: Path | None = None) -> None:
        """Let what is past its latest start be late."""
        for one in self.all.values():
            if self.line.order.relegates and (way is None or one.way == way):
                one.late |= one.start < self.line.now

    @precondition(lambda self: self.all)
    @rule(nth=st.integers(0, 20))
    def take(self, nth: int) -> None:
        request = sorted(self.all)[nth % len(self.all)]
        one = self.all.pop(request)
        left = any(other.way == one.way for other in self.all.values())
        assert self.line.take(request) == (one.way[-1].key if left else None)

    @precondition(lambda self: self.all)
    @rule(service=st.integers(0, 40))
    def serve(self, service: int) -> None:
        found = self.line.look(*NONE)
        assert found is not None
        self.all.pop(found.request)
        self.line.serve(service)

    @rule(way=st.sampled_from(WAYS), service=st.integers(0, 60))
    def charge(self, way: Path, service: int) -> None:
        self.line.charge(way, service)

    @rule(seconds=st.sampled_from((0.0, 0.25, 1, 5, 31)))
    def wait(self, seconds: float) -> None:
        before = {request for request, one in self.all.items() if one.late}
        moved = self.line.wait(seconds)
        self.learn()
        assert set(moved) == {RequestId(one) for one in self.all if self.all[one].late} - before
        following = self.line.backlog.next_change()
        assert following is None or following > self.line.now

    # What a turn should be -------------------------------------------------------------------

    def queues(self) -> Iterator[Known]:
        for way in {one.way for one in self.all.values()}:
            yield self.read(way)

    def read(self, way: Path) -> Known:
        order, now, rules = self.line.order, self.line.now, self.line.shares.rules
        mine = [(request, one) for request, one in self.all.items() if one.way == way]
        ready = sorted((one.key, request) for request, one in mine if not one.late)
        late = sorted((one.starve_at, request) for request, one in mine if one.late)
        starved = bool(late) and late[0][0] <= now
        key, request = late[0] if starved or not ready else ready[0]
        lend = order.lend_after_ns
        hopeful = bool(ready)
        if hopeful and lend is not None:
            hopeful = min(ready[0][0], *(self.all[one].start for _, one in ready)) - now <= lend
        competing = order.by_share and not order.scores and lend is None
        boosted = bool(ready) and bool(rules.boost) and order.relegates and order.by_share
        if boosted:
            boosted = self.all[ready[0][1]].start - now <= rules.boost_ns
        since = self.all[request].arrived
        return Known(
            way, hopeful or starved or (bool(late) and competing), key, request, boosted, since
        )

    def expected(self, blocked: frozenset[ClassName]) -> int | None:
        open_ = [one for one in self.queues() if class_of(class_key(one.way)) not in blocked]
        for urgent in (True, False):
            side = [one for one in self.queues() if one.urgent is urgent]
            choice = [one for one in side if one in open_]
            if not choice:
                continue
            if not self.line.order.by_share:
                return min(choice, key=lambda one: (one.turn, one.way[-1].key)).request
            return next(self.walk(ROOT, 0, side, blocked)).request
        return None

    def walk(
        self, parent: str, depth: int, queues: list[Known], blocked: frozenset[ClassName]
    ) -> Iterator[Known]:
        """Yield queues below a node in the order of their turns."""
        shares = self.line.shares
        clock = shares.served.get(parent, 0)
        ranked = []
        for key in {one.way[depth].key for one in queues}:
            below = [one for one in queues if one.way[depth].key == key]
            step = below[0].way[depth]
            if step.level is Level.CLASS and class_of(key) in blocked:
                continue
            ranked.append((self.rank(step, depth, below, clock), key, below))
        for _, key, below in sorted(ranked, key=lambda one: one[:2]):
            if len(below[0].way) == depth + 1:
                yield below[0]
            else:
                yield from self.walk(key, depth + 1, below, blocked)

    def rank(self, step: Step, depth: int, below: list[Known], clock: int) -> tuple[int, int]:
        shares = self.line.shares
        if step.minimum and shares.lows[step.key] < clock:
            return 0, shares.lows[step.key]
        if step.maximum < MICRO and shares.highs[step.key] > clock:
            return 2, shares.highs[step.key]
        leaf = len(below[0].way) == depth + 1
        # An inner node is as old as the child of it that goes next.
        first = below[0] if leaf else next(self.walk(step.key, depth + 1, below, NONE))
        turn = shares.counters[step.key] + first.since * shares.rules.aging // S
        return 1, turn - (shares.rules.boost // step.weight if leaf and first.boosted else 0)

    @invariant()
    def turns_are_right(self) -> None:
        for blocked in (NONE, frozenset({CHAT}), frozenset({CHAT, BATCH}), frozenset({OPS})):
            assert self.line.turn(*blocked) == self.expected(blocked)

    @invariant()
    def something_goes_while_anything_waits(self) -> None:
        assert (self.line.turn() is not None) is bool(self.all)

    @invariant()
    def candidates_are_the_lowest(self) -> None:
        order = self.line.order
        if not order.by_share:
            return
        found = self.line.backlog.candidates(self.line.shares, NONE, 2)
        side = [one for one in self.queues() if one.urgent] or list(self.queues())
        expected: dict[ClassName, list[str]] = {}
        for one in self.walk(ROOT, 0, side, NONE):
            mine = expected.setdefault(class_of(class_key(one.way)), [])
            mine += [one.way[-1].key] if len(mine) < 2 else []
        assert list(found) == [key for mine in expected.values() for key in mine]

    @invariant()
    def tree_is_sound(self) -> None:
        shares_are_sound(self.line.shares, self.line.backlog)

    @invariant()
    def who_makes_room_waits_in_that_class(self) -> None:
        for slo_class in {class_of(class_key(one.way)) for one in self.all.values()}:
            found = self.line.backlog.furthest_over(self.line.order, self.line.shares, slo_class)
            assert found.slo_class == slo_class
            assert found.size


TestAgainstPlainLists = AgainstPlainLists.TestCase
TestAgainstPlainLists.settings = settings(max_examples=150, stateful_step_count=30)
