"""Who counts the tokens of a prompt, before an engine has it?

Counting takes from a fraction of a millisecond to a second, so nobody waits for it on the loop.
"""

from typing import Protocol

from msgspec import Struct

from headrace.ports.engine import Route
from headrace.units import Tokens


class UncountedError(Exception):
    """There is no count: nobody is there to ask, or the answer makes no sense."""


class Count(Struct, frozen=True, gc=False):
    """How many tokens a prompt has."""

    tokens: Tokens
    revision: str
    """What counted them, as decisions tell it."""
    margin: Tokens = Tokens(0)
    """By how many that may be short."""


class TokenCounter(Protocol):
    """One model's tokenizer, wherever it runs."""

    def payload(self, route: Route, body: bytes, prompt: bytes) -> bytes | None:
        """Return what of a request is to be counted; equal payloads have equal counts.

        `prompt` is the canonical prompt, all text. None: such requests it cannot count.
        """
        ...

    async def count(self, payload: bytes) -> Count:
        """Return the count, in its own time; raises `UncountedError`."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
