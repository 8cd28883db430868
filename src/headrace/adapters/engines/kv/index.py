"""Which prompts does one engine hold in its cache, to the block? Made from its own events alone.

The engine's names of blocks are hashes that only it can make. So each block is also known here by a
digest of our own, over the one before it, its tokens and what else tells it apart: whoever has the
tokens of a prompt can look it up, however the engine hashes. The tokens themselves are not kept.

It may credit too little, never what is gone, as long as no event was missed:
- An engine may store one content twice, and may tell again of blocks that are used again; the two look
  alike. A block is held once, and one removal takes it.
- A block behind one that is unknown (stored before we listened) is known by name only.
- Beyond `capacity` blocks newcomers are left out.

Only the first group of layers counts, if its attention is full, and only what lies in GPU memory. A hit needs the blocks
of every group, so where there are others a lookup is an upper bound (`is_bound`).
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from headrace.adapters.engines.kv.events import BlockName, Removed, Stored
from headrace.units import Tokens

CAPACITY = 262_144
"""Blocks known at most. 262,144: four million tokens in blocks of 16, some 60 MB."""
_DIGEST_BYTES = 16
_GPU = frozenset({None, "GPU"})
_FIRST = frozenset({None, 0})
_FULL = frozenset({None, "full_attention", "mla_attention"})
_ENCODE = msgspec.msgpack.Encoder().encode


class BlockIndex:
    """The blocks that one engine holds."""

    def __init__(self, key: bytes, capacity: int = CAPACITY) -> None:
        """Know nothing yet; `key` (a secret of up to 64 bytes) keeps digests from being guessed at."""
        self._key, self._capacity = key, capacity
        self._digests: dict[BlockName, bytes | None] = {}
        """By the engine's name of a block ours; None: what is before it is unknown."""
        self._held: set[bytes] = set()
        self.block_tokens: int | None = None
        """Tokens of a block, once that was told."""
        self.elsewhere = 0
        """Blocks told of that do not count: of other groups, other memory, or cut otherwise."""
        self.left_out = 0
        """Blocks told of beyond the capacity."""
        self.is_bound = False
        """Whether other groups have blocks too, so that a lookup says how much is cached at most."""

    def __len__(self) -> int:
        """Return how many blocks are known to be there."""
        return len(self._digests)

    def store(self, told: Stored) -> int:
        """Take blocks in; return how many were not there before."""
        size, blocks = told.block_size, told.block_hashes
        if not self._counts(told, told.kv_cache_spec_kind) or not self._fits(size):
            self.elsewhere += len(blocks)
            return 0
        whole = len(told.token_ids) == size * len(blocks)
        before = (
            b"" if told.parent_block_hash is None else self._digests.get(told.parent_block_hash)
        )
        adapter, new = _adapter(told), 0
        for nth, block in enumerate(blocks):
            known = self._digests.get(block)
            if known is None:
                if block not in self._digests:
                    if len(self._digests) >= self._capacity:
                        self.left_out += len(blocks) - nth
                        break
                    new += 1
                if before is not None and whole:
                    tokens = told.token_ids[nth * size : (nth + 1) * size]
                    known = self._digest(before, tokens, _extra(told, nth), adapter)
                    self._held.add(known)
                self._digests[block] = known
            before = known
        return new

    def remove(self, told: Removed) -> int:
        """Let blocks go, known or not; return how many count."""
        if not self._counts(told):
            self.elsewhere += len(told.block_hashes)
            return 0
        for block in told.block_hashes:
            digest = self._digests.pop(block, None)
            if digest is not None:
                self._held.discard(digest)
        return len(told.block_hashes)

    def clear(self) -> None:
        """Know of nothing any more."""
        self._digests.clear()
        self._held.clear()

    def cached_tokens(
        self, tokens: Sequence[int], *, adapter: str | int | None = None, salt: str | None = None
    ) -> Tokens:
        """Return how many leading tokens of a prompt are cached; the last one is always computed.

        `adapter`: the LoRA adapter's name, or its number with engines that tell no name; `salt`: the
        request's `cache_salt`.
        """
        size, found = self.block_tokens, 0
        if size is None:
            return Tokens(0)
        digest, own = b"", () if adapter is None else (adapter,)
        for end in range(size, len(tokens), size):
            extra = own if salt is None or found else (*own, salt)
            digest = self._digest(digest, tuple(tokens[found:end]), extra, adapter)
            if digest not in self._held:
                break
            found = end
        return Tokens(found)

    def _counts(self, told: Stored | Removed, kind: str | None = None) -> bool:
        if told.medium in _GPU and told.group_idx not in _FIRST:
            self.is_bound = True
        return told.medium in _GPU and told.group_idx in _FIRST and kind in _FULL

    def _fits(self, size: int) -> bool:
        """Return whether blocks of a size can be had beside those known; the first ones choose it."""
        if not self._digests:
            self.block_tokens = size
        return self.block_tokens == size

    def _digest(
        self,
        before: bytes,
        tokens: tuple[int, ...],
        extra: tuple[object, ...],
        adapter: str | int | None,
    ) -> bytes:
        content = _ENCODE((before, tokens, extra, adapter))
        return blake2b(content, key=self._key, digest_size=_DIGEST_BYTES).digest()


def _adapter(told: Stored) -> str | int | None:
    return told.lora_id if told.lora_name is None else told.lora_name


def _extra(told: Stored, nth: int) -> tuple[object, ...]:
    """Return what beside its tokens tells a block apart; older versions tell the adapter alone."""
    adapter = _adapter(told)
    if told.extra_keys is None:
        return () if adapter is None else (adapter,)
    return (told.extra_keys[nth] if nth < len(told.extra_keys) else None) or ()
