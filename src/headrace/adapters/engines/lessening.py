"""How is a request written that is served in a lesser form (DEG-1)?

Of the prompt what may be left out goes, the least useful first; what stays is written as it was. Effort
is lowered where the caller said how much, and nowhere said that it did not: some models take none.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Raw

from headrace.model.ladder import Effort
from headrace.ports.engine import Place, Route
from headrace.units import Tokens

_MESSAGES: dict[Route, str] = {
    Route.CHAT: "messages",
    Route.RESPONSES: "input",
    Route.MESSAGES: "messages",
}
_EFFORTS = ("none", *Effort, "high", "xhigh")
"""From least to most; a word that is not among them is left alone."""
_BUDGET_MIN = 1_024
"""Tokens to think with that Anthropic's API takes at least."""
_OFF = Raw(b'{"type":"disabled"}')
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_ITEMS = msgspec.json.Decoder(list[Raw])
_COUNT = msgspec.json.Decoder(int)
_encode: Callable[[object], bytes] = msgspec.json.Encoder().encode


def without(fields: Mapping[str, Raw], route: Route, gone: Sequence[Place]) -> dict[str, Raw]:
    """Return what changes in a body's fields where some places of its prompt are left out.

    A message of which nothing is left goes as well. `gone` is what was read of this very body.
    """
    if not gone:
        return {}
    by_message: defaultdict[int, set[int | None]] = defaultdict(set)
    for place in gone:
        by_message[place[0]].add(place[1])
    name = _MESSAGES[route]
    left: list[Raw] = []
    for nth, message in enumerate(_ITEMS.decode(fields[name])):
        parts = by_message.get(nth)
        kept = message if parts is None else _without_parts(message, parts)
        if kept is not None:
            left.append(kept)
    return {name: Raw(_encode(left))}


def _without_parts(message: Raw, gone: set[int | None]) -> Raw | None:
    """Return a message without some of its parts, or None if nothing is left of it."""
    if None in gone:
        return None
    said = _FIELDS.decode(message)
    parts = _ITEMS.decode(said["content"])
    left = [part for nth, part in enumerate(parts) if nth not in gone]
    return Raw(_encode(said | {"content": Raw(_encode(left))})) if left else None


def calmer(fields: Mapping[str, Raw], route: Route, most: Effort) -> dict[str, Raw]:
    """Return what changes in a body's fields for a model to reason no more than so much."""
    match route:
        case Route.CHAT | Route.COMPLETIONS:
            return _lowered(fields, "reasoning_effort", most)
        case Route.RESPONSES:
            inner = _object(fields, "reasoning")
            changes = _lowered(inner, "effort", most)
            return {"reasoning": Raw(_encode(inner | changes))} if changes else {}
        case Route.MESSAGES | Route.EMBEDDINGS:
            return {}


def _lowered(fields: Mapping[str, Raw], name: str, most: Effort) -> dict[str, Raw]:
    try:
        told = msgspec.json.decode(fields[name], type=str) if name in fields else ""
    except _UNREADABLE:
        return {}
    if told not in _EFFORTS or _EFFORTS.index(told) <= _EFFORTS.index(most):
        return {}
    return {name: Raw(_encode(most))}


def thinking(fields: Mapping[str, Raw], route: Route, limit: Tokens) -> dict[str, Raw]:
    """Return what changes for a message whose thoughts would not leave room for an answer of `limit` tokens.

    Half of the limit is for thoughts then, or none are thought: engines refuse a budget that is no less
    than the limit.
    """
    told = _object(fields, "thinking") if route is Route.MESSAGES else {}
    try:
        budget = _COUNT.decode(told.get("budget_tokens", b"0"))
    except _UNREADABLE:
        return {}
    if budget < limit:
        return {}
    if limit // 2 < _BUDGET_MIN:
        return {"thinking": _OFF}
    return {"thinking": Raw(_encode(told | {"budget_tokens": limit // 2}))}


def least(fields: Mapping[str, Raw], limit: Tokens) -> dict[str, Raw]:
    """Return what changes where an answer is to be longer than it may be, by vLLM's and SGLang's field."""
    try:
        told = _COUNT.decode(fields.get("min_tokens", b"0"))
    except _UNREADABLE:
        return {}
    return {"min_tokens": Raw(b"%d" % limit)} if told > limit else {}


def _object(fields: Mapping[str, Raw], name: str) -> dict[str, Raw]:
    """Return the fields of an object within a body; none where it is no object."""
    try:
        return _FIELDS.decode(fields[name]) if name in fields else {}
    except _UNREADABLE:
        return {}
