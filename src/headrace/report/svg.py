"""Charts as inline SVG text: axes, lines, grouped bars, stacked areas.

Knows nothing of runs. Colours, fonts and widths are the page's CSS; here are only shapes, each
series told apart by its dash as well as its colour, and titles that browsers show on hover.
"""

from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from msgspec import Struct

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 14, 26, 46
COLOURS = 8
"""Series colours in the page's CSS, `s0` to `s7`; more series share them, with another dash."""
DASHES = ("", "7 4", "2 3", "10 3 2 3", "5 2", "1 4", "12 4", "4 4 1 4")

Point = tuple[float, float]


class Axis(Struct, frozen=True, kw_only=True):
    """One axis: its range, its ticks and what it measures, unit included."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies between the ends, 0 to 1; beyond them it is held there."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = log10(low), log10(high), log10(at)
        return (at - low) / (high - low) if high > low else 0.0


class Series(Struct, frozen=True, kw_only=True):
    """One line or one set of bars or areas."""

    label: str
    points: tuple[Point, ...]
    colour: int
    step: bool = False
    """Whether a value holds until the next: distributions from data."""
    dots: bool = False
    """Whether points are measured ones, to be seen singly."""
    spread: tuple[tuple[float, float, float], ...] = ()
    """(x, low, high) of several runs at one x."""
    faint: bool = False


class Guide(Struct, frozen=True, kw_only=True):
    """A labelled straight line at one value of an axis."""

    value: float
    label: str
    vertical: bool = True


class Chart(Struct, frozen=True, kw_only=True):
    """What every chart needs: a unique id, a title and a description for those who cannot see."""

    id: str
    title: str
    description: str
    x: Axis
    y: Axis
    guides: tuple[Guide, ...] = ()


def linear_axis(label: str, high: float, show: Callable[[float], str], low: float = 0.0) -> Axis:
    """Return an axis with about five round ticks, reaching past `high`."""
    span = high - low if high > low else 1.0
    size = 10.0 ** floor(log10(span / 4))
    step = next(size * nice for nice in (1, 2, 5, 10) if size * nice >= span / 4)
    number = max(1, ceil((span / step) - 1e-9))
    ticks = tuple((low + step * i, show(low + step * i)) for i in range(number + 1))
    return Axis(label=label, low=low, high=low + step * number, ticks=ticks)


def share_axis(label: str) -> Axis:
    """Return an axis from 0 to 100 %."""
    ticks = tuple((tenth / 10, f"{tenth * 10} %") for tenth in range(0, 11, 2))
    return Axis(label=label, low=0.0, high=1.0, ticks=ticks)


def log_axis(label: str, low: float, high: float, show: Callable[[float], str]) -> Axis:
    """Return a logarithmic axis over whole decades, with 2 and 5 between where there are few."""
    first, last = floor(log10(low) + 1e-9), ceil(log10(high) - 1e-9)
    last = max(last, first + 1)
    between = (1, 2, 5) if last - first <= _FEW else (1,)
    ticks = [(nice * 10.0**power) for power in range(first, last) for nice in between]
    ticks.append(10.0**last)
    return Axis(
        label=label,
        low=10.0**first,
        high=10.0**last,
        ticks=tuple((tick, show(tick)) for tick in ticks),
        log=True,
    )


_FEW = 3


def line_chart(chart: Chart, series: Sequence[Series]) -> str:
    """Return lines over the chart's axes."""
    body = [_frame(chart), *(_guide(chart, guide) for guide in chart.guides)]
    body += [_line(chart, one) for one in series if one.points]
    return _svg(chart, "".join(body))


def bar_chart(chart: Chart, series: Sequence[Series], show: Callable[[float], str]) -> str:
    """Return grouped bars: every series has one point for each tick of x, in order."""
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(chart.x.ticks))
    width = slot * 0.8 / max(1, len(series))
    base = _y(chart.y, chart.y.low)
    body = [_frame(chart, grid_x=False)]
    for place, one in enumerate(series):
        for tick, (_, value) in enumerate(one.points):
            left = LEFT + slot * (tick + 0.1) + width * place
            top = _y(chart.y, value)
            name = f"{one.label}, {chart.x.ticks[tick][1]}: {show(value)}"
            body.append(
                f'<rect class="bar s{one.colour % COLOURS}" x="{left:.1f}" y="{top:.1f}"'
                f' width="{max(0.5, width - 1):.1f}" height="{base - top:.1f}">'
                f"<title>{escape(name)}</title></rect>"
            )
    return _svg(chart, "".join(body))


def category_axis(label: str, names: Sequence[str]) -> Axis:
    """Return an axis of names, each in the middle of its slot."""
    return Axis(
        label=label,
        low=0.0,
        high=float(max(1, len(names))),
        ticks=tuple((index + 0.5, name) for index, name in enumerate(names)),
    )


def area_chart(chart: Chart, layers: Sequence[Series]) -> str:
    """Return stacked areas; all layers have the same x, values hold until the next x."""
    body = [_frame(chart)]
    floor_of: list[float] = []
    for layer in layers:
        floor_of = floor_of or [0.0] * len(layer.points)
        tops = [low + y for low, (_, y) in zip(floor_of, layer.points, strict=True)]
        xs = [x for x, _ in layer.points]
        upper = _path(chart, list(zip(xs, tops, strict=True)), step=True)
        lower = _path(chart, list(zip(xs, floor_of, strict=True)), step=True, back=True)
        body.append(
            f'<path class="area s{layer.colour % COLOURS}" d="M{upper} L{lower} Z">'
            f"<title>{escape(layer.label)}</title></path>"
        )
        floor_of = tops
    return _svg(chart, "".join(body))


def split_bar(parts: Sequence[tuple[str, float, str]], title: str) -> str:
    """Return one horizontal bar of (class, share, label) parts that sum to one."""
    at = 0.0
    body = []
    for name, share, label in parts:
        body.append(
            f'<rect class="fate {name}" x="{at:.2f}" y="0" width="{share * 100:.2f}" height="10">'
            f"<title>{escape(label)}</title></rect>"
        )
        at += share * 100
    spoken = "; ".join(label for _, share, label in parts if share)
    return (
        f'<svg class="split" viewBox="0 0 100 10" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(title)}: {escape(spoken)}">{"".join(body)}</svg>'
    )


def swatch(colour: int, *, line: bool, faint: bool = False) -> str:
    """Return a legend's sample of a series."""
    kind = f"s{colour % COLOURS}{' faint' if faint else ''}"
    shape = (
        f'<line class="line {kind}" x1="0" x2="26" y1="6" y2="6"{_dash(colour)}/>'
        if line
        else f'<rect class="bar {kind}" x="7" y="0" width="12" height="12" rx="2"/>'
    )
    return f'<svg class="swatch" viewBox="0 0 26 12" aria-hidden="true">{shape}</svg>'


def _svg(chart: Chart, body: str) -> str:
    name = escape(chart.id)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(chart.title)}</title>'
        f'<desc id="{name}-d">{escape(chart.description)}</desc>{body}</svg>'
    )


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _frame(chart: Chart, *, grid_x: bool = True) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value, name in chart.y.ticks:
        y = _y(chart.y, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{escape(name)}</text>')
    for value, name in chart.x.ticks:
        x = _x(chart.x, value)
        if grid_x:
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{bottom + 16}">{escape(name)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(
        f'<text class="name mid" x="{(LEFT + right) / 2:.1f}" y="{HEIGHT - 8}">'
        f"{escape(chart.x.label)}</text>"
        f'<text class="name mid" transform="translate(14 {middle:.1f}) rotate(-90)">'
        f"{escape(chart.y.label)}</text>"
    )
    return "".join(parts)


def _guide(chart: Chart, guide: Guide) -> str:
    if guide.vertical:
        x = _x(chart.x, guide.value)
        return (
            f'<line class="guide" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="note mid" x="{x:.1f}" y="{TOP - 8}">'
            f"{escape(guide.label)}</text>"
        )
    y = _y(chart.y, guide.value)
    return (
        f'<line class="guide" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="note" x="{LEFT + 6}" y="{y - 5:.1f}">'
        f"{escape(guide.label)}</text>"
    )


def _line(chart: Chart, one: Series) -> str:
    kind = f"s{one.colour % COLOURS}{' faint' if one.faint else ''}"
    parts = [
        f'<line class="spread {kind}" x1="{_x(chart.x, x):.1f}" x2="{_x(chart.x, x):.1f}"'
        f' y1="{_y(chart.y, low):.1f}" y2="{_y(chart.y, high):.1f}"/>'
        for x, low, high in one.spread
    ]
    path = _path(chart, one.points, step=one.step)
    parts.append(
        f'<path class="line {kind}" d="M{path}"{_dash(one.colour)}>'
        f"<title>{escape(one.label)}</title></path>"
    )
    if one.dots:
        parts += [
            f'<circle class="dot {kind}" cx="{_x(chart.x, x):.1f}" cy="{_y(chart.y, y):.1f}"'
            f' r="3"><title>{escape(one.label)}: {x:.3g}, {y:.4g}</title></circle>'
            for x, y in one.points
        ]
    return "".join(parts)


def _dash(colour: int) -> str:
    dash = DASHES[colour % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _path(chart: Chart, points: Sequence[Point], *, step: bool, back: bool = False) -> str:
    """Return the coordinates of a path; a stepped one holds each value until the next x."""
    placed = [(_x(chart.x, x), _y(chart.y, y)) for x, y in points]
    if step:
        held = [placed[:1]] if placed else []
        held += [[(b[0], a[1]), b] for a, b in pairwise(placed)]
        placed = [point for pair in held for point in pair]
    if back:
        placed.reverse()
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
