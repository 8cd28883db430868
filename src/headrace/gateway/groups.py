"""Keeps a gateway's engines in step with the groups that an actuator provides.

A group that is ready becomes an engine; one that is to go is drained first, by the plane's own ledger
and up to a deadline, and only then stopped. How many there should be is somebody else's question: of
pools that scale it is the plane's, which is told of every group and whose wishes are carried out here.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from functools import partial

from headrace.config.schema import UpstreamSpec
from headrace.gateway.overview import GroupState
from headrace.gateway.server import Gateway
from headrace.model import stages
from headrace.model.effect import (
    AskGroup,
    DrainGroup,
    Effect,
    RecallGroup,
    StopGroup,
    WakeGroup,
)
from headrace.model.event import GroupTold
from headrace.model.group import GroupStep
from headrace.model.ids import PoolName, ReplicaName
from headrace.ports.actuator import OVER, Actuator, Group, GroupEvent, Stage, stage_seconds
from headrace.ports.clock import Clock, Timer
from headrace.units import DurationNs, InstantNs, elapsed, later, to_seconds

_log = logging.getLogger(__name__)
FAILED_KEPT = 100
"""Groups that were refused or given up, and are told of all the same: the last ones."""


_PART = {
    Stage.ASKED: stages.Stage.PROVISION,
    Stage.PLACED: stages.Stage.IMAGE,
    Stage.LISTENING: stages.Stage.WEIGHTS,
    Stage.HEALTHY: stages.Stage.WEIGHTS,
    Stage.LOADED: stages.Stage.WARM,
}
"""The part of a start that a group is in which has come to a stage, if it does not tell it more exactly."""


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
        self._ready: dict[ReplicaName, Group] = {}
        self._rising: dict[ReplicaName, asyncio.Future[GroupEvent]] = {}
        self._going: dict[ReplicaName, _Going] = {}
        self._told: dict[ReplicaName, _Told] = {}
        self._draining: dict[ReplicaName, InstantNs] = {}
        self.drains: Counter[PoolName] = Counter()
        """Drains that the plane had carried to their end, by pool."""
        self.drain_ns: Counter[PoolName] = Counter()
        """How long they took, all together."""
        actuator.connect(self._heard)

    @property
    def ready(self) -> tuple[ReplicaName, ...]:
        """The groups that serve, or could."""
        return tuple(self._ready)

    @property
    def names(self) -> Collection[ReplicaName]:
        """All that were asked for and not given back, those that failed lately among them."""
        return self._told.keys()

    @property
    def barren(self) -> tuple[PoolName, ...]:
        """Pools of which groups were asked for, and none serves."""
        pools = {told.pool: None for told in self._told.values()}
        serving = {self._told[name].pool for name in self._ready}
        return tuple(pool for pool in pools if pool not in serving)

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
        gateway.groups, gateway.driver.hand = self.states, self
        for group in self._ready.values():
            _serve_by(gateway, group)

    def adopt(self) -> None:
        """Take over what the actuator has, whoever asked for it."""
        now = self._clock.now()
        for group in self._actuator.groups():
            self._told[group.name] = _Told(group.pool)
            self._heard(
                GroupEvent(
                    group=group.name, life=group.life, stage=group.stage, at=now, step=group.step
                )
            )

    async def risen(self) -> None:
        """Wait until each that was asked for is ready, or over."""
        await asyncio.gather(*self._rising.values())

    def detach(self) -> None:
        """Tell the gateway nothing any more: it ends."""
        self._gateway = None

    def grow(
        self, name: ReplicaName, pool: PoolName, *, standby: bool = False
    ) -> "asyncio.Future[GroupEvent]":
        """Ask for one more group; return what ends the wait for it: that it is ready, or over."""
        self._told.pop(name, None)
        self._told[name] = _Told(pool)
        risen = self._rising[name] = asyncio.get_running_loop().create_future()
        self._actuator.start(name, pool, standby=standby)
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

    # What the plane wants, and is told ----------------------------------------------------------

    def listing(self) -> tuple[GroupTold, ...]:
        """Return all groups that there are, of pools that scale."""
        found = (
            self._news(told.pool, told.events[-1])
            for told in self._told.values()
            if told.events and not told.over
        )
        return tuple(news for news in found if news is not None)

    def carry_out(self, effect: Effect) -> None:
        """Do what the plane wants of groups.

        A drain is its own: it closes the replica, and asks for the stop once nothing runs there.
        """
        match effect:
            case AskGroup():
                self.grow(effect.group, effect.pool, standby=effect.standby)
            case WakeGroup():
                self._actuator.wake(effect.group)
            case DrainGroup():
                self._draining[effect.group] = self._clock.now()
            case RecallGroup():
                self._draining.pop(effect.group, None)
            case StopGroup():  # not at once: the engine itself may be telling the news that led to it
                stop = partial(self._stop, effect.group, effect.pool)
                self._clock.call_at(self._clock.now(), stop)
            case _:
                pass

    def _stop(self, name: ReplicaName, pool: PoolName) -> None:
        """Give a group back that the plane has done with; of a configured engine, the engine."""
        since = self._draining.pop(name, None)
        if since is not None:
            self.drains[pool] += 1
            self.drain_ns[pool] += elapsed(since, self._clock.now())
        if self._gateway is None:
            return  # it has ended since
        driver = self._gateway.driver
        if any(group.name == name for group in self._actuator.groups()):
            self._actuator.stop(name)
        elif any(engine.name == name for engine in driver.engines):
            driver.remove(name)
        else:
            driver.tell(GroupTold(group=name, pool=pool, step=GroupStep.STOPPED, gpus=0))

    def _tell(self, event: GroupEvent) -> None:
        told = self._told.get(event.group)
        if told is not None and self._gateway is not None and self._gateway.driver.runs:
            news = self._news(told.pool, event)
            if news is not None:
                self._gateway.driver.tell(news)

    def _news(self, pool: PoolName, event: GroupEvent) -> GroupTold | None:
        """Return what the plane is told of a group; None: its pool does not scale."""
        assert self._gateway is not None, "attach first"
        facts = self._gateway.driver.plane.settings.scaled.get(pool)
        if facts is None:
            return None
        group = next((one for one in self._actuator.groups() if one.name == event.group), None)
        step = GroupStep.COMING if event.stage in _PART else GroupStep(event.stage)
        return GroupTold(
            group=event.group,
            pool=pool,
            step=step,
            gpus=0 if group is None else facts.gpus * group.running // group.ranks,
            stage=event.step or _PART.get(event.stage),
            places=() if group is None else group.places,
        )

    # What the actuator tells --------------------------------------------------------------------

    def _heard(self, event: GroupEvent) -> None:
        """Keep what is told; a replica is announced after its group, and goes before it."""
        name, over = event.group, event.stage in OVER
        if event.why:
            _log.warning("group %s is %s: %s", name, event.stage, event.why)
        if over or event.stage in (Stage.LOST, Stage.STOPPING):
            self._leave(name)
        self._tell(event)
        self._note(event)
        if event.stage is Stage.READY:
            self._join(name)
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
        self._ready[name] = group
        if self._gateway is not None:
            _serve_by(self._gateway, group)

    def _leave(self, name: ReplicaName) -> None:
        if self._ready.pop(name, None) is not None and self._gateway is not None:
            self._gateway.driver.remove(name)


def _serve_by(gateway: Gateway, group: Group) -> None:
    """Have a gateway serve by a group that is ready; one without an address is emulated in it."""
    if not group.url:
        gateway.host(group.name, group.pool)
        return
    gateway.join(
        UpstreamSpec(
            url=group.url, pool=group.pool, name=group.name, kind=group.kind, model=group.model
        )
    )


def _settle(future: "asyncio.Future[GroupEvent] | None", event: GroupEvent) -> None:
    if future is not None and not future.done():
        future.set_result(event)
