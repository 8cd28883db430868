"""What does a YAML or JSON text say, and on which line does it say it?

Scalars are those of YAML 1.2's core schema, so `no` is a string and `1e-5` a number. JSON is read
as the YAML it is. No tags, no duplicate keys, no number that is not finite; size, count of nodes
and nesting are bounded with aliases counted in full, so no text expands without end.
"""

import re
from collections.abc import Iterator

import yaml
from msgspec import Struct

from headrace.config.errors import ConfigError, Fault, Origin
from headrace.units import MIB

BYTES_MAX = 4 * MIB
"""Longest text, in bytes. A tenant takes about 100, so ten thousands fit."""
NODES_MAX = 100_000
"""Most values of one text, repeated aliases counted each time."""
DEPTH_MAX = 32
"""Deepest nesting. The schema itself needs eight."""
DIGITS_MAX = 40
"""Longest whole number, in characters."""

Scalar = str | int | float | bool | None
Plain = Scalar | list["Plain"] | dict[str, "Plain"]

_INT = re.compile(r"[-+]?[0-9]+")
_RADIX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# libyaml is many times faster; wheels of PyYAML bring it, some source builds do not.
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Node(Struct, frozen=True):
    """A value with the place it was written at; an entry of a mapping stands at its key."""

    origin: Origin
    content: "Scalar | dict[str, Node] | list[Node]"
    size: int = 1
    """Values in it, itself included."""
    height: int = 0
    """Levels below it."""
    given: "Node | None" = None
    """The word that was written for the content, as a profile's name is."""

    def plain(self) -> Plain:
        """Return the value alone."""
        match self.content:
            case dict() as entries:
                return {key: node.plain() for key, node in entries.items()}
            case list() as items:
                return [node.plain() for node in items]
            case scalar:
                return scalar


def branch(origin: Origin, content: dict[str, Node] | list[Node]) -> Node:
    """Return a node of nodes."""
    below = list(content.values()) if isinstance(content, dict) else content
    size = 1 + sum(node.size for node in below)
    height = 1 + max((node.height for node in below), default=0)
    return Node(origin=origin, content=content, size=size, height=height)


def planted(value: object, origin: Origin) -> Node:
    """Return a value that was not read from a text, all of it at one place."""
    match value:
        case dict():
            return branch(origin, {str(key): planted(one, origin) for key, one in value.items()})
        case list() | tuple():
            return branch(origin, [planted(one, origin) for one in value])
        case None | str() | int() | float():
            return Node(origin=origin, content=value)
        case _:
            raise TypeError(f"no plain value: {type(value).__name__}")


def read_tree(text: str, name: str) -> Node:
    """Return the one document of a text; raises ConfigError with line and column."""
    if name.endswith(".json"):
        text = text.replace("\t", " ")  # legal between JSON's tokens and nowhere else; not in YAML
    if len(text) > BYTES_MAX or len(text.encode("utf-8", "replace")) > BYTES_MAX:
        raise ConfigError([Fault(Origin(name), f"longer than {BYTES_MAX} bytes")])
    try:
        return _Builder(name).build(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = Origin(name, mark.line + 1, mark.column + 1) if mark else Origin(name)
        raise ConfigError([Fault(origin, f"not YAML: {error.problem or error.context}")]) from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError([Fault(Origin(name), f"not YAML: {error}")]) from error


class _Open(Struct):
    """A mapping or list whose end has not come yet."""

    origin: Origin
    anchor: str | None
    content: dict[str, Node] | list[Node]
    key: tuple[str, Origin] | None = None
    """Of a mapping: the key whose value is due."""


class _Builder:
    """Builds one document from the parser's events; an explicit stack, so depth is ours to bound."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stack: list[_Open] = []
        self._anchors: dict[str, Node | None] = {}  # None: still open
        self._total = 0
        self._root: Node | None = None
        self._documents = 0

    def build(self, text: str) -> Node:
        for event in self._events(text):
            self._step(event)
        return self._root or Node(origin=Origin(self._name, 1), content=None)

    def _events(self, text: str) -> Iterator[yaml.Event]:
        loader = _LOADER(text)
        try:
            while loader.check_event():
                yield loader.get_event()
        finally:
            loader.dispose()

    def _step(self, event: yaml.Event) -> None:
        origin = Origin(self._name, event.start_mark.line + 1 if event.start_mark else None)
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self._refuse(origin, f"tag {tag} is not supported")
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise self._refuse(origin, "a second document: one file, one document")
            case yaml.ScalarEvent():
                self._scalar(event, origin)
            case yaml.AliasEvent():
                self._alias(event, origin)
            case yaml.MappingStartEvent():
                self._enter(_Open(origin, event.anchor, {}))
            case yaml.SequenceStartEvent():
                self._enter(_Open(origin, event.anchor, []))
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                done = self._stack.pop()
                self._add(branch(done.origin, done.content), done.anchor)
            case _:  # start and end of the stream
                pass

    def _enter(self, opened: _Open) -> None:
        if len(self._stack) >= DEPTH_MAX:
            raise self._refuse(opened.origin, f"nested deeper than {DEPTH_MAX} levels")
        if self._stack and self._wants_key():
            raise self._refuse(opened.origin, "a key must be a single word, not a collection")
        if opened.anchor:
            self._anchors[opened.anchor] = None
        self._count(1, opened.origin)
        self._stack.append(opened)

    def _scalar(self, event: yaml.ScalarEvent, origin: Origin) -> None:
        self._count(1, origin)
        if self._stack and self._wants_key():
            self._key(event, origin)
            return
        content = self._value(event.value, origin) if event.implicit[0] else event.value
        self._add(Node(origin=origin, content=content), event.anchor)

    def _key(self, event: yaml.ScalarEvent, origin: Origin) -> None:
        opened = self._stack[-1]
        assert isinstance(opened.content, dict)
        if event.value in opened.content:
            first = opened.content[event.value].origin.line
            raise self._refuse(origin, f"duplicate key `{event.value}`", f"first on line {first}")
        if event.anchor:
            self._anchors[event.anchor] = Node(origin=origin, content=event.value)
        opened.key = (event.value, origin)

    def _alias(self, event: yaml.AliasEvent, origin: Origin) -> None:
        if self._stack and self._wants_key():
            raise self._refuse(origin, "a key must be a single word, not an alias")
        if event.anchor not in self._anchors:
            raise self._refuse(origin, f"unknown alias *{event.anchor}")
        target = self._anchors[event.anchor]
        if target is None:
            raise self._refuse(origin, f"alias *{event.anchor} stands inside what it names")
        if len(self._stack) + target.height > DEPTH_MAX:
            raise self._refuse(origin, f"nested deeper than {DEPTH_MAX} levels")
        self._count(target.size, origin)
        self._add(target, None)

    def _add(self, node: Node, anchor: str | None) -> None:
        if anchor:
            self._anchors[anchor] = node
        if not self._stack:
            self._root = node
            return
        opened = self._stack[-1]
        if isinstance(opened.content, list):
            opened.content.append(node)
            return
        assert opened.key is not None, "a value without a key"
        key, origin = opened.key
        opened.content[key] = Node(origin, node.content, node.size, node.height)
        opened.key = None

    def _wants_key(self) -> bool:
        opened = self._stack[-1]
        return isinstance(opened.content, dict) and opened.key is None

    def _value(self, text: str, origin: Origin) -> Scalar:
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text) or _RADIX.fullmatch(text):
            if len(text) > DIGITS_MAX:
                raise self._refuse(origin, f"a number of more than {DIGITS_MAX} digits")
            # int(text, 0) refuses the leading zeros that YAML allows.
            return int(text, 0) if _RADIX.fullmatch(text) else int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if number in (float("inf"), float("-inf")):
                raise self._refuse(origin, f"{text[:DIGITS_MAX]} is too large a number")
            return number
        return text

    def _count(self, nodes: int, origin: Origin) -> None:
        self._total += nodes
        if self._total > NODES_MAX:
            raise self._refuse(origin, f"more than {NODES_MAX} values")

    def _refuse(self, origin: Origin, message: str, hint: str = "") -> ConfigError:
        return ConfigError([Fault(origin, message, hint=hint)])
