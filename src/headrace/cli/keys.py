"""`headrace key new`: an API key, told once, and the line that grants it."""

import hashlib
import secrets
import sys
from typing import Annotated

from cyclopts import Parameter

from headrace.config.load import parse
from headrace.config.schema import KeySpec

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
    tenant: Annotated[str, Parameter(help="Tenant whose requests the key marks.")],
    name: Annotated[str | None, Parameter(help="Name of the key in logs.")] = None,
) -> None:
    """Print a new key, once, and the line that grants it."""
    key = minted()
    line = f'{{name: "{name or tenant}", tenant: "{tenant}", hash: "{key_hash(key)}"}}'
    parse(line, KeySpec, "key new")
    print("# Shown once: keep it where the caller finds it.", file=sys.stderr)
    print(key)
    print("# Under `keys:` of the configuration:", file=sys.stderr)
    print(f"  - {line}")
