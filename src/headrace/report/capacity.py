"""What does a measured capacity look like: its numbers, and attainment over rate with the knee in it?"""

from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

from headrace.config.measured import day
from headrace.model.envelope import Envelope, Promise
from headrace.report import words
from headrace.report.tables import Column, Table, render

FORMAT = "headrace.capacity/1"
"""What a file of them calls itself."""
WIDTH, HEIGHT = 64, 13
"""Columns and rows of the picture, axes not counted."""
_POINT, _SPREAD, _AIM, _KNEE = "o", ":", "-", "|"


class Point(Struct, frozen=True, kw_only=True):
    """What came of one offered rate, as the mean of the seeds."""

    rate: float
    """Requests offered per second."""
    work_rate: float
    """Work-seconds offered per second."""
    met_work_rate: float
    """Work-seconds of requests that held their promise, per second."""
    attained: dict[str, float]
    """By class, met over offered."""
    binding: str
    """The class that is furthest below what is asked of it, or least above."""
    by_seed: tuple[float, ...]
    """Of that class, met over offered under each seed."""
    holds: bool


class Measured(Struct, frozen=True, kw_only=True):
    """One envelope, and the points that it was found by, by rate."""

    pool: str
    replicas: int
    gpus: int
    """Of one replica."""
    warm_s: float
    """How long was offered before what came of it counted."""
    span_s: float
    """And how long while it did."""
    patience_s: float
    """Who waited longer for a first token counts as missed, whatever its class bears."""
    precision: float
    envelope: Envelope
    points: tuple[Point, ...]


class CapacityReport(Struct, frozen=True, kw_only=True):
    """What a file holds: `envelopes` is what a configuration reads of it."""

    format: str
    scenario: str
    envelopes: tuple[Envelope, ...]
    measured: tuple[Measured, ...]


def report(scenario: str, measured: Sequence[Measured]) -> CapacityReport:
    """Return what was measured, as it is written."""
    return CapacityReport(
        format=FORMAT,
        scenario=scenario,
        envelopes=tuple(one.envelope for one in measured),
        measured=tuple(measured),
    )


def render_measured(one: Measured, usd_hour: float | None) -> str:
    """Return one envelope for the terminal; `usd_hour`: what one replica costs."""
    return f"{render(_numbers(one, usd_hour))}\n{picture(one)}"


def _numbers(one: Measured, usd_hour: float | None) -> Table:
    found, mark = one.envelope, one.envelope.fingerprint
    plan = (
        f"{mark.hardware} x{one.gpus} (tp {mark.tp}, pp {mark.pp})" if one.gpus else mark.hardware
    )
    times = f", of {one.replicas} together" if one.replicas > 1 else ""
    held = ", ".join(f"{words.percent(a)} of `{name}`" for name, a in found.attainment.items())
    promises = [f"`{name}` {promised(each)}" for name, each in mark.promises.items()]
    rows = [
        ("CAPACITY", f"{words.three(found.work_rate)} work-seconds per second and replica{times}"),
        (
            "",
            f"{words.three(found.low)} to {words.three(found.high)} with 95 % over {_seeds(found)}",
        ),
        ("REQUESTS", f"{words.three(found.request_rate)} per second of this mix"),
        ("HELD", f"{held}, of all that was offered, first come first served without gates"),
        *(("" if nth else "PROMISED", line) for nth, line in enumerate(promises)),
        ("MEASURED ON", f"{plan}, profile {mark.profile}"),
        ("", f"{mark.engine}, {mark.scheduler}, steps of {mark.step_tokens} tokens"),
        ("", f"model {mark.model}, revision {mark.revision}; policy {mark.policy}"),
        ("", f"mix {mark.mix} ({mark.mix_digest})"),
        ("", f"{one.span_s:g} s after {one.warm_s:g} s, no first token after {one.patience_s:g} s"),
        ("", f"{day(found.measured_at_s)}, in the simulator"),
        ("MONEY", _money(found, usd_hour)),
    ]
    title = f"{mark.mix} on pool {one.pool}"
    columns = (Column("", right=False), Column("", right=False))
    return Table(title=title, columns=columns, rows=tuple(rows))


def _seeds(found: Envelope) -> str:
    return words.plural(len(found.seeds), "seed")


def _money(found: Envelope, usd_hour: float | None) -> str:
    if usd_hour is None:
        return f"{words.NONE} (give --price NAME=USD, of an hour of one GPU)"
    met = found.request_rate * 3_600 * min(found.attainment.values())
    million = words.three(usd_hour / met * 1e6)
    return f"{words.three(usd_hour)} USD an hour: {million} USD a million requests that hold"


def promised(promise: Promise) -> str:
    """Return what was promised, in words."""
    parts = (
        ("ttft_ms", "{} ms to the first token"),
        ("tpot_ms", "{} ms on average for each after it"),
        ("stall_ms", "no gap above {} ms"),
        ("completion_ms", "{} ms to the end"),
    )
    told = [(getattr(promise, name), text) for name, text in parts]
    return ", ".join(text.format(words.tick(value)) for value, text in told if value is not None)


def picture(one: Measured) -> str:
    """Return attainment over offered rate: points, their spread over seeds, aim and knee.

    Each point is of the class that binds there.
    """
    knee = one.envelope.request_rate * one.replicas
    aim = max(one.envelope.attainment.values())
    top = max(knee, *(point.rate for point in one.points)) * 1.02
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for row in grid:
        row[_cell(knee / top, WIDTH)] = _KNEE
    aimed = _cell(aim, HEIGHT)
    grid[aimed] = [_AIM if cell == " " else cell for cell in grid[aimed]]
    for point in one.points:
        column = _cell(point.rate / top, WIDTH)
        seeds = [_cell(share, HEIGHT) for share in point.by_seed]
        for row in grid[min(seeds) : max(seeds) + 1]:
            row[column] = _SPREAD
        grid[_cell(fmean(point.by_seed), HEIGHT)][column] = _POINT
    labels = {0: "0 %", HEIGHT - 1: "100 %", aimed: f"{100 * aim:g} %"}
    lines = [
        f"  {labels.get(nth, ''):>6} {''.join(row)}".rstrip()
        for nth, row in reversed(list(enumerate(grid)))
    ]
    axis = f"0{'requests/s offered':^{WIDTH - 8}}{words.three(top):>7}"
    legend = f"{_POINT} met of offered  {_SPREAD} its seeds  {_KNEE} capacity, {words.three(knee)}"
    return "\n".join([*lines, " " * 9 + axis, " " * 9 + legend]) + "\n"


def _cell(share: float, cells: int) -> int:
    return max(0, min(cells - 1, round(share * (cells - 1))))
