"""How many groups is each pool to have? Gathers the evidence, asks, books and says what is to be done.

All it looks at is in the plane's own books. What it asks for is booked in the same step, so that the next
tick counts it; a group that then cannot be had is settled by what is told of it.
"""

from headrace.model.effect import AskGroup, Decided
from headrace.model.group import Life
from headrace.model.ids import ModelName, PoolName, ReplicaName
from headrace.model.scaling import ScaleDecision, ScaleRecord
from headrace.model.stages import Stage
from headrace.plane import groups
from headrace.plane.asked import Asked
from headrace.plane.machine import Machine
from headrace.plane.scale_facts import evidence
from headrace.plane.scale_state import SERVES, Counted, Group, PoolScale, ScaledPool
from headrace.plane.state import EPOCH_BITS
from headrace.policy.scaling.decide import decide, remembered
from headrace.units import NS_PER_S, InstantNs, later

_USUAL = 64
"""Prompts that a usual one is the mean of, about."""
WINDOWS = 4
"""Ticks that attainment is counted over."""
WEEK_NS = 7 * 86_400 * NS_PER_S
_MONDAY_S = 4 * 86_400
"""1970 began on a Thursday: the first Monday was four days later."""


def offered(m: Machine, asked: Asked, now: InstantNs) -> None:
    """Count an urgent request as it comes in, let in or not, for one of the pools that might serve it.

    Repeats apart: they are what a lack of capacity makes of the demand, and foretell none.
    """
    pools = m.settings.scaling(asked.model, asked.slo_class)
    if not pools or asked.class_spec.ttft_ms is None:
        return
    name = pools[asked.request.id % len(pools)]
    facts, books, work = m.settings.scaled[name], m.state.pools[name], asked.demand.work_p50_ns
    if asked.request.repeat:
        books.repeats.come(work, now)
        return
    books.offers.come(work, now)
    books.usual_prefill_ns += (asked.demand.prefill_ns - books.usual_prefill_ns) // _USUAL
    if facts.settings.forecast is not None:
        books.history.add(facts.settings.forecast, work, now, facts.ready.p90_ns)


# Time ----------------------------------------------------------------------------------------


def next_change(m: Machine) -> InstantNs | None:
    """Return when the next decision is due, or a drain is over."""
    state, best = m.state, None
    for books in state.pools.values():
        if books.next_at is not None and (best is None or books.next_at < best):
            best = books.next_at
    for name, pool in state.leaving.items():
        until = state.pools[pool].groups[name].drain_by
        if until is not None and (best is None or until < best):
            best = until
    return best


def due(m: Machine, now: InstantNs) -> None:
    """Decide for each pool whose tick it is."""
    for name, books in list(m.state.pools.items()):
        if books.next_at is not None and books.next_at <= now:
            facts = m.settings.scaled[name]
            late = (now - books.next_at) % facts.tick_ns
            books.next_at = InstantNs(now - late + facts.tick_ns)
            _tick(m, facts, books, now)


def _tick(m: Machine, facts: ScaledPool, books: PoolScale, now: InstantNs) -> None:
    books.windows = [
        *books.windows[-(WINDOWS - 1) :], Counted(at=now, offered=books.over, met=books.met)
    ]  # fmt: skip
    books.over = books.met = 0
    known = evidence(m, facts, books, now)
    decision = decide(facts.settings, known)
    books.memory = remembered(facts.settings, known, decision)
    record = ScaleRecord(
        decision_id=m.next_decision(),
        at=now,
        policy_revision=m.state.revision,
        evidence=known,
        decision=decision,
    )
    m.out.append(Decided(record))
    _carry_out(m, facts.name, books, decision, now)


def _carry_out(
    m: Machine, pool: PoolName, books: PoolScale, decision: ScaleDecision, now: InstantNs
) -> None:
    """Book what was decided, and have it done."""
    steps, mine = decision.steps, books.groups
    for name in steps.recall:
        groups.recall(m, pool, mine[name], now)
    for name in steps.wake:
        groups.wake(m, pool, mine[name], now)
    for name in (*steps.release, *steps.cancel):
        groups.stop(m, pool, mine[name], now)
    for name in steps.drain:
        groups.drain(m, pool, mine[name], now)
    for nth in range(steps.ask + steps.standby):
        _ask(m, pool, books, now, standby=nth >= steps.ask)


def _ask(m: Machine, pool: PoolName, books: PoolScale, now: InstantNs, *, standby: bool) -> None:
    books.made += 1
    # Of another epoch is another name: a driver that comes back does not know which it has used. Replicas
    # that a configuration numbers, of whatever pool, have no such point in theirs.
    name = ReplicaName(f"{pool}-{m.state.attempts >> EPOCH_BITS}.{books.made}")
    books.groups[name] = Group(
        name=name,
        pool=pool,
        life=Life.STANDBY if standby else Life.WANTED,
        since=now,
        gpus=0,
        stage=Stage.PROVISION,
        stage_at=now,
        short_since=now,
    )
    m.out.append(AskGroup(group=name, pool=pool, standby=standby))


# Changes -------------------------------------------------------------------------------------


def configure(m: Machine, now: InstantNs) -> None:
    """Begin to scale the pools that are configured so, and let go of those that are not any more.

    A pool that has become one of a fixed number keeps what serves; all groups of one that is gone go.
    """
    state, scaled = m.state, m.settings.scaled
    for name, facts in scaled.items():
        books = state.pools.get(name)
        if books is None:
            books = state.pools[name] = PoolScale(next_at=None)
            books.offers.looked_at = books.repeats.looked_at = now
        if books.next_at is None or books.next_at > later(now, facts.tick_ns):
            books.next_at = later(now, facts.tick_ns)
        _take_over(m, facts.model, name, books, now)
    for name, books in list(state.pools.items()):
        if name not in scaled:
            books.next_at = None
            _let_go(m, name, books, now)
            if not books.groups:
                state.pools.pop(name, None)


def _take_over(
    m: Machine, model: ModelName, pool: PoolName, books: PoolScale, now: InstantNs
) -> None:
    """Count what serves already."""
    for replica in m.state.models[model].fleet.replicas.values():
        if replica.pool == pool and replica.name not in books.groups:
            groups.take_over(m, pool, replica, now)


def _let_go(m: Machine, pool: PoolName, books: PoolScale, now: InstantNs) -> None:
    kept = pool in m.settings.pools
    for group in list(books.groups.values()):
        serves = group.stage == SERVES and group.short_since is None
        if kept and serves and group.life in (Life.WANTED, Life.DRAINING):
            groups.release(m, pool, group)
        elif group.life is not Life.STOPPING:
            groups.stop(m, pool, group, now)


def restarted(m: Machine, now: InstantNs) -> None:
    """Decide nothing before the driver has had the time to tell what is there."""
    for name, books in m.state.pools.items():
        books.made = 0
        if books.next_at is not None:
            books.next_at = later(now, m.settings.scaled[name].tick_ns)


def freeze(m: Machine, *, frozen: bool) -> None:
    """Have all pools stay as they are, or let them go on."""
    m.state.scale_frozen = frozen


def wall(m: Machine, wall_s: int, now: InstantNs) -> None:
    """Know the time of the week."""
    m.state.week_ahead_ns = ((wall_s - _MONDAY_S) * NS_PER_S - now) % WEEK_NS
