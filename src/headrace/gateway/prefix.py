"""How does a prompt begin, in a form that tells equal beginnings and nothing else?

Keyed hashes of 1-KiB chunks of the canonical prompt, each covering all before it. Without the
deployment's secret no prompt can be tried against them, so they may stand in journals.
"""

from hashlib import blake2b

from headrace.gateway.asked.prompt import BYTES_PER_TOKEN
from headrace.units import Tokens

CHUNK_BYTES = 1_024
CHUNK_TOKENS = Tokens(CHUNK_BYTES // BYTES_PER_TOKEN)
"""Tokens that a chunk stands for; whole KV blocks."""
CHUNKS_MAX = 512
"""Chunks of a prompt that are looked at: 512 KiB, about 131,000 tokens."""
_CHAIN_BYTES = 16
_ID_BYTES = 8


def identities(secret: bytes, scope: bytes, prompt: bytes) -> tuple[int, ...]:
    """Return the ids of a prompt's whole chunks, 63 bits each.

    `scope` is what must be equal besides: model, adapter, cache salt.
    """
    chain = blake2b(scope, key=secret, digest_size=_CHAIN_BYTES).digest()
    found: list[int] = []
    for nth in range(min(CHUNKS_MAX, len(prompt) // CHUNK_BYTES)):
        chunk = prompt[nth * CHUNK_BYTES : (nth + 1) * CHUNK_BYTES]
        chain = blake2b(chain + chunk, key=secret, digest_size=_CHAIN_BYTES).digest()
        found.append(int.from_bytes(chain[:_ID_BYTES], "big") >> 1)
    return tuple(found)
