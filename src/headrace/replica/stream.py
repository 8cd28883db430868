"""One attempt inside the engine."""

from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from headrace.model.engine import Usage
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.paths import Level, Link, Path, path
from headrace.policy.batching.knobs import Entry
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
        "account", "arrived_at", "blocks", "cached", "end_step", "extent", "first_at", "job",
        "join_step", "last_at", "made", "offset", "phase", "pos", "prefix_blocks", "reported",
        "serial", "target", "way",
    )  # fmt: skip

    def __init__(self, job: Job, arrived_at: InstantNs, serial: int) -> None:
        """Start waiting, with nothing computed."""
        self.job = job
        self.way = job.way or _alone(job.tenant)
        """Where its queue stands in the share tree."""
        self.arrived_at = arrived_at
        self.serial = serial
        """Order of submission: breaks every tie."""
        self.phase = Phase.WAITING
        self.target: int = job.prompt_tokens
        """Tokens to compute before the next one is made: the prompt, and after a preemption the
        output made before it."""
        self.pos = 0
        """Tokens computed, while in prefill."""
        self.blocks = 0
        """KV blocks held, those of the tree included, while in prefill."""
        self.prefix_blocks = min(job.prompt_tokens, len(job.prefix) * job.prefix_tokens) // (
            BLOCK_TOKENS
        )
        """Full blocks of the prompt that have ids."""
        self.extent: Extent | None = None
        """The end of the path locked in the prefix tree, while running."""
        self.cached: int | None = None
        """Tokens found in the prefix cache at the first start."""
        self.made = 0
        """Output tokens; while decoding, those made before `join_step`."""
        self.join_step = 0
        self.end_step = 0
        """The step count at which the output is complete, while decoding."""
        self.offset = 0
        """The step count modulo the block size at which a decode needs its next block."""
        self.reported = 0
        """Output tokens told by `progress`."""
        self.first_at: InstantNs | None = None
        self.last_at = InstantNs(0)
        self.account = Account(job.gap_bound_ns)

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
            weight=self.way[-1].weight,
            prompt_tokens=job.prompt_tokens,
            computed=Tokens(computed),
            made=Tokens(made),
        )

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
        if self.first_at is None:
            return Finished(attempt=job.attempt, usage=usage, timing=NO_STREAM)
        timing = StreamTiming(
            tokens=Tokens(self.made),
            first_at=self.first_at,
            last_at=self.last_at,
            max_gap_ns=DurationNs(account.max_gap),
            gaps_over=account.over,
            gap_counts=tuple(account.counts),
        )
        return Finished(attempt=job.attempt, usage=usage, timing=timing)


@lru_cache(maxsize=65_536)
def _alone(tenant: str) -> Path:
    """Return the path of a tenant that stands alone at the root."""
    return path(Link(Level.TENANT, tenant))
