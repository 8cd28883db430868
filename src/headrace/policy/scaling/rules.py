"""What would another autoscaler ask for? The rules that are in use, as one reading each.

Ours is held against them on the same requests, so they get the same limits, the same pace and the same
choice of who goes. None knows of classes, bounds or starts. Constants: `Targets`.
"""

from headrace.model.scaling import Reading, RuleFacts, ScaleEvidence, Signal
from headrace.model.scaling_spec import By, Scaling, ppm
from headrace.policy.scaling.supply import Supply
from headrace.units import BLOCK_TOKENS, MICRO, NS_PER_S, ceil_div

TOLERANCE = 1_100_000
"""A queue that is longer than its target by less is let be."""
LEAST = 300_000
"""The part of the groups that a rule by queues keeps at least, in one step."""


def ruled(settings: Scaling, evidence: ScaleEvidence, supply: Supply) -> tuple[Reading, ...]:
    """Return the one reading of a rule that is not `slo`; the evidence must have its facts."""
    facts = evidence.rule
    assert facts is not None, f"no facts for {settings.by}"
    match settings.by:
        case By.UTILIZATION:
            return (_utilization(settings, supply),)
        case By.QUEUE:
            return (_queue(settings, facts, supply),)
        case _:
            return (_tokens(settings, evidence, facts),)


def _asks(signal: Signal, groups: int, why: str, *numbers: tuple[str, int]) -> Reading:
    return Reading(signal=signal, desired=groups, keep=groups, why=why, numbers=numbers)


def _utilization(settings: Scaling, supply: Supply) -> Reading:
    """Groups times the busy part over its target, as a horizontal pod autoscaler has it."""
    busy, there = supply.facts().utilization_ppm, supply.ordered
    if busy is None:
        why = "no ready group has told how busy it is: all stays as it is"
        return _asks(Signal.UTILIZATION, there, why)
    target = ppm(settings.targets.busy)
    numbers = ("groups", there), ("busy_ppm", busy), ("target_ppm", target)
    return _asks(Signal.UTILIZATION, ceil_div(there * busy, target), "by the busy part", *numbers)


def _queue(settings: Scaling, facts: RuleFacts, supply: Supply) -> Reading:
    """The same by requests that wait for each ready group: at most twice the groups, and a part of them at least."""
    there, ready = supply.ordered, max(1, len(supply.ready))
    if there == 0:
        return _asks(Signal.QUEUE, min(1, facts.waiting), "nothing is there")
    ratio = facts.waiting * MICRO * MICRO // (ready * ppm(settings.targets.waiting))
    numbers = ("groups", there), ("waiting", facts.waiting), ("of_target_ppm", ratio)
    if facts.waiting and ratio <= TOLERANCE:
        return _asks(Signal.QUEUE, there, "what waits is within its target", *numbers)
    wanted = min(2 * there, ceil_div(there * max(ratio, LEAST), MICRO))
    return _asks(Signal.QUEUE, wanted, "by what waits", *numbers)


def _tokens(settings: Scaling, evidence: ScaleEvidence, facts: RuleFacts) -> Reading:
    """The largest of three: tokens offered, KV reserved, and prompts offered together with those that wait."""
    targets, span = settings.targets, max(1, facts.span_ns)
    given = _part(facts.input_tokens * NS_PER_S, span * ppm(targets.input_tps))
    made = _part(facts.output_tokens * NS_PER_S, span * ppm(targets.output_tps))
    pool = max(1, evidence.blocks * BLOCK_TOKENS * ppm(targets.kv_fill))
    held = _part(facts.reserved_tokens, pool)
    behind = facts.backlog_tokens * MICRO // targets.backlog_tokens
    parts = {
        "by the rate of tokens": given + made,
        "by reserved KV": held,
        "by prompts that wait": given + behind,
    }
    why = max(parts, key=lambda name: parts[name])
    numbers = (
        ("input_ppm", given), ("output_ppm", made), ("kv_ppm", held), ("backlog_ppm", behind),
    )  # fmt: skip
    return _asks(Signal.TOKENS, ceil_div(parts[why], MICRO), why, *numbers)


def _part(amount: int, of_micro: int) -> int:
    """Return a quotient in millionths, of a divisor that is in millionths."""
    return amount * MICRO * MICRO // of_micro
