"""Does a tree fit a type? Its value, or everything that is wrong with it.

msgspec does the conversion and stops at the first fault. Only then is the tree walked beside the
type, part by part, so that one reading tells all faults, each at the deepest line known.
"""

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from headrace.config import shapes
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.profiles import load_profile, profile_names
from headrace.config.tree import BYTES_MAX, Node, branch, planted, read_tree
from headrace.model.envelope import Envelope
from headrace.model.profile import Profile

T = TypeVar("T")

_PROFILE_SUFFIXES = (".yaml", ".yml", ".json")
SECRETS = frozenset({"hash", "key", "secret", "token", "password", "env"})
"""Fields whose text is never repeated, in errors or anywhere else."""
_UNSHOWN = SECRETS | {"url"}
"""Those, and addresses: one that is refused may be so for the password in it."""
_SHOWN_MAX = 40
_LISTED_MAX = 16
_AT = re.compile(r" - at `(\$[^`]*)`$")
_IN_KEY = re.compile(r" - at `key` in `(\$[^`]*)`$")


def read_text(path: Path) -> str:
    """Return a file's text; raises ConfigError if it is missing, too long or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
        if len(content) > BYTES_MAX:
            raise ConfigError([Fault(Origin(str(path)), f"longer than {BYTES_MAX} bytes")])
        return content.decode("utf-8-sig")
    except OSError as error:
        message = (error.strerror or str(error)).lower()
        raise ConfigError([Fault(Origin(str(path)), message)]) from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([Fault(Origin(str(path), line), "not UTF-8")]) from error


def build(node: Node, type_: type[T]) -> T:
    """Return the tree as the type; raises ConfigError with every fault found."""
    try:
        return msgspec.convert(node.plain(), type_, strict=True)
    except (ValueError, ArithmeticError):
        faults = _faults(node, type_, "$")
        raise ConfigError(sorted(faults, key=Fault.place)) from None


def with_profiles(node: Node, type_: Any, folder: Path) -> Node:
    """Return the tree with every profile, and file of envelopes, replaced by what its name stands for.

    A name is a packaged profile's, or a path to a file, from the folder of the configuration.
    """
    faults: list[Fault] = []
    grown = _grown(node, type_, "$", folder, faults)
    if faults:
        raise ConfigError(faults)
    return grown


def _grown(node: Node, type_: Any, path: str, folder: Path, faults: list[Fault]) -> Node:
    if isinstance(node.content, str) and (unfold := _unfolded(type_)):
        try:
            return unfold(node, node.content, path, folder)
        except ConfigError as error:
            faults.extend(error.faults)
            return node
    if node.given is not None or not isinstance(node.content, dict | list):
        return node
    below: dict[str | int, Node] = {
        step: _grown(child, kind, path + _step(step), folder, faults)
        for step, child, kind in _children(node, type_)
    }
    if isinstance(node.content, dict):
        entries = {key: below.get(key, child) for key, child in node.content.items()}
        return branch(node.origin, entries)
    return branch(node.origin, [below.get(i, child) for i, child in enumerate(node.content)])


def _unfolded(type_: Any) -> Callable[[Node, str, str, Path], Node] | None:
    """Return what turns a word into what it stands for here; None: a word is just that."""
    if Profile in shapes.options(type_):
        return _profile
    return _envelopes if shapes.item_type(type_, 0) is Envelope else None


def _envelopes(node: Node, name: str, path: str, folder: Path) -> Node:
    inner = _read_file("envelopes", node, name, path, folder)
    entries = inner.content
    if isinstance(entries, dict) and "envelopes" in entries:
        inner = entries["envelopes"]
    if not isinstance(inner.content, list):
        hint = "a file that `headrace capacity --json` wrote"
        raise ConfigError(
            [Fault(node.origin, f"envelopes {folder / name}: none there", path, hint)]
        )
    return Node(inner.origin, inner.content, inner.size, inner.height, given=node)


def _read_file(what: str, node: Node, name: str, path: str, folder: Path) -> Node:
    """Return the tree of a file that a node names; errors are the node's."""
    file = folder / name
    try:
        text = read_text(file)
    except ConfigError as error:
        found = [f"{what} {one.origin}: {one.message}" for one in error.faults]
        raise ConfigError([Fault(node.origin, one, path) for one in found]) from error
    return read_tree(text, str(file))


def _profile(node: Node, name: str, path: str, folder: Path) -> Node:
    if name.endswith(_PROFILE_SUFFIXES):
        inner = _read_file("profile", node, name, path, folder)
    elif name in profile_names():
        inner = planted(msgspec.to_builtins(load_profile(name)), node.origin)
    else:
        known = ", ".join(profile_names())
        hint = f"a path ending in .yaml, .yml or .json, or one of {known}"
        raise ConfigError([Fault(node.origin, f"unknown profile {_shown(name)}", path, hint)])
    return Node(inner.origin, inner.content, inner.size, inner.height, given=node)


def _children(node: Node, type_: Any) -> list[tuple[str | int, Node, Any]]:
    """Return (step, node, type) of what stands below a node, as far as types are known."""
    match node.content:
        case dict() as entries:
            struct = shapes.struct_of(type_, _tag(node, type_))
            if struct is not None:
                fields = shapes.fields(struct)
                return [(k, n, fields[k].type) for k, n in entries.items() if k in fields]
            inner = shapes.value_type(type_)
            return [] if inner is None else [(k, n, inner) for k, n in entries.items()]
        case list() as items:
            found = [(i, n, shapes.item_type(type_, i)) for i, n in enumerate(items)]
            return [(i, n, kind) for i, n, kind in found if kind is not None]
        case _:
            return []


def _tag(node: Node, type_: Any) -> object:
    field = shapes.tag_field(type_)
    if field is None or not isinstance(node.content, dict) or field not in node.content:
        return None
    return node.content[field].content


def _faults(node: Node, type_: Any, path: str) -> list[Fault]:
    """Return what is wrong at or below a node; empty if it fits."""
    try:
        msgspec.convert(node.plain(), type_, strict=True)
    except msgspec.ValidationError as error:
        text = str(error)
    except (ValueError, ArithmeticError) as error:
        # Raised by arithmetic in a check of the struct's own, which msgspec does not wrap.
        text = f"out of range: {error}"
    else:
        return []
    found = [*_kind_faults(node, type_, path), *_field_faults(node, type_, path)]
    for step, child, kind in _children(node, type_):
        found.extend(_faults(child, kind, path + _step(step)))
    return found or [_own_fault(node, type_, path, text)]


def _kind_faults(node: Node, type_: Any, path: str) -> list[Fault]:
    """Return the fault of an unknown member of a tagged union."""
    field, known = shapes.tag_field(type_), shapes.tags(type_)
    if field is None or not isinstance(node.content, dict) or field not in node.content:
        return []
    chosen = node.content[field]
    if isinstance(chosen.content, str) and chosen.content not in known:
        hint = f"one of {', '.join(sorted(known))}"
        message = f"unknown {field} {_shown(chosen.content)}"
        return [Fault(chosen.origin, message, f"{path}.{field}", hint)]
    return []


def _field_faults(node: Node, type_: Any, path: str) -> list[Fault]:
    """Return the fields that a struct does not know, and those that it misses."""
    struct = shapes.struct_of(type_, _tag(node, type_))
    if struct is None or not isinstance(node.content, dict):
        return []
    fields = shapes.fields(struct)
    known = {*fields, struct.__struct_config__.tag_field or ""}
    unknown = [
        unknown_field(child.origin, key, struct, path)
        for key, child in node.content.items()
        if key not in known and struct.__struct_config__.forbid_unknown_fields
    ]
    missing = [
        Fault(node.origin, f"missing field `{key}`", path)
        for key, field in fields.items()
        if field.required and key not in node.content
    ]
    return unknown + missing


def unknown_field(origin: Origin, key: str, struct: type[Struct], path: str) -> Fault:
    """Return the fault of a field that a struct does not have, with the closest it has."""
    return Fault(origin, f"unknown field `{key}`", path, _similar(key, struct))


def _similar(key: str, struct: type[Struct]) -> str:
    names = list(shapes.fields(struct))
    formerly: dict[str, str] = getattr(struct, "formerly", {})
    if key in formerly:
        return formerly[key]
    close = difflib.get_close_matches(key[:_SHOWN_MAX], names, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"known: {', '.join(names)}" if len(names) <= _LISTED_MAX else ""


def _own_fault(node: Node, type_: Any, path: str, text: str) -> Fault:
    """Return msgspec's own finding, in the words of YAML, at the deepest node it names."""
    found = _AT.search(text) or _IN_KEY.search(text)
    below = found.group(1)[1:] if found else ""
    message = text[: found.start()] if found else text
    deepest = descend(node, f"${below}")
    message = message.replace("`object`", "`mapping`").replace("`array`", "`list`")
    if message.startswith(("Expected", "Invalid", "Object")):
        message = message[0].lower() + message[1:]
    words = shapes.members(type_) if not below else ()
    hint = f"one of {', '.join(words)}" if words else ""
    last = path.rpartition(".")[2]
    scalar = not isinstance(deepest.content, dict | list | None)
    if not words and scalar and " got " not in message and last not in _UNSHOWN:
        hint = f"got {_shown(deepest.content)}"
    return Fault(deepest.origin, message, path + below, hint)


def descend(node: Node, path: str) -> Node:
    """Return the deepest node on the way to a path such as `$.a[0].b`."""
    for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path):
        match node.content:
            case dict() as entries if name in entries:
                node = entries[name]
            case list() as items if index and int(index) < len(items):
                node = items[int(index)]
            case _:
                return node
    return node


def _step(step: str | int) -> str:
    return f"[{step}]" if isinstance(step, int) else f".{step}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
