"""What does an engine publish of its KV cache? Batches of events in MessagePack, as vLLM writes them.

A batch is a row: instant, events, and whatever a later version adds. An event is a map with its kind
under `type`, or, of older versions, a row that begins with it. Kinds and fields that are unknown here are
passed over. Events hold token ids, which are a prompt: they go into no log and no message of an error.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.adapters.upstream.usage import UNREADABLE

HASH_BYTES = 64
"""Longest name of a block. 64: twice what vLLM's longest hash takes."""
BlockName = int | Annotated[bytes, Meta(max_length=HASH_BYTES)]
"""What the engine calls a block: a hash of its own, which is compared and never made here."""
_Size = Annotated[int, Meta(ge=1, le=1_048_576)]
_TokenId = Annotated[int, Meta(ge=0)]
_ROWS = (0xDC, 0xDD)
_SHORT_ROW, _SHORT_MASK = 0x90, 0xF0


class Stored(Struct, frozen=True, tag="BlockStored"):
    """Blocks entered the cache, each behind the one before it."""

    block_hashes: tuple[BlockName, ...]
    parent_block_hash: BlockName | None
    """The block before the first of them; None: they begin a prompt."""
    token_ids: tuple[_TokenId, ...]
    block_size: _Size
    """Tokens of one block."""
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    """What beside its tokens tells each block from others: adapter, media, salt."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None

    def __repr__(self) -> str:
        """Show no tokens."""
        return f"Stored({len(self.block_hashes)} blocks)"


class Removed(Struct, frozen=True, tag="BlockRemoved"):
    """Blocks left the cache."""

    block_hashes: tuple[BlockName, ...]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(Struct, frozen=True, tag="AllBlocksCleared"):
    """The cache is empty."""


class _StoredRow(Stored, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _RemovedRow(Removed, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedRow(Cleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _Kind(Struct):
    type: str


class _KindRow(Struct, array_like=True):
    type: str


class _Batch(Struct, array_like=True):
    ts: float
    events: list[Raw]


Told = Stored | Removed | Cleared
_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_BATCH = msgspec.msgpack.Decoder(_Batch)
_KIND, _KIND_ROW = msgspec.msgpack.Decoder(_Kind), msgspec.msgpack.Decoder(_KindRow)
_MAP = msgspec.msgpack.Decoder(Told)
_ROW = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)


class MalformedError(ValueError):
    """What came is no batch of events."""


class Batch(Struct, frozen=True):
    """What one message tells, in order."""

    events: tuple[Told, ...]
    unknown: int
    """Events of kinds that are not known here."""


def read(payload: bytes) -> Batch:
    """Return what a message tells; raises MalformedError, which does not quote it."""
    try:
        found = [_event(raw) for raw in _BATCH.decode(payload).events]
    except UNREADABLE:
        raise MalformedError("no batch of events") from None
    events = tuple(one for one in found if one is not None)
    return Batch(events, len(found) - len(events))


def _event(raw: Raw) -> Told | None:
    """Return an event; None if its kind is unknown."""
    first = memoryview(raw)[0]
    row = first in _ROWS or first & _SHORT_MASK == _SHORT_ROW
    kind = (_KIND_ROW if row else _KIND).decode(raw).type
    if kind not in _KINDS:
        return None
    return _ROW.decode(raw) if row else _MAP.decode(raw)
