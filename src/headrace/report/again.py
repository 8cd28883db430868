"""An entry decision made again from its evidence, for whoever checks a log."""

from msgspec.structs import replace

from headrace.model.decision import Decision
from headrace.model.evidence import EntryRecord, Tried
from headrace.policy.catalog import PlaneConfig, class_level
from headrace.policy.degrade.forms import Form, climb


def decided_again(record: EntryRecord, config: PlaneConfig) -> EntryRecord:
    """Return an entry decision as its evidence has it, each form on the ladder included.

    A form whose evidence is not about what the ladder makes of the request is left out, so that the record
    differs there.
    """
    ladder = record.ladder
    spec = next((c.degrade for c in config.classes if c.name == record.tenant_class), None)
    if ladder is None or spec is None:
        decision = config.admission.decide(record.evidence)
        return replace(record, decision=decision, ladder=None)
    looked: list[Tried] = []
    left = iter(ladder.tried)

    def look(form: Form) -> Decision:
        seen = next(left, None)
        if seen is None or not _is_about(seen, form):
            raise _Unlike
        looked.append(
            Tried(
                level=form.level,
                evidence=seen.evidence,
                decision=config.admission.decide(seen.evidence),
            )
        )
        return looked[-1].decision

    base = class_level(config, ladder.pressure)
    kept = replace(ladder, base=base)
    try:
        found = climb(spec, ladder.facts, base, look)
    except _Unlike:
        return replace(record, ladder=replace(kept, tried=tuple(looked)))
    return replace(
        record,
        evidence=looked[found.nth].evidence,
        decision=found.decision,
        ladder=replace(kept, tried=tuple(looked)),
    )


class _Unlike(Exception):  # noqa: N818 - no error: what was recorded ends there
    """The next form that is due was not looked at."""


def _is_about(seen: Tried, form: Form) -> bool:
    evidence = seen.evidence
    asked = (form.level, form.input_tokens, form.max_output)
    return asked == (seen.level, evidence.demand.input_tokens, evidence.max_output)
