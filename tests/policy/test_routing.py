"""Routing adds up seconds, and only replicas whose window is open are asked."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.policy.routing.seconds import UNBOUNDED, Seconds, is_open
from tests.policy.evidence import MS, S, route, view

SECONDS = Seconds()
STALE = 5 * S


def chosen(*views: Any, **changes: Any) -> str | None:
    placement = SECONDS.choose(route(*views, **changes), STALE)
    return None if placement is None else placement.replica


# Terms ---------------------------------------------------------------------------------------


def test_each_term_is_in_nanoseconds_and_they_add_up() -> None:
    busy = view(
        pending_prefill_ns=30 * MS,
        decodes=10,
        decode_extra_ns=50_000,
        blocks_reserved=400,
        prefix_credit_ns=80 * MS,
        age_ns=STALE + 1,
    )
    terms = SECONDS.terms(busy, output=200, blocks=100, stale_after_ns=STALE)
    assert terms.queue_ns == 30 * MS
    assert terms.interference_ns == 200 * 50_000
    assert terms.kv_ns == 12 * MS * 500 // 500  # half the pool in use: one step
    assert terms.prefix_credit_ns == 80 * MS, "as the view has it: the doubt is in there already"
    assert terms.staleness_ns == 500 * MS
    assert terms.total_ns == (30 + 10 + 12 + 500 - 80) * MS


def test_an_idle_replica_that_told_of_itself_costs_nearly_nothing() -> None:
    terms = SECONDS.terms(view(), output=200, blocks=10, stale_after_ns=STALE)
    assert terms.total_ns == terms.kv_ns == 12 * MS * 10 // 990


@pytest.mark.parametrize(
    ("age", "stale"), [(None, True), (STALE + 1, True), (STALE, False), (0, False)]
)
def test_unknown_is_neither_zero_nor_full(age: int | None, stale: bool) -> None:
    terms = SECONDS.terms(view(age_ns=age), output=1, blocks=1, stale_after_ns=STALE)
    assert (terms.staleness_ns > 0) is stale
    assert terms.staleness_ns in (0, 500 * MS)


def test_kv_pressure_rises_without_a_pole() -> None:
    costs = [
        SECONDS.terms(view(blocks_reserved=used), output=1, blocks=0, stale_after_ns=STALE).kv_ns
        for used in (0, 500, 900, 990, 999, 1_000)
    ]
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert costs[-1] == 1_000 * 12 * MS


# The window ----------------------------------------------------------------------------------

WINDOW = [
    # (i) prefill behind the prompt at the front stays within the window, or is zero
    ({"pending_prefill_ns": 90 * MS, "behind_ns": 50 * MS}, 80 * MS, True),
    ({"pending_prefill_ns": 90 * MS, "behind_ns": 50 * MS + 1}, 80 * MS, False),
    ({"pending_prefill_ns": 0, "decodes": 1, "prefill_ns": 10 * S}, 80 * MS, True),
    ({"pending_prefill_ns": 1, "behind_ns": 1, "prefill_ns": 150 * MS}, 80 * MS, False),
    ({"pending_prefill_ns": 1, "prefill_ns": 600 * MS}, 80 * MS, True),
    # a long prompt goes to an engine that prefills nothing
    ({"pending_prefill_ns": 1, "prefill_ns": 600 * MS + 1}, 80 * MS, False),
    # (ii) the step holds the tightest running gap and the newcomer's own
    ({"decodes": 1, "tightest_gap_ns": 12 * MS}, 80 * MS, True),
    ({"decodes": 1, "tightest_gap_ns": 12 * MS - 1}, 80 * MS, False),
    ({"decodes": 1, "tightest_gap_ns": S}, 12 * MS - 1, False),
    ({"pending_prefill_ns": 1, "tightest_gap_ns": 11 * MS}, 80 * MS, False),
    # (iii) its KV fits, and it has a slot
    ({"blocks_reserved": 907}, 80 * MS, True),
    ({"blocks_reserved": 908}, 80 * MS, False),
    ({"slots": 0}, 80 * MS, False),
    # an empty replica is open whatever its step takes
    ({"step_ns": S, "prefill_ns": 10 * S}, 1, True),
    ({"blocks_total": 92}, 80 * MS, False),
]


@pytest.mark.parametrize(("changes", "gap", "expected"), WINDOW)
def test_the_dispatch_window(changes: dict[str, Any], gap: int, expected: bool) -> None:
    assert is_open(view(**changes), 93, gap) is expected


# Choice --------------------------------------------------------------------------------------


def test_the_least_cost_wins() -> None:
    near = view("near", pending_prefill_ns=20 * MS)
    far = view("far", pending_prefill_ns=40 * MS)
    assert chosen(far, near) == "near"


def test_a_closed_replica_is_not_chosen_however_cheap() -> None:
    closed = view("closed", slots=0)
    dear = view("dear", pending_prefill_ns=50 * MS)
    assert chosen(closed, dear) == "dear"
    assert chosen(closed) is None
    assert chosen() is None


def test_ties_go_to_who_was_used_longest_ago_then_by_name() -> None:
    assert chosen(view("a", last_used=9), view("b", last_used=3)) == "b"
    assert chosen(view("b", last_used=3), view("a", last_used=3)) == "a"


def test_the_placement_carries_its_terms() -> None:
    one = view("one", cached_tokens=64, prefix_credit_ns=10 * MS, incarnation=7)
    placement = SECONDS.choose(route(one), STALE)
    assert placement is not None
    assert (placement.incarnation, placement.cached_tokens) == (7, 64)
    assert placement.terms == SECONDS.terms(one, 200, 93, STALE)


def test_prefix_credit_yields_to_queue_wait() -> None:
    warm = view("warm", cached_tokens=900, prefix_credit_ns=90 * MS, prefill_ns=10 * MS)
    assert chosen(warm, view("cold")) == "warm"
    queued = view(
        "warm", pending_prefill_ns=90 * MS, cached_tokens=900,
        prefix_credit_ns=90 * MS, prefill_ns=10 * MS,
    )  # fmt: skip
    assert chosen(queued, view("cold")) == "cold", "90 ms to wait are no less than 90 ms of credit"


def test_affinity_yields_to_kv_headroom() -> None:
    full = view("warm", blocks_reserved=890, cached_tokens=900, prefix_credit_ns=90 * MS, decodes=1)
    assert chosen(full, view("cold", decodes=1)) == "cold"


@given(st.permutations(range(5)), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_the_order_of_the_candidates_does_not_matter(order: list[int], used: list[int]) -> None:
    views = [view(f"r{nth}", last_used=used[nth], pending_prefill_ns=nth % 2) for nth in range(5)]
    assert chosen(*views) == chosen(*(views[nth] for nth in order))


def test_the_same_replica_wins_with_more_candidates_that_cost_more() -> None:
    views = [view(f"r{nth}", pending_prefill_ns=nth * MS) for nth in range(8)]
    assert chosen(*views[:1]) == chosen(*views) == "r0"


def test_a_window_without_bound_is_open_whatever_is_there() -> None:
    full = view(slots=0, blocks_reserved=1_000, pending_prefill_ns=S, decodes=9, tightest_gap_ns=1)
    assert not is_open(full, 93, 1)
    assert is_open(replace(full, window_ns=UNBOUNDED), 93, 1)
