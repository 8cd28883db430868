"""What does a server answer, and may its connection be used again?

One HTTP/1 response, read without I/O: bytes in, body out. The head is cut off here, so that its size
is bounded and the parser sees it in one piece; interim heads (1xx) are skipped, trailers dropped.
Refuses what the parser lets through and two readers could understand differently.
"""

import httptools

from headrace.ports.upstream import CutError, MalformedError

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, with values."""

HEAD_BYTES_MAX = 65_536
"""Bytes of a response's head. 64 KiB: nginx allows 8, and some engines are talkative."""
INTERIM_MAX = 8
"""Heads before the final one."""

_START = b"HTTP/1."
_HEAD_END = b"\r\n\r\n"
_OK = 200
_WITHOUT_BODY = (204, 304)


class Response:
    """One response on its way in."""

    __slots__ = (
        "_dry", "_fed", "_head", "_interim", "_is_head", "_kept", "_length", "_parser", "_parts",
        "complete", "headed", "headers", "on_body", "reusable", "status", "until_close",
    )  # fmt: skip

    def __init__(self, *, is_head: bool = False) -> None:
        """Await the answer to a request; `is_head`: its method was HEAD."""
        self._is_head = is_head
        self._head = b""
        self._interim = 0
        self._length: int | None = None
        self._fed = 0  # bytes of the body's framing and content
        self._dry = 0  # bytes since the last content
        self._kept = -1  # parts of the body that are this response's; what follows is not
        self._parts: list[bytes] = []
        self._parser: httptools.HttpResponseParser | None = None
        self.on_body = self._parts.append
        self.status = 0
        self.headers: Headers = []
        self.headed = False
        """The final head is known."""
        self.complete = False
        """All of it came."""
        self.reusable = False
        """The connection may carry another request, if this one was fully written."""
        self.until_close = False
        """The body ends where the connection does."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes and return what of the body they hold; raises MalformedError."""
        if not self.headed:
            data = self._feed_head(data)
        if not data:
            return b""
        if self.complete:
            self.reusable = False  # something follows
            return b""
        return self._feed_body(data)

    def eof(self) -> None:
        """Take the end of the connection; raises CutError unless it ends the body."""
        if not self.headed or not self.until_close:
            raise CutError("the connection closed within the answer")
        self.complete = True
        self._parser = None

    def drop(self) -> None:
        """Read no more; nothing of it is left for the garbage collector."""
        self._parser = None

    # The head ---------------------------------------------------------------------------------

    def _feed_head(self, data: bytes) -> bytes:
        """Take bytes of heads, and return what follows the final one."""
        self._head += data
        while not self.headed:
            if self._head[: len(_START)] != _START[: len(self._head)]:
                raise MalformedError("the answer is not HTTP/1")
            end = self._head.find(_HEAD_END) + len(_HEAD_END)
            if max(end, len(self._head) if end < len(_HEAD_END) else 0) > HEAD_BYTES_MAX:
                raise MalformedError("the head of the answer is too large")
            if end < len(_HEAD_END):
                if b"\n\n" in self._head:
                    raise MalformedError("a line of the head ends without CR")
                return b""
            head, self._head = self._head[:end], self._head[end:]
            self._read_head(head)
        rest, self._head = self._head, b""
        return rest

    def _read_head(self, head: bytes) -> None:
        """Read one whole head."""
        self.headers.clear()
        self._parser = httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            raise MalformedError("the server changed the protocol") from None
        except httptools.HttpParserError as error:
            raise MalformedError(f"the head of the answer cannot be read: {error}") from None
        self.status = self._parser.get_status_code()
        if self.status >= _OK:
            self._judge_head(head.startswith(b"HTTP/1.1 "))
            return
        self._interim += 1
        if self.status == 101 or self._interim > INTERIM_MAX:  # noqa: PLR2004 - its name is worse
            raise MalformedError(f"an interim answer that was not asked for: {self.status}")
        self._kept = -1
        self.complete = self.reusable = False

    def _judge_head(self, is_1_1: bool) -> None:
        """Find out how the body is framed; refuse what is not plain."""
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        lengths = [value for name, value in self.headers if name == b"content-length"]
        if codings and (len(codings) > 1 or codings[0].lower() != b"chunked" or not is_1_1):
            raise MalformedError("a transfer encoding other than chunked, or in HTTP/1.0")
        if len(lengths) + len(codings) > 1:
            raise MalformedError("the length of the body is told twice")
        if lengths:
            if not lengths[0].isdigit():
                raise MalformedError("the length of the body is no number")
            self._length = int(lengths[0])
        self.headed = True
        if self._is_head and not self.complete:
            self.complete, self.reusable, self._parser = True, False, None
        elif self.status not in _WITHOUT_BODY:
            self.until_close = not lengths and not codings

    # The body ---------------------------------------------------------------------------------

    def _feed_body(self, data: bytes) -> bytes:
        assert self._parser is not None
        parts = self._parts
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise MalformedError(f"the body of the answer cannot be read: {error}") from None
        self._fed += len(data)
        if self.complete:
            self._parser = None
            self.reusable = self.reusable and self._is_last(data)
            del parts[self._kept :]
        if len(parts) == 1:
            self._dry = 0
            return parts.pop()
        self._dry = 0 if parts else self._dry + len(data)
        if self._dry > HEAD_BYTES_MAX and not self.complete:
            raise MalformedError("chunk extensions or trailers without end")
        body = b"".join(parts)
        parts.clear()
        return body

    def _is_last(self, data: bytes) -> bool:
        """Return whether nothing follows the body; in doubt, not."""
        if self._length is not None:
            return self._fed == self._length
        # The parser skips empty lines between messages: the last line must be the only empty one.
        return data.endswith(_HEAD_END) and data[-5:-4] not in (b"", b"\r", b"\n")

    # What the parser calls --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Note that something follows what is complete."""
        if self.complete:
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; those after the head are trailers."""
        if not self.headed:
            self.headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        """Note the end, and whether the server keeps the connection: known here and only here."""
        if not self.complete:
            self.complete = True
            self._kept = len(self._parts)
            self.reusable = self._parser is not None and self._parser.should_keep_alive()
