"""`headrace scale explain`: each decision of the scaler in rows, alike from a journal and from a log."""

import json
from pathlib import Path

import pytest

from headrace.cli import main

SCENARIO = """\
name: burst
deployment:
  models: [{name: m}]
  pools:
    - name: p
      model: m
      profile: h100-8b-tp1
      scaling: {max: 4, gpu_hour_usd: 2.5}
  tenants: [{name: a}]
mix:
  sources:
    - tenant: a
      slo_class: interactive
      arrivals: {kind: even, rate: 12}
      lengths: {kind: fixed, input: 8000, output: 20}
  duration_s: 50
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaled")
    (folder / "s.yaml").write_text(SCENARIO)
    flags = ["--journal", str(folder / "journal"), "--decisions", str(folder / "log")]
    assert main(["simulate", str(folder / "s.yaml"), *flags]) == 0
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["scale", "explain", *words]) == 0
    return capsys.readouterr().out


def test_a_journal_and_a_log_tell_the_same(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = told(capsys, str(kept / "journal"), "--all", "--json")
    assert told(capsys, str(kept / "log"), "--all", "--json") == journal
    lines = [json.loads(line) for line in journal.splitlines() if line]
    assert [line["record"]["at"] // 10**9 for line in lines] == [15, 30, 45]
    asked = [line["record"]["decision"]["steps"]["ask"] for line in lines]
    assert asked[0] > 0


def test_what_changed_something_is_told_in_rows(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, str(kept / "log"))
    assert out.startswith("decision ")
    assert ": p at 15.0 s, 1 group there or on the way, " in out
    assert "> work" in out
    assert "offered work and what waits (need" in out
    assert "  ask " in out


def test_both_records_verify(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(kept / "journal")]) == 0
    assert main(["decisions", "verify", str(kept / "log")]) == 0
    capsys.readouterr()


def test_a_scaling_decision_that_was_changed_is_found(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (kept / "log").read_bytes().splitlines(keepends=True)
    at = next(nth for nth, line in enumerate(lines) if b'"kind":"scale"' in line)
    lines[at] = lines[at].replace(b'"need":', b'"need":9', 1)
    (tmp_path / "log").write_bytes(b"".join(lines))
    assert main(["decisions", "verify", str(tmp_path / "log")]) == 1
    assert "differs in decision.need" in capsys.readouterr().out


def test_what_tells_nothing_of_it_says_so(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "explain", str(kept / "log"), "--pool", "other"]) == 1
    assert "3 scaling decisions, and none of these" in capsys.readouterr().err
    assert main(["scale", "explain", str(tmp_path / "none")]) == 2
    (tmp_path / "odd").write_text("{}")
    assert main(["scale", "explain", str(tmp_path / "odd")]) == 2
