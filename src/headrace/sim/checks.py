"""What must hold after every step, looked at from outside. Numbers as in docs/invariants.md."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.decision import LetIn, Reason
from headrace.model.effect import (
    Cancel,
    Concluded,
    Decided,
    Dispatch,
    Effect,
    Fail,
    Migrate,
    Refuse,
)
from headrace.model.evidence import EntryRecord
from headrace.model.ids import (
    AttemptId,
    ClassName,
    Incarnation,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
)
from headrace.model.slo import Outcome
from headrace.plane.state import ModelState
from headrace.policy.fairness.backlog import Turn
from headrace.policy.routing.seconds import is_open
from headrace.sim.books import (
    Broken,
    backlog_matches_live,
    bounds_hold,
    engines_run_what_is_booked,
    hold,
    ledger_matches_live,
    loads_match_flights,
    quota_matches_holds,
    ready_is_what_was_told,
    requests_are_conserved,
    settled_service,
    times_are_causal,
)
from headrace.sim.buckets import Buckets
from headrace.sim.consent import Consent
from headrace.sim.holdings import (
    capacity_is_whole,
    drains_are_kept,
    groups_match,
    links_are_shared_by_nobody,
    pools_keep_their_limits,
)
from headrace.sim.world import World
from headrace.units import InstantNs

DEEP_EVERY = 16
"""The costly checks run at every so many steps, and at the end."""

__all__ = ["DEEP_EVERY", "Broken", "Checker"]


class Seen(Struct, frozen=True, gc=False):
    """Where the checker saw a request go."""

    dispatch: Dispatch
    pool: str
    places: tuple[tuple[ReplicaName, Incarnation], ...]
    """The lives it may run on: the one it was sent to, and those that it was moved to."""


class Checker:
    """Looks on after each step of a world; raises `Broken`."""

    def __init__(self) -> None:
        """Start having seen nothing."""
        self.steps = 0
        self._now = InstantNs(0)
        self._epoch = 0
        self._admitted: set[RequestId] = set()
        # Of this life of the driver; a restart may end again what was ended after its checkpoint.
        self._sent: dict[RequestId, Seen] = {}
        self._attempts: dict[AttemptId, Seen] = {}
        self._over: set[RequestId] = set()
        self._settled: dict[tuple[ModelName, str], int] = {}
        self._revision = 0
        self._buckets = Buckets()
        self._consent = Consent()
        self._first: dict[PoolName, int] = {}
        """Groups that each pool began with."""

    def __call__(self, world: World, effects: Sequence[Effect]) -> None:
        """Check one step."""
        self.steps += 1
        if not self._first:
            pools = world.scenario.deployment.pools
            self._first = {PoolName(one.name): one.replicas for one in pools}
        if world.epoch != self._epoch:
            self._restarted(world)
        self._clock(world)
        for effect in effects:
            self._effect(world, effect)
        self._answered(world, effects)
        self._buckets.step(world, effects)
        self._consent.step(world, effects)
        self._nothing_waits_in_vain(world)
        if world.plane.state.pools:
            drains_are_kept(world, effects)
            capacity_is_whole(world)
        if self.steps % DEEP_EVERY == 0:
            self.deep(world)

    def deep(self, world: World) -> None:
        """Run every check that looks at everything."""
        requests_are_conserved(world)
        backlog_matches_live(world)
        engines_run_what_is_booked(world)
        ledger_matches_live(world)
        loads_match_flights(world)
        quota_matches_holds(world)
        ready_is_what_was_told(world)
        bounds_hold(world)
        groups_match(world)
        pools_keep_their_limits(world, self._first)
        self._service_never_falls(world)

    def finish(self, world: World) -> None:
        """Check the end: everything offered has ended by itself, nothing is held."""
        self.deep(world)
        state = world.plane.state
        hold(world, "INV-11", not state.live, f"still live: {list(state.live)}")
        hold(world, "INV-11", not state.ledger.flights, "flights are left")
        hold(world, "INV-11", not state.ledger.holds, "quota is held")
        for request in world.cut_off:
            row = world.concluded[request]
            served = _serving(world, row.model, row.slo_class)
            up = world.announced.keys() - world.draining
            able = [name for name in sorted(up) if _pool_of(world, name) in served]
            hold(world, "INV-11", not able, f"{request} never ended, though {able} are up")
        for request, row in world.concluded.items():
            times_are_causal(world, request, row)
        ended = len(world.concluded)
        hold(world, "INV-1", ended == world.offered, f"{world.offered} offered, {ended} ended")

    def _restarted(self, world: World) -> None:
        """Streams were cut and the plane thawed: what was sent before means nothing now."""
        self._epoch = world.epoch
        self._sent.clear()
        self._attempts.clear()
        self._over.clear()
        self._settled.clear()
        self._buckets = Buckets()

    def _clock(self, world: World) -> None:
        """INV-7: time never runs back, and no timer is left behind."""
        hold(world, "INV-7", world.now >= self._now, f"time ran back from {self._now}")
        timer = world.plane.next_timer()
        hold(world, "INV-7", timer is None or timer >= world.now, f"a timer of {timer} is late")
        self._now = world.now

    def _effect(self, world: World, effect: Effect) -> None:
        match effect:
            case Dispatch():
                self._dispatched(world, effect)
            case Cancel():
                seen = self._attempts.get(effect.attempt)
                sent = () if seen is None else seen.places
                here = (effect.replica, effect.incarnation)
                hold(world, "INV-6", here in sent, f"cancel of {effect.attempt} at {here}: {sent=}")
            case Migrate():
                self._moved(world, effect)
            case Concluded():
                self._concluded(world, effect)
            case Refuse() | Fail():
                again = effect.request in self._over
                hold(world, "INV-10", not again, f"{effect.request} answered after its end")
            case Decided(EntryRecord(decision=LetIn()) as record):
                self._admitted.add(record.request_id)
            case _:
                pass

    def _dispatched(self, world: World, effect: Dispatch) -> None:
        """INV-6, INV-9: sent once, while it is live, to a life that is up and may serve it."""
        request = effect.request
        hold(world, "INV-6", request not in self._over, f"{request} sent after its end")
        hold(world, "INV-6", request not in self._sent, f"{request} sent twice")
        hold(world, "INV-6", request in self._admitted, f"{request} sent, but not admitted")
        hold(world, "INV-6", effect.attempt not in self._attempts, f"{effect.attempt} sent twice")
        life = world.announced.get(effect.replica)
        place = f"{effect.replica} in life {effect.incarnation}"
        hold(world, "INV-9", life == effect.incarnation, f"{request} sent to {place}, not ready")
        going = effect.replica in world.draining
        hold(world, "INV-9", not going, f"{request} sent to {place}, which is to go")
        pool = _pool_of(world, effect.replica)
        spec = next(p for p in world.scenario.deployment.pools if p.name == pool)
        able = not spec.classes or effect.slo_class in spec.classes
        hold(world, "INV-9", able, f"{request} of {effect.slo_class} sent to {pool}")
        seen = Seen(effect, pool, ((effect.replica, effect.incarnation),))
        self._sent[request] = self._attempts[effect.attempt] = seen

    def _moved(self, world: World, effect: Migrate) -> None:
        """INV-18: what is moved runs where it is said to, and goes to a replica of its pool that may serve it."""
        seen = self._attempts.get(effect.attempt)
        assert seen is not None, f"{effect.attempt} was never sent"
        here, there = (
            (effect.replica, effect.incarnation),
            (effect.target, effect.target_incarnation),
        )
        hold(
            world,
            "INV-18",
            here in seen.places,
            f"{effect.attempt} moved from {here}: {seen.places=}",
        )
        life = world.announced.get(effect.target)
        able = life == effect.target_incarnation and effect.target not in world.draining
        hold(world, "INV-18", able, f"{effect.attempt} moved to {there}, not ready")
        pool = _pool_of(world, effect.target)
        hold(world, "INV-18", pool == seen.pool, f"{effect.attempt} of {seen.pool} moved to {pool}")
        self._attempts[effect.attempt] = replace(seen, places=(*seen.places, there))
        links_are_shared_by_nobody(world)

    def _concluded(self, world: World, row: Concluded) -> None:
        """INV-10: one outcome, of something offered, admitted if it was."""
        request = row.request
        if request in world.away:
            return  # refused, and it comes again
        hold(world, "INV-10", request not in self._over, f"{request} has two outcomes")
        hold(world, "INV-10", request <= world.offered, f"{request} was never offered")
        admitted = request in self._admitted
        hold(world, "INV-10", row.admitted is admitted, f"{request}: {row.admitted=}")
        self._over.add(request)

    def _answered(self, world: World, effects: Sequence[Effect]) -> None:
        """INV-10: whoever is refused or failed has a row, and whoever has a bad row is told."""
        told = {e.request for e in effects if isinstance(e, Refuse | Fail)}
        rows = [e for e in effects if isinstance(e, Concluded)]
        rowless = told - {row.request for row in rows}
        hold(world, "INV-10", not rowless, f"{rowless} told of an end that is none")
        for row in rows:
            bad = not row.admitted or row.outcome in (Outcome.ERROR, Outcome.TIMEOUT)
            # Its connection fell with the driver, or the run is over.
            deaf = row.reason is Reason.RESTARTED or row.request in world.cut_off
            known = not bad or deaf or row.request in told
            hold(world, "INV-10", known, f"{row.request} ended badly, and nobody was told")

    def _service_never_falls(self, world: World) -> None:
        """INV-8: a refund gives back at most what was charged, so past service stays."""
        settled, revision = settled_service(world), world.plane.state.revision
        if revision != self._revision:  # by another cost counters start anew
            self._settled, self._revision = {}, revision
        for key, value in settled.items():
            before = self._settled.get(key, 0)
            hold(world, "INV-8", value >= before, f"{key}: settled service {before} -> {value}")
        self._settled = settled

    def _nothing_waits_in_vain(self, world: World) -> None:
        """INV-5: while a request that has its turn finds an open replica, it is sent there.

        Whoever finds none holds back the classes that could go nowhere else either.
        """
        for model, known in world.plane.state.models.items():
            blocked: frozenset[ClassName] = frozenset()
            while turns := _turns(world, model, known, blocked):
                for turn in turns:
                    live = world.plane.state.live[turn.request]
                    blocks, gap = live.demand.kv_blocks, live.bounds.gap_ns
                    views = world.plane.views_for(live, world.now)
                    idle = [view.replica for view in views if is_open(view, blocks, gap)]
                    hold(world, "INV-5", not idle, f"{turn.request} waits, {idle} are open")
                    places = _serving(world, model, turn.slo_class)
                    blocked |= {
                        name
                        for name in (
                            ClassName(spec.name) for spec in world.scenario.deployment.classes
                        )
                        if _serving(world, model, name) <= places
                    }
            idle_turns = known.backlog.size and not blocked
            hold(world, "INV-5", not idle_turns, f"{model}: {known.backlog.size} wait, no turn")


def _turns(
    world: World, model: ModelName, known: ModelState, blocked: frozenset[ClassName]
) -> list[Turn]:
    """Return whose turn it may be: one, or all candidates of a score."""
    settings = world.plane.settings
    if not known.backlog.size:
        return []
    shares, work_ns = world.plane.state.ledger.shares[model], settings.prices[model].work_ns
    return list(known.backlog.turns(settings.order, shares, blocked, world.now, work_ns))


def _serving(world: World, model: ModelName, slo_class: ClassName) -> frozenset[str]:
    """Return the pools that take a class of a model."""
    return frozenset(
        spec.name
        for spec in world.scenario.deployment.pools
        if spec.model == model and (not spec.classes or slo_class in spec.classes)
    )


def _pool_of(world: World, replica: str) -> str:
    return next(node.pool for node in world.nodes if node.name == replica)
