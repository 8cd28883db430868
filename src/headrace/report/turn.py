"""Why was it this request's turn? Every figure that said so, for `explain`."""

from collections.abc import Iterator

from headrace.model.decision import ScoreTerms
from headrace.model.paths import Band, Term
from headrace.policy.ordering.orders import FAR
from headrace.report.rows import Row
from headrace.report.story import Sent
from headrace.report.words import NONE, count, milliseconds, yes


def turn_rows(sent: Sent) -> Iterator[Row]:
    """Yield what made it this request's turn; a row more for whatever else decides it."""
    record, evidence = sent.record, sent.record.evidence
    for term in evidence.turn:
        yield from term_rows(term)
    if evidence.score is not None:
        yield from score_rows(evidence.score)
    yield from key_rows(sent)
    yield Row("unit", evidence.cost, "", "what counters count: the revision of the cost")
    yield Row("lent", yes(evidence.lent), "", "a tenant further under its share could wait")
    yield Row("patient", yes(evidence.patient), "", "it can wait itself, or is hopeless")
    slack = milliseconds(record.slack_ns) if record.slack_ns < FAR // 2 else NONE
    yield Row("slack", slack, "ms", "to its first-token bound, when it was sent")
    if sent.dispatch is not None:
        late = "past its latest start, behind its tenant's others"
        yield Row("relegated", yes(sent.dispatch.relegated), "", late)


_KEYS = {
    "fifo": "order of arrival",
    "vtc": "order of arrival",
    "sjf": "predicted work",
    "edf": "first-token deadline",
    "least_slack": "latest start",
    "niyama": "first-token deadline, later by the prompt's length",
    "tenant_first": "first-token deadline",
    "score": "latest start",
}


def key_rows(sent: Sent) -> Iterator[Row]:
    """Yield by what its order sorts: the smaller goes first, among its queue's or in everybody's line."""
    if sent.config is None:
        return
    kind, key = str(sent.config.ordering.__struct_config__.tag), sent.record.evidence.key
    told = _KEYS[kind]
    if kind in {"fifo", "vtc"}:
        yield Row(f"key of {kind}", count(key), "", told)
    elif kind == "sjf":
        yield Row(f"key of {kind}", milliseconds(key), "ms", told)
    elif key - sent.record.at < FAR // 2:
        yield Row(
            f"key of {kind}",
            milliseconds(key - sent.record.at),
            "ms",
            f"{told}, or when it lets nobody pass; from when it was sent",
        )
    else:
        yield Row(f"key of {kind}", NONE, "", f"{told}: it has none")


_BANDS = {
    Band.MINIMUM: "under its minimum: before all counters",
    Band.FAIR: "by its counter",
    Band.CAPPED: "over its maximum, and nobody within theirs had urgent work",
}


def term_rows(term: Term) -> Iterator[Row]:
    """Yield what one level of the share tree said."""
    level = f"{term.level.name.lower()} {term.name}"
    said = f"least of those that compete: {count(term.least)}; weight {term.weight}"
    yield Row(level, count(term.counter), "", said)
    if term.band is not Band.FAIR:
        yield Row(f"{level}: went", term.band.name.lower(), "", _BANDS[term.band])
    if term.ahead:
        yield Row(f"{level}: boost", count(term.ahead), "", "its turn ahead of its counter")


def score_rows(score: ScoreTerms) -> Iterator[Row]:
    """Yield what made it score highest."""
    yield Row("score", f"{score.total:,.3f}", "s", "the highest of those that were weighed")
    yield Row("urgency", f"{score.urgency:,.3f}", "s", "how near its latest start is")
    yield Row("aging", f"{score.aging:,.3f}", "s", "for how long it has waited")
    yield Row("service", f"{-score.service:,.3f}", "s", "had beyond the least of its siblings")
    yield Row(
        "interference", f"{-score.interference:,.3f}", "s", "what its prefill takes from decodes"
    )
