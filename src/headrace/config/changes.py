"""What may be shown of a configuration, and how do two differ? Secrets stay out of both."""

from typing import Any

import msgspec

from headrace.config.build import SECRETS
from headrace.config.schema import Settings

HIDDEN = "(not shown)"
Changes = dict[str, tuple[Any, Any]]
"""(old, new) by path; a setting that is on one side only is None on the other."""


def public(settings: Settings) -> Any:
    """Return the settings as plain values without what is secret."""
    return _open(msgspec.to_builtins(settings))


def changes(old: Settings, new: Settings) -> Changes:
    """Return every setting that differs, by a path such as `deployment.tenants[0].weight`."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    _flatten(msgspec.to_builtins(old), "", before)
    _flatten(msgspec.to_builtins(new), "", after)
    found: Changes = {}
    for path in dict.fromkeys((*before, *after)):
        was, is_now = before.get(path), after.get(path)
        if was != is_now:
            secret = path.rpartition(".")[2] in SECRETS
            found[path] = (HIDDEN, HIDDEN) if secret else (was, is_now)
    return found


def _open(value: Any) -> Any:
    match value:
        case dict():
            return {key: _open(below) for key, below in value.items() if key not in SECRETS}
        case list() | tuple():
            return [_open(below) for below in value]
        case _:
            return value


def _flatten(value: Any, path: str, into: dict[str, Any]) -> None:
    match value:
        case dict() if value:
            for key, below in value.items():
                _flatten(below, f"{path}.{key}" if path else key, into)
        case list() | tuple() if value:
            for nth, below in enumerate(value):
                _flatten(below, f"{path}[{nth}]", into)
        case _:
            into[path] = value
