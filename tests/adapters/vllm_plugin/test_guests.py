"""Who is in vLLM, and what they are charged: each prompt once, each token once, whatever happens when."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.vllm_plugin import guests as module
from headrace.adapters.vllm_plugin.guests import UNMARKED, Guest, Guests
from headrace.units import NS_PER_MS, seconds
from tests.adapters.vllm_plugin.fakes import BEGIN, RATES, Request, guests, told

UNREADABLE: list[dict[str, object]] = [
    told() | {"headrace_way": "no JSON"},
    told() | {"headrace_way": "[]"},
    told() | {"headrace_way": '[[3,"t",1,0],[1,"chat",1,0]]'},
    told() | {"headrace_left_ms": "soon"},
    told() | {"headrace_relegated": 2},
    {"headrace_way": '[[3,"t",1,0]]'},
]


def arrive(here: Guests, name: str, prompt: int = 10, **more: Any) -> Guest:
    """Let a request with metadata arrive, or one without: `tenant=None`."""
    scalars = None if more.get("tenant", "") is None else told(**more)
    return here.arrive(Request(name, prompt), scalars, BEGIN)


def counter(here: Guests, guest: Guest) -> int:
    return here.line.counter(guest.way)


def tenants(*names: str) -> Guests:
    """Return these tenants at 0, each with a request that waits for ever: nobody is lifted."""
    here = guests()
    for name in names:
        here.line.push(arrive(here, f"first of {name}", tenant=name).seat(), BEGIN)
    return here


def ask(guest: Guest) -> Any:
    """Return a guest's request, to change what vLLM counts of it."""
    return guest.request


def test_what_a_gateway_told_is_taken_over() -> None:
    here = guests()
    guest = arrive(here, "r", tenant="a", left_ms=-5, gap_ms=20, relegated=True, counters=(7, 9))
    assert (guest.tenant, guest.slo_class) == ("a", "chat")
    assert guest.deadline == BEGIN - 5 * NS_PER_MS
    assert guest.gap_ns == 20 * NS_PER_MS
    assert guest.relegated
    assert guest.seat().counters == (7, 9)
    assert (len(here), here.marked, here.unreadable) == (1, 1, 0)


@pytest.mark.parametrize("scalars", [None, {}, {"caller": "own"}])
def test_requests_without_metadata_are_one_tenant_more(scalars: dict[str, object] | None) -> None:
    here = guests()
    one = here.arrive(Request("one"), scalars, BEGIN)
    other = here.arrive(Request("other"), scalars, BEGIN)
    assert one.tenant == other.tenant == UNMARKED
    assert one.way == other.way
    assert one.deadline == BEGIN + seconds(10)
    assert (here.marked, here.unreadable) == (0, 0)


@pytest.mark.parametrize("scalars", UNREADABLE)
def test_metadata_that_cannot_be_read_is_none(scalars: dict[str, object]) -> None:
    here = guests()
    assert here.arrive(Request("r"), scalars, BEGIN).told is None
    assert (here.marked, here.unreadable) == (0, 1)


def test_beyond_the_bound_of_the_tree_nobody_new_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "NODES_MAX", 4)
    here = guests()
    for nth in range(20):
        guest = arrive(here, f"{nth}", tenant=f"tenant {nth}")
        here.line.push(guest.seat(), BEGIN)
    assert here.line.nodes <= 6  # one way more is let in whole, and the node of those that are not
    assert here.unreadable == 17


def test_prompt_is_charged_as_it_starts_what_was_found_less() -> None:
    here = tenants("t")
    guest = arrive(here, "r", 100)
    here.start(guest, 40)
    assert guest.cached == 40
    assert counter(here, guest) == RATES.amount(60, 40, 0)


def test_giving_way_and_coming_back_charges_nothing_again() -> None:
    here = tenants("t")
    guest = arrive(here, "r", 100)
    here.start(guest, 0)
    ask(guest).num_output_tokens = 5
    here.settle()
    before = counter(here, guest)
    here.stop(guest)
    here.start(guest, 64)
    here.settle()
    assert counter(here, guest) == before == RATES.amount(100, 0, 5)
    assert guest.cached == 0
    assert guest.target == 105


def test_what_was_told_on_arrival_is_old_after_the_start() -> None:
    here = guests()
    guest = arrive(here, "r", counters=(3, 3))
    here.start(guest, 0)
    assert guest.seat().counters == ()


def test_end_is_taken_once() -> None:
    here = tenants("t")
    guest = arrive(here, "r")
    here.start(guest, 0)
    ask(guest).num_output_tokens = 3
    here.leave(guest)
    here.leave(guest)
    assert counter(here, guest) == RATES.amount(10, 0, 3)
    assert "r" not in here
    assert (len(here), here.marked, here.running) == (1, 1, {})


def test_slots_are_taken_from_vllm_where_nobody_waited_in_our_line() -> None:
    here = tenants("t")
    stays, comes, goes = (arrive(here, name, 100) for name in "abc")
    here.start(stays, 0)
    here.start(goes, 0)
    before = counter(here, stays)
    comes.request.num_computed_tokens = 48
    here.follow([comes.request, stays.request, Request("nobody knows")], {"b": 32})
    assert list(here.running) == ["b", "a"]
    assert comes.cached == 16
    assert counter(here, stays) - before == RATES.amount(84, 16, 0)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["come", "start", "make", "settle", "stop", "end"]), st.integers(0, 5)
    ),
    max_size=60,
)


class Charged:
    """What two tenants must be charged, as their requests come and go."""

    def __init__(self) -> None:
        self.here = tenants("a", "b")
        self.alive: dict[int, Guest] = {}
        self.due = {"a": 0, "b": 0}
        self.seen = 0

    def come(self, nth: int) -> None:
        self.seen += 1
        self.alive[nth] = arrive(self.here, f"{self.seen}", 10 + nth, tenant="ab"[nth % 2])

    def start(self, nth: int) -> None:
        guest = self.alive[nth]
        if guest.request.request_id in self.here.running:
            return
        if not guest.prefilled:
            self.due[guest.tenant] += RATES.amount(10, nth, 0)
        self.here.start(guest, nth)

    def make(self, nth: int) -> None:
        """Make tokens, be it in flight as it gave way."""
        guest = self.alive[nth]
        if guest.prefilled:
            ask(guest).num_output_tokens += nth
            self.due[guest.tenant] += RATES.amount(0, 0, nth)

    def settle(self, _nth: int) -> None:
        self.here.settle()

    def stop(self, nth: int) -> None:
        self.here.stop(self.alive[nth])

    def end(self, nth: int) -> None:
        self.here.leave(self.alive.pop(nth))

    def look(self) -> None:
        """See that all of it was charged, and that nothing is left."""
        assert not self.alive
        for tenant, amount in self.due.items():
            first = self.here.get(f"first of {tenant}")
            assert first is not None
            assert counter(self.here, first) == amount
            self.here.leave(first)
        assert (len(self.here), self.here.running, self.here.marked) == (0, {}, 0)
        assert not self.here._tallies


@given(EVENTS)
def test_each_prompt_and_each_token_is_charged_once_in_whatever_order(
    events: list[tuple[str, int]],
) -> None:
    charged = Charged()
    for event, nth in events:
        if event == "settle" or (nth in charged.alive) is not (event == "come"):
            getattr(charged, event)(nth)
    for nth in list(charged.alive):
        charged.end(nth)
    charged.look()


def test_entry_tells_what_vllm_counts() -> None:
    here = guests()
    guest = arrive(here, "r", 100, tenant="a", gap_ms=30, relegated=True, counters=(5, 6), weight=3)
    here.line.push(guest.seat(), BEGIN)
    guest.request.num_computed_tokens = 102
    ask(guest).num_output_tokens = 3
    entry = here.entry(guest)
    assert (entry.attempt, entry.tenant, entry.weight) == (1, "a", 3)
    assert (entry.prompt_tokens, entry.computed, entry.made) == (100, 102, 3)
    assert (entry.gap_ns, entry.relegated, entry.counter) == (30 * NS_PER_MS, True, 6)
    assert entry.among == guest.way[0].key
    assert entry.arrived_at == BEGIN
