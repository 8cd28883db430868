"""The journal of a running process: a ring in a folder that no second process writes to.

The folder is locked for as long as the journal is open. The lock is the kernel's, so that a process
that died holds none.
"""

import errno
import fcntl
import os
from pathlib import Path

from headrace.adapters.journal.ring import KEEP_BYTES, JournalRing

_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


class HeldJournal:
    """A journal that can be let go of and taken up again, each time as a life of its own."""

    def __init__(self, folder: Path, *, keep_bytes: int = KEEP_BYTES) -> None:
        """Open it; raises OSError if that cannot be, or another process has it."""
        self.folder, self._keep_bytes = folder, keep_bytes
        self._dropped = 0
        self._open()

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _locked(self.folder)
        self._ring = JournalRing(self.folder, keep_bytes=self._keep_bytes)

    @property
    def life(self) -> int:
        """Which life of the folder this is, from 1."""
        return self._ring.life

    @property
    def dropped(self) -> int:
        """Frames that could not be kept."""
        return self._dropped + self._ring.dropped

    def put(self, frame: bytes, opens: bool) -> None:
        """Append a frame; a failure drops it and is counted. The folder once let go of is another's."""
        if self._lock is not None:
            self._ring.put(frame, opens)

    def close(self) -> None:
        """Let go of the folder, if that was not done already."""
        if self._lock is not None:
            self._ring.close()
            os.close(self._lock)
            self._lock = None

    def reopen(self) -> None:
        """Take the folder up again; raises OSError if another process has it."""
        assert self._lock is None, "close first"
        dropped = self.dropped
        self._open()
        self._dropped = dropped


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the folder's lock until it is closed."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as refused:
        if refused.errno in _BUSY:
            os.close(file)
            why = "another process keeps its journal here"
            raise OSError(refused.errno, why, str(folder)) from None
        # A file system without locks: better a journal that is not guarded than none.
    return file
