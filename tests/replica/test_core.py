"""What the engine does with jobs: chunks, order, preemption, sharing, instants and accounts."""

import pytest

from headrace.model.ids import AttemptId
from headrace.model.meter import NO_STREAM, Meter
from headrace.model.profile import Profile
from headrace.policy.batching import ChunkedPrefill, PrefillFirst
from headrace.policy.batching.knobs import BatchingPolicy
from headrace.policy.ordering.orders import EarliestDeadline
from headrace.replica.core import Replica
from headrace.replica.job import FirstTokenMade, Refusal
from headrace.units import MICRO, InstantNs, ms, ps_to_ns
from tests.replica.scenes import (
    FLAT_DECODE,
    FLAT_MIXED,
    ByDeadline,
    Moody,
    Silent,
    drain,
    engine,
    finished,
    first_tokens,
    job,
    ns,
    run_to,
    small,
)

ZERO = InstantNs(0)


def even(blocks: int = 64, *, budget: int = 64, running: int = 8) -> Profile:
    """Return a profile whose every step lasts 5 ms."""
    return small(blocks, budget=budget, running=running, decode=FLAT_DECODE, mixed=FLAT_MIXED)


def flat(blocks: int = 64, *, budget: int = 64, running: int = 8, jumps: bool = True) -> Replica:
    """Return an engine whose every step lasts 5 ms."""
    profile = even(blocks, budget=budget, running=running)
    return engine(profile, ChunkedPrefill(), jumps=jumps)


def test_prompt_is_computed_in_chunks_of_the_budget() -> None:
    replica = flat(budget=64)
    replica.submit(job(1, 150, 3), ZERO)
    log = drain(replica)
    # 64 + 64 + 22 tokens, then two more steps for the second and third token.
    assert first_tokens(log)[1].at == ns(15)
    assert finished(log)[1].timing.last_at == ns(25)
    assert replica.totals(ns(25)).prompt_tokens_computed == 150


def test_the_prompts_of_a_step_tell_how_far_they_are() -> None:
    replica = engine(small(budget=64), ChunkedPrefill(chunk_limit=48))
    replica.submit(job(1, 130, 4), ns(0))
    replica.submit(job(2, 30, 4), ns(0))
    seen = [replica.prompts(ns(0))]
    while (due := replica.next_event()) is not None:
        replica.advance(due)
        seen.append(replica.prompts(due))
    # Alone it may have the whole budget.
    assert seen[:4] == [[(1, 0, 64)], [(1, 64, 48), (2, 0, 16)], [(1, 112, 18), (2, 16, 14)], []]
    assert not any(seen[4:])


def test_new_step_times_hold_from_the_next_step_on() -> None:
    replica = flat()
    replica.submit(job(1, 10, 6), ZERO)
    run_to(replica, ns(12))
    replica.reprice(even().paced(3.0), ns(12))
    # The third step ends as it was planned, three more take 15 ms each.
    assert finished(drain(replica))[1].timing.last_at == ns(15 + 3 * 15)


def test_decodes_come_before_prompts_and_take_their_share_of_the_budget() -> None:
    replica = flat(budget=16)
    for attempt in range(1, 5):
        replica.submit(job(attempt, 4, 100), ZERO)
    run_to(replica, ns(12))
    replica.submit(job(9, 24, 1), ns(12))
    # From 15 ms on, 4 decodes leave 12 tokens a step for the prompt.
    assert first_tokens(run_to(replica, ns(100)))[9].at == ns(25)


def test_chunk_limit_lets_prompts_share_a_step() -> None:
    replica = engine(even(budget=64), ChunkedPrefill(chunk_limit=32))
    for attempt in (1, 2, 3):
        replica.submit(job(attempt, 96, 1), ZERO)
    at = {attempt: event.at for attempt, event in first_tokens(drain(replica)).items()}
    # The first goes alone at once, with the whole budget; from 5 ms on, two at a time.
    assert at == {1: ns(10), 2: ns(20), 3: ns(25)}


def test_step_time_follows_the_profile() -> None:
    profile = small(200)
    replica = engine(profile, ChunkedPrefill())
    replica.submit(job(1, 100, 3), ZERO)
    log = drain(replica)
    steps = [
        profile.step_ps(0, 0, 64, 64**2),
        profile.step_ps(0, 0, 36, 100**2 - 64**2),
        profile.step_ps(1, 101, 0, 0),
        profile.step_ps(1, 102, 0, 0),
    ]
    assert first_tokens(log)[1].at == ps_to_ns(sum(steps[:2]))
    assert finished(log)[1].timing.last_at == ps_to_ns(sum(steps))
    assert replica.totals(ns(100)).busy_ps == sum(steps)


def test_idle_engine_starts_at_once_and_a_busy_one_at_its_next_boundary() -> None:
    replica = flat()
    replica.submit(job(1, 10, 3), ns(7))
    replica.submit(job(2, 10, 1), ns(7))
    at = {attempt: event.at for attempt, event in first_tokens(drain(replica)).items()}
    assert at == {1: ns(12), 2: ns(17)}


def test_job_submitted_at_the_instant_of_a_boundary_misses_it() -> None:
    for jumps in (True, False):
        replica = flat(jumps=jumps)
        replica.submit(job(1, 10, 9), ZERO)
        # Not even called for the boundary itself: the engine lives through it first.
        replica.submit(job(2, 10, 1), ns(20))
        replica.submit(job(3, 10, 1), InstantNs(ns(25) - 1))
        at = {attempt: event.at for attempt, event in first_tokens(drain(replica)).items()}
        assert at == {1: ns(5), 2: ns(30), 3: ns(30)}


def test_first_that_does_not_fit_holds_up_those_behind_it() -> None:
    replica = flat(blocks=10, budget=200)
    replica.submit(job(1, 100, 8), ZERO)  # 7 blocks at once
    replica.submit(job(2, 70, 1), ZERO)  # 5 blocks: does not fit beside the first
    replica.submit(job(3, 10, 1), ZERO)  # would
    at = {attempt: event.at for attempt, event in first_tokens(drain(replica)).items()}
    assert at[1] == ns(5)
    assert at[2] == at[3] == ns(45)


def test_running_limit_bounds_the_slots() -> None:
    replica = flat(running=2)
    for attempt in (1, 2, 3):
        replica.submit(job(attempt, 4, 4), ZERO)
    run_to(replica, ns(7))
    snapshot = replica.report(ns(7))
    assert (snapshot.running, snapshot.waiting) == (2, 1)
    drain(replica)


def test_relegated_goes_behind_those_who_came_later() -> None:
    replica = flat(running=1)
    replica.submit(job(1, 4, 4), ZERO)
    replica.submit(job(2, 4, 1, relegated=True), ZERO)
    replica.submit(job(3, 4, 1), ns(1))
    at = {attempt: event.at for attempt, event in first_tokens(drain(replica)).items()}
    assert at[3] < at[2]


def test_the_order_says_who_of_those_that_wait_starts() -> None:
    replica = engine(even(running=1), ByDeadline(), ordering=EarliestDeadline())
    for attempt in range(12):
        replica.submit(job(attempt, 60, 20, deadline=100 - attempt), ZERO)
    order = list(first_tokens(drain(replica)))
    assert order[0] == 0  # it found the engine idle
    assert order[1:] == list(range(11, 0, -1))


@pytest.mark.parametrize("jumps", [True, False])
def test_preemption_recomputes_and_loses_no_token(jumps: bool) -> None:
    replica = flat(blocks=8, jumps=jumps)
    replica.submit(job(1, 30, 60), ZERO)
    replica.submit(job(2, 30, 60), ZERO)
    log = drain(replica)
    replica.check()
    ends = finished(log)
    totals = replica.totals(ns(10_000))
    assert totals.preemptions > 0
    assert [ends[nth].usage.output_tokens for nth in (1, 2)] == [60, 60]
    assert totals.tokens_made == 120
    assert totals.prompt_tokens_computed > 60
    # The one that came last gave way, and its pause is one long gap.
    assert ends[1].timing.max_gap_ns == ms(5)
    assert ends[2].timing.max_gap_ns > ms(100)
    for event in ends.values():
        timing = event.timing
        assert sum(timing.gap_counts) == timing.tokens - 1


def test_preempted_stream_is_told_of_by_progress_once() -> None:
    replica = flat(blocks=8)
    replica.submit(job(1, 30, 60), ZERO)
    replica.submit(job(2, 30, 60), ZERO)
    seen: dict[int, int] = {}
    for at in range(0, 700, 7):
        run_to(replica, ns(at))
        for attempt, made in replica.progress(ns(at)):
            assert made > seen.get(attempt, 0)
            seen[attempt] = made
        assert replica.progress(ns(at)) == []
    assert seen[1] >= 55
    assert seen[2] >= 55


def test_victim_may_be_any_that_the_policy_names() -> None:
    replica = engine(even(16), Silent())
    for attempt in range(5):
        replica.submit(job(attempt, 100, 30), ns(attempt))
    ends = finished(drain(replica))
    assert len(ends) == 5
    assert replica.totals(ns(100_000)).preemptions > 0
    replica.check()


def test_shared_prefix_is_computed_once() -> None:
    replica = flat(budget=100)
    replica.submit(job(1, 100, 9, family=0, common=64), ZERO)
    replica.submit(job(2, 80, 1, family=0, common=64), ns(1))
    replica.submit(job(3, 80, 1, family=1, common=64), ns(1))
    log = drain(replica)
    cached = {nth: event.cached_tokens for nth, event in first_tokens(log).items()}
    assert cached == {1: 0, 2: 64, 3: 0}
    assert finished(log)[2].usage.cached_tokens == 64
    snapshot = replica.report(ns(1_000))
    assert (snapshot.prefix_tokens_queried, snapshot.prefix_tokens_hit) == (260, 64)
    assert replica.totals(ns(1_000)).prompt_tokens_computed == 196
    assert snapshot.kv_blocks_used == 0


def test_prefix_is_shared_in_the_very_step_that_ends_its_prompt() -> None:
    replica = flat(budget=100)
    replica.submit(job(9, 4, 1), ZERO)
    replica.submit(job(1, 64, 3, family=0, common=64), ZERO)
    replica.submit(job(2, 66, 3, family=0, common=64), ZERO)
    events = first_tokens(drain(replica))
    assert events[1].at == events[2].at == ns(10)
    assert events[2].cached_tokens == 64


def test_whole_prompt_in_cache_still_computes_its_last_block() -> None:
    replica = flat()
    replica.submit(job(1, 64, 1, family=0, common=64), ZERO)
    replica.submit(job(2, 64, 1, family=0, common=64), ns(50))
    assert first_tokens(drain(replica))[2].cached_tokens == 48
    replica.check()


def test_cache_makes_room_for_running_work() -> None:
    replica = flat(blocks=8)
    replica.submit(job(1, 96, 1, family=0, common=96), ZERO)
    replica.submit(job(2, 100, 1), ns(50))
    replica.submit(job(3, 96, 1, family=0, common=96), ns(100))
    events = first_tokens(drain(replica))
    assert events[3].cached_tokens == 16  # what the second left of it
    assert replica.totals(ns(1_000)).preemptions == 0


def test_job_of_exactly_the_pool_fits_beside_its_own_cache() -> None:
    replica = flat(blocks=8)
    replica.submit(job(1, 96, 1, family=0, common=96), ZERO)
    assert replica.submit(job(2, 96, 33, family=0, common=96), ns(50)) is None
    ends = finished(drain(replica))
    assert ends[2].usage.output_tokens == 33
    assert replica.totals(ns(1_000)).preemptions == 0


def test_job_that_never_fits_is_refused() -> None:
    replica = flat(blocks=8)
    refused = replica.submit(job(1, 96, 34), ZERO)
    assert refused is not None
    assert refused.reason is Refusal.NEVER_FITS
    assert (refused.blocks_needed, refused.blocks_total) == (9, 8)
    assert replica.next_event() is None


def test_full_queue_refuses() -> None:
    profile = small(running=1)
    replica = Replica("r", 1, profile, ChunkedPrefill(), max_waiting=1)  # type: ignore[arg-type]
    answers = [replica.submit(job(nth, 4, 4), ZERO) for nth in (1, 2, 3)]
    assert [answer and answer.reason for answer in answers] == [None, None, Refusal.QUEUE_FULL]


def test_job_submitted_twice_is_a_bug() -> None:
    replica = flat()
    replica.submit(job(1, 4, 4), ZERO)
    with pytest.raises(AssertionError, match="submitted twice"):
        replica.submit(job(1, 4, 4), ZERO)


def test_clock_that_runs_backwards_is_a_bug() -> None:
    replica = flat()
    replica.advance(ns(5))
    with pytest.raises(AssertionError, match="backwards"):
        replica.advance(ns(4))


def test_abort_of_a_waiting_job_is_at_once() -> None:
    replica = flat(running=1)
    replica.submit(job(1, 4, 50), ZERO)
    replica.submit(job(2, 4, 4), ZERO)
    replica.submit(job(3, 4, 4), ZERO)
    ended = replica.abort(AttemptId(2), ns(12))
    assert ended is not None
    assert ended.timing == NO_STREAM
    assert ended.usage.output_tokens == ended.usage.cached_tokens == 0
    assert replica.report(ns(12)).waiting == 1
    assert set(finished(drain(replica))) == {1, 3}


def test_abort_of_a_running_job_frees_it_at_the_next_boundary() -> None:
    replica = flat()
    replica.submit(job(1, 40, 500), ZERO)
    replica.submit(job(2, 40, 500), ZERO)
    ended = replica.abort(AttemptId(1), ns(22))
    assert ended is not None
    assert ended.usage.output_tokens == 4  # at 5, 10, 15 and 20 ms
    assert ended.timing.last_at == ns(20)
    assert sum(ended.timing.gap_counts) == 3
    assert [attempt for attempt, _ in replica.progress(ns(23))] == [2]
    assert replica.report(ns(24)).running == 2
    assert replica.report(ns(25)).running == 1
    replica.check()
    assert replica.abort(AttemptId(1), ns(26)) is None


def test_abort_during_the_prompt_keeps_what_is_computed_as_cache() -> None:
    replica = flat(budget=32)
    replica.submit(job(1, 96, 5, family=0, common=96), ZERO)
    assert replica.abort(AttemptId(1), ns(12)) is not None
    replica.submit(job(2, 97, 1, family=0, common=96), ns(20))
    assert first_tokens(drain(replica))[2].cached_tokens == 96
    replica.check()


def test_many_aborts_of_waiting_jobs_leave_nothing_behind() -> None:
    replica = flat(running=1)
    replica.submit(job(0, 4, 400), ZERO)
    for attempt in range(1, 1_000):
        replica.submit(job(attempt, 4, 4), ZERO)
        replica.abort(AttemptId(attempt), ZERO)
    assert not replica._batch.waiting._streams
    assert replica.report(ZERO).waiting == 0


def test_crash_loses_what_is_not_finished() -> None:
    replica = flat()
    replica.submit(job(1, 4, 2), ZERO)
    replica.submit(job(2, 4, 90), ZERO)
    replica.submit(job(3, 400, 9), ns(9))
    assert replica.fail(ns(17)) == [2, 3]
    # What was over before still comes out.
    assert replica.next_event() == ns(17)
    assert [type(event).__name__ for event in replica.advance(ns(17))] == [
        "FirstTokenMade", "Finished", "FirstTokenMade",
    ]  # fmt: skip
    assert replica.next_event() is None
    replica.check()
    with pytest.raises(AssertionError, match="crashed"):
        replica.submit(job(4, 4, 2), ns(18))


@pytest.mark.parametrize("at", range(3, 60, 4))
def test_a_crash_in_a_jump_keeps_what_was_done_of_it(at: int) -> None:
    told = []
    for jumps in (True, False):
        replica = engine(small(64), ChunkedPrefill(), jumps=jumps)
        for attempt in range(3):
            replica.submit(job(attempt, 20, 40 + attempt), ZERO)
        now = InstantNs(at * 1_000_000)
        lost = replica.fail(now)
        events = replica.advance(now)
        told.append((lost, events, replica.totals(now), replica.report(now)))
    assert told[0] == told[1]


def test_snapshot_counts_what_is_held_and_what_is_still_to_do() -> None:
    replica = flat(blocks=64, budget=64)
    replica.submit(job(1, 100, 50), ZERO)
    replica.submit(job(2, 30, 50), ZERO)
    snapshot = replica.report(ns(6))
    # First step: 64 tokens of job 1. Second, under way: its 36 and 28 of job 2.
    assert snapshot.waiting_prefill_tokens == 36 + 30
    assert snapshot.kv_blocks_used == 7 + 2
    assert snapshot.kv_blocks_total == 64
    assert (snapshot.running, snapshot.waiting) == (2, 0)
    assert snapshot.observed_at == ns(6)


@pytest.mark.parametrize(
    "policy", [ChunkedPrefill(), PrefillFirst(token_budget=90), PrefillFirst(), Moody()]
)
def test_timing_equals_a_meter_fed_token_by_token(policy: BatchingPolicy) -> None:
    profile = small(20, budget=48)
    replica = engine(profile, policy, jumps=False, noise_ppm=50_000)
    meters: dict[int, Meter] = {}
    for attempt in range(8):
        submitted = job(attempt, 20 + 13 * attempt, 20 + 9 * attempt, bound_ms=7)
        meters[attempt] = Meter(submitted.gap_bound_ns)
        replica.submit(submitted, ZERO)
    ends = {}
    while (due := replica.next_event()) is not None:
        for event in replica.advance(due):
            if not isinstance(event, FirstTokenMade):
                ends[event.attempt] = event.timing
                meters[event.attempt].note(due)
        for attempt, made in replica.progress(due):
            assert made == meters[attempt].tokens + 1
            meters[attempt].note(due)
    assert replica.report(InstantNs(1 << 60)).preemptions
    assert ends == {attempt: meter.timing() for attempt, meter in meters.items()}
    for timing in ends.values():
        assert timing.first_at is not None


def test_noise_changes_instants_but_no_counts() -> None:
    quiet, loud = (engine(small(200), ChunkedPrefill(), noise_ppm=ppm) for ppm in (0, MICRO // 10))
    logs = []
    for replica in (quiet, loud):
        replica.submit(job(1, 100, 900), ZERO)
        logs.append(finished(drain(replica))[1])
    assert logs[0].usage == logs[1].usage
    assert logs[0].timing.last_at != logs[1].timing.last_at
