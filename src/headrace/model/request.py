"""One logical request, as far as deciders may know it."""

from msgspec import Struct

from headrace.model.ids import ClassName, ModelName, RequestId, TenantId
from headrace.units import DurationNs, Tokens


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """What the driver knows on arrival. No prompt, no socket and no true output length."""

    id: RequestId
    tenant: TenantId
    """From the key. An unknown tenant is the contract gate's to refuse."""
    model: ModelName
    """As the caller spelled it: alias or canonical."""
    input_tokens: Tokens
    """Prompt tokens, counted or estimated by the driver."""
    input_margin: Tokens = Tokens(0)
    """How far the count may be short (p90 minus p50); 0 for an exact count."""
    max_output: Tokens | None = None
    """The caller's own cap; None if not told."""
    slo_class: ClassName | None = None
    """Asked for; None takes the tenant's default. Granted only by the tenant's contract."""
    prefix: tuple[int, ...] = ()
    """Keyed hashes of the prompt's leading chunks, each covering all before it (at most 512)."""
    prefix_tokens: Tokens = Tokens(0)
    """Tokens in one such chunk."""
    stream: bool = True
    fan_out: int = 1
    ttft_ns: DurationNs | None = None
    gap_ns: DurationNs | None = None
    """Tighter bounds of the caller; wider ones than the class's are ignored (FAIR-4)."""
    ttl_ns: DurationNs | None = None
    """How long it may wait in the queue at most; None: as long as its class lets it."""
