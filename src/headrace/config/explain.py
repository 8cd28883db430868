"""What is each setting, where does its value come from, and why is its default what it is?"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.config.measured import day
from headrace.config.resolve import Resolved
from headrace.config.tree import Node
from headrace.model.envelope import Origin, Reading, told
from headrace.policy.envelopes import reading

DEFAULT = "default"


class Row(Struct, frozen=True, kw_only=True):
    """One setting, explained."""

    path: str
    """As in `deployment.pools[0].replicas`; the same words set it by flag."""
    value: Any
    source: str
    """`flag ...`, `environment ...`, `file:line` or `default`."""
    about: str
    """Unit, default and why."""


def rows(resolved: Resolved) -> list[Row]:
    """Return every setting in the order of the schema."""
    found = _struct_rows(resolved.settings, resolved.tree, "")
    rates = {
        f"deployment.pools[{nth}].work_rate": reading(resolved.settings.deployment, pool)
        for nth, pool in enumerate(resolved.settings.deployment.pools)
    }
    return [_read_off(row, rates[row.path]) if row.path in rates else row for row in found]


def _read_off(row: Row, found: Reading) -> Row:
    """Return the row of a work rate with what it comes to, and by which envelope."""
    if found.origin in (Origin.DECLARED, Origin.DEFAULT):
        return replace(row, value=found.work_rate)
    assert found.envelope is not None, f"{found.origin=} has no envelope"
    source = f"{row.source}: {told(found)}; measured {day(found.envelope.measured_at_s)}"
    return replace(row, value=found.work_rate, source=source)


def sources(resolved: Resolved) -> dict[str, str]:
    """Return each setting's source by its path."""
    return {row.path: row.source for row in rows(resolved)}


def _struct_rows(value: Struct, node: Node | None, path: str) -> Iterator[Row]:
    config = value.__struct_config__
    about = docs(type(value))
    written = node.content if node is not None and isinstance(node.content, dict) else {}
    if config.tag_field is not None:
        tag = written.get(config.tag_field)
        about_tag = (inspect.getdoc(type(value)) or "").partition("\n")[0]
        yield _row(_below(path, config.tag_field), config.tag, tag, about_tag)
    for field in msgspec.structs.fields(value):
        child = written.get(field.encode_name)
        place = _below(path, field.encode_name)
        yield from _rows(getattr(value, field.name), child, place, about.get(field.name, ""))


def _rows(value: Any, node: Node | None, path: str, about: str) -> Iterator[Row]:
    if node is not None and node.given is not None:
        yield _row(path, node.given.content, node.given, about)
    elif isinstance(value, Struct):
        yield from _struct_rows(value, node, path)
    elif isinstance(value, tuple) and any(isinstance(one, Struct) for one in value):
        written = node.content if node is not None and isinstance(node.content, list) else []
        for i, one in enumerate(value):
            child = written[i] if i < len(written) else None
            yield from _rows(one, child, f"{path}[{i}]", about)
    else:
        plain = list(value) if isinstance(value, tuple) else value
        yield _row(path, msgspec.to_builtins(plain), node, about)


def _row(path: str, value: Any, node: Node | None, about: str) -> Row:
    return Row(path=path, value=value, source=str(node.origin) if node else DEFAULT, about=about)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@cache
def docs(struct: type[Struct]) -> dict[str, str]:
    """Return what stands below each field of a struct, in one line; read off its source."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, Struct) and base is not Struct:
            found.update(_docs_of(base))
    return found


def _docs_of(struct: type[Struct]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(struct))
    except OSError:  # installed without its sources
        return {}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef), f"{struct} is no class"
    found: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found
