"""Keeps a gateway's engines in step with the groups that an actuator provides.

A group that is ready becomes an engine; one that is to go is drained first, by the plane's own ledger
and up to a deadline, and only then stopped. How many there should be is somebody else's question.
"""

import asyncio

from headrace.config.schema import UpstreamSpec
from headrace.gateway.server import Gateway
from headrace.model.ids import PoolName, ReplicaName
from headrace.ports.actuator import OVER, Actuator, GroupEvent, Stage
from headrace.ports.clock import Clock, Timer
from headrace.units import DurationNs, later


class Groups:
    """The groups of one gateway, which may come to be before it does."""

    def __init__(self, actuator: Actuator, clock: Clock, *, drain_ns: DurationNs) -> None:
        """Hear of an actuator's groups; `drain_ns`: what streams get to finish before a stop."""
        self._actuator, self._clock, self._drain_ns = actuator, clock, drain_ns
        self._gateway: Gateway | None = None
        self._ready: dict[ReplicaName, UpstreamSpec] = {}
        self._leaving: dict[ReplicaName, Timer | None] = {}
        self._waiting: dict[ReplicaName, list[asyncio.Future[GroupEvent]]] = {}
        actuator.connect(self._heard)

    @property
    def ready(self) -> tuple[ReplicaName, ...]:
        """The groups that serve, or could."""
        return tuple(self._ready)

    def attach(self, gateway: Gateway) -> None:
        """Serve by what is ready, and by what will be."""
        self._gateway = gateway
        for spec in self._ready.values():
            gateway.join(spec)

    def detach(self) -> None:
        """Tell the gateway nothing any more: it ends."""
        self._gateway = None

    def grow(self, name: ReplicaName, pool: PoolName) -> None:
        """Ask for one more group; it serves once it is ready."""
        self._actuator.start(name, pool)

    def shrink(self, name: ReplicaName) -> None:
        """Give a group back, once what runs there is over or has had its time."""
        if name in self._leaving:
            return
        if self._gateway is None or name not in self._ready:
            self._leaving[name] = None
            self._actuator.stop(name)
            return
        due = later(self._clock.now(), self._drain_ns)
        self._leaving[name] = self._clock.call_at(due, lambda: self._actuator.stop(name))
        self._gateway.driver.drain(name, lambda: self._actuator.stop(name))

    async def settled(self, name: ReplicaName) -> GroupEvent:
        """Return with what ends the wait for a group: that it is ready, or over."""
        future: asyncio.Future[GroupEvent] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(future)
        return await future

    async def over(self, name: ReplicaName) -> GroupEvent:
        """Return once nothing is left of a group."""
        while (event := await self.settled(name)).stage not in OVER:
            pass
        return event

    def _heard(self, event: GroupEvent) -> None:
        name = event.group
        if event.stage is Stage.READY:
            self._join(name)
        elif event.stage in OVER or event.stage in (Stage.LOST, Stage.STOPPING):
            self._leave(name)
        if event.stage is Stage.LOST and name in self._leaving:
            self._actuator.stop(name)  # it is not to come back
        if event.stage in OVER and (timer := self._leaving.pop(name, None)) is not None:
            timer.cancel()
        if event.stage is Stage.READY or event.stage in OVER:
            for future in self._waiting.pop(name, ()):
                if not future.done():
                    future.set_result(event)

    def _join(self, name: ReplicaName) -> None:
        (group,) = (one for one in self._actuator.groups() if one.name == name)
        spec = self._ready[name] = UpstreamSpec(url=group.url, pool=group.pool, name=name)
        if self._gateway is not None:
            self._gateway.join(spec)

    def _leave(self, name: ReplicaName) -> None:
        if self._ready.pop(name, None) is not None and self._gateway is not None:
            self._gateway.driver.remove(name)
