"""Prompts first, whole and unmixed: who waits for whom, and how long."""

from headrace.policy.batching import PrefillFirst
from headrace.replica.core import Replica
from headrace.units import InstantNs, ms, ps_to_ns
from tests.replica.scenes import (
    FLAT_DECODE,
    FLAT_MIXED,
    TABLE,
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


def even(blocks: int = 100, *, budget: int = 64, running: int = 8) -> Replica:
    """Return an engine whose every step lasts 5 ms, with so many prompt tokens in one."""
    profile = small(blocks, running=running, decode=FLAT_DECODE, mixed=FLAT_MIXED)
    return engine(profile, PrefillFirst(token_budget=budget))


def test_decodes_stand_still_while_prompts_are_computed() -> None:
    replica = even()
    replica.submit(job(1, 10, 6), ZERO)
    log = run_to(replica, ns(12))
    for attempt in (2, 3):
        replica.submit(job(attempt, 40, 2), ns(12))
    log += drain(replica)
    # Steps of 5 ms: prompt 1; two tokens up to 15; prompts 2 and 3, one step each; three tokens more.
    assert {attempt: event.at for attempt, event in first_tokens(log).items()} == {
        1: ns(5), 2: ns(20), 3: ns(25),
    }  # fmt: skip
    timing = {attempt: event.timing for attempt, event in finished(log).items()}
    assert timing[1].last_at == ns(5 + 2 * 5 + 2 * 5 + 3 * 5)
    assert timing[1].max_gap_ns == ms(15)
    # One joined while the others stood, and waited for the rest of that only.
    assert (timing[2].last_at, timing[2].max_gap_ns) == (ns(30), ms(10))
    assert (timing[3].last_at, timing[3].max_gap_ns) == (ns(30), ms(5))
    assert replica.totals(ns(100)).steps == 8
    assert replica.totals(ns(100)).tokens_made == 6 + 2 + 2


def test_prompts_share_a_step_whole_up_to_the_budget() -> None:
    replica = even(budget=64)
    replica.submit(job(1, 4, 1), ZERO)
    for attempt, prompt in ((2, 30), (3, 30), (4, 5), (5, 300), (6, 3)):
        replica.submit(job(attempt, prompt, 1), ZERO)
    at = {attempt: event.at for attempt, event in first_tokens(drain(replica)).items()}
    # 60 of 64 in the second step: 5 more do not fit, and nobody passes them; 300 go alone.
    assert at == {1: ns(5), 2: ns(10), 3: ns(10), 4: ns(15), 5: ns(20), 6: ns(25)}


def test_step_of_prompts_takes_no_time_for_decodes() -> None:
    profile = small(200, table=TABLE)
    replica = engine(profile, PrefillFirst(token_budget=200))
    replica.submit(job(1, 100, 3), ZERO)
    replica.submit(job(2, 50, 1), ZERO)
    log = drain(replica)
    prompts = [profile.step_ps(0, 0, tokens, tokens**2) for tokens in (100, 50)]
    decodes = [profile.step_ps(1, context, 0, 0) for context in (101, 102)]
    assert first_tokens(log)[2].at == ps_to_ns(sum(prompts))
    assert finished(log)[1].timing.last_at == ps_to_ns(sum(prompts) + sum(decodes))


def test_aborted_and_preempted_streams_keep_the_instant_of_their_last_token() -> None:
    replica = even()
    replica.submit(job(1, 10, 60), ZERO)
    run_to(replica, ns(11))
    replica.submit(job(2, 60, 9), ns(11))
    replica.submit(job(3, 60, 9), ns(11))
    run_to(replica, ns(21))
    # Two prompts in two steps from 15 ms on: the first has stood since then, the second since 20 ms.
    ends = {attempt: replica.abort(attempt, ns(22)) for attempt in (1, 2)}  # type: ignore[arg-type]
    last = {attempt: end and end.timing.last_at for attempt, end in ends.items()}
    assert last == {1: ns(15), 2: ns(20)}
    drain(replica)


def test_prompt_waits_for_blocks_while_decodes_go_on() -> None:
    replica = even(blocks=8, budget=300)
    replica.submit(job(1, 60, 20), ZERO)  # 5 blocks in the end
    replica.submit(job(2, 60, 1), ZERO)  # 4 at once, and 4 are free
    replica.submit(job(3, 80, 1), ZERO)  # 5: when the first is done
    at = {attempt: event.at for attempt, event in first_tokens(drain(replica)).items()}
    assert at == {1: ns(5), 2: ns(10), 3: ns(5 + 5 + 19 * 5 + 5)}
