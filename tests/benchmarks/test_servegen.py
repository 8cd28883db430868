"""Traces made of what a service told of its clients: rates, variation, lengths, and what is left out."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from benchmarks.servegen import DAY_S, OUTPUT_MAX, Part, Service, below, offered, read, told
from headrace.model.ids import TenantId
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_S

T = TenantId("t")
SHORT = {"in": [0, 10, 20], "out": [1, 100, 200]}
LONG = {"in": [1_000, 1_000, 1_000], "out": [100, 8_192, 90_000]}


def client(number: int, rates: list[list[Any]], lengths: dict[str, Any] | None) -> dict[str, Any]:
    told_of = [[*rate, "G", 1.0, 1.0] for rate in rates]
    return {"id": number, "rates": told_of, "lengths": lengths}


def service(tmp_path: Path, *clients: dict[str, Any]) -> Service:
    path = tmp_path / "service.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(
            {
                "model": "made-up", "category": "language", "rate_window_s": 600,
                "length_window_s": 21_600, "quantile_percents": [0, 50, 100],
                "columns_rate": ["start_s", "rate_rps", "cv", "pattern", "shape", "scale"],
                "clients": list(clients),
            },
            file,
        )  # fmt: skip
    return read(path)


def steady(tmp_path: Path, cv: float = 1.0, rate: float = 1.0) -> Service:
    """Return one client that sends so for two hours."""
    rates = [[start, rate, cv] for start in range(0, 7_200, 600)]
    return service(tmp_path, client(0, rates, {"0": SHORT}))


def made(known: Service, part: Part, seed: int = 0) -> list[TraceRow]:
    return offered(known, part, seed, tenant=T)


def test_each_interval_has_as_many_requests_as_there_were(tmp_path: Path) -> None:
    short = {"0": SHORT}
    known = service(
        tmp_path,
        client(0, [[0, 0.5, 1.0], [1_200, 2.0, 8.0]], short),
        client(1, [[1_200, 0.1, 0.2]], short),
    )
    rows = made(known, Part(span_s=1_800))
    slots = [row.at // (600 * NS_PER_S) for row in rows]
    assert [slots.count(nth) for nth in range(3)] == [300, 0, 1_260]
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    figures = told(rows, 1_800)
    assert (figures.requests, figures.peak_rps, figures.least_rps) == (1_560, 2.1, 0.0)


def test_a_part_is_the_same_alone_and_in_a_longer_one(tmp_path: Path) -> None:
    known = steady(tmp_path, cv=2.0)
    whole = made(known, Part(span_s=7_200))
    alone = made(known, Part(start_s=1_200, span_s=600))
    inside = [row for row in whole if 1_200 <= row.at / NS_PER_S < 1_800]
    assert [(row.at - 1_200 * NS_PER_S, row.output_tokens) for row in inside] == [
        (row.at, row.output_tokens) for row in alone
    ]
    assert made(known, Part(span_s=7_200)) == whole
    assert made(known, Part(span_s=7_200), seed=1) != whole


@pytest.mark.parametrize("cv", [0.0, 0.3, 1.0, 3.0])
def test_gaps_vary_as_they_did(tmp_path: Path, cv: float) -> None:
    rows = made(steady(tmp_path, cv, rate=5.0), Part(span_s=7_200))
    gaps = [later.at - row.at for row, later in pairwise(rows)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.15, abs=0.05)


def test_what_is_too_uneven_to_be_drawn_comes_at_once(tmp_path: Path) -> None:
    rows = made(steady(tmp_path, cv=1e6), Part(span_s=600))
    assert len(rows) == 600
    assert len({row.at for row in rows}) == 1


@pytest.mark.parametrize("part", [Part(span_s=7_200, keep=0.2), Part(span_s=7_200, rps=1.0)])
def test_a_thinned_trace_keeps_its_bursts(tmp_path: Path, part: Part) -> None:
    known = steady(tmp_path, cv=5.0, rate=5.0)
    rows = made(known, part)
    assert len(rows) == pytest.approx(7_200, rel=0.05)
    # Fewer of each burst, so still uneven: gaps of those that would be picked by chance vary by 1.
    gaps = [later.at - row.at for row, later in pairwise(rows)]
    assert pstdev(gaps) / fmean(gaps) > 2.0


def test_more_than_there_was_and_parts_of_intervals_are_refused(tmp_path: Path) -> None:
    known = steady(tmp_path)
    for part in (Part(span_s=7_200, rps=1.1), Part(keep=0.0), Part(span_s=601), Part(start_s=1)):
        with pytest.raises(ValueError, match="expected"):
            made(known, part)


def test_clients_without_lengths_are_left_out_and_their_share_is_told(tmp_path: Path) -> None:
    known = service(
        tmp_path, client(0, [[0, 3.0, 1.0]], None), client(1, [[0, 1.0, 1.0]], {"0": SHORT})
    )
    assert known.untold(0, 600) == pytest.approx(0.75)
    assert (known.rps(0, 600), len(made(known, Part(span_s=600)))) == (1.0, 600)
    assert (known.untold(600, 600), made(known, Part(start_s=600, span_s=600, keep=1.0))) == (0, [])


def test_lengths_are_those_of_the_hours_and_none_is_empty_or_too_long(tmp_path: Path) -> None:
    lengths = {"0": SHORT, "21600": LONG}
    known = service(tmp_path, client(0, [[21_000, 1.0, 1.0], [21_600, 1.0, 1.0]], lengths))
    rows = made(known, Part(start_s=21_000, span_s=1_200))
    early, late = rows[:600], rows[600:]
    assert {1, 20} <= {row.input_tokens for row in early} <= set(range(1, 21))
    assert fmean(row.output_tokens for row in early) == pytest.approx(100, rel=0.1)
    assert {row.input_tokens for row in late} == {1_000}
    assert max(row.output_tokens for row in late) <= OUTPUT_MAX


def test_a_table_is_cut_where_its_values_are_too_large() -> None:
    table = ((0.0, 10), (50.0, 20), (100.0, 40))
    assert below(table, 40) == table
    percents, values = zip(*below(table, 30), strict=True)
    assert values == (10, 20, 30)
    assert percents == pytest.approx((0, 200 / 3, 100))
    assert below(table, 20) == ((0.0, 10), (100.0, 20))
    assert below(table, 5) == ((0.0, 5), (100.0, 5))


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "days", "rps", "untold"),
    [("deepseek-r1", 1, 16.01, 0.0), ("m-large", 14, 122.8, 0.373)],
)
def test_services_are_read_as_they_are_published(
    data_dir: Path, name: str, days: int, rps: float, untold: float
) -> None:
    known = read(data_dir / "traces" / "servegen" / f"{name}.json.gz")
    assert known.rps(0, days * DAY_S) == pytest.approx(rps, rel=0.001)
    assert known.untold(0, days * DAY_S) == pytest.approx(untold, abs=0.001)
    rows = made(known, Part(start_s=36_000, span_s=3_600, rps=1.0))
    assert len(rows) == pytest.approx(3_600, rel=0.1)
    assert max(row.output_tokens for row in rows) <= OUTPUT_MAX
