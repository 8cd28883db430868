"""What does a replayed prompt say, where the trace only tells its length and its shared beginnings?

Words of three letters behind a blank: four bytes, which is what the gateway counts a token by, and
about what common tokenizers make one of. Equal chunk ids give equal bytes, so that prefix caches find
as much as the trace says; everything else is the request's own.
"""

from collections.abc import Iterator
from functools import lru_cache
from hashlib import shake_128

from headrace.trace.row import TraceRow

BYTES_PER_TOKEN = 4
"""As the gateway estimates a prompt's tokens."""
HEAD_BYTES = 6
"""What the gateway puts before the text of a user's first message: chunks lie as if it were theirs."""
_LETTERS = (
    "actaddageairallandanyarmartaskbadbagbarbedbigboxboybusbuycancarcat"
    "cupcutdaydogdryeareateggendeyefarfewflyforfungetgunhathoticejobkey"
    "lawlegletlielowmanmapmaynewnowoiloldoneoutownpayputredrunsat"
)
"""Sixty-four words of three letters, one behind the other."""
_PIECES = tuple(f" {_LETTERS[at : at + 3]}".encode() for at in range(0, len(_LETTERS), 3))
_MASK = len(_PIECES) - 1
_CHUNKS_KEPT = 4_096

assert not len(_PIECES) & _MASK, "a byte picks a word by its low bits"


def prompt(row: TraceRow, salt: str) -> str:
    """Return a text of the row's input tokens, as the gateway estimates them.

    `salt` names the row: what lies behind its shared chunks is like that of no other salt. The least
    there can be is one byte, which with the head counts as two tokens.
    """
    whole = b"".join(_parts(row, salt))[: row.input_tokens * BYTES_PER_TOKEN]
    return (whole[HEAD_BYTES:] or b".").decode("ascii")


def _parts(row: TraceRow, salt: str) -> Iterator[bytes]:
    for chunk in row.prefix:
        yield _chunk(chunk, row.prefix_tokens)
    rest = row.input_tokens - len(row.prefix) * row.prefix_tokens
    if rest > 0:
        yield _text(f"own/{salt}", rest)


@lru_cache(maxsize=_CHUNKS_KEPT)
def _chunk(chunk: int, tokens: int) -> bytes:
    return _text(f"shared/{chunk}", tokens)


def _text(name: str, tokens: int) -> bytes:
    """Return so many words, drawn from a name."""
    drawn = shake_128(name.encode()).digest(tokens)
    return b"".join([_PIECES[byte & _MASK] for byte in drawn])
