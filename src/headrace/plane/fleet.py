"""Which replicas serve one model, how loaded do we believe they are, and what do they hold cached?

What this gateway dispatched is known at once (the ledger's loads); reports are corrections with an
age. Keeps the replicas ranked by what is in front of a newcomer, so that a decision looks at the
cheapest few and the prefix holders instead of all. Chooses nothing: that is routing's.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from headrace.model.demand import Demand
from headrace.model.deployment import PoolSpec
from headrace.model.engine import Snapshot, Usage
from headrace.model.envelope import DECLARED_RATE
from headrace.model.evidence import ReplicaView
from headrace.model.ids import ClassName, Incarnation, PoolName, ReplicaName
from headrace.model.profile import Profile
from headrace.model.request import Request
from headrace.model.slo import Bounds
from headrace.plane.ledger import Load
from headrace.plane.speed import Speed
from headrace.policy.fairness.ranked import Ranked
from headrace.units import (
    BLOCK_TOKENS,
    MICRO,
    PS_PER_NS,
    Blocks,
    DurationNs,
    InstantNs,
    Tokens,
    ms,
)

HOLDERS = 4
"""Prefix holders that a decision looks at beside the cheapest replicas."""
_TYPICAL_STEPS = 64
"""Decode steps for which running streams weigh in the ranking."""
_RANK_BITS = 32
MEMORY = 8
"""Attempts over which a cache's reliability is learnt: each newest counts as one of so many."""


class Replica(Struct):
    """One ready replica, by its present incarnation."""

    name: ReplicaName
    incarnation: Incarnation
    pool: PoolName
    slot: int
    """Its bit in the prefix index."""
    last_used: int = 0
    """The fleet's dispatch count when it was last chosen."""
    rank: int = 0
    snapshot: Snapshot | None = None
    prefixes: dict[int, int] = {}
    """Chunk ids believed cached, least recently used first, with the tokens of each."""
    prefix_tokens: int = 0
    draining: bool = False
    """It takes nothing new: not ranked, and not counted as ready."""
    cached_expected: int = 0
    """Prompt tokens that were expected cached, of attempts whose usage told how many were."""
    cached_told: int = 0
    """Of the same attempts, how many were."""
    tells_cached: bool = False
    """Whether any usage told: some engines leave it out where nothing was cached."""
    reliability: int | None = None
    """The share of what was expected that was there, of late, in millionths. None: nothing told."""
    emptied_at: InstantNs | None = None
    """When its cache was last lost, if it ever was."""
    speed: Speed = field(default_factory=Speed)
    """How fast it goes, if its pool scales."""

    def believed(self, cached: Tokens, facts: "PoolFacts") -> Tokens:
        """Return how many of the tokens expected in its cache to count on.

        Of an engine that tells nothing, the configured share: what it leaves out is unknown, not zero.
        """
        share = facts.reliability if self.reliability is None else self.reliability
        return Tokens(cached * share // MICRO)

    def learn(self, expected: int, sent_at: InstantNs, usage: Usage, facts: "PoolFacts") -> None:
        """Learn from an attempt's usage how much of what was expected cached was there.

        What was sent before the cache was lost says nothing of what it holds since.
        """
        self.tells_cached = self.tells_cached or usage.tells_cached
        if not self.tells_cached:
            return
        self.cached_expected += expected
        self.cached_told += usage.cached_tokens
        before_loss = self.emptied_at is not None and sent_at <= self.emptied_at
        if not expected or before_loss:
            return
        seen = min(usage.cached_tokens, expected) * MICRO // expected
        known = facts.reliability if self.reliability is None else self.reliability
        self.reliability = known + (seen - known) // MEMORY


class PoolFacts(Struct, frozen=True, gc=False):
    """What a pool's replicas have in common, computed once."""

    spec: PoolSpec
    blocks_total: Blocks
    """The KV pool less the preemption reserve."""
    prefix_capacity: int
    """Tokens of prefix that its index remembers: the pool's own size."""
    window_ns: DurationNs
    reliability: int = MICRO
    """Share of a prefix expected cached that is counted on before anything is told, in millionths."""
    work_rate: float = DECLARED_RATE
    """Work-seconds per second that one replica counts as until it is measured, as declared or read off."""


def pool_facts(
    spec: PoolSpec,
    window_ms: float,
    kv_reserve: float,
    reliability: float = 1.0,
    work_rate: float = DECLARED_RATE,
) -> PoolFacts:
    """Return a pool's facts: window = max(two full steps, the configured window)."""
    profile = spec.profile
    batch = profile.reference_batch
    step = profile.full_step_ns(batch, batch * profile.reference_context)
    total = profile.kv_capacity_tokens // BLOCK_TOKENS
    kept = total * round(kv_reserve * MICRO) // MICRO
    return PoolFacts(
        spec,
        Blocks(total - kept),
        profile.kv_capacity_tokens,
        DurationNs(max(2 * step, ms(window_ms))),
        round(reliability * MICRO),
        work_rate,
    )


class Fleet(Struct):
    """The ready replicas of one model, and those that finish what they have."""

    replicas: dict[ReplicaName, Replica] = {}
    ranking: Ranked[str] = field(default_factory=Ranked)
    slots: list[ReplicaName | None] = []
    ready: dict[PoolName, int] = {}
    """Replicas of each pool that has any."""
    version: int = 0
    """Changes whenever a replica may have become able to take more."""
    dispatches: int = 0

    def join(self, name: ReplicaName, incarnation: Incarnation, pool: PoolName) -> Replica:
        """Add a replica; its name must be free."""
        assert name not in self.replicas, f"{name} is in the fleet"
        slot = self.slots.index(None) if None in self.slots else len(self.slots)
        if slot == len(self.slots):
            self.slots.append(name)
        else:
            self.slots[slot] = name
        replica = Replica(name=name, incarnation=incarnation, pool=pool, slot=slot)
        self.replicas[name] = replica
        self.ready[pool] = self.ready.get(pool, 0) + 1
        self.ranking.add(0, name)
        self.version += 1
        return replica

    def leave(self, name: ReplicaName) -> Replica:
        """Remove a replica."""
        replica = self.replicas[name]
        if not replica.draining:
            self.drain(replica)
        self.slots[replica.slot] = None
        return self.replicas.pop(name)

    def drain(self, replica: Replica) -> None:
        """Rank a replica no more, nor count it as ready."""
        replica.draining = True
        self.ranking.remove(replica.rank, replica.name)
        self.ready[replica.pool] -= 1
        if not self.ready[replica.pool]:
            del self.ready[replica.pool]
        self.version += 1

    def reopen(self, replica: Replica, load: Load, facts: PoolFacts) -> None:
        """Rank a replica again that was closed: it takes requests as any other."""
        replica.draining = False
        self.ranking.add(replica.rank, replica.name)
        self.ready[replica.pool] = self.ready.get(replica.pool, 0) + 1
        self.version += 1
        self.rerank(replica, load, facts)

    def rerank(self, replica: Replica, load: Load, facts: PoolFacts) -> None:
        """Rank a replica anew: prefill in front of a newcomer plus what its streams cost one.

        Equals go to who was used longest ago, so that ties are spread evenly.
        """
        costs = facts.spec.profile.costs
        extra = costs.decode_c * load.decodes + costs.decode_d * load.context_tokens
        cost_us = (load.pending_prefill_ns + extra * _TYPICAL_STEPS // PS_PER_NS) // 1_000
        rank = (min(cost_us, (1 << 30) - 1) << _RANK_BITS) + replica.last_used % (1 << _RANK_BITS)
        if rank != replica.rank and not replica.draining:
            self.ranking.move(replica.rank, rank, replica.name)
            replica.rank = rank

    def cheapest(self) -> Iterator[Replica]:
        """Yield the replicas, the least loaded first."""
        replicas = self.replicas
        for _, name in self.ranking:
            yield replicas[ReplicaName(name)]

    def holders(self, matches: tuple[tuple[int, int], ...], seen: int) -> list[Replica]:
        """Return the replicas with the longest cached prefix whose slot bits are not in `seen`."""
        found: list[Replica] = []
        for _, bits in matches:
            new = bits & ~seen
            while new:
                low = new & -new
                name = self.slots[low.bit_length() - 1]
                if name is not None:
                    found.append(self.replicas[name])
                    if len(found) == HOLDERS:
                        return found
                new ^= low
            seen |= bits
        return found


class PrefixIndex:
    """Which replicas hold which leading chunks? Derived from the replicas, never frozen itself.

    Chunk ids are chained: each stands for the whole prompt up to its end, so the holders of a chunk
    are among the holders of the one before it. Holders are a bit per slot.
    """

    def __init__(self, replicas: Iterable[Replica]) -> None:
        """Build the index of replicas as they stand."""
        self._holders: dict[int, int] = {}
        for replica in replicas:
            for chunk in replica.prefixes:
                self._holders[chunk] = self._holders.get(chunk, 0) | 1 << replica.slot

    def match(self, prefix: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return (chunks held, holders' bits), the longest first; holders nest outwards."""
        steps: list[tuple[int, int]] = []
        holders = self._holders
        bits = -1
        for depth, chunk in enumerate(prefix):
            found = bits & holders.get(chunk, 0)
            if found != bits:
                if depth:
                    steps.append((depth, bits))
                bits = found
                if not bits:
                    break
        else:
            if prefix:
                steps.append((len(prefix), bits))
        steps.reverse()
        return steps

    def remember(self, replica: Replica, prefix: tuple[int, ...], tokens: int, room: int) -> bool:
        """Note that a replica is about to hold a prefix; forget its least recently used beyond room.

        Touched from the deepest chunk to the first, so that a chain is forgotten from its end. Returns
        whether it had not held all of it.
        """
        held, bit = replica.prefixes, 1 << replica.slot
        is_new = False
        for chunk in reversed(prefix):
            before = held.pop(chunk, None)
            if before is None:
                is_new = True
                self._holders[chunk] = self._holders.get(chunk, 0) | bit
            held[chunk] = tokens
            replica.prefix_tokens += tokens - (before or 0)
        while replica.prefix_tokens > room and held:
            oldest = next(iter(held))
            replica.prefix_tokens -= held.pop(oldest)
            self._drop(oldest, bit)
        return is_new

    def forget(self, replica: Replica) -> None:
        """Drop everything that a replica held."""
        bit = 1 << replica.slot
        for chunk in replica.prefixes:
            self._drop(chunk, bit)
        replica.prefixes.clear()
        replica.prefix_tokens = 0

    def emptied(self, replica: Replica, now: InstantNs) -> None:
        """Its cache is empty (trap 30): nothing is there, and how reliable it was is past."""
        self.forget(replica)
        replica.reliability, replica.emptied_at = None, now

    def _drop(self, chunk: int, bit: int) -> None:
        left = self._holders[chunk] & ~bit
        if left:
            self._holders[chunk] = left
        else:
            del self._holders[chunk]


_NONE = Tokens(0)
_NOTHING = DurationNs(0)


class Candidate(Struct, frozen=True, gc=False):
    """A request on its way to a view: what every replica is asked about."""

    request: Request
    demand: Demand
    matches: tuple[tuple[int, int], ...]
    mean_ns: DurationNs = DurationNs(0)
    """Bound on its mean time per token, where that is tighter than on its gaps; else 0."""

    @classmethod
    def of(
        cls, index: PrefixIndex, request: Request, demand: Demand, bounds: Bounds
    ) -> "Candidate":
        """Return a request with those who hold its prefix."""
        matches = tuple(index.match(request.prefix)) if request.prefix else ()
        return cls(request, demand, matches, bounds.mean_ns)

    def prefill_alone_ns(self, profile: Profile) -> DurationNs:
        """Return how long its whole prompt takes on an engine that does nothing else."""
        return profile.prefill_ns(self.request.input_tokens, 0, 0, 0, profile.token_budget)

    def cached(self, slot: int) -> Tokens:
        """Return the prompt tokens expected cached at a slot; one token is always computed."""
        for depth, bits in self.matches:
            if bits >> slot & 1:
                known = depth * self.request.prefix_tokens
                return Tokens(min(known, self.request.input_tokens - 1))
        return _NONE


def view(
    replica: Replica, load: Load, facts: PoolFacts, wanted: Candidate, now: InstantNs
) -> ReplicaView:
    """Return one replica as a decider may see it, for one request."""
    profile, given = facts.spec.profile, wanted.request.input_tokens
    budget, decodes, context = profile.token_budget, load.decodes, load.context_tokens
    cached = believed = _NONE
    credit = _NOTHING
    if wanted.matches:
        cached = wanted.cached(replica.slot)
        believed = replica.believed(cached, facts)
    prefill = profile.prefill_ns(given - believed, believed, decodes, context, budget)
    if believed:
        whole = profile.prefill_ns(given, 0, decodes, context, budget)
        credit = DurationNs(whole - prefill)
    costs, snapshot = profile.costs, replica.snapshot
    after = context + given + wanted.demand.output_p50
    step = profile.full_step_ns(decodes + 1, after)
    mean_step, mean_bound = _NOTHING, wanted.mean_ns
    if load.tightest_mean is not None:
        mean_bound = min(mean_bound or load.tightest_mean, load.tightest_mean)
    if mean_bound:
        alone, busy = profile.decode_step_ns(decodes + 1, after), facts.window_ns
        mixed = (step - alone) * min(load.pending_prefill_ns, busy) // busy
        mean_step = DurationNs(alone + mixed)
    # By position: keywords would cost a third of the whole view, and this is made eight times a decision.
    return ReplicaView(
        replica.name,
        replica.incarnation,
        load.pending_prefill_ns,
        load.behind_ns(facts.window_ns),
        load.prefill_left_ns(now),
        decodes,
        context,
        load.blocks,
        facts.blocks_total,
        profile.max_running - load.attempts,
        cached,
        believed,
        prefill,
        credit,
        step,
        DurationNs((costs.decode_c * decodes + costs.decode_d * context) // PS_PER_NS),
        load.tightest,
        facts.window_ns,
        None if snapshot is None else DurationNs(now - snapshot.observed_at),
        replica.last_used,
        mean_step,
        mean_bound,
    )


def was_reset(before: Snapshot, after: Snapshot) -> bool:
    """Return whether an engine's counts fell: it restarted in place, and its cache is empty."""
    counts = (
        (before.preemptions, after.preemptions),
        (before.prefix_tokens_queried, after.prefix_tokens_queried),
        (before.prefix_tokens_hit, after.prefix_tokens_hit),
    )
    return any(old is not None and new is not None and new < old for old, new in counts)


def serves(facts: PoolFacts, slo_class: ClassName) -> bool:
    """Return whether a pool takes requests of a class."""
    return not facts.spec.classes or slo_class in facts.spec.classes
