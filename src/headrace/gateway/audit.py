"""Who changed what, and when? One JSON line for each change, to a log and, if asked, to a file.

Keys go by their names; no line holds a key, a hash or anything of a prompt.
"""

import logging
import os
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace.adapters.journal.append import append_whole

LOG = "headrace.audit"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_MODE = 0o600
_log = logging.getLogger(LOG)


class Outcome(StrEnum):
    """What came of a change that was asked for."""

    MADE = "made"
    REFUSED = "refused"


class AuditLine(Struct, frozen=True, kw_only=True):
    """One change, or one that was refused."""

    at: str
    """UTC, to the second."""
    who: str
    """Name of the key, or `open` where none is asked for."""
    what: str
    outcome: Outcome = Outcome.MADE
    why: str | UnsetType = UNSET
    """The code of the error that it was refused with."""
    old: Any
    new: Any
    """By setting, as `old`; of a refused one what it would have changed, if that could be told."""
    more: int | UnsetType = UNSET
    """Changes beyond those in `old` and `new`, if any."""
    revision: int
    """The policy revision in force afterwards."""


class Audit:
    """Where changes are written down."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the file, if there is one; raises OSError if that cannot be."""
        self._file = None if path is None else os.open(path, _FLAGS, _MODE)
        self.dropped = 0
        """Lines that the file could not take; the log had them all the same."""

    def put(self, line: AuditLine) -> None:
        """Write a change down. Never waits, never raises."""
        content = msgspec.json.encode(line)
        _log.info("%s", content.decode())
        if self._file is not None:
            size = os.fstat(self._file).st_size
            self.dropped += not append_whole(self._file, content + b"\n", size)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def written(wall: int) -> str:
    """Return seconds since 1970 as people write them, in UTC."""
    return datetime.fromtimestamp(wall, UTC).isoformat().replace("+00:00", "Z")
