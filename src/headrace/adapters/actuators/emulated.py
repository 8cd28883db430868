"""Provides groups that are emulated: their starts take as long as was measured, drawn for each anew.

Every draw depends on the seed, the group's name and nothing else. They live in this process and end
with it.
"""

from collections.abc import Mapping
from functools import partial
from random import Random

from msgspec import Struct

from headrace.model import stages
from headrace.model.engine import EngineKind
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.stages import Stages
from headrace.ports.actuator import Group, GroupEvent, Listener, Stage
from headrace.ports.clock import Clock, Timer
from headrace.units import MICRO, NS_PER_S, DurationNs, later

RELEASE_NS = DurationNs(2 * NS_PER_S)
"""How long it takes to give a group back: its processes end, its node is free."""
_LOADED = frozenset({stages.Stage.WARM, stages.UNATTRIBUTED, stages.Stage.REGISTER})


class Start(Struct, frozen=True, kw_only=True):
    """How groups of a pool come up."""

    cold: Stages
    waking: Stages
    """The same for one that is woken."""
    ranks: int
    success_ppm: int = MICRO
    """Share of starts that are not refused."""


class _Held:
    """One group, from when it is asked for until nothing of it is left."""

    def __init__(self, name: ReplicaName, pool: PoolName, start: Start, *, standby: bool) -> None:
        self.name, self.pool, self.start, self.standby = name, pool, start, standby
        self.stage, self.placed = Stage.ASKED, False
        self.plan: list[tuple[str, int]] = []
        """What is left of its start: (stage, ns), in order."""
        self.timer: Timer | None = None


class EmulatedActuator:
    """Groups of pools whose replicas are emulated in this process."""

    def __init__(self, clock: Clock, pools: Mapping[PoolName, Start], seed: int = 0) -> None:
        """Provide none yet."""
        self._clock, self.pools, self._seed = clock, pools, seed
        self._held: dict[ReplicaName, _Held] = {}
        self._listener: Listener = lambda _: None

    def connect(self, listener: Listener) -> None:
        """Say who listens."""
        self._listener = listener

    def start(self, name: ReplicaName, pool: PoolName, *, standby: bool = False) -> None:
        """Begin a start, as it is drawn."""
        assert name not in self._held, f"{name} is there"
        held = self._held[name] = _Held(name, pool, self.pools[pool], standby=standby)
        held.plan = self._drawn(held, held.start.cold)
        self._tell(held, Stage.ASKED, held.plan[0][0])
        self._next(held)

    def wake(self, name: ReplicaName) -> None:
        """Have a standby group serve, asleep or on its way there."""
        held = self._held.get(name)
        if held is None or not held.standby or held.stage is Stage.STOPPING:
            return
        held.standby = False
        if held.stage is Stage.ASLEEP:
            held.plan = self._drawn(held, held.start.waking)
            self._tell(held, Stage.LOADED, held.plan[0][0])
            self._next(held)

    def stop(self, name: ReplicaName) -> None:
        """Give a group back."""
        held = self._held.get(name)
        if held is None or held.stage is Stage.STOPPING:
            return
        self._tell(held, Stage.STOPPING)
        self._after(held, RELEASE_NS, partial(self._over, held, Stage.STOPPED))

    def groups(self) -> tuple[Group, ...]:
        """Return what is there."""
        return tuple(
            Group(
                name=held.name,
                pool=held.pool,
                stage=held.stage,
                url="",
                kind=EngineKind.EMULATED,
                ranks=held.start.ranks,
                running=held.start.ranks if held.placed else 0,
            )
            for held in self._held.values()
        )

    # The way up -------------------------------------------------------------------------------

    def _next(self, held: _Held) -> None:
        self._after(held, DurationNs(held.plan[0][1]), partial(self._passed, held))

    def _passed(self, held: _Held) -> None:
        """A stage of a start is over."""
        name, _ = held.plan.pop(0)
        if name == stages.Stage.PROVISION:
            chance = self._random(held, "fate").randrange(MICRO)
            if chance >= held.start.success_ppm:
                self._over(held, Stage.REFUSED, "nothing free")
                return
            held.placed = True
        if held.standby and held.plan and held.plan[0][0] == stages.Stage.REGISTER:
            self._tell(held, Stage.ASLEEP)
        elif held.plan:
            step = held.plan[0][0]
            self._tell(held, Stage.LOADED if step in _LOADED else Stage.PLACED, step)
            self._next(held)
        else:
            self._tell(held, Stage.READY)

    def _over(self, held: _Held, stage: Stage, why: str = "") -> None:
        del self._held[held.name]
        self._tell(held, stage, why=why)

    def _drawn(self, held: _Held, plan: Stages) -> list[tuple[str, int]]:
        rng = self._random(held, "start" if plan is held.start.cold else "wake")
        return [(str(stage), spread.at(rng.randrange(MICRO))) for stage, spread in plan]

    def _random(self, held: _Held, what: str) -> Random:
        return Random(f"{self._seed}/{what}/{held.name}")  # noqa: S311 - seeded, no secret

    def _after(self, held: _Held, wait: DurationNs, call: partial[None]) -> None:
        if held.timer is not None:
            held.timer.cancel()
        held.timer = self._clock.call_at(later(self._clock.now(), wait), call)

    def _tell(self, held: _Held, stage: Stage, step: str = "", why: str = "") -> None:
        held.stage = stage
        now = self._clock.now()
        self._listener(GroupEvent(group=held.name, life=1, stage=stage, at=now, why=why, step=step))
