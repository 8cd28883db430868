"""Which value does each setting get? Flag before environment before file before default, once.

A variable such as HEADRACE_SERVER__PORT=9000 sets `server.port`; items of lists go by number:
HEADRACE_DEPLOYMENT__POOLS__0__REPLICAS=2. Only names with `__` or of a top-level setting are ours
to read, and of those an unknown one is an error.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo

from headrace.config import shapes
from headrace.config.build import build, descend, read_text, unknown_field, with_profiles
from headrace.config.check import problems
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.problem import Severity
from headrace.config.schema import Settings
from headrace.config.tree import Node, branch, planted, read_tree

PREFIX = "HEADRACE_"
_DEFAULT = Origin("default")
_DIGITS_MAX = 6
_KIND = "kind"  # the field that tells apart the members of every union
_NOTHING = ("", "~", "null")


class Resolved(Struct, frozen=True, kw_only=True):
    """A configuration that may be used, and where its values come from."""

    settings: Settings
    tree: Node
    """What was written, without defaults."""
    warnings: tuple[Fault, ...]


def resolve(path: Path, env: Mapping[str, str], flags: Mapping[str, str]) -> Resolved:
    """Return the settings of a file under an environment and flags (`server.port` -> text).

    Raises ConfigError with every fault: of reading first, else of types, else of sense.
    """
    return resolved(read_text(path), str(path), path.parent, env, flags)


def resolved(
    text: str, name: str, folder: Path, env: Mapping[str, str], flags: Mapping[str, str]
) -> Resolved:
    """Return the settings of a text; see `resolve`."""
    tree = with_profiles(read_tree(text, name), Settings, folder)
    # Named profiles are unfolded before and after: a part of one may be set, or another chosen.
    tree = with_profiles(_overlaid(tree, env, flags), Settings, folder)
    settings = build(tree, Settings)
    found = [
        (one.severity, Fault(descend(tree, one.path).origin, one.message, one.path))
        for one in problems(settings)
    ]
    found.sort(key=lambda one: one[1].place())
    errors = [fault for severity, fault in found if severity is Severity.ERROR]
    if errors:
        raise ConfigError(errors)
    return Resolved(settings=settings, tree=tree, warnings=tuple(fault for _, fault in found))


def _overlaid(tree: Node, env: Mapping[str, str], flags: Mapping[str, str]) -> Node:
    top = shapes.fields(Settings)
    faults: list[Fault] = []
    for given, word, split in ((env, "environment", _of_variable), (flags, "flag", _of_flag)):
        # Kinds first: another kind has other settings, which may be set beside it.
        ordered = sorted((split(name)[-1:] != (_KIND,), name) for name in given)
        for _, name in ordered:
            steps, text = split(name), given[name]
            if given is env and not (steps and (len(steps) > 1 or steps[0] in top)):
                continue
            try:
                tree = _set(tree, Settings, steps, text, Origin(f"{word} {name}"))
            except ConfigError as error:
                faults.extend(error.faults)
    if faults:
        raise ConfigError(faults)
    return tree


def _of_variable(name: str) -> tuple[str, ...]:
    return tuple(name[len(PREFIX) :].lower().split("__")) if name.startswith(PREFIX) else ()


def _of_flag(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[^.\[\]]+", name))


def _set(
    node: Node, type_: Any, steps: tuple[str, ...], text: str, origin: Origin, path: str = "$"
) -> Node:
    """Return the tree with one value replaced."""
    if not steps:
        return _value(type_, text, origin)
    if shapes.structs(type_) and not isinstance(node.content, dict | None):
        return node  # wrong already, which is told when the tree is built
    step, rest = steps[0], steps[1:]
    if isinstance(node.content, list):
        item = shapes.item_type(type_, 0)
        if not (step.isdecimal() and len(step) <= _DIGITS_MAX and int(step) < len(node.content)):
            message = f"no item `{step}`: there are {len(node.content)}"
            raise ConfigError([Fault(origin, message, path)])
        items = list(node.content)
        below = f"{path}[{int(step)}]"
        items[int(step)] = _set(items[int(step)], item, rest, text, origin, below)
        return branch(node.origin, items)
    entries = dict(node.content) if isinstance(node.content, dict) else {}
    tag = entries.get(shapes.tag_field(type_) or "")
    struct = shapes.struct_of(type_, tag.content if tag else None)
    if struct is None:
        raise ConfigError([Fault(origin, f"nothing to set below, so no `{step}`", path)])
    if step == struct.__struct_config__.tag_field:
        kind = Node(origin=origin, content=text)
        changed = struct.__struct_config__.tag != text
        return branch(node.origin, {step: kind} if changed else {**entries, step: kind})
    field = shapes.fields(struct).get(step)
    if field is None:
        raise ConfigError([unknown_field(origin, step, struct, path)])
    child = entries.get(step) or _standard(field)
    entries[step] = _set(child, field.type, rest, text, origin, f"{path}.{step}")
    return branch(node.origin, entries)


def _value(type_: Any, text: str, origin: Origin) -> Node:
    if shapes.is_text(type_):
        empty = type(None) in shapes.options(type_) and text in _NOTHING
        return Node(origin=origin, content=None if empty else text)
    return planted(read_tree(text, str(origin)).plain(), origin)


def _standard(field: FieldInfo) -> Node:
    """Return a field's default, so that a part of it can be set."""
    if field.default is NODEFAULT:
        return Node(origin=_DEFAULT, content=None)
    return planted(msgspec.to_builtins(field.default), _DEFAULT)
