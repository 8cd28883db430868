"""An emulated fleet and the gateway in front of it, one life after the other: what live chaos befalls.

Groups are an actuator's, the first ones too, and outlive the gateway that asked for them, as they would
anywhere else. One clock tells the time of all.
"""

from collections.abc import Callable

from headrace.adapters.engines.inprocess import InProcessEngine
from headrace.config.schema import Settings
from headrace.gateway.clock import LoopClock
from headrace.gateway.groups import Groups
from headrace.gateway.hand import Idle
from headrace.gateway.providing import emulated
from headrace.gateway.server import Gateway
from headrace.model.effect import Concluded, Effect
from headrace.model.event import GroupTold
from headrace.model.ids import PoolName, ReplicaName
from headrace.ports.actuator import Actuator, Group, GroupEvent, Listener, Stage
from headrace.sim.chaos_watch import Stands, Watch
from headrace.units import InstantNs, seconds


class Fleet:
    """Groups, replicas and their gateway."""

    def __init__(
        self, settings: Settings, clock: LoopClock, watch: Watch, real: Settings | None = None
    ) -> None:
        """Have the first groups, and nobody who serves by them yet.

        `real`: what starts of groups are emulated by, if not by what is declared.
        """
        self._settings, self.clock, self._watch = settings, clock, watch
        self.began: InstantNs | None = None
        """Where instants of the run count from; None: it has not begun."""
        self.on_host: Callable[[InProcessEngine], None] = lambda _: None
        """Told of each engine that is about to serve."""
        self.gateway: Gateway
        self._groups: Groups | None = None
        self._dead: set[ReplicaName] = set()
        """Engines that are gone, which the gateway does not know yet."""
        self._past: list[Concluded] = []
        self._rows: list[Concluded] = []
        self.actuator = emulated(real or settings, clock)
        """Who has the groups; None: no pool scales."""
        if self.actuator is not None:
            for pool in settings.deployment.pools:
                if pool.name in self.actuator.pools:
                    for nth in range(pool.replicas):
                        name = ReplicaName(f"{pool.name}-{nth}")
                        self.actuator.own(name, PoolName(pool.name))

    @property
    def now(self) -> InstantNs:
        """The instant of the run."""
        return InstantNs(0 if self.began is None else self.clock.now() - self.began)

    @property
    def rows(self) -> list[Concluded]:
        """What the gateways recorded of requests, killed ones up to their end."""
        return self._past + self._rows

    def begin(self) -> Gateway:
        """Begin a life of the gateway, by what is there; it serves nobody yet."""
        self._rows = []
        pools = () if self.actuator is None else tuple(self.actuator.pools)
        gateway = self.gateway = Gateway(
            self._settings, self.clock, concluded=self._rows.append, provided=pools
        )
        if self.actuator is not None:
            drain_ns = seconds(self._settings.server.drain_s)
            heard = _Heard(self.actuator, self._heard)
            groups = self._groups = Groups(heard, self.clock, drain_ns=drain_ns)
            groups.adopt()
            groups.attach(gateway)
            gateway.driver.hand = _Watched(groups, self._did)
        for engine in gateway.driver.engines:
            self._hosted(engine.name)
        return gateway

    def kill(self) -> None:
        """End the gateway as SIGKILL does."""
        self._past += self._rows
        self._rows = []
        if self._groups is not None:
            self._groups.detach()
        self.gateway.driver.hand = Idle()  # whatever it still decides, nobody does
        self.gateway.kill()

    def grow(self, name: ReplicaName, pool: PoolName) -> None:
        """Start a group that the gateway has not asked for."""
        assert self._groups is not None, "no pool scales"
        self._groups.grow(name, pool)

    def look(self) -> None:
        """Keep how the groups stand, if that has changed."""
        if self.actuator is None or self.began is None:
            return
        models = self.gateway.driver.plane.state.models.values()
        taking = {
            name
            for known in models
            for name, replica in known.fleet.replicas.items()
            if not replica.draining
        }
        stands = {
            one.name: Stands(
                one.stage is Stage.READY and one.name in taking and one.name not in self._dead,
                one.running,
            )
            for one in self.actuator.groups()
        }
        self._watch.look(stands, self.now)

    # Replicas ---------------------------------------------------------------------------------

    def engine(self, name: ReplicaName) -> InProcessEngine | None:
        """Return the engine of that name, if it lives."""
        for engine in self.gateway.driver.engines:
            if engine.name == name and name not in self._dead:
                assert isinstance(engine, InProcessEngine), f"{name} is not emulated"
                return engine
        return None

    def crash(self, name: ReplicaName, *, streams_break: bool) -> bool:
        """Have an engine be gone, which nobody has noticed yet; return whether it lived."""
        engine = self.engine(name)
        if engine is None:
            return False
        self._dead.add(name)
        engine.crash(streams_break=streams_break)
        self.look()
        return True

    def noticed(self, name: ReplicaName) -> None:
        """Have the gateway know that an engine is gone."""
        self._dead.discard(name)
        if any(engine.name == name for engine in self.gateway.driver.engines):
            self.gateway.driver.remove(name)

    def host(self, name: ReplicaName, pool: PoolName) -> None:
        """Have a replica of a pool that does not scale be back."""
        if all(engine.name != name for engine in self.gateway.driver.engines):
            self.gateway.host(name, pool)
            self._hosted(name)

    def _hosted(self, name: ReplicaName) -> None:
        self._dead.discard(name)
        engine = self.engine(name)
        if engine is not None:
            self.on_host(engine)

    # What is told -----------------------------------------------------------------------------

    def _heard(self, event: GroupEvent) -> None:
        if event.stage is Stage.READY:
            self._hosted(event.group)
        self.clock.call_at(self.clock.now(), self.look)  # the plane may have to hear of it first

    def _did(self, effect: Effect) -> None:
        self._watch.did(effect, self.now)
        self.clock.call_at(self.clock.now(), self.look)


class _Heard:
    """An actuator that a second one hears as well, after the first."""

    def __init__(self, actuator: Actuator, then: Listener) -> None:
        self._actuator, self._then = actuator, then
        self.start, self.wake, self.stop = actuator.start, actuator.wake, actuator.stop

    def connect(self, listener: Listener) -> None:
        def both(event: GroupEvent) -> None:
            listener(event)
            self._then(event)

        self._actuator.connect(both)

    def groups(self) -> tuple[Group, ...]:
        return self._actuator.groups()


class _Watched:
    """A hand that somebody looks at."""

    def __init__(self, groups: Groups, did: Callable[[Effect], None]) -> None:
        self._groups, self._did = groups, did
        self.drains, self.drain_ns = groups.drains, groups.drain_ns

    def listing(self) -> tuple[GroupTold, ...]:
        return self._groups.listing()

    def carry_out(self, effect: Effect) -> None:
        self._did(effect)
        self._groups.carry_out(effect)
