"""How are the files of step logs read, and which of them belong together?

What a crash cut off is left out, and a request whose arrival was lost goes by the tenant `?`. Whatever
else is wrong is told with its file and line.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from headrace.model.ids import ClassName
from headrace.model.steplog import VERSION, Alive, Arrived, Head, Line, Note, Step
from headrace.report.steps import UNKNOWN
from headrace.units import InstantNs, Tokens

_DECODER = msgspec.json.Decoder(Line)


class BadSteps(Exception):  # noqa: N818 - what it is about, not that it is one
    """A file that is no step log, or a line that cannot be read."""


class Log(Struct, frozen=True, kw_only=True):
    """What one life of an engine left."""

    head: Head | None
    """None: the file does not begin with one."""
    alive: tuple[Alive, ...]
    """Who was there before the first step."""
    steps: tuple[Step, ...]
    notes: tuple[Note, ...]
    files: tuple[str, ...]
    """Names of its files, in order."""


class _Part(Struct, kw_only=True):
    """One file, or what follows another head within one."""

    name: str
    head: Head | None
    steps: list[Step]
    notes: list[Note]


def read_steps(paths: Iterable[Path]) -> list[Log]:
    """Return the lives in the order they began; files of one life may come in any order.

    All of it is held in memory. Raises BadSteps, and OSError for files that cannot be read.
    """
    lives: dict[tuple[int, str], list[_Part]] = {}
    for path in paths:
        for part in _parts(path):
            began = (0, part.name) if part.head is None else (part.head.started_unix_ms, "")
            lives.setdefault(began, []).append(part)
    return [_joined(parts) for _, parts in sorted(lives.items())]


def _parts(path: Path) -> list[_Part]:
    parts: list[_Part] = []
    for line in _lines(path):
        if isinstance(line, Head) or not parts:
            head = line if isinstance(line, Head) else None
            parts.append(_Part(name=path.name, head=head, steps=[], notes=[]))
        if isinstance(line, Step):
            parts[-1].steps.append(line)
        elif isinstance(line, Note):
            parts[-1].notes.append(line)
    if not parts:
        raise BadSteps(f"{path}: holds no step log")
    return parts


def _lines(path: Path) -> Iterator[Head | Step | Note]:
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            try:
                line = _DECODER.decode(content)
            except msgspec.MsgspecError as error:
                if number == 1:
                    raise BadSteps(f"{path}: no step log of version {VERSION}: {error}") from error
                if not content.endswith(b"\n"):
                    return  # cut off by a crash
                raise BadSteps(f"{path}:{number}: {error}") from error
            if isinstance(line, Head) and line.version != VERSION:
                raise BadSteps(f"{path}:{number}: version {line.version}, this reads {VERSION}")
            yield line


def _joined(parts: list[_Part]) -> Log:
    parts = sorted(parts, key=lambda part: part.steps[0].step if part.steps else -1)
    steps = [step for part in parts for step in part.steps]
    for before, after in pairwise(steps):
        if after.step <= before.step:
            names = ", ".join(dict.fromkeys(part.name for part in parts))
            raise BadSteps(
                f"{names}: step {after.step} follows step {before.step}:"
                " files of two engines, or one given twice"
            )
    alive = who_was_there([part.head for part in parts if part.head is not None], steps)
    return Log(
        head=parts[0].head,
        alive=tuple(alive),
        steps=tuple(steps),
        notes=tuple(note for part in parts for note in part.notes),
        files=tuple(dict.fromkeys(part.name for part in parts)),
    )


def who_was_there(heads: list[Head], steps: list[Step]) -> list[Alive]:
    """Return who was there before the first step: those of its head, and whoever else turns up."""
    found = {one.arrived.n: one for one in heads[0].alive} if heads else {}
    rows = {one.arrived.n: one.arrived for head in heads for one in head.alive}
    came: set[int] = set()
    for step in steps:
        came.update(one.n for one in step.arrived)
        for n, started, running in _seen(step):
            if n not in came and n not in found:
                row = rows.get(n) or _stranger(n)
                found[n] = Alive(arrived=row, started=started, running=running)
    return list(found.values())


def _seen(step: Step) -> Iterator[tuple[int, bool, bool]]:
    """Yield (n, had started, was running) as it must have been for what a step tells."""
    yield from ((n, False, False) for n in step.started)
    yield from ((n, True, False) for n in step.resumed)
    yield from ((n, True, True) for n in (*step.preempted, *step.decodes))
    yield from ((n, True, True) for n, _, _ in step.prefills)
    yield from ((over.n, True, True) for over in step.ended)


def _stranger(n: int) -> Arrived:
    return Arrived(
        n=n,
        request="",
        at_ns=InstantNs(0),
        tenant=UNKNOWN,
        slo_class=ClassName("?"),
        prompt_tokens=Tokens(0),
    )
