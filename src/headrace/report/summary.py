"""What did one run come to, with every denominator?

Attainment and goodput are made here from the run's records and nothing else. Judges no policy:
comparing is another file's question.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

from msgspec import Struct

from headrace.model.effect import Concluded
from headrace.model.engine import Yielded
from headrace.model.ids import ClassName, ReplicaName, RequestId, TenantId
from headrace.report.cost import Cost, cost
from headrace.report.fairness import Fairness, fairness
from headrace.report.groups import Cell, EntryResult, Group, Times, entry_result, merged, times_of
from headrace.report.littles_law import Means, means
from headrace.report.objectives import ObjectiveResult, objective_results
from headrace.report.run import Offered, RunRecord
from headrace.report.stats import PERCENTILES, decile_edges, decile_of, ratio
from headrace.units import DurationNs, InstantNs


class Decile(Struct, frozen=True, kw_only=True, gc=False):
    """One tenth of the offered population by prompt length, and how it fared."""

    tenth: int
    """1: the shortest prompts."""
    input_tokens_max: int
    """Upper edge, inclusive. Equal prompts are never parted, so a tenth may hold none."""
    offered: int
    rejected: int
    met: int
    rejected_share: float | None


class ReplicaShare(Struct, frozen=True, kw_only=True):
    """How busy one replica was."""

    name: ReplicaName
    busy_share: float | None
    steps: int
    output_tokens: int


class Engines(Struct, frozen=True, kw_only=True):
    """What the replicas did, taken together."""

    replicas: tuple[ReplicaShare, ...]
    busy_share: float | None
    """Busy time / time up, of all: a diagnosis, never an objective."""
    preemptions: int
    yielded: Yielded
    """How requests gave way."""
    victims: int
    """Requests that did."""
    victims_met: int
    victims_met_share: float | None
    """Of these, those that met every bound."""
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    prefix_hit_share: float | None


class Summary(Struct, frozen=True, kw_only=True):
    """One run in figures. Floats are rounded as they are written."""

    label: str
    scenario: str
    seed: int
    trace_hash: str
    formula: str
    percentiles: str
    """How percentiles are defined."""
    span_ns: DurationNs
    """From the first arrival to the last: what offered rates are per."""
    served_ns: DurationNs
    """Up to the end of the last request that met, if that is later: what goodput is per."""
    end_ns: InstantNs
    cut_off: int
    """Requests that had not ended when the run had to."""
    total: Group
    by_class: tuple[Group, ...]
    by_tenant: tuple[Group, ...]
    by_tenant_class: tuple[Group, ...]
    objectives: tuple[ObjectiveResult, ...]
    deciles: tuple[Decile, ...]
    engines: Engines
    fairness: Fairness
    little: tuple[Means, ...]
    cost: Cost | None = None
    """None: nobody counted what was held."""


def summarise(run: RunRecord) -> Summary:
    """Return a run's figures (SLO-4, SLO-5); a record that does not add up is a bug."""
    rows = _matched(run)
    cells: dict[tuple[TenantId, ClassName], Cell] = {}
    for offered in run.offered:
        key = offered.tenant, offered.slo_class
        cell = cells.get(key)
        if cell is None:
            cell = cells[key] = Cell()
        cell.add(offered, rows[offered.request])
    tenants = sorted({tenant: None for tenant, _ in cells})
    classes = sorted({slo_class: None for _, slo_class in cells})
    times = times_of(run.span_ns, run.rows)
    return Summary(
        label=run.label,
        scenario=run.scenario,
        seed=run.seed,
        trace_hash=run.trace_hash,
        formula=run.formula,
        percentiles=PERCENTILES,
        span_ns=times.span_ns,
        served_ns=times.served_ns,
        end_ns=run.end_ns,
        cut_off=run.cut_off,
        total=merged(cells.values()).group(None, None, times),
        by_class=tuple(
            merged(cell for key, cell in cells.items() if key[1] == name).group(None, name, times)
            for name in classes
        ),
        by_tenant=_by_tenant(cells, tenants, times),
        by_tenant_class=tuple(cells[key].group(*key, times) for key in sorted(cells)),
        objectives=objective_results(run.slos, run.rows),
        deciles=_deciles(run.offered, rows),
        engines=_engines(run),
        fairness=fairness(run.offered, run.rows, run.samples, run.weights),
        little=means(run.rows),
        cost=cost(run),
    )


def _matched(run: RunRecord) -> dict[RequestId, Concluded]:
    """Return the one row of each offered request."""
    rows = {row.request: row for row in run.rows}
    assert len(rows) == len(run.rows), "a request ended twice"
    assert len(rows) == len(run.offered), f"{len(run.offered)} offered, {len(rows)} ended"
    for offered in run.offered:
        assert offered.request in rows, f"{offered.request=} was offered and never ended"
    return rows


def _by_tenant(
    cells: Mapping[tuple[TenantId, ClassName], Cell], tenants: Sequence[TenantId], times: Times
) -> tuple[Group, ...]:
    parts: dict[TenantId, list[Cell]] = {tenant: [] for tenant in tenants}
    for (tenant, _), cell in cells.items():
        parts[tenant].append(cell)
    return tuple(merged(parts[tenant]).group(tenant, None, times) for tenant in tenants)


def _deciles(offered: Sequence[Offered], rows: Mapping[RequestId, Concluded]) -> tuple[Decile, ...]:
    """Return rejections by prompt length; the edges are those of all that was offered."""
    edges = decile_edges(one.input_tokens for one in offered)
    counts = [[0, 0, 0] for _ in edges]
    for one in offered:
        row, tenth = rows[one.request], counts[decile_of(edges, one.input_tokens)]
        tenth[0] += 1
        tenth[1] += entry_result(row) is EntryResult.REJECTED
        tenth[2] += row.met
    return tuple(
        Decile(
            tenth=number,
            input_tokens_max=edge,
            offered=asked,
            rejected=refused,
            met=met,
            rejected_share=ratio(refused, asked),
        )
        for number, (edge, (asked, refused, met)) in enumerate(
            zip(edges, counts, strict=True), start=1
        )
    )


def _engines(run: RunRecord) -> Engines:
    replicas = run.replicas
    met = {row.request for row in run.rows if row.met}
    victims_met = sum(one.request in met for one in run.victims)
    queried = sum(one.prefix_tokens_queried for one in replicas)
    hit = sum(one.prefix_tokens_hit for one in replicas)
    return Engines(
        replicas=tuple(
            ReplicaShare(
                name=one.name,
                busy_share=ratio(one.busy_ns, one.up_ns),
                steps=one.steps,
                output_tokens=one.output_tokens,
            )
            for one in sorted(replicas, key=lambda one: one.name)
        ),
        busy_share=ratio(sum(one.busy_ns for one in replicas), sum(one.up_ns for one in replicas)),
        preemptions=sum(one.preemptions for one in replicas),
        yielded=reduce(Yielded.plus, (one.yielded for one in replicas), Yielded()),
        victims=len(run.victims),
        victims_met=victims_met,
        victims_met_share=ratio(victims_met, len(run.victims)),
        prefix_tokens_queried=queried,
        prefix_tokens_hit=hit,
        prefix_hit_share=ratio(hit, queried),
    )
