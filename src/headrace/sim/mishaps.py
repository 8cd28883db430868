"""What befalls replicas and their groups in a run, at the instants that were laid down for it.

Of nothing here is the plane told as such: it hears of what breaks as it would live.
"""

from collections.abc import Callable
from typing import Protocol

from headrace.model.event import Event, ReplicaDraining, ReplicaForgot
from headrace.model.group import Domain
from headrace.model.ids import AttemptId, Incarnation, ReplicaName
from headrace.model.slo import Outcome
from headrace.sim.agenda import Agenda, Kind
from headrace.sim.engines import Engines
from headrace.sim.faults import (
    Canary,
    ColdCache,
    Crash,
    DomainLoss,
    Drain,
    Fault,
    RankLoss,
    Restart,
    Slow,
    Update,
)
from headrace.sim.groups import Provider
from headrace.units import NS_PER_S, DurationNs, InstantNs, later, seconds

LOOK_NS = NS_PER_S
"""Period of the looks of whoever restarts groups one after the other."""


class Driver(Protocol):
    """What is needed of whoever runs the world."""

    now: InstantNs
    engines: Engines
    provider: Provider
    announced: dict[ReplicaName, Incarnation]
    draining: set[ReplicaName]

    def tell(self, event: Event) -> None:
        """Tell the plane."""

    def start(self, at: int) -> None:
        """Bring a replica up in a new life."""

    def down(self, replica: ReplicaName, incarnation: Incarnation) -> None:
        """Tell the plane that a life is over."""

    def end(self, attempt: AttemptId, outcome: Outcome) -> None:
        """Tell of an attempt that ended without success."""


class Mishaps:
    """All faults of a run that have their instant, but for restarts of the driver."""

    def __init__(
        self, driver: Driver, agenda: Agenda[object], faults: tuple[Fault, ...], replicas: int
    ) -> None:
        """Plan what is to go wrong; `replicas`: those that are there at first."""
        self._driver, self._agenda = driver, agenda
        self._base = len(faults)
        for nth, fault in enumerate(faults):
            match fault:
                case Restart():
                    when = max(0.0, fault.at_s - fault.checkpoint_age_s)
                    self._plan(InstantNs(seconds(when)), nth, "save")
                case Slow():
                    if fault.until_s is not None:
                        self._plan(InstantNs(seconds(fault.until_s)), nth, fault)
                    if fault.at_s == 0.0:
                        continue  # it starts like this
                case Crash() | Drain() | DomainLoss() | RankLoss() | ColdCache() | Update():
                    pass
                case Canary():
                    pass
                case _:
                    continue
            self._plan(InstantNs(seconds(fault.at_s)), nth, fault)
        self.entities = self._base + replicas
        """From here on entities of faults are free."""

    def _plan(self, at: InstantNs, entity: int, event: object) -> None:
        self._agenda.push(at, Kind.FAULT, entity, event)

    def strike(self, entity: int, event: object) -> None:
        """Do what was planned for now."""
        driver = self._driver
        match event:
            case Crash():
                self._crash(event)
            case Drain():
                self._drain(event)
            case Slow():
                driver.engines.pace(driver.now)
            case ColdCache():
                self._cool(event)
            case DomainLoss():
                self._lose_domain(entity, event)
            case RankLoss():
                self._lose_rank(entity, event)
            case Canary():
                self._canary(event)
            case Update():
                self._update(entity, event)
            case _ if callable(event):
                event()
            case _:
                raise AssertionError(event)

    # One replica ------------------------------------------------------------------------------

    def _crash(self, fault: Crash) -> None:
        driver, at = self._driver, fault.replica
        name, entity = driver.engines.nodes[at].name, self._base + at
        again = fault.back_after_s is not None
        grouped = name in driver.provider.groups

        def noticed(life: Incarnation) -> None:
            taken = name in driver.draining
            driver.down(name, life)
            driver.provider.lost(name, driver.now, again=again, taken=taken)

        def back() -> None:
            if driver.engines.nodes[at].engine is None:
                driver.start(at)

        life = self._kill(at, entity, fault.noticed_after_s, noticed)
        if life is None:
            return
        if not grouped and fault.back_after_s is not None:
            self._plan(later(driver.now, seconds(fault.back_after_s)), entity, back)
        if fault.streams_break:
            self._break(life)

    def _kill(
        self, at: int, entity: int, after_s: float, noticed: Callable[[Incarnation], None]
    ) -> Incarnation | None:
        """End a life, which is noticed later; return which, if it was up."""
        driver = self._driver
        engine = driver.engines.nodes[at].engine
        if engine is None:
            return None
        life = engine.incarnation
        driver.engines.crash(at, driver.now)
        group = driver.provider.groups.get(driver.engines.nodes[at].name)
        if group is not None:
            group.ready = False
        self._plan(later(driver.now, seconds(after_s)), entity, lambda: noticed(life))
        return life

    def _break(self, life: Incarnation) -> None:
        """Have the streams' ends of a life be seen, one by one."""
        attempts = self._driver.engines.attempts
        for attempt in [one for one, where in attempts.items() if where == life]:
            if attempt in attempts:  # not ended meanwhile
                self._driver.end(attempt, Outcome.ERROR)

    def _drain(self, fault: Drain) -> None:
        """Send a replica nothing new, and stop it once it had its time."""
        driver = self._driver
        if not self._close(driver.engines.nodes[fault.replica].name):
            return
        stop = Crash(
            replica=fault.replica,
            at_s=fault.at_s + fault.time_s,
            noticed_after_s=0.0,
            streams_break=False,
            back_after_s=fault.back_after_s,
        )
        when = later(driver.now, seconds(fault.time_s))
        self._plan(when, self._base + fault.replica, stop)

    def _close(self, name: ReplicaName) -> bool:
        """Have a replica take nothing new; return whether it is up and the plane knows it."""
        driver = self._driver
        at = driver.engines.at(name)
        engine = None if at is None else driver.engines.nodes[at].engine
        incarnation = driver.announced.get(name)
        if engine is None or incarnation is None or engine.incarnation != incarnation:
            return False
        driver.draining.add(name)
        driver.tell(ReplicaDraining(replica=name, incarnation=incarnation))
        return True

    # All replicas -----------------------------------------------------------------------------

    def _cool(self, fault: ColdCache) -> None:
        driver = self._driver
        driver.engines.cool(driver.now)
        for name, life in list(driver.announced.items()) if fault.told else ():
            driver.tell(ReplicaForgot(replica=name, incarnation=life))

    # Groups -----------------------------------------------------------------------------------

    def _lose_domain(self, entity: int, fault: DomainLoss) -> None:
        driver = self._driver
        provider = driver.provider
        name = fault.name or provider.fullest(fault.of)
        if name is None:
            return
        provider.shut(fault.of, name)
        if fault.back_after_s is not None:
            reopens = later(driver.now, seconds(fault.back_after_s))
            self._plan(reopens, entity, lambda: provider.reopen(fault.of, name))
        for group in provider.within(fault.of, name):
            ranks = group.whole
            if fault.of is Domain.NODE:  # the others of its nodes are there still
                ranks = group.per_node
            self._hurt(entity, group.name, ranks, None, fault)

    def _lose_rank(self, entity: int, fault: RankLoss) -> None:
        serving = self._driver.provider.serving()
        if not serving:
            return
        name = serving[fault.group % len(serving)]
        back = None if fault.back_after_s is None else seconds(fault.back_after_s)
        self._hurt(entity, name, 0 if fault.held else 1, back, fault)

    def _hurt(
        self,
        entity: int,
        name: ReplicaName,
        ranks: int,
        back: DurationNs | None,
        fault: DomainLoss | RankLoss,
    ) -> None:
        """Have so many ranks of a group be gone: noticed later, if it served."""
        driver = self._driver
        at = driver.engines.at(name)

        def noticed(life: Incarnation | None = None) -> None:
            taken = name in driver.draining
            if life is not None:
                driver.down(name, life)
            driver.provider.hurt(name, driver.now, ranks=ranks, back=back, taken=taken)

        if at is None or driver.engines.nodes[at].engine is None:
            noticed()
            return
        life = self._kill(at, entity, fault.noticed_after_s, noticed)
        if life is not None and fault.streams_break:
            self._break(life)

    def _canary(self, fault: Canary) -> None:
        driver = self._driver
        name = driver.provider.canary(driver.now, correct=fault.correct)
        driver.engines.slower[name] = fault.factor

    # One group after the other ----------------------------------------------------------------

    def _update(self, entity: int, fault: Update) -> None:
        provider = self._driver.provider
        provider.recompiles = provider.recompiles or fault.recompiles
        self._next(entity, fault, provider.serving())

    def _next(self, entity: int, fault: Update, left: tuple[ReplicaName, ...]) -> None:
        """Close the next group that still serves."""
        driver = self._driver
        while left and not self._close(left[0]):
            left = left[1:]
        if left:
            until = later(driver.now, seconds(fault.time_s))
            self._look(entity, lambda: self._emptied(entity, fault, left, until))

    def _emptied(
        self, entity: int, fault: Update, left: tuple[ReplicaName, ...], until: InstantNs
    ) -> None:
        """Restart a group once nothing runs there, or its time is over."""
        driver, name = self._driver, left[0]
        group, at = driver.provider.groups.get(name), driver.engines.at(name)
        if group is None or not group.ready or at is None:
            self._next(entity, fault, left[1:])  # something else befell it
            return
        if name not in driver.draining:  # the driver came back meanwhile
            self._close(name)
        if driver.engines.running(at) and driver.now < until:
            self._look(entity, lambda: self._emptied(entity, fault, left, until))
            return
        driver.provider.renew(name, driver.now)
        self._look(entity, lambda: self._back(entity, fault, left))

    def _back(self, entity: int, fault: Update, left: tuple[ReplicaName, ...]) -> None:
        """Go on once a group serves again, or is there no more."""
        group = self._driver.provider.groups.get(left[0])
        if group is None or group.ready or group.stopping:
            self._next(entity, fault, left[1:])
        else:
            self._look(entity, lambda: self._back(entity, fault, left))

    def _look(self, entity: int, what: Callable[[], None]) -> None:
        self._plan(later(self._driver.now, LOOK_NS), entity, what)
