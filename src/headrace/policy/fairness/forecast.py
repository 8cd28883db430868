"""How long would a queue wait for its turn? What the share tree promises a newcomer.

The wait in admission's slack is the wait that the fair queue will give this request, not the whole
backlog: gating on that would refuse conforming tenants because of a hog (design: fair wait).
"""

from headrace.model.ids import ClassName
from headrace.model.paths import ROOT, Level, Path, Step, class_of, is_lane
from headrace.policy.fairness.costs import Price
from headrace.policy.fairness.shares import Shares, Side
from headrace.policy.fairness.siblings import Siblings
from headrace.policy.fairness.vtc import lifted
from headrace.units import InstantNs

LOOKED_AT = 8
"""Siblings under a newcomer's counter whose queues are looked at one by one."""


def stake(shares: Shares, way: Path, rivals: frozenset[ClassName]) -> tuple[int, int]:
    """Return (weights, own): own / weights of all that is served is such a queue's due while it waits.

    At each level its weight in those of the siblings that compete. `rivals`: classes that share its
    replicas; others do not count.
    """
    weights = own = 1
    parent = ROOT
    for step in way:
        siblings = shares.sides[Side.URGENT].get(parent)
        others = 0 if siblings is None else _others(siblings, step, rivals)
        if others:
            weights, own = weights * (step.weight + others), own * step.weight
        parent = step.key
    return weights, own


def debt(
    shares: Shares, way: Path, price: Price, rivals: frozenset[ClassName], now: InstantNs
) -> int:
    """Return the work that others get before it is such a queue's turn, were it to wait from now on.

    Each competing sibling below it gets what lifts it there, but no more than it has waiting. What is
    owed below a node takes as much longer as the node's own part of everything is smaller.
    """
    total = 0
    weights = own = 1
    parent = ROOT
    for step in way:
        siblings = shares.sides[Side.URGENT].get(parent)
        if siblings is not None:
            turn = _if_joined(shares, parent, step) + shares.bias(now)
            found = _before(shares, siblings, step, turn, price, rivals)
            known = shares.work.get(parent)  # the root's is not kept
            if known is not None:
                found = min(found, known - shares.work.get(step.key, 0))
            total += found * weights // own
            others = _others(siblings, step, rivals)
            if others:
                weights, own = weights * (step.weight + others), own * step.weight
        parent = step.key
    return total


def _others(siblings: Siblings, step: Step, rivals: frozenset[ClassName]) -> int:
    """Return the weights of the siblings that compete with a node."""
    mine = siblings.marks.get(step.key)
    total = siblings.weight - (0 if mine is None else mine.weight)
    if step.level > Level.CLASS:
        return total
    for key, mark in siblings.marks.items():
        if key != step.key and _is_strange(step, key, rivals):
            total -= mark.weight
    return total


def _is_strange(step: Step, sibling: str, rivals: frozenset[ClassName]) -> bool:
    """Return whether a node's sibling is a class that is served elsewhere."""
    return step.level <= Level.CLASS and not is_lane(sibling) and class_of(sibling) not in rivals


def _if_joined(shares: Shares, parent: str, step: Step) -> int:
    """Return where a node's counter would stand if something waited below it."""
    counter = shares.counter(step.key)
    if step.key in shares.waiting:
        return counter
    last = shares.last_out.get(parent)
    return lifted(counter, shares.least(parent), None if last is None else shares.counter(last))


def _before(
    shares: Shares, siblings: Siblings, step: Step, mine: int, price: Price,
    rivals: frozenset[ClassName],
) -> int:  # fmt: skip
    """Return the work of the siblings whose turns come before `mine`; the rest of many is taken together."""
    total, looked, left = 0, 0, _others(siblings, step, rivals)
    for turn, key in siblings.fair:
        if turn >= mine:
            break
        if key == step.key or _is_strange(step, key, rivals):
            continue
        if looked == LOOKED_AT:
            return total + price.work_ns((mine - turn) * left)
        weight = siblings.marks[key].weight
        looked += 1
        left -= weight
        total += min(shares.work.get(key, 0), price.work_ns((mine - turn) * weight))
    return total
