"""One attempt inside the engine."""

from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from headrace.model.engine import Usage
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.paths import Level, Link, Path, path, tenant_parent
from headrace.policy.batching.knobs import Entry
from headrace.policy.fairness.line import Seat
from headrace.replica.gaps import Account
from headrace.replica.job import Finished, Job
from headrace.units import BLOCK_TOKENS, DurationNs, InstantNs, Tokens

if TYPE_CHECKING:
    from headrace.replica.kv import Extent


class Phase(Enum):
    """Where a stream is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DOOMED = "doomed"
    """Aborted; it keeps its slot to the end of the step it is in."""
    GONE = "gone"


class Stream:
    """What the engine keeps of an attempt; plain fields, written by the batch it is in."""

    __slots__ = (
        "account", "arrived_at", "blocks", "cached", "end_step", "extent", "first_at", "had", "host",
        "job", "join_step", "last_at", "made", "offset", "paused_at", "paused_ns", "phase", "pos",
        "preemptions", "prefix_blocks", "reported", "resumes", "serial", "target", "way",
    )  # fmt: skip

    def __init__(self, job: Job, arrived_at: InstantNs, serial: int) -> None:
        """Start waiting, with nothing computed."""
        self.job = job
        self.way = job.way or _alone(job.tenant)
        """Where its queue stands in the share tree."""
        self.arrived_at, self.serial = arrived_at, serial
        """The serial is the order of submission: it breaks every tie."""
        self.phase = Phase.WAITING
        self.target: int = job.prompt_tokens
        """Tokens to compute before the next one is made: the prompt, and after a preemption the
        output made before it."""
        self.pos = 0
        """Tokens whose KV there is, here or on the host; while decoding, as of when it began."""
        self.blocks = 0
        """KV blocks held, those of the tree included, unless it decodes."""
        self.host = 0
        """Blocks of its KV on the host: it waits then, and holds none here."""
        self.resumes = False
        """Whether it has its KV back and makes its next token in this very step, as a decode."""
        self.had = 0
        """The most tokens whose KV there was when it gave way: fewer are computed again."""
        self.prefix_blocks = min(job.prompt_tokens, len(job.prefix) * job.prefix_tokens) // (
            BLOCK_TOKENS
        )
        """Full blocks of the prompt that have ids."""
        self.extent: Extent | None = None
        """The end of the path locked in the prefix tree, while it holds blocks."""
        self.cached: int | None = None
        """Tokens found in the prefix cache at the first start."""
        self.made = 0
        """Output tokens; while decoding, those made before `join_step`."""
        self.join_step = self.end_step = 0
        """While decoding: the step count at which it began, and at which the output is complete."""
        self.offset = 0
        """The step count modulo the block size at which a decode needs its next block."""
        self.reported = 0
        """Output tokens told by `progress`."""
        self.first_at: InstantNs | None = None
        self.last_at = InstantNs(0)
        self.account = Account(job.gap_bound_ns)
        self.paused_at: InstantNs | None = None
        """Since when it makes no tokens because it gave way."""
        self.preemptions = self.paused_ns = 0
        """How often it gave way, and for how long, of pauses that are over."""

    def entry(self, computed: int, made: int, counter: int) -> Entry:
        """Return what a policy may know."""
        job = self.job
        return Entry(
            attempt=job.attempt,
            tenant=job.tenant,
            arrived_at=self.arrived_at,
            deadline=job.deadline,
            relegated=job.relegated,
            counter=counter,
            among=tenant_parent(self.way),
            weight=self.way[-1].weight,
            prompt_tokens=job.prompt_tokens,
            computed=Tokens(computed),
            made=Tokens(made),
            gap_ns=job.gap_bound_ns,
        )

    def seat(self) -> Seat:
        """Return what the line for a slot may know."""
        job = self.job
        return Seat(
            serial=self.serial,
            tenant=job.tenant,
            way=self.way,
            counters=job.counters,
            arrived_at=self.arrived_at,
            deadline=job.deadline,
            prompt_tokens=job.prompt_tokens,
            target=self.target,
            relegated=job.relegated,
        )

    def goes_on(self, start: int) -> bool:
        """Return whether it has its KV back at a start with so many tokens, and decodes at once."""
        return self.made > 0 < start == self.pos == self.target - 1

    def made_by(self, steps: int) -> int:
        """Return the output tokens at a step of the decodes' clock, of a stream that is not over."""
        return self.made + (steps - self.join_step if self.phase is Phase.DECODE else 0)

    def finished(self) -> Finished:
        """Return the final account of a stream that no longer decodes."""
        job, account = self.job, self.account
        usage = Usage(
            input_tokens=job.prompt_tokens,
            cached_tokens=Tokens(self.cached or 0),
            output_tokens=Tokens(self.made),
        )
        timing = NO_STREAM
        if self.first_at is not None:
            timing = StreamTiming(
                tokens=Tokens(self.made),
                first_at=self.first_at,
                last_at=self.last_at,
                max_gap_ns=DurationNs(account.max_gap),
                gaps_over=account.over,
                gap_counts=tuple(account.counts),
            )
        return Finished(
            attempt=job.attempt,
            usage=usage,
            timing=timing,
            preemptions=self.preemptions,
            paused_ns=DurationNs(self.paused_ns),
        )


@lru_cache(maxsize=65_536)
def _alone(tenant: str) -> Path:
    """Return the path of a tenant that stands alone at the root."""
    return path(Link(Level.TENANT, tenant))
