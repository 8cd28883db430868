"""Where do the frames of an event stream end, and which go on to the caller?

Bytes go on up to the last complete frame, and the tail is held, so that an event of our own can
always follow well-formed. A frame over `FRAME_MAX` goes on in pieces, unread, unless its dialect wants
to hold more of it. However the bytes are cut into reads, what comes out and what is counted is the same.

Frames end with an empty line, after LF or CRLF. Knows nothing of HTTP, and keeps no time; what a frame
says is its dialect's to read.
"""

import re
from abc import ABC, abstractmethod
from typing import ClassVar

from headrace.model.engine import Usage

FRAME_MAX = 65_536
"""Bytes of one frame that are held back. 64 KiB: some hundred times a usual frame."""
_LARGE = FRAME_MAX + 1  # over it, with its end mark: `FRAME_MAX` was passed before the end was seen
_MARK = 2  # an end mark begins at most so many bytes before its last
_END = re.compile(rb"(\n\r?\n)[\r\n]*")
_FIRST_END = re.compile(rb"\n\r?\n")
_LINE = re.compile(rb"\r?\n")


class Scanner(ABC):
    """One event stream. Its counts may be read at any time."""

    __slots__ = (
        "_ends", "_open", "_swallow", "_tail", "comments", "cut", "done", "events", "fault", "marks",
        "usage",
    )  # fmt: skip

    _marked: ClassVar[bool] = True
    """The stream is cut if its end mark is missing, even where the body ends as it should."""

    def __init__(self) -> None:
        """Start before the first frame."""
        self._tail = b""
        self._open = False  # what went on ends within a frame
        self._ends = False  # the end of that frame is the end of the stream
        self._swallow = False  # a frame was left out, and further empty lines of it go with it
        self.events = 0
        """Frames with data, but for those that only keep the connection alive."""
        self.marks = 0
        """Those of them that carry no content: usage alone, beginnings and ends, an error."""
        self.comments = 0
        """All other frames: they say that the engine is there, not that it works."""
        self.done = False
        """The end mark came."""
        self.cut = False
        """The stream ended without it."""
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
        return not self._open

    def feed(self, body: bytes) -> bytes:
        """Take a piece of the body and return what may go on."""
        if self._open:
            return self._feed_large(body)
        if self.fault is not None:
            return b""
        if not self._tail and (out := self._single(body)):
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
        size = len(self._tail)
        if size > FRAME_MAX and size > self._held_max(self._tail) and self.fault is None:
            out += self._begin_large()
        return out

    def finish(self, *, framed: bool) -> bytes:
        """Return what is left at the end of the body: a frame that misses its end.

        `framed`: HTTP told that the body ends here, and not just the connection. What is left of a
        stream that was cut is withheld.
        """
        tail, self._tail = self._tail, b""
        counts = self.events, self.marks
        is_large = self._open
        if tail and not is_large and self.fault is None and self._is_last(tail):
            tail = self._frame(tail, len(tail))
        if self.fault is not None:
            return b""
        if not self.done and (self._marked or not framed):
            self.cut = True
            self.events, self.marks = counts
            return b""
        self._open = is_large or bool(tail)
        return tail

    # What a dialect says ------------------------------------------------------------------------

    @abstractmethod
    def _single(self, block: bytes) -> bytes:
        """Return what goes on of a block, and count it, if it is one frame as most are.

        Nothing if it is any other: it is looked at closely then. To be fast, and to agree with that.
        """

    @abstractmethod
    def _several(self, block: bytes) -> bool:
        """Return whether a block is frames as most are, to go on as they are, and count them."""

    @abstractmethod
    def _read(self, frame: bytes, lines: list[bytes], data: bytes) -> bytes:
        """Read and count a frame that has data; return what of it goes on."""

    def _is_last(self, tail: bytes) -> bool:  # noqa: ARG002 - of use to dialects
        """Return whether what is left of a stream may be a frame that misses no more than its end."""
        return True

    def _held_max(self, start: bytes) -> int:  # noqa: ARG002 - of use to dialects
        """Return how many bytes of a frame that starts so may be held."""
        return FRAME_MAX

    def _count_large(self, start: bytes) -> None:
        """Count a frame too large to be held, whose first `FRAME_MAX` bytes are all to be read."""
        if start.startswith(b":"):
            self.comments += 1
        else:
            self.events += 1

    # Whole frames -----------------------------------------------------------------------------

    def _block(self, block: bytes) -> bytes:
        """Take complete frames. The usual ones are counted without looking at each."""
        if self._several(block):
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
        if length > _LARGE and length > self._held_max(frame) + 1:
            self._count_large(frame)
            self._end_large()
            return frame if self.fault is None else b""
        if out := self._single(frame):
            return out
        lines = _LINE.split(frame.rstrip(b"\r\n"))
        data = data_of(lines)
        if data is None:
            self.comments += 1
            return frame
        return self._read(frame, lines, data)

    # Frames too large to be held ----------------------------------------------------------------

    def _begin_large(self) -> bytes:
        """Let the beginning of a frame go on whose end is not in sight."""
        body, self._tail = self._tail, b""
        self._count_large(body)
        if self.fault is not None:
            return b""
        self._open, self._swallow = True, False
        return self._feed_large(body)

    def _feed_large(self, body: bytes) -> bytes:
        """Go on with a large frame, up to what may be the beginning of its end mark."""
        body = self._tail + body
        match = _FIRST_END.search(body)
        if match is not None:
            self._open, self._tail = False, b""
            self._end_large()
            return body[: match.end()] + self.feed(body[match.end() :])
        held = 2 if body.endswith(b"\n\r") else body.endswith(b"\n")
        self._tail = body[len(body) - held :]
        return body[: len(body) - held]

    def _end_large(self) -> None:
        self.done, self._ends = self.done or self._ends, False


def data_of(lines: list[bytes]) -> bytes | None:
    """Return the data of a frame; None if it has none."""
    pieces = [_value(line) for line in lines if line.startswith(b"data:")]
    if len(pieces) == 1:
        return pieces[0]
    return b"\n".join(pieces) if pieces else None


def name_of(lines: list[bytes]) -> bytes:
    """Return what kind of event a frame calls itself; nothing, if it does not."""
    for line in reversed(lines):
        if line.startswith(b"event:"):
            return _value(line)
    return b""


def _value(line: bytes) -> bytes:
    """Return what follows a line's field name, less the one space that may come first."""
    return line.partition(b":")[2].removeprefix(b" ")


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
