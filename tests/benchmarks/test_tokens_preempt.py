"""The benchmark of preemption offers every arm the same, and its direction shows in seconds."""

from benchmarks.tokens_preempt import ARMS, CONTENDED, DEFAULT, PURE, REGIMES, compare, measure


def test_every_arm_serves_the_same_requests() -> None:
    found = compare(REGIMES["short"], (1,))
    assert found.keys() == ARMS.keys()
    work = {round(one.work_rate * one.seconds, 3) for (one,) in found.values()}
    assert len(work) == 1
    for rule in (CONTENDED, DEFAULT):
        (swaps,), (recomputes,) = (found[f"{way}, {rule}"] for way in PURE)
        assert swaps.swapped == swaps.preemptions > 0
        assert recomputes.swapped == 0 < recomputes.preemptions
    assert found == compare(REGIMES["short"], (1,))


def test_claims_hold_in_direction() -> None:
    claims, detail = measure(quick=True)
    assert [one for one in claims if not one.holds] == []
    assert REGIMES.keys() <= detail.keys()
