"""Did each declared objective hold over its population?

Judged over admitted requests (SLO-4), with the offered beside it. Whatever ended badly after
admission is a miss; only the listed exclusions leave the denominator.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum

from msgspec import Struct

from headrace.model.effect import Concluded
from headrace.model.slo import (
    Attainment,
    Exclusion,
    Indicator,
    Objective,
    Outcome,
    Per,
    Population,
    Slo,
    count,
)
from headrace.report.groups import EntryResult, entry_result
from headrace.report.stats import ratio


class ObjectiveVerdict(StrEnum):
    """What may be said of an objective."""

    HOLDS = "holds"
    MISSED = "missed"
    NO_DATA = "no_data"
    """Its population measured nothing."""
    UNKNOWN = "unknown"
    """It selects by what these records do not carry: model revision or region."""


class ObjectiveResult(Struct, frozen=True, kw_only=True):
    """One objective of one SLO, with both denominators."""

    slo: str
    revision: int
    population: str
    objective: Objective
    over_admitted: Attainment
    attained_admitted: float | None
    over_offered: Attainment | None
    """None for pooled gaps and tokens: they exist only where tokens came."""
    attained_offered: float | None
    excluded: int
    """Requests left out, all of them by a listed exclusion."""
    verdict: ObjectiveVerdict


def objective_results(
    slos: Iterable[Slo], rows: Iterable[Concluded]
) -> tuple[ObjectiveResult, ...]:
    """Return every objective's attainment and verdict, in the order of declaration."""
    rows = list(rows)
    found: list[ObjectiveResult] = []
    for slo in slos:
        chosen = _selector(slo.population)
        mine = [row for row in rows if chosen(row)]
        found += [_judge(slo, objective, mine) for objective in slo.objectives]
    return tuple(found)


def _selector(population: Population) -> Callable[[Concluded], bool]:
    def chosen(row: Concluded) -> bool:
        return (
            population.slo_class in (None, row.slo_class)
            and population.tenant in (None, row.tenant)
            and population.model in (None, row.model)
        )

    return chosen


def describe(population: Population) -> str:
    """Return whom a population selects, in words."""
    parts = (
        ("class", population.slo_class),
        ("tenant", population.tenant),
        ("model", population.model),
        ("revision", population.model_revision),
        ("region", population.region),
    )
    return ", ".join(f"{name} {value}" for name, value in parts if value is not None) or "everyone"


def sentence(objective: Objective) -> str:
    """Return an objective as it is spoken: `99 % of gaps <= 80 ms`."""
    noun = {Per.REQUEST: "requests", Per.GAP: "gaps", Per.TOKEN: "tokens"}[objective.per]
    named = _SPOKEN[objective.indicator]
    of = noun if objective.indicator is Indicator.GAP else f"{noun}: {named}"
    return f"{objective.target * 100:g} % of {of} <= {objective.threshold_ms:g} ms"


_SPOKEN = {
    Indicator.TTFT: "TTFT",
    Indicator.TPOT: "TPOT",
    Indicator.GAP: "gap",
    Indicator.MAX_STALL: "max stall",
    Indicator.E2E: "E2E",
}


def _judge(slo: Slo, objective: Objective, rows: list[Concluded]) -> ObjectiveResult:
    met = counted = refused = excluded = 0
    leaving = Exclusion.LEFT_BEFORE_ADMISSION in slo.exclusions
    for row in rows:
        if row.admitted:
            good, total = _count(objective, row)
            met += good
            counted += total
        elif leaving and entry_result(row) is EntryResult.LEFT_BEFORE:
            excluded += 1
        else:
            refused += 1
    admitted = Attainment(met=met, counted=counted)
    offered = None
    if objective.per is Per.REQUEST:
        offered = Attainment(met=met, counted=counted + refused)
    return ObjectiveResult(
        slo=slo.name,
        revision=slo.revision,
        population=describe(slo.population),
        objective=objective,
        over_admitted=admitted,
        attained_admitted=ratio(admitted.met, admitted.counted),
        over_offered=offered,
        attained_offered=None if offered is None else ratio(offered.met, offered.counted),
        excluded=excluded,
        verdict=_verdict(slo.population, objective, admitted),
    )


def _count(objective: Objective, row: Concluded) -> tuple[int, int]:
    """Return (met, counted) of one admitted request.

    One that did not succeed is a miss whatever it measured; its gaps count as they were.
    """
    seen, timing = row.indicators, row.timing
    pooled = objective.indicator is Indicator.GAP
    if seen is None or timing is None:
        return 0, 0 if pooled else 1
    good, total = count(objective, seen, timing, row.bounds.gap_ns)
    return (good if pooled or row.outcome is Outcome.SUCCESS else 0), total


def _verdict(population: Population, objective: Objective, seen: Attainment) -> ObjectiveVerdict:
    if population.model_revision is not None or population.region is not None:
        return ObjectiveVerdict.UNKNOWN
    if not seen.counted:
        return ObjectiveVerdict.NO_DATA
    return ObjectiveVerdict.HOLDS if seen.holds(objective.target) else ObjectiveVerdict.MISSED
