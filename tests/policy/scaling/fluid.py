"""A pool as a fluid in virtual time: demand flows in, whole groups serve it, starts take their time.

Small enough to be believed, and closed: what is decided changes what is seen at the next tick.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from headrace.model.ids import Incarnation, ReplicaName
from headrace.model.scaling import (
    DemandFacts,
    GroupFacts,
    ScaleDecision,
    ScaleEvidence,
    ScaleMemory,
    Standing,
)
from headrace.model.scaling_spec import Scaling
from headrace.policy.scaling.decide import decide, remembered
from headrace.policy.scaling.forecast import History
from headrace.units import MICRO, NS_PER_S, DurationNs, InstantNs, WorkNs
from tests.policy.scaling.made import evidence, sample

S = NS_PER_S
TICK_S = 15
DRAIN_S = 30


@dataclass
class Tick:
    """What was seen, decided and served in one tick."""

    at: int
    """Seconds since the beginning."""
    facts: ScaleEvidence
    said: ScaleDecision
    offered: int
    """Urgent work of the tick, ns."""
    served: int
    """Of it and of what waited, ns."""
    gpu_s: int
    """Seconds of groups that are held, whatever their state."""


@dataclass
class World:
    """One pool of groups that do a work-second a second each, and the scaler."""

    settings: Scaling
    start_s: int
    """How long a start takes, always."""
    warm: int = 1
    """Groups that are there at the beginning."""
    expires: bool = True
    """Whether work that has waited for two seconds is gone."""
    groups: dict[str, GroupFacts] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)
    """When what is rising or leaving has done so, in seconds."""
    now: int = 0
    queue: int = 0
    made: int = 0
    memory: ScaleMemory = field(default_factory=ScaleMemory)
    history: History = field(default_factory=History)
    log: list[Tick] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Let the warm ones stand for long."""
        for _ in range(self.warm):
            self._added(Standing.READY, -1_000)

    def _added(self, standing: Standing, since: int) -> str:
        self.made += 1
        name = f"g{self.made:04}"
        self.groups[name] = GroupFacts(
            group=ReplicaName(name),
            incarnation=Incarnation(1),
            standing=standing,
            gpus=1,
            envelope_micro=MICRO,
            since=InstantNs(since * S),
        )
        return name

    def count(self, *standings: Standing) -> int:
        """Return how many groups stand so."""
        return sum(one.standing in standings for one in self.groups.values())

    def run(self, rates: Iterable[float], *, stale: bool = False, frozen: bool = False) -> "World":
        """Let a tick pass for each rate of offered work, in work-seconds a second."""
        for rate in rates:
            self._decide(rate, stale=stale, frozen=frozen)
            self._flow(rate)
        return self

    def _decide(self, rate: float, *, stale: bool, frozen: bool) -> None:
        facts = self._facts(rate, stale=stale, frozen=frozen)
        said = decide(self.settings, facts)
        self.memory = remembered(self.settings, facts, said)
        self.log.append(Tick(self.now, facts, said, 0, 0, 0))
        self._apply(said)

    def _facts(self, rate: float, *, stale: bool, frozen: bool) -> ScaleEvidence:
        there = []
        for name, one in self.groups.items():
            left = DurationNs(max(0, self.due.get(name, 0) - self.now) * S)
            progress = self.start_s - left // S
            there.append(
                replace(one, arrival_p50_ns=left, arrival_p90_ns=left, progress=progress)
                if one.standing is Standing.COMING
                else one
            )
        ready = [one.group for one in there if one.standing is Standing.READY]
        foreseeing, forecast = self.settings.forecast, None
        if foreseeing is not None:
            now, ahead = InstantNs(self.now * S), self.start_s * S
            self.history.add(foreseeing, 0, now, ahead)
            forecast = self.history.facts(foreseeing, ahead)
        return evidence(
            forecast=forecast,
            now=InstantNs(self.now * S),
            groups=tuple(there),
            ready_p50_ns=DurationNs(self.start_s * S),
            ready_p90_ns=DurationNs(self.start_s * S),
            demand=DemandFacts(
                urgent_micro=round(rate * MICRO),
                urgent_ns=WorkNs(self.queue),
                budget_ns=DurationNs(2 * S),
                expires=self.expires,
            ),
            samples=() if stale else tuple(sample(name, 0) for name in ready),
            memory=self.memory,
            frozen=frozen,
        )

    def _apply(self, said: ScaleDecision) -> None:
        steps = said.steps
        for name in (*steps.cancel, *steps.release):
            del self.groups[name]
            del self.due[name]
        for name in steps.drain:
            self.groups[name] = replace(self.groups[name], standing=Standing.DRAINING)
            self.due[name] = self.now + DRAIN_S
        for name in steps.recall:
            self._risen(name)
        for _ in range(steps.ask):
            self.due[self._added(Standing.COMING, self.now)] = self.now + self.start_s

    def _risen(self, name: str) -> None:
        since = InstantNs(self.now * S)
        self.groups[name] = replace(self.groups[name], standing=Standing.READY, since=since)
        del self.due[name]

    def _flow(self, rate: float) -> None:
        """Let a tick pass, second by second."""
        tick, foreseeing = self.log[-1], self.settings.forecast
        for _ in range(TICK_S):
            for name in [name for name, due in self.due.items() if due <= self.now]:
                if self.groups[name].standing is Standing.COMING:
                    self._risen(name)
                else:
                    del self.groups[name], self.due[name]
            offered = round(rate * S)
            serving = self.count(Standing.READY) * S
            served = min(self.queue + offered, serving)
            self.queue += offered - served
            if self.expires:
                self.queue = min(self.queue, 2 * offered)
            tick.offered, tick.served = tick.offered + offered, tick.served + served
            tick.gpu_s += len(self.groups)
            if foreseeing is not None:
                now = InstantNs(self.now * S)
                self.history.add(foreseeing, offered, now, self.start_s * S)
            self.now += 1
