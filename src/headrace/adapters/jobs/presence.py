"""Is any other process at work on this file of jobs? A lock that dies with its process, unlike its leases.

Everybody holds it shared; who gets it exclusively is alone. Beside the file of jobs, since SQLite's own locks
are released when any descriptor of that file is closed.
"""

import fcntl
import os
from pathlib import Path

_MODE = 0o600


class Presence:
    """This process's hold on a file of jobs."""

    def __init__(self, jobs: Path) -> None:
        """Hold nothing yet; raises OSError."""
        path = jobs.with_name(f"{jobs.name}-present")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def alone(self) -> bool:
        """Return whether nobody else is there; nobody comes until `share`."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def share(self) -> None:
        """Be there, from now on, as others may; waits for one that made sure that it is alone."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Be there no more."""
        os.close(self._fd)
