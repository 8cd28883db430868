"""Which actuator starts the groups of each pool? Processes where the configuration says how, else emulated."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from headrace.adapters.actuators.emulated import EmulatedActuator, Start
from headrace.adapters.actuators.process.actuator import ProcessActuator, Recipe
from headrace.config.schema import GroupsSpec, Settings
from headrace.gateway.fleet import grown
from headrace.gateway.groups import Groups
from headrace.gateway.server import Gateway
from headrace.model.deployment import PoolSpec
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.scaling_spec import Scaling, ppm
from headrace.model.stages import shipped
from headrace.ports.actuator import Actuator, Group, Listener
from headrace.ports.clock import Clock
from headrace.units import seconds


class ByPool:
    """Several actuators as one: each pool has its own."""

    def __init__(self, pools: Mapping[PoolName, Actuator]) -> None:
        """Leave groups to the actuators of their pools."""
        self._pools = pools
        self._all = tuple({id(one): one for one in pools.values()}.values())

    def connect(self, listener: Listener) -> None:
        """Say who listens."""
        for one in self._all:
            one.connect(listener)

    def start(self, name: ReplicaName, pool: PoolName, *, standby: bool = False) -> None:
        """Ask for a group."""
        self._pools[pool].start(name, pool, standby=standby)

    def wake(self, name: ReplicaName) -> None:
        """Wake a group, whosever it is."""
        for one in self._all:
            one.wake(name)

    def stop(self, name: ReplicaName) -> None:
        """Give a group back, whosever it is."""
        for one in self._all:
            one.stop(name)

    def groups(self) -> tuple[Group, ...]:
        """Return what is there."""
        return tuple(group for one in self._all for group in one.groups())


def emulated(settings: Settings, clock: Clock) -> EmulatedActuator | None:
    """Return what starts groups of pools that scale and are emulated in process; None: there are none."""
    pools = {
        PoolName(pool.name): _start(pool, pool.scaling)
        for pool in settings.deployment.pools
        if pool.scaling is not None and pool.name not in settings.real
    }
    return EmulatedActuator(clock, pools, settings.emulator.seed) if pools else None


def give(settings: Settings, clock: Clock, gateway: Gateway) -> None:
    """Have a gateway start the groups of its emulated pools that scale, if it has any."""
    actuator = emulated(settings, clock)
    if actuator is not None:
        Groups(actuator, clock, drain_ns=seconds(settings.server.drain_s)).attach(gateway)


@asynccontextmanager
async def provided(
    settings: Settings,
    clock: Clock,
    folder: Path,
    wanted: Mapping[PoolName, int] = MappingProxyType({}),
) -> AsyncIterator[Groups | None]:
    """Provide the groups of a configuration for as long as the block lasts; None: it has no such pools.

    The first groups of pools of processes are asked for at once, as many as are `wanted` of each if that
    is known. Raises OSError if records and logs of processes cannot be written to `folder`.
    """
    pools: dict[PoolName, Actuator] = {}
    dreamt = emulated(settings, clock)
    if dreamt is not None:
        pools |= dict.fromkeys(dreamt.pools, dreamt)
    processes = None
    if settings.groups:
        specs = {pool.name: pool for pool in settings.deployment.pools}
        recipes = {PoolName(one.pool): _recipe(one, specs[one.pool]) for one in settings.groups}
        processes = ProcessActuator(clock, folder, recipes)
        pools |= dict.fromkeys(recipes, processes)
    if not pools:
        yield None
        return
    groups = Groups(ByPool(pools), clock, drain_ns=seconds(settings.server.drain_s))
    first(groups, settings, wanted)
    try:
        yield groups
    finally:
        groups.detach()
        if processes is not None:
            await processes.close()


def first(groups: Groups, settings: Settings, wanted: Mapping[PoolName, int]) -> None:
    """Ask for those first groups of pools of processes that were not asked for yet."""
    pools = {pool.name: pool for pool in grown(settings, wanted).deployment.pools}
    for spec in settings.groups:
        for nth in range(pools[spec.pool].replicas):
            name = ReplicaName(f"{spec.pool}-{nth}")
            if name not in groups.names:
                groups.grow(name, PoolName(spec.pool))


def _start(pool: PoolSpec, scaling: Scaling) -> Start:
    hardware = pool.profile.hardware
    return Start(
        cold=scaling.stages(hardware),
        waking=scaling.waking(hardware),
        ranks=scaling.group_shape(hardware).gpus,
        success_ppm=ppm((scaling.times or shipped(hardware)).success),
        domains=scaling.domains,
        domain=scaling.reserve_domain,
    )


def _recipe(spec: GroupsSpec, pool: PoolSpec) -> Recipe:
    return Recipe(
        command=spec.command,
        model=spec.model or pool.model,
        kind=spec.kind,
        env=spec.env,
        ranks=spec.ranks,
        start_s=spec.start_s,
        stop_s=spec.stop_s,
    )
