"""`headrace config`: is a file right, what does each setting come to, what may be set?"""

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from headrace.cli.errors import OK, USAGE
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.explain import Row, rows
from headrace.config.resolve import resolve
from headrace.config.schema import Settings
from headrace.gateway.fleet import fitting

_WIDTH = 100

File = Annotated[Path, Parameter(help="Configuration, YAML or JSON.")]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]
Sets = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        negative=(),
        help="A setting as PATH=VALUE, such as server.port=9000.",
        show_default=False,
    ),
]


def check(file: File, /, *, as_json: AsJson = False, sets: Sets = ()) -> int:
    """Check a configuration file; errors end with 2, warnings do not."""
    try:
        found = fitting(resolve(file, os.environ, flags(sets)))
    except ConfigError as error:
        if not as_json:
            raise
        _print_json({"ok": False, "errors": error.faults, "warnings": []})
        return USAGE
    if as_json:
        _print_json({"ok": True, "errors": [], "warnings": found.warnings})
        return OK
    for fault in found.warnings:
        print(f"headrace: warning: {fault}", file=sys.stderr)
    print(f"{file}: ok")
    return OK


def explain(file: File, /, *, as_json: AsJson = False, sets: Sets = ()) -> None:
    """Show each setting with its value, its source, and what it is for."""
    found = rows(fitting(resolve(file, os.environ, flags(sets))))
    if as_json:
        _print_json(found)
        return
    told: set[str] = set()
    for row in found:
        _print_row(row, told)


def schema() -> None:
    """Print the JSON schema of the configuration."""
    print(json.dumps(msgspec.json.schema(Settings), indent=2))


def flags(sets: tuple[str, ...]) -> dict[str, str]:
    """Return settings given as PATH=VALUE by their paths."""
    pairs = [one.partition("=") for one in sets]
    faults = [
        Fault(Origin(f"flag --set {path}"), "give PATH=VALUE")
        for path, equals, _ in pairs
        if not equals
    ]
    if faults:
        raise ConfigError(faults)
    return {path.strip(): text for path, _, text in pairs}


def _print_row(row: Row, told: set[str]) -> None:
    print(f"{row.path} = {json.dumps(row.value)}  [{row.source}]")
    if row.about and row.about not in told:
        told.add(row.about)
        print(textwrap.indent(textwrap.fill(row.about, _WIDTH - 4), "    "))


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
