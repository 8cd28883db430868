"""Which picture shows what a table hides? Each function turns runs into one figure of the page.

Pictures of waiting are another file's. Runs keep their colour and dash throughout a page.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import fsum

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.ids import TenantId
from headrace.report import words
from headrace.report.run import RunRecord, ServiceSample
from headrace.report.summary import Summary
from headrace.report.svg import (
    COLOURS,
    Chart,
    Series,
    area_chart,
    bar_chart,
    category_axis,
    line_chart,
    linear_axis,
    share_axis,
    swatch,
)
from headrace.report.sweep import SweepPoint, by_load
from headrace.units import to_seconds

POINTS = 240
"""Points a curve has at most: more than a screen shows apart."""
TENANTS = COLOURS - 1
"""Tenants told apart in one picture; the rest is one more."""

TENANT_COLOUR = 3
"""The first tenant's colour: none that a page of three runs has given to a run."""


class Figure(Struct, frozen=True, kw_only=True):
    """One picture with its heading, legend and what to look at."""

    heading: str
    remark: str
    svg: str
    legend: tuple[tuple[str, str], ...]
    """(sample, label)."""

    def html(self) -> str:
        """Return the figure element."""
        entries = "".join(
            f"<li>{sample}<span>{escape(label)}</span></li>" for sample, label in self.legend
        )
        remark = f"<figcaption>{escape(self.remark)}</figcaption>" if self.remark else ""
        return (
            f"<figure><h3>{escape(self.heading)}</h3>"
            f'<ul class="legend">{entries}</ul>{self.svg}'
            f"{remark}</figure>"
        )


def lines_legend(labels: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the legend of lines, one a run."""
    return tuple((swatch(index, line=True), label) for index, label in enumerate(labels))


def bars_legend(labels: Sequence[str], first: int = 0) -> tuple[tuple[str, str], ...]:
    """Return the legend of bars or areas."""
    return tuple((swatch(first + i, line=False), label) for i, label in enumerate(labels))


def deciles(summaries: Sequence[Summary]) -> Figure | None:
    """Return which prompts were refused, by tenths of the offered lengths."""
    told = [one for one in summaries if one.deciles]
    if not told:
        return None
    names = [words.big(one.input_tokens_max) for one in told[0].deciles]
    same = all([d.input_tokens_max for d in one.deciles] == _edges(told[0]) for one in told)
    chart = Chart(
        id="deciles",
        title="Rejections by prompt length",
        description="Share of each tenth of the offered requests that was rejected, by run.",
        x=category_axis(
            "prompt tokens, upper edge of each tenth of the offered requests"
            if same
            else "tenth of the offered requests, shortest prompts first",
            names if same else [str(tenth) for tenth in range(1, 11)],
        ),
        y=share_axis("rejected share"),
    )
    series = [
        Series(
            label=one.label,
            points=tuple((float(d.tenth), d.rejected_share or 0.0) for d in one.deciles),
            colour=index,
        )
        for index, one in enumerate(told)
    ]
    return Figure(
        heading="Rejections by prompt length",
        remark="A policy that attains much by refusing long prompts shows here.",
        svg=bar_chart(chart, series, words.percent),
        legend=bars_legend([one.label for one in told]),
    )


def _edges(summary: Summary) -> list[int]:
    return [one.input_tokens_max for one in summary.deciles]


def tenant_met(summaries: Sequence[Summary]) -> Figure | None:
    """Return how much of each tenant's offered work met its bounds, run beside run."""
    met = [{g.tenant: g.work_attained or 0.0 for g in one.by_tenant} for one in summaries]
    return _by_tenant(
        summaries,
        met,
        Chart(
            id="tenants",
            title="Work that met, by tenant",
            description="Share of each tenant's own offered GPU work that met every bound, by run.",
            x=_EMPTY,
            y=share_axis("met, of its offered work"),
        ),
        "Of its own offered work, refused or not: does one tenant's load cost another?",
    )


def tenant_shares(summaries: Sequence[Summary]) -> Figure | None:
    """Return each tenant's share of served work, run beside run."""
    served = [{t.tenant: t.served_share or 0.0 for t in one.fairness.tenants} for one in summaries]
    return _by_tenant(
        summaries,
        served,
        Chart(
            id="shares",
            title="Share of served work by tenant",
            description="Share of all served GPU work that each tenant received, by run.",
            x=_EMPTY,
            y=share_axis("share of served work"),
        ),
        "Shares count as fair or unfair only while tenants wait; see the deviation below.",
    )


_EMPTY = category_axis("", ())


def _by_tenant(
    summaries: Sequence[Summary],
    values: Sequence[Mapping[TenantId | None, float] | Mapping[TenantId, float]],
    chart: Chart,
    remark: str,
) -> Figure | None:
    names = top_tenants(summaries)
    if not names:
        return None
    axis = category_axis("tenant, by offered work", [_short(name) for name in names])
    series = [
        Series(
            label=one.label,
            points=tuple((float(place), told.get(name, 0.0)) for place, name in enumerate(names)),
            colour=index,
        )
        for index, (one, told) in enumerate(zip(summaries, values, strict=True))
    ]
    return Figure(
        heading=chart.title,
        remark=remark,
        svg=bar_chart(replace(chart, x=axis), series, words.percent),
        legend=bars_legend([one.label for one in summaries]),
    )


def top_tenants(summaries: Sequence[Summary]) -> list[TenantId]:
    """Return the tenants that offered most work over all runs."""
    asked: dict[TenantId, int] = {}
    for one in summaries:
        for share in one.fairness.tenants:
            asked[share.tenant] = asked.get(share.tenant, 0) + share.offered_work_ns
    return sorted(asked, key=lambda name: (-asked[name], name))[:TENANTS]


def service(
    run: RunRecord, place: int, tenants: Sequence[TenantId], scale: tuple[float, float]
) -> Figure | None:
    """Return the work served to each tenant over time, stacked: rate and share at once."""
    steps = _thinned(run.samples)
    if len(steps) <= 1:
        return None
    rates = _rates(steps, tenants)
    start = steps[0].at
    times = [to_seconds(sample.at - start) for sample in steps]
    chart = Chart(
        id=f"service-{place}",
        title=f"Work served over time, {run.label}",
        description="GPU-seconds served per second to each tenant, stacked, over the run.",
        x=linear_axis("time, s", scale[0], words.tick),
        y=linear_axis("served, GPU-s/s", scale[1], words.tick),
    )
    layers = [
        Series(
            label=name,
            points=(*zip(times, values, strict=False), (times[-1], values[-1])),
            colour=TENANT_COLOUR + index,
        )
        for index, (name, values) in enumerate(rates.items())
    ]
    return Figure(
        heading=run.label,
        remark="",
        svg=area_chart(chart, layers),
        legend=bars_legend(list(rates), TENANT_COLOUR),
    )


def service_scale(runs: Sequence[RunRecord]) -> tuple[float, float]:
    """Return the longest time in s and the highest rate of any run: their charts share a scale."""
    sampled = [steps for run in runs if (steps := _thinned(run.samples))]
    peaks = [
        (sum(b.work_ns.values()) - sum(a.work_ns.values())) / max(1, b.at - a.at)
        for steps in sampled
        for a, b in pairwise(steps)
    ]
    longest = max((to_seconds(steps[-1].at - steps[0].at) for steps in sampled), default=0.0)
    return longest, max(peaks, default=0.0)


def _thinned(samples: Sequence[ServiceSample]) -> list[ServiceSample]:
    """Return at most `POINTS` / 4 samples, the first and the last among them."""
    stride = max(1, -(-len(samples) // (POINTS // 4)))
    kept = list(samples[::stride])
    if samples and kept[-1] is not samples[-1]:
        kept.append(samples[-1])
    return kept


def _rates(steps: Sequence[ServiceSample], tenants: Sequence[TenantId]) -> dict[str, list[float]]:
    """Return GPU-s/s of each tenant in each step; whoever is not named is one more."""
    named: dict[str, list[float]] = {name: [] for name in tenants}
    others: list[float] = []
    for a, b in pairwise(steps):
        time = max(1, b.at - a.at)
        rest = sum(b.work_ns.values()) - sum(a.work_ns.values())
        for name in tenants:
            served = b.work_ns.get(name, 0) - a.work_ns.get(name, 0)
            named[name].append(served / time)
            rest -= served
        others.append(max(0, rest) / time)
    if any(others):
        named["all others"] = others
    return named


def sweep_goodput(points: Sequence[SweepPoint], load: str) -> Figure | None:
    """Return work goodput against load."""
    if not points:
        return None
    loads = by_load(points)
    chart = Chart(
        id="sweep-goodput",
        title="Work goodput against load",
        description="GPU-seconds per second of requests that met, against load, by policy.",
        x=linear_axis(load, max(point.load for point in points), words.tick),
        y=linear_axis("work goodput, GPU-s/s", max(p.work_goodput for p in points), words.tick),
    )
    series = [
        _sweep_line(label, index, mine, lambda p: p.work_goodput)
        for index, (label, mine) in enumerate(loads.items())
    ]
    return Figure(
        heading="Goodput against load",
        remark="Work of requests that met every bound. Upright strokes span the seeds.",
        svg=line_chart(chart, series),
        legend=lines_legend(list(loads)),
    )


def sweep_attainment(points: Sequence[SweepPoint], load: str) -> Figure | None:
    """Return attainment against load: over offered, and faintly over admitted."""
    if not points:
        return None
    loads = by_load(points)
    chart = Chart(
        id="sweep-attainment",
        title="Attainment against load",
        description="Share of requests that met, of offered and of admitted, against load.",
        x=linear_axis(load, max(point.load for point in points), words.tick),
        y=share_axis("attainment"),
    )
    series = []
    for index, (label, mine) in enumerate(loads.items()):
        admitted = _sweep_line(
            f"{label}, over admitted", index, mine, lambda p: p.attained_admitted or 0.0, faint=True
        )
        over = f"{label}, over offered"
        series += [admitted, _sweep_line(over, index, mine, lambda p: p.attained_offered or 0.0)]
    return Figure(
        heading="Attainment against load",
        remark="Strong lines: over offered. Faint lines: over admitted, which refusing keeps high.",
        svg=line_chart(chart, series),
        legend=lines_legend(list(loads)),
    )


def _sweep_line(
    label: str,
    colour: int,
    loads: Mapping[float, Sequence[SweepPoint]],
    pick: Callable[[SweepPoint], float],
    *,
    faint: bool = False,
) -> Series:
    values = {load: [pick(point) for point in points] for load, points in loads.items()}
    return Series(
        label=label,
        points=tuple((load, fsum(seen) / len(seen)) for load, seen in values.items()),
        colour=colour,
        dots=not faint,
        spread=tuple(
            (load, min(seen), max(seen)) for load, seen in values.items() if len(seen) > 1
        ),
        faint=faint,
    )


def _short(name: str, most: int = 12) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
