"""How many replicas does a rate take, and what do they cost, on each kind of hardware?"""

from collections.abc import Sequence

from msgspec import Struct

from headrace.report import words
from headrace.report.tables import Column, Table, render_all

FORMAT = "headrace.sizing/1"


class Sized(Struct, frozen=True, kw_only=True):
    """The answer for one profile; where it cannot be, `why` says so and the figures are None."""

    profile: str
    model: str
    gpu: str
    gpus_each: int
    """Of one replica."""
    carries_rps: float | None = None
    """Requests per second that one replica still holds."""
    replicas: int | None = None
    gpus: int | None = None
    attained: float | None = None
    """Met over offered, when so many replicas share the rate."""
    usd_hour: float | None = None
    """Of all of them. None: the price of the GPU is not known."""
    usd_million: float | None = None
    """For a million requests that hold."""
    why: str | None = None


class SizingReport(Struct, frozen=True, kw_only=True):
    """What was asked, and every answer, the cheapest first."""

    format: str
    rate: float
    ttft_ms: float
    tpot_ms: float
    attainment: float
    mix: str
    mix_digest: str
    seeds: tuple[int, ...]
    answers: tuple[Sized, ...]


def ordered(answers: Sequence[Sized]) -> tuple[Sized, ...]:
    """Return answers by cost; those without a price after them by GPUs, and who cannot at the end."""
    return tuple(
        sorted(
            answers,
            key=lambda one: (
                one.why is not None,
                one.usd_hour is None,
                one.usd_hour or 0.0,
                one.gpus or 0,
                one.profile,
            ),
        )
    )


def render_sizing(report: SizingReport) -> str:
    """Return the answers for the terminal, a table a model: models do not stand in for each other."""
    models = dict.fromkeys(one.model for one in report.answers)
    return render_all(_table(report, model) for model in models)


_COLUMNS = (
    Column("profile", right=False), Column("replicas"), Column("GPUs"), Column("carries, req/s"),
    Column("met"), Column("USD/h"), Column("USD/M met"), Column("", right=False),
)  # fmt: skip


def _table(report: SizingReport, model: str) -> Table:
    mine = [one for one in report.answers if one.model == model]
    asked = (
        f"{model}: {report.rate:g} requests/s of {report.mix}, {report.ttft_ms:g} ms to the first token and"
        f" {report.tpot_ms:g} ms for each after it, {words.percent(report.attainment)} of the offered"
    )
    unpriced = sorted({one.gpu for one in mine if one.usd_hour is None and one.why is None})
    note = ""
    if unpriced:
        note = f"no price for {', '.join(unpriced)}: give --price NAME=USD, of an hour of one GPU"
    return Table(title=asked, columns=_COLUMNS, rows=tuple(map(_row, mine)), note=note)


def _row(one: Sized) -> tuple[str, ...]:
    return (
        one.profile,
        words.count(one.replicas),
        words.count(one.gpus),
        words.three(one.carries_rps),
        words.percent(one.attained),
        words.three(one.usd_hour),
        words.three(one.usd_million),
        one.why or "",
    )
