"""What must hold of a plane after every event, whatever the events were."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from headrace.model.group import Life
from headrace.model.ids import Incarnation, RequestId, TenantId
from headrace.model.paths import ROOT
from headrace.plane.core import Plane
from headrace.plane.ledger import Load
from headrace.plane.state import Live, ModelState, Phase, PlaneState
from headrace.policy.fairness.backlog import NONE, Backlog
from headrace.policy.fairness.shares import Shares
from headrace.policy.fairness.vtc import share
from headrace.policy.routing.seconds import is_open
from headrace.units import InstantNs
from tests.policy.fairness.sound import shares_are_sound


def hold(plane: Plane, now: InstantNs) -> None:
    """Check everything that concerns one instant."""
    state = plane.state
    live_and_books_agree(state)
    loads_are_their_flights(state)
    quotas_are_their_holds(state)
    for model, known in state.models.items():
        backlog_is_what_waits(known, state.ledger.shares[model], state.live)
        shares_are_sound(state.ledger.shares[model], known.backlog)
        fleet_is_consistent(state, known)
    queued = {i for i, live in state.live.items() if live.phase is Phase.QUEUED}
    waiting = {i for known in state.models.values() for i in waits(known.backlog)}
    assert queued == waiting
    nothing_waits_in_vain(plane, now)
    groups_are_sound(plane)
    tallies_add_up(state)


def groups_are_sound(plane: Plane) -> None:
    """Only whole groups that are wanted take requests; drains have an end; nothing is kept for ever."""
    state, scaled = plane.state, plane.settings.scaled
    drains = {}
    for pool, books in state.pools.items():
        assert (books.next_at is not None) is (pool in scaled)
        assert books.groups or books.next_at is not None, "books of nothing"
        for name, group in books.groups.items():
            assert name == group.name
            assert group.gpus >= 0
            assert pool in scaled or group.life is Life.STOPPING, f"{name} of nobody's is kept"
            if group.life is Life.DRAINING and group.drain_by is not None:
                drains[name] = pool
    assert drains == state.leaving
    for known in state.models.values():
        for replica in known.fleet.replicas.values():
            there = state.pools.get(replica.pool)
            group_of = None if there is None else there.groups.get(replica.name)
            assert replica.pool not in scaled or group_of is not None, "a replica without a group"
            if group_of is None or replica.pool not in scaled:
                continue
            wanted = group_of.life is Life.WANTED and group_of.short_since is None
            assert wanted is not replica.draining, f"{replica.name}: {group_of}"


def waits(backlog: Backlog) -> list[int]:
    """Return the requests that a backlog holds."""
    return [
        ident
        for queue in backlog.queues.values()
        for ranked in (queue.ready, queue.late)
        for _, ident in ranked
    ]


def live_and_books_agree(state: PlaneState) -> None:
    ledger = state.ledger
    assert set(ledger.holds) == set(state.live)
    sent = {live.attempt for live in state.live.values() if live.phase is not Phase.QUEUED}
    assert sent == set(ledger.flights)
    for live in state.live.values():
        assert live.phase is not Phase.ENDED
        assert (live.attempt is None) is (live.phase is Phase.QUEUED)
        if live.attempt is not None:
            flight = ledger.flights[live.attempt]
            assert flight.request == live.request.id
            assert flight.streaming is (live.phase is Phase.STREAMING)
            assert live.replica is not None
            replica = state.models[live.model].fleet.replicas[live.replica]
            assert replica.incarnation == flight.incarnation


def loads_are_their_flights(state: PlaneState) -> None:
    sums: defaultdict[Incarnation, Counter[str]] = defaultdict(Counter)
    gaps: defaultdict[Incarnation, Counter[int]] = defaultdict(Counter)
    for flight in state.ledger.flights.values():
        tally = sums[flight.incarnation]
        gaps[flight.incarnation][flight.gap_ns] += 1
        tally["attempts"] += 1
        tally["blocks"] += flight.blocks
        if flight.streaming:
            tally["decodes"] += 1
            tally["context"] += flight.input_tokens + flight.made
        else:
            tally["prefill"] += flight.prefill_ns
        assert flight.charged >= 0
    for incarnation, load in state.ledger.loads.items():
        tally = sums[incarnation]
        assert sum(load.prefills.values()) == tally["prefill"]
        assert load.front_ns == next(iter(load.prefills.values()), 0)
        late = max(0, state.now - load.front_at - load.front_ns) if load.prefills else 0
        behind = load.pending_prefill_ns - load.front_ns
        assert late <= load.prefill_left_ns(state.now) - behind <= max(late, load.front_ns)
        assert load.attempts == tally["attempts"] >= 0
        assert load.blocks == tally["blocks"] >= 0
        assert load.decodes == tally["decodes"] >= 0
        assert load.context_tokens == tally["context"] >= 0
        assert load.pending_prefill_ns == tally["prefill"] >= 0
        assert load.gaps == gaps[incarnation]
    assert set(sums) <= set(state.ledger.loads), "flights on a replica that is gone"


def quotas_are_their_holds(state: PlaneState) -> None:
    sums: defaultdict[TenantId, Counter[str]] = defaultdict(Counter)
    sessions: defaultdict[TenantId, Counter[str]] = defaultdict(Counter)
    for one in state.ledger.holds.values():
        sums[one.tenant] += Counter(
            tokens=one.take.tokens,
            work=one.take.work_ns,
            usd=one.take.micro_usd,
            parallel=one.branches,
        )
        if one.session is not None:
            sessions[one.tenant][one.session] += 1
    for tenant, quota in state.ledger.quotas.items():
        total = sums[tenant]
        assert (quota.reserved, quota.parallel) == (total["tokens"], total["parallel"])
        assert (quota.reserved_work_ns, quota.reserved_micro_usd) == (total["work"], total["usd"])
        assert quota.sessions == sessions[tenant]
        assert quota.ends.keys() <= state.ledger.holds.keys()
        assert all(window.used >= 0 for window in quota.windows)
    for shares in state.ledger.shares.values():
        assert all(value >= 0 for value in shares.counters.values())


def backlog_is_what_waits(
    known: ModelState, shares: Shares, live: Mapping[RequestId, Live]
) -> None:
    backlog = known.backlog
    assert backlog.size == len(waits(backlog)) == sum(backlog.queued.values())
    assert backlog.work_ns == sum(queue.work for queue in backlog.queues.values())
    work: Counter[str] = Counter()
    below: Counter[str] = Counter()
    leaves: Counter[str] = Counter()
    for key, queue in backlog.queues.items():
        assert queue.way[-1].key == key
        assert queue.size > 0
        assert queue.side is not None, "each waiting queue is listed"
        work[queue.slo_class] += queue.work
        for step in queue.way:
            below[step.key] += queue.work
            leaves[step.key] += 1
    assert Counter(backlog.work) == work
    assert Counter(shares.work) == below
    assert Counter(shares.waiting) == leaves
    changes = {key: when for when, key in backlog.changes}
    assert changes == {
        key: queue.change_at for key, queue in backlog.queues.items() if queue.change_at is not None
    }
    assert set(backlog.slots) == set(waits(backlog))
    for request, waiting in backlog.slots.items():
        one = live[RequestId(request)]
        assert (waiting.key, waiting.late) == (one.key, one.late)
        assert one.way == backlog.queues[backlog.inside[request]].way
    bounded = {one: live[RequestId(one)].wait_until for one in waits(backlog)}
    assert sorted(backlog.bounded) == sorted(
        (until, one) for one, until in bounded.items() if until is not None
    )


def fleet_is_consistent(state: PlaneState, known: ModelState) -> None:
    fleet = known.fleet
    ready = [replica for replica in fleet.replicas.values() if not replica.draining]
    assert sorted(name for _, name in fleet.ranking) == sorted(one.name for one in ready)
    for replica in fleet.replicas.values():
        assert fleet.slots[replica.slot] == replica.name
        assert replica.incarnation in state.ledger.loads
        assert replica.prefix_tokens == sum(replica.prefixes.values())
        assert not (replica.draining and replica.prefixes)
    assert sum(slot is not None for slot in fleet.slots) == len(fleet.replicas)
    pools = Counter(replica.pool for replica in ready)
    assert fleet.ready == pools


def nothing_waits_in_vain(plane: Plane, now: InstantNs) -> None:
    """Work conservation: the next turn's request has no open replica, nor has any candidate's of a score.

    Nor have the next turns among the classes that another pool could still serve, and so on.
    """
    settings = plane.settings
    for model, known in plane.state.models.items():
        order, shares = settings.order, plane.state.ledger.shares[model]
        somebody = known.backlog.next_turn(order, shares, NONE) is not None
        assert somebody is bool(known.backlog.size)
        blocked = NONE
        while known.backlog.next_turn(order, shares, blocked) is not None:
            work_ns = settings.prices[model].work_ns
            turns = list(known.backlog.turns(order, shares, blocked, now, work_ns))
            assert turns, "somebody has a turn"
            assert not blocked & {turn.slo_class for turn in turns}
            for turn in turns:
                open_ = places(plane, plane.state.live[turn.request], now)
                assert not open_, f"{turn.request} waits, {open_} are open"
                blocked |= settings.sharing(model, turn.slo_class)


def settled_service(state: PlaneState) -> dict[tuple[str, str], int]:
    """Return each counter and clock of the share trees less what is in the air: it never falls."""
    settled: Counter[tuple[str, str]] = Counter()
    for model, shares in state.ledger.shares.items():
        for key, value in shares.counters.items():
            settled[model, f"counter {key}"] = value
        for key, value in shares.served.items():
            settled[model, f"clock {key}"] = value
    for flight in state.ledger.flights.values():
        for parent, step in zip((ROOT, *(one.key for one in flight.way)), flight.way, strict=False):
            settled[flight.model, f"clock {parent}"] -= flight.charged
            settled[flight.model, f"counter {step.key}"] -= share(flight.charged, step.weight)
    return settled


def places(plane: Plane, live: Live, now: InstantNs) -> list[str]:
    """Return the replicas that are open for a waiting request."""
    return [
        view.replica
        for view in plane.views_for(live, now)
        if is_open(view, live.demand.kv_blocks, live.bounds.gap_ns)
    ]


def tallies_add_up(state: PlaneState) -> None:
    live: Counter[tuple[str, str]] = Counter()
    for one in state.live.values():
        if not one.request.deferred or one.attempt is not None:
            live[one.request.tenant, one.slo_class] += 1
    for tenant, by_class in state.accounts.tallies.items():
        for slo_class, tally in by_class.items():
            turned = sum(tally.rejected.values()) + tally.left_before
            entered = tally.admitted - tally.taken_up + tally.deferred
            assert tally.offered == entered + turned
            over = sum(tally.outcomes.values())
            assert tally.admitted == over + live[tenant, slo_class]
            assert tally.met <= tally.outcomes.get("success", 0)  # type: ignore[call-overload]


def over(plane: Plane) -> None:
    """Check that nothing is left once everything has ended."""
    state = plane.state
    assert not state.live
    assert not state.ledger.holds
    assert not state.ledger.flights
    for load in state.ledger.loads.values():
        assert load == Load(front_at=load.front_at, tokens_made=load.tokens_made)
    for quota in state.ledger.quotas.values():
        assert (quota.reserved, quota.reserved_work_ns, quota.reserved_micro_usd) == (0, 0, 0)
        assert not quota.parallel
        assert not quota.sessions
        assert not quota.ends
    for known in state.models.values():
        assert not known.backlog.size
        assert not known.backlog.work_ns
        assert not any(known.backlog.work.values())
        assert not known.backlog.queues
        assert not known.backlog.slots
        assert not known.backlog.tenants
        assert not known.backlog.changes.size
        assert not known.backlog.bounded.size
    for shares in state.ledger.shares.values():
        assert not any(shares.sides)
        assert not shares.waiting
        assert not shares.work
    due = plane.next_timer()
    ticks = [one.next_at for one in state.pools.values() if one.next_at is not None]
    standings = (one for known in state.models.values() for one in known.standings.values())
    assert due == min(ticks, default=None) or any(one.level for one in standings), (
        "time alone restores it"
    )
