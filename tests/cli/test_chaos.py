"""`headrace chaos`: the list, a run, and what the exit code says."""

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.sim.chaos import shipped_names

SCENARIO = """\
name: mine
about: Nothing goes wrong for a few seconds.
deployment:
  models: [{name: m}]
  pools: [{name: p, model: m, profile: h100-8b-tp1}]
  tenants: [{name: a}]
mix:
  sources:
    - tenant: a
      slo_class: interactive
      arrivals: {kind: even, rate: 2}
      lengths: {kind: fixed, input: 200, output: 20}
  duration_s: 3
expect:
  - {kind: streams_lost, at_most: 0}
"""
Output = pytest.CaptureFixture[str]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.mark.parametrize("words", [[], ["--list"]])
def test_scenarios_that_ship_are_listed_with_a_line_each(words: list[str], capsys: Output) -> None:
    assert main(["chaos", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_names())
    assert all(line.endswith(".") for line in lines)


def test_a_run_says_what_it_is_about_and_what_came_of_it(mine: Path, capsys: Output) -> None:
    assert main(["chaos", str(mine), "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mine, seed 3: Nothing goes wrong for a few seconds.\n")
    assert "ok      streams lost: 0 (<= 0)\nholds\n" in out


def test_an_expectation_that_does_not_hold_is_exit_code_1(mine: Path, capsys: Output) -> None:
    more = "  - {kind: attainment, slo_class: interactive, from_s: 9, at_least: 1}\n"
    mine.write_text(SCENARIO + more)
    assert main(["chaos", str(mine)]) == 1
    out = capsys.readouterr().out
    assert "FAILED  interactive met over offered, from 9 s: nothing (>= 1)" in out
    assert out.endswith("does not hold\n")


def test_the_run_as_json(mine: Path, tmp_path: Path, capsys: Output) -> None:
    assert main(["chaos", str(mine), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scenario"] == "mine"
    assert told["verdicts"][0]["holds"] is True
    assert main(["chaos", str(mine), "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == told


def test_an_unknown_name_lists_those_that_there_are(capsys: Output) -> None:
    assert main(["chaos", "earthquake"]) == 2
    err = capsys.readouterr().err
    assert "no such scenario" in err
    assert all(name in err for name in shipped_names())
