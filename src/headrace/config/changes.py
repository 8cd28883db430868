"""What may be shown of a configuration, and how do two differ? Secrets stay out of both."""

from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headrace.config.build import SECRETS
from headrace.config.schema import Settings

HIDDEN = "(not shown)"
TOLD_MAX = 100
"""Changes that are told of one step. 100: more is not read, and would fill logs and memory."""
Named = dict[str, Any]
Changes = dict[str, tuple[Any, Any]]
"""(old, new) by path; a setting that is on one side only is None on the other."""


def public(settings: Settings) -> Any:
    """Return the settings as plain values without what is secret."""
    return _open(msgspec.to_builtins(settings))


def changes(old: Settings, new: Settings) -> Changes:
    """Return every setting that differs, by a path such as `deployment.tenants[a].weight`.

    What has a name goes by it, so that one more or less renames no other, and is told whole where it
    comes or goes. Where only places differ, `.order` has who stood first at the first that does.
    """
    found: Changes = {}
    _compare(msgspec.to_builtins(old), msgspec.to_builtins(new), "", found)
    return found


def first(found: Changes) -> tuple[Changes, int | UnsetType]:
    """Return as many changes as are told, and how many more there are; unset if none."""
    more = len(found) - TOLD_MAX
    return (dict(islice(found.items(), TOLD_MAX)), more) if more > 0 else (found, UNSET)


def _open(value: Any) -> Any:
    match value:
        case dict():
            return {key: _open(below) for key, below in value.items() if key not in SECRETS}
        case list() | tuple():
            return [_open(below) for below in value]
        case _:
            return value


def _compare(old: Any, new: Any, path: str, found: Changes) -> None:
    if old == new:
        return
    known = len(found)
    match old, new:
        case (dict(), dict() | None) | (None, dict()):
            _compare_parts(old or {}, new or {}, path, found)
        case (list() | tuple(), list() | tuple()):
            _compare_lists(old, new, path, found)
        case _:
            pass
    if len(found) == known:
        found[path] = _open(old), _open(new)


def _compare_parts(old: Named, new: Named, path: str, found: Changes) -> None:
    for key in dict.fromkeys((*old, *new)):
        at, was, is_now = f"{path}.{key}" if path else key, old.get(key), new.get(key)
        if key not in SECRETS:
            _compare(was, is_now, at, found)
        elif was != is_now:
            found[at] = HIDDEN, HIDDEN


def _compare_lists(old: Sequence[Any], new: Sequence[Any], path: str, found: Changes) -> None:
    """Compare by name, or by place; what is no more than a list of words is told as one."""
    was, is_now = _named(old), _named(new)
    if was is None or is_now is None:
        if any(isinstance(one, dict) for one in (*old, *new)):
            for nth, (one, other) in enumerate(zip_longest(old, new)):
                _compare(one, other, f"{path}[{nth}]", found)
        return
    for name in dict.fromkeys((*was, *is_now)):
        at = f"{path}[{name}]"
        if name in was and name in is_now:
            _compare(was[name], is_now[name], at, found)
        else:
            found[at] = _open(was.get(name)), _open(is_now.get(name))
    stayed = (name for name in was if name in is_now)
    moved = zip(stayed, (name for name in is_now if name in was), strict=True)
    place = next((both for both in moved if both[0] != both[1]), None)
    if place is not None:
        found[f"{path}.order"] = place


def _named(rows: Sequence[Any]) -> Named | None:
    """Return the rows by their names, if each has one of its own."""
    named = [row for row in rows if isinstance(row, dict) and row.get("name") is not None]
    found = {str(row["name"]): row for row in named}
    return found if len(found) == len(rows) else None
