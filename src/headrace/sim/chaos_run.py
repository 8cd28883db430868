"""Run a chaos scenario in virtual time with every checker on, and keep what its expectations look at."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from headrace.model.effect import (
    AskGroup,
    Decided,
    DrainGroup,
    Effect,
    RecallGroup,
    StopGroup,
    WakeGroup,
)
from headrace.model.ids import ReplicaName
from headrace.model.scaling import ScaleRecord
from headrace.sim.books import Broken
from headrace.sim.chaos import Chaos
from headrace.sim.checks import Checker
from headrace.sim.expect import Account, Fleet, Verdict, judge
from headrace.sim.experiment import offered_rows
from headrace.sim.faults import Fault
from headrace.sim.scenario import rows_of
from headrace.sim.world import World
from headrace.units import InstantNs, seconds

_SAID: dict[type, str] = {
    AskGroup: "asked for",
    WakeGroup: "woken",
    DrainGroup: "drained",
    RecallGroup: "its drain called off",
    StopGroup: "given back",
}


class Happened(Struct, frozen=True, kw_only=True):
    """Something worth telling, for people."""

    at: InstantNs
    what: str


class Ran(Struct, frozen=True, kw_only=True):
    """What one run of a chaos scenario showed."""

    scenario: str
    seed: int
    broken: str | None
    """The invariant that did not hold: the run ended there."""
    happened: tuple[Happened, ...]
    verdicts: tuple[Verdict, ...]
    """None, if the run was broken."""

    @property
    def holds(self) -> bool:
        """Whether every expectation and every invariant does."""
        return self.broken is None and all(one.holds for one in self.verdicts)


def run_chaos(chaos: Chaos, seed: int) -> Ran:
    """Run a scenario under one seed; same seed, same bytes."""
    rows = rows_of(chaos, seed)
    onlooker = _Onlooker()
    world = World(chaos, rows, seed, after=onlooker)
    broken = None
    try:
        world.run()
        onlooker.checker.finish(world)
    except Broken as wrong:
        broken = str(wrong)
    told = [*onlooker.happened, *_injected(chaos.faults)]
    verdicts: tuple[Verdict, ...] = ()
    if broken is None:
        verdicts = judge(chaos.expect, _account(world, onlooker))
    return Ran(
        scenario=chaos.name,
        seed=seed,
        broken=broken,
        happened=tuple(sorted(told, key=lambda one: one.at)),
        verdicts=verdicts,
    )


class _Onlooker:
    """Looks on after each step: the checkers', and what becomes of the groups."""

    def __init__(self) -> None:
        self.checker = Checker()
        self.decisions: list[ScaleRecord] = []
        self.fleet: list[Fleet] = []
        self.happened: list[Happened] = []
        self._ready: frozenset[ReplicaName] = frozenset()

    def __call__(self, world: World, effects: Sequence[Effect]) -> None:
        """Take in one step."""
        self.checker(world, effects)
        for effect in effects:
            match effect:
                case Decided(ScaleRecord() as record):
                    self.decisions.append(record)
                case AskGroup() | WakeGroup() | DrainGroup() | RecallGroup() | StopGroup():
                    self._tell(world, f"{effect.group}: {_SAID[type(effect)]}")
                case _:
                    pass
        self._look(world)

    def _look(self, world: World) -> None:
        groups = world.provider.groups
        ready = frozenset(
            name for name, one in groups.items() if one.ready and name not in world.draining
        )
        gpus = sum(one.gpus for one in groups.values())
        idle = gpus - sum(groups[name].gpus for name in ready)
        last = self.fleet[-1] if self.fleet else None
        if last is None or (last.ready, last.gpus, last.idle) != (len(ready), gpus, idle):
            if last is not None and last.at == world.now:
                self.fleet.pop()
            self.fleet.append(Fleet(at=world.now, ready=len(ready), gpus=gpus, idle=idle))
        for name in sorted(ready - self._ready):
            self._tell(world, f"{name}: ready, {len(ready)} are")
        for name in sorted(self._ready - ready):
            self._tell(world, f"{name}: not ready any more, {len(ready)} are")
        self._ready = ready

    def _tell(self, world: World, what: str) -> None:
        self.happened.append(Happened(at=world.now, what=what))


def _account(world: World, onlooker: _Onlooker) -> Account:
    return Account(
        offered=offered_rows(world.scenario, world.rows, world.concluded),
        rows=list(world.concluded.values()),
        decisions=onlooker.decisions,
        fleet=onlooker.fleet,
        end=world.now,
    )


def _injected(faults: Sequence[Fault]) -> list[Happened]:
    """Return what goes wrong and when; what does all the time, at the beginning."""
    found = []
    for fault in faults:
        fields = msgspec.to_builtins(fault)
        at = fields.pop("at_s", 0.0)
        kind = fields.pop("kind")
        said = ", ".join(f"{key} {value}" for key, value in fields.items() if value is not None)
        found.append(Happened(at=InstantNs(seconds(at)), what=f"fault: {kind} ({said})"))
    return found
