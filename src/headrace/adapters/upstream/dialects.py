"""What do the frames of an event stream carry, and may the caller see it?

Three dialects. Chat and completions end with `[DONE]`; some engines leave it out, so that a body whose
end HTTP told is complete without. Messages and responses name their events and always end with one of
them: without it, a stream was cut, however its body ended.

Nothing is taken out of the latter two: what they tell of usage is theirs to tell.
"""

import re
from enum import Enum, auto
from typing import ClassVar

import msgspec
from msgspec import Raw, Struct

from headrace.adapters.upstream.sse import FRAME_MAX, Scanner, data_of, name_of
from headrace.adapters.upstream.usage import (
    UNREADABLE,
    EachUsage,
    MessageUsage,
    completion_usage,
    message_usage,
    response_usage,
)
from headrace.ports.engine import Route

LAST_MAX = 1_048_576
"""Bytes that are held of a frame that ends a stream of responses, because it tells the usage after
repeating all of the answer. 1 MiB: 100,000 tokens; beyond it the usage is not known."""

_NULL_LAST = b',"usage":null}\n\n'
_TOLD_LAST = b',"usage":{'
_CONTENT = b'"delta":{"content":"'
_TEXT = b'"text":"'
_USUAL_LINES = 2
_NAMED_LINES = 3
_TYPE = re.compile(rb'^data: ?\{\s*"type":\s*"([^"\\]*)"', re.MULTILINE)

_FIELDS = msgspec.json.Decoder(dict[str, Raw])


def scanner_for(
    route: Route, *, hide_usage: bool = False, each_usage: EachUsage = EachUsage.NOBODY
) -> Scanner:
    """Return what reads a stream of a route.

    `hide_usage`: the caller of a chat or completion did not ask for usage; `each_usage`: who asked for
    it in each frame. For other routes both are nothing.
    """
    if route is Route.MESSAGES:
        return Messages()
    if route is Route.RESPONSES:
        return Responses()
    kind = Continuous if each_usage is EachUsage.WE else Completions
    return kind(hide_usage=hide_usage)


# Chat and completions ---------------------------------------------------------------------------


class Completions(Scanner):
    """Frames without a name, `[DONE]` last, usage in one before it or in each.

    Content is what stands for tokens. Engines begin a chat by naming who speaks, perhaps before they
    have read the prompt, and some end it with a reason alone: neither is a token.
    """

    __slots__ = ("_hide",)

    _marked = False

    def __init__(self, *, hide_usage: bool = False) -> None:
        """Start before the first frame; `hide_usage`: the caller did not ask for usage."""
        super().__init__()
        self._hide = hide_usage

    def _single(self, block: bytes) -> bytes:
        """Return what goes on of one frame with one line of data, without error or told usage."""
        if (
            not block.startswith(b"data: {")
            or not block.endswith(b"\n\n")
            or block.count(b"\n") != _USUAL_LINES
            or b'"error"' in block
            or not _says(block)
        ):
            return b""
        if b'"usage"' in block:
            block = self._without_null(block)
        if block:
            self.events += 1
        return block

    def _several(self, block: bytes) -> bool:
        starts = block.count(b"\n\ndata:") + block.startswith(b"data:")
        if (
            starts
            and starts == block.count(b"\n\n")
            and b"\r" not in block
            and b'"error"' not in block
            and b"[DONE]" not in block
            and (b'"usage"' not in block or (not self._hide and _only_null(block)))
            and all(map(_says, block.removesuffix(b"\n\n").split(b"\n\n")))
        ):
            self.events += starts
            return True
        return False

    def _read(self, frame: bytes, lines: list[bytes], data: bytes) -> bytes:
        self.events += 1
        if data.strip() == b"[DONE]":
            self.done = True
            self.marks += 1
            return frame
        fields = _fields(data)
        if name_of(lines) == b"error" or _is_told(fields, "error"):
            self.marks += 1
            self.fault = data
            return b""
        self.marks += not _has_content(fields)
        if "usage" not in fields or not self._note_usage(fields):
            return frame
        return self._without_usage(fields, lines, frame[len(frame.rstrip(b"\r\n")) :])

    def _without_null(self, frame: bytes) -> bytes:
        """Return what goes on of a usual frame whose one usage is null; nothing, if it is another.

        The key before the last brace is the outermost object's own: no need to decode it.
        """
        if (
            not frame.endswith(_NULL_LAST)
            or frame.count(b'"usage"') != 1
            or len(frame) > FRAME_MAX + 1
        ):
            return b""
        return frame.removesuffix(_NULL_LAST) + b"}\n\n" if self._hide else frame

    def _note_usage(self, fields: dict[str, Raw]) -> bool:
        """Note the usage a frame tells; return whether the frame must not go on with it."""
        if _is_told(fields, "usage"):
            self.usage = completion_usage(fields["usage"]) or self.usage
        return self._hide

    def _without_usage(self, fields: dict[str, Raw], lines: list[bytes], ends: bytes) -> bytes:
        """Return a frame without its usage; nothing, if that was all it told."""
        if _is_told(fields, "usage") and _is_bare(fields):
            return b""
        del fields["usage"]
        others = [line for line in lines if not line.startswith(b"data:")]
        others.append(b"data: " + msgspec.json.encode(fields))
        return (b"\r\n" if ends.startswith(b"\r") else b"\n").join(others) + ends


class Continuous(Completions):
    """Those that tell the usage so far in each frame, which only we asked for."""

    __slots__ = ()

    def _without_null(self, frame: bytes) -> bytes:
        return self._without_told(frame) or super()._without_null(frame)

    def _without_told(self, frame: bytes) -> bytes:
        """Return what goes on of a usual frame that tells its usage last; nothing, if it is another.

        Only the outermost object's usage can be whole without that object's brace.
        """
        start = frame.rfind(_TOLD_LAST)
        if (
            start < 0
            or not frame.endswith(b"}}\n\n")
            or frame.count(b'"usage"') != 1
            or b'"choices":[{' not in frame
            or len(frame) > FRAME_MAX + 1
        ):
            return b""
        usage = completion_usage(Raw(frame[start + len(_TOLD_LAST) - 1 : -3]))
        if usage is None:
            return b""
        self.usage = usage
        return frame[:start] + b"}\n\n"

    def _note_usage(self, fields: dict[str, Raw]) -> bool:
        hidden = super()._note_usage(fields)
        return hidden or (_is_told(fields, "usage") and not _is_bare(fields))


# Messages and responses -------------------------------------------------------------------------


class _Part(Enum):
    """What an event is to a stream."""

    CONTENT = auto()
    MARK = auto()
    USAGE = auto()
    """A mark that tells usage."""
    END = auto()
    """One after which nothing comes."""
    FAULT = auto()
    ALIVE = auto()
    """It only keeps the connection open."""


class _Named(Scanner):
    """Frames that name their event, in a line of their own or as the type of their data."""

    __slots__ = ()

    _usual: ClassVar[tuple[bytes, ...]]
    """How frames with content begin, most of them."""

    @staticmethod
    def _part(name: bytes) -> _Part:
        """Return what an event is, by its name."""
        raise NotImplementedError

    def _note(self, part: _Part, data: bytes) -> None:
        """Note what an event tells of usage."""

    def _single(self, block: bytes) -> bytes:
        if (
            block.startswith(self._usual)
            and block.endswith(b"\n\n")
            and block.count(b"\n") == _NAMED_LINES
        ):
            self.events += 1
            return block
        return b""

    def _several(self, block: bytes) -> bool:
        usual = self._usual[0]
        starts = block.count(b"\n\n" + usual) + block.startswith(usual)
        if (
            starts
            and starts == block.count(b"\n\n")
            and block.count(b"\n") == starts * _NAMED_LINES
            and b"\r" not in block
        ):
            self.events += starts
            return True
        return False

    def _read(self, frame: bytes, lines: list[bytes], data: bytes) -> bytes:
        name = name_of(lines)
        part = self._part(name) if name not in _NO_NAMES else self._unnamed(data)
        if part is _Part.ALIVE:
            self.comments += 1
            return frame
        self.events += 1
        if part is _Part.CONTENT:
            return frame
        self.marks += 1
        if part is not _Part.MARK:
            self._note(part, data)
        if part is _Part.FAULT:
            self.fault = data
            return b""
        self.done = self.done or part is _Part.END
        return frame

    def _is_last(self, tail: bytes) -> bool:
        """Return whether the data is whole: half an event may bear the name of one."""
        try:
            _WHOLE.decode(data_of(tail.splitlines()) or b"")
        except UNREADABLE:
            return self.done
        return True

    def _unnamed(self, data: bytes) -> _Part:
        """Return what a frame is by its data: a type, or an error as in other dialects."""
        try:
            name = bytes(_TYPED.decode(data).type).strip(b'"')
        except UNREADABLE:
            name = b""
        if not name and _is_told(_fields(data), "error"):
            return _Part.FAULT
        return self._part(name)

    def _count_large(self, start: bytes) -> None:
        super()._count_large(start)
        if start.startswith(b":"):
            return
        part = self._part(_early_name(start))
        self.marks += part is not _Part.CONTENT
        if part is _Part.FAULT:
            self.fault = start[:FRAME_MAX]
        self._ends = part is _Part.END


class Messages(_Named):
    """Anthropic's: usage in `message_start` and `message_delta`, `message_stop` last."""

    __slots__ = ("_told",)

    _usual = (b"event: content_block_delta\ndata: {",)

    def __init__(self) -> None:
        """Start before the first frame."""
        super().__init__()
        self._told = MessageUsage()

    @staticmethod
    def _part(name: bytes) -> _Part:
        return _MESSAGES.get(name, _Part.MARK)

    def _note(self, part: _Part, data: bytes) -> None:
        """Note usage, bit by bit."""
        if part is _Part.USAGE:
            self._told = self._told.then(message_usage(data))
            self.usage = self._told.usage()


class Responses(_Named):
    """OpenAI's: usage in the event that ends it, with all of the answer once more."""

    __slots__ = ()

    _usual = (
        b"event: response.output_text.delta\ndata: {",
        b"event: response.reasoning_text.delta\ndata: {",
        b"event: response.function_call_arguments.delta\ndata: {",
    )

    @staticmethod
    def _part(name: bytes) -> _Part:
        return _Part.CONTENT if name.endswith(b".delta") else _RESPONSES.get(name, _Part.MARK)

    def _note(self, part: _Part, data: bytes) -> None:
        """Note usage, of a failure too."""
        if part in _LASTS:
            self.usage = response_usage(data) or self.usage

    def _held_max(self, start: bytes) -> int:
        return LAST_MAX if self._part(_early_name(start)) in _LASTS else FRAME_MAX


_MESSAGES = {
    b"content_block_delta": _Part.CONTENT,
    b"message_start": _Part.USAGE,
    b"message_delta": _Part.USAGE,
    b"message_stop": _Part.END,
    b"error": _Part.FAULT,
    b"ping": _Part.ALIVE,
}
_RESPONSES = {
    b"response.completed": _Part.END,
    b"response.incomplete": _Part.END,
    b"response.failed": _Part.FAULT,
    b"error": _Part.FAULT,
    b"keepalive": _Part.ALIVE,
}
_LASTS = (_Part.END, _Part.FAULT)
_NO_NAMES = (b"", b"message")  # the second is what the first means


class _Choice(Struct):
    delta: dict[str, Raw] | None = None


_CHOICES = msgspec.json.Decoder(list[_Choice])
_NOTHING = (b'""', b"[]", b"{}")


class _Typed(Struct):
    type: Raw = Raw(b'""')


_TYPED = msgspec.json.Decoder(_Typed)
_WHOLE = msgspec.json.Decoder(Raw)


def _early_name(start: bytes) -> bytes:
    """Return what kind of event a large frame is by its beginning; nothing, if that does not tell."""
    start = start[:FRAME_MAX]
    name = name_of(start.splitlines())
    if name not in _NO_NAMES:
        return name
    match = _TYPE.search(start)
    return b"" if match is None else match[1]


# Data -------------------------------------------------------------------------------------------


def _fields(data: bytes) -> dict[str, Raw]:
    """Return the fields of an object; none, if it is none."""
    try:
        return _FIELDS.decode(data)
    except UNREADABLE:
        return {}


def _says(frame: bytes) -> bool:
    """Return whether a usual frame stands for tokens, by how its content begins; others are read.

    Quotes within a text are escaped: no text can look like a key.
    """
    at = frame.find(_CONTENT)
    if at < 0:
        return _TEXT in frame
    return not frame.startswith(b'"', at + len(_CONTENT))


def _has_content(fields: dict[str, Raw]) -> bool:
    """Return whether a choice stands for tokens; what is no chat or completion is taken to."""
    if "choices" not in fields:
        return True
    try:
        choices = _CHOICES.decode(fields["choices"])
    except UNREADABLE:
        return True
    return any(choice.delta is None or _is_token(choice.delta) for choice in choices)


def _is_token(delta: dict[str, Raw]) -> bool:
    """Return whether a delta is more than a role or an end.

    An empty text is: the engine made a token that it cannot write yet. Beside a role it is not.
    """
    told = {name: bytes(value) for name, value in delta.items() if bytes(value) != b"null"}
    if told.pop("role", None) is None:
        return bool(told)
    return any(value not in _NOTHING for value in told.values())


def _only_null(block: bytes) -> bool:
    """Return whether every usage in frames is null, as OpenAI's own are but for the last."""
    nulls = block.count(b'"usage":null') + block.count(b'"usage": null')
    return nulls == block.count(b'"usage"')


def _is_told(fields: dict[str, Raw], name: str) -> bool:
    """Return whether a field is there and not null."""
    return name in fields and bytes(fields[name]) != b"null"


def _is_bare(fields: dict[str, Raw]) -> bool:
    """Return whether a frame has choices, but none of them: its usage is all it tells."""
    return "choices" in fields and b"".join(bytes(fields["choices"]).split()) == b"[]"
