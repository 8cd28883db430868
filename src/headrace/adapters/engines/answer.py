"""What does an emulated answer say, and how long is it?

Deterministic: the words follow from attempt and position, the length from a seed and the request.
"""

from collections.abc import Callable
from hashlib import blake2b

from msgspec import Struct

from headrace.model.effect import Dispatch
from headrace.model.ids import AttemptId, RequestId
from headrace.model.request import Request
from headrace.units import Tokens

_TEXT = (
    "water runs down the race to the wheel and the wheel turns the stone while the gate holds back "
    "what the mill cannot take so that every sack of grain is ground in its turn and none is "
    "spilled by the flood"
)
_WORDS = _TEXT.split()
_STRIDE = 11  # coprime to the number of words: answers begin at different ones

_LENGTHS = (16, 34, 54, 77, 91, 103, 129, 177, 230, 384, 400, 411, 430, 480, 560, 700)
"""Sixteen equally likely output lengths, the shape of a chat service: median 200, mean 270."""


class Order(Struct, frozen=True, kw_only=True):
    """One answer as the emulated engine is asked for it."""

    dispatch: Dispatch
    request: Request
    replay_output: Tokens | None = None
    """The true output length, told by a trusted replay."""


def text(attempt: AttemptId, first: int, last: int) -> str:
    """Return the text of an answer's tokens `first` to `last` (exclusive), a word a token."""
    count = len(_WORDS)
    start = attempt * _STRIDE
    words = " ".join(_WORDS[(start + at) % count] for at in range(first, last))
    return f" {words}" if first else words


def drawn_length(seed: int, request: RequestId) -> Tokens:
    """Return how long the answer to a request is: equal seed and request, equal length."""
    digest = blake2b(f"{seed}/{request}".encode(), digest_size=8).digest()
    return Tokens(_LENGTHS[int.from_bytes(digest, "big") % len(_LENGTHS)])


def lengths(seed: int) -> Callable[[Order], Tokens]:
    """Return what says how long an answer wants to be: a trusted replay, else the draw."""

    def length(order: Order) -> Tokens:
        if order.replay_output is not None:
            return order.replay_output
        return drawn_length(seed, order.request.id)

    return length
