"""Whose request is this? The tenant comes from the key and from nothing else.

Keys are known by their SHA-256 alone and are never logged.
"""

import hmac
import secrets
from collections.abc import Iterable
from hashlib import sha256

from headrace.config.schema import KeySpec
from headrace.model.ids import TenantId

_SCHEME = b"bearer "
_LABEL = "sha256:"
_HEAD = 8
_PREFIX = "sk-hr-"
_BYTES = 32


def minted() -> str:
    """Return a new key: 256 random bits, in letters that need no quoting anywhere."""
    return _PREFIX + secrets.token_urlsafe(_BYTES)


def key_hash(key: str) -> str:
    """Return what is kept instead of the key."""
    return _LABEL + sha256(key.encode()).hexdigest()


class KeyIndex:
    """Keys by what they hash to: the head of a hash finds one, the whole is compared in constant time."""

    def __init__(self, keys: Iterable[KeySpec]) -> None:
        """Know the keys."""
        self._keys: dict[bytes, list[tuple[bytes, KeySpec]]] = {}
        for key in keys:
            digest = bytes.fromhex(key.hash.removeprefix(_LABEL))
            self._keys.setdefault(digest[:_HEAD], []).append((digest, key))

    def __bool__(self) -> bool:
        """Say whether there is any."""
        return bool(self._keys)

    def find(self, key: bytes) -> KeySpec | None:
        """Return what is known of a key, given as itself."""
        digest = sha256(key).digest()
        for known, spec in self._keys.get(digest[:_HEAD], ()):
            if hmac.compare_digest(known, digest):
                return spec
        return None


class KeyRing:
    """The keys of all tenants."""

    def __init__(self, keys: Iterable[KeySpec], *, anonymous: TenantId | None = None) -> None:
        """Know the keys; `anonymous`: whose requests are, if there is no key at all."""
        self._keys = KeyIndex(keys)
        self._anonymous = None if self._keys else anonymous

    def rekey(self, keys: Iterable[KeySpec]) -> None:
        """Know other keys from here on; whether one is asked for at all does not change."""
        self._keys = KeyIndex(keys)

    def tenant(self, authorization: bytes | None, api_key: bytes | None = None) -> TenantId | None:
        """Return the tenant of an `Authorization: Bearer KEY`, or of an `x-api-key`, or None."""
        if self._anonymous is not None:
            return self._anonymous
        if authorization is not None:
            if authorization[: len(_SCHEME)].lower() != _SCHEME:
                return None
            api_key = authorization[len(_SCHEME) :].strip()
        if not api_key:
            return None
        found = self._keys.find(api_key)
        return None if found is None else TenantId(found.tenant)
