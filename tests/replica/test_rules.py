"""Engines with rules of their own let in whom those allow, when they allow it."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.model.ids import AttemptId
from headrace.policy.batching import ChunkedPrefill, PrefillFirst
from headrace.policy.batching.knobs import BatchingPolicy
from headrace.replica.core import Replica
from headrace.replica.job import Refusal
from headrace.replica.rules import Held, Reserve, Rules, peak
from headrace.units import InstantNs, Tokens
from tests.replica.scenes import (
    FLAT_DECODE,
    FLAT_MIXED,
    drain,
    engine,
    first_tokens,
    job,
    ns,
    run_to,
    small,
)

ZERO = InstantNs(0)


def even(rules: Rules, policy: BatchingPolicy | None = None) -> Replica:
    """Return an engine whose every step lasts 5 ms, with more blocks than the rules need."""
    profile = small(200, budget=100, running=16, decode=FLAT_DECODE, mixed=FLAT_MIXED)
    return engine(profile, policy or ChunkedPrefill(), rules=rules)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 60)), max_size=12))
def test_peak_is_the_most_that_is_held_at_any_step(requests: list[Held]) -> None:
    held = [
        sum(tokens + step for tokens, left in requests if left >= step) for step in range(61)
    ]  # at a step, by all that have not ended before it
    assert peak(requests) == max(held)


def test_whole_outputs_are_set_aside() -> None:
    replica = even(Rules(reserve=Reserve.WHOLE, capacity=Tokens(200)))
    replica.submit(job(1, 50, 20), ZERO)
    replica.submit(job(2, 50, 80), ZERO)  # 70 + 130: just fits
    replica.submit(job(3, 10, 50), ZERO)
    replica.submit(job(4, 1, 1), ZERO)  # would fit, but nobody passes the first that does not
    at = {attempt: event.at for attempt, event in first_tokens(drain(replica)).items()}
    assert at == {1: ns(5), 2: ns(10), 3: ns(5 + 19 * 5 + 5), 4: ns(5 + 19 * 5 + 5)}
    assert replica.report(ns(10_000)).preemptions == 0


def test_peak_counts_on_those_who_end_first() -> None:
    rules = Rules(reserve=Reserve.PEAK, capacity=Tokens(202))
    replica = even(rules)
    replica.submit(job(1, 50, 100), ZERO)
    # To the last they hold 150 and 65; at once, when the short one ends, 65 + 50 + 15 (and one on the way).
    replica.submit(job(2, 50, 15), ZERO)
    # 65 more at once with both are too many, until the short one is done.
    replica.submit(job(3, 70, 15), ZERO)
    at = {attempt: event.at for attempt, event in first_tokens(drain(replica)).items()}
    assert at == {1: ns(5), 2: ns(10), 3: ns(10 + 14 * 5 + 5)}


def test_waiting_ones_get_a_look_every_so_many_steps_or_when_idle() -> None:
    for policy in (ChunkedPrefill(), PrefillFirst()):
        replica = even(Rules(admit_every=10), policy)
        start = (
            0 if isinstance(policy, PrefillFirst) else 1
        )  # a step of its prompt is one of decodes
        replica.submit(job(1, 10, 28), ZERO)
        log = run_to(replica, ns(12))
        replica.submit(job(2, 10, 3), ns(12))
        log += run_to(replica, ns(62))
        replica.submit(job(3, 10, 1), ns(62))
        log += drain(replica)
        at = {attempt: event.at for attempt, event in first_tokens(log).items()}
        second = 5 + (10 - start) * 5 + 5
        standing = 0 if start else 5
        assert at == {1: ns(5), 2: ns(second), 3: ns(second + 9 * 5 + 5 + standing)}
        now = InstantNs(ns(10_000) + 1)
        replica.submit(job(4, 10, 1), now)
        assert first_tokens(drain(replica))[4].at == now + ns(5)


def test_job_that_the_rules_never_let_in_is_refused() -> None:
    for reserve, most in ((Reserve.WHOLE, 100), (Reserve.PEAK, 99)):
        replica = even(Rules(reserve=reserve, capacity=Tokens(100)))
        refused = replica.submit(job(1, most - 10, 11), ZERO)
        assert refused is not None
        assert refused.reason is Refusal.NEVER_FITS
        assert replica.submit(job(2, most - 10, 10), ZERO) is None
        drain(replica)


def test_what_was_set_aside_is_given_back_when_somebody_leaves() -> None:
    replica = even(Rules(reserve=Reserve.WHOLE, capacity=Tokens(100)))
    replica.submit(job(1, 50, 40), ZERO)
    replica.submit(job(2, 50, 40), ZERO)
    run_to(replica, ns(12))
    replica.abort(AttemptId(1), ns(12))
    assert first_tokens(drain(replica))[2].at == ns(20)
    replica.check()
