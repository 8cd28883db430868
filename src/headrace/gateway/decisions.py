"""Where each decision is written down, one JSON line each (OBS-1)."""

import os
from pathlib import Path

from headrace.adapters.journal.append import append_whole
from headrace.model.evidence import DecisionRecord
from headrace.report.decisions import config_line, header_line, to_line

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_MODE = 0o600


class DecisionLog:
    """A decision log that grows by whole lines; what a full disk refuses is counted."""

    def __init__(self, path: Path) -> None:
        """Open the file, or go on with it; raises OSError if that cannot be."""
        self._file = os.open(path, _FLAGS, _MODE)
        self._size = os.fstat(self._file).st_size
        self._paused = False
        self.dropped = 0
        """Lines that could not be written."""
        if not self._size:
            self._put(header_line())

    def configured(self, revision: int, config: bytes) -> None:
        """Write the configuration that the decisions after it are made under."""
        self._put(config_line(revision, config))

    def decided(self, record: DecisionRecord) -> None:
        """Write one decision. Never waits, never raises."""
        self._put(to_line(record))

    def observed(self, record: DecisionRecord) -> None:
        """Write one that had no effect, marked as such. Never waits, never raises."""
        self._put(to_line(record, observed=True))

    def pause(self) -> None:
        """Write nothing any more: another process may."""
        self._paused = True

    def go_on(self) -> None:
        """Write again, behind whatever another process wrote."""
        self._paused = False
        self._size = os.fstat(self._file).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _put(self, line: bytes) -> None:
        if self._paused:
            return
        if append_whole(self._file, line, self._size):
            self._size += len(line)
        else:
            self.dropped += 1
