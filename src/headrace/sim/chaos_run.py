"""Run a chaos scenario in virtual time with every checker on, and keep what its expectations look at."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from headrace.model.effect import Effect
from headrace.sim.books import Broken
from headrace.sim.chaos import Chaos
from headrace.sim.chaos_watch import Happened, Stands, Watch
from headrace.sim.checks import Checker
from headrace.sim.expect import Account, Verdict, judge
from headrace.sim.experiment import offered_rows
from headrace.sim.faults import Fault
from headrace.sim.scenario import rows_of
from headrace.sim.world import World
from headrace.units import InstantNs, seconds


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
    told = [*injected(chaos.faults), *onlooker.watch.happened]
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
        self.watch = Watch()

    def __call__(self, world: World, effects: Sequence[Effect]) -> None:
        """Take in one step."""
        self.checker(world, effects)
        for effect in effects:
            self.watch.did(effect, world.now)
        stands = {
            name: Stands(one.ready and name not in world.draining, one.gpus)
            for name, one in world.provider.groups.items()
        }
        self.watch.look(stands, world.now)


def _account(world: World, onlooker: _Onlooker) -> Account:
    return Account(
        offered=offered_rows(world.scenario, world.rows, world.concluded),
        rows=list(world.concluded.values()),
        decisions=onlooker.watch.decisions,
        fleet=onlooker.watch.fleet,
        end=world.now,
    )


def injected(faults: Sequence[Fault]) -> list[Happened]:
    """Return what goes wrong and when; what does all the time, at the beginning."""
    found = []
    for fault in faults:
        fields = msgspec.to_builtins(fault)
        at = fields.pop("at_s", 0.0)
        kind = fields.pop("kind")
        said = ", ".join(f"{key} {value}" for key, value in fields.items() if value is not None)
        found.append(Happened(at=InstantNs(seconds(at)), what=f"fault: {kind} ({said})"))
    return found
