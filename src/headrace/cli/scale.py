"""`headrace scale explain`: why a pool has so many groups."""

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from headrace.adapters.journal.ring import segments
from headrace.cli.errors import FAILED, OK, fail
from headrace.model.ids import PoolName
from headrace.plane.journal import JournalError
from headrace.report.decisions import BadLog
from headrace.report.scaling import Decision, chosen, of_journal, of_log, rows, text

Source = Annotated[
    Path,
    Parameter(name="FILE", help="A decision log, a journal's folder, or one of its segment files."),
]
Pool = Annotated[str | None, Parameter(help="Only decisions for this pool.")]
Every = Annotated[
    bool, Parameter(name="--all", negative=(), help="Also decisions that changed nothing.")
]
AsJson = Annotated[
    bool, Parameter(name="--json", negative=(), help="Print records and rows as JSON lines.")
]


def explain(
    source: Source, /, *, pool: Pool = None, every: Every = False, as_json: AsJson = False
) -> int:
    """Tell each decision of the scaler that changed something: what asked, what held, what was done."""
    if not source.exists():
        return fail(f"{source}: no such file or directory")
    try:
        decisions = _read(source)
    except (JournalError, BadLog) as broken:
        return fail(f"{source}: {broken}")
    wanted = chosen(decisions, pool=None if pool is None else PoolName(pool), every=every)
    for one in wanted:
        print(_json(one) if as_json else text(one) + "\n")
    if wanted:
        return OK
    fail(f"{source}: {len(decisions)} scaling decisions, and none of these")
    return FAILED


def _read(source: Path) -> list[Decision]:
    """Return all decisions; a file that begins as JSON is a log."""
    if source.is_file():
        with source.open("rb") as file:
            if file.read(1) == b"{":
                return list(of_log(source))
    return of_journal(segments(source))


def _json(one: Decision) -> str:
    return msgspec.json.encode({"record": one.record, "rows": rows(one)}).decode()
