"""Where do the frames of an event stream end, what do they carry, and may the caller see it?

Bytes go on up to the last complete frame, and the tail is held, so that an event of our own can
always follow well-formed. A frame over `FRAME_MAX` goes on in pieces, unread. However the bytes are
cut into reads, what comes out and what is counted is the same.

Frames end with an empty line, after LF or CRLF. Knows nothing of HTTP, and keeps no time.
"""

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.model.engine import Usage
from headrace.units import Tokens

FRAME_MAX = 65_536
"""Bytes of one frame that are held back. 64 KiB: some hundred times a usual frame."""
_LARGE = FRAME_MAX + 1  # over it, with its end mark: `FRAME_MAX` was passed before the end was seen
_MARK = 2  # an end mark begins at most so many bytes before its last
_NULL_LAST = b',"usage":null}\n\n'
_END = re.compile(rb"(\n\r?\n)[\r\n]*")
_FIRST_END = re.compile(rb"\n\r?\n")
_LINE = re.compile(rb"\r?\n")


_Count = Annotated[int, Meta(ge=0)]


class _Details(Struct):
    cached_tokens: _Count | None = None


class _Counts(Struct):
    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None


_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_COUNTS = msgspec.json.Decoder(_Counts)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Scanner:
    """One event stream. Its counts may be read at any time."""

    __slots__ = (
        "_hide", "_large", "_swallow", "_tail", "comments", "done", "events", "fault", "marks",
        "usage",
    )  # fmt: skip

    def __init__(self, *, hide_usage: bool = False) -> None:
        """Start before the first frame; `hide_usage`: the caller did not ask for usage."""
        self._hide = hide_usage
        self._tail = b""
        self._large = False  # inside a frame whose beginning has gone on
        self._swallow = False  # a frame was left out, and further empty lines of it go with it
        self.events = 0
        """Frames with data, whatever it is."""
        self.marks = 0
        """Those of them that carry no content: usage alone, `[DONE]`, an error."""
        self.comments = 0
        """Frames without data."""
        self.done = False
        """`[DONE]` came."""
        self.usage: Usage | None = None
        """The latest usage that was told."""
        self.fault: bytes | None = None
        """The data of an error event. It and all that follows is withheld."""

    @property
    def frames(self) -> int:
        """How many frames carried content."""
        return self.events - self.marks

    @property
    def whole(self) -> bool:
        """Whether what went on so far ends with a frame, so that an event may follow it."""
        return not self._large

    def feed(self, body: bytes) -> bytes:
        """Take a piece of the body and return what may go on."""
        if self._large:
            return self._feed_large(body)
        if self.fault is not None:
            return b""
        if not self._tail and _is_usual(body):
            out = self._without_null(body) if b'"usage"' in body else body
            if out:
                self.events += 1
                self._swallow = False
                return out
        search = 0
        if self._tail:
            search = max(0, len(self._tail) - _MARK)
            body = self._tail + body
        end = _last_end(body, search)
        if end == len(body):
            self._tail = b""
            return self._block(body)
        self._tail = body[end:]
        out = self._block(body[:end]) if end else b""
        if len(self._tail) > FRAME_MAX and self.fault is None:
            out += self._begin_large()
        return out

    def finish(self) -> bytes:
        """Return what is left at the proper end of the body: a frame that misses its end mark."""
        tail, self._tail = self._tail, b""
        if self._large:
            self._large = False
            return tail
        return self._frame(tail, len(tail)) if tail and self.fault is None else b""

    # Whole frames -----------------------------------------------------------------------------

    def _block(self, block: bytes) -> bytes:
        """Take complete frames. The usual ones are counted without looking at each."""
        starts = block.count(b"\n\ndata:") + block.startswith(b"data:")
        if (
            starts
            and starts == block.count(b"\n\n")
            and b"\r" not in block
            and b'"error"' not in block
            and b"[DONE]" not in block
            and (b'"usage"' not in block or (not self._hide and _only_null(block)))
        ):
            self.events += starts
            self._swallow = False
            return block
        return self._each(block)

    def _each(self, block: bytes) -> bytes:
        """Take complete frames one by one."""
        text = block.lstrip(b"\r\n")
        out = [] if self._swallow else [block[: len(block) - len(text)]]
        start = 0
        for match in _END.finditer(text):
            if self.fault is not None:
                break
            kept = self._frame(text[start : match.end()], match.end(1) - start)
            self._swallow = not kept
            out.append(kept)
            start = match.end()
        return b"".join(out)

    def _frame(self, frame: bytes, length: int) -> bytes:
        """Take one frame and return what of it goes on; `length` leaves further empty lines out."""
        if length > _LARGE:
            self._count_large(frame)
            return frame
        if frame.endswith(_NULL_LAST) and _is_usual(frame) and (out := self._without_null(frame)):
            self.events += 1
            return out
        text = frame.rstrip(b"\r\n")
        lines = _LINE.split(text)
        pieces = [_value(line) for line in lines if line.startswith(b"data:")]
        if not pieces:
            self.comments += 1
            return frame
        self.events += 1
        data = pieces[0] if len(pieces) == 1 else b"\n".join(pieces)
        if data.strip() == b"[DONE]":
            self.done = True
            self.marks += 1
            return frame
        told = any(line.startswith(b"event:") and _value(line) == b"error" for line in lines)
        if not told and b'"usage"' not in data and b'"error"' not in data:
            return frame
        try:
            fields = _FIELDS.decode(data)
        except _UNREADABLE:
            fields = {}
        if told or _is_told(fields, "error"):
            self.marks += 1
            self.fault = data
            return b""
        if "usage" not in fields or not self._note_usage(fields):
            return frame
        return self._without_usage(fields, lines, frame[len(text) :])

    def _without_null(self, frame: bytes) -> bytes:
        """Return what goes on of a usual frame whose one usage is null; nothing, if it is another.

        The key before the last brace is the outermost object's own: no need to decode it.
        """
        if not frame.endswith(_NULL_LAST) or frame.count(b'"usage"') != 1 or len(frame) > _LARGE:
            return b""
        return frame.removesuffix(_NULL_LAST) + b"}\n\n" if self._hide else frame

    def _note_usage(self, fields: dict[str, Raw]) -> bool:
        """Note the usage a frame tells; return whether the frame must not go on with it."""
        if _is_told(fields, "usage"):
            self.usage = _usage(fields["usage"]) or self.usage
            self.marks += _is_bare(fields)
        return self._hide

    def _without_usage(self, fields: dict[str, Raw], lines: list[bytes], ends: bytes) -> bytes:
        """Return a frame without its usage; nothing, if that was all it told."""
        if _is_told(fields, "usage") and _is_bare(fields):
            return b""
        del fields["usage"]
        others = [line for line in lines if not line.startswith(b"data:")]
        others.append(b"data: " + msgspec.json.encode(fields))
        return (b"\r\n" if ends.startswith(b"\r") else b"\n").join(others) + ends

    # Frames too large to be held ----------------------------------------------------------------

    def _count_large(self, start: bytes) -> None:
        if start.startswith(b":"):
            self.comments += 1
        else:
            self.events += 1

    def _begin_large(self) -> bytes:
        """Let the beginning of a frame go on whose end is not in sight."""
        self._count_large(self._tail)
        self._large, self._swallow = True, False
        body, self._tail = self._tail, b""
        return self._feed_large(body)

    def _feed_large(self, body: bytes) -> bytes:
        """Go on with a large frame, up to what may be the beginning of its end mark."""
        body = self._tail + body
        match = _FIRST_END.search(body)
        if match is not None:
            self._large, self._tail = False, b""
            return body[: match.end()] + self.feed(body[match.end() :])
        held = 2 if body.endswith(b"\n\r") else body.endswith(b"\n")
        self._tail = body[len(body) - held :]
        return body[: len(body) - held]


def _last_end(body: bytes, search: int) -> int:
    """Return where the last complete frame ends, empty lines after it included; 0 if none does."""
    end = body.rfind(b"\n\n", search) + 2
    if end == 1:
        end = 0
    if b"\r" in body:
        crlf = body.rfind(b"\n\r\n", search)
        end = max(end, crlf + 3 if crlf >= 0 else 0)
    size = len(body)
    while end < size and body[end] in b"\r\n":
        end += 1
    return end


def _is_usual(block: bytes) -> bool:
    """Return whether a block is one frame with one line of data that tells no error."""
    return (
        block.startswith(b"data: {")
        and block.endswith(b"\n\n")
        and block.count(b"\n") == _MARK
        and b'"error"' not in block
    )


def _only_null(block: bytes) -> bool:
    """Return whether every usage in frames is null, as OpenAI's own are but for the last."""
    nulls = block.count(b'"usage":null') + block.count(b'"usage": null')
    return nulls == block.count(b'"usage"')


def _value(line: bytes) -> bytes:
    """Return what follows a line's field name, less the one space that may come first."""
    return line.partition(b":")[2].removeprefix(b" ")


def _is_told(fields: dict[str, Raw], name: str) -> bool:
    """Return whether a field is there and not null."""
    return name in fields and bytes(fields[name]) != b"null"


def _is_bare(fields: dict[str, Raw]) -> bool:
    """Return whether a frame has choices, but none of them: its usage is all it tells."""
    return "choices" in fields and b"".join(bytes(fields["choices"]).split()) == b"[]"


def _usage(raw: Raw) -> Usage | None:
    """Return the usage that an engine tells, or None if it makes no sense."""
    try:
        counts = _COUNTS.decode(raw)
    except _UNREADABLE:
        return None
    cached = counts.prompt_tokens_details and counts.prompt_tokens_details.cached_tokens
    return Usage(
        input_tokens=Tokens(counts.prompt_tokens),
        cached_tokens=Tokens(cached or 0),
        output_tokens=Tokens(counts.completion_tokens),
    )
