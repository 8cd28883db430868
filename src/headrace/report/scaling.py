"""Why has a pool so many groups? Each decision of the scaler in rows, from a journal or a decision log."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from headrace.model.effect import Decided, Effect
from headrace.model.ids import PoolName
from headrace.model.scaling import ScaleRecord
from headrace.model.scaling_spec import Scaling
from headrace.plane.core import Plane
from headrace.plane.journal import Differs, JournalError, Record, verify
from headrace.policy.catalog import PlaneConfig, decode
from headrace.policy.scaling.explain import Row, explained
from headrace.report import words
from headrace.report.decisions import (
    BadLog,
    ConfigLine,
    ScaleLine,
    read,
    scale_record,
    scaling_of,
)
from headrace.units import to_seconds


class Decision(Struct, frozen=True, kw_only=True):
    """One decision with the settings that it was made by."""

    record: ScaleRecord
    settings: Scaling

    @property
    def changes(self) -> bool:
        """Whether anything was to be done."""
        return self.record.decision.steps != type(self.record.decision.steps)()


def of_log(path: Path) -> Iterator[Decision]:
    """Yield the scaling decisions of a decision log; raises `BadLog`."""
    configs: dict[int, PlaneConfig] = {}
    for line in read(path):
        if isinstance(line, ConfigLine):
            configs[line.revision] = decode(line.config.encode())
        elif isinstance(line, ScaleLine):
            config = configs.get(line.policy_revision)
            settings = None if config is None else scaling_of(config, line.evidence.pool)
            if settings is None:
                raise BadLog(f"decision {line.decision_id}: its configuration is not in the log")
            yield Decision(record=scale_record(line), settings=settings)


def of_journal(segments: Iterable[bytes]) -> list[Decision]:
    """Return the scaling decisions of a journal, made again; raises `JournalError`."""
    found: list[Decision] = []

    def told(plane: Plane, _record: Record, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Decided) and isinstance(effect.record, ScaleRecord):
                facts = plane.settings.scaled[effect.record.decision.pool]
                found.append(Decision(record=effect.record, settings=facts.settings))

    ended = verify(segments, told)
    if isinstance(ended, Differs):
        raise JournalError(f"record {ended.index} does not follow: {ended.why}")
    return found


def chosen(decisions: Iterable[Decision], *, pool: PoolName | None, every: bool) -> list[Decision]:
    """Return the decisions of one pool, or of all, that changed something; `every`: the others too."""
    return [
        one
        for one in decisions
        if (every or one.changes) and pool in (None, one.record.decision.pool)
    ]


def rows(decision: Decision) -> tuple[Row, ...]:
    """Return one decision in rows."""
    return explained(decision.settings, decision.record.decision)


def text(decision: Decision) -> str:
    """Return one decision for people: a head, and its rows in columns."""
    record, told = decision.record, rows(decision)
    made = record.decision
    head = (
        f"decision {record.decision_id}: {made.pool} at {to_seconds(record.at):.1f} s, "
        f"{words.plural(made.ordered, 'group')} there or on the way, {made.desired} desired"
    )
    return "\n".join([head, *map(_line, told)])


def _line(row: Row) -> str:
    mark = ">" if row.wins else " "
    groups = "" if row.groups is None else str(row.groups)
    return (
        f"{mark} {row.what:<14}{groups:>5}  {row.why}{f' ({row.numbers})' if row.numbers else ''}"
    )
