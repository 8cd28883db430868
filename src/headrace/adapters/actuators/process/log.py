"""Where does the output of a child go? Into a file that cannot grow beyond its bound.

It comes through a pipe, so that we, and not the child, decide what is kept; the newest is. What is
written there is the engine's own: nothing of a request is, unless the engine itself logs it.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PIECE = 65_536
_TAIL = 256
_log = logging.getLogger(__name__)


class CappedLog:
    """One file and the one before it, together never more than `limit` bytes."""

    def __init__(self, path: Path, limit: int) -> None:
        """Append to `path`; raises OSError if it cannot be opened."""
        self.path, self._half = path, max(_PIECE, limit // 2)
        self._file = self._open()
        self._size = os.fstat(self._file).st_size

    def put(self, data: bytes) -> None:
        """Write at most 64 KiB; what a full disk has no room for is dropped."""
        if self._size + len(data) > self._half:
            self._turn()
        with suppress(OSError):
            self._size += os.write(self._file, data)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _turn(self) -> None:
        """Begin a new file; where that cannot be done, as in a folder that is gone, the old one anew."""
        try:
            self.path.replace(self.path.with_suffix(".old.log"))
            file = self._open()
        except OSError:
            os.ftruncate(self._file, 0)
        else:
            os.close(self._file)
            self._file = file
        self._size = 0

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


class Output:
    """What one child writes, from its pipe into its log; marks in it are told as they pass."""

    def __init__(
        self, log: CappedLog, marks: tuple[bytes, ...], told: Callable[[bytes], None]
    ) -> None:
        """Open the pipe, within the loop that reads it; `told` gets each mark once."""
        self._log, self._marks, self._told = log, set(marks), told
        self._tail = b""
        self._read, self.write = os.pipe()
        os.set_blocking(self._read, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read, self._readable)

    def given(self) -> None:
        """The child has its end of the pipe: ours is closed."""
        os.close(self.write)

    def close(self) -> None:
        """Take what is still there, and end."""
        self._loop.remove_reader(self._read)
        while self._readable():
            pass
        os.close(self._read)
        self._log.close()

    def _readable(self) -> bool:
        try:
            data = os.read(self._read, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._read)
            return False
        self._log.put(data)
        seen = self._tail + data
        for mark in [one for one in self._marks if one in seen]:
            self._marks.discard(mark)
            self._told(mark)
        self._tail = seen[-_TAIL:] if self._marks else b""
        return True
