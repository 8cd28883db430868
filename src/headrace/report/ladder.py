"""In which forms was a request looked at, and what put its class where it was on its ladder?"""

from collections.abc import Iterator

from headrace.model.decision import LetIn
from headrace.model.evidence import LadderRecord, Tried
from headrace.report.rows import Row, figures
from headrace.report.tables import Column, Table
from headrace.report.words import NONE, count, milliseconds
from headrace.units import MICRO


def ladder_tables(ladder: LadderRecord) -> Iterator[Table]:
    """Yield the forms that were looked at, and what the level was decided by."""
    names = ("level", "input", "output p90", "output limit", "slack", "")
    yield Table(
        title="Forms that were looked at: tokens, and slack in ms",
        columns=tuple(Column(name, right=bool(name)) for name in names),
        rows=tuple(_form(one) for one in ladder.tried),
        note=f"its tenant agreed to level {ladder.facts.tenant}, its caller to {ladder.facts.caller}",
    )
    yield figures("The level of its class", pressure_rows(ladder))


def _form(tried: Tried) -> tuple[str, ...]:
    evidence, decision = tried.evidence, tried.decision
    limit = NONE if evidence.max_output is None else count(evidence.max_output)
    said = "let in" if isinstance(decision, LetIn) else decision.reason.value.replace("_", " ")
    return (
        str(tried.level),
        count(evidence.demand.input_tokens),
        count(evidence.demand.output_p90),
        limit,
        NONE if evidence.ttft_ns is None else milliseconds(decision.slack_ns),
        said,
    )


def pressure_rows(ladder: LadderRecord) -> Iterator[Row]:
    """Yield what the level was decided by."""
    seen = ladder.pressure
    yield Row("level", str(ladder.base), "", f"{seen.level} before, of at most {seen.lowest}")
    for level, offered in enumerate(seen.offered):
        share = f"{offered / seen.rate_micro:.2f} of what is done" if seen.rate_micro else ""
        yield Row(f"comes in at level {level}", f"{offered / MICRO:.3f}", "s/s", share)
    yield Row("is done", f"{seen.rate_micro / MICRO:.3f}", "s/s", "work rate of the ready replicas")
    yield Row("queue", milliseconds(seen.wait_ns), "ms", "what waits, at that rate")
    yield Row("refused", str(seen.refused), "", "of the last three at this level, lately")
    yield Row("calm", milliseconds(seen.calm_ns), "ms", "the level above would have done")
    tries = f"{seen.failed} steps up in a row were too early" if seen.failed else ""
    yield Row("quiet", milliseconds(seen.quiet_ns), "ms", tries)
