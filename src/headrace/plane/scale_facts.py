"""What does the scaler know of a pool? Gathered from the plane's own books, changing nothing but a history."""

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.evidence import ArrivalFacts
from headrace.model.group import Life
from headrace.model.ids import ClassName, Incarnation, ModelName, PoolName, ReplicaName
from headrace.model.scaling import (
    DemandFacts,
    GoodputFacts,
    GroupFacts,
    GroupSample,
    ScaleEvidence,
    Standing,
)
from headrace.model.scaling_spec import WEEK_MINUTES, Mode, ppm
from headrace.model.stages import Ahead, Stage, remaining, success_ppm
from headrace.plane.fleet import PoolFacts, Replica
from headrace.plane.groups import replica_of, standing
from headrace.plane.health import effective
from headrace.plane.machine import Machine
from headrace.plane.scale_state import ASLEEP, Group, PoolScale, ScaledPool
from headrace.plane.state import Live, Phase
from headrace.units import MICRO, NS_PER_S, Blocks, DurationNs, InstantNs, WorkNs, elapsed

LOOKED_AT = 4_096
"""Live requests that one decision looks at, the oldest first: those have the least time left."""
_LOW = 4
"""A request is short of time with less than one part in so many of its bound left."""
_NOTHING = DurationNs(0)


def evidence(m: Machine, facts: ScaledPool, books: PoolScale, now: InstantNs) -> ScaleEvidence:
    """Return what is known of a pool now."""
    settings, pool = facts.settings, m.settings.pools[facts.name]
    seen = _Seen(m, facts)
    forecast = None
    if settings.forecast is not None:
        books.history.add(settings.forecast, 0, now, facts.ready.p90_ns)
        forecast = books.history.facts(settings.forecast, facts.ready.p90_ns)
    does = effective(m, facts, books)
    there = [
        replace(_facts_of(m, facts, books, group, seen, now), effective_ppm=does.get(name))
        for name, group in books.groups.items()
    ]
    return ScaleEvidence(
        now=now,
        pool=facts.name,
        minute=(now + m.state.week_ahead_ns) // (60 * NS_PER_S) % WEEK_MINUTES,
        gpus=facts.gpus,
        envelope_micro=facts.envelope_micro,
        lowest_micro=facts.lowest_micro,
        declared_micro=facts.each_micro,
        blocks=pool.blocks_total,
        ready_p50_ns=facts.ready.p50_ns,
        ready_p90_ns=facts.ready.p90_ns,
        demand=seen.demand(books, now),
        goodput=_goodput(m, facts, books, now),
        forecast=forecast,
        groups=tuple(there),
        samples=tuple(_samples(m, facts, books, seen, now)),
        domains=settings.domains,
        frozen=m.state.scale_frozen,
        memory=books.memory,
    )


class _Running(Struct):
    """What runs on one life of a replica."""

    work_ns: int = 0
    """Predicted, and not done yet."""
    leftover_blocks: int = 0
    """KV blocks of requests that give way to any other."""


class _Seen:
    """The live requests that are a pool's, summed."""

    def __init__(self, m: Machine, facts: ScaledPool) -> None:
        self.m, self.facts = m, facts
        self.now = m.state.now
        self.running: dict[Incarnation, _Running] = {}
        self.urgent = self.active = self.patient = self.leftover = 0
        self.patient_left = 0  # work times what is left of its time
        self.waiting = self.low = self.low_ns = self.blocks = 0
        self.least: int | None = None
        served = m.settings.served_by(facts.name)
        for nth, live in enumerate(m.state.live.values()):
            if nth == LOOKED_AT:
                break
            if live.model != facts.model or live.slo_class not in served:
                continue
            if live.phase is Phase.QUEUED:
                self._waits(live)
            else:
                self._runs(live)

    def _waits(self, live: Live) -> None:
        pools = self.m.settings.scaling(live.model, live.slo_class)
        if pools[live.request.id % len(pools)] != self.facts.name:
            return  # counted for another of the pools that might serve it
        spec, work = self.m.spec_of(live), live.demand.work_p50_ns
        if spec.ttft_ms is not None and not live.request.deferred:
            slack = live.latest_start - self.now
            self.urgent += work
            self.waiting += 1
            self.blocks += live.demand.kv_blocks
            if slack * _LOW < (live.bounds.ttft_ns or 0):
                self.low += 1
                self.low_ns += work
            self.least = slack if self.least is None else min(self.least, slack)
        elif spec.completion_ms is not None:
            self.patient += work
            self.patient_left += work * max(0, live.deadline - self.now)
        else:
            self.leftover += work

    def _runs(self, live: Live) -> None:
        assert live.attempt is not None, f"{live.request.id} runs without an attempt"
        flight, demand = self.m.state.ledger.flights[live.attempt], live.demand
        spec = self.m.spec_of(live)
        left: int = demand.work_p50_ns
        if flight.streaming:
            decode = max(0, demand.work_p50_ns - demand.prefill_ns)
            left = decode * max(0, demand.output_p50 - flight.made) // max(1, demand.output_p50)
        running = self.running.setdefault(flight.incarnation, _Running())
        running.work_ns += left
        at_once = spec.ttft_ms is not None and not live.request.deferred
        if not at_once and spec.completion_ms is None:
            running.leftover_blocks += flight.blocks
        else:
            self.active += left

    def demand(self, books: PoolScale, now: InstantNs) -> DemandFacts:
        """Return what is offered, waits and runs."""
        m = self.m
        served = sorted(m.settings.served_by(self.facts.name))
        urgent = [m.settings.classes[name] for name in served]
        urgent = [spec for spec in urgent if spec.ttft_ms is not None]
        bounds = [m.settings.bounds[ClassName(spec.name)].ttft_ns for spec in urgent]
        known = [bound for bound in bounds if bound is not None]
        budget = None
        if known:
            budget = DurationNs(max(0, min(known) - books.usual_prefill_ns))
        left = DurationNs(self.patient_left // self.patient) if self.patient else None
        return DemandFacts(
            urgent_micro=books.offers.look(now),
            retries_micro=books.repeats.look(now),
            urgent_ns=WorkNs(self.urgent),
            active_ns=WorkNs(self.active),
            patient_ns=WorkNs(self.patient),
            patient_left_ns=left,
            leftover_ns=WorkNs(self.leftover),
            budget_ns=budget,
            expires=all(spec.expire for spec in urgent),
            waiting=self.waiting,
            low_slack=self.low,
            low_slack_ns=WorkNs(self.low_ns),
            least_slack_ns=self.least,
            waiting_blocks=Blocks(self.blocks),
        )


def _goodput(
    m: Machine, facts: ScaledPool, books: PoolScale, now: InstantNs
) -> GoodputFacts | None:
    """Return what was over in the last ticks; None: nothing was."""
    over = sum(one.offered for one in books.windows)
    served = m.settings.served_by(facts.name)
    targets = [m.settings.classes[n].target for n in served if m.settings.classes[n].ttft_ms]
    if not over or not targets:
        return None
    begun = books.windows[0].at - facts.tick_ns
    return GoodputFacts(
        offered=over,
        met=sum(one.met for one in books.windows),
        target_ppm=ppm(max(targets)),
        window_ns=DurationNs(now - begun),
    )


def arrival(facts: ScaledPool, group: Group, now: InstantNs) -> Ahead:
    """Return how long until a group serves, if it is to."""
    if group.stage == ASLEEP:
        return facts.wake
    if group.short_since is not None:  # whatever else it has come to, it waits for its ranks
        return remaining(facts.stages, Stage.PROVISION, elapsed(group.short_since, now))
    stages = facts.start_of(group)
    names = [name for name, _ in stages]
    present = group.stage if group.stage in names else names[-1]
    return remaining(stages, present, elapsed(group.stage_at, now))


def _facts_of(
    m: Machine, facts: ScaledPool, books: PoolScale, group: Group, seen: _Seen, now: InstantNs
) -> GroupFacts:  # fmt: skip
    known = m.state.models[facts.model]
    replica = replica_of(known, group)
    is_as = standing(known, group)
    rising = is_as in (Standing.COMING, Standing.STANDBY)
    ahead = arrival(facts, group, now) if rising else Ahead(_NOTHING, _NOTHING)
    names = [name for name, _ in facts.start_of(group)]
    life = Incarnation(0) if replica is None else replica.incarnation
    short = group.short_since
    running = seen.running.get(life)
    return GroupFacts(
        group=group.name,
        incarnation=life,
        standing=is_as,
        gpus=group.gpus,
        envelope_micro=facts.envelope_micro,
        domain=group.domain,
        since=group.since,
        arrival_p50_ns=ahead.p50_ns,
        arrival_p90_ns=ahead.p90_ns,
        success_ppm=success_ppm(facts.times, books.risen, books.failed) if rising else MICRO,
        progress=names.index(group.stage) if group.stage in names else len(names),
        overdue=short is not None
        and elapsed(short, now) >= round(facts.settings.partial_s * NS_PER_S),
        remaining_ns=WorkNs(0 if running is None else running.work_ns),
        prefix_ns=_prefix_ns(m.settings.pools[facts.name], replica),
    )


def _prefix_ns(pool: PoolFacts, replica: Replica | None) -> WorkNs:
    """Return the prefill that is cached on a replica, as far as what it holds was found lately."""
    if replica is None or not replica.prefix_tokens:
        return WorkNs(0)
    profile, tokens = pool.spec.profile, min(replica.prefix_tokens, pool.prefix_capacity)
    whole = profile.prefill_ns(tokens, 0, 0, 0, profile.token_budget)
    if not replica.cached_expected:
        return WorkNs(whole)
    return WorkNs(
        whole * min(replica.cached_told, replica.cached_expected) // replica.cached_expected
    )


def _samples(
    m: Machine, facts: ScaledPool, books: PoolScale, seen: _Seen, now: InstantNs
) -> list[GroupSample]:
    """Return what is known of ready groups: blocks by our own books, and how old their last report is.

    Of an engine that never told anything our books are all there is, and as fresh as can be.
    """
    known, pool = m.state.models[facts.model], m.settings.pools[facts.name]
    found = []
    for name, group in books.groups.items():
        replica = replica_of(known, group)
        if replica is None or replica.draining:
            continue
        load, snapshot = m.state.ledger.loads[replica.incarnation], replica.snapshot
        running = seen.running.get(replica.incarnation)
        leftover = 0 if running is None else running.leftover_blocks
        age = _NOTHING if snapshot is None else DurationNs(elapsed(snapshot.observed_at, now))
        found.append(
            GroupSample(
                group=ReplicaName(name),
                incarnation=replica.incarnation,
                age_ns=age,
                blocks_held=Blocks(load.blocks - leftover),
                blocks_total=pool.blocks_total,
            )
        )
    return found


def expected(
    m: Machine, model: ModelName, slo_class: ClassName, now: InstantNs, *, next_one: bool
) -> ArrivalFacts | None:
    """Return the soonest group that is on its way for a class.

    `next_one`: where none is, the one that would be asked for next.
    """
    best: ArrivalFacts | None = None
    for name in m.settings.scaling(model, slo_class):
        found = _expected(m, name, now, next_one=next_one)
        if found is not None and (best is None or found.p90_ns < best.p90_ns):
            best = found
    return best


def _expected(m: Machine, pool: PoolName, now: InstantNs, *, next_one: bool) -> ArrivalFacts | None:
    facts, books = m.settings.scaled[pool], m.state.pools[pool]
    known, settings = m.state.models[facts.model], facts.settings
    coming = [
        arrival(facts, group, now)
        for group in books.groups.values()
        if group.life is Life.WANTED and standing(known, group) is Standing.COMING
    ]
    acts = next_one and settings.mode is Mode.ACT and not m.state.scale_frozen
    if not coming and acts and books.next_at is not None and settings.ceiling(facts.gpus):
        # As long as anything waits the next decision asks for one.
        wait = max(0, books.next_at - now)
        ready = facts.ready
        coming = [Ahead(DurationNs(wait + ready.p50_ns), DurationNs(wait + ready.p90_ns))]
    if not coming:
        return None
    first = min(coming, key=lambda one: one.p90_ns)
    return ArrivalFacts(
        p50_ns=first.p50_ns,
        p90_ns=first.p90_ns,
        success_ppm=success_ppm(facts.times, books.risen, books.failed),
        rate_micro=facts.each_micro,
    )
