"""What of a caller's request is said otherwise to the engine that serves it?

The last hop: the caller's JSON is edited at its top level, and what is not edited is sent as it was
written. Which limit holds, and which engine it is, was decided before.
"""

from collections.abc import Callable
from functools import lru_cache

import msgspec
from msgspec import Raw, Struct

from headrace.adapters.engines.kinds import Priority
from headrace.adapters.engines.lessening import calmer, least, thinking, without
from headrace.model.effect import Dispatch
from headrace.model.ladder import LEVEL_MAX, Lesser
from headrace.model.told import PREFIX, Told
from headrace.ports.engine import Ask, Route
from headrace.units import NS_PER_MS, DurationNs, InstantNs

_OUTPUT_LIMITS: dict[Route, tuple[str, ...]] = {
    # Both are known to vLLM, SGLang and llama.cpp; the first is what all their releases know, so it is
    # said where the caller said neither. OpenAI's own newest models want the second.
    Route.CHAT: ("max_tokens", "max_completion_tokens"),
    Route.COMPLETIONS: ("max_tokens",),
    Route.RESPONSES: ("max_output_tokens",),
    Route.MESSAGES: ("max_tokens",),
    Route.EMBEDDINGS: (),
}
"""What the most tokens of an answer are called; the first is said where a caller said none."""
_STREAM_OPTIONS = "stream_options"
_WITH_OPTIONS = (Route.CHAT, Route.COMPLETIONS)
"""Routes whose requests have `stream_options`, and, with vLLM and SGLang, the two fields that make an
answer exactly so long."""
_WITH_METADATA = frozenset(Route) - {Route.EMBEDDINGS}
_TRUE = Raw(b"true")
_NULL = Raw(b"null")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_NUMBER = msgspec.json.Decoder(int | float)
_encode: Callable[[object], bytes] = msgspec.json.Encoder().encode


_PRIORITY, _METADATA = "priority", "vllm_xargs"
_RELEGATED = 1 << 50
"""How much later one comes, in ms, that can no longer make it: after all that can."""


class Marks(Struct, frozen=True, kw_only=True):
    """What an engine is told of a request's rank."""

    priority: int | None
    """As the engine reads it. None: it does not."""
    metadata: dict[str, str | int] | None
    """None: it takes none."""


UNMARKED = Marks(priority=None, metadata=None)


def marked(
    dispatch: Dispatch, now: InstantNs, *, priority: Priority | None, metadata: bool
) -> Marks:
    """Return what to tell an engine of a request that is sent `now`.

    Our own scale is the first-token deadline in ms, those that can no longer make it last; it is turned
    round for engines where more comes first.
    """
    number = None
    if priority is not None:
        late = dispatch.deadline // NS_PER_MS + (_RELEGATED if dispatch.relegated else 0)
        number = late if priority.lower_first else -late
    told = None
    if metadata:
        told = Told(
            tenant=dispatch.tenant,
            slo_class=dispatch.slo_class,
            way=dispatch.way,
            counters=dispatch.counters,
            left_ns=DurationNs(dispatch.deadline - now),
            gap_ns=dispatch.gap_ns,
            relegated=dispatch.relegated,
        ).scalars()
    return Marks(priority=number, metadata=told)


def edited(
    ask: Ask,
    dispatch: Dispatch,
    model: str,
    marks: Marks = UNMARKED,
    *,
    continuous: bool = False,
) -> bytes:
    """Return the JSON to send for a request to an engine that knows the model as `model`.

    - `model` is the engine's name for it; an adapter is called what the caller called it, unless another
      model answers.
    - The output limit is the plane's, unless the caller's own is a number that is no larger.
    - A streamed chat or completion asks for usage, with the caller's other options kept; one that is
      not streamed has no such options, since engines refuse them. `continuous`: it asks for it in each
      frame too.
    - `priority` is ours where the engine reads it, and never the caller's, who must not raise itself
      (FAIR-4); metadata joins the caller's own, which never has names of ours.
    - In a lesser form it asks for less, as the ladder says (`lessening`).
    - A replay whose length is known makes exactly so many tokens, where the route lets us say so.

    If nothing is to be changed, these are the caller's own bytes.
    """
    fields = _FIELDS.decode(ask.body)
    changes: dict[str, Raw] = {}
    lesser = dispatch.lesser
    adapter = ask.adapter if lesser is None or lesser.level < LEVEL_MAX else None
    name = _name(adapter or model)
    if _differs(fields, "model", name):
        changes["model"] = name
    if lesser is not None:
        changes |= _lessened(ask, dispatch, lesser, fields)
    _limit(ask, dispatch, fields, changes)
    if ask.stream and ask.route in _WITH_OPTIONS:
        _ask_usage(fields, changes, continuous=continuous)
    dropped = not ask.stream and fields.pop(_STREAM_OPTIONS, None) is not None
    dropped |= fields.pop(_PRIORITY, None) is not None
    _mark(ask, marks, fields, changes)
    if not changes and not dropped:
        return ask.body
    fields.update(changes)
    return _encode(fields)


def _lessened(
    ask: Ask, dispatch: Dispatch, lesser: Lesser, fields: dict[str, Raw]
) -> dict[str, Raw]:
    """Return what changes for a request to be served in a lesser form."""
    changes = thinking(fields, ask.route, dispatch.output_limit)
    changes |= least(fields, dispatch.output_limit)
    if lesser.effort is not None:
        changes |= calmer(fields, ask.route, lesser.effort)
    if lesser.kept is not None:
        changes |= without(fields, ask.route, ask.optional[lesser.kept :])
    return changes


def _limit(ask: Ask, dispatch: Dispatch, fields: dict[str, Raw], changes: dict[str, Raw]) -> None:
    """Note what must change for an answer to be as long as it may, or shall."""
    names = _OUTPUT_LIMITS[ask.route]
    if not names:
        return
    said = [name for name in names if fields.get(name, _NULL) != _NULL] or names[:1]
    if ask.replay_output is not None:
        exact = _number(max(1, min(ask.replay_output, dispatch.output_limit)))
        wanted = dict.fromkeys(said, exact)
        if ask.route in _WITH_OPTIONS:
            wanted |= {"ignore_eos": _TRUE, "min_tokens": exact}
        changes.update({name: raw for name, raw in wanted.items() if _differs(fields, name, raw)})
        return
    for name in said:
        if not _is_within(fields.get(name, _NULL), dispatch.output_limit):
            changes[name] = _number(dispatch.output_limit)


def _mark(ask: Ask, marks: Marks, fields: dict[str, Raw], changes: dict[str, Raw]) -> None:
    """Note a request's rank, on the routes where engines take it, and in no caller's name."""
    if ask.route in _WITH_OPTIONS and marks.priority is not None:
        changes[_PRIORITY] = _number(marks.priority)
    said: dict[str, Raw] = {}
    if fields.get(_METADATA, _NULL) != _NULL:
        try:
            said = _FIELDS.decode(fields[_METADATA])
        except _UNREADABLE:
            return  # the engine's to refuse
    own = {name: raw for name, raw in said.items() if not name.startswith(PREFIX)}
    if ask.route in _WITH_METADATA and marks.metadata is not None:
        told = {name: Raw(_encode(value)) for name, value in marks.metadata.items()}
        changes[_METADATA] = Raw(_encode(own | told))
    elif len(own) < len(said):
        changes[_METADATA] = Raw(_encode(own))


def _ask_usage(fields: dict[str, Raw], changes: dict[str, Raw], *, continuous: bool) -> None:
    """Note what must change for a stream to tell its usage; what is no object is the engine's to refuse."""
    options: dict[str, Raw] = {}
    told = fields.get(_STREAM_OPTIONS, _NULL)
    if told != _NULL:
        try:
            options = _FIELDS.decode(told)
        except _UNREADABLE:
            return
    names = ("include_usage", "continuous_usage_stats") if continuous else ("include_usage",)
    if any(_differs(options, name, _TRUE) for name in names):
        options.update(dict.fromkeys(names, _TRUE))
        changes[_STREAM_OPTIONS] = Raw(_encode(options))


def _differs(fields: dict[str, Raw], name: str, raw: Raw) -> bool:
    """Return whether a field is not there, or is written otherwise."""
    return fields.get(name) != raw


def _is_within(raw: Raw, limit: int) -> bool:
    """Return whether a caller's limit holds: a number from 0 to ours. -1 means none to some engines."""
    try:
        return 0 <= _NUMBER.decode(raw) <= limit
    except _UNREADABLE:
        return False


@lru_cache(maxsize=1_024)
def _name(model: str) -> Raw:
    return Raw(_encode(model))


def _number(value: int) -> Raw:
    return Raw(b"%d" % value)
