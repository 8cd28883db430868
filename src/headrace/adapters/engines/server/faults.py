"""What is to go wrong with this replica, on purpose?

Plain settings, told at start or changed while it runs. They hold for every request until they are
changed; what is drawn follows from the seed and the request's number alone.
"""

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

_Frame = Annotated[int, Meta(ge=1, le=1_000_000)]
_Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
_SCALE = 1 << 64
_GARBAGE = b'data: {"id": "cut off in the mid\n\n'


class Faults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be made to go wrong."""

    stall: _Count = 0
    """Requests, from now on, that are accepted and never answered."""
    stall_after: _Count | None = None
    """Tokens after which every answer goes silent; its connection stays open."""
    slow: Annotated[float, Meta(ge=0.01, le=10_000)] = 1.0
    """What every engine step takes, times this."""
    die_mid_frame: _Frame | None = None
    """The event, counted from 1, in whose midst the connection is cut."""
    die_after: _Count | None = None
    """Events after which the connection is cut; 0: after the head."""
    garbage: _Frame | None = None
    """The event, counted from 1, before which one comes that cannot be parsed."""
    error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of requests answered with 500 before anything else."""
    hang_health: bool = False
    """`/health` is not answered."""
    drop_usage: bool = False
    """Answers tell no usage, whoever asks for it."""
    no_done: bool = False
    """Streams end without `[DONE]`."""


class FaultError(ValueError):
    """A fault that there is not, or a value that it cannot have."""


_INVALID = re.compile(r"(?P<what>.*) - at `\$\.(?P<name>\w+)`")


def from_words(words: Iterable[str]) -> Faults:
    """Return the faults that `name=value` words name; a bare name means true."""
    pairs = (word.partition("=") for word in words)
    told = {name.strip().replace("-", "_"): value.strip() or "true" for name, _, value in pairs}
    return _converted(told, strict=False)


def from_json(body: bytes) -> Faults:
    """Return the faults that a JSON object names; whatever it leaves out does not go wrong."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FaultError("the body is not JSON") from error
    return _converted(told, strict=True)


def _converted(told: object, *, strict: bool) -> Faults:
    try:
        return msgspec.convert(told, Faults, strict=strict)
    except msgspec.ValidationError as error:
        found = _INVALID.fullmatch(str(error))
        raise FaultError(f"{found['name']}: {found['what']}" if found else str(error)) from None


def draws_error(seed: int, nth: int, rate: float) -> bool:
    """Say whether the `nth` request fails: true for a share `rate` of them, by the seed."""
    digest = blake2b(f"{seed}/error/{nth}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * _SCALE


class Damage:
    """What befalls one answer on its way out."""

    def __init__(self, faults: Faults) -> None:
        """Start before the first event."""
        self._faults = faults
        self._sent = 0
        self.counts = any((faults.die_mid_frame, faults.die_after, faults.garbage))
        """Whether events are counted, so that every token has to be one of its own."""

    def events(self, events: Iterable[bytes]) -> tuple[bytes, bool]:
        """Return what to send of a stream's next events, and whether to cut it after that."""
        faults, out = self._faults, []
        for event in events:
            self._sent += 1
            if self._sent == faults.garbage:
                out.append(_GARBAGE)
            if self._sent == faults.die_mid_frame:
                out.append(event[: len(event) // 2])
                return b"".join(out), True
            out.append(event)
            if self._sent == faults.die_after:
                return b"".join(out), True
        return b"".join(out), False

    def whole(self, content: bytes) -> tuple[int, bytes, bool]:
        """Return the length to promise, what to send, and whether to cut it after that.

        An answer in one piece counts as its own first event; garbage is the half of it.
        """
        faults, size = self._faults, len(content)
        if faults.die_after == 0:
            return size, b"", True
        if faults.die_mid_frame == 1:
            return size, content[: size // 2], True
        if faults.garbage == 1:
            return size // 2, content[: size // 2], False
        return size, content, False
