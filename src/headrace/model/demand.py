"""The one unit of demand: predicted GPU work in seconds, plus KV bytes.

Gates, queues, router, fairness and scaler read a `Demand` and nothing else; no capacity, fairness
or routing decision counts bare requests.
"""

from msgspec import Struct

from headrace.units import Blocks, Bytes, DurationNs, Tokens, WorkNs


class Demand(Struct, frozen=True, kw_only=True, gc=False):
    """What one request will cost, each part with the revision of its predictor (DEM-1)."""

    input_tokens: Tokens
    cached_tokens: Tokens
    """Input tokens expected in a prefix cache of the best replica, discounted, not promised."""
    output_p50: Tokens
    output_p90: Tokens
    """Predicted output, both capped by what the caller allows; also the decode steps."""
    prefill_ns: DurationNs
    """Service time of the whole prompt alone in an engine, nothing cached."""
    work_p50_ns: WorkNs
    work_p90_ns: WorkNs
    """GPU work at the profile's operating batch, by predicted output (DEM-2)."""
    kv_blocks: Blocks
    """Blocks reserved: prompt plus p90 output, whole blocks."""
    kv_bytes: Bytes
    """Bytes of prompt plus p90 output, before rounding to blocks (EX-9)."""
    kv_byte_seconds: int
    """kv_bytes times the expected residency."""
    residency_ns: DurationNs
    """Expected time from prefill start to the last token."""
    fan_out: int = 1
    """Parallel answers of one prompt (n, best_of)."""
    draft_work_ns: WorkNs = WorkNs(0)
    """Speculative decoding's draft and verify cost; 0 without it."""
    input_revision: str = "given"
    output_revision: str = "prior"
    profile_revision: str = ""
    model_revision: str = ""
    quantization: str = ""
    adapter: str = ""
