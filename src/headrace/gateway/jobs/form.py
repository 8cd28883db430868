"""A form with a file in it, taken apart as it comes: no more of the file is held than came at once."""

import logging

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace.gateway.asked import InvalidError

FILE = "file"
"""The field that the file comes in."""
_FIELDS_MAX = 16
_FIELD_BYTES_MAX = 4_096
_NAME_MAX = 256
"""Longest name of a file."""

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # callers could fill the log


class Form:
    """One form; what is wrong with it raises `InvalidError`."""

    def __init__(self, content_type: bytes) -> None:
        """Begin with what the request says of itself."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidError("The body is no form (multipart/form-data).")
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        """What the file is called; None: it has not come yet."""
        self._part: str | None = None
        self._parts = 0
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._value, self._file = bytearray(), bytearray()
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_part_end": self._end,
                    "on_end": self._all,
                },
            )
        except FormParserError:
            raise InvalidError("The body's boundary is too long.") from None

    def feed(self, data: bytes) -> bytes:
        """Read on; return what came of the file's content."""
        self._file.clear()
        try:
            self._parser.write(data)
        except FormParserError:
            raise InvalidError("The body is not the form that it says it is.") from None
        return bytes(self._file)

    def end(self) -> str:
        """Check that it came whole; return what the file is called."""
        if not self._ended:
            raise InvalidError("The body ends within the form.")
        if self.name is None:
            raise InvalidError("There is no file.", FILE)
        return self.name

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _FIELDS_MAX:
            raise InvalidError(f"The form has more than {_FIELDS_MAX} fields.")
        self._disposition, self._part = b"", None
        self._value.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        name.clear()
        value.clear()

    def _headers_end(self) -> None:
        _kind, options = parse_options_header(self._disposition)
        self._part = options.get(b"name", b"").decode("utf-8", "replace")
        if self._part == FILE:
            if self.name is not None:
                raise InvalidError("There are two files.", FILE)
            told = options.get(b"filename", b"").decode("utf-8", "replace")
            self.name = told[:_NAME_MAX] or FILE

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part == FILE:
            self._file += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > _FIELD_BYTES_MAX:
            raise InvalidError(f"A field is longer than {_FIELD_BYTES_MAX} bytes.")

    def _end(self) -> None:
        if self._part is not None and self._part != FILE:
            self.fields.setdefault(self._part, self._value.decode("utf-8", "replace"))

    def _all(self) -> None:
        self._ended = True


class Ruler:
    """Measures the lines of a file as it comes; what is too much raises `InvalidError`."""

    def __init__(self, lines_max: int, line_bytes_max: int) -> None:
        """Measure a file that has so many lines of so many bytes at most."""
        self._lines_max, self._bytes_max = lines_max, line_bytes_max
        self._lines = self._open = 0

    def feed(self, data: bytes) -> None:
        """Measure what came."""
        first = data.find(b"\n")
        self._line(self._open + (len(data) if first < 0 else first))
        if first < 0:
            self._open += len(data)
            return
        ends = data.count(b"\n")
        last = data.rfind(b"\n")
        if last - first > self._bytes_max:
            for line in data[first + 1 : last].split(b"\n"):
                self._line(len(line))
        self._lines += ends
        self._open = len(data) - last - 1
        self.end()

    def end(self) -> None:
        """Judge what is there, an open line included."""
        if self._lines + (self._open > 0) > self._lines_max:
            raise InvalidError(f"The file has more than {self._lines_max} lines.", FILE)
        self._line(self._open)

    def _line(self, size: int) -> None:
        if size > self._bytes_max:
            raise InvalidError(f"A line is longer than {self._bytes_max} bytes.", FILE)
