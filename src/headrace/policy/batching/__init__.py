"""Which knobs does the engine's scheduler run with for its next iterations?

A policy returns knobs, not token plans: an emulated engine and vLLM's own scheduler can both run
them. `knobs` is the contract; the other modules hold one policy each.
"""

from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.policy.batching.prefill_first import PrefillFirst

__all__ = ["Batching", "ChunkedPrefill", "PrefillFirst"]

Batching = ChunkedPrefill | PrefillFirst
"""The config union of this question, told apart by `kind`; further policies join it here."""
