"""What must hold of groups: the plane's books against what the provider really has. Numbers as in docs/invariants.md."""

from collections.abc import Sequence

from headrace.model.effect import Effect, StopGroup
from headrace.model.group import Life
from headrace.model.ids import PoolName, ReplicaName
from headrace.plane.scale_state import PoolScale
from headrace.sim.books import hold
from headrace.sim.world import World


def groups_match(world: World) -> None:
    """INV-14: the plane knows exactly the groups that there are, and what each holds: none is leaked."""
    if not world.listed:
        return  # a driver that has just come back tells next what there is
    state, real = world.plane.state, world.provider.groups
    told: dict[ReplicaName, int] = {}
    for books in state.pools.values():
        told |= {group.name: group.gpus for group in books.groups.values() if group.told}
    there = {name: group.gpus for name, group in real.items()}
    hold(world, "INV-14", told == there, f"{told=} {there=}")
    leaving = {
        name: pool
        for pool, books in state.pools.items()
        for name, group in books.groups.items()
        if group.life is Life.DRAINING and group.drain_by is not None
    }
    hold(world, "INV-14", leaving == state.leaving, f"{leaving=} {state.leaving=}")


def capacity_is_whole(world: World) -> None:
    """INV-15: requests are only taken by groups that are wanted and have all of their ranks."""
    state = world.plane.state
    for known in state.models.values():
        for replica in known.fleet.replicas.values():
            books = state.pools.get(replica.pool)
            group = None if books is None else books.groups.get(replica.name)
            if group is None or replica.draining:
                continue
            hold(world, "INV-15", group.life is Life.WANTED, f"{group.name} is {group.life}")
            real = world.provider.groups.get(replica.name)
            if real is not None and real.ready:
                whole = real.gpus == real.whole
                hold(world, "INV-15", whole, f"{real.name} serves on {real.gpus} of {real.whole}")


def pools_keep_their_limits(world: World, first: dict[PoolName, int]) -> None:
    """INV-16: no pool has more groups wanted than its maximum, nor holds more GPUs than it may.

    `first`: groups that were there before anybody decided. A driver that came back may find groups that it
    asked for twice; they go again. So do those that somebody else began.
    """
    if world.epoch:
        return
    for name, facts in world.plane.settings.scaled.items():
        books = world.plane.state.pools[name]
        foreign = sum(one in world.provider.foreign for one in books.groups)
        most = max(facts.settings.ceiling(facts.gpus), first.get(name, 0)) + foreign
        wanted = _wanted(books)
        hold(world, "INV-16", wanted <= most, f"{name}: {wanted} groups, at most {most}")
        limit = facts.settings.max_gpus
        if limit is not None:
            held = sum(group.gpus for group in books.groups.values())
            limit = max(limit, first.get(name, 0) * facts.gpus) + foreign * facts.gpus
            hold(world, "INV-16", held <= limit, f"{name}: {held} GPUs held, at most {limit}")


def _wanted(books: PoolScale) -> int:
    return sum(group.life is Life.WANTED for group in books.groups.values())


def drains_are_kept(world: World, effects: Sequence[Effect]) -> None:
    """INV-17: a drain ends nothing that runs before its time is over."""
    for effect in effects:
        if not isinstance(effect, StopGroup):
            continue
        books = world.plane.state.pools.get(effect.pool)
        group = None if books is None else books.groups.get(effect.group)
        if group is None or group.drain_by is None or world.now >= group.drain_by:
            continue
        at = world.engines.at(effect.group)
        engine = None if at is None else world.nodes[at].engine
        life = None if engine is None else engine.incarnation
        running = [a for a, where in world.engines.attempts.items() if where == life]
        hold(world, "INV-17", not running, f"{effect.group} is stopped with {running} on it")
