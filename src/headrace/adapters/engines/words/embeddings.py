"""Embeddings: a unit vector for each input, made of a hash of it.

Equal inputs have equal vectors, and different ones point elsewhere: that is all they mean. A
shorter vector is the beginning of a longer one, made a unit again.
"""

import struct
from base64 import b64encode
from hashlib import shake_128
from math import sqrt
from typing import Any

from msgspec import Struct

from headrace.adapters.engines.words.frame import Head, encoded

DIMENSIONS = 1024
"""Numbers of a vector, unless told."""
_HALF = 1 << 15


class Vectors(Struct, frozen=True, kw_only=True):
    """Which vectors are asked for."""

    inputs: tuple[bytes, ...] = (b"",)
    dimensions: int = DIMENSIONS
    base64: bool = False
    """As base64 of 32-bit floats, little-endian, instead of as numbers."""


class Embeddings:
    """Writes an answer that has vectors for words; there is no stream of it."""

    early = 0
    end_mark = b""

    def __init__(self, head: Head, vectors: Vectors) -> None:
        """Write nothing yet."""
        self._head, self._vectors = head, vectors

    def opening(self) -> list[bytes]:
        """There is no stream."""
        raise NotImplementedError

    def piece(self, text: str, made: int) -> bytes:
        """There is no stream."""
        raise NotImplementedError

    def closing(self, text: str, finish: str, made: int, cached: int | None) -> list[bytes]:
        """There is no stream."""
        raise NotImplementedError

    def whole(self, text: str, finish: str, made: int, cached: int | None) -> bytes:  # noqa: ARG002 - vectors have none of these
        """Return the answer."""
        head, vectors = self._head, self._vectors
        told: dict[str, Any] = {
            "id": head.name,
            "object": "list",
            "created": head.created,
            "model": head.model,
            "data": [
                {"index": index, "object": "embedding", "embedding": _written(content, vectors)}
                for index, content in enumerate(vectors.inputs)
            ],
        }
        if head.usage:
            tokens = head.prompt_tokens
            told["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return encoded(told)


def _written(content: bytes, vectors: Vectors) -> str | tuple[float, ...]:
    """Return one vector as it is asked for; both ways tell the same numbers."""
    size = vectors.dimensions
    drawn = struct.unpack(f"<{size}H", shake_128(content).digest(2 * size))
    raw = [number - _HALF + 0.5 for number in drawn]
    length = sqrt(sum(number * number for number in raw))
    packed = struct.pack(f"<{size}f", *(number / length for number in raw))
    return b64encode(packed).decode() if vectors.base64 else struct.unpack(f"<{size}f", packed)
