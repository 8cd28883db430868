"""Does a caller want its answer later (RFC 7240), and by what key does it know its request?"""

import re
from collections.abc import Sequence

from msgspec import Struct

from headrace.gateway.asked import InvalidError

_KEY, _PREFER = b"idempotency-key", b"prefer"
_KEY_MAX = 255
_WAIT = re.compile(rb'wait\s*=\s*"?([0-9]{1,9})"?')


class Preference(Struct, frozen=True, gc=False):
    """What is preferred; nothing of it must be heeded."""

    later: bool = False
    """`respond-async`: a place to look for the answer will do."""
    wait_s: int | None = None
    """How long the caller waits for the answer itself before that; None: not told."""


def preference(headers: Sequence[tuple[bytes, bytes]]) -> Preference:
    """Return what the headers prefer, of repeated preferences the first; others are ignored."""
    later, wait_s = False, None
    for name, value in headers:
        for told in value.split(b",") if name == _PREFER else ():
            one = told.partition(b";")[0].strip().lower()
            later = later or one == b"respond-async"
            found = _WAIT.fullmatch(one)
            if found is not None and wait_s is None:
                wait_s = int(found[1])
    return Preference(later, wait_s)


def idempotency_key(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the caller's key for its request, None if it has none; raises `InvalidError`."""
    key = next((value for name, value in headers if name == _KEY), None)
    if not key:
        return None
    if len(key) > _KEY_MAX or not key.isascii() or not key.decode().isprintable():
        message = f"Not up to {_KEY_MAX} printable characters of ASCII."
        raise InvalidError(message, _KEY.decode())
    return key.decode()
