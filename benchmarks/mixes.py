"""Five mixes of lengths at multiples of what an engine can do, and what came of an offered trace.

Traces and measures only; who lets requests in is for `overload` and `doors`.
"""

from collections.abc import Sequence
from functools import cache

from msgspec import Struct

from benchmarks import tenants
from benchmarks.doors import open_door, stand
from benchmarks.engines import Engine, chunked
from benchmarks.scenes import CHAT as CLASS
from headrace.model.ids import TenantId
from headrace.sim.knee import bisect
from headrace.trace.builtin import ARXIV, CHAT, REASONING
from headrace.trace.generate import generate
from headrace.trace.mix import (
    Blend,
    Empirical,
    Fixed,
    Lengths,
    Mix,
    Part,
    Poisson,
    Quantiles,
    TenantSource,
)
from headrace.trace.row import TraceRow
from headrace.trace.tables import read_lengths
from headrace.units import NS_PER_S

ENGINE: Engine = chunked(512)
LOADS = (1.0, 2.0, 4.0, 10.0)
TENANT = TenantId("tenant")
KEPT = 0.9
"""The share of the offered requests that defines what an engine can do."""


class Load(Struct, frozen=True, kw_only=True):
    """Lengths of requests, and how long they are offered before and while what comes of them counts."""

    lengths: Lengths
    warm_s: float = 20.0
    span_s: float = 100.0
    high: float = 64.0
    """No engine can do as many of them a second."""

    def rows(self, rate: float, seed: int) -> list[TraceRow]:
        """Return requests that arrive at a mean rate a second."""
        source = TenantSource(
            tenant=TENANT, slo_class=CLASS, arrivals=Poisson(rate), lengths=self.lengths
        )
        return generate(Mix(sources=(source,), duration_s=self.warm_s + self.span_s), seed)


def arxiv() -> Lengths:
    """Return the lengths of papers and their summaries, or their like where there is no data."""
    data = tenants.data_dir()
    if data is None:
        return ARXIV
    pairs = read_lengths(data / "traces" / "arxiv_summarization_lengths.csv.gz")
    return Empirical(tuple(pairs), total_below=16_000)


def chat() -> Lengths:
    """Return the conversations with short prompts."""
    conv = tenants.conv()
    if not isinstance(conv, Empirical):
        return CHAT
    return Empirical(conv.pairs, total_below=conv.total_below, input_below=1_024)


@cache
def mixes() -> dict[str, Load]:
    """Return the five mixes by name."""
    conv = tenants.conv()
    assert isinstance(conv, Empirical | Quantiles)
    document = Fixed(input=16_384, output=512)
    both = Blend(parts=(Part(weight=4, lengths=conv), Part(weight=1, lengths=document)))
    return {
        "conv": Load(lengths=conv, span_s=60.0),
        "arxiv": Load(lengths=arxiv(), warm_s=40.0, span_s=200.0),
        "chat": Load(lengths=chat(), span_s=30.0),
        # Answers of up to eight minutes: what an idle engine takes in its first seconds ends as one, and leaves
        # little for those that come until then. That comes back, weaker, for as long again and again: of 400 s
        # the work is off by 6 %, of 1,600 s by 1.4 %.
        "reasoning": Load(lengths=REASONING, warm_s=400.0, span_s=1_000.0),
        "bimodal": Load(lengths=both, warm_s=40.0, span_s=200.0),
    }


class Came(Struct, frozen=True, kw_only=True):
    """What came of the requests of a span, each with its work: GPU-seconds of its true length."""

    span_s: float
    rows: Sequence[TraceRow]
    admitted: Sequence[bool]
    met: Sequence[bool]

    def work(self) -> float:
        """Return GPU-seconds of requests that met their bounds, per second."""
        return sum(map(work_s, self._those(self.met))) / self.span_s

    def offered_work(self) -> float:
        """Return GPU-seconds offered, per second."""
        return sum(map(work_s, self.rows)) / self.span_s

    def requests(self) -> float:
        """Return requests that met their bounds, per second."""
        return sum(self.met) / self.span_s

    def attainment(self) -> float:
        """Return met over offered, by requests."""
        return sum(self.met) / max(1, len(self.rows))

    def let_in(self) -> float:
        """Return admitted over offered, by requests."""
        return sum(self.admitted) / max(1, len(self.rows))

    def deciles(self) -> list[float]:
        """Return admitted over offered in each tenth by prompt length, the shortest first."""
        order = sorted(range(len(self.rows)), key=lambda nth: (self.rows[nth].input_tokens, nth))
        size = len(order)
        tenths = [order[size * nth // 10 : size * (nth + 1) // 10] for nth in range(10)]
        return [sum(self.admitted[nth] for nth in one) / max(1, len(one)) for one in tenths]

    def longest(self) -> float:
        """Return the admission rate of the longest tenth over that of all."""
        return self.deciles()[-1] / max(1e-9, self.let_in())

    def _those(self, chosen: Sequence[bool]) -> list[TraceRow]:
        return [row for row, kept in zip(self.rows, chosen, strict=True) if kept]


def work_s(row: TraceRow) -> float:
    """Return the predicted GPU-seconds of a request's true length."""
    return ENGINE.profile.work_ns(row.input_tokens, 0, row.output_tokens) / NS_PER_S


def came(
    load: Load, rows: Sequence[TraceRow], admitted: Sequence[bool], met: Sequence[bool]
) -> Came:
    """Return what came of those that arrived after the warm-up."""
    start = sum(row.at < load.warm_s * NS_PER_S for row in rows)
    return Came(span_s=load.span_s, rows=rows[start:], admitted=admitted[start:], met=met[start:])


def capacity(load: Load, seeds: Sequence[int], steps: int = 9) -> float:
    """Return the requests a second of which 90 % meet their bounds, first come first served."""

    def holds(rate: float) -> bool:
        shares = []
        for seed in seeds:
            rows = load.rows(rate, seed)
            found = stand(ENGINE, rows, open_door())
            shares.append(came(load, rows, found.admitted, found.met).attainment())
        return sum(shares) / len(shares) >= KEPT

    return bisect(holds, 0.0, load.high, steps)
