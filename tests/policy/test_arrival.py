"""A group that is on its way, beside groups that are ready: who can wait for it is let in, others come again."""

import pytest

from headrace.model.decision import Admit, Reason, Reject
from headrace.model.evidence import ArrivalFacts, EntryEvidence
from headrace.policy.admission.gates import Gates, Wait, predicted_wait
from headrace.units import MICRO, DurationNs
from tests.policy.evidence import S, entry, wait

GATES = Gates(margin_ms=0, wait_margin=0, prefill_margin=0)


def coming(p50_s: float, p90_s: float, success: float = 1.0) -> ArrivalFacts:
    """Return a group that will do as much as the one that is ready."""
    return ArrivalFacts(
        p50_ns=DurationNs(round(p50_s * S)),
        p90_ns=DurationNs(round(p90_s * S)),
        success_ppm=round(success * MICRO),
        rate_micro=MICRO,
    )


def queued(work_s: int, ttft_s: int = 30, **more: object) -> EntryEvidence:
    """Return a request behind so much work, of which one group does a second's in a second."""
    ahead = wait(backlog_ns=work_s * S, own_ahead_ns=work_s * S, rate_micro=MICRO)
    return entry(wait=ahead, ttft_ns=ttft_s * S, **more)


def waits(evidence: EntryEvidence) -> float:
    return predicted_wait(evidence, Wait.FAIR, None) / S


def test_a_queue_drains_faster_from_when_a_group_is_there() -> None:
    assert waits(queued(60)) == 60
    assert waits(queued(60, arrival=coming(5, 10))) == 10 + 25
    assert waits(queued(60, arrival=coming(5, 10, success=0.25))) == 10 + 40
    assert waits(queued(60, arrival=coming(5, 90))) == 60


@pytest.mark.parametrize(("p90_s", "enters"), [(2, True), (50, False)])
def test_who_can_wait_for_it_is_let_in(p90_s: float, *, enters: bool) -> None:
    decision = GATES.decide(queued(50, arrival=coming(1, p90_s)))
    assert isinstance(decision, Admit) is enters


def told(evidence: EntryEvidence) -> float:
    decision = GATES.decide(evidence)
    assert isinstance(decision, Reject)
    assert decision.reason is Reason.DEADLINE_QUEUE
    assert decision.retry_after_ns is not None
    return decision.retry_after_ns / S


def test_who_cannot_is_told_to_come_again_when_it_is_likely_to_be_there() -> None:
    alone = told(queued(100))
    assert told(queued(100, arrival=coming(10, 90))) < alone
    assert told(queued(100, arrival=coming(60, 90))) == pytest.approx(60)
    assert told(queued(100, arrival=coming(150, 200))) == alone
    for p50_s in range(1, 100, 7):
        assert told(queued(100, arrival=coming(p50_s, p50_s + 10))) <= alone
