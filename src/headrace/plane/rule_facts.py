"""What do the rules of other autoscalers go by? From the plane's own books, for pools that follow one."""

from itertools import islice

from headrace.model.scaling import RuleFacts
from headrace.plane.ledger import Load
from headrace.plane.machine import Machine
from headrace.plane.scale_state import PoolScale, ScaledPool
from headrace.plane.state import Phase
from headrace.units import BLOCK_TOKENS, MICRO, DurationNs, InstantNs, elapsed

LOOKED_AT = 4_096
"""Requests that wait here of which one decision counts the prompts: more would ask for no more groups."""


def rule_facts(m: Machine, facts: ScaledPool, books: PoolScale, now: InstantNs) -> RuleFacts:
    """Return what waits for a pool anywhere, what its groups hold, and what came in since this was asked."""
    prompts = _waiting_here(m, facts) + _waiting_there(m, facts)
    loads = _loads(m, facts)
    found = RuleFacts(
        waiting=len(prompts),
        backlog_tokens=sum(prompts),
        reserved_tokens=sum(load.blocks for load in loads) * BLOCK_TOKENS,
        input_tokens=books.input_tokens,
        output_tokens=books.output_tokens,
        span_ns=elapsed(books.counted_at, now),
    )
    books.input_tokens = books.output_tokens = 0
    books.counted_at = now
    return found


def busy_ppm(load: Load, age_ns: DurationNs, tick_ns: DurationNs, now: InstantNs) -> int | None:
    """Return the part of the last tick, or of a younger group's life, in which something ran there.

    Counts anew from here on. None: it has only just begun to serve.
    """
    busy, span = load.take_busy(now), min(age_ns, tick_ns)
    return min(MICRO, busy * MICRO // span) if span else None


def _waiting_here(m: Machine, facts: ScaledPool) -> list[int]:
    """Return the prompts of requests that were not sent yet, the oldest first."""
    served = m.settings.served_by(facts.name)
    found: list[int] = []
    for live in islice(m.state.live.values(), LOOKED_AT):
        if live.phase is Phase.QUEUED and live.model == facts.model and live.slo_class in served:
            pools = m.settings.scaling(live.model, live.slo_class)
            if pools[live.request.id % len(pools)] == facts.name:
                found.append(live.request.input_tokens)
    return found


def _waiting_there(m: Machine, facts: ScaledPool) -> list[int]:
    """Return the prompts that were sent and are behind another one that is being computed."""
    flights = m.state.ledger.flights
    behind = (islice(load.prefills, 1, None) for load in _loads(m, facts))
    return [flights[attempt].input_tokens for load in behind for attempt in load]


def _loads(m: Machine, facts: ScaledPool) -> list[Load]:
    replicas = m.state.models[facts.model].fleet.replicas.values()
    return [m.state.ledger.loads[one.incarnation] for one in replicas if one.pool == facts.name]
