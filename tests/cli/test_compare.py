"""`headrace compare` from the outside: only equal traces compare."""

import json
from pathlib import Path

import pytest

from headrace.cli import main
from tests.cli.scenarios import small

Output = pytest.CaptureFixture[str]
PATIENT = ("tenants: [{name: a}, {name: b}]", "tenants: [{name: a, rpm_limit: 30}, {name: b}]")


def report(folder: Path, name: str, *flags: str, change: tuple[str, str] | None = None) -> str:
    """Run the small scenario and return its report's path."""
    file = small(folder, *([change] if change else []), name=f"{name}.yaml")
    out = folder / f"{name}.json"
    assert main(["simulate", file, "--json", str(out), *flags]) == 0
    return str(out)


def test_two_policies_on_one_trace_compare(tmp_path: Path, capsys: Output) -> None:
    base, other = report(tmp_path, "base"), report(tmp_path, "other", change=PATIENT)
    capsys.readouterr()
    assert main(["compare", base, other]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("offered", "rejected", "attainment over admitted", "work goodput", "worse"):
        assert word in out
    assert main(["compare", other, base, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "better"


def test_a_run_equals_itself(tmp_path: Path, capsys: Output) -> None:
    base = report(tmp_path, "base")
    capsys.readouterr()
    assert main(["compare", base, base]) == 0
    assert "equal" in capsys.readouterr().out


def test_different_traces_are_refused(tmp_path: Path, capsys: Output) -> None:
    base, other = report(tmp_path, "base"), report(tmp_path, "other", "--seed", "5")
    capsys.readouterr()
    assert main(["compare", base, other]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace: not comparable: different offered requests: trace ")
    assert main(["compare", base, report(tmp_path, "faster", "--load", "2")]) == 1


def test_several_seeds_are_paired(tmp_path: Path, capsys: Output) -> None:
    seeds = ["--seed", "1", "--seed", "2", "--seed", "3"]
    base = report(tmp_path, "base", *seeds)
    other = report(tmp_path, "other", *seeds, change=PATIENT)
    capsys.readouterr()
    assert main(["compare", base, other, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seeds"] == [1, 2, 3]
    assert told["verdict"] == "worse"
    assert all(
        change["low"] <= change["difference"] <= change["high"] for change in told["changes"]
    )
    assert main(["compare", base, other]) == 0
    assert "worse" in capsys.readouterr().out

    mixed = report(tmp_path, "mixed", "--seed", "1", "--seed", "3", "--seed", "2")
    assert main(["compare", base, mixed]) == 1


def test_unequal_numbers_of_runs_are_told(tmp_path: Path, capsys: Output) -> None:
    base = report(tmp_path, "base")
    other = report(tmp_path, "other", "--seed", "0", "--seed", "1")
    capsys.readouterr()
    assert main(["compare", base, other]) == 2
    assert capsys.readouterr() == ("", f"headrace: {base} has 1 runs, {other} has 2\n")


def test_reports_without_runs_are_told(tmp_path: Path, capsys: Output) -> None:
    base = report(tmp_path, "base")
    empty = tmp_path / "empty.json"
    empty.write_text("[]")
    capsys.readouterr()
    for pair in ([str(empty), str(empty)], [base, str(empty)], [str(empty), base]):
        assert main(["compare", *pair]) == 2
        assert capsys.readouterr() == ("", f"headrace: {empty}: no runs in this report\n")


def test_what_is_no_report_is_told(tmp_path: Path, capsys: Output) -> None:
    base = report(tmp_path, "base")
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"a": 1}')
    capsys.readouterr()
    for pair in ([base, str(wrong)], [str(wrong), base]):
        assert main(["compare", *pair]) == 2
        assert capsys.readouterr().err.startswith(f"headrace: {wrong}: no report: ")
    missing = str(tmp_path / "missing.json")
    assert main(["compare", base, missing]) == 2
    assert capsys.readouterr().err == f"headrace: {missing}: no such file or directory\n"
