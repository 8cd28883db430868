"""Several runs side by side: one row a figure, one column a run, denominators first.

Shows runs that do not compare as well, and says so: of them no difference is ever formed.
"""

from collections.abc import Callable, Sequence

from headrace.model.ids import TenantId
from headrace.model.slo import Outcome
from headrace.report import words
from headrace.report.cost import cost_rows
from headrace.report.groups import EntryResult, Group
from headrace.report.stats import GapQuantiles, Quantiles
from headrace.report.summary import Summary
from headrace.report.tables import TOP, Column, Table
from headrace.units import to_seconds

NOT_COMPARABLE = "different traces: not comparable, shown side by side"
"""What stands under runs whose offered requests differ."""


def comparable(summaries: Sequence[Summary]) -> bool:
    """Return whether all were offered the same requests and are judged by one formula."""
    return all(
        (one.trace_hash, one.formula) == (summaries[0].trace_hash, summaries[0].formula)
        for one in summaries
    )


def side_by_side(summaries: Sequence[Summary]) -> Table:
    """Return every denominator, attainment and goodput of several runs (EX-3)."""
    return _table(
        "Denominators, attainment, goodput", summaries, (*FIGURES, *_cost_rows(summaries))
    )


def latencies_beside(summaries: Sequence[Summary]) -> Table:
    """Return the latency percentiles of several runs."""
    figures: list[Named] = []
    for name, pick in (
        ("queue", lambda g: g.latency.queue),
        ("TTFT", lambda g: g.latency.ttft),
        ("TPOT", lambda g: g.latency.tpot),
        ("max stall", lambda g: g.latency.stall),
        ("E2E", lambda g: g.latency.e2e),
    ):
        figures += _quantile_rows(name, pick)
    figures += _gap_rows()
    note = f"percentiles by {summaries[0].percentiles if summaries else ''}"
    return _table("Latency", summaries, figures, f"{note}; pooled gaps by upper bucket edge")


def reasons_beside(summaries: Sequence[Summary]) -> Table:
    """Return lesser forms by level, refusals by reason, early ends by reason and misses by indicator, of several runs."""
    figures: list[Named] = []
    for what, pick in (
        ("degraded", lambda g: g.degraded_by),
        ("rejected", lambda g: g.rejected_by),
        ("ended early", lambda g: g.ended_by),
        ("missed bound", lambda g: g.missed_by),
    ):
        figures += _reason_rows(what, pick, summaries)
    return _table("Degraded, refused, lost and late, by reason", summaries, figures)


def tenants_beside(summaries: Sequence[Summary]) -> Table:
    """Return what each tenant got of what it offered, in several runs: who pays for whom.

    The `TOP` tenants with the most offered work.
    """
    first = summaries[0].by_tenant if summaries else ()
    ranked = sorted(first, key=lambda one: (-one.work_ns, str(one.tenant)))
    figures = [(str(one.tenant), _attained_by(one.tenant)) for one in ranked[:TOP]]
    left = len(ranked) - TOP
    note = f"and {words.plural(left, 'more tenant')}" if left > 0 else ""
    return _table("Attainment over offered, by tenant", summaries, figures, note)


def _attained_by(tenant: TenantId | None) -> Callable[[Summary], str]:
    def text(summary: Summary) -> str:
        found = (one.attained_offered for one in summary.by_tenant if one.tenant == tenant)
        return words.percent(next(found, None))

    return text


Named = tuple[str, Callable[[Summary], str]]


def _table(
    title: str, summaries: Sequence[Summary], figures: Sequence[Named], note: str = ""
) -> Table:
    warning = "" if comparable(summaries) else NOT_COMPARABLE
    return Table(
        title=title,
        columns=(Column("", right=False), *(Column(one.label) for one in summaries)),
        rows=tuple((name, *(figure(one) for one in summaries)) for name, figure in figures),
        note="; ".join(part for part in (warning, note) if part),
    )


def _entered(result: EntryResult) -> Named:
    return words.reason(result), lambda s: words.count(s.total.entry[result])


def _ended(outcome: Outcome) -> Named:
    return f"ended: {words.reason(outcome)}", lambda s: words.count(s.total.outcomes[outcome])


FIGURES: tuple[Named, ...] = (
    ("trace", lambda s: s.trace_hash[:12]),
    ("seed", lambda s: str(s.seed)),
    ("arrivals, s (offered rates)", lambda s: words.three(to_seconds(s.span_ns))),
    ("served, s (goodput)", lambda s: words.three(to_seconds(s.served_ns))),
    ("offered requests", lambda s: words.count(s.total.offered)),
    ("offered input tokens", lambda s: words.big(s.total.input_tokens)),
    ("predicted output tokens (p50)", lambda s: words.big(s.total.predicted_output_tokens)),
    ("true output tokens", lambda s: words.big(s.total.output_tokens)),
    ("offered work, GPU-s/s", lambda s: words.three(s.total.work_rate)),
    *(_entered(result) for result in EntryResult),
    *(_ended(outcome) for outcome in Outcome),
    ("cut off at the end", lambda s: words.count(s.cut_off)),
    ("met every bound", lambda s: words.count(s.total.met)),
    ("attainment over admitted", lambda s: words.percent(s.total.attained_admitted)),
    ("attainment over offered", lambda s: words.percent(s.total.attained_offered)),
    ("work goodput, GPU-s/s", lambda s: words.three(s.total.work_goodput)),
    ("work goodput over offered", lambda s: words.percent(s.total.work_attained)),
    ("request goodput, requests/s", lambda s: words.three(s.total.request_goodput)),
    ("token goodput, tokens/s", lambda s: words.three(s.total.token_goodput)),
    ("attempts per request (no retries yet)", lambda s: words.three(s.total.retry_amplification)),
    ("successes per request", lambda s: words.three(s.total.success_per_request)),
    ("largest share deviation", lambda s: words.percent(s.fairness.deviation_max)),
    ("replicas' busy share", lambda s: words.percent(s.engines.busy_share)),
    ("prefix hit share", lambda s: words.percent(s.engines.prefix_hit_share)),
    ("preemptions", lambda s: words.count(s.engines.preemptions)),
)


def _cost_rows(summaries: Sequence[Summary]) -> list[Named]:
    """Return what was held, by what it served; nothing where nobody counted it (OPS-3)."""
    named = {name: None for one in summaries for name, _ in cost_rows(one.cost)}
    return [(name, _costs(name)) for name in named]


def _costs(name: str) -> Callable[[Summary], str]:
    return lambda summary: dict(cost_rows(summary.cost)).get(name, words.NONE)


def _quantile_rows(name: str, pick: Callable[[Group], Quantiles | None]) -> list[Named]:
    def cell(read: Callable[[Quantiles], int]) -> Callable[[Summary], str]:
        def text(summary: Summary) -> str:
            told = pick(summary.total)
            return words.NONE if told is None else words.duration(read(told))

        return text

    def counted(summary: Summary) -> str:
        told = pick(summary.total)
        return words.count(0 if told is None else told.count)

    return [
        (f"{name} p50", cell(lambda q: q.p50_ns)),
        (f"{name} p90", cell(lambda q: q.p90_ns)),
        (f"{name} p95", cell(lambda q: q.p95_ns)),
        (f"{name} p99", cell(lambda q: q.p99_ns)),
        (f"{name} max", cell(lambda q: q.max_ns)),
        (f"{name} measured", counted),
    ]


def _gap_rows() -> list[Named]:
    def cell(read: Callable[[GapQuantiles], str]) -> Callable[[Summary], str]:
        def text(summary: Summary) -> str:
            told = summary.total.latency.gaps
            return words.NONE if told is None else read(told)

        return text

    return [
        ("gaps p50", cell(lambda q: f"<= {words.duration(q.p50_le_ns)}")),
        ("gaps p99", cell(lambda q: f"<= {words.duration(q.p99_le_ns)}")),
        ("gaps max", cell(lambda q: words.duration(q.max_ns))),
        ("gaps measured", cell(lambda q: words.count(q.count))),
    ]


def _reason_rows(
    what: str, pick: Callable[[Group], dict[str, int]], summaries: Sequence[Summary]
) -> list[Named]:
    def cell(name: str) -> Callable[[Summary], str]:
        return lambda summary: words.count(pick(summary.total).get(name, 0))

    names: dict[str, int] = {}
    for one in summaries:
        for name, number in pick(one.total).items():
            names[name] = names.get(name, 0) + number
    ranked = sorted(names, key=lambda name: (-names[name], name))
    return [(f"{what}: {words.reason(name)}", cell(name)) for name in ranked]
