"""Keeps a gateway's engines in step with the groups that an actuator provides.

A group that is ready becomes an engine; one that is to go is drained first, by the plane's own ledger
and up to a deadline, and only then stopped. How many there should be is somebody else's question.
"""

import asyncio

from headrace.config.schema import UpstreamSpec
from headrace.gateway.overview import GroupState
from headrace.gateway.server import Gateway
from headrace.model.ids import PoolName, ReplicaName
from headrace.ports.actuator import OVER, Actuator, GroupEvent, Stage, stage_seconds
from headrace.ports.clock import Clock, Timer
from headrace.units import DurationNs, elapsed, later, to_seconds

FAILED_KEPT = 100
"""Groups that were refused or given up, and are told of all the same: the last ones."""


class _Going:
    """A group that is to go."""

    def __init__(self, gone: "asyncio.Future[GroupEvent]") -> None:
        self.gone = gone
        self.timer: Timer | None = None


class _Told:
    """What was told of a group: the events of its present life, and the loss that led to it."""

    def __init__(self, pool: PoolName) -> None:
        self.pool = pool
        self.events: list[GroupEvent] = []

    @property
    def over(self) -> bool:
        return bool(self.events) and self.events[-1].stage in OVER

    def add(self, event: GroupEvent) -> None:
        if self.events and event.life != self.events[-1].life:
            del self.events[:-1]
        self.events.append(event)


class Groups:
    """The groups of one gateway, which may come to be before it does."""

    def __init__(self, actuator: Actuator, clock: Clock, *, drain_ns: DurationNs) -> None:
        """Hear of an actuator's groups; `drain_ns`: what streams get to finish before a stop."""
        self._actuator, self._clock, self._drain_ns = actuator, clock, drain_ns
        self._gateway: Gateway | None = None
        self._ready: dict[ReplicaName, UpstreamSpec] = {}
        self._rising: dict[ReplicaName, asyncio.Future[GroupEvent]] = {}
        self._going: dict[ReplicaName, _Going] = {}
        self._told: dict[ReplicaName, _Told] = {}
        actuator.connect(self._heard)

    @property
    def ready(self) -> tuple[ReplicaName, ...]:
        """The groups that serve, or could."""
        return tuple(self._ready)

    def states(self) -> list[GroupState]:
        """Return how far each is, in the order in which they were asked for."""
        now, found = self._clock.now(), []
        for name, told in self._told.items():
            if not told.events:
                continue  # nobody has said anything of it yet
            last = told.events[-1]
            found.append(
                GroupState(
                    group=name,
                    pool=told.pool,
                    life=last.life,
                    stage=last.stage,
                    for_s=to_seconds(elapsed(last.at, now)),
                    seconds={str(on): took for on, took in stage_seconds(told.events).items()},
                    why=last.why,
                )
            )
        return found

    def attach(self, gateway: Gateway) -> None:
        """Serve by what is ready, and by what will be."""
        self._gateway = gateway
        gateway.groups = self.states
        for spec in self._ready.values():
            gateway.join(spec)

    def detach(self) -> None:
        """Tell the gateway nothing any more: it ends."""
        self._gateway = None

    def grow(self, name: ReplicaName, pool: PoolName) -> "asyncio.Future[GroupEvent]":
        """Ask for one more group; return what ends the wait for it: that it is ready, or over."""
        self._told.pop(name, None)
        self._told[name] = _Told(pool)
        risen = self._rising[name] = asyncio.get_running_loop().create_future()
        self._actuator.start(name, pool)
        return risen

    def shrink(self, name: ReplicaName) -> "asyncio.Future[GroupEvent]":
        """Give a group back, once what runs there is over or has had its time.

        Returns what is left to wait for: that nothing of it is there any more.
        """
        going = self._going.get(name)
        if going is None:
            going = self._going[name] = _Going(asyncio.get_running_loop().create_future())
            if self._gateway is None or name not in self._ready:
                self._actuator.stop(name)
            else:
                due = later(self._clock.now(), self._drain_ns)
                going.timer = self._clock.call_at(due, lambda: self._actuator.stop(name))
                self._gateway.driver.drain(name, lambda: self._actuator.stop(name))
        return going.gone

    def _heard(self, event: GroupEvent) -> None:
        name, over = event.group, event.stage in OVER
        self._note(event)
        if event.stage is Stage.READY:
            self._join(name)
        elif over or event.stage in (Stage.LOST, Stage.STOPPING):
            self._leave(name)
        if event.stage is Stage.LOST and name in self._going:
            self._actuator.stop(name)  # it is not to come back
        if event.stage is Stage.READY or over:
            _settle(self._rising.pop(name, None), event)
        if over and (going := self._going.pop(name, None)) is not None:
            if going.timer is not None:
                going.timer.cancel()
            _settle(going.gone, event)

    def _note(self, event: GroupEvent) -> None:
        """Keep what is told, but of groups that were given back."""
        if (told := self._told.get(event.group)) is None:
            return
        told.add(event)
        if event.stage is Stage.STOPPED:
            del self._told[event.group]
        elif event.stage in OVER:
            failed = [one for one, its in self._told.items() if its.over]
            for one in failed[:-FAILED_KEPT]:
                del self._told[one]

    def _join(self, name: ReplicaName) -> None:
        (group,) = (one for one in self._actuator.groups() if one.name == name)
        spec = self._ready[name] = UpstreamSpec(
            url=group.url, pool=group.pool, name=name, kind=group.kind
        )
        if self._gateway is not None:
            self._gateway.join(spec)

    def _leave(self, name: ReplicaName) -> None:
        if self._ready.pop(name, None) is not None and self._gateway is not None:
            self._gateway.driver.remove(name)


def _settle(future: "asyncio.Future[GroupEvent] | None", event: GroupEvent) -> None:
    if future is not None and not future.done():
        future.set_result(event)
