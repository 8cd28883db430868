"""What asks for capacity? Each signal by itself, with its number, its reason and what it went by.

All are judged at the time at which a group asked for now would be ready. Utilization is none of them: an
engine that decodes is always busy, and one that waits for memory never is.
"""

from collections.abc import Callable
from functools import partial

from headrace.model.scaling import DemandFacts, Reading, ScaleEvidence, Signal
from headrace.model.scaling_spec import Scaling, ppm
from headrace.policy.scaling.forecast import believed
from headrace.policy.scaling.formula import groups_for, need_micro
from headrace.policy.scaling.supply import Supply
from headrace.units import MICRO, ceil_div, elapsed, seconds

_ABSENT = 0
"""What a number that is not known stands as; the reason says so."""


def counted_micro(settings: Scaling, demand: DemandFacts) -> int:
    """Return the urgent rate that counts: first tries, and repeats up to the retry budget."""
    budget = demand.urgent_micro * ppm(settings.retry_budget) // MICRO
    return demand.urgent_micro + min(demand.retries_micro, budget)


def readings(settings: Scaling, evidence: ScaleEvidence, supply: Supply) -> tuple[Reading, ...]:
    """Return what every signal says, in the order of their names' list."""
    found = [
        each(settings, evidence, supply)
        for each in (_work, _queue_wait, _slack, _forecast, _kv)
    ]  # fmt: skip
    lost = _lost(settings, evidence, supply)
    others = max(reading.desired or 0 for reading in (*found, lost))
    goodput = _goodput(settings, evidence, supply, others)
    return (*found, goodput, _imbalance(), lost)


def _asks(
    settings: Scaling, supply: Supply, signal: Signal, need: int, why: str,
    *numbers: tuple[str, int],
) -> Reading:  # fmt: skip
    """Return the reading of a signal that needs a work rate, at both thresholds."""
    count = partial(groups_for, there=_nominal(supply), each=supply.each_micro)
    return Reading(
        signal=signal,
        desired=count(need),
        keep=count(_kept(settings, need)),
        why=why,
        numbers=(("need_micro", need), ("each_micro", supply.each_micro), *numbers),
    )


def _nominal(supply: Supply) -> list[int]:
    return [supply.nominal(one) for one in (*supply.ready, *supply.counted)]


def _kept(settings: Scaling, amount: int) -> int:
    """Return what an amount is at the lower threshold."""
    return ceil_div(amount * MICRO, ppm(settings.in_threshold))


def _quiet(signal: Signal, why: str, *numbers: tuple[str, int]) -> Reading:
    return Reading(signal=signal, desired=0, keep=0, why=why, numbers=numbers)


def _unknown(signal: Signal, why: str) -> Reading:
    return Reading(signal=signal, desired=None, why=why)


def _work_need(settings: Scaling, evidence: ScaleEvidence, rate: int) -> int:
    """Return the work rate that urgent and patient work take: the formula, each queue within its time.

    Waiting work that is ended before a group asked for now could be ready is no reason for one. But
    while anything waits, there is to be one.
    """
    demand = evidence.demand
    running = demand.active_ns * ppm(settings.active_part) // MICRO
    queued = running if _is_over_by_then(evidence) else running + demand.urgent_ns
    need = need_micro(ppm(settings.headroom), rate, queued, seconds(settings.target_drain_s))
    if demand.patient_ns and demand.patient_left_ns is not None:
        within = max(seconds(settings.target_drain_s), demand.patient_left_ns)
        need += need_micro(MICRO, 0, demand.patient_ns, within)
    return max(need, min(1, demand.urgent_ns))


def _is_over_by_then(evidence: ScaleEvidence) -> bool:
    budget = evidence.demand.budget_ns
    return evidence.demand.expires and budget is not None and budget < evidence.ready_p50_ns


def _work(settings: Scaling, evidence: ScaleEvidence, supply: Supply) -> Reading:
    demand = evidence.demand
    rate = counted_micro(settings, demand)
    need = _work_need(settings, evidence, rate)
    return _asks(
        settings, supply, Signal.WORK, need, "offered work and what waits",
        ("offered_micro", demand.urgent_micro), ("retries_micro", demand.retries_micro),
        ("counted_micro", rate), ("waiting_ns", demand.urgent_ns),
        ("active_ns", demand.active_ns), ("patient_ns", demand.patient_ns),
        ("leftover_ns", demand.leftover_ns),
    )  # fmt: skip


def queue_at_landing(evidence: ScaleEvidence, supply: Supply, rate: int) -> int:
    """Return the urgent work that will wait when a group asked for now is ready, if none is asked for.

    A fluid: it grows by what is offered and shrinks by what is ready, with each group on its way from when
    it is expected. Where hopeless work is ended, no more than comes in within the bound can wait.
    """
    demand, spent, serving = evidence.demand, 0, supply.now_micro
    queue: int = demand.urgent_ns
    most = None
    if demand.expires and demand.budget_ns is not None:
        most = rate * max(0, demand.budget_ns) // MICRO
    steps = [(one.arrival_p50_ns, supply.nominal(one)) for one in supply.counted]
    for at, more in [*sorted(steps), (evidence.ready_p90_ns, 0)]:
        queue = max(0, queue + (rate - serving) * (at - spent) // MICRO)
        queue = queue if most is None else min(queue, most)
        spent, serving = at, serving + more
    return queue


def _queue_wait(settings: Scaling, evidence: ScaleEvidence, supply: Supply) -> Reading:
    demand, signal = evidence.demand, Signal.QUEUE_WAIT
    if demand.budget_ns is None:
        return _quiet(signal, "no class here is bound to a first token")
    rate = counted_micro(settings, demand)
    queue, serving = queue_at_landing(evidence, supply, rate), supply.landing_micro
    limit = demand.budget_ns * ppm(settings.wait_part) // MICRO
    numbers = (("queue_ns", queue), ("serving_micro", serving), ("limit_ns", limit))
    if queue == 0 or queue * MICRO <= limit * serving:
        return _quiet(signal, "what will wait then has its turn in time", *numbers)
    # What waits within the bound is as it should be; the rest is to be worked off.
    rest = max(0, queue - rate * demand.budget_ns // MICRO)
    need = need_micro(ppm(settings.headroom), rate, rest, seconds(settings.target_drain_s))
    return _asks(settings, supply, signal, need, "what will wait then waits too long", *numbers)


def _slack(settings: Scaling, evidence: ScaleEvidence, supply: Supply) -> Reading:
    demand, signal = evidence.demand, Signal.SLACK
    least = demand.least_slack_ns
    numbers = (
        ("waiting", demand.waiting), ("low_slack", demand.low_slack),
        ("low_slack_ns", demand.low_slack_ns), ("least_slack_ns", _ABSENT if least is None else least),
    )  # fmt: skip
    few = demand.waiting < settings.slack_least
    if few or demand.low_slack * MICRO <= demand.waiting * ppm(settings.slack_part):
        return _quiet(signal, "few of those that wait are short of time", *numbers)
    rate = counted_micro(settings, demand)
    if supply.counted and supply.landing_micro >= _work_need(settings, evidence, rate):
        return _quiet(
            signal, "many are short of time, and enough groups are on their way", *numbers
        )
    drain = seconds(settings.target_drain_s)
    need = need_micro(ppm(settings.headroom), rate, demand.low_slack_ns, drain)
    return _asks(settings, supply, signal, need, "many that wait are short of time", *numbers)


def _forecast(settings: Scaling, evidence: ScaleEvidence, supply: Supply) -> Reading:
    signal, facts = Signal.FORECAST, evidence.forecast
    if settings.forecast is None or facts is None:
        return _quiet(signal, "nothing is foreseen")
    rate = counted_micro(settings, evidence.demand)
    used = believed(settings.forecast, facts, rate)
    error = facts.error_ppm
    numbers = (
        ("now_micro", rate), ("at_landing_micro", facts.at_landing_micro), ("used_micro", used),
        ("error_ppm", _ABSENT if error is None else error), ("checked", facts.checked),
    )  # fmt: skip
    if used <= rate:
        rises = facts.at_landing_micro > max(rate, facts.level_micro)
        why = "it is not to be trusted" if rises else "no rise is foreseen"
        return _quiet(signal, why, *numbers)
    need = _work_need(settings, evidence, used)
    why = "offered work will have risen when a group asked for now is ready"
    return _asks(settings, supply, signal, need, why, *numbers)


def _kv(settings: Scaling, evidence: ScaleEvidence, supply: Supply) -> Reading:
    signal, fresh = Signal.KV, supply.fresh.values()
    waiting = evidence.demand.waiting_blocks
    if supply.ready and not fresh:
        return _unknown(signal, "no engine has told of its KV blocks lately")
    held = sum(one.blocks_held for one in fresh)
    total = sum(one.blocks_total for one in fresh)
    wanted = held + waiting
    each = max(1, evidence.blocks * ppm(settings.kv_fill) // MICRO)
    numbers = (("held", held), ("waiting", waiting), ("total", total), ("each", each))
    full = wanted * MICRO > total * ppm(settings.kv_fill)
    return Reading(
        signal=signal,
        desired=ceil_div(wanted, each),
        keep=ceil_div(_kept(settings, wanted), each),
        why="KV blocks run out" if full else "KV blocks suffice",
        numbers=numbers,
    )


def _goodput(
    settings: Scaling, evidence: ScaleEvidence, supply: Supply, others: int
) -> Reading:  # fmt: skip
    facts, signal, ready = evidence.goodput, Signal.GOODPUT, len(supply.ready)
    if facts is None:
        return _unknown(signal, "nothing was over lately")
    numbers = (("offered", facts.offered), ("met", facts.met), ("target_ppm", facts.target_ppm))
    if facts.offered < settings.goodput_least:
        return _quiet(signal, "too little was over lately", *numbers)
    attained = facts.met * MICRO // facts.offered
    if attained + ppm(settings.goodput_margin) >= facts.target_ppm:
        return _quiet(signal, "attainment over offered holds", *numbers)
    youngest = max((one.since for one in supply.ready), default=None)
    if youngest is None or elapsed(youngest, evidence.now) < facts.window_ns:
        # What new groups do is not in the window yet: asking again would be for what they will cure.
        return Reading(
            signal=signal, desired=0, keep=ready, numbers=numbers,
            why="attainment is low, and was not measured since the last group was ready",
        )  # fmt: skip
    lacking = ceil_div(ready * (facts.target_ppm - attained), facts.target_ppm)
    most = max(others, 0) + settings.goodput_extra
    return Reading(
        signal=signal, desired=min(ready + lacking, most), keep=ready, numbers=numbers,
        why="attainment over offered has fallen",
    )  # fmt: skip


def _imbalance() -> Reading:
    return _quiet(Signal.IMBALANCE, "a pool that does both has no other side")


def _lost(settings: Scaling, evidence: ScaleEvidence, supply: Supply) -> Reading:
    demand, signal = evidence.demand, Signal.LOST_CAPACITY
    nominal = sum(supply.nominal(one) for one in supply.ready)
    numbers = (("nominal_micro", nominal), ("effective_micro", supply.now_micro))
    if supply.now_micro >= nominal:
        return _quiet(signal, "ready groups do what was measured of them", *numbers)
    need = _work_need(settings, evidence, counted_micro(settings, demand))
    there = [supply.effective(one) for one in supply.ready]
    there += [supply.nominal(one) for one in supply.counted]
    count: Callable[[int], int] = partial(groups_for, there=there, each=supply.each_micro)
    return Reading(
        signal=signal, desired=count(need), keep=count(_kept(settings, need)), numbers=numbers,
        why="ready groups do less than was measured of them",
    )  # fmt: skip
