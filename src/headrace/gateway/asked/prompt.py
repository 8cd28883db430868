"""How does a prompt read in one piece, and how many tokens is it?

Four bytes of the canonical prompt stand for a token, whatever it is made of, so that a chunk of it
stands for equally many: token ids take four bytes, and what is not text is there as the digest of
its data, repeated to the length of its tokens.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
from msgspec import Raw, Struct

from headrace.gateway.asked.scripts import scripts
from headrace.model.request import TextBytes
from headrace.units import Tokens, ceil_div

BYTES_PER_TOKEN = 4
"""Bytes of text to a token, for an estimate: English in UTF-8 with common tokenizers. Tokenizing
costs as much as dozens of requests, and the engine's own count settles every account."""
_MARGIN = 4  # an estimate of text may be short by a quarter
_DIGEST_BYTES = 16
_FILL_BYTES_MAX = 512 * 1_024  # prefixes look no further; a tiny part may claim many tokens
_EMPTY = (b"null", b"[]", b"{}")

_DECODE = msgspec.json.Decoder().decode
_ENCODE = msgspec.json.Encoder().encode


class Weight(Struct, frozen=True, gc=False):
    """About how many tokens something has, and by how many that may be short."""

    tokens: int
    margin: int = 0


class Counted(Struct, frozen=True, gc=False):
    """A whole prompt."""

    prompt: bytes
    tokens: Tokens
    margin: Tokens
    is_text: bool
    """All of it is text, which was counted by its bytes."""

    def text(self) -> TextBytes | None:
        """Return the bytes of a prompt that is text and nothing else."""
        return scripts(self.prompt) if self.is_text and self.prompt else None


class At(Struct, frozen=True, gc=False):
    """How far a prompt in the making is."""

    pieces: int
    counted_bytes: int
    tokens: int
    """Tokens beside those of bytes that are not counted."""


class Prompt:
    """A prompt in the making.

    What is appended changes nothing before it: a longer conversation begins like the shorter one.
    """

    __slots__ = ("_counted_bytes", "_fill", "_margin", "_pieces", "_tokens")

    def __init__(self) -> None:
        """Begin with nothing."""
        self._pieces: list[bytes] = []
        self._fill = _FILL_BYTES_MAX
        self._tokens = self._margin = 0
        self._counted_bytes = 0
        """Bytes whose tokens are known otherwise than by their number."""

    def said(self, role: str, text: str = "") -> None:
        """Begin a message."""
        self._pieces.append(f"\x1e{role}\x1f{text}".encode())

    def text(self, text: str) -> None:
        """Add text as it stands."""
        self._pieces.append(text.encode())

    def json(self, value: Raw) -> bool:
        """Add JSON, however spelled; return whether anything is in it."""
        content = bytes(value)
        if not content:
            return False
        content = _ENCODE(_DECODE(content))
        if content in _EMPTY:
            return False
        self._pieces.append(content)
        return True

    def ids(self, tokens: Sequence[int]) -> None:
        """Add token ids, which count themselves; raises `TypeError` if they are none."""
        piece = array("I", tokens).tobytes()
        self._pieces.append(piece)
        self._counted_bytes += len(piece)
        self._tokens += len(tokens)

    def media(self, data: str, weight: Weight) -> None:
        """Add what is not text: its data told apart by a digest, its tokens by their weight."""
        digest = blake2b(data.encode(), digest_size=_DIGEST_BYTES).digest()
        size = min(weight.tokens * BYTES_PER_TOKEN, self._fill)
        self._fill -= size
        piece = digest * max(1, ceil_div(size, _DIGEST_BYTES))
        self._pieces.append(piece)
        self._counted_bytes += len(piece)
        self._tokens += weight.tokens
        self._margin += weight.margin

    def at(self) -> At:
        """Return how far it is."""
        return At(len(self._pieces), self._counted_bytes, self._tokens)

    def tokens_since(self, begin: At) -> int:
        """Return about how many tokens were added, never more than those of the whole."""
        size = sum(map(len, self._pieces[begin.pieces :]))
        size -= self._counted_bytes - begin.counted_bytes
        return size // BYTES_PER_TOKEN + self._tokens - begin.tokens

    def bytes_before(self, at: At) -> int:
        """Return how many bytes there were."""
        return sum(map(len, self._pieces[: at.pieces]))

    def counted(self) -> Counted:
        """Return the prompt, and its estimate."""
        prompt = b"".join(self._pieces)
        tokens = ceil_div(len(prompt) - self._counted_bytes, BYTES_PER_TOKEN)
        margin = tokens // _MARGIN + self._margin
        is_text = not self._counted_bytes
        return Counted(prompt, Tokens(tokens + self._tokens), Tokens(margin), is_text)
