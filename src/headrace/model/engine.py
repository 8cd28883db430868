"""What an engine is given, tells about itself and leaves behind: known alike of real and emulated."""

from enum import StrEnum

from msgspec import Struct

from headrace.model.ids import Incarnation, ReplicaName
from headrace.units import Blocks, Bytes, DurationNs, InstantNs, Tokens


class EngineKind(StrEnum):
    """Which software an engine behind HTTP is; `adapters/engines/kinds.py` says what each is able to do."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    TRTLLM = "trtllm"
    EMULATED = "emulated"
    OPENAI = "openai"
    """Any other that speaks OpenAI's words; nothing else is assumed of it."""


class Scheduler(StrEnum):
    """How what waits in an engine is ordered: whoever started it knows, and no engine tells."""

    OWN = "own"
    """As it does unasked, first come first served. It is told nothing of ranks."""
    PRIORITY = "priority"
    """By the `priority` of requests."""
    HEADRACE = "headrace"
    """By our own scheduler class, which reads the metadata of requests."""


class Preemption(StrEnum):
    """How an engine lets a running request give way (TOK-4)."""

    KEEP = "keep"
    """It loses its slot, and its KV stays where it is: frees a slot, no memory."""
    SWAP = "swap"
    """Its KV is copied to the host and back: costs bytes over a link, twice."""
    RECOMPUTE = "recompute"
    """Its KV is dropped and computed again."""


class Usage(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """The tokens an attempt used, by the engine's own count; quota and KV settle on it."""

    input_tokens: Tokens
    cached_tokens: Tokens
    """Input tokens found in the prefix cache."""
    output_tokens: Tokens
    tells_cached: bool = True
    """Whether it said how many were found there; where it did not, `cached_tokens` is 0."""


class Yielded(Struct, frozen=True, kw_only=True, gc=False):
    """What giving way has come to since the engine started (TOK-4)."""

    kept: int = 0
    swapped: int = 0
    recomputed: int = 0
    """Times a request gave way, by mechanism. One that was kept first and then lost its memory too
    counts under both."""
    pauses: int = 0
    """Of these, those that are over: the request made its next token, or was aborted."""
    paused_ns: DurationNs = DurationNs(0)
    longest_pause_ns: DurationNs = DurationNs(0)
    bytes_out: Bytes = Bytes(0)
    bytes_in: Bytes = Bytes(0)
    tokens_recomputed: Tokens = Tokens(0)
    """Prompt and output tokens computed another time."""
    on_host: int = 0
    """Requests whose KV is on the host now."""
    host_blocks_used: Blocks = Blocks(0)
    host_blocks_total: Blocks = Blocks(0)

    def plus(self, other: "Yielded") -> "Yielded":
        """Return the sums of two engines, or of two lives of one; the longest pause of both."""
        both = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        both["longest_pause_ns"] = max(self.longest_pause_ns, other.longest_pause_ns)
        return Yielded(**both)


class Snapshot(Struct, frozen=True, kw_only=True, gc=False):
    """One replica's own report. None: the engine does not tell; never zero, never full."""

    replica: ReplicaName
    incarnation: Incarnation
    observed_at: InstantNs
    """When the engine looked, which may be long before the report arrives."""
    running: int | None = None
    """Requests that hold a slot, prefilling or decoding."""
    waiting: int | None = None
    """Requests received but not yet started."""
    waiting_prefill_tokens: Tokens | None = None
    """Prompt tokens still to be computed of running and waiting requests."""
    kv_blocks_used: Blocks | None = None
    """Blocks held by running requests; blocks kept only as prefix cache do not count."""
    kv_blocks_total: Blocks | None = None
    preemptions: int | None = None
    """Preemptions since the engine started."""
    prefix_tokens_queried: int | None = None
    prefix_tokens_hit: int | None = None
