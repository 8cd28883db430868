"""Provides groups that are emulated: their starts take as long as was measured, drawn for each anew.

Every draw depends on the seed, the group's name and nothing else. They live in this process and end
with it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from msgspec import Struct

from headrace.model import stages
from headrace.model.engine import EngineKind
from headrace.model.group import LIVES, Domain, Place, emptiest, place_in
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
    domains: tuple[str, ...] = ()
    """Where groups may be placed, as `Place.within` has it; empty: each is somewhere of its own."""
    domain: Domain = Domain.NODE
    """What kind of domains those are."""


class Way(Struct, frozen=True, kw_only=True):
    """How one start goes, if not as it should."""

    plan: tuple[tuple[str, int], ...]
    """(stage, ns) of its start, in order. Empty: it stays as it is."""
    running: int | None = None
    """Ranks that are placed; None: all of them. Fewer, and it goes no further."""
    end: Stage | None = Stage.READY
    """What it comes to after the last stage of the plan; None: to nothing, and nobody is told."""


Bend = Callable[[ReplicaName, int, Way], Way]
"""Says how a start goes: of which group, in which of its lives, and how it would go."""


class _Held:
    """One group, from when it is asked for until nothing of it is left."""

    def __init__(self, name: ReplicaName, pool: PoolName, start: Start, *, standby: bool) -> None:
        self.name, self.pool, self.start, self.standby = name, pool, start, standby
        self.stage, self.step, self.life, self.running = Stage.ASKED, "", 1, 0
        self.place = Place(node=name)
        self.way = Way(plan=())
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
        self.bend: Bend = lambda _name, _life, way: way
        """What goes wrong with starts, for whoever tries that on purpose."""
        self._shut: list[tuple[Domain, str]] = []

    def connect(self, listener: Listener) -> None:
        """Say who listens."""
        self._listener = listener

    def start(self, name: ReplicaName, pool: PoolName, *, standby: bool = False) -> None:
        """Begin a start, as it is drawn."""
        held = self._new(name, pool, standby=standby)
        self._begin(held)
        self._tell(held, Stage.ASKED, str(stages.Stage.PROVISION))
        self._next(held)

    def own(self, name: ReplicaName, pool: PoolName) -> None:
        """Have a group that was there before anybody asked, and serves."""
        held = self._new(name, pool, standby=False)
        held.running = held.start.ranks
        self._tell(held, Stage.READY)

    def lose(
        self, name: ReplicaName, why: str, *, again: bool, left: int = 0, way: Way | None = None
    ) -> None:
        """Some ranks of a group are gone, and `left` are held; `again`: it is started anew.

        That goes as `way` says, by default as any start, and a group that was lost too often is given up.
        """
        held = self._held.get(name)
        if held is None:
            return
        _quiet(held)
        if held.stage is Stage.STOPPING:
            self._over(held, Stage.STOPPED)
        elif not again or (held.life >= LIVES and way is None):
            self._over(held, Stage.GIVEN_UP, why)
        else:
            held.running = left
            self._tell(held, Stage.LOST, why=why)
            held.life += 1
            self._begin(held, way)
            self._tell(held, Stage.ASKED, str(stages.Stage.PROVISION))
            self._next(held)

    def usual(self, name: ReplicaName) -> Way:
        """Return how a start of a group goes in its present life, if nothing bends it."""
        held = self._held[name]
        return Way(plan=self._drawn(held, held.start.cold))

    def shut(self, kind: Domain, name: str) -> None:
        """Place nothing in a domain; what was to have its place there goes elsewhere, if there is one."""
        self._shut.append((kind, name))
        for held in self._held.values():
            if not held.running:
                held.place = self._place(held)

    def reopen(self, kind: Domain, name: str) -> None:
        """Place groups in a domain again."""
        self._shut.remove((kind, name))

    def wake(self, name: ReplicaName) -> None:
        """Have a standby group serve, asleep or on its way there."""
        held = self._held.get(name)
        if held is None or not held.standby or held.stage is Stage.STOPPING:
            return
        held.standby = False
        if held.stage is Stage.ASLEEP:
            held.way = Way(plan=self._drawn(held, held.start.waking))
            held.plan = list(held.way.plan)
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
                life=held.life,
                step=held.step,
                url="",
                kind=EngineKind.EMULATED,
                ranks=held.start.ranks,
                running=held.running,
                places=(held.place,) if held.running else (),
            )
            for held in self._held.values()
        )

    # The way up -------------------------------------------------------------------------------

    def _new(self, name: ReplicaName, pool: PoolName, *, standby: bool) -> _Held:
        assert name not in self._held, f"{name} is there"
        held = _Held(name, pool, self.pools[pool], standby=standby)
        held.place = self._place(held)
        self._held[name] = held
        return held

    def _place(self, held: _Held) -> Place:
        """Return where a group goes: into the open domain that has the fewest, on nodes of its own."""
        kind = held.start.domain
        places = [place_in(one, kind, held.name) for one in held.start.domains]
        others = (one for one in self._held.values() if one is not held and one.pool == held.pool)
        return emptiest(
            [one for one in places if not self._is_shut(one)] or places or [held.place],
            kind,
            [one.place for one in others],
        )

    def _is_shut(self, place: Place) -> bool:
        return any(place.within(kind) == name for kind, name in self._shut)

    def _begin(self, held: _Held, way: Way | None = None) -> None:
        """Draw how a start goes, unless that is known."""
        if not held.running and self._is_shut(held.place):
            held.place = self._place(held)
        if way is None:
            way = self.bend(held.name, held.life, self.usual(held.name))
        held.way, held.plan = way, list(way.plan)

    def _next(self, held: _Held) -> None:
        if held.plan:
            self._after(held, DurationNs(held.plan[0][1]), partial(self._passed, held))

    def _passed(self, held: _Held) -> None:
        """A stage of a start is over."""
        name, _ = held.plan.pop(0)
        ranks = held.start.ranks
        if name == stages.Stage.PROVISION:
            chance = self._random(held, "fate").randrange(MICRO)
            if chance >= held.start.success_ppm or self._is_shut(held.place):
                self._over(held, Stage.REFUSED, "nothing free")
                return
            if held.plan or held.way.end is Stage.READY:
                held.running = ranks if held.way.running is None else held.way.running
        if 0 < held.running < ranks:
            self._tell(held, Stage.ASKED, str(stages.Stage.PROVISION))  # it waits for the others
        elif held.standby and held.plan and held.plan[0][0] == stages.Stage.REGISTER:
            self._tell(held, Stage.ASLEEP)
        elif held.plan:
            step = held.plan[0][0]
            self._tell(held, Stage.LOADED if step in _LOADED else Stage.PLACED, step)
            self._next(held)
        else:
            self._end(held)

    def _end(self, held: _Held) -> None:
        """The plan of a start is over."""
        match held.way.end:
            case Stage.READY:
                self._tell(held, Stage.READY)
            case Stage.LOST:
                self.lose(held.name, "a rank went as it started", again=True)
            case Stage.REFUSED:
                self._over(held, Stage.REFUSED, "nothing free")
            case _:
                pass

    def _over(self, held: _Held, stage: Stage, why: str = "") -> None:
        _quiet(held)
        held.running = 0
        del self._held[held.name]
        self._tell(held, stage, why=why)

    def _drawn(self, held: _Held, plan: Stages) -> tuple[tuple[str, int], ...]:
        rng = self._random(held, "start" if plan is held.start.cold else "wake")
        return tuple((str(stage), spread.at(rng.randrange(MICRO))) for stage, spread in plan)

    def _random(self, held: _Held, what: str) -> Random:
        nth = "" if held.life == 1 else f"/{held.life}"
        return Random(f"{self._seed}/{what}/{held.name}{nth}")  # noqa: S311 - seeded, no secret

    def _after(self, held: _Held, wait: DurationNs, call: partial[None]) -> None:
        _quiet(held)
        held.timer = self._clock.call_at(later(self._clock.now(), wait), call)

    def _tell(self, held: _Held, stage: Stage, step: str = "", why: str = "") -> None:
        held.stage, held.step = stage, step
        self._listener(
            GroupEvent(
                group=held.name,
                life=held.life,
                stage=stage,
                at=self._clock.now(),
                why=why,
                step=step,
            )
        )


def _quiet(held: _Held) -> None:
    """Let nothing that was planned for a group come."""
    if held.timer is not None:
        held.timer.cancel()
        held.timer = None
