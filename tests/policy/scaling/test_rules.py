"""The rules of other autoscalers: one reading each, by tables, through the limits that ours has."""

from typing import Any

import pytest

from headrace.model.scaling import Brake, RuleFacts, ScaleDecision, Signal, Standing
from headrace.model.scaling_spec import By, Scaling, Targets
from headrace.policy.scaling.decide import decide, remembered
from headrace.units import BLOCK_TOKENS
from tests.policy.scaling.made import NOW, S, decided, evidence, group, groups, sample

MANY = 100
"""Groups that a tick may add."""


def facts(**changes: Any) -> RuleFacts:
    """Return an idle pool of 15 s."""
    given: dict[str, Any] = {
        "waiting": 0, "backlog_tokens": 0, "reserved_tokens": 0, "input_tokens": 0, "output_tokens": 0,
        "span_ns": 15 * S,
    }  # fmt: skip
    return RuleFacts(**(given | changes))


def settings(by: By, **changes: Any) -> Scaling:
    given: dict[str, Any] = {"by": by, "max": 64, "out_groups": MANY} | changes
    return Scaling(**given)


def said(by: By, known: RuleFacts, ready: int = 2, coming: int = 0, **more: Any) -> ScaleDecision:
    return decided(settings(by), groups=groups(ready, coming), rule=known, **more)


def busy(*percents: int | None) -> dict[str, Any]:
    """Return ready groups that were busy for so many percent of the tick."""
    told = enumerate(None if each is None else 10_000 * each for each in percents)
    samples = [sample(f"r{nth}", utilization_ppm=part) for nth, part in told]
    return {"ready": len(percents), "samples": tuple(samples)}


@pytest.mark.parametrize(
    ("percents", "coming", "wanted"),
    [
        ((70, 70), 0, 2),
        ((71, 70), 0, 3),
        ((100, 100), 0, 3),
        ((100, 100), 1, 5),  # those on their way count as groups, and not in the mean
        ((35, 35), 0, 1),
        ((0, 0), 0, 0),
        ((100, None), 0, 3),  # who has only just begun to serve is in no mean
        ((None, None), 0, 2),
    ],
)
def test_by_the_busy_part_of_the_last_tick(
    percents: tuple[int | None, ...], coming: int, wanted: int
) -> None:
    found = said(By.UTILIZATION, facts(), coming=coming, **busy(*percents))
    assert [(one.signal, one.desired) for one in found.readings] == [(Signal.UTILIZATION, wanted)]


@pytest.mark.parametrize(
    ("ready", "coming", "waiting", "wanted"),
    [
        (2, 0, 0, 1),
        (8, 0, 0, 3),  # three tenths are kept
        (2, 0, 1, 2),
        (2, 0, 11, 2),  # 5.5 each: within a tenth of the target
        (2, 0, 12, 3),
        (4, 0, 40, 8),
        (4, 0, 4_000, 8),  # twice as many at most
        (2, 2, 15, 6),
        (0, 2, 50, 4),
        (0, 0, 0, 0),
        (0, 0, 1, 1),
    ],
)
def test_by_what_waits_for_each_ready_group(
    ready: int, coming: int, waiting: int, wanted: int
) -> None:
    found = said(By.QUEUE, facts(waiting=waiting), ready, coming)
    assert [(one.signal, one.desired) for one in found.readings] == [(Signal.QUEUE, wanted)]


@pytest.mark.parametrize(
    ("known", "wanted", "why"),
    [
        ({}, 0, "by the rate of tokens"),
        ({"input_tokens": 7_600 * 15}, 1, "by the rate of tokens"),
        ({"input_tokens": 7_600 * 15, "output_tokens": 10}, 2, "by the rate of tokens"),
        ({"input_tokens": 76_000, "output_tokens": 50_000, "span_ns": 5 * S}, 3, "by the rate of tokens"),
        ({"reserved_tokens": 800 * BLOCK_TOKENS}, 1, "by reserved KV"),
        ({"reserved_tokens": 1_601 * BLOCK_TOKENS}, 3, "by reserved KV"),
        ({"input_tokens": 7_600 * 15, "backlog_tokens": 36_000}, 3, "by prompts that wait"),
    ],
)  # fmt: skip
def test_by_tokens_offered_reserved_and_waiting(
    known: dict[str, Any], wanted: int, why: str
) -> None:
    (found,) = said(By.TOKENS, facts(**known)).readings
    assert (found.signal, found.desired, found.why) == (Signal.TOKENS, wanted, why)


def test_targets_are_settings() -> None:
    targets = Targets(
        busy=0.5, waiting=10, input_tps=100, output_tps=50, kv_fill=0.5, backlog_tokens=1_000
    )
    known = facts(waiting=40, input_tokens=3_000, output_tokens=750)
    for by, wanted in ((By.UTILIZATION, 4), (By.QUEUE, 4), (By.TOKENS, 3)):
        more: dict[str, Any] = {
            "samples": tuple(sample(f"r{i}", utilization_ppm=1_000_000) for i in range(2))
        }
        assert decided(settings(by, targets=targets), rule=known, **more).need == wanted, by


def pool(percent: int, count: int = 8) -> dict[str, Any]:
    """Return ready groups that were all busy for so many percent of the tick."""
    samples = [sample(f"r{nth}", utilization_ppm=10_000 * percent) for nth in range(count)]
    return {"groups": groups(count), "samples": tuple(samples)}


HOT = facts(waiting=1_000, backlog_tokens=10**6)
RULES = pytest.mark.parametrize("by", [By.UTILIZATION, By.QUEUE, By.TOKENS])


@RULES
def test_a_rule_grows_at_the_pace_and_to_the_limits_that_ours_has(by: By) -> None:
    slow = settings(by, out_groups=1, out_part=0.0, max=9)
    grown = decided(slow, rule=HOT, **pool(100))
    assert (grown.winner, grown.steps.ask, grown.desired) == (Signal(by), 1, 9)
    frozen = decided(slow, rule=HOT, frozen=True, **pool(100))
    assert not frozen.steps.grows
    assert Brake.FROZEN in frozen.brakes


@RULES
def test_a_rule_shrinks_by_one_after_a_whole_window_in_which_less_was_wanted(by: By) -> None:
    slow = settings(by, min=2, in_window_s=300)
    known = evidence(rule=HOT, **pool(100))
    memory = remembered(slow, known, decide(slow, known))
    for after, drained in ((285, 0), (300, 1)):
        now = NOW + after * S
        fell = decide(slow, evidence(rule=facts(), now=now, memory=memory, **pool(0)))
        assert len(fell.steps.drain) == drained, after


def test_a_floor_stands_whatever_a_rule_wants() -> None:
    for by in (By.UTILIZATION, By.QUEUE, By.TOKENS):
        kept = decided(settings(by, min=3), rule=facts(), **pool(0, count=1))
        assert (kept.winner, kept.steps.ask) == (None, 2), by


def test_sleepers_and_drains_come_first_as_ever() -> None:
    there = (*groups(2), group("d0", Standing.DRAINING), group("s0", Standing.STANDBY))
    found = decided(settings(By.QUEUE), groups=there, rule=facts(waiting=100))
    assert (found.steps.recall, found.steps.wake, found.steps.ask) == (("d0",), ("s0",), 0)


def test_a_pool_that_goes_by_utilization_cannot_begin_at_none() -> None:
    with pytest.raises(ValueError, match="by utilization"):
        Scaling(by=By.UTILIZATION, min=0)
