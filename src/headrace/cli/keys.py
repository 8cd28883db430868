"""`headrace key new`: an API key, told once, and the line that grants it."""

import hashlib
import secrets
import sys
from typing import Annotated

from cyclopts import Parameter

from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.load import parse
from headrace.config.schema import AdminKeySpec, KeySpec

_PREFIX = "sk-hr-"
_BYTES = 32


def minted() -> str:
    """Return a new key: 256 random bits, in letters that need no quoting anywhere."""
    return _PREFIX + secrets.token_urlsafe(_BYTES)


def key_hash(key: str) -> str:
    """Return what the configuration holds instead of the key."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def new(
    *,
    tenant: Annotated[str | None, Parameter(help="Tenant whose requests the key marks.")] = None,
    name: Annotated[str | None, Parameter(help="Name of the key in logs.")] = None,
    admin: Annotated[
        bool, Parameter(negative=(), help="Make a key to the admin listener instead.")
    ] = False,
) -> None:
    """Print a new key, once, and the line that grants it."""
    if admin is (tenant is not None):
        raise ConfigError([Fault(Origin("key new"), "give either --tenant or --admin")])
    key = minted()
    whose = "" if admin else f'tenant: "{tenant}", '
    line = f'{{name: "{name or tenant or "admin"}", {whose}hash: "{key_hash(key)}"}}'
    parse(line, AdminKeySpec if admin else KeySpec, "key new")
    print("# Shown once: keep it where the caller finds it.", file=sys.stderr)
    print(key)
    place = "admin.keys" if admin else "keys"
    print(f"# Under `{place}:` of the configuration:", file=sys.stderr)
    print(f"  - {line}")
