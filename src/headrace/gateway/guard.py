"""May this caller use the admin listener, and who is it?

A key of its own, compared in constant time; who fails too often is not heard for a while. Without a
key, on a loopback address, what a web page could send through somebody's browser is refused.
"""

import hmac
from collections.abc import Sequence
from hashlib import sha256

from msgspec import Struct

from headrace.config.check import is_local
from headrace.config.schema import AdminSpec
from headrace.gateway.failures import Failures
from headrace.gateway.http import Scope, header
from headrace.ports.clock import Clock

ANYBODY = "open"
"""Who it is where no key is asked for."""
_SCHEME = b"bearer "
_LABEL = "sha256:"


class Denied(Struct, frozen=True):
    """Why not."""

    status: int
    code: str
    message: str
    retry_after_s: int | None = None


class Guard:
    """The door of the admin listener."""

    def __init__(self, spec: AdminSpec, clock: Clock) -> None:
        """Know the keys."""
        self._keys: Sequence[tuple[bytes, str]] = [
            (bytes.fromhex(key.hash.removeprefix(_LABEL)), key.name) for key in spec.keys
        ]
        self._open = spec.open
        self._failures = Failures(clock)
        self.denied = 0
        """Calls that were turned away."""

    def admit(self, scope: Scope) -> str | Denied:
        """Return who it is, or why it may not."""
        found = self._from_here(scope) if self._open else self._known(scope)
        self.denied += isinstance(found, Denied)
        return found

    def _known(self, scope: Scope) -> str | Denied:
        client = scope.get("client")
        address = client[0] if client else ""
        wait = self._failures.wait_s(address)
        if wait is not None:
            return Denied(429, "slow_down", "Too many wrong keys from this address.", wait)
        who = self._holder(header(scope, b"authorization"))
        if who is not None:
            return who
        self._failures.note(address)
        return Denied(401, "invalid_api_key", "Give an admin key: `Authorization: Bearer KEY`.")

    def _holder(self, authorization: bytes | None) -> str | None:
        """Return the name of a key; every key is compared, whole, whichever is right."""
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        digest = sha256(authorization[len(_SCHEME) :].strip()).digest()
        found: str | None = None
        for known, name in self._keys:
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _from_here(self, scope: Scope) -> str | Denied:
        """Refuse other hosts' names and other pages' requests: a browser must not be a way in."""
        host = (header(scope, b"host") or b"").decode("latin-1")
        origin = (header(scope, b"origin") or b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not is_local(name.strip("[]")):
            return Denied(403, "host_not_allowed", "Ask by a loopback address.")
        if origin and origin != f"http://{host}":
            return Denied(403, "origin_not_allowed", "Pages of other hosts may not ask.")
        return ANYBODY
