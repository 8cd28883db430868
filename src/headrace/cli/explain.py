"""`headrace explain`: what was decided about one request, and why."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from msgspec import Struct

from headrace.adapters.journal.ring import segments
from headrace.cli.errors import FAILED, OK, fail
from headrace.cli.out import show
from headrace.model.effect import Concluded, Dispatch
from headrace.model.evidence import EntryRecord, RouteRecord
from headrace.model.ids import DecisionId, RequestId
from headrace.plane.journal import JournalError
from headrace.report.decisions import BadLog
from headrace.report.explain import explained
from headrace.report.story import (
    Segments,
    Story,
    Untold,
    of_journal,
    of_log,
    request_of,
    request_of_log,
)

Number = Annotated[
    int, Parameter(name="ID", help="That of a request; of a decision with --decision.")
]
Journal = Annotated[Path | None, Parameter(help="A journal's folder, or one of its segment files.")]
Log = Annotated[
    Path | None,
    Parameter(help="A decision log: for what no journal keeps. It does not tell how requests end."),
]
ByDecision = Annotated[
    bool,
    Parameter(
        name="--decision",
        negative=(),
        help="ID is that of a decision, as answers tell it in x-headrace-decision-id.",
    ),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print the records as JSON.")]


class Told(Struct, frozen=True, kw_only=True):
    """A story as JSON: the records as they are."""

    request_id: RequestId
    entry: EntryRecord | None
    routes: list[RouteRecord]
    dispatches: list[Dispatch]
    ended: Concluded | None
    notes: list[str]


def explain(
    number: Number,
    journal: Journal = None,
    /,
    *,
    log: Log = None,
    decision: ByDecision = False,
    as_json: AsJson = False,
) -> int:
    """Tell everything that was decided about a request, from a journal or a decision log."""
    if journal is None and log is None:
        return fail("name a journal, or a decision log with --log")
    problems: list[str] = []
    for source, find in _sources(journal, log, number, decision=decision):
        if not source.exists():
            return fail(f"{source}: no such file or directory")
        try:
            story = find()
        except Untold as untold:
            problems.append(f"{source}: {untold}")
            continue
        except (JournalError, BadLog) as broken:
            return fail(f"{source}: {broken}")
        if as_json:
            print(msgspec.json.encode(_told(story)).decode())
        else:
            show(explained(story), end="")
        return OK
    fail("\n".join(problems))
    return FAILED


def _sources(
    journal: Path | None, log: Path | None, number: int, *, decision: bool
) -> Iterator[tuple[Path, Callable[[], Story]]]:
    """Yield where to look, the journal first: it knows more."""
    if journal is not None:
        kept = _reader(journal)

        def from_journal() -> Story:
            found = request_of(kept, DecisionId(number)) if decision else RequestId(number)
            return of_journal(kept, found)

        yield journal, from_journal
    if log is not None:

        def from_log() -> Story:
            found = request_of_log(log, DecisionId(number)) if decision else RequestId(number)
            return of_log(log, found)

        yield log, from_log


def _reader(journal: Path) -> Segments:
    """Return what reads a journal from its beginning; raises `JournalError` if there is nothing."""

    def read() -> Iterator[bytes]:
        empty = True
        for content in segments(journal):
            empty = empty and not content
            yield content
        if empty:
            raise JournalError("holds no journal")

    return read


def _told(story: Story) -> Told:
    return Told(
        request_id=story.request,
        entry=None if story.entered is None else story.entered.record,
        routes=[sent.record for sent in story.sent],
        dispatches=[sent.dispatch for sent in story.sent if sent.dispatch is not None],
        ended=story.ended,
        notes=story.notes,
    )
