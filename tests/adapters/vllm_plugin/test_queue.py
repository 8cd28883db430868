"""The waiting queue in vLLM: none is lost, whoever is looked at is taken, and the order is ours or vLLM's own."""

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.adapters.vllm_plugin.guests import Guests
from headrace.adapters.vllm_plugin.queue import Looked, Ordered, TurnQueue
from headrace.policy.fairness.line import LATE_NS, Line, Seat
from headrace.policy.ordering.orders import EarliestDeadline, Fifo, Order, TenantFirst, VtcOrder
from headrace.replica.stream import Stream
from headrace.replica.turns import Turns
from headrace.units import NS_PER_MS, InstantNs
from tests.adapters.vllm_plugin.fakes import (
    BEGIN,
    RATES,
    TOKEN_NS,
    OwnQueue,
    Request,
    guests,
    scheduler,
    told,
)
from tests.replica.scenes import job

STEP_NS = 5 * NS_PER_MS
ORDERS = (Fifo(), EarliestDeadline(), VtcOrder(), TenantFirst())
POLICIES = ("fcfs", "priority")


class Brittle(Line):
    """A line that fails at the nth call from now, if it is told to."""

    __slots__ = ("fuse",)

    def __init__(self, order: Order) -> None:
        super().__init__(order, RATES, TOKEN_NS)
        self.fuse: int | None = None

    def _touch(self) -> None:
        if self.fuse is None:
            return
        self.fuse -= 1
        if self.fuse < 0:
            raise RuntimeError("planted")

    def push(self, seat: Seat, now: InstantNs, *, again: bool = False) -> None:
        self._touch()
        super().push(seat, now, again=again)
        self._touch()

    def head(self, now: InstantNs) -> int | None:
        self._touch()
        return super().head(now)

    def take(self, serial: int, now: InstantNs) -> None:
        self._touch()
        super().take(serial, now)
        self._touch()

    def charge_output(self, way: Any, before: int, after: int) -> None:
        self._touch()
        super().charge_output(way, before, after)


class Engine:
    """A queue, and what vLLM does with it."""

    def __init__(self, order: Order, policy: str = "fcfs") -> None:
        self.now = BEGIN
        self.line = Brittle(order)
        self.guests = Guests(self.line, LATE_NS)
        self.faults: list[Exception] = []
        self.running: list[Request] = []
        self.own = OwnQueue(policy)
        """vLLM's own queue, to which the same is done: the order in which it would go on."""
        self.ordered = Ordered(
            self.guests, OwnQueue(policy), lambda: self.now, lambda one: one.status == "running"
        )
        self.queue = TurnQueue(self.ordered, lambda: OwnQueue(policy), self.faults.append)
        self.names = count()

    def arrive(self, prompt: int = 10, extra: Any = None, *, priority: int = 0) -> Request:
        nth = next(self.names)
        request = Request(f"r{nth}", prompt, priority=priority, arrival_time=nth, extra=extra)
        self.guests.arrive(request, extra, self.now)
        self.queue.add_request(request)
        self.own.add_request(request)
        return request

    def peek(self) -> Request:
        return cast("Request", self.queue.peek_request())

    def pop(self) -> Request:
        """Look at the first and take it, as vLLM does."""
        looked = self.peek()
        fuse, self.line.fuse = self.line.fuse, None  # a fault just there: see below
        taken = cast("Request", self.queue.pop_request())
        self.line.fuse = fuse
        assert taken is looked
        self.own.remove_requests([taken])
        return looked

    def start(self, cached: int = 0) -> Request:
        request = self.pop()
        request.status, request.num_computed_tokens = "running", cached
        self.running.append(request)
        return request

    def skip(self, most: int) -> list[Request]:
        """Put the first by, and back at the end of the step."""
        by: deque[Request] = deque()
        for _ in range(min(most, len(self.queue))):
            by.appendleft(self.pop())
        self.queue.prepend_requests(by)
        self.own.prepend_requests(by)
        return list(by)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.status, request.num_computed_tokens = "preempted", 0
        self.queue.prepend_request(request)
        self.own.prepend_request(request)

    def drain(self) -> list[str]:
        """Start all; return their names."""
        return [self.start().request_id for _ in range(len(self.queue))]


class Machine(RuleBasedStateMachine):
    """Whatever vLLM does with the queue, and whatever fails in it."""

    @initialize(order=st.sampled_from(ORDERS), policy=st.sampled_from(POLICIES))
    def begin(self, order: Order, policy: str) -> None:
        self.engine = Engine(order, policy)
        self.fused = False

    @property
    def failed(self) -> bool:
        fuse = self.engine.line.fuse
        return fuse is not None and fuse < 0

    @rule(
        tenant=st.sampled_from([None, None, "a", "b"]),
        prompt=st.integers(1, 50),
        left_ms=st.integers(-20, 50),
        priority=st.integers(-2, 2),
        late=st.booleans(),
    )
    def arrive(
        self, tenant: str | None, prompt: int, left_ms: int, priority: int, *, late: bool
    ) -> None:
        extra = None if tenant is None else told(tenant, left_ms=left_ms, relegated=late)
        self.engine.arrive(prompt, extra, priority=priority)

    @rule(for_ns=st.integers(1, 30 * NS_PER_MS))
    def wait(self, for_ns: int) -> None:
        self.engine.now = InstantNs(self.engine.now + for_ns)

    @rule(made=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def make(self, made: list[int]) -> None:
        for request, tokens in zip(self.engine.running, made, strict=False):
            request.num_output_tokens += tokens

    @precondition(lambda self: self.engine.queue)
    @rule(cached=st.integers(0, 5))
    def start(self, cached: int) -> None:
        self.engine.start(cached)

    @precondition(lambda self: self.engine.queue)
    @rule(most=st.integers(1, 3))
    def skip(self, most: int) -> None:
        self.engine.skip(most)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), stale=st.integers(0, 1))
    def preempt(self, data: st.DataObject, stale: int) -> None:
        request = data.draw(st.sampled_from(self.engine.running))
        self.engine.preempt(request)
        request.num_output_tokens += stale  # what was in flight

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.engine.running))
        self.engine.running.remove(request)
        self.leave(request)

    @rule(data=st.data(), first=st.booleans())
    def abort(self, data: st.DataObject, *, first: bool) -> None:
        """Several at once, some of whom are not there; a stale token may end one before it is taken out."""
        waiting = self.engine.own.line()
        gone = data.draw(st.lists(st.sampled_from(waiting), unique=True)) if waiting else []
        unknown = [Request("nobody"), *self.engine.running[:1]]
        for request in gone if first else ():
            self.leave(request)
        self.engine.queue.remove_requests([*gone, *unknown])
        self.engine.own.remove_requests(gone)
        for request in () if first else gone:
            self.leave(request)

    def leave(self, request: Request) -> None:
        """End a request; as in the scheduler, a fault ends our order."""
        request.status = "finished"
        if self.failed:
            return
        guest = self.engine.guests.get(request.request_id)
        assert guest is not None
        try:
            self.engine.guests.leave(guest)
        except RuntimeError as fault:
            self.engine.queue.give_up()
            self.engine.faults.append(fault)

    @precondition(lambda self: not self.fused)
    @rule(fuse=st.integers(0, 30))
    def plant(self, fuse: int) -> None:
        self.fused = True
        self.engine.line.fuse = fuse

    @invariant()
    def none_is_lost_or_there_twice(self) -> None:
        queue, own = self.engine.queue, self.engine.own.waiting
        assert len(queue) == len(own)
        assert bool(queue) == bool(own)
        assert sorted(one.request_id for one in queue) == sorted(one.request_id for one in own)

    @invariant()
    def first_is_vllms_own_among_those_without_metadata(self) -> None:
        if not self.engine.queue:
            return
        first = self.engine.peek()
        line = self.engine.own.line()
        if not self.failed:
            line = [one for one in line if one.sampling_params.extra_args is None] or [first]
        if first.sampling_params.extra_args is None or self.failed:
            assert first is line[0]

    @invariant()
    def owner_is_told_once(self) -> None:
        assert len(self.engine.faults) == self.failed

    @invariant()
    def tokens_to_compute_are_those_of_who_waits(self) -> None:
        if not self.failed:
            sizes = self.engine.ordered._sizes
            assert self.engine.ordered.tokens == sum(sizes.values())
            assert len(sizes) == len(self.engine.queue)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        for request in self.engine.running:
            self.leave(request)
        if not self.failed:
            assert (len(self.engine.guests), self.engine.guests.marked) == (0, 0)
            assert not self.engine.guests._tallies
            assert not self.engine.faults


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# Order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("policy", "names"), [("fcfs", "r0 r1 r2 r3"), ("priority", "r2 r0 r3 r1")]
)
def test_without_metadata_the_order_is_vllms_own(order: Order, policy: str, names: str) -> None:
    engine = Engine(order, policy)
    for prompt, priority in ((500, 0), (1, 3), (100, -1), (7, 0)):
        engine.arrive(prompt, priority=priority)
    engine.now = InstantNs(BEGIN + 3 * LATE_NS)
    assert engine.drain() == names.split()


def test_who_gave_way_without_metadata_is_in_front_of_them_again() -> None:
    engine = Engine(TenantFirst())
    for _ in range(3):
        engine.arrive()
    gone = engine.start()
    gone.num_output_tokens = 4
    engine.preempt(gone)
    assert engine.drain() == ["r0", "r1", "r2"]


@pytest.mark.parametrize("extra", [None, told("a")])
def test_priority_that_was_raised_to_give_way_is_the_own_one_again(extra: Any) -> None:
    engine = Engine(TenantFirst(), "priority")
    request = engine.arrive(extra=extra, priority=3)
    engine.start()
    request.priority = 1 << 62
    engine.preempt(request)
    assert request.priority == 3


def test_who_gave_way_with_metadata_waits_for_its_turn() -> None:
    engine = Engine(TenantFirst())
    engine.arrive(extra=told("a"))
    gone = engine.start()
    engine.arrive(extra=told("b"))
    gone.num_output_tokens = 100
    engine.preempt(gone)
    assert engine.drain() == ["r1", "r0"]


def test_one_tenant_does_not_stand_behind_all_of_another() -> None:
    engine = Engine(TenantFirst())
    for tenant in "aaaab":
        engine.arrive(extra=told(tenant))
    assert engine.drain() == ["r0", "r4", "r1", "r2", "r3"]


def test_those_without_metadata_have_the_share_of_one_at_the_root() -> None:
    """Beside a class of weight 2 one in three, however many they are."""
    engine = Engine(TenantFirst())
    for nth in range(6):
        engine.arrive()
        engine.arrive(extra=told(f"{nth % 2}"))
    first = engine.drain()[:9]
    assert [int(name[1:]) % 2 for name in first].count(0) == 3


def test_tokens_made_since_a_look_may_put_another_in_front() -> None:
    engine = Engine(TenantFirst())
    for tenant in "abab":
        engine.arrive(extra=told(tenant))
    first, _ = engine.start(), engine.start()
    assert engine.peek().request_id == "r2"
    first.num_output_tokens = 1
    engine.now = InstantNs(engine.now + STEP_NS)
    assert engine.peek().request_id == "r3"


class Beside:
    """The queue in vLLM and that of the emulated engine, to which the same is done."""

    def __init__(self, order: Order) -> None:
        self.engine = Engine(order)
        self.turns = Turns(order, RATES, TOKEN_NS)
        self.streams: dict[str, Stream] = {}
        self.decoding: list[str] = []
        self.steps = 0

    def arrive(self, tenant: str, prompt: int, left_ms: int, counter: int, *, late: bool) -> None:
        counters = (counter, counter)
        extra = told(tenant, left_ms=left_ms, relegated=late, counters=counters)
        request = self.engine.arrive(prompt, extra)
        now, serial = self.engine.now, len(self.streams) + 1
        asked = job(
            serial, prompt, 1, tenant=tenant, counter=counter, relegated=late,
            deadline=now + left_ms * NS_PER_MS,
        )  # fmt: skip
        stream = self.streams[request.request_id] = Stream(asked, now, serial)
        self.turns.push(stream, now, self.steps)

    def head(self) -> str | None:
        stream = self.turns.head(self.engine.now, self.steps)
        return None if stream is None else f"r{stream.serial - 1}"

    def start(self, cached: int) -> None:
        """Start the first, which decodes from the next step on."""
        assert self.engine.peek().request_id == self.head()
        request = self.engine.start(cached)
        stream = self.streams[request.request_id]
        self.turns.take(stream, self.engine.now, self.steps)
        self.turns.prefill(stream, request.num_prompt_tokens - cached, cached)
        self.turns.board(stream, self.steps)
        self.decoding.append(request.request_id)

    def step(self) -> None:
        self.engine.ordered.account()
        self.steps += 1
        self.engine.now = InstantNs(self.engine.now + STEP_NS)
        for request in self.engine.running:
            request.num_output_tokens += 1

    def end(self) -> None:
        request = self.engine.running.pop(0)
        guest = self.engine.guests.get(request.request_id)
        assert guest is not None
        self.engine.ordered.account()
        self.engine.guests.leave(guest)
        self.turns.alight(self.streams[request.request_id], self.steps)


ARRIVALS = st.tuples(
    st.sampled_from("abc"),
    st.integers(1, 2_000),
    st.integers(-10, 12_000),
    st.integers(0, 10_000),
    st.booleans(),
)
DOINGS = st.lists(ARRIVALS | st.sampled_from(["start", "start", "step", "end"]), max_size=40)


@given(st.sampled_from(ORDERS), DOINGS)
def test_with_metadata_the_turns_are_those_of_the_emulated_engine(
    order: Order, doings: list[tuple[str, int, int, int, bool] | str]
) -> None:
    both = Beside(order)
    for doing in doings:
        if isinstance(doing, tuple):
            *asked, late = doing
            both.arrive(*asked, late=late)  # type: ignore[arg-type]
        elif doing == "start" and both.engine.queue:
            both.start(cached=0)
        elif doing == "step":
            both.step()
        elif doing == "end" and both.engine.running:
            both.end()
        if both.engine.queue:
            assert both.engine.peek().request_id == both.head()
    while both.engine.queue:
        both.start(cached=0)
    assert both.head() is None


# Accounts ----------------------------------------------------------------------------------------


def test_prompt_is_charged_once_it_got_its_slot() -> None:
    engine = Engine(TenantFirst())
    for tenant in "ab":
        engine.arrive(100, told(tenant))
    engine.skip(1)
    assert engine.line.counter(engine.guests.get("r0").way) == 0  # type: ignore[union-attr]
    engine.start(cached=30)
    assert engine.peek().request_id == "r1"
    guest = engine.guests.get("r0")
    assert guest is not None
    assert (guest.cached, list(engine.guests.running)) == (30, ["r0"])
    assert engine.line.counter(guest.way) == RATES.amount(70, 30, 0)


def test_what_a_planned_step_computes_was_not_found_in_the_cache() -> None:
    engine = Engine(TenantFirst())
    engine.arrive(100, told("a"))
    request = engine.start(cached=32)
    request.num_computed_tokens += 50  # as vLLM counts once the step is planned
    engine.ordered.account({"r0": 50})
    guest = engine.guests.get("r0")
    assert guest is not None
    assert guest.cached == 32


def test_line_is_told_as_far_as_it_is_known() -> None:
    engine = Engine(TenantFirst())
    for tenant in "aab":
        engine.arrive(extra=told(tenant))
    line = [guest.request.request_id for guest in engine.ordered.in_line()]
    assert line == ["r0", "r2"], "the first of each queue"


def test_vllms_own_queue_may_be_looked_at() -> None:
    here, requests = guests(), [Request("a", 7), Request("nobody knows", 5)]
    guest = here.arrive(requests[0], None, BEGIN)
    looked = Looked(here, scheduler(waiting=requests))
    assert looked.tokens == 12
    assert list(looked.in_line()) == [guest]
    looked.account({"a": 7})
    assert not here.running


# Faults ------------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Engine], object]] = {
    "add": lambda engine: engine.arrive(extra=told("c")),
    "peek": lambda engine: engine.peek(),
    "skip": lambda engine: engine.skip(2),
    "preempt": lambda engine: engine.preempt(engine.running[0]),
    "abort": lambda engine: engine.queue.remove_request(engine.own.pop_request()),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_fault_vllms_own_order_goes_on_with_all_that_wait(call: str, policy: str) -> None:
    engine = Engine(TenantFirst(), policy)
    for nth, extra in enumerate((told("a"), None, told("b"), None, told("a"))):
        engine.arrive(extra=extra, priority=nth % 2)
    engine.start()
    engine.now = InstantNs(engine.now + STEP_NS)
    engine.line.fuse = 0
    CALLS[call](engine)
    assert [type(fault) for fault in engine.faults] == [RuntimeError]
    expected = [one.request_id for one in engine.own.line()]
    assert engine.drain() == expected
    with pytest.raises(IndexError):
        engine.peek()
    assert len(engine.faults) == 1


def test_who_was_looked_at_is_taken_even_if_that_fails() -> None:
    engine = Engine(EarliestDeadline())
    for left_ms in (500, 10):
        engine.arrive(extra=told("a", left_ms=left_ms))
    looked = engine.peek()
    engine.line.fuse = 0
    taken = engine.queue.pop_request()
    assert taken is looked
    assert [one.request_id for one in engine.queue] == ["r0"]


def test_owner_may_give_up_by_himself() -> None:
    engine = Engine(EarliestDeadline())
    for left_ms in (500, 10):
        engine.arrive(extra=told("a", left_ms=left_ms))
    assert engine.peek().request_id == "r1"
    engine.queue.give_up()
    engine.queue.give_up()
    assert engine.drain() == ["r0", "r1"]
    assert not engine.faults


def test_request_that_gave_way_may_be_over_before_it_is_taken_out() -> None:
    """Its last token was in flight: vLLM ends it first, and takes it out of the queue then."""
    engine = Engine(TenantFirst())
    for extra in (None, told("a")):
        engine.arrive(extra=extra)
        gone = engine.start()
        engine.preempt(gone)
        gone.num_output_tokens += 1
        guest = engine.guests.get(gone.request_id)
        assert guest is not None
        engine.guests.leave(guest)
        engine.queue.remove_requests([gone])
        assert not engine.queue
        assert not engine.faults
