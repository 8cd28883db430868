"""From vLLM's state to a view, from knobs to its limits, and who gives way in a step."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from headrace.adapters.vllm_plugin.guests import Guest, Guests
from headrace.adapters.vllm_plugin.turning import LOOKUPS, VICTIMS, Sizes, Turner, split
from headrace.model.profile import Profile
from headrace.policy.batching import ChunkedPrefill
from headrace.policy.batching.knobs import (
    FRONT_PROMPTS,
    ONE_STEP,
    BatchView,
    Break,
    Entry,
    Holds,
    Key,
    Knobs,
)
from headrace.policy.batching.preemption import Victims
from headrace.units import NS_PER_MS, InstantNs
from tests.adapters.vllm_plugin.fakes import BEGIN, SIZES, Request, guests, scheduler, told
from tests.replica.scenes import FLAT_DECODE, FLAT_MIXED, job, run_to, small
from tests.replica.scenes import engine as emulated

PROFILE = small(decode=FLAT_DECODE, mixed=FLAT_MIXED)


class Said(Struct):
    """A policy that says what it is told to, and keeps what it saw."""

    knobs_: Knobs = Knobs(token_budget=64, running_limit=8)
    seen: list[BatchView] = []

    def knobs(self, view: BatchView) -> Knobs:
        self.seen.append(view)
        return self.knobs_

    def victim_key(self, entry: Entry) -> Key:
        return (entry.arrived_at, entry.attempt)


class Line:
    """Who waits, in this order."""

    def __init__(self, *waiting: Guest) -> None:
        self.waiting = waiting
        self.tokens = sum(one.request.num_tokens for one in waiting)

    def in_line(self) -> Any:
        return iter(self.waiting)

    def account(self, tokens: Any = None) -> None:
        pass


def turner(
    said: Said | None = None,
    *,
    sizes: Sizes = SIZES,
    victims: Victims = Victims.FAIR,
    profile: Profile = PROFILE,
    by_priority: bool = False,
) -> Turner:
    return Turner(said or Said(), profile, sizes, victims, by_priority=by_priority)


def running(here: Guests, name: str, extra: dict[str, object] | None = None, **more: Any) -> Guest:
    """Let a request arrive and run: a decode, unless `prompt` tokens are not all `computed`."""
    made, prompt = more.get("made", 1), more.get("prompt", 10)
    request = Request(name, prompt, priority=more.get("priority", 0), arrival_time=len(here))
    request.num_computed_tokens = more.get("computed", prompt + made - 1)
    request.num_output_tokens = made
    request.is_prefill_chunk = request.num_computed_tokens < prompt
    guest = here.arrive(request, extra, BEGIN)
    here.line.push(guest.seat(), BEGIN)
    here.line.take(guest.n, BEGIN)
    here.start(guest, 0)
    return guest


def requests(*guests: Guest) -> list[Any]:
    return [guest.request for guest in guests]


# When the policy is asked ------------------------------------------------------------------------


def asked(said: Said, steps: list[tuple[int, Break]]) -> list[bool]:
    """Return at which of these steps the policy was asked: each some ms after the last, with changes."""
    one, here, plan, found = turner(said), guests(), scheduler(), []
    now = BEGIN
    for after_ms, changed in steps:
        now = InstantNs(now + after_ms * NS_PER_MS)
        one.changed |= changed
        before = len(said.seen)
        one.knobs(plan, here, Line(), now)
        found.append(len(said.seen) > before)
    return found


def saying(holds: Holds) -> Said:
    return Said(Knobs(token_budget=64, running_limit=8, holds=holds), [])


NOTHING, ARRIVAL, END = Break.NOTHING, Break.ARRIVAL, Break.END


def test_knobs_that_hold_a_step_are_asked_for_at_each() -> None:
    assert asked(saying(ONE_STEP), [(1, NOTHING)] * 3) == [True] * 3


def test_knobs_hold_for_so_many_steps() -> None:
    holds = Holds(max_steps=2, breaks_on=Break.NOTHING)
    assert asked(saying(holds), [(1, Break.ANYTHING)] * 5) == [True, False, True, False, True]


def test_knobs_hold_until_an_instant() -> None:
    holds = Holds(max_steps=None, until=InstantNs(BEGIN + 5 * NS_PER_MS), breaks_on=Break.NOTHING)
    steps = [(1, NOTHING), (3, END), (1, NOTHING), (1, NOTHING)]
    assert asked(saying(holds), steps) == [True, False, True, True]


def test_knobs_hold_until_what_they_break_on() -> None:
    holds = Holds(max_steps=None, breaks_on=Break.COMPOSITION)
    steps = [(1, ARRIVAL), (1, ARRIVAL), (1, END), (1, NOTHING), (1, ARRIVAL | END)]
    assert asked(saying(holds), steps) == [True, False, True, False, True]


def test_prompt_that_may_be_done_breaks_what_holds_until_a_first_token() -> None:
    said = saying(Holds(max_steps=None, breaks_on=Break.FIRST_TOKEN))
    one, here = turner(said), guests()
    prefill = running(here, "p", prompt=10, computed=4, made=0)
    plan = scheduler(*requests(prefill))
    for _ in range(2):
        one.turn(plan, here, one.knobs(plan, here, Line(), BEGIN))
    assert len(said.seen) == 2
    plan.running = []
    for _ in range(3):
        one.turn(plan, here, one.knobs(plan, here, Line(), BEGIN))
    assert len(said.seen) == 3


# Limits ------------------------------------------------------------------------------------------


@given(
    st.integers(1, 5_000),
    st.integers(1, 50),
    st.none() | st.integers(1, 3_000),
    st.integers(0, 20),
    st.integers(1, 4),
    st.sampled_from([0, 100]),
)
def test_limits_are_never_beyond_vllms_nor_below_what_decodes_need(
    budget: int, slots: int, chunk: int | None, decodes: int, decode_tokens: int, own_chunk: int
) -> None:
    sizes = replace(SIZES, decode_tokens=decode_tokens, chunk=own_chunk, slots=20)
    here = guests()
    plan = scheduler(*requests(*(running(here, f"{n}") for n in range(decodes))), sizes=sizes)
    knobs = Knobs(token_budget=budget, running_limit=slots, chunk_limit=chunk)
    turner(sizes=sizes).turn(plan, here, knobs)
    needed = decodes * decode_tokens
    assert plan.max_num_scheduled_tokens == min(512, max(budget, needed))
    assert plan.max_num_active_reqs == min(20, slots)
    threshold = plan.scheduler_config.long_prefill_token_threshold
    assert threshold == (own_chunk if chunk is None else max(chunk, decode_tokens))


def test_vllms_own_limits_stand_where_the_policy_has_none() -> None:
    sizes = replace(SIZES, budget=300, slots=5, chunk=77)
    plan = scheduler(sizes=sizes)
    profile = small(budget=300, running=5)
    here = guests()
    knobs = ChunkedPrefill().knobs(turner(profile=profile).view(plan, here, Line(), BEGIN))
    turner(sizes=sizes).turn(plan, here, Knobs(token_budget=8, running_limit=1, chunk_limit=2))
    turner(sizes=sizes).turn(plan, here, knobs)
    assert (plan.max_num_scheduled_tokens, plan.max_num_active_reqs) == (300, 5)
    assert plan.scheduler_config.long_prefill_token_threshold == 77


@given(st.lists(st.booleans(), max_size=12))
def test_decodes_go_before_prompts_each_in_their_order(prefill: list[bool]) -> None:
    here = guests()
    before = requests(
        *(
            running(here, f"{n}", told(), computed=4 if one else 10, made=0 if one else 1)
            for n, one in enumerate(prefill)
        )
    )
    plan = scheduler(*before)
    turner().turn(plan, here, Knobs(token_budget=64, running_limit=8))
    assert plan.running == sorted(before, key=lambda one: one.is_prefill_chunk)
    decodes, prefills = split(before)
    assert plan.running == decodes + prefills


@pytest.mark.parametrize(("budget", "kept"), [(512, True), (511, False)])
def test_without_metadata_who_runs_keeps_vllms_order_under_vllms_budget(
    budget: int, kept: bool
) -> None:
    here = guests()
    before = requests(
        running(here, "prompt", prompt=100, computed=30, made=0), running(here, "decode")
    )
    plan = scheduler(*before)
    turner().turn(plan, here, Knobs(token_budget=budget, running_limit=8))
    assert plan.running == (before if kept else before[::-1])


# Views -------------------------------------------------------------------------------------------


def test_view_is_that_of_an_emulated_engine_in_the_same_state() -> None:
    """Steps of 5 ms: one decodes, one began its prompt of 100, the last has no slot."""
    said = Said(Knobs(token_budget=20, running_limit=2), [])
    replica = emulated(PROFILE, said)
    for attempt, prompt in ((1, 8), (2, 100), (3, 12)):
        replica.submit(job(attempt, prompt, 9, bound_ms=20, deadline=attempt), InstantNs(0))
    run_to(replica, 10 * NS_PER_MS)
    expected = said.seen[2]

    here = guests()
    first = running(here, "1", told(gap_ms=20), prompt=8, made=2)
    second = running(here, "2", told(gap_ms=20), prompt=100, computed=19, made=0)
    third = here.arrive(Request("3", 12), told(gap_ms=20), BEGIN)
    for guest in (first, second, third):
        guest.deadline = InstantNs(guest.n)
    plan = scheduler(*requests(first, second), waiting=[Request("3")])
    plan.kv_cache_manager.block_pool.free = 61
    assert turner().view(plan, here, Line(third), InstantNs(10 * NS_PER_MS)) == expected


def test_free_blocks_are_told_in_blocks_of_16_tokens() -> None:
    plan = scheduler(blocks=10)
    view = turner(sizes=replace(SIZES, block_tokens=128)).view(plan, guests(), Line(), BEGIN)
    assert view.free_blocks == 80
    assert view.tightest_gap_ns is None


def test_waiting_prompts_are_looked_up_as_far_as_is_cheap() -> None:
    here = guests()
    waiting = [here.arrive(Request(f"{n}", 100), told(), BEGIN) for n in range(30)]
    plan = scheduler()
    plan.kv_cache_manager.found = {f"{n}": 64 for n in range(30)}
    fronts = turner().view(plan, here, Line(*waiting), BEGIN).fronts
    assert [one.position for one in fronts] == [64] * LOOKUPS + [0] * (FRONT_PROMPTS - LOOKUPS)
    assert [one.left for one in fronts] == [36] * LOOKUPS + [100] * (FRONT_PROMPTS - LOOKUPS)
    assert len(plan.kv_cache_manager.looked) == LOOKUPS


def test_prompts_under_way_stand_before_those_that_wait() -> None:
    here = guests()
    under_way = running(here, "p", told(relegated=True), prompt=100, computed=40, made=0)
    waiting = here.arrive(Request("w", 7), told(), BEGIN)
    plan = scheduler(*requests(under_way), Request("nobody knows"))
    fronts = turner().view(plan, here, Line(waiting), BEGIN).fronts
    assert [(one.position, one.left, one.relegated) for one in fronts] == [
        (40, 60, True),
        (0, 7, False),
    ]


# Who gives way -----------------------------------------------------------------------------------


def ranked(
    here: Guests, *order: Guest, free: int = 0, sizes: Sizes = SIZES, **more: Any
) -> list[str]:
    """Return who would give way, first to last, by vLLM's rule: the largest priority of all."""
    plan = scheduler(*requests(*order), sizes=sizes)
    plan.kv_cache_manager.block_pool.free = free
    raised = turner(sizes=sizes, **more).rank_victims(plan, here)
    line = sorted(requests(*raised), key=lambda one: -one.priority)
    others = [one.priority for one in plan.running if one not in line]
    assert all(one.priority > max(others, default=0) for one in line)
    for guest in raised:
        guest.request.priority = guest.own_priority
    return [one.request_id for one in line]


def test_relegated_then_the_loosest_class_gives_way() -> None:
    here = guests()
    tight = running(here, "tight", told(gap_ms=20))
    loose = running(here, "loose", told(gap_ms=500))
    late = running(here, "late", told(gap_ms=20, relegated=True))
    assert ranked(here, tight, late, loose) == ["late", "loose", "tight"]


def test_who_is_below_its_share_gives_way_last() -> None:
    here = guests()
    poor = running(here, "poor", told("poor", gap_ms=500, relegated=True))
    rich = [running(here, f"rich {n}", told("rich"), made=50) for n in range(2)]
    assert ranked(here, poor, *rich)[-1] == "poor"


def test_share_counts_what_was_made_up_to_now() -> None:
    here = guests()
    one, other = (
        running(here, name, told(name, gap_ms=gap)) for name, gap in (("a", 20), ("b", 90))
    )
    assert ranked(here, one, other) == ["b", "a"]
    first: Any = one.request
    first.num_output_tokens = 100
    assert ranked(here, one, other) == ["a", "b"]


def test_of_equals_the_one_with_the_least_to_lose_gives_way() -> None:
    here = guests()
    long, short = (running(here, name, told(), computed=n) for name, n in (("l", 90), ("s", 20)))
    assert ranked(here, long, short) == ["s", "l"]


def test_policy_may_choose_the_victims() -> None:
    here = guests()
    early, late = (running(here, name, told(relegated=name == "e")) for name in "el")
    assert ranked(here, early, late) == ["e", "l"]
    assert ranked(here, early, late, victims=Victims.POLICY) == ["l", "e"]


@pytest.mark.parametrize("groups", [1, 3])
def test_nobody_is_ranked_while_blocks_cannot_run_out(groups: int) -> None:
    """Two decodes need a block each at most, and 64 tokens 4 more; of each kind of cache."""
    here = guests()
    two = [running(here, name, told()) for name in "ab"]
    sizes = replace(SIZES, budget=64, groups=groups)
    assert ranked(here, *two, free=6 * groups, sizes=sizes) == []
    assert len(ranked(here, *two, free=6 * groups - 1, sizes=sizes)) == 2


@pytest.mark.parametrize(
    ("by_priority", "order"), [(True, ["2", "1", "0", "3"]), (False, ["3", "2", "1", "0"])]
)
def test_of_those_without_metadata_vllms_own_choice_gives_way(
    by_priority: bool, order: list[str]
) -> None:
    """The largest priority, then the last to come, or else the last to start; whoever is beside them."""
    for beside in ([], [20]):
        here = guests()
        own = [
            running(here, f"{n}", priority=p, prompt=90 - n) for n, p in enumerate((0, 2, 2, -1))
        ]
        marked = [running(here, "marked", told(gap_ms=gap)) for gap in beside]
        names = ranked(here, *own, *marked, by_priority=by_priority)
        assert [name for name in names if name != "marked"] == order


def test_no_more_are_ranked_than_a_step_may_take() -> None:
    here = guests()
    many = [running(here, f"{n}", told()) for n in range(VICTIMS + 9)]
    assert len(ranked(here, *many)) == VICTIMS


def test_nobody_is_ranked_where_nobody_runs() -> None:
    """In a pool smaller than a step's budget blocks may run out at once."""
    assert ranked(guests()) == []


def test_who_came_before_the_records_is_left_to_vllm() -> None:
    here = guests()
    known = running(here, "known", told())
    plan = scheduler(Request("nobody knows", priority=5), *requests(known))
    plan.kv_cache_manager.block_pool.free = 0
    assert turner().rank_victims(plan, here) == [known]
    assert plan.running[0].priority == 5
