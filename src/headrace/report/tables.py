"""What must one see of a run at three in the morning?

Goodput, attainment with its denominators, rejects by reason, who suffers; then the rest. Tables are
plain records, rendered here as fixed-width text and elsewhere as rich text or HTML.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from unicodedata import category

from msgspec import Struct

from headrace.model.slo import Outcome
from headrace.report import words
from headrace.report.compare import DECIDING, Change, Comparison, ManyComparison, Verdict
from headrace.report.groups import EntryResult, Group
from headrace.report.objectives import ObjectiveResult, sentence
from headrace.report.stats import GapQuantiles, Quantiles
from headrace.report.summary import Engines, Summary
from headrace.units import mib_ceil, to_seconds

TOP = 8
"""Rows of a ranking; the rest is counted, never dropped in silence."""


class Column(Struct, frozen=True):
    """One column; numbers stand to the right."""

    name: str
    right: bool = True


class Table(Struct, frozen=True, kw_only=True):
    """A titled grid of text."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def render(table: Table) -> str:
    """Return a table as fixed-width text, no line ending in blanks."""
    names = tuple(column.name for column in table.columns)
    rows = [tuple(map(_plain, row)) for row in table.rows]
    headed = [names, *rows] if any(names) else rows
    widths = [max((len(row[i]) for row in headed), default=0) for i in range(len(names))]
    lines = [_plain(table.title)] if table.title else []
    for row in headed:
        cells = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        )
        lines.append(("  " + "  ".join(cells)).rstrip())
    if table.note:
        lines.append(f"  {_plain(table.note)}")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return text that moves no terminal: names and notes may be somebody else's."""
    if text.isprintable():
        return text
    return "".join("?" if category(one).startswith("C") else one for one in text)


def render_all(tables: Iterable[Table]) -> str:
    """Return tables one below the other, a blank line between."""
    return "\n".join(render(table) for table in tables)


def render_summary(summary: Summary) -> str:
    """Return one run's report for the terminal."""
    return render_all(summary_tables(summary))


def render_comparison(comparison: Comparison | ManyComparison) -> str:
    """Return a comparison for the terminal, its verdict first."""
    if isinstance(comparison, Comparison):
        return render(comparison_table(comparison))
    return render(many_table(comparison))


def summary_tables(summary: Summary) -> list[Table]:
    """Return one run's tables, the most urgent first; what has no rows is left out."""
    tables = [
        headline(summary),
        rejections(summary.total),
        sufferers(summary),
        latencies(summary),
        objectives(summary.objectives),
        deciles(summary),
        shares(summary),
        engines(summary),
        little(summary),
    ]
    return [table for table in tables if table.rows]


def headline(summary: Summary) -> Table:
    """Return goodput and attainment with every denominator: the five-second view."""
    total = summary.total
    return Table(
        title=f"{summary.label}  ({summary.scenario}, seed {summary.seed})",
        columns=(Column("", right=False), Column("", right=False)),
        rows=(
            ("GOODPUT", goodput_text(total)),
            ("ATTAINED", attained_text(total)),
            ("OFFERED", offered_text(summary)),
            ("SERVED", served_text(summary)),
            ("ENTERED", counts_text(total.entry)),
            ("ENDED", counts_text(total.outcomes)),
            ("MISSED", counts_text(total.missed_by) or "no bound"),
            ("RETRIES", retries_text(total)),
        ),
        note=f"formula {summary.formula}; trace {summary.trace_hash[:12]}",
    )


def goodput_text(group: Group) -> str:
    """Return goodput in work, requests and tokens."""
    return (
        f"{words.three(group.work_goodput)} GPU-s/s of {words.three(group.work_rate)} offered"
        f" ({words.percent(group.work_attained)}),"
        f" {words.three(group.request_goodput)} requests/s,"
        f" {words.three(group.token_goodput)} tokens/s"
    )


def attained_text(group: Group) -> str:
    """Return attainment over admitted and over offered, each with what it is of."""
    return (
        f"{words.percent(group.attained_admitted)} of {words.count(group.admitted)} admitted,"
        f" {words.percent(group.attained_offered)} of {words.count(group.offered)} offered"
    )


def offered_text(summary: Summary) -> str:
    """Return what was offered, in every unit."""
    total = summary.total
    return (
        f"{words.count(total.offered)} requests in {words.three(to_seconds(summary.span_ns))} s:"
        f" {words.big(total.input_tokens)} tokens in,"
        f" {words.big(total.predicted_output_tokens)} out predicted,"
        f" {words.big(total.output_tokens)} out true"
    )


def served_text(summary: Summary) -> str:
    """Return how long it took to serve, which goodput is per, and what was not waited for."""
    text = f"in {words.three(to_seconds(summary.served_ns))} s, up to the end of the last that met"
    if summary.cut_off:
        text += f"; {words.plural(summary.cut_off, 'request')} cut off at the end of the run"
    return text


def counts_text(
    counts: Mapping[EntryResult, int] | Mapping[Outcome, int] | Mapping[str, int],
) -> str:
    """Return counts in words, every kind named."""
    return ", ".join(f"{words.count(n)} {words.reason(name)}" for name, n in counts.items())


def retries_text(group: Group) -> str:
    """Return attempts and successes per logical request."""
    return (
        f"{words.three(group.retry_amplification)} attempts and"
        f" {words.three(group.success_per_request)} successes per request (no retries yet)"
    )


def rejections(group: Group) -> Table:
    """Return why requests were refused, and why admitted ones ended early."""
    rows = [
        (f"{what}: {words.reason(name)}", words.count(n), words.percent(n / of))
        for what, counts, of in (
            ("degraded", group.degraded_by, group.offered),
            ("rejected", group.rejected_by, group.offered),
            ("ended early", group.ended_by, group.admitted),
        )
        for name, n in counts.items()
    ]
    return Table(
        title="Degraded, refused and lost, by reason",
        columns=(Column("", right=False), Column("requests"), Column("share")),
        rows=tuple(rows),
        note="degraded and rejected of the offered, ended early of the admitted",
    )


def sufferers(summary: Summary) -> Table:
    """Return the tenants' classes with the most offered work that did not meet its objective."""
    groups = sorted(
        summary.by_tenant_class, key=lambda g: (-g.unmet_work_ns, str(g.tenant), str(g.slo_class))
    )
    left = len(groups) - TOP
    return Table(
        title="Who suffers: most offered work unmet first",
        columns=(
            Column("tenant", right=False),
            Column("class", right=False),
            *map(Column, ("offered", "rejected", "admitted", "degraded", "met")),
            *map(Column, ("of admitted", "of offered", "work unmet", "TTFT p99", "stall p99")),
        ),
        rows=tuple(
            (
                str(group.tenant),
                str(group.slo_class),
                words.count(group.offered),
                words.count(group.rejected),
                words.count(group.admitted),
                words.count(group.entry[EntryResult.DEGRADED]),
                words.count(group.met),
                words.percent(group.attained_admitted),
                words.percent(group.attained_offered),
                words.duration(group.unmet_work_ns),
                _of(group.latency.ttft, lambda q: q.p99_ns),
                _of(group.latency.stall, lambda q: q.p99_ns),
            )
            for group in groups[:TOP]
        ),
        note=f"and {words.plural(left, 'more row')}" if left > 0 else "",
    )


def latencies(summary: Summary) -> Table:
    """Return latency percentiles by class; pooled gaps and stalls beside means per answer."""
    groups = [*summary.by_class, summary.total] if len(summary.by_class) > 1 else [summary.total]
    rows = []
    for group in groups:
        told = group.latency
        for name, measured in (
            ("queue", told.queue),
            ("TTFT", told.ttft),
            ("TPOT", told.tpot),
            ("max stall", told.stall),
            ("E2E", told.e2e),
        ):
            if measured is not None:
                rows.append((_class_of(group), name, *_quantile_cells(measured)))
        if told.gaps is not None:
            rows.append((_class_of(group), "gaps", *_gap_cells(told.gaps)))
    return Table(
        title="Latency",
        columns=(
            Column("class", right=False),
            Column("", right=False),
            *map(Column, ("count", "p50", "p90", "p95", "p99", "max")),
        ),
        rows=tuple(rows),
        note=f"percentiles by {summary.percentiles}; <= is the upper edge of a gap bucket",
    )


def objectives(results: Sequence[ObjectiveResult]) -> Table:
    """Return each declared objective with both denominators and its verdict."""
    return Table(
        title="Objectives (internal targets, no agreement)",
        columns=(
            *(Column(name, right=False) for name in ("objective", "population", "target")),
            *map(Column, ("of admitted", "counted", "of offered", "excluded")),
            Column("verdict", right=False),
        ),
        rows=tuple(
            (
                f"{one.slo} r{one.revision}",
                one.population,
                sentence(one.objective),
                words.percent(one.attained_admitted),
                words.count(one.over_admitted.counted),
                words.percent(one.attained_offered),
                words.count(one.excluded),
                words.reason(one.verdict),
            )
            for one in results
        ),
    )


def deciles(summary: Summary) -> Table:
    """Return rejections by prompt length: does the policy pick short prompts?"""
    return Table(
        title="By prompt length, tenths of the offered requests",
        columns=tuple(map(Column, ("tenth", "tokens <=", "offered", "rejected", "share", "met"))),
        rows=tuple(
            (
                str(one.tenth),
                words.count(one.input_tokens_max),
                words.count(one.offered),
                words.count(one.rejected),
                words.percent(one.rejected_share),
                words.count(one.met),
            )
            for one in summary.deciles
        ),
    )


def shares(summary: Summary) -> Table:
    """Return each tenant's part of offered and served work, the largest first."""
    fair = summary.fairness
    ranked = sorted(fair.tenants, key=lambda one: (-one.served_work_ns, one.tenant))
    note = "no two tenants were backlogged through a window"
    if fair.deviation_max is not None and fair.worst_at is not None:
        note = (
            f"largest deviation from the fair share over {words.duration(fair.window_ns)} with two"
            f" backlogged: {words.percent(fair.deviation_max)} ({fair.worst_tenant}, window ending"
            f" at {words.duration(fair.worst_at)}, of {words.plural(fair.windows, 'window')})"
        )
    if len(ranked) > TOP:
        note += f"; {words.plural(len(ranked) - TOP, 'tenant')} more"
    return Table(
        title="Work by tenant",
        columns=(
            Column("tenant", right=False),
            *map(Column, ("weight", "offered", "share", "served", "share")),
        ),
        rows=tuple(
            (
                str(one.tenant),
                str(one.weight),
                words.duration(one.offered_work_ns),
                words.percent(one.offered_share),
                words.duration(one.served_work_ns),
                words.percent(one.served_share),
            )
            for one in ranked[:TOP]
        ),
        note=note,
    )


def engines(summary: Summary) -> Table:
    """Return what the replicas did, taken together."""
    told, total = summary.engines, summary.total
    rows = (
        ("replicas", words.count(len(told.replicas))),
        ("busy share (diagnosis)", words.percent(told.busy_share)),
        ("prefix hits of tokens looked up", words.percent(told.prefix_hit_share)),
        ("cached of input tokens", f"{words.big(total.cached_tokens)}"),
        ("preemptions", words.count(told.preemptions)),
        *_yielded(told),
    )
    return Table(
        title="Engines",
        columns=(Column("", right=False), Column("")),
        rows=rows if told.replicas else (),
    )


def _yielded(told: Engines) -> tuple[tuple[str, str], ...]:
    """Return how requests gave way; nothing where none did."""
    all_of = told.yielded
    if not told.preemptions:
        return ()
    ways = (
        ("kept", all_of.kept),
        ("swapped", all_of.swapped),
        ("computed again", all_of.recomputed),
    )
    return (
        *((f"preemptions, {way}", words.count(times)) for way, times in ways if times),
        ("mean pause", words.duration(all_of.paused_ns // max(1, all_of.pauses))),
        ("longest pause", words.duration(all_of.longest_pause_ns)),
        ("MiB swapped, both ways", words.big(mib_ceil(all_of.bytes_out + all_of.bytes_in))),
        ("tokens computed again", words.big(all_of.tokens_recomputed)),
        ("requests that gave way", words.count(told.victims)),
        ("of these, met every bound", words.percent(told.victims_met_share)),
    )


def little(summary: Summary) -> Table:
    """Return Little's law as these records have it: an identity, beside the tails."""
    return Table(
        title="Means: number inside L, arrivals lambda, time W = L / lambda (Little's law)",
        columns=(
            Column("", right=False),
            *map(Column, ("requests", "L", "lambda /s", "W s", "unknown")),
        ),
        rows=tuple(
            (
                one.place,
                words.count(one.requests),
                words.three(one.mean_inside),
                words.three(one.rate),
                words.three(one.mean_time_s),
                words.count(one.unknown),
            )
            for one in summary.little
        ),
    )


def comparison_table(comparison: Comparison) -> Table:
    """Return two runs side by side with differences and the verdict."""
    return Table(
        title=verdict_text(comparison),
        columns=(
            Column("", right=False),
            *map(Column, (comparison.base, comparison.other, "difference", "relative")),
        ),
        rows=tuple(
            (
                f"{one.name}, {one.unit}" if one.unit else one.name,
                figure_text(one, one.base),
                figure_text(one, one.other),
                _difference_text(one),
                words.relative(one.relative),
            )
            for one in comparison.changes
        ),
        note=_compared_text(comparison),
    )


def _compared_text(comparison: Comparison) -> str:
    """Return on what ground two runs are compared, and what of it is chance."""
    same = f"trace {comparison.trace_hash[:12]}"
    if comparison.mix:
        same = f"different requests of one mix, by {words.plural(len(comparison.mix), 'check')}"
    text = f"{comparison.scenario}; {same}; {comparison.formula}"
    if comparison.interval is not None:
        low, high = (words.signed(end, 4) for end in comparison.interval)
        text += f"; live, {DECIDING} differs by {low} to {high} (95 %, over parts of the span)"
    return text


def verdict_text(comparison: Comparison | ManyComparison) -> str:
    """Return the verdict as a sentence."""
    than = {
        Verdict.BETTER: "is better than",
        Verdict.WORSE: "is worse than",
        Verdict.EQUAL: "equals",
        Verdict.UNCLEAR: "is not clearly better or worse than",
    }[comparison.verdict]
    return f"{comparison.other} {than} {comparison.base}, by {DECIDING}"


def many_table(comparison: ManyComparison) -> Table:
    """Return mean differences with their intervals and the verdict."""
    return Table(
        title=verdict_text(comparison),
        columns=(
            Column("mean", right=False),
            *map(Column, (comparison.base, comparison.other, "difference", "95 % interval")),
        ),
        rows=tuple(
            (
                f"{one.name}, {one.unit}" if one.unit else one.name,
                words.three(one.base),
                words.three(one.other),
                words.signed(one.difference),
                f"{words.signed(one.low)} to {words.signed(one.high)}",
            )
            for one in comparison.changes
        ),
        note=f"{comparison.scenario}; seeds {', '.join(map(str, comparison.seeds))};"
        f" {comparison.formula}; intervals by Student's t over pairs",
    )


def figure_text(change: Change, value: float | None) -> str:
    """Return a compared figure in its own form: counts whole, rates with three digits."""
    if change.unit == "requests":
        return words.count(value)
    return words.three(value) if change.unit else words.signed(value, 4).lstrip("+")


def _difference_text(change: Change) -> str:
    if change.unit == "requests":
        return words.signed(change.difference, 0)
    return words.signed(change.difference, 3 if change.unit else 4)


def _class_of(group: Group) -> str:
    return "all" if group.slo_class is None else str(group.slo_class)


def _quantile_cells(told: Quantiles) -> tuple[str, ...]:
    values = (told.p50_ns, told.p90_ns, told.p95_ns, told.p99_ns, told.max_ns)
    return (words.count(told.count), *(words.duration(value) for value in values))


def _gap_cells(told: GapQuantiles) -> tuple[str, ...]:
    return (
        words.count(told.count),
        f"<= {words.duration(told.p50_le_ns)}",
        words.NONE,
        words.NONE,
        f"<= {words.duration(told.p99_le_ns)}",
        words.duration(told.max_ns),
    )


def _of(told: Quantiles | None, pick: Callable[[Quantiles], int]) -> str:
    return words.NONE if told is None else words.duration(pick(told))
