"""Claims, intervals and CPU time of the benchmark harness."""

import math
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks import harness


@pytest.mark.parametrize(
    ("make", "value", "bound", "holds"),
    [
        (harness.at_most, 60.0, "<= 60", True),
        (harness.at_most, 60.1, "<= 60", False),
        (harness.at_most, math.nan, "<= 60", False),
        (harness.at_least, 60.0, ">= 60", True),
        (harness.at_least, 59.9, ">= 60", False),
        (harness.at_least, math.nan, ">= 60", False),
    ],
)
def test_claim_holds_up_to_its_bound(
    make: Callable[[str, float, float], harness.Claim], value: float, bound: str, *, holds: bool
) -> None:
    claim = make("handle, us", value, 60)
    assert (claim.claim, claim.bound, claim.holds) == ("handle, us", bound, holds)


@pytest.mark.parametrize(("limit", "text"), [(1_000_000, "1000000"), (0.05, "0.05"), (2.5, "2.5")])
def test_bound_is_written_as_a_person_would(limit: float, text: str) -> None:
    assert harness.at_most("x", 0, limit).bound == f"<= {text}"


def test_claim_is_written_with_the_four_agreed_fields() -> None:
    written = msgspec.json.decode(msgspec.json.encode(harness.at_least("x", 2, 1)))
    assert written == {"claim": "x", "value": 2, "bound": ">= 1", "holds": True}


def test_interval_of_five_values_uses_students_t() -> None:
    values = [9.0, 10.0, 11.0, 10.5, 9.5]
    half = 2.776 * statistics.stdev(values) / math.sqrt(5)
    assert harness.interval95(values) == pytest.approx((10.0, 10.0 - half, 10.0 + half))


def test_interval_between_rows_takes_the_wider() -> None:
    values = [float(i % 2) for i in range(25)]  # 24 degrees of freedom: the row of 20
    low_half = harness.interval95(values).mean - harness.interval95(values).low
    assert low_half == pytest.approx(2.086 * statistics.stdev(values) / 5)


def test_interval_of_many_values_nears_the_normal_one() -> None:
    values = [float(i % 2) for i in range(10_000)]
    interval = harness.interval95(values)
    assert interval.high - interval.mean == pytest.approx(1.96 * 0.5 / 100, rel=0.02)


def test_one_value_tells_nothing_of_the_spread() -> None:
    assert harness.interval95([3.0]) == (3.0, -math.inf, math.inf)


def test_interval_of_nothing_is_a_mistake() -> None:
    with pytest.raises(statistics.StatisticsError):
        harness.interval95([])


def test_t_falls_as_freedom_grows() -> None:
    rows = list(harness.STUDENT_T_975.items())
    assert rows == sorted(rows)
    assert [t for _, t in rows] == sorted((t for _, t in rows), reverse=True)


def test_best_of_keeps_the_least_and_calls_n_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    calls: list[None] = []
    assert harness.best_of(3, lambda: calls.append(None)) == 1.0
    assert len(calls) == 3


def test_calibration_is_the_least_of_five_runs_of_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 10.0, 12.0, 20.0, 24.0, 30.0, 35.0, 40.0, 46.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    assert harness.calibration() == 2.0
    assert next(clock, None) is None


def test_commit_id_is_a_hash_or_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = harness.commit_id()
    assert found == "unknown" or len(found.removesuffix("-dirty")) == 40
    monkeypatch.setenv("PATH", str(tmp_path))
    assert harness.commit_id() == "unknown"


def test_commit_id_outside_a_repository_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert harness.commit_id() == "unknown"


def test_machine_names_platform_and_cpus() -> None:
    found = harness.machine()
    assert found.keys() == {"platform", "python", "cpus"}
    assert all(found.values())
