"""`headrace verify` and `headrace decisions verify`: does the record follow from what happened?"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from headrace.adapters.journal.ring import segments
from headrace.cli.errors import FAILED, OK, fail
from headrace.plane.journal import JournalError
from headrace.plane.journal import Verified as JournalVerified
from headrace.plane.journal import verify as replay
from headrace.report.decisions import BadLog, verify_decisions
from headrace.report.decisions import Verified as DecisionsVerified

_SHOWN_MAX = 80

Journal = Annotated[Path, Parameter(help="A journal's folder, or one of its segment files.")]
Log = Annotated[Path, Parameter(help="A decision log, JSON lines.")]


def verify(journal: Journal, /) -> int:
    """Replay a journal and compare every effect; ends with 1 at the first index that differs."""
    if not journal.exists():
        return fail(f"{journal}: no such file or directory")
    cuts: list[str] = []

    def cut(file: Path, count: int) -> None:
        cuts.append(f"{file}: {count} bytes cut off at the end")

    try:
        found = replay(_segments(journal, cut))
    except JournalError as broken:
        return fail(f"{journal}: {broken}")
    if isinstance(found, JournalVerified):
        print(*cuts, sep="\n", end="\n" if cuts else "")
        print(
            f"{journal}: {found.records} records from {found.first} on replay to the same effects"
        )
        return OK
    print(f"{journal}: record {found.index} ({found.event} at {found.now} ns) differs: {found.why}")
    return FAILED


def _segments(journal: Path, cut: Callable[[Path, int], None]) -> Iterator[bytes]:
    """Yield a journal's segments; raises `JournalError` if there is nothing of one."""
    empty = True
    for content in segments(journal, cut):
        empty = empty and not content
        yield content
    if empty:
        raise JournalError("holds no journal")


def decisions(log: Log, /) -> int:
    """Make every decision of a log again from its evidence; ends with 1 if one differs."""
    try:
        found = verify_decisions(log)
    except BadLog as broken:
        return fail(f"{log}: {broken}")
    if isinstance(found, DecisionsVerified):
        print(f"{log}: {found.count} decisions follow from their evidence")
        return OK
    print(
        f"{log}: line {found.line} (decision {found.decision_id}) differs in {found.field}: "
        f"{_shown(found.recorded)} was recorded, {_shown(found.recomputed)} follows"
    )
    return FAILED


def _shown(value: object) -> str:
    """Return a value as JSON, shortened to fit a line."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
