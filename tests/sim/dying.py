"""A driver that dies at one step of its groups, and comes back from a checkpoint of a drawn age.

While it is away the world goes on: groups come to their next stage, and nobody hears of it. Of what the
plane wanted at the step it died at, the driver has carried out all, a part or nothing.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from headrace.model.effect import GroupEffect
from headrace.model.event import Event, GroupTold, ReplicaDown, ReplicaUp, TimerDue
from headrace.sim.agenda import Kind
from headrace.sim.checks import Checker
from headrace.sim.faults import Restart
from headrace.sim.scenario import Scenario
from headrace.sim.world import World
from headrace.trace.row import TraceRow
from headrace.units import later, seconds

_LISTENED = (GroupTold, ReplicaUp, ReplicaDown, TimerDue)
_ENTITY = 10_000
"""Of the return: no fault of a scenario has it."""


class Age(IntEnum):
    """How many steps before the one it died at the checkpoint is."""

    NOW = 0
    """The journal has the step, and what was wanted at it may or may not have been done."""
    BEFORE = 1
    OLDER = 5


class Death:
    """When the driver dies, and what is left of what it knew."""

    def __init__(
        self, step: int, age: Age = Age.NOW, heard: float = 1.0, away_s: float = 0.0
    ) -> None:
        """Die at a step, counted from 0; `heard`: the part of its effects that is carried out."""
        self.step, self.age, self.heard, self.away_s = step, age, heard, away_s

    def __repr__(self) -> str:
        """Say how to come here again."""
        return f"Death({self.step}, {self.age!r}, {self.heard}, {self.away_s})"


class Dying(World):
    """A run whose driver dies once."""

    def __init__(
        self, scenario: Scenario, rows: Sequence[TraceRow], death: Death | None, **more: Any
    ) -> None:
        """Prepare a run; None: it does not die."""
        self.checker = Checker()
        super().__init__(scenario, rows, 0, after=self.checker, **more)
        self.death, self.away_now = death, False
        self.steps: list[str] = []
        """What happened to groups, in words."""
        self._states: list[bytes] = []
        """Before each step."""

    def tell(self, event: Event) -> None:
        """Give the plane an event, unless nobody is there to give it."""
        if self.away_now:
            return
        dies = self.death is not None and len(self.steps) <= self.death.step
        before = self.plane.freeze() if dies and isinstance(event, _LISTENED) else None
        effects = self.plane.handle(event, now=self.now)
        wanted = [one for one in effects if isinstance(one, GroupEffect)]
        if wanted or isinstance(event, GroupTold | ReplicaUp | ReplicaDown):
            self.steps.append(f"{self.now / 1e9}: {event} {wanted}")
            if before is not None:
                self._states.append(before)
            if self.death is not None and len(self.steps) == self.death.step + 1:
                self._die(self.death, wanted)
                return
        for effect in effects:
            self._carry_out(effect)
        self.checker(self, effects)
        self._no_more_than_may_be()
        when = self.plane.next_timer()
        if when is not None and (self._timer is None or when < self._timer):
            self._timer = when
            self._agenda.push(when, Kind.TIMER, 0, None)

    def _no_more_than_may_be(self) -> None:
        """What was asked for and is not being given back is within limits, whoever asked twice."""
        for pool, facts in self.plane.settings.scaled.items():
            real = [one for one in self.provider.groups.values() if one.pool == pool]
            most = facts.settings.ceiling(facts.gpus) + facts.settings.standby
            assert sum(not one.stopping for one in real) <= most, real

    def _die(self, death: Death, wanted: Sequence[GroupEffect]) -> None:
        for effect in wanted[: round(len(wanted) * death.heard)]:
            self._carry_out(effect)
        self.away_now = True
        self.engines.cut(self.now)
        states = [*self._states, self.plane.freeze()]
        self._saved = states[max(0, len(states) - 1 - death.age)]
        back = later(self.now, seconds(death.away_s))
        self._agenda.push(back, Kind.FAULT, _ENTITY, Restart(at_s=0.0))

    def _restart(self) -> None:
        self.away_now = False
        super()._restart()
