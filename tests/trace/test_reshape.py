"""Traces are made faster, shorter and smaller exactly, and owners are drawn by weight."""

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.model.ids import ClassName, TenantId
from headrace.trace.reshape import assign, cap_lengths, head, lengths_of, scale, spread, window
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import DurationNs, InstantNs, Tokens

TENANTS = {TenantId("a"): 3.0, TenantId("b"): 1.0}
CLASSES = {ClassName("chat"): 1.0, ClassName("batch"): 1.0}


def rows_at(*times: int) -> list[TraceRow]:
    return [
        TraceRow(at=InstantNs(at), input_tokens=Tokens(nth + 1), output_tokens=Tokens(9))
        for nth, at in enumerate(times)
    ]


def times(rows: Sequence[TraceRow]) -> list[int]:
    return [row.at for row in rows]


def test_head_and_window_cut_by_count_and_by_time() -> None:
    rows = rows_at(0, 5, 10, 15)
    assert times(head(rows, 2)) == [0, 5]
    assert head(rows, 9) == rows
    assert head(rows, -1) == []
    assert times(window(rows, InstantNs(5), InstantNs(15))) == [0, 5]
    assert lengths_of(rows[:2]) == [(1, 9), (2, 9)]


def test_scale_divides_time_exactly() -> None:
    rows = rows_at(0, 13, 2_600_000_000_000_000_001)
    assert times(scale(rows, 2.6)) == [0, 5, 1_000_000_000_000_000_000]
    assert times(scale(rows, Fraction(1, 3)))[1:] == [39, 7_800_000_000_000_000_003]
    with pytest.raises(ValueError, match="above 0"):
        scale(rows, 0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 20))
def test_spread_keeps_order_and_moves_no_row_by_a_tick(ats: list[int], tick: int) -> None:
    rows = rows_at(*sorted(ats))
    moved = spread(rows, DurationNs(tick))
    assert [row.input_tokens for row in moved] == [row.input_tokens for row in rows]
    assert times(moved) == sorted(times(moved))
    assert all(0 <= new.at - old.at < tick for new, old in zip(moved, rows, strict=True))
    assert moved[0].at == rows[0].at


def test_spread_of_nothing_is_nothing() -> None:
    assert spread([], DurationNs(3)) == []


def test_cut_input_keeps_only_whole_chunks() -> None:
    row = TraceRow(
        at=InstantNs(0),
        input_tokens=Tokens(1_500),
        output_tokens=Tokens(80),
        max_tokens=Tokens(100),
        prefix=(1, 2, 3),
        prefix_tokens=512,
    )
    (cut,) = cap_lengths([row], input_max=1_100, output_max=90)
    assert (cut.input_tokens, cut.prefix, cut.prefix_tokens) == (1_100, (1, 2), 512)
    assert (cut.output_tokens, cut.max_tokens) == (80, 90)
    (bare,) = cap_lengths([replace(row, max_tokens=None)], input_max=500, output_max=70)
    assert (bare.prefix, bare.prefix_tokens, bare.output_tokens) == ((), 0, 70)
    assert bare.max_tokens is None
    assert cap_lengths([row], input_max=1_500) == [row]


def test_owners_are_drawn_by_weight_and_only_where_missing() -> None:
    rows = rows_at(*range(4_000))
    rows[0] = replace(rows[0], tenant=TenantId("kept"), slo_class=ClassName("kept"))
    drawn = assign(rows, tenants=TENANTS, classes=CLASSES, seed=3)
    assert (drawn[0].tenant, drawn[0].slo_class) == ("kept", "kept")
    assert sum(row.tenant == "a" for row in drawn) == pytest.approx(3_000, abs=100)
    assert sum(row.slo_class == "chat" for row in drawn) == pytest.approx(2_000, abs=100)
    assert drawn == assign(rows, tenants=TENANTS, classes=CLASSES, seed=3)
    other = assign(rows, tenants=TENANTS, classes={}, seed=3)
    assert [row.tenant for row in other] == [row.tenant for row in drawn]
    assert other[1].slo_class is None


@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_weight_of_nothing_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weights above 0 for each tenant"):
        assign([], tenants={TenantId("a"): weight}, classes={}, seed=1)


def test_streams_are_told_apart_by_seed_and_path() -> None:
    paths: list[tuple[str | int, ...]] = [(), ("a", "b"), ("a/b",), ("a~1b",), ("a",), ("a", 2)]
    draws = {stream(seed, *path).random() for path in paths for seed in (1, 2)}
    assert len(draws) == 2 * len(paths)
    assert stream(1, "a", 2).random() == stream(1, "a", 2).random()
