"""The benchmark runner: which names it knows, what it prints, writes and returns."""

import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from benchmarks import __main__ as runner
from benchmarks import harness


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Register two benchmarks that claim to be at most 1, and return what each will measure."""
    values = {"first": 0.5, "second": 1.0}
    for name in tuple(values):
        module = ModuleType(f"benchmarks.{name}")
        module.__spec__ = ModuleSpec(module.__name__, loader=None)

        def run(quick: bool, name: str = name) -> harness.Result:
            claims = [harness.at_most("figure", values[name], 1)]
            return harness.Result(name=name, claims=claims, seeds=(7,), detail={"quick": quick})

        module.__dict__["run"] = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(runner, "REGISTRY", tuple(values))
    monkeypatch.setattr(harness, "calibration", lambda: 0.05)
    return values


def test_unknown_name_is_answered_with_the_known_ones(
    registry: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["third"]) == 2
    assert capsys.readouterr().err == "no benchmark 'third'; there are: all, first, second\n"
    assert registry


def test_registered_benchmark_without_a_module_is_an_error_before_any_runs(
    registry: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "REGISTRY", (*registry, "unwritten"))
    assert runner.main(["all"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "benchmarks/unwritten.py is not there" in err


def test_pages_name_benchmarks_that_can_be_run() -> None:
    root = Path(__file__).parents[2]
    for page in (root / "README.md", *root.joinpath("docs").glob("*.md")):
        text = page.read_text("utf-8")
        named = re.findall(r"python -m benchmarks ([a-z]\w*)", text)
        if page.name == "README.md":
            named += re.findall(r"`benchmarks/(\w+)(?:\.py)?`", text)
        assert set(named) <= {"all", *runner.REGISTRY}, page.name


def test_claims_that_hold_give_exit_status_0(
    registry: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["all", "--quick"]) == 0
    out, err = capsys.readouterr()
    assert out.count("holds  figure") == len(registry)
    assert out.count("calibration loop 50.0 ms") == len(registry)
    assert not err


def test_one_failing_claim_gives_exit_status_1_after_all_have_run(
    registry: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    registry["first"] = 1.5
    assert runner.main(["all"]) == 1
    out, err = capsys.readouterr()
    assert "FAILS  figure  1.5 (<= 1)" in out
    assert "holds  figure  1 (<= 1)" in out
    assert err == "FAILED first: figure\n"


@pytest.mark.usefixtures("registry")
def test_json_of_one_benchmark_is_its_record(tmp_path: Path) -> None:
    file = tmp_path / "first.json"
    assert runner.main(["first", "--quick", "--json", str(file)]) == 0
    record = msgspec.json.decode(file.read_bytes())
    assert record.keys() == set(runner.Record.__struct_fields__)
    assert record["claims"] == [{"claim": "figure", "value": 0.5, "bound": "<= 1", "holds": True}]
    assert record["seeds"] == [7]
    assert record["detail"] == {"quick": True}
    assert record["machine"]["cpus"] > 0


@pytest.mark.usefixtures("registry")
def test_json_of_all_is_an_array_of_records(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    assert runner.main(["all", "--json", str(file)]) == 0
    records = msgspec.json.decode(file.read_bytes(), type=list[runner.Record])
    assert [(record.name, record.quick) for record in records] == [
        ("first", False),
        ("second", False),
    ]


def test_other_seeds_are_as_many_and_for_benchmarks_that_take_them(
    registry: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(quick: bool, seeds: Sequence[int] = harness.CLAIM_SEEDS) -> harness.Result:
        return harness.Result(name="first", claims=[], seeds=seeds, table=f"{quick} of a table")

    assert runner.main(["first", "--seeds", "200"]) == 2
    assert capsys.readouterr().err == "benchmark 'first' has seeds of its own\n"
    sys.modules["benchmarks.first"].__dict__["run"] = run
    assert registry
    assert runner.measure("first", quick=False).seeds == list(harness.CLAIM_SEEDS)
    assert runner.measure("first", quick=True, first_seed=200).seeds == [*range(200, 205)]
    assert runner.main(["first", "--seeds", "200"]) == 0
    assert capsys.readouterr().out.endswith("False of a table\n")
