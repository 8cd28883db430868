"""`headrace swarm` from the outside."""

import json

import pytest

from headrace.cli import main

Output = pytest.CaptureFixture[str]


def test_clean_seeds_are_summed_up(capsys: Output) -> None:
    assert main(["swarm", "--seeds", "3", "--from", "2"]) == 0
    first, faults, ended = capsys.readouterr().out.splitlines()
    assert first.startswith("3 seeds, ")
    assert first.endswith(" steps: clean")
    assert faults.startswith("  seeds with: ")
    assert "success " in ended


def test_the_sums_as_json(capsys: Output) -> None:
    assert main(["swarm", "--seeds", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seeds"] == 2
    assert sum(told["outcomes"].values()) == told["requests"]


def test_one_seed_is_printed_before_it_runs(capsys: Output) -> None:
    assert main(["swarm", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("1 seeds, ")
    drawn = json.loads(err)
    assert drawn["seed"] == 3
    assert drawn["scenario"]["deployment"]["pools"]


def test_a_failing_seed_is_told_with_its_invariant(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.plane.ledger.Ledger.settle", lambda *_: None)
    assert main(["swarm", "--seeds", "2"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "INV-3 at " in err
    assert err.rstrip().endswith("reproduce: headrace swarm --seed 0")


def test_no_seeds_are_no_proof(capsys: Output) -> None:
    assert main(["swarm", "--seeds", "0"]) == 2
    assert "Must be > 0" in capsys.readouterr().err
