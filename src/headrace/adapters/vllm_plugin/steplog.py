"""How does the step log reach the disk without ever holding up the engine?

The engine's loop puts a record into a bounded queue and goes on; one thread encodes and writes. What
the queue or the disk has no room for is left out, and a `Note` tells how many lines that were. Who
arrived, started or ended in them is told by the next step, so that requests stay known.
"""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import msgspec
from msgspec.structs import replace

from headrace.adapters.journal.append import append
from headrace.model.ids import ClassName, TenantId
from headrace.model.steplog import Alive, Arrived, Ended, Head, Note, Step
from headrace.units import MIB, NS_PER_S, InstantNs

LOG_MIB = 32
"""Most of one file; there are two at most, NAME and the one before it, NAME.1."""
QUEUE_MAX = 4_096
"""Lines that may wait for the disk: most of a minute of short steps."""
NAME_MAX = 128
"""Characters kept of names that come from outside: ids, tenants, classes."""
TEXT_MAX = 512
"""Characters kept of a note."""
_CLOSE_S = 5.0
_RETRY_NS = NS_PER_S
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
_MODE = 0o600
_encode = msgspec.json.Encoder().encode


class StepWriter:
    """The step log of one engine, in a file that nothing else writes.

    A file that is there already, of an earlier life, is moved to NAME.1 first.
    """

    def __init__(
        self,
        path: Path,
        head: Head,
        *,
        told: Callable[[str], None] = lambda _text: None,
        mib: int = LOG_MIB,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        """Start the thread. `told` gets the first fault of the disk, within that thread."""
        assert mib >= 1, f"{mib=}"
        assert queue_max >= 1, f"{queue_max=}"
        self._queue: SimpleQueue[Step | Note | None] = SimpleQueue()
        self._queue_max = queue_max
        self._lost = _Lost("the queue to the disk was full")
        self._file = _File(path, head, mib * MIB, told)
        self._open = True
        self._thread = Thread(target=self._run, name="headrace-steps", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines left out so far, for want of room in the queue or on the disk."""
        return self._lost.total + self._file.lost.total

    def put(self, line: Step | Note) -> None:
        """Hand over a line. Never waits and never raises; for one thread, that of the engine."""
        if not self._open:
            return
        if self._queue.qsize() >= self._queue_max:
            self._lost.add(line)
            return
        if self._lost.lines and isinstance(line, Step):
            self._queue.put(self._lost.note(line.at_ns))
            line = self._lost.within(line)
            self._lost.clear()
        self._queue.put(line)

    def close(self) -> None:
        """Write what was handed over, for 5 s at most, and end. What follows is left out."""
        if not self._open:
            return
        self._open = False
        if self._lost.lines:
            self._queue.put(self._lost.note(self._lost.at_ns))
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        self._file.begin()
        while (line := self._queue.get()) is not None:
            self._file.put(line)
        self._file.close()


class _File:
    """The file and the one before it; all of it belongs to the thread."""

    def __init__(self, path: Path, head: Head, limit: int, told: Callable[[str], None]) -> None:
        self._path, self._head, self._limit, self._told = path, head, limit, told
        self._before = path.with_name(f"{path.name}.1")
        self.lost = _Lost("the file could not be written")
        self._alive: dict[int, Alive] = {}
        self._file: int | None = None
        self._size = self._headed = 0
        self._again_ns = -1  # when to try the disk again
        self._silent = False

    def begin(self) -> None:
        """Begin the first file, or else say why not and try again with each line."""
        try:
            self._begin()
        except OSError as error:
            self._fault(error)

    def put(self, line: Step | Note) -> None:
        """Write a line, or keep in mind what it told until the disk takes one again."""
        line = _bounded(line)
        if self.lost.lines and line.at_ns < self._again_ns:
            self.lost.add(line)
            return
        lines = [line]
        if self.lost.lines and isinstance(line, Step):
            lines = [self.lost.note(line.at_ns), self.lost.within(line)]
        try:
            self._append(b"".join(_encode(one) + b"\n" for one in lines))
        except OSError as error:
            self._again_ns = line.at_ns + _RETRY_NS
            self.lost.add(line)
            self._fault(error)
            return
        except (TypeError, ValueError, OverflowError) as error:  # no fault of any disk: not again
            self.lost.total += 1
            self._tell(f"a line cannot be written as JSON: {error}")
            return
        if isinstance(lines[-1], Step):
            self.lost.clear()
            _follow(self._alive, lines[-1])

    def close(self) -> None:
        """Tell of what was lost at the end, if that can be, and let go of the file."""
        with suppress(OSError):
            if self.lost.lines:
                self._append(_encode(self.lost.note(self.lost.at_ns)) + b"\n")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, content: bytes) -> None:
        """Append to the file, or to a new one where it would grow beyond its bound."""
        full = self._size + len(content) > self._limit and self._size > self._headed
        if self._file is None or full:
            self._begin()
        assert self._file is not None, "a file was begun"
        append(self._file, content, self._size)
        self._size += len(content)

    def _begin(self) -> None:
        """Begin a file, which tells who is alive; what is there becomes the one before it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self._path.lstat().st_mode):
                raise OSError("it is there and no regular file")
            self._path.replace(self._before)
        alive = tuple(one for _, one in sorted(self._alive.items()))
        content = _encode(replace(self._head, alive=alive)) + b"\n"
        file = os.open(self._path, _FLAGS, _MODE)
        try:
            append(file, content, 0)
        except OSError:
            os.close(file)
            with suppress(OSError):
                self._path.unlink()
            raise
        self._file, self._size, self._headed = file, len(content), len(content)

    def _fault(self, error: OSError) -> None:
        self._tell((error.strerror or str(error)).lower())

    def _tell(self, why: str) -> None:
        if not self._silent:
            self._silent = True
            self._told(f"step log {self._path}: {why}")


class _Lost:
    """Lines that were left out since the last one that was not: what the next step tells of them.

    As large as there are requests: of those that came and went in between nothing is kept.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self.total = 0
        self.clear()

    def clear(self) -> None:
        """Begin again: all of it was told."""
        self.lines = 0
        self.at_ns = InstantNs(0)
        self._arrived: dict[int, Arrived] = {}
        self._started: dict[int, None] = {}
        self._moved: dict[int, bool] = {}  # by number: resumed last, or preempted
        self._ended: dict[int, Ended] = {}

    def add(self, line: Step | Note) -> None:
        """Leave out a line."""
        self.total += 1
        self.lines += 1
        self.at_ns = line.at_ns
        if isinstance(line, Step):
            self._take(line)

    def note(self, at_ns: InstantNs) -> Note:
        """Return what tells of them."""
        lines = f"{self.lines} line{'s' if self.lines > 1 else ''}"
        return Note(at_ns=at_ns, text=f"{lines} lost: {self._why}")

    def within(self, step: Step) -> Step:
        """Return a step that also tells who arrived, started, moved and ended in those lost."""
        now = {*step.resumed, *step.preempted}
        moved = {n: resumed for n, resumed in self._moved.items() if n not in now}
        return replace(
            step,
            arrived=(*self._arrived.values(), *step.arrived),
            started=(*self._started, *step.started),
            resumed=(*(n for n, resumed in moved.items() if resumed), *step.resumed),
            preempted=(*(n for n, resumed in moved.items() if not resumed), *step.preempted),
            ended=(*self._ended.values(), *step.ended),
        )

    def _take(self, step: Step) -> None:
        self._arrived.update((one.n, one) for one in step.arrived)
        self._started.update(dict.fromkeys(step.started))
        self._moved.update(dict.fromkeys(step.resumed, True))
        self._moved.update(dict.fromkeys(step.preempted, False))
        for one in step.ended:
            self._started.pop(one.n, None)
            self._moved.pop(one.n, None)
            if self._arrived.pop(one.n, None) is None:
                self._ended[one.n] = one


def _follow(alive: dict[int, Alive], step: Step) -> None:
    """Keep up to date who is alive; a line that was no JSON may have left somebody unknown."""
    for one in step.arrived:
        alive[one.n] = Alive(arrived=one, started=False, running=False)
    for n in (*step.started, *step.resumed):
        if n in alive:
            alive[n] = replace(alive[n], started=True, running=True)
    for n in step.preempted:
        if n in alive:
            alive[n] = replace(alive[n], running=False)
    for over in step.ended:
        alive.pop(over.n, None)


def _bounded(line: Step | Note) -> Step | Note:
    """Return a line whose names are short, and text at all: ids may be a caller's own."""
    if isinstance(line, Note):
        return replace(line, text=_text(line.text, TEXT_MAX))
    if not line.arrived:
        return line
    return replace(line, arrived=tuple(map(_named, line.arrived)))


def _named(one: Arrived) -> Arrived:
    return replace(
        one,
        request=_text(one.request),
        tenant=TenantId(_text(one.tenant)),
        slo_class=ClassName(_text(one.slo_class)),
    )


def _text(name: str, most: int = NAME_MAX) -> str:
    return name[:most].encode("utf-8", "replace").decode()
