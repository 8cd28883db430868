"""What goes into the emulated engine and what comes out.

A `Job` holds the true output length. That is the engine's own knowledge: batching policies see an
`Entry`, the plane sees events, and neither has it.
"""

from enum import StrEnum

from msgspec import Struct

from headrace.model.engine import Usage
from headrace.model.ids import AttemptId, TenantId
from headrace.model.meter import StreamTiming
from headrace.model.paths import Path
from headrace.units import BLOCK_TOKENS, Blocks, DurationNs, InstantNs, Ps, Tokens


class Job(Struct, frozen=True, kw_only=True):
    """One attempt as the engine gets it."""

    attempt: AttemptId
    prompt_tokens: Tokens
    output_tokens: Tokens
    """Where generation stops: the engine's truth, hidden from policies."""
    prefix: tuple[int, ...] = ()
    """Chained ids of the leading prompt chunks: equal ids mean equal prompts up to their end. The
    last one may be partial. The rest of the prompt, and a prompt without ids, is shared by none."""
    prefix_tokens: Tokens = Tokens(512)
    """Tokens of a prefix chunk, whole blocks; the same for all jobs of a replica."""
    gap_bound_ns: DurationNs
    """The ITL bound of the class, for `StreamTiming.gaps_over`."""
    tenant: TenantId
    deadline: InstantNs
    relegated: bool = False
    way: Path = ()
    """Where it stands in the share tree; (): its tenant stands alone at the root."""
    counters: tuple[int, ...] = ()
    """The virtual counters on that way as they stood where it was sent from."""

    def __post_init__(self) -> None:
        """Catch a driver's mistake where it is made."""
        assert self.prompt_tokens >= 1, f"{self.prompt_tokens=}"
        assert self.output_tokens >= 1, f"{self.output_tokens=}"
        assert self.prefix_tokens % BLOCK_TOKENS == 0, f"{self.prefix_tokens=}"
        assert self.prefix_tokens >= BLOCK_TOKENS, f"{self.prefix_tokens=}"


class FirstTokenMade(Struct, frozen=True, kw_only=True, gc=False):
    """The prompt is done and the first token is out."""

    attempt: AttemptId
    at: InstantNs
    """When it was made: before the call that reports it if the driver woke late."""
    cached_tokens: Tokens


class Finished(Struct, frozen=True, kw_only=True):
    """The attempt is over; its slot is free."""

    attempt: AttemptId
    usage: Usage
    timing: StreamTiming
    preemptions: int = 0
    """How often it gave way."""
    paused_ns: DurationNs = DurationNs(0)
    """From when it gave way to its next token, of all times together."""


class Refusal(StrEnum):
    """Why the engine does not take a job."""

    NEVER_FITS = "never_fits"
    """Its KV would not fit the pool even alone."""
    QUEUE_FULL = "queue_full"


class Refused(Struct, frozen=True, kw_only=True, gc=False):
    """The job was not taken and left no trace."""

    attempt: AttemptId
    reason: Refusal
    blocks_needed: Blocks
    blocks_total: Blocks


class Totals(Struct, frozen=True, kw_only=True, gc=False):
    """What an engine has done since it started, up to its last step boundary."""

    busy_ps: Ps
    """Time in steps."""
    steps: int
    tokens_made: Tokens
    prompt_tokens_computed: Tokens
    """Cache hits not counted, recomputed tokens counted again."""
    preemptions: int
