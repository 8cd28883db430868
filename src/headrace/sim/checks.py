"""What must hold after every step, looked at from outside. Numbers as in docs/invariants.md.

The checkers recompute what the plane keeps, from what the world knows; they are slow, simple and
share no code with what they check.
"""

from collections import Counter, defaultdict

from msgspec import Struct

from headrace.model.effect import Cancel, Concluded, Dispatch, Effect, Fail, Refuse
from headrace.model.ids import AttemptId, Incarnation, RequestId, TenantId
from headrace.plane.state import MOVES, Live, Phase
from headrace.policy.routing.seconds import is_open
from headrace.sim.world import World
from headrace.units import InstantNs

DEEP_EVERY = 16
"""The costly checks run at every so many steps, and at the end."""


class Broken(AssertionError):
    """An invariant does not hold; the message names it and the instant."""


class Seen(Struct):
    """What the checker itself has seen of one request."""

    phase: Phase = Phase.QUEUED
    attempt: AttemptId | None = None
    incarnation: Incarnation | None = None


class Checker:
    """Looks on after each step of a world; raises `Broken`."""

    def __init__(self) -> None:
        """Start having seen nothing."""
        self.steps = 0
        self._seen: dict[RequestId, Seen] = {}
        self._over: set[RequestId] = set()
        self._now = InstantNs(0)
        self._epoch = 0

    def __call__(self, world: World, effects: list[Effect]) -> None:
        """Check one step."""
        self.steps += 1
        if world.epoch != self._epoch:
            self._epoch = world.epoch
            self._seen.clear()  # streams were cut: what was sent before means nothing now
        self._clock(world)
        for effect in effects:
            self._effect(world, effect)
        self._nothing_waits_in_vain(world)
        if self.steps % DEEP_EVERY == 0:
            self.deep(world)

    def deep(self, world: World) -> None:
        """Run every check that looks at everything."""
        requests_are_conserved(world)
        ledger_matches_live(world)
        loads_match_flights(world)
        quota_is_conserved(world)
        counters_are_not_negative(world)
        backlog_matches_live(world)
        for node in world.nodes:
            if node.engine is not None:
                node.engine.check()

    def finish(self, world: World) -> None:
        """Check the end: everything offered has ended, nothing is held."""
        self.deep(world)
        state = world.plane.state
        _hold(world, "INV-11", not state.live, f"still live: {list(state.live)}")
        _hold(world, "INV-11", not state.ledger.flights, "flights are left")
        _hold(world, "INV-11", not state.ledger.holds, "quota is held")
        for request, row in world.concluded.items():
            _causal(world, request, row)
        _hold(
            world,
            "INV-1",
            len(world.concluded) == world.offered,
            f"{world.offered} offered, {len(world.concluded)} ended",
        )

    def _clock(self, world: World) -> None:
        _hold(world, "INV-7", world.now >= self._now, f"time ran back from {self._now}")
        timer = world.plane.next_timer()
        _hold(world, "INV-7", timer is None or timer >= 0, f"{timer=}")
        self._now = world.now

    def _effect(self, world: World, effect: Effect) -> None:
        match effect:
            case Dispatch():
                self._dispatched(world, effect)
            case Cancel():
                seen = self._seen.get(self._request_of(effect.attempt))
                legal = seen is None or seen.incarnation == effect.incarnation
                _hold(world, "INV-6", legal, f"cancel of {effect.attempt} at another life")
            case Concluded():
                self._concluded(world, effect)
            case Refuse() | Fail():
                again = effect.request in self._over
                _hold(world, "INV-10", not again, f"{effect.request} answered after its end")
            case _:
                pass

    def _dispatched(self, world: World, effect: Dispatch) -> None:
        request = effect.request
        _hold(world, "INV-6", request not in self._over, f"{request} sent after its end")
        _hold(world, "INV-6", request not in self._seen, f"{request} sent twice")
        known = [f for s in world.plane.state.models.values() for f in s.fleet.replicas.values()]
        up = any(
            one.name == effect.replica and one.incarnation == effect.incarnation for one in known
        )
        _hold(world, "INV-9", up, f"{request} sent to {effect.replica}, which is not ready")
        self._seen[request] = Seen(Phase.DISPATCHED, effect.attempt, effect.incarnation)

    def _concluded(self, world: World, effect: Concluded) -> None:
        if not world.epoch:
            again = effect.request in self._over
            _hold(world, "INV-10", not again, f"{effect.request} has two outcomes")
        self._over.add(effect.request)

    def _request_of(self, attempt: AttemptId) -> RequestId:
        for request, seen in self._seen.items():
            if seen.attempt == attempt:
                return request
        return RequestId(-1)

    def _nothing_waits_in_vain(self, world: World) -> None:
        """INV-5: if the next turn's request has an open replica, it would have been sent."""
        for model, known in world.plane.state.models.items():
            turn = known.backlog.next_turn(frozenset())
            if turn is None:
                _hold(world, "INV-5", not known.backlog.size, f"{model}: work, but no turn")
                continue
            live = world.plane.state.live[turn.request]
            views = world.plane.views_for(live, world.now)
            idle = [
                v.replica for v in views if is_open(v, live.demand.kv_blocks, live.bounds.gap_ns)
            ]
            _hold(world, "INV-5", not idle, f"{turn.request} waits, {idle} are open")


def _hold(world: World, number: str, holds: bool, what: str) -> None:
    if not holds:
        raise Broken(f"{number} at {world.now}: {what}")


def requests_are_conserved(world: World) -> None:
    """INV-1: every offered request has ended or is live in the plane."""
    live = [r for r in world.plane.state.live if r not in world.concluded]
    accounted = len(world.concluded) + len(live)
    _hold(world, "INV-1", world.offered == accounted, f"{world.offered=} {accounted=}")


def ledger_matches_live(world: World) -> None:
    """INV-3: a hold for each live request, a flight for each that was sent, and no others."""
    state = world.plane.state
    ledger = state.ledger
    _hold(world, "INV-3", set(ledger.holds) == set(state.live), "holds are not those of the live")
    flying = {live.attempt for live in state.live.values() if live.phase is not Phase.QUEUED}
    _hold(world, "INV-3", flying == set(ledger.flights), "flights are not those of the sent")
    for live in state.live.values():
        _hold(world, "INV-6", live.phase is not Phase.ENDED, f"{live.request.id} ended, yet live")
        _phase_matches(world, live)


def _phase_matches(world: World, live: Live) -> None:
    sent = live.attempt is not None
    _hold(world, "INV-6", sent is (live.phase is not Phase.QUEUED), f"{live.request.id} phase")
    if sent:
        assert live.attempt is not None
        flight = world.plane.state.ledger.flights[live.attempt]
        streams = live.phase is Phase.STREAMING
        _hold(world, "INV-6", flight.streaming is streams, f"{live.request.id} streaming")
        _hold(world, "INV-6", live.phase in MOVES or not sent, "unknown phase")


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
    for incarnation, load in ledger.loads.items():
        tally = sums.pop(incarnation, Counter())
        kept = (load.blocks, load.attempts, load.decodes, load.context_tokens)
        want = tuple(tally[k] for k in ("blocks", "attempts", "decodes", "context"))
        _hold(world, "INV-3", kept == want, f"{incarnation=}: {kept=} {want=}")
        prefill = load.pending_prefill_ns
        _hold(world, "INV-3", prefill == tally["prefill"], f"{incarnation=}: {prefill=}")
        _hold(world, "INV-3", min(*kept, prefill) >= 0, f"{incarnation=}: negative {kept=}")
        _hold(world, "INV-3", sum(load.gaps.values()) == load.attempts, f"{load.gaps=}")
    _hold(world, "INV-3", not sums, f"flights on dead replicas: {list(sums)}")


def quota_is_conserved(world: World) -> None:
    """INV-4: what a tenant holds is the sum of its live requests' holds."""
    ledger = world.plane.state.ledger
    tokens: Counter[TenantId] = Counter()
    requests: Counter[TenantId] = Counter()
    for hold in ledger.holds.values():
        tokens[hold.tenant] += hold.tokens
        requests[hold.tenant] += 1
    for tenant, quota in ledger.quotas.items():
        want = (tokens[tenant], requests[tenant])
        kept = (quota.reserved, quota.parallel)
        _hold(world, "INV-4", kept == want, f"{tenant}: {kept=} {want=}")


def counters_are_not_negative(world: World) -> None:
    """INV-8: no virtual counter is below zero, none below what its flights were charged."""
    ledger = world.plane.state.ledger
    for model, book in ledger.counters.items():
        for tenant, value in book.values.items():
            _hold(world, "INV-8", value >= 0, f"{model}/{tenant}: counter {value}")


def backlog_matches_live(world: World) -> None:
    """INV-1: what the queues hold is exactly what is live and not sent."""
    state = world.plane.state
    for model, known in state.models.items():
        queued = {
            r
            for r, live in state.live.items()
            if live.phase is Phase.QUEUED and live.model == model
        }
        held: set[int] = set()
        work = 0
        for mine in known.backlog.tenants.values():
            for queue in mine.classes.values():
                held |= {ident for _, ident in queue.ready}
                held |= {ident for _, ident in queue.late}
                work += queue.work()
        _hold(world, "INV-1", held == queued, f"{model}: queues hold {held ^ queued}")
        _hold(world, "INV-1", work == known.backlog.work_ns, f"{model}: work {work}")
        _hold(world, "INV-1", len(held) == known.backlog.size, f"{model}: size")


def _causal(world: World, request: RequestId, row: Concluded) -> None:
    """INV-7: nothing ends before it arrives, and the parts of a request's time are its whole."""
    _hold(world, "INV-7", row.ended_at >= row.entry.arrived_at, f"{request} ended before it came")
    seen = row.indicators
    if seen is None:
        return
    parts = seen.route_ns + seen.queue_ns + seen.prefill_ns + seen.first_decode_ns
    _hold(world, "INV-7", parts == seen.ttft_ns, f"{request}: TTFT is not its parts")
    whole = seen.ttft_ns + seen.gaps_ns + seen.postprocess_ns
    _hold(world, "INV-7", whole == seen.e2e_ns, f"{request}: E2E is not its parts")
    least = min(parts, seen.queue_ns, seen.prefill_ns, seen.gaps_ns, seen.postprocess_ns)
    _hold(world, "INV-7", least >= 0, f"{request}: a negative part")
