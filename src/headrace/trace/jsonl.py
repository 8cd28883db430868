"""Reads and writes our own trace files: JSON lines, one row each, below a header.

The header is `{"format":"headrace.trace","version":1}`. A row's fields are those of `TraceRow`,
with `at` written `at_ns`; fields at their default are left out. A name ending in .gz is compressed.
"""

import gzip
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from msgspec import DecodeError, Struct, json

from headrace.trace.lines import LINE_BYTES_MAX, TraceError, numbered
from headrace.trace.row import TraceRow

_UNSORTED = "arrives before the row above it; expected rows by time"


class _Header(Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    format: Literal["headrace.trace"]
    version: Literal[1]


_HEADER = _Header(format="headrace.trace", version=1)


def read_jsonl(path: Path) -> list[TraceRow]:
    """Return the rows as written. Raises TraceError for anything else, rows out of order too."""
    lines = numbered(path)
    line, text = next(lines, (1, b""))
    expected = json.encode(_HEADER).decode()
    try:
        json.decode(text, type=_Header)
    except (DecodeError, ValueError) as error:
        raise TraceError(path, line, f"expected the header {expected}: {error}") from error
    decode = json.Decoder(TraceRow).decode
    rows: list[TraceRow] = []
    last = 0
    for line, text in lines:
        try:
            row = decode(text)
        except (DecodeError, ValueError) as error:
            raise TraceError(path, line, str(error)) from error
        if row.at < last:
            raise TraceError(path, line, _UNSORTED)
        last = row.at
        rows.append(row)
    return rows


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Open for writing, compressed if the name ends in .gz; equal rows give equal bytes."""
    with path.open("wb") as raw:
        if path.suffix != ".gz":
            yield raw
            return
        # Neither name nor time go in: the bytes must depend on the rows alone.
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as zipped:
            yield zipped


def write_jsonl(path: Path, rows: Iterable[TraceRow]) -> None:
    """Write a file that `read_jsonl` reads back to equal rows.

    Raises TraceError, with the line it would have had, for rows out of order or too long to read
    back; OSError from the disk.
    """
    encode = json.Encoder().encode
    last = 0
    with _created(path) as file:
        file.write(encode(_HEADER) + b"\n")
        for line, row in enumerate(rows, start=2):
            text = encode(row) + b"\n"
            if row.at < last:
                raise TraceError(path, line, _UNSORTED)
            if len(text) > LINE_BYTES_MAX:
                raise TraceError(path, line, f"line longer than {LINE_BYTES_MAX} bytes")
            last = row.at
            file.write(text)
