"""Mixes and traces at a rate that does not change: parts and order are kept, only times are drawn."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from headrace.model.ids import TenantId
from headrace.trace.generate import generate
from headrace.trace.mix import (
    Arrivals,
    Even,
    Fixed,
    Gamma,
    Mix,
    OnOff,
    Poisson,
    Ramp,
    Segment,
    TenantSource,
)
from headrace.trace.row import TraceRow
from headrace.trace.steady import mean_rate, retimed, steady
from headrace.units import InstantNs, Tokens, seconds

RAMP = Ramp(segments=(Segment(until_s=10, rate=1), Segment(until_s=30, rate=4)))


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        (Poisson(2.0), 2.0),
        (Gamma(2.0, cv=3.0), 2.0),
        (Even(2.0), 2.0),
        (OnOff(rate=8.0, on_s=1.0, off_s=3.0), 2.0),
        (RAMP, 3.0),
    ],
)
def test_the_mean_rate_counts_silences(arrivals: Arrivals, rate: float) -> None:
    assert mean_rate(arrivals) == rate


def source(name: str, arrivals: Arrivals, **span: Any) -> TenantSource:
    return TenantSource(tenant=TenantId(name), arrivals=arrivals, lengths=Fixed(10, 1), **span)


def test_sources_keep_their_parts_of_what_is_offered() -> None:
    mix = Mix(
        sources=(
            source("ramp", RAMP),  # 90 requests in 30 s
            source("late", Poisson(6.0), start_s=50.0),  # 60
            source("short", Even(3.0), start_s=10.0, stop_s=20.0),  # 30
            source("never", Poisson(9.0), start_s=70.0),
        ),
        duration_s=60.0,
    )
    found = steady(mix, 18.0, 200.0)
    assert [one.tenant for one in found.sources] == ["ramp", "late", "short"]
    assert [mean_rate(one.arrivals) for one in found.sources] == pytest.approx([9.0, 6.0, 3.0])
    rows = generate(found, 0)
    counts = Counter(row.tenant for row in rows)
    assert len(rows) == pytest.approx(18 * 200, rel=0.05)
    assert counts[TenantId("ramp")] == pytest.approx(1_800, rel=0.1)


def test_a_mix_without_an_end_of_its_own_ends_with_its_last_source() -> None:
    mix = Mix(sources=(source("ramp", RAMP), source("even", Even(1.0))), rows=5)
    ramp, even = steady(mix, 4.0, 10.0).sources
    assert mean_rate(ramp.arrivals) == pytest.approx(3.0)
    assert mean_rate(even.arrivals) == pytest.approx(1.0)


def test_the_same_seed_at_another_rate_is_the_same_requests() -> None:
    mix = Mix(sources=(source("a", Poisson(1.0)),), rows=1)
    slow, fast = (generate(steady(mix, rate, 100.0), 3) for rate in (2.0, 4.0))
    assert [row.at / 2 for row in slow][:50] == pytest.approx([row.at for row in fast][:50], abs=1)


def test_a_mix_of_nothing_is_refused() -> None:
    mix = Mix(sources=(source("a", Poisson(1.0), start_s=10.0),), duration_s=5.0)
    with pytest.raises(ValueError, match="offer nothing"):
        steady(mix, 1.0, 1.0)


def trace(count: int) -> list[TraceRow]:
    return [
        TraceRow(
            at=InstantNs(0), input_tokens=Tokens(600 + nth), output_tokens=Tokens(1),
            prefix=(7, nth), prefix_tokens=256,
        )
        for nth in range(count)
    ]  # fmt: skip


def test_a_trace_is_offered_in_its_order_from_a_drawn_place_on() -> None:
    found = retimed(trace(500), 10.0, 20.0, 1)
    lengths = [row.input_tokens for row in found]
    assert len(found) == pytest.approx(200, rel=0.25)
    assert all((b - a) % 500 == 1 for a, b in pairwise(lengths))
    assert all(a.at <= b.at < seconds(20.0) for a, b in pairwise(found))
    assert lengths != [row.input_tokens for row in retimed(trace(500), 10.0, 20.0, 2)]


def test_a_short_trace_goes_round_and_finds_nothing_of_the_round_before() -> None:
    found = retimed(trace(10), 10.0, 20.0, 1)
    assert len(found) == pytest.approx(200, rel=0.25)
    rounds: dict[int, set[int]] = {}
    for row in found:
        rounds.setdefault(row.prefix[0], set()).add(row.input_tokens)
    assert len(rounds) == pytest.approx(20, abs=6)
    assert all(len(lengths) <= 10 for lengths in rounds.values())
    assert len({row.prefix for row in found}) == len(found)


def test_a_trace_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no requests"):
        retimed([], 1.0, 1.0, 1)
