"""An emulated provider of groups: asked, it places, starts, loses and gives back, as was drawn.

It knows what really is there; the plane knows what it was told. Every draw depends on the seed, the
group's name and its life alone. A group holds its GPUs from when they are placed until they are given
back, ready or not, and that is what is paid for.
"""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.deployment import PoolSpec
from headrace.model.effect import (
    AskGroup,
    DrainGroup,
    Effect,
    RecallGroup,
    StopGroup,
    WakeGroup,
)
from headrace.model.event import Event, GroupTold
from headrace.model.group import LIVES, Domain, GroupStep, Place, emptiest, fullest, place_in
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.scaling_spec import Scaling
from headrace.model.stages import Stage, Stages, shipped
from headrace.policy.catalog import PlaneConfig
from headrace.sim.agenda import Agenda, Kind
from headrace.sim.draws import Fate, begun, doomed
from headrace.sim.scenario import Scenario
from headrace.trace.streams import stream
from headrace.units import MICRO, NS_PER_S, InstantNs, later

RELEASE_NS = 2 * NS_PER_S
"""How long it takes to give a group back: what is left is flushed, its processes end."""


class Provided(Struct):
    """One group as it really is."""

    name: ReplicaName
    pool: PoolName
    entity: int
    whole: int
    """GPUs it needs."""
    per_node: int
    """Of these, the most on one node."""
    place: Place
    standby: bool = False
    life: int = 1
    fate: Fate = Fate.WELL
    plan: tuple[tuple[str, int], ...] = ()
    """(stage, ns) of its start, in order."""
    at: int = 0
    """Which of them it is in; as many as there are: it has been through all."""
    gpus: int = 0
    asleep: bool = False
    ready: bool = False
    stopping: bool = False
    changed: InstantNs = InstantNs(0)
    """Up to when the GPUs it held are counted."""

    @property
    def stage(self) -> str | None:
        """The stage of its start that it is in."""
        return self.plan[self.at][0] if self.at < len(self.plan) else None


class Provider:
    """All groups of a run's pools that scale."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        agenda: Agenda[object],
        tell: Callable[[Event], None],
        draining: set[ReplicaName],
    ) -> None:
        """Provide nothing yet; `tell` is told what happens to each group, `draining` has those to go."""
        self._scenario, self._seed, self._agenda, self._tell = scenario, seed, agenda, tell
        self._draining = draining
        self.groups: dict[ReplicaName, Provided] = {}
        """Those of which anything is there, or that were asked for."""
        self.gpu_ns: dict[PoolName, int] = {}
        """GPU time that was held, by pool."""
        self.asked: dict[PoolName, int] = {}
        self.rose: dict[PoolName, int] = {}
        """Starts that ended ready."""
        self.foreign: set[ReplicaName] = set()
        """Groups that somebody else began."""
        self.recompiles = False
        """Whether starts find no compiled kernels."""
        self._closed: list[tuple[Domain, str]] = []
        """Domains in which nothing is placed."""
        self._made = 0
        self.on_up: Callable[[Provided], None] = lambda _: None
        """Called when a group begins to serve."""
        self.on_down: Callable[[Provided], None] = lambda _: None
        """Called when one that serves is stopped."""

    # Wanted ----------------------------------------------------------------------------------

    def carry_out(self, effect: Effect, now: InstantNs) -> None:
        """Do what the plane wants of groups; whatever else it wants is not for here."""
        match effect:
            case AskGroup():
                self.ask(effect.group, effect.pool, now, standby=effect.standby)
            case WakeGroup():
                self.wake(effect.group, now)
            case DrainGroup():
                self._draining.add(effect.group)
            case RecallGroup():
                self._draining.discard(effect.group)
            case StopGroup():
                self._draining.add(effect.group)
                self.stop(effect.group, now)
            case _:
                pass

    def own(self, name: ReplicaName, pool: PoolName, now: InstantNs) -> None:
        """Have a group that was there before the run began, and is about to serve."""
        group = self._new(name, pool, now)
        self._hold(group, group.whole, now)
        group.ready = True
        self._say(group, GroupStep.READY)

    def ask(self, name: ReplicaName, pool: PoolName, now: InstantNs, *, standby: bool) -> None:
        """Start a group."""
        group = self._new(name, pool, now)
        group.standby = standby
        self.asked[pool] = self.asked.get(pool, 0) + 1
        self._begin(group, now)

    def wake(self, name: ReplicaName, now: InstantNs) -> None:
        """Have a sleeper serve, or one that was to become one."""
        group = self.groups.get(name)
        if group is None or group.stopping or group.ready:
            return
        group.standby = False
        if group.asleep:
            group.asleep = False
            group.plan, group.at = self._drawn(group, self._stages(group.pool, waking=True)), 0
            self._next(group, now)

    def stop(self, name: ReplicaName, now: InstantNs) -> None:
        """Give a group back; one that is going already goes on doing so."""
        group = self.groups.get(name)
        if group is not None and not group.stopping:
            group.stopping = True
            self._plan(group, now, "stop")

    def lost(self, name: ReplicaName, now: InstantNs, *, again: bool, taken: bool = False) -> None:
        """All ranks of a group are gone; `again`: it is started anew; `taken`: somebody took it away."""
        group = self.groups.get(name)
        if group is None:
            return
        if taken:
            self._over(group, GroupStep.STOPPED, now)
            return
        if group.stopping or not again or group.life >= LIVES:
            self._over(group, GroupStep.STOPPED if group.stopping else GroupStep.GIVEN_UP, now)
            return
        self._hold(group, 0, now)
        group.ready = group.asleep = False
        group.life += 1
        self._begin(group, now)
        self._say(group, GroupStep.LOST)

    def hurt(
        self, name: ReplicaName, now: InstantNs, *, ranks: int, back: int | None, taken: bool
    ) -> None:
        """Some ranks of a group have lost their GPUs, or one is broken: it serves nothing.

        `back`: after how long they have GPUs again, and it starts anew; without, the others are held until
        somebody gives it back. All of them: it is over. `taken`: somebody took it away.
        """
        group = self.groups.get(name)
        if group is None or group.stopping or taken or ranks >= group.whole:
            self.lost(name, now, again=False, taken=taken)
            return
        if not group.gpus:
            return  # nothing of it was placed
        self._hold(group, max(0, group.gpus - ranks), now)
        group.ready = group.asleep = False
        group.life += 1
        group.fate = Fate.WELL if back is not None else Fate.NEVER
        rest = self._drawn(group, self._stages(group.pool))[1:]
        group.plan, group.at = ((str(Stage.PROVISION), back or 0), *rest), 0
        if back is not None:
            self._next(group, now)
        self._say(group, GroupStep.LOST)

    def renew(self, name: ReplicaName, now: InstantNs) -> None:
        """Restart a group that serves, on the GPUs that it has."""
        group = self.groups[name]
        self.on_down(group)
        group.ready = False
        group.life += 1
        group.fate = Fate.WELL
        group.plan, group.at = self._drawn(group, self._stages(group.pool)), 1
        self._next(group, now)
        self._say(group, GroupStep.COMING)

    def canary(self, now: InstantNs, *, correct: bool) -> ReplicaName:
        """Start a group that nobody here was asked for, in the first pool that scales."""
        pools = self._scenario.deployment.pools
        pool = PoolName(next(one.name for one in pools if one.scaling is not None))
        name = ReplicaName(f"{pool}-canary.{len(self.foreign) + 1}")
        self.foreign.add(name)
        group = self._new(name, pool, now)
        group.fate = Fate.WELL if correct else Fate.WRONG
        group.plan, group.at = self._drawn(group, self._stages(pool)), 0
        self._next(group, now)
        self._say(group, GroupStep.COMING)
        return name

    # Where ------------------------------------------------------------------------------------

    def serving(self) -> tuple[ReplicaName, ...]:
        """Return the groups that are ready and are not to go, the oldest first."""
        ready = (name for name, one in self.groups.items() if one.ready)
        return tuple(name for name in ready if name not in self._draining)

    def within(self, kind: Domain, name: str) -> tuple[Provided, ...]:
        """Return the groups that have, or were to have, their place in a domain."""
        return tuple(one for one in self.groups.values() if one.place.within(kind) == name)

    def fullest(self, kind: Domain) -> str | None:
        """Return the domain that has the most groups, the first by name; None: there are no groups."""
        return fullest((one.place for one in self.groups.values() if one.gpus), kind)

    def shut(self, kind: Domain, name: str) -> None:
        """Place nothing in a domain; what had its place there and holds nothing yet goes elsewhere."""
        self._closed.append((kind, name))
        for group in self.within(kind, name):
            if not group.gpus:
                self._move(group)

    def reopen(self, kind: Domain, name: str) -> None:
        """Place groups in a domain again."""
        self._closed.remove((kind, name))

    def _is_shut(self, place: Place) -> bool:
        return any(place.within(kind) == name for kind, name in self._closed)

    def _move(self, group: Provided) -> None:
        spec = by_name(self._scenario.deployment, group.pool)
        assert spec.scaling is not None, f"{group.pool} does not scale"
        group.place = self._place(group.name, group.pool, spec.scaling)

    def listing(self) -> tuple[GroupTold, ...]:
        """Return all that there is, as it would be told now."""
        return tuple(self._told(group, _step_of(group)) for group in self.groups.values())

    def close(self, now: InstantNs) -> None:
        """Count what is held up to now."""
        for group in self.groups.values():
            self._hold(group, group.gpus, now)

    # Steps -----------------------------------------------------------------------------------

    def advance(self, event: object, now: InstantNs) -> None:
        """Do what was planned for now, if it is still so."""
        assert isinstance(event, tuple), f"{event} was not planned here"
        name, life, what, nth = event
        group = self.groups.get(name)
        if group is None:
            return
        if what == "stop":
            self._going(group, now)
        elif what == "stopped":
            self._over(group, GroupStep.STOPPED, now)
        elif life == group.life and nth == group.at and not group.stopping:
            self._passed(group, now)

    def _going(self, group: Provided, now: InstantNs) -> None:
        if group.ready:
            group.ready = False
            self.on_down(group)
        if not group.gpus:
            self._over(group, GroupStep.STOPPED, now)
            return
        self._say(group, GroupStep.STOPPING)
        self._plan(group, later(now, RELEASE_NS), "stopped")

    def _passed(self, group: Provided, now: InstantNs) -> None:
        """A stage is over, or will never be."""
        if group.stage == Stage.PROVISION and not self._placed(group, now):
            return
        if group.stage == Stage.REGISTER and group.fate is Fate.WRONG:
            return
        if group.fate is Fate.LOST and group.at == doomed(group.name, len(group.plan)):
            self.lost(group.name, now, again=True)
            return
        group.at += 1
        if group.standby and group.stage == Stage.REGISTER:
            group.asleep = True
            self._say(group, GroupStep.ASLEEP)
        elif group.stage is not None:
            self._next(group, now)
            self._say(group, GroupStep.COMING)
        else:
            group.ready = True
            self.rose[group.pool] = self.rose.get(group.pool, 0) + 1
            self._say(group, GroupStep.READY)
            if group.ready:  # nobody wants it stopped at this instant
                self.on_up(group)

    def _placed(self, group: Provided, now: InstantNs) -> bool:
        """Place a group's ranks; return whether all of them are."""
        fate = Fate.REFUSED if self._is_shut(group.place) else group.fate
        match fate:
            case Fate.REFUSED:
                self._over(group, GroupStep.REFUSED, now)
                return False
            case Fate.NEVER:
                return False
            case Fate.PARTIAL:
                self._hold(group, group.whole // 2, now)
                self._say(group, GroupStep.COMING)
                return False
            case _:
                self._hold(group, group.whole, now)
                return True

    def _new(self, name: ReplicaName, pool: PoolName, now: InstantNs) -> Provided:
        assert name not in self.groups, f"{name} is there already"
        self._made += 1
        spec = by_name(self._scenario.deployment, pool)
        assert spec.scaling is not None, f"{pool} does not scale"
        shape = spec.scaling.group_shape(spec.profile.hardware)
        group = self.groups[name] = Provided(
            name=name,
            pool=pool,
            entity=self._made,
            whole=shape.gpus,
            per_node=min(shape.gpus, shape.ranks_per_node // shape.tp * shape.tp),
            place=self._place(name, pool, spec.scaling),
            changed=now,
        )
        return group

    def _place(self, name: ReplicaName, pool: PoolName, settings: Scaling) -> Place:
        """Return where a group goes: into the domain that has the fewest, on nodes of its own."""
        mine = [one.place for one in self.groups.values() if one.pool == pool]
        kind = settings.reserve_domain
        open_to = [place_in(each, kind, name) for each in settings.domains] or [Place(node=name)]
        # If all are shut it has its place in one, and gets nothing there.
        return emptiest([one for one in open_to if not self._is_shut(one)] or open_to, kind, mine)

    def _begin(self, group: Provided, now: InstantNs) -> None:
        """Draw how a start goes, and begin it."""
        if self._is_shut(group.place):
            self._move(group)
        rng = stream(self._seed, "fate", group.name, group.life)
        plan = self._drawn(group, self._stages(group.pool))
        group.fate, group.plan = begun(self._scenario.faults, rng, plan)
        group.at = 0
        self._next(group, now)

    def _drawn(self, group: Provided, stages: Stages) -> tuple[tuple[str, int], ...]:
        rng = stream(self._seed, "start", group.name, group.life)
        return tuple((str(stage), spread.at(rng.randrange(MICRO))) for stage, spread in stages)

    def _stages(self, pool: PoolName, *, waking: bool = False) -> Stages:
        """Return how long the stages of a start really take."""
        spec = by_name(self._scenario.deployment, pool)
        assert spec.scaling is not None, f"{pool} does not scale"
        times = self._scenario.starts or spec.scaling.times or shipped(spec.profile.hardware)
        options = spec.scaling.start
        if self.recompiles:
            options = replace(options, compile_cache=False)
        return times.waking() if waking else times.stages(options)

    def _next(self, group: Provided, now: InstantNs) -> None:
        """Plan the end of the stage that a group is in."""
        self._plan(group, later(now, group.plan[group.at][1]), "passed")

    def _plan(self, group: Provided, at: InstantNs, what: str) -> None:
        planned = (group.name, group.life, what, group.at)
        self._agenda.push(at, Kind.GROUP, group.entity, planned)

    def _hold(self, group: Provided, gpus: int, now: InstantNs) -> None:
        held = group.gpus * (now - group.changed)
        self.gpu_ns[group.pool] = self.gpu_ns.get(group.pool, 0) + held
        group.gpus, group.changed = gpus, now

    def _over(self, group: Provided, step: GroupStep, now: InstantNs) -> None:
        self._hold(group, 0, now)
        del self.groups[group.name]
        self._say(group, step)

    def _say(self, group: Provided, step: GroupStep) -> None:
        self._tell(self._told(group, step))

    def _told(self, group: Provided, step: GroupStep) -> GroupTold:
        places = (group.place,) if group.gpus else ()
        return GroupTold(
            group=group.name,
            pool=group.pool,
            step=step,
            gpus=group.gpus,
            stage=group.stage,
            places=places,
        )


def by_name(deployment: PlaneConfig, pool: PoolName) -> PoolSpec:
    """Return a pool of a deployment."""
    return next(one for one in deployment.pools if one.name == pool)


def _step_of(group: Provided) -> GroupStep:
    if group.stopping:
        return GroupStep.STOPPING
    if group.asleep:
        return GroupStep.ASLEEP
    return GroupStep.READY if group.ready else GroupStep.COMING
