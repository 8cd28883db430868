"""What becomes of the groups of pools that scale: told of, closed to requests, drained, given back.

What is wanted of a group is decided elsewhere (`scaler`) and kept here. A group serves while a replica of
its name takes requests, and that is open if the group is wanted and has all of its ranks, else closed:
one rule for drains, for drains called off and for groups that lack ranks.
"""

from headrace.model.decision import Reason
from headrace.model.effect import DrainGroup, RecallGroup, StopGroup, WakeGroup
from headrace.model.event import GroupsListed, GroupTold
from headrace.model.group import GROUP_OVER, Ail, GroupStep, Life
from headrace.model.ids import ModelName, PoolName, ReplicaName
from headrace.model.scaling import Standing
from headrace.model.stages import Stage
from headrace.plane import dispatch
from headrace.plane.fleet import Replica
from headrace.plane.machine import Machine
from headrace.plane.scale_state import ASLEEP, SERVES, Group, PoolScale, ScaledPool
from headrace.plane.state import ModelState
from headrace.units import InstantNs, later, seconds


def replica_of(known: ModelState, group: Group) -> Replica | None:
    """Return the replica that a group is, if it is up."""
    replica = known.fleet.replicas.get(group.name)
    return replica if replica is not None and replica.pool == group.pool else None


def standing(known: ModelState, group: Group) -> Standing:
    """Return how a group stands."""
    match group.life:
        case Life.WANTED:
            replica = replica_of(known, group)
            serves = replica is not None and not replica.draining
            return Standing.READY if serves else Standing.COMING
        case Life.STANDBY:
            return Standing.STANDBY
        case Life.DRAINING if group.drain_by is not None:
            return Standing.DRAINING
        case _:
            return Standing.STOPPING


# Told ----------------------------------------------------------------------------------------


def told(m: Machine, event: GroupTold, now: InstantNs) -> None:
    """Keep what was heard of a group; one that nobody here asked for is taken over."""
    facts, books = m.settings.scaled.get(event.pool), m.state.pools.get(event.pool)
    if books is None:
        m.ignore("group")
        return
    group = books.groups.get(event.group)
    if event.step in GROUP_OVER:
        if group is None:
            m.ignore("group")
            return
        if group.life is not Life.STOPPING and group.stage != SERVES:
            books.failed += 1
        _over(m, books, group, now)
        return
    if group is None:
        if facts is None or event.step is GroupStep.STOPPING:
            m.ignore("group")  # nobody here wants it, or it goes anyway
            return
        group = _adopt(books, event.group, event.pool, event.gpus, now)
        if event.step is GroupStep.ASLEEP:
            group.life, group.stage = Life.STANDBY, ASLEEP
        elif event.step is GroupStep.READY:
            group.stage = SERVES
    group.told = True
    _hold(event, group, facts, now)
    _step(books, event, group, now)
    settle_place(m, event.pool, group, now)


def _hold(event: GroupTold, group: Group, facts: ScaledPool | None, now: InstantNs) -> None:
    """Keep what it holds, where, what is amiss, and since when it has lacked ranks, or one that is well."""
    group.gpus = event.gpus
    if event.step is GroupStep.LOST:
        group.ails, group.told_ppm = (), None
    if event.ails is not None:
        group.ails, group.told_ppm = event.ails, event.does_ppm
    if facts is None:
        return
    if event.gpus >= facts.gpus and Ail.BAD_RANK not in group.ails:
        group.short_since = None
    elif group.short_since is None:
        group.short_since = now
    if event.places:
        kind = facts.settings.reserve_domain
        group.domain = min(place.within(kind) for place in event.places)


def _step(books: PoolScale, event: GroupTold, group: Group, now: InstantNs) -> None:
    if event.step is GroupStep.STOPPING:
        group.life = Life.STOPPING
    elif event.step is GroupStep.LOST:
        books.failed += group.stage != SERVES
        group.stage, group.stage_at, group.woken = Stage.PROVISION, now, False
    elif event.step is GroupStep.ASLEEP:
        books.risen += group.stage != ASLEEP
        group.stage, group.stage_at = ASLEEP, now
    elif event.stage is not None and event.stage != group.stage:
        group.stage, group.stage_at = event.stage, now
    elif event.step is GroupStep.READY and group.stage != SERVES:
        books.risen += not group.woken


def _adopt(books: PoolScale, name: ReplicaName, pool: PoolName, gpus: int, now: InstantNs) -> Group:
    """Take over a group that somebody else started: it is wanted as if it had been asked for."""
    group = Group(name=name, pool=pool, life=Life.WANTED, since=now, gpus=gpus, stage_at=now)
    books.groups[name] = group
    return group


def listed(m: Machine, event: GroupsListed, now: InstantNs) -> None:
    """Hold the books against all that there is: what is not there is over, what was to go still is."""
    there = {one.group for one in event.groups}
    for books in list(m.state.pools.values()):
        for name in [name for name, one in books.groups.items() if one.told and name not in there]:
            _over(m, books, books.groups[name], now)
    for one in event.groups:
        told(m, one, now)
    for pool, books in m.state.pools.items():
        for group in books.groups.values():
            if group.life is Life.STOPPING and group.told:  # whether anybody was told is not known
                m.out.append(StopGroup(group=group.name, pool=pool))


def _over(m: Machine, books: PoolScale, group: Group, now: InstantNs) -> None:
    """Forget a group; if its replica seems to be up, only once it is known to be down, and closed till then."""
    facts = m.settings.scaled.get(group.pool)
    up = facts is not None and replica_of(m.state.models[facts.model], group) is not None
    if not up:
        _forget(m, group.pool, books, group.name)
        return
    m.state.leaving.pop(group.name, None)
    group.told, group.life, group.since, group.gpus = False, Life.STOPPING, now, 0
    settle_place(m, group.pool, group, now)


def _forget(m: Machine, pool: PoolName, books: PoolScale, name: ReplicaName) -> None:
    del books.groups[name]
    m.state.leaving.pop(name, None)
    if not books.groups and books.next_at is None:
        del m.state.pools[pool]


def take_over(m: Machine, pool: PoolName, replica: Replica, now: InstantNs) -> None:
    """Count a replica that serves, or did until somebody closed it, as a group of its pool."""
    gpus = m.settings.scaled[pool].gpus
    group = _adopt(m.state.pools[pool], replica.name, pool, gpus, now)
    group.told, group.stage = False, SERVES
    if replica.draining:
        group.life = Life.DRAINING


def release(m: Machine, pool: PoolName, group: Group) -> None:
    """Keep what serves, as a replica like any other: its pool has a fixed number of them now."""
    if group.drain_by is not None:
        group.life = Life.WANTED
        _open_or_close(m, ModelName(m.settings.pools[pool].spec.model), group)
    _forget(m, pool, m.state.pools[pool], group.name)


# Its replica ---------------------------------------------------------------------------------


def risen(m: Machine, pool: PoolName, replica: Replica, now: InstantNs) -> None:
    """A group's replica is up: it serves from now on, unless it is to go or lacks ranks."""
    facts, books = m.settings.scaled.get(pool), m.state.pools.get(pool)
    if books is None or facts is None:
        return
    group = books.groups.get(replica.name)
    if group is None:
        group = _adopt(books, replica.name, pool, facts.gpus, now)
        group.told = False
    group.stage, group.stage_at, group.woken = SERVES, now, False
    if group.life is Life.WANTED:
        group.since = now
    elif group.life is Life.STANDBY or (group.life is Life.DRAINING and group.drain_by is None):
        # It was woken before a restart, or whoever took it away has thought better of it.
        group.life, group.since = Life.WANTED, now
    _open_or_close(m, facts.model, group)


def fallen(m: Machine, pool: PoolName, name: ReplicaName, now: InstantNs) -> None:
    """A group's replica is gone, and the group perhaps not: whoever has it tells."""
    books = m.state.pools.get(pool)
    group = None if books is None else books.groups.get(name)
    if books is None or group is None:
        return
    if not group.told:
        _forget(m, pool, books, name)
        return
    if group.life is Life.WANTED:
        group.since = now
    group.stage, group.stage_at = Stage.REGISTER, now


def going(m: Machine, pool: PoolName, name: ReplicaName, now: InstantNs) -> bool:
    """Somebody else takes a group's replica away: its drain is not ours to call off, or to end.

    Returns whether that is news.
    """
    books = m.state.pools.get(pool)
    group = None if books is None else books.groups.get(name)
    if group is None or not (group.life is Life.WANTED or name in m.state.leaving):
        return False
    m.state.leaving.pop(name, None)
    group.life, group.since, group.drain_by = Life.DRAINING, now, None
    return True


def why_lost(m: Machine, pool: PoolName, name: ReplicaName) -> Reason:
    """Return why what runs on a replica ends with it."""
    books = m.state.pools.get(pool)
    group = None if books is None else books.groups.get(name)
    drained = group is not None and group.drain_by is not None
    return Reason.DRAINED if drained else Reason.REPLICA_LOST


def _open_or_close(m: Machine, model: ModelName, group: Group) -> bool:
    """Have a group's replica take requests if it may; return whether it takes more than before."""
    known = m.state.models[model]
    replica = replica_of(known, group)
    if replica is None:
        return False
    is_open = group.life is Life.WANTED and group.short_since is None
    if replica.draining is not is_open:
        return False
    if is_open:
        facts, loads = m.settings.pools[replica.pool], m.state.ledger.loads
        known.fleet.reopen(replica, loads[replica.incarnation], facts)
    else:
        known.fleet.drain(replica)
        m.prefixes[model].forget(replica)
    return True


def settle_place(m: Machine, pool: PoolName, group: Group, now: InstantNs) -> None:
    """Open or close a group's replica as it stands, and let what waits go on by that."""
    facts = m.settings.scaled.get(pool)
    if facts is not None and _open_or_close(m, facts.model, group):
        group.since = now
        dispatch.run(m, facts.model, m.state.models[facts.model], now)


# Done ----------------------------------------------------------------------------------------


def drain(m: Machine, pool: PoolName, group: Group, now: InstantNs) -> None:
    """Close a group to what is new. What runs there has its time (SCALE-8)."""
    group.life, group.since = Life.DRAINING, now
    group.drain_by = later(now, seconds(m.settings.scaled[pool].settings.drain_s))
    m.state.leaving[group.name] = pool
    m.out.append(DrainGroup(group=group.name, pool=pool))
    settle_place(m, pool, group, now)


def recall(m: Machine, pool: PoolName, group: Group, now: InstantNs) -> None:
    """Call a drain off: demand is back."""
    group.life, group.since, group.drain_by = Life.WANTED, now, None
    m.state.leaving.pop(group.name, None)
    m.out.append(RecallGroup(group=group.name, pool=pool))
    settle_place(m, pool, group, now)


def wake(m: Machine, pool: PoolName, group: Group, now: InstantNs) -> None:
    """Have a sleeper serve."""
    group.life, group.since = Life.WANTED, now
    if group.stage == ASLEEP:
        group.woken, group.stage, group.stage_at = True, Stage.WARM, now
    m.out.append(WakeGroup(group=group.name, pool=pool))


def stop(m: Machine, pool: PoolName, group: Group, now: InstantNs) -> None:
    """Give a group back, whatever its stage. It is in the books until nothing of it is left."""
    m.state.leaving.pop(group.name, None)
    group.life, group.since = Life.STOPPING, now
    m.out.append(StopGroup(group=group.name, pool=pool))
    settle_place(m, pool, group, now)


def leave(m: Machine, now: InstantNs) -> None:
    """Give back the draining groups on which nothing runs any more, or whose time is over."""
    for name, pool in list(m.state.leaving.items()):
        group = m.state.pools[pool].groups[name]
        assert group.drain_by is not None, f"{name} drains without an end"
        if now >= group.drain_by or not _runs(m, group):
            stop(m, pool, group, now)


def _runs(m: Machine, group: Group) -> bool:
    """Return whether anything runs on a group, by our own books."""
    facts = m.settings.scaled.get(group.pool)
    replica = None if facts is None else replica_of(m.state.models[facts.model], group)
    return replica is not None and m.state.ledger.loads[replica.incarnation].attempts > 0
