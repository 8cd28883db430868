"""What others' rules are held against, and how far off a run may be."""

import pytest

from benchmarks.scaling_rules import PUBLISHED, STARTS_S, Came, followed, off, rows
from headrace.model.scaling_spec import By
from headrace.units import NS_PER_S


def test_every_rule_but_ours_is_held_against_what_was_published() -> None:
    assert set(PUBLISHED) == {(by, start) for by in By for start in STARTS_S if by is not By.SLO}


def test_the_bursts_are_offered_whole() -> None:
    at = [row.at // NS_PER_S for row in rows(0)]
    rates = {
        span: sum(span[0] <= one < span[1] for one in at)
        for span in ((0, 300), (300, 600), (900, 960), (960, 1_300))
    }
    assert max(at) == 1_299
    for (begin, end), rate in zip(rates, (10, 34, 45, 10), strict=True):
        assert rates[begin, end] / (end - begin) == pytest.approx(rate, rel=0.1)


def test_a_start_takes_as_long_as_is_told_always() -> None:
    (times,) = {followed(By.QUEUE, 90.0).times}
    assert times is not None
    assert sum(spread.p90_s for _, spread in times.stages(followed(By.QUEUE, 90.0).start)) == 90.0


@pytest.mark.parametrize(
    ("attained", "hours", "parts"),
    [(0.9, 2.0, 0.0), (0.83, 2.0, 1.0), (0.97, 2.0, 0.4), (0.9, 2.42, 1.0), (0.9, 1.62, 2.0 / 1.8)],
)
def test_only_what_lies_outside_of_all_that_was_published_is_off(
    attained: float, hours: float, parts: float
) -> None:
    found = Came(attained=attained, gpu_hours=hours)
    assert off(found, ((0.88, 1.8), (0.95, 2.2))) == pytest.approx(parts)
