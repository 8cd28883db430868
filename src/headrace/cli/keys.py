"""`headrace key new`: an API key, told once, and the line that grants it."""

import sys
from typing import Annotated

from cyclopts import Parameter

from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.load import parse
from headrace.config.schema import AdminKeySpec, KeySpec
from headrace.gateway.auth import key_hash, minted


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
