"""Whose requests compete: the published workloads, made-up ones, and tenants that come back.

Traces only; which engine serves them in which order is for `fairness`.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random

from msgspec import Struct

from headrace.model.ids import TenantId
from headrace.trace.builtin import AZURE_CONV
from headrace.trace.generate import generate
from headrace.trace.mix import (
    Empirical,
    Even,
    Fixed,
    Lengths,
    Mix,
    OnOff,
    Poisson,
    TenantSource,
    Uniform,
)
from headrace.trace.read import read_trace
from headrace.trace.reshape import lengths_of
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import InstantNs

A, B, C = TenantId("A"), TenantId("B"), TenantId("C")
CONV_TOTAL_BELOW = 8_000


def data_dir() -> Path | None:
    """Return the folder of public traces, if HEADRACE_DATA names one."""
    name = os.environ.get("HEADRACE_DATA")
    return Path(name) if name else None


def arena(data: Path) -> list[TraceRow]:
    """Return the trace of 27 arena models that the authors of VTC replayed."""
    return read_trace("arena", data / "traces" / "vtc_arena.csv.gz")


@cache
def conv() -> Lengths:
    """Return conversation lengths: the trace's own pairs where there is data, else their table."""
    data = data_dir()
    if data is None:
        return AZURE_CONV
    rows = read_trace("azure", data / "traces" / "azure2023_conv.csv.gz")
    return Empirical(tuple(lengths_of(rows)), total_below=CONV_TOTAL_BELOW)


def overload(phase: int) -> list[TraceRow]:
    """Return the first published workload: 1.5 and 3 req/s of 256/256 tokens for 360 s.

    Evenly spaced, each tenant's first arrival drawn within its period.
    """
    rng, lengths = streams(phase, "phase"), Fixed(256, 256)
    sources = [
        TenantSource(
            tenant=tenant, arrivals=Even(rate), lengths=lengths, start_s=rng.random() / rate
        )
        for tenant, rate in ((A, 1.5), (B, 3.0))
    ]
    return _rows(360.0, *sources)


def on_off() -> list[TraceRow]:
    """Return the other: 0.5 req/s in every other minute beside 2 req/s, for 600 s."""
    lengths = Fixed(256, 256)
    light = OnOff(0.5, on_s=60.0, off_s=60.0, even=True)
    return _rows(
        600.0,
        TenantSource(tenant=A, arrivals=light, lengths=lengths),
        TenantSource(tenant=B, arrivals=Even(2.0), lengths=lengths),
    )


HOG_S, HOG_END_S = 200.0, 210.0
HOG_TTFT_S: Mapping[TenantId, float] = {A: 1.0, B: 0.5, C: 120.0}


def hog(seed: int) -> list[TraceRow]:
    """Return a conforming tenant (A), a hog that declares a tight bound (B), and batch work (C)."""
    rates = {A: 1.5, B: 12.0, C: 1.5}
    sources = [
        TenantSource(tenant=tenant, arrivals=Poisson(rate), lengths=conv())
        for tenant, rate in rates.items()
    ]
    return _rows(HOG_S, *sources, seed=seed)


IDLE_S = 600.0
BACK_AT_S = 60.0 + IDLE_S


def back_from_idle(
    before: float, rate: float, lengths: Lengths, *, seed: int = 0
) -> list[TraceRow]:
    """Return A for a minute at `before` req/s, then idle for ten, then back beside B, both at `rate`."""
    return _rows(
        BACK_AT_S + 180.0,
        TenantSource(
            tenant=A, arrivals=Poisson(before), lengths=lengths, stop_s=60.0, name="before"
        ),
        TenantSource(
            tenant=A, arrivals=Poisson(rate), lengths=lengths, start_s=BACK_AT_S, name="after"
        ),
        TenantSource(tenant=B, arrivals=Poisson(rate), lengths=lengths),
        seed=seed,
    )


class Workload(Struct, frozen=True):
    """A made-up trace and the weights of its tenants."""

    rows: Sequence[TraceRow]
    weights: Mapping[TenantId, int]


def drawn(
    rng: Random, *, served: float, prompt_max: int, output_max: int, duration_s: float = 80.0
) -> Workload:
    """Draw two to four tenants, their weights, lengths and arrivals.

    Together they ask for half to five times what an engine serves, about `served` tokens/s.
    """
    weights = {TenantId(f"t{nth}"): rng.choice((1, 1, 2, 3)) for nth in range(rng.randint(2, 4))}
    sources = []
    for tenant in weights:
        lengths = _drawn_lengths(rng, prompt_max, output_max)
        mean = (lengths.input_min + lengths.input_max + lengths.output_min + lengths.output_max) / 2
        rate = min(RATE_MAX, rng.uniform(0.5, 5.0) * served / mean / len(weights))
        start = rng.choice((0.0, 0.0, rng.uniform(0.0, duration_s / 2)))
        sources.append(
            TenantSource(
                tenant=tenant, arrivals=_drawn_arrivals(rng, rate), lengths=lengths, start_s=start
            )
        )
    return Workload(_rows(duration_s, *sources, seed=rng.randrange(1 << 30)), weights)


def drawn_saturating(rng: Random, lengths: Lengths, served_rps: float) -> Workload:
    """Draw tenants of alike lengths that all wait from the first instant on.

    A burst each, then Poisson arrivals above all that is served (`served_rps`).
    """
    weights = {TenantId(f"t{nth}"): rng.choice((1, 1, 2, 3)) for nth in range(rng.randint(2, 4))}
    sources = [
        TenantSource(
            tenant=tenant, arrivals=Poisson(served_rps * rng.uniform(1.0, 2.0)), lengths=lengths
        )
        for tenant in weights
    ]
    seed = rng.randrange(1 << 30)
    rows = _rows(90.0, *sources, seed=seed)
    early: dict[TenantId | None, int] = {}
    moved = []
    for row in rows:
        early[row.tenant] = early.get(row.tenant, 0) + 1
        moved.append(_at_once(row) if early[row.tenant] <= BURST else row)
    return Workload(sorted(moved, key=lambda row: row.at), weights)


BURST = 40
"""Requests of each tenant at the first instant."""
RATE_MAX = 40.0
"""Most req/s of one tenant: tiny requests by the thousand show nothing more."""


def streams(seed: int, name: str) -> Random:
    """Return a stream of draws of its own."""
    return stream(seed, "fairness", name)


def _at_once(row: TraceRow) -> TraceRow:
    return TraceRow(
        at=InstantNs(0),
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        tenant=row.tenant,
    )


def _drawn_lengths(rng: Random, prompt_max: int, output_max: int) -> Uniform:
    given = rng.choice((16, 128, prompt_max // 4, prompt_max))
    made = rng.choice((4, 64, output_max // 4, output_max))
    alike = rng.random() < 0.3
    return Uniform(given if alike else 1, given, made if alike else 1, made)


def _drawn_arrivals(rng: Random, rate: float) -> Poisson | Even | OnOff:
    kind = rng.randrange(3)
    if kind == 0:
        return Poisson(rate)
    if kind == 1:
        return Even(rate)
    return OnOff(2 * rate, on_s=rng.uniform(2.0, 30.0), off_s=rng.uniform(2.0, 30.0))


def _rows(duration_s: float, *sources: TenantSource, seed: int = 0) -> list[TraceRow]:
    return generate(Mix(sources=tuple(sources), duration_s=duration_s), seed)
