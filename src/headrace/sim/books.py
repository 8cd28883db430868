"""What the plane's books must add up to, recomputed from what the world knows.

Slow, simple, and sharing no code with what is checked. Numbers as in docs/invariants.md.
"""

from collections import Counter, defaultdict

from headrace.model.effect import Concluded
from headrace.model.ids import AttemptId, Incarnation, ModelName, RequestId, TenantId
from headrace.plane.state import Live, ModelState, Phase
from headrace.policy.fairness.vtc import share
from headrace.sim.world import World


class Broken(AssertionError):  # noqa: N818 - what is wrong, not that something is
    """An invariant does not hold; the message names it and the instant."""


def hold(world: World, number: str, holds: bool, what: str) -> None:
    """Raise `Broken` unless an invariant holds."""
    if not holds:
        raise Broken(f"{number} at {world.now}: {what}")


def requests_are_conserved(world: World) -> None:
    """INV-1: every offered request has ended, is live in the plane, or was refused and comes again."""
    live = [r for r in world.plane.state.live if r not in world.concluded]
    accounted = len(world.concluded) + len(live) + len(world.away)
    hold(world, "INV-1", world.offered == accounted, f"{world.offered=} {accounted=}")


def backlog_matches_live(world: World) -> None:
    """INV-1: what the queues hold is exactly what is live and not sent."""
    state = world.plane.state
    for model, known in state.models.items():
        queued = {
            request: live.demand.work_p50_ns
            for request, live in state.live.items()
            if live.phase is Phase.QUEUED and live.model == model
        }
        held: list[int] = []
        for queue in known.backlog.queues.values():
            held += [ident for ranked in (queue.ready, queue.late) for _, ident in ranked]
        hold(world, "INV-1", sorted(held) == sorted(queued), f"{model}: queues hold {held}")
        backlog = known.backlog
        sums = (backlog.size, backlog.work_ns, sum(backlog.queued.values()))
        want = (len(queued), sum(queued.values()), len(queued))
        hold(world, "INV-1", sums == want, f"{model}: backlog {sums=} {want=}")


def engines_run_what_is_booked(world: World) -> None:
    """INV-2: each engine's KV pool and batch are sound, and it runs what the plane booked there."""
    booked: defaultdict[Incarnation, set[AttemptId]] = defaultdict(set)
    for attempt, flight in world.plane.state.ledger.flights.items():
        booked[flight.incarnation].add(attempt)
    sent: defaultdict[Incarnation, set[AttemptId]] = defaultdict(set)
    for attempt, incarnation in world.engines.attempts.items():
        sent[incarnation].add(attempt)
    for node, engine in world.engines.alive():
        life = engine.incarnation
        if world.announced.get(node.name) == life:
            stray = booked[life] ^ sent[life]
            hold(world, "INV-2", not stray, f"{node.name}: booked or running alone: {stray}")
        try:
            engine.check()
        except AssertionError as unsound:
            raise Broken(f"INV-2 at {world.now}: {node.name}: {unsound}") from unsound


def ledger_matches_live(world: World) -> None:
    """INV-3: a hold for each live request, a flight for each that was sent, and no others."""
    state = world.plane.state
    ledger = state.ledger
    hold(world, "INV-3", set(ledger.holds) == set(state.live), "holds are not those of the live")
    flying = {live.attempt for live in state.live.values() if live.phase is not Phase.QUEUED}
    hold(world, "INV-3", flying == set(ledger.flights), "flights are not those of the sent")
    hold(world, "INV-3", set(ledger.berths) <= flying, "a place is kept for who is over")
    for live in state.live.values():
        _phase_matches(world, live)


def _phase_matches(world: World, live: Live) -> None:
    """INV-6: a live request has an attempt once it was sent, which streams once it has a token."""
    request = live.request.id
    hold(world, "INV-6", live.phase is not Phase.ENDED, f"{request} ended, yet live")
    sent = live.phase is not Phase.QUEUED
    hold(world, "INV-6", (live.attempt is not None) is sent, f"{request} is {live.phase}")
    if live.attempt is not None:
        streams = world.plane.state.ledger.flights[live.attempt].streaming
        hold(world, "INV-6", streams is (live.phase is Phase.STREAMING), f"{request}: {streams=}")


def loads_match_flights(world: World) -> None:
    """INV-3: each replica's load is the sum of its flights; nothing is negative."""
    ledger = world.plane.state.ledger
    sums: defaultdict[Incarnation, Counter[str]] = defaultdict(Counter)
    for flight in ledger.flights.values():
        tally = sums[flight.incarnation]
        tally["blocks"] += flight.blocks
        tally["attempts"] += 1
        if flight.streaming:
            tally["decodes"] += 1
            tally["context"] += flight.input_tokens + flight.made
        else:
            tally["prefill"] += flight.prefill_ns
    for berth in ledger.berths.values():
        tally = sums[berth.incarnation]
        tally["blocks"] += berth.blocks
        tally["attempts"] += 1
    for incarnation, load in ledger.loads.items():
        tally = sums.pop(incarnation, Counter())
        kept = {
            "blocks": load.blocks,
            "attempts": load.attempts,
            "decodes": load.decodes,
            "context": load.context_tokens,
            "prefill": load.pending_prefill_ns,
        }
        for what, amount in kept.items():
            hold(world, "INV-3", amount == tally[what], f"{incarnation=} {what}: {amount=} {tally}")
            hold(world, "INV-3", amount >= 0, f"{incarnation=} {what}: {amount=}")
        hold(world, "INV-3", sum(load.gaps.values()) == load.attempts, f"{load.gaps=}")
    hold(world, "INV-3", not sums, f"flights on lives that are over: {list(sums)}")


def quota_matches_holds(world: World) -> None:
    """INV-4: what a tenant holds is the sum of its live requests' holds."""
    ledger = world.plane.state.ledger
    tokens: Counter[TenantId] = Counter()
    requests: Counter[TenantId] = Counter()
    for kept in ledger.holds.values():
        tokens[kept.tenant] += kept.take.tokens
        requests[kept.tenant] += kept.branches
    for tenant, quota in ledger.quotas.items():
        want = (tokens[tenant], requests[tenant])
        has = (quota.reserved, quota.parallel)
        hold(world, "INV-4", has == want, f"{tenant}: {has=} {want=}")


def settled_service(world: World) -> dict[tuple[ModelName, str], int]:
    """Return each counter of the share tree less what its flights in the air were charged: it never falls (INV-8)."""
    ledger = world.plane.state.ledger
    settled = {
        (model, node): value
        for model, shares in ledger.shares.items()
        for node, value in shares.counters.items()
    }
    for flight in ledger.flights.values():
        for step in flight.way:
            settled[flight.model, step.key] -= share(flight.charged, step.weight)
    return settled


def ready_is_what_was_told(world: World) -> None:
    """INV-9: the plane takes for ready exactly the lives it was told of."""
    believed = {
        replica.name: replica.incarnation
        for known in world.plane.state.models.values()
        for replica in known.fleet.replicas.values()
    }
    hold(world, "INV-9", believed == world.announced, f"{believed=} {world.announced=}")


def bounds_hold(world: World) -> None:
    """INV-12: no queue is longer, and no replica has more on board, than is declared."""
    deployment, state = world.scenario.deployment, world.plane.state
    for model, known in state.models.items():
        for spec in deployment.classes:
            waiting = _waiting(known, spec.name)
            most = max(waiting.values(), default=0)
            hold(world, "INV-12", most <= spec.tenant_queue, f"{model} {spec.name}: {waiting}")
            total = sum(waiting.values())
            hold(world, "INV-12", total <= spec.queue, f"{model} {spec.name}: {total} wait")
    for node, engine in world.engines.alive():
        load = state.ledger.loads.get(engine.incarnation)
        if load is not None:
            most = engine.profile.max_running
            hold(world, "INV-12", load.attempts <= most, f"{node.name}: {load.attempts} sent")


def _waiting(known: ModelState, slo_class: str) -> Counter[TenantId]:
    """Return how many requests of a class each tenant has waiting."""
    found: Counter[TenantId] = Counter()
    for queue in known.backlog.queues.values():
        if queue.slo_class == slo_class:
            found[queue.tenant] += queue.size
    return found


def times_are_causal(world: World, request: RequestId, row: Concluded) -> None:
    """INV-7: nothing ends before it arrives, and the parts of a request's time are its whole."""
    hold(world, "INV-7", row.ended_at >= row.entry.arrived_at, f"{request} ended before it came")
    seen = row.indicators
    if seen is None:
        return
    parts = seen.route_ns + seen.queue_ns + seen.prefill_ns + seen.first_decode_ns
    hold(world, "INV-7", parts == seen.ttft_ns, f"{request}: TTFT is not its parts")
    whole = seen.ttft_ns + seen.gaps_ns + seen.postprocess_ns
    hold(world, "INV-7", whole == seen.e2e_ns, f"{request}: E2E is not its parts")
    least = min(parts, seen.queue_ns, seen.prefill_ns, seen.gaps_ns, seen.postprocess_ns)
    hold(world, "INV-7", least >= 0, f"{request}: a negative part")
