"""What is a body without what was said to us alone?

Our own object, `headrace`, stands at the top of a body, in its messages and in their parts, at any depth.
No engine is to see one, wherever it stands and whatever is in it. Schemas and arguments of tools are
the caller's own words, and left alone.
"""

import re
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Raw

OURS = "headrace"
_NAME = OURS.encode()
_LETTER = re.compile(rb"\\u00[67]")
"""A letter, which may be of the name, as an escape."""
_TOP = ("messages", "input", "system")
_WITHIN = ("content", "output", "summary", "source")
"""Fields in which messages and parts stand: of a body, and of a message or a part."""

_DEPTH_MAX = 16
"""Lists and objects within one another that are looked into: what is in each is read anew. APIs nest ten, a text of
a document in the result of a tool."""

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_ITEMS = msgspec.json.Decoder(list[Raw])
_encode: Callable[[object], bytes] = msgspec.json.Encoder().encode


def stripped(body: bytes) -> bytes:
    """Return a body of JSON without what is ours; one that has nothing of it is itself.

    What is left is written as it was. Raises `msgspec.DecodeError`, and `RecursionError` for one that is
    nested too deeply.
    """
    if _NAME not in body and not _may_be_escaped(body):
        return body
    return bytes(_object(_FIELDS.decode(body), _TOP, 0) or body)


def _may_be_escaped(body: bytes) -> bool:
    return b"\\" in body and _LETTER.search(body) is not None


def _value(value: Raw, depth: int) -> Raw | None:
    """Return a value without what is ours, or None: it has nothing of it."""
    opener = bytes(memoryview(value)[:1])
    if opener in b"[{" and depth > _DEPTH_MAX:
        raise RecursionError
    if opener == b"{":
        return _object(_FIELDS.decode(value), _WITHIN, depth)
    if opener == b"[":
        items = _ITEMS.decode(value)
        found = ((nth, _value(one, depth + 1)) for nth, one in enumerate(items))
        changed = {nth: new for nth, new in found if new is not None}
        if not changed:
            return None
        return Raw(_encode([changed.get(nth, one) for nth, one in enumerate(items)]))
    return None


def _object(fields: dict[str, Raw], within: Iterable[str], depth: int) -> Raw | None:
    was_there = fields.pop(OURS, None) is not None
    changed = {
        name: new
        for name in within
        if (one := fields.get(name)) is not None and (new := _value(one, depth + 1)) is not None
    }
    return Raw(_encode(fields | changed)) if was_there or changed else None
