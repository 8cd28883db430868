"""Which knobs does the engine's scheduler run with for its next iterations?

A policy returns knobs, not token plans: an emulated engine and vLLM's own scheduler can both run
them. `knobs` is the contract, `steps` what a step would cost; the other modules hold one policy each.
"""

from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.policy.batching.niyama import DynamicChunk
from headrace.policy.batching.paced import PacedPrefill
from headrace.policy.batching.prefill_first import PrefillFirst
from headrace.policy.batching.strict import DecodeFirst

__all__ = [
    "Batching", "ChunkedPrefill", "DecodeFirst", "DynamicChunk", "PacedPrefill", "PrefillFirst",
]  # fmt: skip

Batching = ChunkedPrefill | PacedPrefill | PrefillFirst | DecodeFirst | DynamicChunk
"""The config union of this question, told apart by `kind`; further policies join it here."""
