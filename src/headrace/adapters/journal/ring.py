"""A journal as a ring of segment files in one folder.

Files are named `LIFE-INDEX.journal`: which start of the process, and the index of the segment's
first record; both in order are their order. Files of other names are somebody else's. What cannot be
kept (a full disk, a lost folder) is dropped and counted; the journal tells of the gap when it can
again, and goes on with the next checkpoint, since records that follow a gap could not be replayed.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from headrace.adapters.journal.append import append_whole
from headrace.plane.journal import Gap, JournalError, frame_bytes
from headrace.units import MIB

KEEP_BYTES = 1_024 * MIB
"""Size of all segments together; 16 segments of the default size."""
_SUFFIX = ".journal"
_NAME = re.compile(r"([0-9]{6,18})-([0-9]{12,18})\.journal")
_LENGTH = 4
_RECORD = b"\xa4type\xa6record"
"""How every record's body begins, past one byte."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
_MODE = 0o600


def segment_paths(folder: Path) -> list[Path]:
    """Return the segment files of a folder in order."""
    found = {path: _place(path) for path in folder.glob(f"*{_SUFFIX}")}
    ours = [(place, path) for path, place in found.items() if place is not None]
    return [path for _, path in sorted(ours)]


def _life(path: Path) -> str:
    return path.name.partition("-")[0]


def _place(path: Path) -> tuple[int, int] | None:
    """Return the life and index in a segment's name, or None if it is not one's name."""
    named = _NAME.fullmatch(path.name)
    return None if named is None else (int(named.group(1)), int(named.group(2)))


def segments(
    path: Path, cut: Callable[[Path, int], None] = lambda _path, _bytes: None
) -> Iterator[bytes]:
    """Yield the segments of a folder in order, or the one in a file: what `verify` takes.

    The one frame that a crash cut off at the end of a life is left out, and `cut` is told its file and
    how many bytes were there. Raises `JournalError` for bytes that are cut off anywhere else.
    """
    files = segment_paths(path) if path.is_dir() else [path]
    beside = files if path.is_dir() else segment_paths(path.parent)
    followed = {one for one, after in pairwise(beside) if _life(one) == _life(after)}
    for file in files:
        content = file.read_bytes()
        end = _whole(content)
        left = len(content) - end
        if left and (file in followed or content.find(_RECORD, end + _LENGTH + 2) >= 0):
            raise JournalError(f"{file.name}: cut off at byte {end}, though more follows")
        if left:
            cut(file, left)
        yield content[:end]


def _whole(content: bytes) -> int:
    """Return where the last complete frame ends."""
    at, size = 0, len(content)
    while at + _LENGTH <= size:
        end = at + _LENGTH + int.from_bytes(content[at : at + _LENGTH], "big")
        if end > size:
            break
        at = end
    return at


class JournalRing:
    """The segments that one process writes, behind those of earlier lives in the same folder."""

    def __init__(self, folder: Path, *, keep_bytes: int = KEEP_BYTES) -> None:
        """Make the folder if need be; raises OSError if that cannot be."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._keep_bytes = folder, keep_bytes
        self._closed = deque((path, path.stat().st_size) for path in segment_paths(folder))
        self._total = sum(size for _, size in self._closed)
        places = (_place(path) for path, _ in self._closed)
        self._life = max((place[0] for place in places if place is not None), default=0) + 1
        self._file: int | None = None
        self._path = folder
        self._size = 0
        self._index = 0
        self._stuck = True  # until a segment is open
        self._missing = 0  # records of the gap not yet told
        self.dropped = 0
        """Frames that could not be kept."""

    @property
    def life(self) -> int:
        """Which life of the folder this one is, from 1."""
        return self._life

    @property
    def resumed(self) -> bool:
        """Whether the folder holds an earlier life, whose numbering this one does not continue."""
        return self._life > 1

    def put(self, frame: bytes, opens: bool) -> None:
        """Append a frame, to a new segment if it opens one; a failure drops it and is counted."""
        kept = self._begin(frame) if opens else not self._stuck and self._append(frame)
        if not kept:
            self._stuck = True
            self.dropped += 1
        if not opens:
            self._index += 1
            self._missing += not kept
        if self._total > self._keep_bytes:
            self._trim()

    def close(self) -> None:
        """Close the open segment, telling of a gap at its end if there is one."""
        self._tell_gap()
        self._retire()
        self._stuck = True

    def _begin(self, head: bytes) -> bool:
        """Begin a segment, or leave everything as it is and return False."""
        self._tell_gap()
        if self._missing:
            head = frame_bytes(Gap(records=self._missing)) + head
        path = self._folder / f"{self._life:06d}-{self._index:012d}{_SUFFIX}"
        try:
            file = os.open(path, _FLAGS, _MODE)
        except OSError:
            return False
        if not append_whole(file, head, 0):
            os.close(file)
            with suppress(OSError):
                path.unlink()
            return False
        self._retire()
        self._file, self._path, self._size = file, path, len(head)
        self._total += len(head)
        self._stuck, self._missing = False, 0
        return True

    def _append(self, content: bytes) -> bool:
        """Add to the open segment, whole or not at all."""
        if self._file is None or not append_whole(self._file, content, self._size):
            return False
        self._size += len(content)
        self._total += len(content)
        return True

    def _tell_gap(self) -> None:
        """Record a gap at the end of the segment it follows, if that can be."""
        if self._missing and self._append(frame_bytes(Gap(records=self._missing))):
            self._missing = 0

    def _retire(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._closed.append((self._path, self._size))
            self._file = None

    def _trim(self) -> None:
        """Delete the oldest segments that are one too many; never the open one."""
        while self._closed and self._total > self._keep_bytes:
            path, size = self._closed.popleft()
            with suppress(OSError):
                path.unlink()
            self._total -= size
