"""What part of its envelope does each group of a pool that scales do now?

What is told of it counts, and what it is seen to do: the pace of its replica beside the usual one of its
pool. Nobody tells and nobody knows: then it is unknown, and believed its envelope (SCALE-10).
"""

from headrace.model.ids import PoolName, ReplicaName
from headrace.model.scaling_spec import ppm
from headrace.plane.fleet import Replica
from headrace.plane.groups import replica_of
from headrace.plane.ledger import Flight
from headrace.plane.machine import Machine
from headrace.plane.scale_state import Group, PoolScale, ScaledPool
from headrace.plane.speed import part, usual
from headrace.plane.state import ModelState
from headrace.units import InstantNs, Tokens, elapsed, seconds


def is_warming(m: Machine, replica: Replica, now: InstantNs) -> bool:
    """Return whether what a replica does now says nothing of it: it is a group that has just come."""
    facts, books = m.settings.scaled.get(replica.pool), m.state.pools.get(replica.pool)
    group = None if facts is None or books is None else books.groups.get(replica.name)
    if facts is None or group is None:
        return False
    return elapsed(group.since, now) < seconds(facts.settings.warmup_s)


def warm(m: Machine, known: ModelState, pool: PoolName, now: InstantNs) -> int:
    """Return the ready replicas of a pool that are to teach what one does: none that has just come."""
    ready = known.fleet.ready.get(pool, 0)
    if pool not in m.settings.scaled:
        return ready
    fleet = known.fleet.replicas.values()
    mine = [one for one in fleet if one.pool == pool and not one.draining]
    return ready - sum(is_warming(m, one, now) for one in mine)


def look(m: Machine, known: ModelState, now: InstantNs) -> None:
    """Measure the replicas of a model's pools that scale, at a tick."""
    for replica in known.fleet.replicas.values():
        if replica.pool in m.settings.scaled:
            load, profile = (
                m.state.ledger.loads[replica.incarnation],
                m.settings.pools[replica.pool],
            )
            warming = is_warming(m, replica, now)
            replica.speed.tick(profile.spec.profile, load, now, warming=warming)


def prefilled(m: Machine, replica: Replica, flight: Flight) -> None:
    """Count a prompt that is done, before its first token is booked."""
    if replica.pool not in m.settings.scaled:
        return
    facts = m.settings.pools[replica.pool]
    cached = replica.believed(Tokens(flight.cached_tokens), facts)
    load = m.state.ledger.loads[flight.incarnation]
    replica.speed.prefilled(facts.spec.profile, load, flight.input_tokens - cached, cached)


def effective(m: Machine, facts: ScaledPool, books: PoolScale) -> dict[ReplicaName, int]:
    """Return the part of its envelope that each group does, in millionths, of those of which it is known."""
    known = m.state.models[facts.model]
    up = {name: replica_of(known, group) for name, group in books.groups.items()}
    paces = {name: one.speed.ppm() for name, one in up.items() if one is not None}
    typical = usual(paces.values())
    found = {
        name: _part(facts, group, part(paces.get(name), typical))
        for name, group in books.groups.items()
    }
    return {name: known for name, known in found.items() if known is not None}


def _part(facts: ScaledPool, group: Group, seen: int | None) -> int | None:
    """Return what a group does by what was seen, and by what was told where it says so or nothing was seen."""
    if seen is None and group.ails:
        seen = ppm(facts.settings.ail_part)
    told = group.told_ppm
    if told is None:
        return seen
    return told if seen is None else min(told, seen)
