"""How is a step log told: one summary for each life of an engine, and its tables?"""

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.ids import ClassName, TenantId
from headrace.model.steplog import Arrived, Head
from headrace.policy.fairness.costs import Linear
from headrace.report import words
from headrace.report.stats import Quantiles, nearest_rank, quantiles, ratio, rounded
from headrace.report.steps import (
    Meter,
    Order,
    Used,
    contended,
    first_order,
    prefill_between_tokens,
    queue_times,
    victims,
    walk,
)
from headrace.report.steps_read import Log
from headrace.report.tables import Column, Table
from headrace.units import MICRO, DurationNs, to_seconds

NOTES_SHOWN = 8
"""Notes in the report, the latest; the rest is counted."""


class Tally(Struct, frozen=True, kw_only=True, gc=False):
    """Percentiles of counts."""

    count: int
    p50: int
    p99: int
    max: int


class Running(Struct, frozen=True, kw_only=True):
    """Steps with about so many requests running."""

    least: int
    most: int
    steps: int
    took: Quantiles | None
    schedule: Quantiles | None


class TenantSteps(Struct, frozen=True, kw_only=True):
    """What one tenant got."""

    tenant: TenantId
    requests: int
    ended: int
    used: Used
    service: float
    """Weighted tokens, in input tokens."""
    backlogged_steps: int
    """Steps in which it and at least one other tenant waited."""
    share: float | None
    """Its part of the service of backlogged tenants in such steps. None: there were none."""
    queue: Quantiles | None
    """From arrival to the first step."""
    preemptions: int
    prefill_between_tokens: Tally | None


class ClassSteps(Struct, frozen=True, kw_only=True):
    """What one class suffered; relegated requests apart."""

    slo_class: ClassName
    relegated: bool
    requests: int
    preemptions: int


class Told(Struct, frozen=True, kw_only=True, gc=False):
    """A note, and how long after the first step it was made."""

    after_ns: int
    text: str


class StepsReport(Struct, frozen=True, kw_only=True):
    """One life of an engine, by its step log."""

    files: tuple[str, ...]
    head: Head | None
    span_ns: DurationNs
    steps: int
    took: Quantiles | None
    schedule: Quantiles | None
    by_running: tuple[Running, ...]
    contended_steps: int
    """Steps in which at least two tenants waited."""
    tenants: tuple[TenantSteps, ...]
    classes: tuple[ClassSteps, ...]
    order: Order
    order_share: float | None
    """Part of the pairs in order; None: there was none."""
    otherwise: int
    """Steps of a passive scheduler for which ours would have set other knobs."""
    notes: tuple[Told, ...]
    """The latest."""
    notes_more: int
    """Earlier ones that are left out here."""


def steps_report(log: Log, rates: Linear) -> StepsReport:
    """Return what a life comes to; `rates` are the service of tokens."""
    steps = log.steps
    order = first_order(steps, log.alive)
    return StepsReport(
        files=log.files,
        head=None if log.head is None else replace(log.head, alive=()),
        span_ns=_span(log),
        steps=len(steps),
        took=quantiles(step.took_ns for step in steps if step.took_ns is not None),
        schedule=quantiles(step.schedule_ns for step in steps),
        by_running=tuple(_by_running(log)),
        contended_steps=contended(steps, log.alive, rates).steps,
        tenants=tuple(_tenants(log, rates)),
        classes=tuple(_classes(log)),
        order=order,
        order_share=order.share,
        otherwise=sum(
            step.proposed is not None and step.proposed != (step.budget, step.chunk, step.limit)
            for step in steps
        ),
        notes=tuple(
            Told(after_ns=note.at_ns - (steps[0].at_ns if steps else note.at_ns), text=note.text)
            for note in log.notes[-NOTES_SHOWN:]
        ),
        notes_more=max(0, len(log.notes) - NOTES_SHOWN),
    )


def _span(log: Log) -> DurationNs:
    if not log.steps:
        return DurationNs(0)
    last = log.steps[-1]
    return DurationNs(last.at_ns + (last.took_ns or 0) - log.steps[0].at_ns)


def _by_running(log: Log) -> Iterator[Running]:
    """Yield the steps by how many requests ran: none, 1, 2 to 3, 4 to 7, and so on."""
    found: dict[int, list[tuple[int | None, int]]] = {}
    for step in log.steps:
        bits = step.running.bit_length()
        found.setdefault(bits, []).append((step.took_ns, step.schedule_ns))
    for bits, both in sorted(found.items()):
        yield Running(
            least=(1 << bits) >> 1,
            most=(1 << bits) - 1,
            steps=len(both),
            took=quantiles(took for took, _ in both if took is not None),
            schedule=quantiles(schedule for _, schedule in both),
        )


def _rows(log: Log) -> list[Arrived]:
    """Return every request of a log."""
    rows = [one.arrived for one in log.alive]
    return rows + [one for step in log.steps for one in step.arrived]


def _tenants(log: Log, rates: Linear) -> Iterator[TenantSteps]:
    rows = _rows(log)
    tenant_of = {one.n: one.tenant for one in rows}
    used = {one.tenant: Used() for one in rows}
    meter = Meter()
    for step, requests in walk(log.steps, log.alive):
        for tenant, given in meter.take(step, requests).items():
            used[tenant].add(given)
    shared = contended(log.steps, log.alive, rates)
    queue, between = (
        queue_times(log.steps, log.alive),
        prefill_between_tokens(log.steps, log.alive),
    )
    requests_of = Counter(one.tenant for one in rows)
    ended = Counter(tenant_of[over.n] for step in log.steps for over in step.ended)
    preempted = Counter(one.tenant for one in victims(log.steps, log.alive))
    total = sum(shared.service.values())
    for tenant in sorted(used):
        service = shared.service.get(tenant)
        yield TenantSteps(
            tenant=tenant,
            requests=requests_of[tenant],
            ended=ended[tenant],
            used=used[tenant],
            service=rounded(used[tenant].service(rates) / MICRO),
            backlogged_steps=shared.backlogged.get(tenant, 0),
            share=None if service is None else ratio(service, total),
            queue=quantiles(queue.get(tenant, ())),
            preemptions=preempted[tenant],
            prefill_between_tokens=tally(between.get(tenant, ())),
        )


def _classes(log: Log) -> Iterator[ClassSteps]:
    requests = Counter((one.slo_class, one.relegated) for one in _rows(log))
    preempted = Counter((one.slo_class, one.relegated) for one in victims(log.steps, log.alive))
    for (slo_class, relegated), count in sorted(requests.items()):
        yield ClassSteps(
            slo_class=slo_class,
            relegated=relegated,
            requests=count,
            preemptions=preempted[slo_class, relegated],
        )


def tally(values: Iterable[int]) -> Tally | None:
    """Return the percentiles of counts, or None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Tally(
        count=len(ordered),
        p50=nearest_rank(ordered, 50),
        p99=nearest_rank(ordered, 99),
        max=ordered[-1],
    )


def steps_tables(found: StepsReport) -> list[Table]:
    """Return the tables of one life; what has no rows is left out."""
    tables = [_headline(found), _by_tenant(found), _interference(found), _by_class(found)]
    tables += [_durations(found), _notes(found)]
    return [table for table in tables if table.rows]


def _headline(found: StepsReport) -> Table:
    head = found.head
    title = ", ".join(found.files)
    if head is not None:
        title += f"  ({head.engine}, {head.mode}, {head.ordering}, {head.batching})"
    pairs = f"{words.percent(found.order_share)} of {words.count(found.order.pairs)} pairs"
    rows = [
        ("SPAN", words.duration(found.span_ns)),
        ("STEPS", f"{words.count(found.steps)}, {_p50_p99(found.took)}"),
        ("SCHEDULING", _p50_p99(found.schedule)),
        ("CONTENDED", f"{words.count(found.contended_steps)} steps: two tenants or more waited"),
        ("ORDER", f"{pairs} started earliest deadline first"),
    ]
    if head is not None and head.mode == "passive":
        rows.append(("OTHERWISE", f"{words.count(found.otherwise)} steps had other knobs by ours"))
    return Table(title=title, columns=_left("", ""), rows=tuple(rows))


def _by_tenant(found: StepsReport) -> Table:
    return Table(
        title="By tenant",
        columns=(
            *_left("tenant"),
            *map(Column, ("requests", "ended", "prompt", "again", "cached", "output")),
            *map(Column, ("service", "share", "of steps", "queue p50", "p99", "preempted")),
        ),
        rows=tuple(
            (
                str(one.tenant),
                words.count(one.requests),
                words.count(one.ended),
                words.big(one.used.computed),
                words.big(one.used.recomputed),
                words.big(one.used.cached),
                words.big(one.used.output),
                words.big(one.service),
                words.percent(one.share),
                words.count(one.backlogged_steps),
                words.duration(None if one.queue is None else one.queue.p50_ns),
                words.duration(None if one.queue is None else one.queue.p99_ns),
                words.count(one.preemptions),
            )
            for one in found.tenants
        ),
        note="tokens: prompt computed, computed again, cached, output; share of what backlogged"
        " tenants got, of contended steps in which it waited",
    )


def _interference(found: StepsReport) -> Table:
    return Table(
        title="Prefill between tokens",
        columns=(*_left("tenant"), *map(Column, ("gaps", "p50", "p99", "max"))),
        rows=tuple(
            (
                str(one.tenant),
                *map(words.count, (gaps.count, gaps.p50, gaps.p99, gaps.max)),
            )
            for one in found.tenants
            for gaps in (one.prefill_between_tokens,)
            if gaps is not None
        ),
        note="prompt tokens, everybody's, computed between two decode steps of one request",
    )


def _by_class(found: StepsReport) -> Table:
    return Table(
        title="By class",
        columns=(*_left("class", ""), *map(Column, ("requests", "preempted"))),
        rows=tuple(
            (
                str(one.slo_class),
                "relegated" if one.relegated else "",
                words.count(one.requests),
                words.count(one.preemptions),
            )
            for one in found.classes
        ),
    )


def _durations(found: StepsReport) -> Table:
    return Table(
        title="Steps by requests running",
        columns=(
            Column("running"),
            *map(Column, ("steps", "step p50", "p99", "scheduling p50", "p99")),
        ),
        rows=tuple(
            (
                f"{one.least}-{one.most}" if one.most > one.least else str(one.most),
                words.count(one.steps),
                *_two(one.took),
                *_two(one.schedule),
            )
            for one in found.by_running
        ),
    )


def _notes(found: StepsReport) -> Table:
    return Table(
        title="Notes",
        columns=(Column("s"), *_left("")),
        rows=tuple((f"{to_seconds(note.after_ns):,.3f}", note.text) for note in found.notes),
        note=f"and {words.plural(found.notes_more, 'earlier one')}" if found.notes_more else "",
    )


def _left(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, right=False) for name in names)


def _two(measured: Quantiles | None) -> tuple[str, str]:
    if measured is None:
        return words.NONE, words.NONE
    return words.duration(measured.p50_ns), words.duration(measured.p99_ns)


def _p50_p99(measured: Quantiles | None) -> str:
    p50, p99 = _two(measured)
    return f"p50 {p50}, p99 {p99}"
