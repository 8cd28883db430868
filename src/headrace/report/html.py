"""One run or several as a single HTML file that needs nothing else.

No script, no font, no address: it opens from a mail or an archive in ten years. Same runs, same
bytes.
"""

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

from msgspec.structs import replace

from headrace.report import charts, words
from headrace.report.beside import (
    NOT_COMPARABLE,
    comparable,
    latencies_beside,
    reasons_beside,
    side_by_side,
)
from headrace.report.charts import Figure
from headrace.report.compare import DECIDING, NotComparable, Verdict, compare
from headrace.report.groups import EntryResult, Group
from headrace.report.run import RunRecord
from headrace.report.summary import Summary, summarise
from headrace.report.svg import split_bar, swatch
from headrace.report.sweep import SweepPoint
from headrace.report.tables import Table, little, objectives, shares, sufferers
from headrace.report.waits import wait_figures
from headrace.units import to_seconds

RUNS_MAX = 8
"""Runs one page tells apart."""


def html_report(
    title: str,
    runs: Sequence[RunRecord],
    sweep: Sequence[SweepPoint] | None = None,
    load: str = "offered work, GPU-s/s",
) -> str:
    """Return a self-contained page of up to `RUNS_MAX` runs; the first is the base of comparison.

    `sweep` adds goodput and attainment against `load`, which names its unit.
    """
    assert len(runs) <= RUNS_MAX, f"{len(runs)} runs on one page: {RUNS_MAX} can be told apart"
    runs = _told_apart(runs)
    told = [summarise(run) for run in runs]
    parts = [_header(title, told)]
    if told:
        parts.append(_cards(told))
    parts.append(
        _section(
            "Under load",
            "What is done in time as more is asked for.",
            (charts.sweep_goodput(sweep or (), load), charts.sweep_attainment(sweep or (), load)),
        )
    )
    if told:
        parts += [
            _section(
                "How long callers wait",
                "Over every offered request, refused ones included.",
                wait_figures(runs, told),
            ),
            _section(
                "Who is refused, who is served",
                "",
                (charts.deciles(told), charts.tenant_met(told), charts.tenant_shares(told)),
            ),
            _services(runs, told),
            _tables(told),
        ]
    return _page(title, "".join(parts), _footer(told))


def _told_apart(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with labels of their own: by seed, else by trace, where one is used twice."""
    apart: list[Callable[[RunRecord], str]] = [
        lambda run: run.label,
        lambda run: f"{run.label}, seed {run.seed}",
        lambda run: f"{run.label}, seed {run.seed}, trace {run.trace_hash[:6]}",
    ]
    for name in apart:
        named = [name(run) for run in runs]
        if len(set(named)) == len(runs):
            break
    return [replace(run, label=label) for run, label in zip(runs, named, strict=True)]


def _page(title: str, body: str, footer: str) -> str:
    css = files("headrace.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{css}</style></head>\n"
        f"<body>{body.replace('</header>', '</header><main>', 1)}</main>{footer}</body></html>\n"
    )


def _header(title: str, told: Sequence[Summary]) -> str:
    if not told:
        return f"<header><h1>{escape(title)}</h1></header>"
    first = told[0]
    if comparable(told):
        what = (
            f"{escape(first.scenario)}, seed {first.seed}: "
            f"{words.plural(first.total.offered, 'request')} offered in "
            f"{words.three(to_seconds(first.span_ns))} s, trace "
            f"<code>{escape(first.trace_hash[:12])}</code>, formula {escape(first.formula)}"
        )
        return f'<header><h1>{escape(title)}</h1><p class="meta">{what}</p></header>'
    return (
        f"<header><h1>{escape(title)}</h1>"
        f'<p class="warning">{escape(NOT_COMPARABLE.capitalize())}.</p></header>'
    )


def _cards(told: Sequence[Summary]) -> str:
    cards = "".join(_card(one, index, told) for index, one in enumerate(told))
    key = "".join(
        f'<span><i class="{name}"></i>{label}</span>'
        for name, label in (
            ("met", "met every bound"),
            ("missed", "admitted, missed or failed"),
            ("refused", "rejected"),
            ("left", "left before admission"),
        )
    )
    return f'<div class="cards">{cards}</div><p class="key">{key}</p>'


def _card(one: Summary, index: int, told: Sequence[Summary]) -> str:
    total = one.total
    met = words.count(total.met)
    rates = (
        f"{words.percent(total.work_attained)} of {words.three(total.work_rate)} offered<br>"
        f"{words.three(total.request_goodput)} requests/s<br>"
        f"{words.three(total.token_goodput)} tokens/s<br>"
        f"served in {words.three(to_seconds(one.served_ns))} s"
    )
    goodput = f"{words.three(total.work_goodput)} <small>GPU-s/s</small>"
    offered, admitted = words.count(total.offered), words.count(total.admitted)
    figures = (
        ("Work goodput", goodput, rates),
        ("Met of offered", words.percent(total.attained_offered), f"{met} of {offered} requests"),
        (
            "Met of admitted",
            words.percent(total.attained_admitted),
            f"{met} of {admitted} requests",
        ),
    )
    body = "".join(
        f'<div><dt>{name}</dt><dd><span class="big">{value}</span><span class="of">{of}</span></dd></div>'
        for name, value, of in figures
    )
    return (
        f'<section class="card"><h3>{swatch(index, line=False)}{escape(one.label)}</h3>'
        f'<p class="verdict">{escape(_verdict(one, index, told))}</p>'
        f'<dl class="figures">{body}</dl>{_fates(total)}</section>'
    )


def _verdict(one: Summary, index: int, told: Sequence[Summary]) -> str:
    """Return what the run is, held against the first."""
    if len(told) == 1:
        return f"{one.scenario}, seed {one.seed}"
    if not index:
        return "the base that the others are held against"
    try:
        found = compare(told[0], one)
    except NotComparable:
        return "not comparable with the base: other requests were offered"
    if found.verdict is Verdict.EQUAL:
        return "equals the base"
    relative = next(c.relative for c in found.changes if c.name == DECIDING)
    return f"{found.verdict} than the base: work goodput {words.relative(relative)}"


def _fates(total: Group) -> str:
    """Return where the offered requests and the offered work went."""
    late, refused = total.admitted - total.met, total.rejected
    left = total.entry[EntryResult.LEFT_BEFORE]
    requests = (
        ("met", total.met, f"{words.count(total.met)} met"),
        ("missed", late, f"{words.count(late)} admitted, missed or failed"),
        ("refused", refused, f"{words.count(refused)} rejected"),
        ("left", left, f"{words.count(left)} left before admission"),
    )
    aside = ("left", total.waiting, f"{words.count(total.waiting)} deferred and not sent")
    late_work = total.admitted_work_ns - total.met_work_ns
    rest = total.work_ns - total.admitted_work_ns
    work = (
        ("met", total.met_work_ns, f"{words.duration(total.met_work_ns)} of GPU time met"),
        ("missed", late_work, f"{words.duration(late_work)} admitted, missed or failed"),
        ("refused", rest, f"{words.duration(rest)} refused or left"),
    )
    parts = (*requests, aside) if total.waiting else requests
    return _fate_row("requests", parts, total.offered) + _fate_row("work", work, total.work_ns)


def _fate_row(name: str, parts: Sequence[tuple[str, int, str]], whole: int) -> str:
    if not whole:
        return ""
    told = [
        (kind, part / whole, f"{label} ({words.percent(part / whole)})")
        for kind, part, label in parts
    ]
    bar = split_bar(told, f"Where the offered {name} went")
    return f'<div class="split-row"><span>{name}</span>{bar}</div>'


def _section(heading: str, lead: str, figures: Sequence[Figure | None]) -> str:
    drawn = [figure.html() for figure in figures if figure is not None]
    if not drawn:
        return ""
    intro = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'<h2>{escape(heading)}</h2>{intro}<div class="plots">{"".join(drawn)}</div>'


def _services(runs: Sequence[RunRecord], told: Sequence[Summary]) -> str:
    tenants, scale = charts.top_tenants(told), charts.service_scale(runs)
    drawn = [charts.service(run, place, tenants, scale) for place, run in enumerate(runs)]
    lead = "GPU-seconds served per second to each tenant, stacked; all runs on one scale."
    return _section("Service over time", lead, drawn)


def _tables(told: Sequence[Summary]) -> str:
    parts = [
        '<h2>Every denominator</h2><div class="tables">',
        f'<div class="pair">{_table(side_by_side(told))}{_table(latencies_beside(told))}</div>',
        _table(reasons_beside(told)),
    ]
    for one in told:
        of = one.label if len(told) > 1 else ""
        each = (objectives(one.objectives), sufferers(one), shares(one), little(one))
        parts += [_table(table, of) for table in each]
    return "".join(parts) + "</div>"


def _table(table: Table, of: str = "") -> str:
    """Return a table element; its first column heads the rows."""
    if not table.rows:
        return ""
    caption = f"{table.title}, {of}" if of else table.title
    head = "".join(
        f'<th scope="col"{_left(column.right)}>{escape(column.name)}</th>'
        for column in table.columns
    )
    body = []
    for row in table.rows:
        cells = [
            f"<td{_left(column.right)}>{escape(cell)}</td>"
            for cell, column in zip(row[1:], table.columns[1:], strict=True)
        ]
        first = f'<th scope="row"{_left(table.columns[0].right)}>{escape(row[0])}</th>'
        body.append(f"<tr>{first}{''.join(cells)}</tr>")
    note = f'<p class="note-line">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div><div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{note}</div>"
    )


def _left(right: bool) -> str:
    return "" if right else ' class="l"'


def _footer(told: Sequence[Summary]) -> str:
    percentiles = told[0].percentiles if told else "nearest rank"
    notes = {
        "Goodput": "what met every declared bound and succeeded, per second from the first arrival"
        " to the last, or to the end of the last that met if that is later; offered rates are per"
        " second of arrivals",
        "Attainment": "met / admitted, and met / offered beside it; whatever ended after"
        " admission without success is a miss",
        "Work": "GPU time of a request's true lengths at the profile's reference batch, as if"
        " nothing were cached: alike for every policy",
        "Percentiles": f"{percentiles}, no interpolation; pooled gaps by upper bucket edge",
        "Objectives": "internal targets; none is an agreement with a customer",
    }
    rows = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in notes.items())
    return f"<footer><dl>{rows}</dl></footer>"
