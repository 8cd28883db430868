"""What do a caller's headers ask of the queue and of the engine? Read in one pass.

A session is passed on as a hash of tenant and id: of one length whatever it was, and no tenant can name
another's.
"""

from collections.abc import Sequence
from hashlib import blake2b

from msgspec import Struct

from headrace.gateway.asked import InvalidError
from headrace.gateway.durations import read
from headrace.model.ids import TenantId
from headrace.units import DurationNs

_TTL = b"x-llm-d-inference-ttl"
_SESSION = (
    b"x-session-id",
    b"x-session-token",
    b"x-dynamo-session-id",
    b"x-claude-code-session-id",
    b"x-session-affinity",
    b"session-id",
    b"session_id",
)
"""The leftmost that is there counts."""
_NAMES = frozenset((_TTL, *_SESSION))
_DIGEST_BYTES = 16


class Wishes(Struct, frozen=True, gc=False):
    """What is asked for beside the body."""

    ttl_ns: DurationNs | None = None
    """How long it may wait in the queue."""
    session: bytes | None = None
    """What the engine is told of the session it belongs to: 32 hexadecimal digits."""


_NONE = Wishes()


def wishes(headers: Sequence[tuple[bytes, bytes]], tenant: TenantId) -> Wishes:
    """Return what is asked for; raises `InvalidError`. The first of repeated headers counts."""
    found = {name: value for name, value in reversed(headers) if name in _NAMES}
    if not found:
        return _NONE
    ttl_ns: DurationNs | None = None
    if _TTL in found:
        ttl_ns = read(found[_TTL].strip())
        if ttl_ns is None:
            raise InvalidError("Not a positive duration such as `2s` or `250ms`.", _TTL.decode())
    told = next((found[name] for name in _SESSION if found.get(name)), None)
    return Wishes(ttl_ns, None if told is None else _hashed(tenant, told))


def _hashed(tenant: TenantId, session: bytes) -> bytes:
    content = tenant.encode() + b"\0" + session
    return blake2b(content, digest_size=_DIGEST_BYTES).hexdigest().encode()
