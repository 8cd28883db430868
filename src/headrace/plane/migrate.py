"""What runs on a group that drains is moved to others of its pool, stream by stream (SCALE-8).

A stream is booked on both replicas from when its move begins until it is over, and on one of them from then on,
whatever happened: it arrived, it stayed, it ended meanwhile, or one of the two is gone. At most one stream at a
time leaves a group, and at most one comes to another, so that no two copies share a link.
"""

from headrace.model.effect import Migrate
from headrace.model.event import Migrated
from headrace.model.ids import AttemptId, ReplicaName
from headrace.plane import dispatch
from headrace.plane.fleet import Candidate, Replica, view
from headrace.plane.ledger import Flight
from headrace.plane.machine import Machine
from headrace.plane.scale_state import ScaledPool
from headrace.plane.state import Live
from headrace.policy.routing.seconds import can_take_over
from headrace.policy.scaling.moving import Running, in_turn
from headrace.units import InstantNs, Tokens

TRIED = 4
"""Streams that are held against the others' room at a time: if none of the longest fits, room is what lacks."""


def go_on(m: Machine, now: InstantNs) -> None:
    """Begin the next move from each group that drains and has none under way."""
    if not m.state.leaving:
        return
    for name, pool in m.state.leaving.items():
        facts = m.settings.scaled.get(pool)
        if facts is None or not facts.settings.migrate:
            continue
        source = m.state.models[facts.model].fleet.replicas.get(name)
        if source is not None and source.pool == pool and source.migrates:
            _next(m, facts, source, now)


def _next(m: Machine, facts: ScaledPool, source: Replica, now: InstantNs) -> None:
    """Move one more stream away from a replica, if any is to go and another replica has room for it."""
    ledger = m.state.ledger
    if any(ledger.flights[one].incarnation == source.incarnation for one in ledger.berths):
        return
    targets = _targets(m, facts)
    if not targets or not ledger.loads[source.incarnation].decodes:
        return
    mine = {
        attempt: flight
        for attempt, flight in ledger.flights.items()
        if flight.incarnation == source.incarnation and flight.streaming
    }
    step_ns = m.settings.pools[facts.name].spec.profile.reference_step_ns
    turn = in_turn((_running(attempt, flight) for attempt, flight in mine.items()), step_ns)
    for attempt in turn[:TRIED]:
        target = _place(m, mine[attempt], targets, now)
        if target is not None:
            _begin(m, attempt, source, target)
            return


def _running(attempt: AttemptId, flight: Flight) -> Running:
    return Running(
        attempt=attempt,
        made=Tokens(flight.made),
        predicted=Tokens(flight.predicted),
        stayed=flight.stayed,
    )


def _targets(m: Machine, facts: ScaledPool) -> list[Replica]:
    """Return the replicas of a pool that a stream may be moved to, the least loaded first."""
    coming = {berth.incarnation for berth in m.state.ledger.berths.values()}
    return [
        one
        for one in m.state.models[facts.model].fleet.cheapest()
        if one.pool == facts.name and one.migrates and one.incarnation not in coming
    ]


def _place(m: Machine, flight: Flight, targets: list[Replica], now: InstantNs) -> Replica | None:
    """Return the first replica that has room for a stream and keeps its pace, and that of its own, with it."""
    live, loads = m.state.live[flight.request], m.state.ledger.loads
    wanted = Candidate(live.request, live.demand, (), live.bounds.mean_ns)
    for one in targets:
        seen = view(one, loads[one.incarnation], m.settings.pools[one.pool], wanted, now)
        if can_take_over(seen, flight.blocks, flight.gap_ns):
            return one
    return None


def _begin(m: Machine, attempt: AttemptId, source: Replica, target: Replica) -> None:
    m.state.ledger.set_aside(attempt, target.name, target.incarnation, m.state.now)
    m.out.append(
        Migrate(
            attempt=attempt,
            replica=source.name,
            incarnation=source.incarnation,
            target=target.name,
            target_incarnation=target.incarnation,
        )
    )


def migrated(m: Machine, event: Migrated, now: InstantNs) -> None:
    """A move is over: settle the place that the stream does not have, and go on with the next.

    One that stayed is tried again with the next progress of streams, after the others.
    """
    ledger = m.state.ledger
    berth = ledger.berths.get(event.attempt)
    if berth is None or berth.incarnation != event.incarnation:
        m.ignore("migrated")  # it was over before, and its place is free
        return
    flight = ledger.flights[event.attempt]
    live = m.state.live[flight.request]
    assert live.replica is not None
    if event.done:
        ledger.move(event.attempt, now)
        _arrived(m, live, live.replica, berth.replica)
    else:
        ledger.give_up(event.attempt, now)
        flight.stayed += 1
    known = m.state.models[live.model]
    known.fleet.version += 1
    dispatch.run(m, live.model, known, now)
    if event.done:
        go_on(m, now)


def _arrived(m: Machine, live: Live, source: ReplicaName, target: ReplicaName) -> None:
    """Rank both replicas anew; the prompt is where its stream is, and stays there as cache."""
    known, request = m.state.models[live.model], live.request
    live.replica = target
    for name in (source, target):
        replica = known.fleet.replicas[name]
        load = m.state.ledger.loads[replica.incarnation]
        known.fleet.rerank(replica, load, m.settings.pools[replica.pool])
    replica = known.fleet.replicas[target]
    if request.prefix_tokens and not replica.draining:
        room = m.settings.pools[replica.pool].prefix_capacity
        m.prefixes[live.model].remember(replica, request.prefix, request.prefix_tokens, room)
