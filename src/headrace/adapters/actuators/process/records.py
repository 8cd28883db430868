"""Which processes did a gateway leave behind that could not end them itself?

Each gateway has a folder of its own, named by its process id and start time, with one file for each
child. The next one to start looks through the folders of those that are gone, and ends what still
runs. A process id alone says nothing, for ids are used again: a process counts as a child only if it
belongs to the recorded session, is as old as recorded, and carries the child's own mark in its
environment.
"""

import logging
import os
import shutil
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

MARK = "HEADRACE_GROUP_MARK"
"""Environment variable by which a child, and its children, are known."""
LOGS_KEPT = 20
"""Groups that are over whose output is kept: the last ones."""
KEPT = 5
"""Folders of gateways that are gone, with their logs; older ones are deleted."""
_PROC = Path("/proc")
_STARTED, _SESSION = 19, 3  # fields of /proc/PID/stat, counted behind the name
_log = logging.getLogger(__name__)


class Child(Struct, frozen=True, kw_only=True):
    """One process that was started."""

    pid: int
    """Also its session and process group: it leads both."""
    started: int
    """In clock ticks since the machine started; 0 where the kernel does not tell."""
    mark: str


class Stat(Struct, frozen=True):
    """What the kernel says of a process."""

    started: int
    session: int


def stat(pid: int) -> Stat | None:
    """Return what the kernel says of a process; None if there is none, or it does not tell."""
    try:
        text = _PROC.joinpath(str(pid), "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Stat(int(fields[_STARTED]), int(fields[_SESSION]))


class Records:
    """The folder of this process, and those beside it."""

    def __init__(self, folder: Path) -> None:
        """Make a folder of our own within `folder`, readable by us alone; raises OSError."""
        self._all = folder
        me = stat(os.getpid())
        self.own = folder / f"{os.getpid()}-{0 if me is None else me.started}"
        self._over: deque[str] = deque()
        self.make()

    def make(self) -> None:
        """Make our folder, or make it again: others clear away what they do not know."""
        self.own.mkdir(mode=0o700, parents=True, exist_ok=True)

    def log_path(self, group: str, rank: int = 0) -> Path:
        """Return where the output of a group's rank goes."""
        return self.own / f"{group}.{rank}.log"

    def over(self, group: str, ranks: int) -> None:
        """Keep the logs of a group that is over until so many others are."""
        self._over = deque(name for name in self._over if name != group)
        self._over.append(group)
        if len(self._over) > LOGS_KEPT:
            gone = self._over.popleft()
            for path in (self.log_path(gone, nth) for nth in range(ranks)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    path.with_suffix(".old.log").unlink(missing_ok=True)

    def write(self, name: str, child: Child) -> None:
        """Keep who a child is."""
        self.own.joinpath(f"{name}.json").write_bytes(msgspec.json.encode(child))

    def forget(self, name: str) -> None:
        """Forget a child that is gone."""
        self.own.joinpath(f"{name}.json").unlink(missing_ok=True)

    def sweep(self) -> tuple[int, ...]:
        """End what gateways that are gone left behind; return the process ids."""
        ended: list[int] = []
        gone = [folder for folder in self._all.iterdir() if _is_gone(folder)]
        for folder in gone:
            for path in folder.glob("*.json"):
                with suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
                    ended += _end(msgspec.json.decode(path.read_bytes(), type=Child))
                path.unlink(missing_ok=True)
        gone.sort(key=_age)
        for folder in gone[KEPT:]:
            shutil.rmtree(folder, ignore_errors=True)
        return tuple(ended)


def _age(folder: Path) -> int:
    """Return a number that is the greater the longer ago a folder was last written to."""
    try:
        return -folder.stat().st_mtime_ns
    except OSError:  # another gateway sweeps too
        return 0


def _is_gone(folder: Path) -> bool:
    """Return whether the gateway of a folder runs no more."""
    pid, _, started = folder.name.partition("-")
    if not (pid.isdecimal() and started.isdecimal()):
        return False  # none of ours
    found = stat(int(pid))
    if found is None:
        return _PROC.is_dir()  # else the kernel does not tell
    return found.started != int(started)


def _end(child: Child) -> Iterator[int]:
    """Kill all that is left of a child and of its children; yield whom."""
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        try:
            held = os.pidfd_open(pid)  # from here on the id stands for the process looked at
        except OSError:
            continue
        try:
            if _belongs(pid, child):
                signal.pidfd_send_signal(held, signal.SIGKILL)
                yield pid
        finally:
            os.close(held)


def _belongs(pid: int, child: Child) -> bool:
    found = stat(pid)
    if found is None or found.session != child.pid:
        return False
    if found.started < child.started or (pid == child.pid and found.started != child.started):
        return False
    try:
        environment = _PROC.joinpath(str(pid), "environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={child.mark}".encode() in environment.split(b"\0")
