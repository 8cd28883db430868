"""What happens to a request that was sent: first token, progress, its end, or its replica's."""

from headrace.model.decision import Reason
from headrace.model.effect import Cancel, Fail
from headrace.model.engine import Snapshot, Usage
from headrace.model.event import (
    CallerLeft,
    Ended,
    ProgressTick,
    ReplicaDown,
    ReplicaDraining,
    ReplicaForgot,
    ReplicaUp,
    Restarted,
    ShutDown,
)
from headrace.model.ids import AttemptId, ModelName, ReplicaName
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.paths import to_tenant
from headrace.model.slo import Outcome
from headrace.plane import dispatch, groups, health
from headrace.plane.fleet import was_reset
from headrace.plane.ledger import Flight
from headrace.plane.machine import Machine
from headrace.plane.state import EPOCH_BITS, Live, ModelState, Phase
from headrace.policy.fairness.vtc import share
from headrace.units import InstantNs


def first_token(m: Machine, attempt: AttemptId, now: InstantNs) -> None:
    """An attempt's prefill is over: its window opens, its tokens begin to count."""
    flight = m.state.ledger.flights.get(attempt)
    if flight is None or flight.streaming:
        m.ignore("first_token")
        return
    live = m.state.live[flight.request]
    live.advance(Phase.STREAMING)
    known = m.state.models[live.model]
    _drained(m, known, live, flight)
    m.state.ledger.first_token(attempt, now)
    _changed(m, known, live)
    dispatch.run(m, live.model, known, now)


def progress(m: Machine, tick: ProgressTick, now: InstantNs) -> None:
    """Replace predictions by tokens made; close a span of the rate at which queued work drains."""
    ledger, state = m.state.ledger, m.state
    grown: dict[ModelName, None] = {}
    for attempt, made in tick.moved:
        flight = ledger.flights.get(attempt)
        if flight is None or not flight.streaming:
            m.ignore("tick")
            continue
        before = flight.charged
        ledger.progress(flight, made, m.settings.prices[flight.model])
        if flight.charged != before:
            grown[flight.model] = None
    for known in state.models.values():
        queued = known.backlog.queued
        for pool, rate in known.rates.items():
            served = m.settings.served_by(pool)
            waiting = any(queued.get(name) for name in served)
            rate.tick(now, health.warm(m, known, pool, now), waiting=waiting)
        if m.settings.scaled:
            health.look(m, known, now)
    for model in grown:
        dispatch.run(m, model, state.models[model], now)  # the turn may be another's now


def ended(m: Machine, event: Ended, now: InstantNs) -> None:
    """An attempt is over: settle, conclude, and let the next one in."""
    flight = m.state.ledger.flights.get(event.attempt)
    if flight is None:
        m.ignore("ended")  # cancelled, lost with its replica, or told twice
        return
    live = m.state.live[flight.request]
    known = m.state.models[live.model]
    usage, timing = event.usage, event.timing
    if timing.tokens and not flight.streaming:  # its first token was not told apart
        _drained(m, known, live, flight)
    _close(m, known, live, usage, timing.tokens)
    reason = Reason.UPSTREAM_ERROR if event.outcome is Outcome.ERROR else None
    if reason is not None:
        m.out.append(Fail(request=live.request.id, decision=live.decision, reason=reason))
    m.conclude(live, now, event.outcome, reason=reason, usage=usage, timing=timing)
    dispatch.run(m, live.model, known, now)


def caller_left(m: Machine, event: CallerLeft, now: InstantNs) -> None:
    """Nobody waits for this answer: free what it holds, in whatever phase it is."""
    live = m.state.live.get(event.request)
    if live is None:
        m.ignore("left")
        return
    timing = _stop(m, live, event.timing, now)
    m.conclude(live, now, Outcome.CLIENT_CANCEL, timing=timing)
    dispatch.run(m, live.model, m.state.models[live.model], now)


def shut_down(m: Machine, event: ShutDown, now: InstantNs) -> None:
    """End what was not over in time, in whatever phase it is, and tell its caller.

    It is an error of ours and no cancel: the caller was there to the end.
    """
    live = m.state.live.get(event.request)
    if live is None:
        m.ignore("shut_down")
        return
    timing = _stop(m, live, event.timing, now)
    reason = Reason.SHUT_DOWN
    m.out.append(Fail(request=live.request.id, decision=live.decision, reason=reason))
    m.conclude(live, now, Outcome.ERROR, reason=reason, timing=timing)
    dispatch.run(m, live.model, m.state.models[live.model], now)


def _stop(m: Machine, live: Live, timing: StreamTiming, now: InstantNs) -> StreamTiming:
    """Free what a request holds that ends unanswered; return what its stream had shown."""
    known = m.state.models[live.model]
    if live.phase is Phase.QUEUED:
        dispatch.leave(m, live, known, now)
        return NO_STREAM
    # An answer in one piece shows nothing before its end: its prompt was worked on all the same.
    seen = timing.tokens or int(live.phase is Phase.STREAMING)
    _cancel(m, known, live)
    _close(m, known, live, seen=seen)
    return timing


def replica_up(m: Machine, event: ReplicaUp, now: InstantNs) -> None:
    """A replica is ready. The same name with a later incarnation replaces the old one.

    An incarnation that lives, or whose farewell was heard, does not come again: that is a late or
    repeated message.
    """
    facts = m.settings.pools.get(event.pool)
    model = None if facts is None else ModelName(facts.spec.model)
    known = None if model is None else m.state.models.get(model)
    if model is None or known is None or event.incarnation in m.state.ledger.loads:
        m.ignore("up")
        return
    gone = m.state.gone.get(event.replica)
    if gone is not None and gone >= event.incarnation:
        m.ignore("up")
        return
    for other, theirs in m.state.models.items():
        present = theirs.fleet.replicas.get(event.replica)
        if present is None:
            continue
        if present.incarnation > event.incarnation:
            m.ignore("up")
            return
        lose(m, theirs, event.replica, now)
        if other != model:
            dispatch.run(m, other, theirs, now)
    m.state.ledger.open_load(event.incarnation)
    replica = known.fleet.join(event.replica, event.incarnation, event.pool)
    groups.risen(m, event.pool, replica, now)
    dispatch.run(m, model, known, now)


def replica_down(m: Machine, event: ReplicaDown, now: InstantNs) -> None:
    """A replica is gone with all it held; an old incarnation's farewell means nothing."""
    for model, known in m.state.models.items():
        present = known.fleet.replicas.get(event.replica)
        if present is not None and present.incarnation == event.incarnation:
            lose(m, known, event.replica, now, event.timings)
            _farewell(m, event)
            dispatch.run(m, model, known, now)
            return
    m.ignore("down")


def replica_draining(m: Machine, event: ReplicaDraining, now: InstantNs) -> None:
    """A replica takes nothing new. What it holds cached helps no newcomer, and is forgotten."""
    for model, known in m.state.models.items():
        present = known.fleet.replicas.get(event.replica)
        if present is None or present.incarnation != event.incarnation:
            continue
        if present.draining:
            if groups.going(m, present.pool, event.replica, now):
                return
            continue
        known.fleet.drain(present)
        m.prefixes[model].forget(present)
        groups.going(m, present.pool, event.replica, now)
        dispatch.run(m, model, known, now)  # who can only go there must not wait for ever
        return
    m.ignore("draining")


GONE = 1_024
"""Replicas whose farewell is remembered, so that their late messages revive nobody."""


def _farewell(m: Machine, event: ReplicaDown) -> None:
    gone = m.state.gone
    gone.pop(event.replica, None)
    gone[event.replica] = event.incarnation
    if len(gone) > GONE:
        del gone[next(iter(gone))]


def reported(m: Machine, snapshot: Snapshot, now: InstantNs) -> None:
    """Keep a replica's newest report; late, duplicate and strangers' ones change nothing.

    So does one from the future: it would outlast every report that follows.
    """
    for model, known in m.state.models.items():
        replica = known.fleet.replicas.get(snapshot.replica)
        if replica is None or replica.incarnation != snapshot.incarnation:
            continue
        last = replica.snapshot
        late = last is not None and last.observed_at >= snapshot.observed_at
        if late or snapshot.observed_at > now:
            break
        if last is not None and was_reset(last, snapshot):
            m.prefixes[model].emptied(replica, now)
        replica.snapshot = snapshot
        return
    m.ignore("report")


def replica_forgot(m: Machine, event: ReplicaForgot) -> None:
    """A replica's cache is empty, as far as anybody knows: no prefix is believed to be there.

    Prompts already sent keep what they were expected to find; their usage corrects it.
    """
    for model, known in m.state.models.items():
        replica = known.fleet.replicas.get(event.replica)
        if replica is not None and replica.incarnation == event.incarnation:
            m.prefixes[model].emptied(replica, m.state.now)
            return
    m.ignore("forgot")


def restarted(m: Machine, event: Restarted, now: InstantNs) -> None:
    """The driver came back from a checkpoint: no stream survived; books and lessons did."""
    state = m.state
    assert event.epoch > state.attempts >> EPOCH_BITS, "epochs count the restarts, from 1"
    for live in list(state.live.values()):
        known = state.models[live.model]
        if live.phase is Phase.QUEUED:
            dispatch.leave(m, live, known, now)
        else:
            _close(m, known, live)
        m.conclude(live, now, Outcome.ERROR, reason=Reason.RESTARTED)
    for known in state.models.values():
        for name in list(known.fleet.replicas):
            _remove(m, known, name)
    state.attempts = event.epoch << EPOCH_BITS


def lose(
    m: Machine,
    known: ModelState,
    name: ReplicaName,
    now: InstantNs,
    timings: tuple[tuple[AttemptId, StreamTiming], ...] = (),
) -> None:
    """End every attempt of a replica, with what its stream had shown, and the replica's books."""
    replica = known.fleet.replicas[name]
    incarnation, reason = replica.incarnation, groups.why_lost(m, replica.pool, name)
    flights, shown = m.state.ledger.flights, dict(timings)
    for attempt in [a for a, f in flights.items() if f.incarnation == incarnation]:
        live = m.state.live[flights[attempt].request]
        timing = shown.get(attempt, NO_STREAM)
        _close(m, known, live, seen=timing.tokens)
        m.out.append(Fail(request=live.request.id, decision=live.decision, reason=reason))
        m.conclude(live, now, Outcome.ERROR, reason=reason, timing=timing)
    _remove(m, known, name)


def _remove(m: Machine, known: ModelState, name: ReplicaName) -> None:
    replica = known.fleet.leave(name)
    m.prefixes[ModelName(m.settings.pools[replica.pool].spec.model)].forget(replica)
    m.state.ledger.close_load(replica.incarnation)
    groups.fallen(m, replica.pool, name, m.state.now)


def _cancel(m: Machine, known: ModelState, live: Live) -> None:
    assert live.attempt is not None
    assert live.replica is not None
    m.out.append(
        Cancel(
            attempt=live.attempt,
            replica=live.replica,
            incarnation=known.fleet.replicas[live.replica].incarnation,
        )
    )


def _close(
    m: Machine, known: ModelState, live: Live, usage: Usage | None = None, seen: int = 0
) -> None:
    """Close a live request's flight: its counters are settled."""
    assert live.attempt is not None
    ledger, price = m.state.ledger, m.settings.prices[live.model]
    flight, tenant = ledger.flights[live.attempt], live.request.tenant
    live.made = ledger.close(live.attempt, price, m.state.now, usage, seen)
    if usage is not None:
        assert live.replica is not None
        replica = known.fleet.replicas[live.replica]
        facts = m.settings.pools[replica.pool]
        replica.learn(flight.cached_tokens, flight.sent_at, usage, facts)
    served = flight.served(usage, live.made)
    if any(served):
        had = m.state.accounts.had(live.model, tenant)
        weight = to_tenant(flight.way)[-1].weight
        had.add(served, price.service(*served), share(flight.charged, weight))
    _changed(m, known, live)


def _drained(m: Machine, known: ModelState, live: Live, flight: Flight) -> None:
    """Count a request's work as drained, in the amount that was queued for it, and its prompt as done."""
    assert live.replica is not None
    replica = known.fleet.replicas[live.replica]
    if not health.is_warming(m, replica, m.state.now):
        known.rates[replica.pool].fresh_ns += live.demand.work_p50_ns
    health.prefilled(m, replica, flight)


def _changed(m: Machine, known: ModelState, live: Live) -> None:
    """A replica's load fell: rank it anew and let waiting work try again."""
    assert live.replica is not None
    replica = known.fleet.replicas[live.replica]
    load = m.state.ledger.loads[replica.incarnation]
    known.fleet.rerank(replica, load, m.settings.pools[replica.pool])
    known.fleet.version += 1
