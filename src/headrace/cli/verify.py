"""`headrace verify` and `headrace decisions verify`: does the record follow from what happened?"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.adapters.journal.ring import segments
from headrace.cli.errors import FAILED, OK, fail
from headrace.plane.journal import JournalError
from headrace.plane.journal import Verified as JournalVerified
from headrace.plane.journal import verify as replay
from headrace.report.decisions import BadLog, verify_decisions
from headrace.report.decisions import Verified as DecisionsVerified

Journal = Annotated[Path, Parameter(help="A journal's folder, or one of its segment files.")]
Log = Annotated[Path, Parameter(help="A decision log, JSON lines.")]


def verify(journal: Journal, /) -> int:
    """Replay a journal and compare every effect; ends with 1 at the first index that differs."""
    if not journal.exists():
        return fail(f"{journal}: no such file or directory")
    try:
        found = replay(segments(journal))
    except JournalError as broken:
        return fail(f"{journal}: {broken}")
    if isinstance(found, JournalVerified):
        print(
            f"{journal}: {found.records} records from {found.first} on replay to the same effects"
        )
        return OK
    print(f"{journal}: record {found.index} ({found.event} at {found.now} ns) differs: {found.why}")
    return FAILED


def decisions(log: Log, /) -> int:
    """Make every decision of a log again from its evidence; ends with 1 if one differs."""
    try:
        found = verify_decisions(log)
    except BadLog as broken:
        return fail(f"{log}: {broken}")
    if isinstance(found, DecisionsVerified):
        print(f"{log}: {found.count} decisions follow from their evidence")
        return OK
    print(f"{log}: {found}")
    return FAILED
