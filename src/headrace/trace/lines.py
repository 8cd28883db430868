"""How is a text file of unknown origin read line by line, safely and with a place in each error?

Knows compression and bounds; what a line means is its reader's business.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from headrace.units import MIB

LINE_BYTES_MAX = 16 * MIB
"""Longest line accepted. A Mooncake row of a million tokens takes about 20 KiB."""
LINES_MAX = 10_000_000
"""Most lines accepted, so that a small compressed file cannot fill the memory."""
_BUFFER_BYTES = MIB
_BOM = b"\xef\xbb\xbf"


class TraceError(ValueError):
    """A trace file that cannot be used: names file, line and what was expected."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        """Describe a problem at a line counted from 1; None: of the file as a whole."""
        super().__init__(f"{path}:{line}: {problem}" if line is not None else f"{path}: {problem}")
        self.path = path
        self.line = line
        self.problem = problem


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open for reading, decompressed if the name ends in .gz."""
    with path.open("rb") as raw:
        if path.suffix != ".gz":
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as unzipped:
            # GzipFile.readline is Python code; a buffer on top reads lines in C.
            yield BufferedReader(unzipped, _BUFFER_BYTES)


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without its end), skipping blank lines.

    Raises TraceError for a file that cannot be read or unpacked, a line over `LINE_BYTES_MAX` and
    a file over `LINES_MAX`.
    """
    line = 0
    try:
        with _opened(path) as file:
            while text := file.readline(LINE_BYTES_MAX + 1):
                line += 1
                if len(text) > LINE_BYTES_MAX:
                    raise TraceError(path, line, f"line longer than {LINE_BYTES_MAX} bytes")
                if line > LINES_MAX:
                    raise TraceError(path, line, f"more than {LINES_MAX} lines")
                if line == 1:
                    text = text.removeprefix(_BOM)
                if stripped := text.strip():
                    yield line, stripped
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(path, line + 1 if line else None, f"cannot be read: {error}") from error
