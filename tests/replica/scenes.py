"""What the engine's tests share: small engines, odd policies, and a driver that writes a log."""

from collections.abc import Iterable

from msgspec import Struct

from headrace.model.engine import Preemption
from headrace.model.ids import AttemptId, Incarnation, ReplicaName, TenantId
from headrace.model.paths import Level, Link, path
from headrace.model.profile import DecodeFit, MixedFit, Profile
from headrace.model.table import TableFit
from headrace.policy.batching.knobs import (
    BatchingPolicy,
    BatchView,
    Break,
    Entry,
    Holds,
    Key,
    Knobs,
)
from headrace.policy.batching.preemption import RECOMPUTE_ONLY, Offers, Whole, gives_way
from headrace.policy.ordering.orders import Ordering
from headrace.replica.core import FIRST_COME, Replica
from headrace.replica.job import Finished, FirstTokenMade, Job
from headrace.replica.rules import NO_RULES, Rules
from headrace.units import NS_PER_MS, DurationNs, InstantNs, Tokens

CHUNK = 32
"""Tokens of a prefix chunk in these tests."""
DECODE = DecodeFit(a_ms=6.06, c_ms=0.0079, d_ms=4.32e-5)
MIXED = MixedFit(a_ms=6.15, knee=115, b_ms=0.0143, c_ms=0.0012, d_ms=4.25e-5, e_ms=2.19e-6)
# Every step lasts 5 ms exactly: boundaries tie with arrivals, and no step is longer than another.
FLAT_DECODE = DecodeFit(a_ms=5.0, c_ms=0.0, d_ms=0.0)
FLAT_MIXED = MixedFit(a_ms=5.0, knee=100_000, b_ms=0.001, c_ms=0.0, d_ms=0.0, e_ms=0.0)
# Steps grow by some ps only, and are not whole ns.
SLOW_GROWTH = DecodeFit(a_ms=4.999_999_7, c_ms=0.0, d_ms=1.3e-7)
# Stairs with a kink inside every budget of these tests; a step that decodes costs more by itself.
TABLE = TableFit(
    points=((1, 3.1), (6, 3.3), (17, 6.5), (40, 6.9), (90, 15.0)),
    h_ms=0.6,
    c_ms=0.0053,
    d_ms=8.1e-5,
    e_ms=3.1e-6,
)


def small(
    blocks: int = 64,
    *,
    budget: int = 64,
    running: int = 8,
    decode: DecodeFit = DECODE,
    mixed: MixedFit = MIXED,
    table: TableFit | None = None,
) -> Profile:
    """Return a profile with `blocks` of KV."""
    return Profile(
        name="small",
        source="test",
        hardware="none",
        model="m",
        kv_bytes_per_token=1,
        kv_capacity_tokens=Tokens(blocks * 16),
        max_running=running,
        token_budget=budget,
        reference_batch=1,
        reference_context=Tokens(16),
        decode=None if table else decode,
        mixed=None if table else mixed,
        table=table,
    )


def job(  # noqa: PLR0913
    attempt: int,
    prompt: int,
    output: int,
    *,
    family: int | None = None,
    common: int = 0,
    bound_ms: int = 20,
    deadline: int = 0,
    relegated: bool = False,
    tenant: str = "t",
    weight: int = 1,
    counter: int | None = None,
) -> Job:
    """Return a job; its first `common` tokens are those of its `family`, the rest its own."""
    prefix: tuple[int, ...] = ()
    if family is not None:
        prefix = tuple(
            family * 1_000 + nth
            if (nth + 1) * CHUNK <= min(common, prompt)
            else 1_000_000 + attempt * 1_000 + nth
            for nth in range(-(-prompt // CHUNK))
        )
    return Job(
        attempt=AttemptId(attempt),
        prompt_tokens=Tokens(prompt),
        output_tokens=Tokens(output),
        prefix=prefix,
        prefix_tokens=Tokens(CHUNK),
        gap_bound_ns=DurationNs(bound_ms * NS_PER_MS),
        tenant=TenantId(tenant),
        deadline=InstantNs(deadline),
        relegated=relegated,
        way=path(Link(Level.CLASS, "chat", 2), Link(Level.TENANT, tenant, weight)),
        counters=() if counter is None else (counter, counter),
    )


def engine(  # noqa: PLR0913
    profile: Profile,
    policy: BatchingPolicy,
    *,
    jumps: bool = True,
    noise_ppm: int = 0,
    ordering: Ordering = FIRST_COME,
    rules: Rules = NO_RULES,
    offers: Offers = RECOMPUTE_ONLY,
) -> Replica:
    """Return an idle engine."""
    return Replica(
        ReplicaName("r"),
        Incarnation(1),
        profile,
        policy,
        noise_seed=7,
        noise_ppm=noise_ppm,
        fast_forward=jumps,
        ordering=ordering,
        rules=rules,
        offers=offers,
    )


def host(
    blocks: int,
    *mechanisms: Preemption,
    us: float = 100.0,
    by_cost: bool = True,
    whole: Whole = Whole.ALL,
) -> Offers:
    """Return what a small profile's engine offers: so many blocks, each moved in so many us."""
    return Offers(
        mechanisms=mechanisms or tuple(Preemption),
        by_cost=by_cost,
        whole=whole,
        host_gb_per_s=16 / (us * 1_000),
        host_gib=16 * blocks / (1 << 30),
    )


def ns(milliseconds: float) -> InstantNs:
    """Return the instant so many ms after the start."""
    return InstantNs(round(milliseconds * NS_PER_MS))


Event = FirstTokenMade | Finished


def run_to(replica: Replica, now: int) -> list[tuple[InstantNs, Event]]:
    """Call at every instant that the engine names up to `now`; return what happened, and when."""
    log: list[tuple[InstantNs, Event]] = []
    while (due := replica.next_event()) is not None and due <= now:
        log.extend((due, event) for event in replica.advance(due))
    return log


def drain(replica: Replica) -> list[tuple[InstantNs, Event]]:
    """Run until the engine is idle."""
    return run_to(replica, 1 << 60)


def finished(log: Iterable[tuple[InstantNs, Event]]) -> dict[int, Finished]:
    """Return the endings of a log by attempt."""
    return {event.attempt: event for _, event in log if isinstance(event, Finished)}


def first_tokens(log: Iterable[tuple[InstantNs, Event]]) -> dict[int, FirstTokenMade]:
    """Return the first tokens of a log by attempt."""
    return {event.attempt: event for _, event in log if isinstance(event, FirstTokenMade)}


class ByDeadline(Struct, frozen=True):
    """Earliest deadline first, budget by the number of decodes: knobs hold for a composition."""

    chunk: int = 24

    def knobs(self, view: BatchView) -> Knobs:
        """Return a budget that grows with the batch."""
        return Knobs(
            token_budget=32 + 4 * view.decodes + 8 * view.prefills,
            running_limit=6,
            chunk_limit=self.chunk,
            holds=Holds(max_steps=7, breaks_on=Break.COMPOSITION),
        )

    def victim_key(self, entry: Entry) -> Key:
        """Preempt the latest deadline, then who has least to lose."""
        return (entry.deadline, -entry.computed, -entry.made)


class ByHour(Struct, frozen=True):
    """Another budget every 40 ms, larger when many wait; shortest prompt first."""

    def knobs(self, view: BatchView) -> Knobs:
        """Return knobs that hold to the next change of budget or arrival."""
        turn = view.now // (40 * NS_PER_MS)
        return Knobs(
            token_budget=(24 if turn % 2 else 80) + (16 if view.waiting > 2 else 0),
            running_limit=5,
            chunk_limit=20,
            holds=Holds(
                max_steps=None,
                until=InstantNs((turn + 1) * 40 * NS_PER_MS),
                breaks_on=Break.ANYTHING,
            ),
        )

    def victim_key(self, entry: Entry) -> Key:
        """Preempt the longest."""
        return (entry.prompt_tokens,)


class Moody(Struct, frozen=True):
    """Whole prompts alone for a while, then chunks beside decodes, and so on."""

    def knobs(self, view: BatchView) -> Knobs:
        """Return knobs that hold to the next turn."""
        turn = view.now // (30 * NS_PER_MS)
        return Knobs(
            token_budget=70 if turn % 2 else 24,
            running_limit=6,
            mixed=turn % 2 == 0,
            holds=Holds(
                max_steps=9,
                until=InstantNs((turn + 1) * 30 * NS_PER_MS),
                breaks_on=Break.NOTHING,
            ),
        )

    def victim_key(self, entry: Entry) -> Key:
        """Preempt the latest deadline."""
        return (entry.deadline,)


class Silent(Struct, frozen=True):
    """Says nothing about how long its knobs hold; they follow what is free and running."""

    def knobs(self, view: BatchView) -> Knobs:
        """Return knobs of the state at this boundary."""
        tight = view.tightest_gap_ns is not None and view.tightest_gap_ns < 15 * NS_PER_MS
        spare = min(view.free_blocks, 4) + (view.context + view.prefill_tokens) % 7
        return Knobs(token_budget=(16 if tight else 48) + spare, running_limit=7)

    def victim_key(self, entry: Entry) -> Key:
        """Preempt who came first: the opposite of vLLM."""
        return (-entry.arrived_at,)


class Fair(Struct, frozen=True):
    """Whoever is below its share gives way last; before it the loosest class."""

    running: int = 4

    def knobs(self, view: BatchView) -> Knobs:
        """Return knobs that hold while the same run."""
        return Knobs(
            token_budget=36 + view.decodes,
            running_limit=self.running,
            chunk_limit=24,
            holds=Holds(max_steps=None, breaks_on=Break.COMPOSITION),
        )

    def victim_key(self, entry: Entry) -> Key:
        """Give way as is fair."""
        return gives_way(entry)
