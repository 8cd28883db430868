"""What `headrace serve` serves without a configuration file: one fleet, one tenant, one key."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.config.resolve import Resolved, resolved
from headrace.gateway.auth import key_hash

WHO = "demo"
"""The tenant, its key and, unless told otherwise, its pool."""


def fileless(
    deployment: Mapping[str, object],
    key: str,
    given: Mapping[str, str],
    *,
    upstreams: Sequence[Mapping[str, object]] = (),
) -> Resolved:
    """Return the settings of a deployment that one key may use, under environment and flags."""
    written = {
        "deployment": {**deployment, "tenants": [{"name": WHO}]},
        "upstreams": upstreams,
        "keys": [{"name": WHO, "tenant": WHO, "hash": key_hash(key)}],
    }
    text = msgspec.json.format(msgspec.json.encode(written)).decode()
    return resolved(text, "the fleet without a file", Path(), os.environ, given)
