"""What all answers have in common: their envelope, and the frames of a stream."""

from typing import Protocol

import msgspec
from msgspec import Struct

encoded = msgspec.json.Encoder().encode
"""JSON, without spaces."""
DONE = b"data: [DONE]\n\n"
"""The last event of a chat's or a completion's stream."""


class Head(Struct, frozen=True, kw_only=True):
    """What is known of an answer before it is made."""

    name: str
    created: int
    model: str
    prompt_tokens: int
    usage: bool = True
    """Whether the usage may be told at all."""
    usage_at_end: bool = False
    """Whether an event of its own tells it at the end."""
    usage_always: bool = False
    """Whether every event tells it."""


class Writer(Protocol):
    """What does one answer look like, in events or in one piece?"""

    early: int
    """Events of the opening that go out with the head, before the engine has made anything."""
    end_mark: bytes
    """What comes after a stream's last event; may be nothing."""

    def opening(self) -> list[bytes]:
        """Return the events before the first token."""
        ...

    def piece(self, text: str, made: int) -> bytes:
        """Return the event of some text, after which `made` tokens are out."""
        ...

    def closing(self, text: str, finish: str, made: int, cached: int | None) -> list[bytes]:
        """Return the events of the last text and whatever follows it, the end mark apart."""
        ...

    def whole(self, text: str, finish: str, made: int, cached: int | None) -> bytes:
        """Return the answer in one piece."""
        ...


def event(content: bytes) -> bytes:
    """Return an event without a name."""
    return b"data: " + content + b"\n\n"


def named(kind: str, content: bytes) -> bytes:
    """Return an event with a name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), content)
