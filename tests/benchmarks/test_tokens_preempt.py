"""The benchmark of preemption offers every arm the same, and its direction shows in seconds."""

from benchmarks.tokens_preempt import ARMS, REGIMES, compare, measure


def test_every_arm_serves_the_same_requests() -> None:
    found = compare(REGIMES["short"], (1,))
    assert found.keys() == ARMS.keys()
    work = {round(one.work_rate * one.seconds, 3) for (one,) in found.values()}
    assert len(work) == 1
    assert found["always swap"][0].swapped == found["always swap"][0].preemptions > 0
    assert found["always recompute"][0].swapped == 0
    assert found == compare(REGIMES["short"], (1,))


def test_claims_hold_in_direction() -> None:
    claims, detail = measure(quick=True)
    assert [one for one in claims if not one.holds] == []
    assert REGIMES.keys() <= detail.keys()
