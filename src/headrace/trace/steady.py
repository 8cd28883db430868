"""What does a mix offer at a rate that does not change, however it comes in life?

Capacity is a rate, so it is asked for with arrivals that only chance moves: each source as a Poisson process
at its part of the whole.
"""

from collections.abc import Sequence
from typing import assert_never

from msgspec.structs import replace

from headrace.trace.generate import arrival_times
from headrace.trace.mix import Arrivals, Even, Gamma, Mix, OnOff, Poisson, Ramp, TenantSource
from headrace.trace.row import ID_MAX, TraceRow
from headrace.trace.streams import stream
from headrace.units import InstantNs, seconds

_ROUND = 0x9E3779B97F4A7C15
"""Moves the chunk ids of each round of a trace to where no other's are."""


def mean_rate(arrivals: Arrivals) -> float:
    """Return the mean requests a second of a source, silences included, while it lasts."""
    match arrivals:
        case Poisson() | Gamma() | Even():
            return arrivals.rate
        case OnOff():
            return arrivals.rate * arrivals.on_s / (arrivals.on_s + arrivals.off_s)
        case Ramp():
            starts = (0.0, *(one.until_s for one in arrivals.segments))
            total = sum(
                one.rate * (one.until_s - start)
                for start, one in zip(starts, arrivals.segments, strict=False)
            )
            return total / arrivals.segments[-1].until_s
        case _:
            assert_never(arrivals)


def steady(mix: Mix, rate: float, duration_s: float) -> Mix:
    """Return the mix at `rate` requests a second in all, for `duration_s`.

    Sources keep their parts: of each, its mean rate while it lasts times how long it does. ValueError:
    sources that offer nothing.
    """
    end_s = mix.duration_s or max(filter(None, map(_own_end, mix.sources)), default=1.0)
    parts = [_part(source, end_s) for source in mix.sources]
    whole = sum(parts)
    if whole <= 0:
        raise ValueError("the sources of this mix offer nothing")
    sources = tuple(
        replace(source, arrivals=Poisson(rate * part / whole), start_s=0.0, stop_s=None)
        for source, part in zip(mix.sources, parts, strict=True)
        if part > 0
    )
    return Mix(sources=sources, duration_s=duration_s)


def _own_end(source: TenantSource) -> float | None:
    """Return when a source ends by itself, in s of the trace; None: it does not."""
    if not isinstance(source.arrivals, Ramp):
        return source.stop_s
    end_s = source.start_s + source.arrivals.segments[-1].until_s
    return end_s if source.stop_s is None else min(end_s, source.stop_s)


def _part(source: TenantSource, end_s: float) -> float:
    own = _own_end(source)
    last = end_s if own is None else min(own, end_s)
    return mean_rate(source.arrivals) * max(0.0, last - source.start_s)


def retimed(rows: Sequence[TraceRow], rate: float, duration_s: float, seed: int) -> list[TraceRow]:
    """Return a trace's requests in their order, from a drawn place on, as a Poisson process.

    What they share stays beside each other. A trace that is too short goes round again, with prefixes that
    share nothing with those of the round before. ValueError: a trace of nothing.
    """
    if not rows:
        raise ValueError("a trace of no requests")
    rng = stream(seed, "retimed")
    first = int(rng.random() * len(rows))
    found: list[TraceRow] = []
    for nth, at_s in enumerate(arrival_times(Poisson(rate), rng), start=first):
        if at_s >= duration_s:
            return found
        again, place = divmod(nth, len(rows))
        row, other = rows[place], again * _ROUND & ID_MAX
        prefix = tuple(chunk ^ other for chunk in row.prefix)
        found.append(replace(row, at=InstantNs(seconds(at_s)), prefix=prefix))
    raise AssertionError("a Poisson process has no end")
