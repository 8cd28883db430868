"""What befalls a live fleet at the instants that a scenario lays down for it.

The faults are the simulator's own. Nobody but whoever runs a scenario can cause them: there is no way to
here from a listener. Of nothing is the plane told as such.
"""

from collections.abc import Callable
from functools import partial

from headrace.adapters.actuators.emulated import Way
from headrace.adapters.engines.inprocess import InProcessEngine
from headrace.cli.chaos_fleet import Fleet
from headrace.model.engine import Snapshot
from headrace.model.group import Domain, GroupShape, fullest
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.stages import Stage
from headrace.ports import actuator
from headrace.sim.draws import Fate, begun, deliveries, doomed
from headrace.sim.faults import (
    Canary,
    ColdCache,
    Crash,
    DomainLoss,
    Drain,
    Leavers,
    RankLoss,
    Repeaters,
    Restart,
    Slow,
    Update,
)
from headrace.sim.scenario import Scenario
from headrace.trace.streams import stream
from headrace.units import later, seconds

_SIMULATED = (Leavers, Repeaters, Update)


def unfit(scenario: Scenario) -> str | None:
    """Return what of a scenario happens in simulations only, or None."""
    kinds = [one.__struct_config__.tag for one in scenario.faults if isinstance(one, _SIMULATED)]
    if kinds:
        return f"`{kinds[0]}` happens in simulations only: run it without --live"
    return None


class Havoc:
    """All faults of a run."""

    def __init__(
        self, scenario: Scenario, seed: int, fleet: Fleet, restart: Callable[[], None]
    ) -> None:
        """Bend starts and reports from now on; `restart` kills the gateway and brings it back."""
        self._faults, self._seed, self._fleet = scenario.faults, seed, fleet
        self._restart = restart
        window = scenario.deployment.window
        pools = [window.stepped(pool) for pool in scenario.deployment.pools]
        self._profiles = {PoolName(pool.name): pool.profile for pool in pools}
        self._shapes = {
            PoolName(pool.name): pool.scaling.group_shape(pool.profile.hardware)
            for pool in pools
            if pool.scaling is not None
        }
        self._nth: dict[ReplicaName, int] = {}
        """Replicas by number, in the order in which they came up first."""
        for pool in pools:
            for nth in range(pool.replicas):
                self._number(ReplicaName(f"{pool.name}-{nth}"))
        self._pool = {
            ReplicaName(f"{pool.name}-{nth}"): PoolName(pool.name)
            for pool in pools
            for nth in range(pool.replicas)
        }
        self._canaries: dict[ReplicaName, Canary] = {}
        fleet.on_host = self._hosted
        if fleet.actuator is not None:
            fleet.actuator.bend = self._bent

    def begin(self) -> None:
        """Plan all that has its instant, from now on."""
        does: dict[type, Callable[..., None]] = {
            Crash: self._crash,
            Drain: self._drain,
            ColdCache: self._cool,
            Canary: self._begin_canary,
            DomainLoss: self._lose_domain,
            RankLoss: self._lose_rank,
        }
        for fault in self._faults:
            match fault:
                case Crash() | Drain() | ColdCache() | Canary() | DomainLoss() | RankLoss():
                    self._at(fault.at_s, partial(does[type(fault)], fault))
                case Restart():
                    self._at(fault.at_s, self._restart)
                case Slow():
                    for at_s in (fault.at_s, fault.until_s):
                        if at_s is not None:
                            self._at(at_s, self._pace)
                case _:
                    pass  # it befalls what it concerns as it happens

    def _at(self, at_s: float, call: Callable[[], None]) -> None:
        began = self._fleet.began
        assert began is not None, "nothing goes wrong before it begins"
        self._fleet.clock.call_at(later(began, seconds(at_s)), call)

    def _after(self, wait_s: float, call: Callable[[], None]) -> None:
        clock = self._fleet.clock
        clock.call_at(later(clock.now(), seconds(wait_s)), call)

    # Engines ----------------------------------------------------------------------------------

    def _number(self, name: ReplicaName) -> int:
        return self._nth.setdefault(name, len(self._nth))

    def _named(self, number: int) -> ReplicaName | None:
        return next((name for name, nth in self._nth.items() if nth == number), None)

    def _hosted(self, engine: InProcessEngine) -> None:
        self._number(engine.name)
        engine.report = partial(self._report, engine)
        self._pace_one(engine)

    def _pace(self) -> None:
        for name in self._nth:
            engine = self._fleet.engine(name)
            if engine is not None:
                self._pace_one(engine)

    def _pace_one(self, engine: InProcessEngine) -> None:
        """Have an engine be as slow as it is to be now."""
        profile, number = self._profiles[engine.pool], self._number(engine.name)
        for fault in self._faults:
            if isinstance(fault, Slow) and fault.holds(number, self._fleet.now):
                profile = profile.paced(fault.factor)
        if (canary := self._canaries.get(engine.name)) is not None:
            profile = profile.paced(canary.factor)
        engine.reprice(profile)

    def _cool(self, fault: ColdCache) -> None:
        for name in self._nth:
            engine = self._fleet.engine(name)
            if engine is not None:
                engine.forget_prefixes()
                if fault.told:
                    self._fleet.gateway.driver.forgot(engine)

    def _report(self, engine: InProcessEngine, snapshot: Snapshot) -> None:
        """Have a report arrive, late, twice or never."""
        now, number = self._fleet.now, self._number(engine.name)
        for delay in deliveries(self._faults, self._seed, number, now):
            if delay:
                clock = self._fleet.clock
                clock.call_at(later(clock.now(), delay), partial(self._arrives, engine, snapshot))
            else:
                self._arrives(engine, snapshot)

    def _arrives(self, engine: InProcessEngine, snapshot: Snapshot) -> None:
        if self._fleet.engine(engine.name) is engine:  # else whoever listened is gone as well
            self._fleet.gateway.driver.reported(snapshot)

    def _crash(self, fault: Crash) -> None:
        name = self._named(fault.replica)
        if name is None or not self._fleet.crash(name, streams_break=fault.streams_break):
            return
        again = fault.back_after_s is not None
        self._after(fault.noticed_after_s, partial(self._noticed, name, again=again))
        pool = self._pool.get(name)
        if pool is not None and pool not in self._shapes and fault.back_after_s is not None:
            back_s = max(fault.back_after_s, fault.noticed_after_s)
            self._after(back_s, partial(self._fleet.host, name, pool))

    def _noticed(self, name: ReplicaName, *, again: bool) -> None:
        if self._fleet.actuator is not None:
            again = again and not self._is_to_go(name)
            self._fleet.actuator.lose(name, "it crashed", again=again)
        self._fleet.noticed(name)

    def _drain(self, fault: Drain) -> None:
        """Send a replica nothing new, and stop it once it had its time."""
        name = self._named(fault.replica)
        if name is None or self._fleet.engine(name) is None:
            return
        self._fleet.gateway.driver.drain(name, lambda: None)
        self._fleet.look()
        stop = Crash(
            replica=fault.replica,
            at_s=fault.at_s + fault.time_s,
            noticed_after_s=0.0,
            streams_break=False,
            back_after_s=fault.back_after_s,
        )
        self._after(fault.time_s, partial(self._crash, stop))

    def _is_to_go(self, name: ReplicaName) -> bool:
        models = self._fleet.gateway.driver.plane.state.models.values()
        found = (known.fleet.replicas.get(name) for known in models)
        return any(one is not None and one.draining for one in found)

    # Groups -----------------------------------------------------------------------------------

    def _bent(self, name: ReplicaName, life: int, way: Way) -> Way:
        """Return how a start goes."""
        canary = self._canaries.get(name)
        if canary is not None:
            return way if canary.correct else Way(plan=way.plan[:-1], end=None)
        fate, plan = begun(self._faults, stream(self._seed, "fate", name, life), way.plan)
        match fate:
            case Fate.REFUSED:
                return Way(plan=plan[:1], end=actuator.Stage.REFUSED)
            case Fate.NEVER:
                return Way(plan=())
            case Fate.PARTIAL:
                return Way(plan=plan, running=self._whole(name) // 2)
            case Fate.LOST:
                return Way(plan=plan[: doomed(name, len(plan)) + 1], end=actuator.Stage.LOST)
            case _:
                return Way(plan=plan)

    def _whole(self, name: ReplicaName) -> int:
        assert self._fleet.actuator is not None, "it has the groups"
        return next(one.ranks for one in self._fleet.actuator.groups() if one.name == name)

    def _begin_canary(self, fault: Canary) -> None:
        """Start a group of another revision in the first pool that scales."""
        pool = next(iter(self._shapes))
        name = ReplicaName(f"{pool}-canary.{len(self._canaries) + 1}")
        self._canaries[name] = fault
        self._fleet.grow(name, pool)

    def _lose_domain(self, fault: DomainLoss) -> None:
        provider = self._fleet.actuator
        if provider is None:
            return
        kind = fault.of
        name = fault.name or fullest(
            (one.places[0] for one in provider.groups() if one.places), kind
        )
        if name is None:
            return
        hit = [
            one for one in provider.groups() if one.places and one.places[0].within(kind) == name
        ]
        provider.shut(kind, name)
        if fault.back_after_s is not None:
            self._after(fault.back_after_s, partial(provider.reopen, kind, name))
        for group in hit:
            ranks = group.ranks
            if kind is Domain.NODE:  # the others of its nodes are there still
                ranks = per_node(self._shapes[group.pool])
            self._hurt(group, ranks, None, fault)

    def _lose_rank(self, fault: RankLoss) -> None:
        provider = self._fleet.actuator
        groups = () if provider is None else provider.groups()
        serving = [
            one
            for one in groups
            if one.stage is actuator.Stage.READY and not self._is_to_go(one.name)
        ]
        if serving:
            group = serving[fault.group % len(serving)]
            self._hurt(group, 0 if fault.held else 1, fault.back_after_s, fault)

    def _hurt(
        self,
        group: actuator.Group,
        ranks: int,
        back_s: float | None,
        fault: DomainLoss | RankLoss,
    ) -> None:
        """Have so many ranks of a group be gone: noticed later, if it served."""
        name = group.name

        def noticed() -> None:
            provider = self._fleet.actuator
            assert provider is not None, "it has the groups"
            left = group.ranks - ranks
            if left <= 0 or self._is_to_go(name):
                provider.lose(name, "its ranks are gone", again=False)
            else:
                way = Way(plan=())
                if back_s is not None:
                    usual = provider.usual(name)
                    way = Way(plan=((str(Stage.PROVISION), seconds(back_s)), *usual.plan[1:]))
                provider.lose(name, "a rank is gone", again=True, left=left, way=way)
            self._fleet.noticed(name)

        if self._fleet.crash(name, streams_break=fault.streams_break):
            self._after(fault.noticed_after_s, noticed)
        else:
            noticed()


def per_node(shape: GroupShape) -> int:
    """Return how many ranks of a group stand on one node, at most: stages are not split."""
    return min(shape.gpus, shape.ranks_per_node // shape.tp * shape.tp)
