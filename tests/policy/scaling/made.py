"""Evidence for the scaler: an idle pool of small groups, changed as a test needs it."""

from typing import Any

from msgspec.structs import replace

from headrace.model.ids import Incarnation, PoolName, ReplicaName
from headrace.model.scaling import (
    DemandFacts,
    GroupFacts,
    GroupSample,
    Reading,
    ScaleDecision,
    ScaleEvidence,
    ScaleMemory,
    Signal,
    Standing,
)
from headrace.model.scaling_spec import Scaling
from headrace.policy.scaling.decide import decide
from headrace.units import MICRO, NS_PER_S

S = NS_PER_S
NOW = 10_000 * S
LONG_AGO = ScaleMemory(since=0)  # type: ignore[arg-type]
"""Decisions have been remembered for long, and nothing was needed."""
BLOCKS = 1_000


def group(name: str, standing: Standing = Standing.READY, **changes: Any) -> GroupFacts:
    """Return a group of one GPU that does one work-second a second, and has stood so for long."""
    given: dict[str, Any] = {
        "group": name,
        "incarnation": 1,
        "standing": standing,
        "gpus": 1,
        "envelope_micro": MICRO,
        "since": 0,
    }
    if standing is Standing.COMING:
        given |= {"arrival_p50_ns": 40 * S, "arrival_p90_ns": 60 * S}
    return GroupFacts(**(given | changes))


def groups(ready: int, coming: int = 0, **changes: Any) -> tuple[GroupFacts, ...]:
    """Return so many ready groups, r0 and on, and so many on their way, c0 and on."""
    risen = [group(f"r{i}", **changes) for i in range(ready)]
    return (*risen, *(group(f"c{i}", Standing.COMING) for i in range(coming)))


def sample(name: str, held: int = 100, **changes: Any) -> GroupSample:
    """Return what a group said a second ago."""
    said = GroupSample(
        group=ReplicaName(name),
        incarnation=Incarnation(1),
        age_ns=S,  # type: ignore[arg-type]
        blocks_held=held,  # type: ignore[arg-type]
        blocks_total=BLOCKS,  # type: ignore[arg-type]
    )
    return replace(said, **changes)


def demand(urgent: float = 0.0, **changes: Any) -> DemandFacts:
    """Return demand of so many work-seconds a second, with a first-token bound of 2 s."""
    return DemandFacts(**{"urgent_micro": round(urgent * MICRO), "budget_ns": 2 * S, **changes})


def evidence(urgent: float = 0.0, **changes: Any) -> ScaleEvidence:
    """Return two ready groups that told of themselves; starts take 50 s, at most 90 s."""
    given: dict[str, Any] = {
        "now": NOW,
        "pool": PoolName("p"),
        "minute": 0,
        "gpus": 1,
        "envelope_micro": MICRO,
        "declared_micro": 700_000,
        "blocks": BLOCKS,
        "ready_p50_ns": 50 * S,
        "ready_p90_ns": 90 * S,
        "demand": demand(urgent),
        "groups": groups(2),
        "memory": LONG_AGO,
    } | changes
    ready = [one for one in given["groups"] if one.standing is Standing.READY]
    given.setdefault("samples", tuple(sample(one.group) for one in ready))
    return ScaleEvidence(**given)


def reading(decision: ScaleDecision, signal: Signal) -> Reading:
    """Return what one signal said."""
    (found,) = (one for one in decision.readings if one.signal is signal)
    return found


def decided(settings: Scaling | None = None, urgent: float = 0.0, **changes: Any) -> ScaleDecision:
    """Return the decision on such evidence."""
    return decide(settings or Scaling(), evidence(urgent, **changes))
