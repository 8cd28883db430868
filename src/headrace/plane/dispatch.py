"""Whose turn is it, and where does it go? Choose and book in one step, as far as windows are open.

Calls ordering for the turn and routing for the place; refuses nothing, but ends what has expired in
the queue.
"""

from headrace.model.decision import Placement, Reason
from headrace.model.effect import Decided, Dispatch, Fail
from headrace.model.evidence import ReplicaView, RouteEvidence, RouteRecord
from headrace.model.ids import AttemptId, ClassName, ModelName
from headrace.model.paths import Term, tenant_key
from headrace.model.profile import Profile
from headrace.model.slo import Bounds, Outcome
from headrace.plane.fleet import Candidate, PoolFacts, serves, view
from headrace.plane.ledger import Flight, Load
from headrace.plane.machine import NOT_SURVEYED, Machine
from headrace.plane.state import Live, ModelState, Phase
from headrace.policy.fairness.backlog import NEVER, NONE, Turn, Waiting, is_patient
from headrace.policy.fairness.shares import Side
from headrace.policy.predict.demand import output_limit
from headrace.policy.routing.seconds import UNBOUNDED, is_long, is_open
from headrace.units import DurationNs, InstantNs, Tokens, ceil_div, later

SPARE = 3, 2
"""Capacity kept open to urgent work over what has come in, as a fraction."""


def run(m: Machine, model: ModelName, known: ModelState, now: InstantNs) -> None:
    """Hand out turns while somebody waits and some replica is open."""
    backlog = known.backlog
    known.held = False
    known.pace.forget(now)
    if not backlog.size:
        return
    lapse(m, model, known, now)
    blocked = NONE
    while (tried := _give_turn(m, model, known, blocked, now)) is not None:
        # After a placement its tenant has paid, so that the turn in any class may be another's.
        blocked = blocked | tried if tried else NONE


def _give_turn(
    m: Machine, model: ModelName, known: ModelState, blocked: frozenset[ClassName], now: InstantNs
) -> frozenset[ClassName] | None:
    """Give the next turn. Return the classes that can go nowhere now; none, if it was taken.

    None: nobody has one.
    """
    order, shares, settings = m.settings.order, m.shares(model), m.settings
    stuck: frozenset[ClassName] | None = None
    work_ns = settings.prices[model].work_ns
    for turn in known.backlog.turns(order, shares, blocked, now, work_ns):
        live = m.state.live[turn.request]
        mark = (int(turn.request), known.fleet.version, turn.patient)
        if known.stuck.get(turn.slo_class) != mark:  # else nothing opened since it found no place
            if turn.patient and held_back(m, known, live):
                known.held = True  # time alone may let it go
            elif _place(m, known, live, turn, now):
                leave(m, live, known, now)
                return NONE
            elif _hopeless(m, known, live, now):
                return NONE
            else:
                known.stuck[turn.slo_class] = mark
        stuck = (stuck or NONE) | settings.sharing(model, turn.slo_class)
    return stuck


def at_once(m: Machine, known: ModelState, live: Live, now: InstantNs) -> bool:
    """Send a request before which nobody waits, if some replica is open: most never queue.

    All is as if it had been queued and been given the first turn, for a third less work.
    """
    order = m.settings.order
    if known.backlog.size or (order.relegates and live.latest_start < now):
        return False
    known.held = False
    known.pace.forget(now)
    patient = is_patient(order, min(live.key, live.latest_start), now)
    if patient and held_back(m, known, live):
        return False
    m.state.ledger.come(live.model, live.way)
    request, queue = live.request, live.way[-1].key
    turn = Turn(request.tenant, request.id, live.slo_class, False, False, patient, queue)
    if not _place(m, known, live, turn, now):
        return False
    m.state.ledger.gone(live.model, live.way)
    return True


def enqueue(m: Machine, known: ModelState, live: Live, *, again: bool = False) -> None:
    """Let an admitted request wait; the caller must `relist` its queue before the next turn.

    `again`: it has waited all the time, under another configuration.
    """
    request, arrived = live.request, live.entry.arrived_at
    starve_ns = m.starve_ns(live.slo_class)
    waiting = Waiting(
        request=request.id,
        key=live.key,
        arrived_at=arrived,
        start=live.latest_start,
        work=live.demand.work_p50_ns,
        prefill_ns=live.demand.prefill_ns,
        starve_at=later(NEVER, request.id) if starve_ns is None else later(arrived, starve_ns),
        until=live.wait_until,
    )
    order, shares = m.settings.order, m.shares(live.model)
    known.backlog.add(order, shares, live.way, request.tenant, live.slo_class, waiting, again=again)


def lapse(m: Machine, model: ModelName, known: ModelState, now: InstantNs) -> None:
    """End every wait that is over, and bring listings up to date that time alone has changed."""
    while (overdue := known.backlog.overdue(now)) is not None:
        live = m.state.live[overdue]
        leave(m, live, known, now)
        _expire(m, live, now, Reason.WAITED_OUT)
    while (queue := known.backlog.due(now)) is not None:
        relist(m, model, known, queue, now)


def relist(m: Machine, model: ModelName, known: ModelState, queue: str, now: InstantNs) -> None:
    """Relegate or expire a queue's hopeless requests, then list it by its present turn."""
    backlog, order, shares = known.backlog, m.settings.order, m.shares(model)
    for request in backlog.relegate(order, queue, now):
        live = m.state.live[request]
        live.late = True
        m.state.accounts.tally(live.request.tenant, live.slo_class).relegated += 1
        if not m.spec_of(live).expire:
            continue
        _take(m, known, live)
        _expire(m, live, now, Reason.EXPIRED)
    if queue in backlog.queues:
        backlog.refresh(order, shares, queue, now)


def _expire(m: Machine, live: Live, now: InstantNs, reason: Reason) -> None:
    """Tell a request's caller that its time is up; it waits no more."""
    m.out.append(Fail(request=live.request.id, decision=live.decision, reason=reason))
    m.conclude(live, now, Outcome.TIMEOUT, reason=reason)


def leave(m: Machine, live: Live, known: ModelState, now: InstantNs) -> None:
    """Take a queued request out for good; the caller concludes it."""
    order, shares = m.settings.order, m.shares(live.model)
    queue = _take(m, known, live)
    if queue is not None:
        known.backlog.refresh(order, shares, queue, now)


def _take(m: Machine, known: ModelState, live: Live) -> str | None:
    """Take a request out of its queue; returns the queue if something is left there."""
    queue = known.backlog.take(m.settings.order, m.shares(live.model), live.request.id)
    if tenant_key(live.way) not in known.backlog.tenants:
        m.state.accounts.had(live.model, live.request.tenant).emptied += 1
    return queue


def _place(m: Machine, known: ModelState, live: Live, turn: Turn, now: InstantNs) -> bool:
    """Send one request where it costs least, or return False: no replica is open for it."""
    settings = m.settings
    views, rest = _open_views(m, known, live, now)
    if not views:
        return False
    terms: tuple[Term, ...] = ()
    if known.backlog.size > 1:  # alone, it has nobody to go before
        terms = known.backlog.terms(settings.order, m.shares(live.model), turn.queue)
    evidence = RouteEvidence(
        blocks=live.demand.kv_blocks,
        output_p50=live.demand.output_p50,
        gap_ns=live.bounds.gap_ns,
        turn=terms,
        key=live.key,
        score=turn.score if terms else None,
        cost=settings.prices[live.model].revision,
        lent=turn.lent,
        patient=turn.patient,
        replicas=views,
        rest_bound_ns=rest,
    )
    placement = settings.config.routing.choose(evidence, settings.stale_after_ns)
    assert placement is not None, "some view was open"
    record = RouteRecord(
        request_id=live.request.id,
        decision_id=m.next_decision(),
        at=now,
        tenant=live.request.tenant,
        tenant_class=live.slo_class,
        policy_revision=live.revision,
        slack_ns=live.deadline - live.demand.prefill_ns - live.first_ns - now,
        demand=live.demand,
        ttft_ns=live.bounds.ttft_ns,
        evidence=evidence,
        placement=placement,
    )
    m.out.append(Decided(record))
    if turn.lent:
        m.state.accounts.tally(live.request.tenant, live.slo_class).lent += 1
    _book(m, known, live, turn, placement, now)
    return True


def held_back(m: Machine, known: ModelState, live: Live) -> bool:
    """Return whether a long prompt that can wait must do so, for the sake of work that cannot.

    A prompt of more than a dispatch window shuts its replica to first tokens for as long. As many
    replicas stay open as the urgent work of the last seconds needs, with some to spare; all the
    others, and always one, may be shut. Where nothing is urgent nothing is held back.
    """
    serving, loads = m.settings.serving(live.model, live.slo_class), m.state.ledger.loads
    window = max(facts.window_ns for facts in serving.values())
    if live.demand.prefill_ns <= window:
        return False
    fleet = known.fleet.replicas.values()
    mine = [one for one in fleet if one.pool in serving and not one.draining]
    shut = sum(loads[one.incarnation].pending_prefill_ns > window for one in mine)
    if not shut:
        return False
    urgent = known.pace.micro(m.settings.rivals(live.model, live.slo_class))
    capacity = sum(known.rates[one.pool].micro() for one in mine)
    over, under = SPARE
    # What would not fill a twentieth of a replica needs none of its own.
    wanted = urgent * len(mine) * over - capacity * under // 20
    needed = max(0, ceil_div(wanted, capacity * under))
    return shut >= max(1, len(mine) - needed)


def _hopeless(m: Machine, known: ModelState, live: Live, now: InstantNs) -> bool:
    """End a request that no ready replica could ever hold, so that it blocks nobody; else False."""
    serving = m.settings.serving(live.model, live.slo_class)
    ready = [facts for pool, facts in serving.items() if known.fleet.ready.get(pool)]
    if not ready or any(facts.blocks_total >= live.demand.kv_blocks for facts in ready):
        return False
    leave(m, live, known, now)
    reason = Reason.NO_READY_REPLICA
    m.out.append(Fail(request=live.request.id, decision=live.decision, reason=reason))
    m.conclude(live, now, Outcome.ERROR, reason=reason)
    return True


def _open_views(
    m: Machine, known: ModelState, live: Live, now: InstantNs
) -> tuple[tuple[ReplicaView, ...], int | None]:
    """Return views of the cheapest open replicas and prefix holders, and a bound on the rest."""
    settings, fleet, loads = m.settings, known.fleet, m.state.ledger.loads
    serving = settings.serving(live.model, live.slo_class)
    wanted = Candidate.of(m.prefixes[live.model], live.request, live.demand, live.bounds)
    blocks, gap = live.demand.kv_blocks, live.bounds.gap_ns
    alone = {pool: wanted.prefill_alone_ns(facts.spec.profile) for pool, facts in serving.items()}
    holding = wanted.matches[-1][1] if wanted.matches else 0
    limit = settings.config.routing.candidates
    fresh = m.surveyed[1] if m.surveyed[0] == live.request.id else {}
    nearby: list[ReplicaView] = []
    seen = 0
    rest: int | None = None
    for replica in fleet.cheapest():
        load, facts = loads[replica.incarnation], serving.get(replica.pool)
        least = 0 if holding >> replica.slot & 1 else alone.get(replica.pool, 0)
        if facts is None or not _may_be_open(load, facts, blocks, least):
            continue
        if len(nearby) == limit:
            rest = (replica.rank >> 32) * 1_000
            break
        seen |= 1 << replica.slot
        seen_as = fresh.get(replica.name) or view(replica, load, facts, wanted, now)
        if is_open(seen_as, blocks, gap):
            nearby.append(seen_as)
    for replica in fleet.holders(wanted.matches, seen):
        load, facts = loads[replica.incarnation], serving.get(replica.pool)
        if facts is None or not _may_be_open(load, facts, blocks, 0):
            continue
        seen_as = view(replica, load, facts, wanted, now)
        if is_open(seen_as, blocks, gap):
            nearby.append(seen_as)
    return tuple(nearby), rest


def all_views(m: Machine, live: Live, now: InstantNs) -> list[ReplicaView]:
    """Return views of all replicas that a waiting request might be sent to; for checkers."""
    known, settings = m.state.models[live.model], m.settings
    queue = known.backlog.queues[live.way[-1].key]
    if queue.side is not Side.URGENT and held_back(m, known, live):
        return []
    wanted = Candidate.of(m.prefixes[live.model], live.request, live.demand, live.bounds)
    return [
        view(replica, m.state.ledger.loads[replica.incarnation], facts, wanted, now)
        for replica in known.fleet.cheapest()
        if serves(facts := settings.pools[replica.pool], live.slo_class)
    ]


def _may_be_open(load: Load, facts: PoolFacts, blocks: int, prefill: int) -> bool:
    """Return whether a closer look is worth it: cheap bounds of `is_open`.

    `prefill`: the least it can take there. Beside others, that is no less than alone.
    """
    if facts.window_ns >= UNBOUNDED:
        return True
    window = facts.window_ns
    behind = load.behind_ns(window)
    return (
        (not behind or behind + prefill <= window)
        and not (load.pending_prefill_ns and is_long(prefill, window))
        and load.attempts < facts.spec.profile.max_running
        and load.blocks + blocks <= facts.blocks_total
    )


def _book(
    m: Machine, known: ModelState, live: Live, turn: Turn, placement: Placement, now: InstantNs
) -> None:
    """Book an attempt and have it sent."""
    m.surveyed = NOT_SURVEYED  # what was seen before this booking is no longer so
    settings, ledger, request = m.settings, m.state.ledger, live.request
    chosen = known.fleet.replicas[placement.replica]
    facts = settings.pools[chosen.pool]
    m.state.attempts += 1
    attempt = AttemptId(m.state.attempts)
    load = ledger.loads[chosen.incarnation]
    # Others are held to what its class promises: a tighter bound of its own is no claim on them.
    promised = settings.bounds[live.slo_class]
    cached = chosen.believed(Tokens(placement.cached_tokens), facts)
    prefill = _prefill_ns(request.input_tokens, cached, load, facts.spec.profile)
    flight = _flight(live, placement, prefill, now, promised)
    shares = m.shares(live.model)
    counters = tuple(shares.counter(step.key) for step in live.way)
    if not _is_contested(known, live):
        counters = (0,) * len(counters)
    ledger.book(attempt, flight, settings.prices[live.model])
    tally = m.state.accounts.tally(request.tenant, live.slo_class)
    tally.attempts += 1
    level = 0 if live.lesser is None else live.lesser.level
    m.state.accounts.admit(tally, level, deferred=request.deferred, sent=True)
    m.state.accounts.had(live.model, request.tenant).turn_at = now
    live.advance(Phase.DISPATCHED)
    live.attempt, live.replica, live.dispatched_at = attempt, chosen.name, now
    known.fleet.dispatches += 1
    chosen.last_used = known.fleet.dispatches
    known.fleet.rerank(chosen, load, facts)
    if request.prefix_tokens:
        # Who waits for room may find it there now: less of a prompt is left to compute.
        known.fleet.version += m.prefixes[live.model].remember(
            chosen, request.prefix, request.prefix_tokens, facts.prefix_capacity
        )
    m.out.append(
        Dispatch(
            request=request.id,
            attempt=attempt,
            decision=live.decision,
            replica=chosen.name,
            incarnation=chosen.incarnation,
            output_limit=output_limit(
                request, settings.models[live.model], facts.spec, live.output_cap
            ),
            tenant=request.tenant,
            slo_class=live.slo_class,
            deadline=live.deadline,
            relegated=turn.relegated,
            way=live.way,
            counters=counters,
            gap_ns=live.bounds.gap_ns,
            first_ns=DurationNs(load.pending_prefill_ns + live.first_ns),
            lesser=live.lesser,
        )
    )


def _is_contested(known: ModelState, live: Live) -> bool:
    """Return whether others wait, so that counters say whose turn it was.

    Where nobody does, whoever comes was just lifted as one that was idle: its requests may all wait in an
    engine, whose own counters know better than to be raised to that.
    """
    queues = known.backlog.queues
    return len(queues) > (live.way[-1].key in queues)


def _prefill_ns(given: Tokens, cached: Tokens, load: Load, profile: Profile) -> DurationNs:
    """Return what a prompt takes beside what runs there."""
    return profile.prefill_ns(
        given - cached, cached, load.decodes, load.context_tokens, profile.token_budget
    )


def _flight(
    live: Live, placement: Placement, prefill: DurationNs, now: InstantNs, promised: Bounds
) -> Flight:
    """Return what is booked for an attempt."""
    request = live.request
    return Flight(
        request=request.id,
        tenant=request.tenant,
        model=live.model,
        incarnation=placement.incarnation,
        input_tokens=request.input_tokens,
        cached_tokens=placement.cached_tokens,
        predicted=live.demand.output_p50,
        blocks=live.demand.kv_blocks,
        prefill_ns=prefill,
        charged=0,
        way=live.way,
        gap_ns=promised.gap_ns,
        mean_ns=promised.mean_ns,
        sent_at=now,
    )
