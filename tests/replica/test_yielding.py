"""What becomes of requests that give way: their tokens, blocks, pauses, and everybody's time."""

import pytest
from msgspec.structs import replace

from headrace.model.engine import Preemption
from headrace.model.ids import AttemptId
from headrace.model.paths import Level, Link, path
from headrace.policy.batching import ChunkedPrefill
from headrace.policy.batching.preemption import RECOMPUTE_ONLY, Offers, Victims, Whole
from headrace.policy.ordering.orders import TenantFirst
from headrace.replica.core import Replica
from headrace.replica.job import Job, Refusal
from headrace.replica.stream import Phase
from headrace.units import InstantNs, ms
from tests.replica.scenes import (
    FLAT_DECODE,
    FLAT_MIXED,
    Fair,
    Silent,
    drain,
    engine,
    finished,
    first_tokens,
    host,
    job,
    ns,
    run_to,
    small,
)

ZERO = InstantNs(0)
END = InstantNs(1 << 60)
MUCH = 10**12
"""Service of some thousand tokens of these profiles."""
KEEP, SWAP, RECOMPUTE = Preemption


def swaps(blocks: int, us: float = 1_000.0) -> Offers:
    """Return what an engine offers that swaps whenever its host has room."""
    return host(blocks, SWAP, RECOMPUTE, us=us, by_cost=False)


def two_outgrow(offers: Offers, *, jumps: bool = True) -> Replica:
    """Return an engine of 8 blocks with two requests that need 6 each in the end."""
    profile = small(8, decode=FLAT_DECODE, mixed=FLAT_MIXED)
    replica = engine(profile, ChunkedPrefill(), jumps=jumps, offers=offers)
    replica.submit(job(1, 30, 60), ZERO)
    replica.submit(job(2, 30, 60), ZERO)
    return replica


def test_swap_computes_nothing_again_and_loses_no_token() -> None:
    replica = two_outgrow(swaps(8))
    ends = finished(drain(replica))
    replica.check()
    told, totals = replica.yielded(END), replica.totals(END)
    assert [ends[nth].usage.output_tokens for nth in (1, 2)] == [60, 60]
    assert (told.swapped, told.recomputed, told.kept) == (1, 0, 0)
    assert told.tokens_recomputed == 0
    assert (totals.prompt_tokens_computed, totals.tokens_made) == (60, 120)
    assert told.bytes_out == told.bytes_in == 4 * 16
    assert (told.on_host, told.host_blocks_used) == (0, 0)
    assert ends[2].preemptions == 1
    assert ends[1].preemptions == ends[1].paused_ns == 0
    assert told.paused_ns == told.longest_pause_ns == ends[2].paused_ns
    # From the boundary at which it gave way, which is that of its last token, to its next one.
    assert ends[2].timing.max_gap_ns == ends[2].paused_ns


def test_transfer_is_added_to_the_step_in_which_it_happens() -> None:
    slow = two_outgrow(swaps(8, 1_000.0))
    fast = two_outgrow(swaps(8, 0.001))
    slow_end, fast_end = (finished(drain(each)) for each in (slow, fast))
    # The other one waits while 4 blocks leave, 1 ms each; whoever comes back waits for both ways.
    assert slow_end[1].timing.max_gap_ns == ms(9)
    assert fast_end[1].timing.max_gap_ns < ms(5.001)
    later = slow_end[2].timing.last_at - fast_end[2].timing.last_at  # type: ignore[operator]
    assert ms(7.99) < later <= ms(8)
    assert slow.totals(END).busy_ps - fast.totals(END).busy_ps > 7_990 * 10**6


def test_recompute_counts_what_is_computed_again() -> None:
    replica = two_outgrow(RECOMPUTE_ONLY)
    ends = finished(drain(replica))
    told, totals = replica.yielded(END), replica.totals(END)
    assert told.recomputed == totals.preemptions == ends[2].preemptions == 1
    record = replica.gave_way()[0]
    assert record.attempt == 2
    assert told.tokens_recomputed == record.held.computed
    # The token that it had made last has no KV yet, and is computed for the first time.
    assert totals.prompt_tokens_computed == 60 + record.held.computed + 1
    assert told.bytes_out == told.bytes_in == 0


@pytest.mark.parametrize("whole", Whole)
def test_a_new_request_waits_for_all_its_prompt_where_every_one_does(whole: Whole) -> None:
    profile = small(20, budget=32, decode=FLAT_DECODE, mixed=FLAT_MIXED)
    replica = engine(profile, ChunkedPrefill(), offers=replace(RECOMPUTE_ONLY, whole=whole))
    replica.submit(job(1, 160, 40), ZERO)
    replica.submit(job(2, 200, 5), ns(1))  # 13 blocks, beside the 13 that the first has at its end
    replica.submit(job(3, 20, 5), ns(2))  # two would do, but it is not its turn
    log = run_to(replica, ns(40))
    seen = replica.report(ns(40))
    assert (seen.running, seen.waiting) == ((1, 2) if whole is Whole.ALL else (2, 1))
    log += drain(replica)
    replica.check()
    assert list(first_tokens(log)) == [1, 2, 3]
    assert (replica.yielded(END).pauses == 0) == (whole is Whole.ALL)


@pytest.mark.parametrize("whole", Whole)
@pytest.mark.parametrize("ways", [(RECOMPUTE,), (KEEP, RECOMPUTE), (SWAP, RECOMPUTE)])
def test_what_can_ever_fit_starts_in_its_turn_and_the_rest_is_refused(
    whole: Whole, ways: tuple[Preemption, ...]
) -> None:
    replica = engine(small(8), Fair(running=2), offers=host(6, *ways, whole=whole))
    replica.submit(job(1, 60, 30, bound_ms=500), ZERO)
    replica.submit(job(2, 20, 80, bound_ms=20), ns(10))
    assert replica.submit(job(3, 100, 29, bound_ms=6), ns(20)) is None
    assert replica.submit(job(4, 1, 128), ns(20)) is None
    for prompt, output in ((100, 30), (1, 129), (300, 1)):
        refused = replica.submit(job(9, prompt, output), ns(20))
        assert refused is not None
        assert refused.reason is Refusal.NEVER_FITS
    ends = finished(drain(replica))
    replica.check()
    assert [ends[nth].usage.output_tokens for nth in (1, 2, 3, 4)] == [30, 80, 29, 128]


def test_a_request_that_starts_again_whole_computes_again_once() -> None:
    told = []
    for whole in Whole:
        replica = engine(small(40, budget=32), ChunkedPrefill(), offers=host(0, whole=whole))
        for attempt in range(12):
            replica.submit(job(attempt, 90 + attempt, 60), ns(attempt))
        assert len(finished(drain(replica))) == 12
        replica.check()
        told.append(replica.yielded(END))
    never, resumed, everyone = told
    assert 0 < everyone.recomputed <= resumed.recomputed < never.recomputed
    assert 0 < everyone.tokens_recomputed <= resumed.tokens_recomputed < never.tokens_recomputed


def test_full_host_pool_is_not_offered() -> None:
    replica = two_outgrow(swaps(3))
    drain(replica)
    told = replica.yielded(END)
    assert (told.swapped, told.recomputed) == (0, 1)
    assert told.host_blocks_total == 3
    assert replica.gave_way()[0].choice.out_ns is None


def test_abort_of_a_swapped_request_frees_the_host() -> None:
    replica = two_outgrow(swaps(8))
    at = 0
    while not replica.yielded(ns(at)).on_host:
        at += 5
        run_to(replica, ns(at))
    assert replica.yielded(ns(at)).host_blocks_used == 4
    ended = replica.abort(AttemptId(2), ns(at + 20))
    assert ended is not None
    assert ended.paused_ns > 0
    told = replica.yielded(ns(at + 20))
    assert (told.on_host, told.host_blocks_used, told.bytes_in) == (0, 0, 0)
    assert told.pauses == 1
    replica.check()
    assert list(finished(drain(replica))) == [1]


def test_shared_prefix_stays_for_the_others_and_is_not_brought_back() -> None:
    profile = small(9, budget=80, decode=FLAT_DECODE, mixed=FLAT_MIXED)
    offers = swaps(20)
    replica = engine(profile, ChunkedPrefill(), offers=offers)
    for attempt in (1, 2):
        replica.submit(job(attempt, 70, 40, family=0, common=64), ns(attempt))
    ends = finished(drain(replica))
    replica.check()
    told = replica.yielded(END)
    assert told.swapped == 1
    assert replica.gave_way()[0].held.shared == 64
    assert told.bytes_out - told.bytes_in == 4 * 16, "found in the cache"
    assert [ends[nth].usage.output_tokens for nth in (1, 2)] == [40, 40]


@pytest.mark.parametrize("jumps", [True, False])
def test_urgent_request_gets_the_slot_of_a_loose_one_which_keeps_its_memory(jumps: bool) -> None:
    offers = host(0, KEEP, RECOMPUTE)
    replica = engine(small(40, decode=FLAT_DECODE, mixed=FLAT_MIXED), Fair(running=2), jumps=jumps,
                     offers=offers)  # fmt: skip
    replica.submit(job(1, 20, 200, bound_ms=500), ZERO)
    replica.submit(job(2, 20, 200, bound_ms=500), ZERO)
    replica.submit(job(3, 20, 10, bound_ms=20), ns(102))
    log = run_to(replica, ns(120))
    paused = replica.report(ns(120))
    assert (paused.running, paused.waiting) == (2, 1)
    assert paused.kv_blocks_used == 3 + 3 + 2, "the paused one still holds its blocks"
    log += drain(replica)
    replica.check()
    assert first_tokens(log)[3].at == ns(110)
    told, ends = replica.yielded(END), finished(log)
    assert (told.kept, told.recomputed, told.tokens_recomputed) == (1, 0, 0)
    # It gave way at 105 ms and was back when the urgent one, 10 steps later, had ended.
    assert ends[2].timing.max_gap_ns == ends[2].paused_ns == ms(55)
    assert ends[1].timing.max_gap_ns == ms(5)
    assert all(end.usage.output_tokens in {10, 200} for end in ends.values())


@pytest.mark.parametrize(
    ("loose", "offers"),
    [
        ({"bound_ms": 20}, host(0, KEEP, RECOMPUTE)),  # as urgent as the newcomer
        ({"bound_ms": 500}, RECOMPUTE_ONLY),  # the engine cannot
        ({"bound_ms": 500, "tenant": "poor"}, host(0, KEEP, RECOMPUTE)),
    ],
)
def test_slot_is_not_taken_otherwise(loose: dict[str, object], offers: Offers) -> None:
    replica = engine(small(40), Fair(running=2), offers=offers)
    replica.submit(job(1, 20, 100, bound_ms=20, counter=MUCH), ZERO)
    replica.submit(job(2, 20, 100, **loose), ZERO)  # type: ignore[arg-type]
    replica.submit(job(3, 20, 10, bound_ms=20, counter=MUCH), ns(102))
    drain(replica)
    assert replica.yielded(END).kept == 0


def test_slot_changes_hands_whatever_the_order_of_the_queue() -> None:
    # First come first served would have the paused one back at once.
    offers = host(0, KEEP, RECOMPUTE)
    profile = small(40, decode=FLAT_DECODE, mixed=FLAT_MIXED, running=1)
    replica = engine(profile, ChunkedPrefill(), offers=offers)
    replica.submit(job(1, 20, 100, bound_ms=500), ZERO)
    replica.submit(job(2, 20, 10, bound_ms=20), ns(12))
    replica.submit(job(3, 20, 10, bound_ms=20), ns(13))
    log = drain(replica)
    at = {nth: event.at for nth, event in first_tokens(log).items()}
    assert at[2] == ns(20)
    assert at[3] == ns(75), "behind the one paused for another, which must not pay again at once"
    assert finished(log)[1].preemptions == 2
    assert replica.yielded(END).kept == 2
    replica.check()


def test_kept_requests_lose_their_memory_where_nobody_else_could_go_on() -> None:
    offers = host(0, KEEP, RECOMPUTE)
    replica = engine(small(8), Fair(running=1), offers=offers)
    replica.submit(job(1, 60, 30, bound_ms=500), ZERO)
    replica.submit(job(2, 20, 80, bound_ms=20), ns(100))
    ends = finished(drain(replica))
    replica.check()
    told = replica.yielded(END)
    assert (told.kept, told.recomputed) == (1, 1)
    assert told.pauses == 1, "one pause, however often it was taken something"
    assert [ends[nth].usage.output_tokens for nth in (1, 2)] == [30, 80]


def test_fair_victims_are_of_the_loosest_class_and_never_of_whoever_is_below_its_share() -> None:
    def victims(kind: Victims) -> list[int]:
        offers = replace(RECOMPUTE_ONLY, victims=kind)
        replica = engine(small(14), ChunkedPrefill(), offers=offers)
        replica.submit(job(1, 40, 60, tenant="rich", counter=MUCH, bound_ms=500), ns(0))
        replica.submit(job(2, 40, 60, tenant="rich", counter=MUCH), ns(1))
        replica.submit(job(3, 40, 60, tenant="poor", bound_ms=900), ns(2))
        drain(replica)
        replica.check()
        return [one.attempt for one in replica.gave_way()]

    assert set(victims(Victims.POLICY)) == {3}, "the last to come"
    assert set(victims(Victims.FAIR)) == {1}


def victims_of(*jobs: Job, blocks: int = 14) -> list[int]:
    """Return who gave way, in order, of jobs that come one after another, where victims are fair."""
    offers = replace(RECOMPUTE_ONLY, victims=Victims.FAIR)
    replica = engine(small(blocks), ChunkedPrefill(), offers=offers)
    for at, one in enumerate(jobs):
        assert replica.submit(one, ns(at)) is None
    drain(replica)
    replica.check()
    return [one.attempt for one in replica.gave_way()]


def test_fair_victims_go_by_what_this_engine_served_without_being_told() -> None:
    # The last to come would go first by age alone; its tenant has had least.
    rich = [job(nth, 40, 60, tenant="rich") for nth in (1, 2)]
    assert set(victims_of(*rich, job(3, 40, 60, tenant="poor"))) <= {1, 2}
    # Its tenant had far more elsewhere, and the engine is told so.
    assert set(victims_of(*rich, job(3, 40, 60, tenant="poor", counter=MUCH))) == {3}


def test_fair_victims_know_tokens_up_to_the_step_and_by_weight() -> None:
    # Alike but for the tokens made: whoever came first has made more.
    first, last = (job(nth, 40, 60, tenant=name) for nth, name in ((1, "first"), (2, "last")))
    assert victims_of(first, last, blocks=10)[0] == 1
    heavy = job(1, 40, 60, tenant="first", weight=9)
    assert victims_of(heavy, last, blocks=10)[0] == 2


def test_users_of_a_tenant_count_together_and_classes_apart() -> None:
    def of(attempt: int, *names: str) -> Job:
        levels = (Level.CLASS, Level.TENANT, Level.USER)
        way = path(*(Link(level, name) for level, name in zip(levels, names, strict=False)))
        return replace(job(attempt, 40, 60, tenant=names[1]), way=way, counters=())

    # Each user alone has had no more than the other tenant.
    users = of(1, "chat", "many", "ann"), of(2, "chat", "many", "bob")
    assert set(victims_of(*users, of(3, "chat", "one"), blocks=12)) <= {1, 2}
    # Where no other of its class runs beside it, a tenant has no share to be below.
    assert 3 in victims_of(*users, of(3, "batch", "one"), blocks=12)


def test_choices_of_late_are_kept_with_their_terms_and_are_bounded() -> None:
    replica = engine(small(12), Fair(), offers=host(4))
    for attempt in range(120):
        replica.submit(job(attempt, 60, 40), ns(attempt))
    drain(replica)
    records = replica.gave_way()
    assert replica.totals(END).preemptions > len(records) == 64
    assert [one.at for one in records] == sorted(one.at for one in records)
    for one in records:
        costs: list[int] = [one.choice.recompute_ns]
        if one.choice.out_ns is not None:
            costs.append(2 * one.choice.out_ns)
        assert one.choice.cost_ns == min(costs)


def test_who_gives_way_keeps_its_place_among_tenants() -> None:
    """It had work all the time: its counter is not lifted to those of whoever waited."""
    replica = engine(
        small(8, running=2, decode=FLAT_DECODE, mixed=FLAT_MIXED),
        Silent(),  # who came first gives way
        ordering=TenantFirst(lend_after_ms=None),
        offers=Offers(whole=Whole.NEVER),
    )
    replica.submit(job(1, 30, 60, tenant="poor", counter=0), ZERO)
    replica.submit(job(2, 30, 60, tenant="served", counter=MUCH), InstantNs(1))
    replica.submit(job(3, 90, 9, tenant="served", counter=MUCH), InstantNs(1))
    while not replica.totals(due := replica.next_event() or ZERO).preemptions:
        replica.advance(due)
    batch = replica._batch
    poor = batch.streams[AttemptId(1)]
    assert poor.phase is Phase.WAITING
    assert batch.waiting.counter(poor, batch.steps) < MUCH
