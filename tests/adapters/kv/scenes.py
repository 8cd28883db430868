"""An engine's cache as a test sees it, and what it would publish."""

from collections.abc import Sequence
from typing import Any

import msgspec

SIZE = 4
"""Tokens of a block."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As engines send them."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def stored(
    names: Sequence[Any], tokens: Sequence[int], parent: Any = None, **more: Any
) -> dict[str, Any]:
    """Return an event as vLLM 0.32 writes it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more


def removed(*names: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU"} | more


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any, at: float = 1.0) -> bytes:
    return msgspec.msgpack.encode(Batch(at, list(events), 0))


def prompt(nth: int, blocks: int) -> list[int]:
    """Return a prompt that shares its first block with no other, and has a last token to compute."""
    return [nth, *range(blocks * SIZE - 1), 7]


def store(nth: int, blocks: int = 1) -> dict[str, Any]:
    """Return that a whole prompt is stored, in blocks with names of its own."""
    return stored([100 * nth + b for b in range(blocks)], prompt(nth, blocks)[:-1])
