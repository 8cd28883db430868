"""`headrace verify` and `headrace decisions verify`: what they accept, what they find, what they say."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.adapters.journal.ring import segment_paths
from headrace.cli import main
from headrace.model.event import Ended
from headrace.plane.journal import Checkpoint, Record, frame_bytes, frames
from tests.cli.scenarios import small

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a simulated journal (two lives) and decision log."""
    folder = tmp_path_factory.mktemp("kept")
    flags = ["--journal", str(folder / "journal"), "--decisions", str(folder / "log")]
    assert main(["simulate", small(folder), *flags]) == 0
    return folder


def test_a_journal_of_two_lives_replays(kept: Path, capsys: Output) -> None:
    assert main(["verify", str(kept / "journal")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    folder = re.escape(str(kept / "journal"))
    assert re.fullmatch(rf"{folder}: \d+ records from 0 on replay to the same effects\n", out)


def test_one_segment_replays_alone(kept: Path, capsys: Output) -> None:
    for path in segment_paths(kept / "journal"):
        assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.count("replay to the same effects") == 2


def test_an_edited_record_is_named(kept: Path, tmp_path: Path, capsys: Output) -> None:
    content = segment_paths(kept / "journal")[0].read_bytes()
    out: list[bytes] = []
    index, found = 0, None
    for frame in frames(content):
        changed = frame
        if isinstance(frame, Record):
            if found is None and isinstance(frame.event, Ended) and frame.event.usage is not None:
                usage = replace(frame.event.usage, cached_tokens=3)
                changed = replace(frame, event=replace(frame.event, usage=usage))
                found = (index, frame.now)
            index += 1
        out.append(frame_bytes(changed))
    assert found is not None
    path = tmp_path / "edited.journal"
    path.write_bytes(b"".join(out))
    assert main(["verify", str(path)]) == 1
    assert capsys.readouterr().out == (
        f"{path}: record {found[0]} (Ended at {found[1]} ns) differs: "
        "event or effects are not those that were recorded\n"
    )


def test_a_cut_off_end_is_what_a_crash_leaves(kept: Path, tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "cut.journal"
    path.write_bytes(segment_paths(kept / "journal")[0].read_bytes()[:-5])
    assert main(["verify", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{re.escape(str(path))}: \d+ bytes cut off at the end", out[0])
    assert "replay to the same effects" in out[1]


def test_bytes_lost_inside_a_journal_are_told_with_their_file(
    kept: Path, tmp_path: Path, capsys: Output
) -> None:
    (path,) = segment_paths(kept / "journal")[:1]
    content = path.read_bytes()
    head = 4 + int.from_bytes(content[:4], "big")
    broken = tmp_path / path.name
    broken.write_bytes(content[:head] + b"\x01" + content[head + 1 :])
    (tmp_path / "foo.journal").write_bytes(b"not ours")
    for read in (tmp_path, broken):
        assert main(["verify", str(read)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert (
            err == f"headrace: {read}: {path.name}: cut off at byte {head}, though more follows\n"
        )


def test_a_journal_that_cannot_be_read_is_told(kept: Path, tmp_path: Path, capsys: Output) -> None:
    head, *_ = frames(segment_paths(kept / "journal")[0].read_bytes())
    assert isinstance(head, Checkpoint)
    wrong = {
        "future": frame_bytes(replace(head, version=9)),
        "torn": (3).to_bytes(4, "big") + b"abc",
        "empty": b"",
        "other": (kept / "log").read_bytes(),
    }
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
    said = {}
    for name in (*wrong, "folder", "missing"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        assert main(["verify", str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        said[name] = err.removeprefix(f"headrace: {tmp_path / name}: ").strip()
    assert said.pop("torn").startswith("no frame at byte 0")
    assert said == {
        "future": "journal version 9, this reads 5",
        "empty": "holds no journal",
        "other": "holds no journal",
        "folder": "holds no journal",
        "missing": "no such file or directory",
    }


# Decision logs -----------------------------------------------------------------------------------


def edited(log: Path, out: Path, kind: str, change: Callable[[Any], None]) -> int:
    """Write a log with the third line of a kind changed; return that line's number."""
    lines = log.read_bytes().splitlines(keepends=True)
    places = [n for n, line in enumerate(lines) if json.loads(line).get("kind") == kind]
    at = places[min(2, len(places) - 1)]
    told = json.loads(lines[at])
    change(told)
    lines[at] = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
    out.write_bytes(b"".join(lines))
    return at + 1


def add(*path: str, more: int = 1) -> Callable[[Any], None]:
    """Return a change that adds to a number somewhere inside a line."""

    def change(told: Any) -> None:
        for step in path[:-1]:
            told = told[step]
        told[path[-1]] += more

    return change


def test_every_decision_of_a_log_is_made_again(kept: Path, capsys: Output) -> None:
    assert main(["decisions", "verify", str(kept / "log")]) == 0
    out = capsys.readouterr().out
    log = re.escape(str(kept / "log"))
    assert re.fullmatch(rf"{log}: \d+ decisions follow from their evidence\n", out)


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        pytest.param("entry", add("decision", "slack_ns"), "decision.slack_ns", id="slack"),
        pytest.param("entry", add("decision", "wait_ns"), "decision.wait_ns", id="wait"),
        pytest.param(
            "entry", add("evidence", "wait", "backlog_ns"), "crc", id="evidence without effect"
        ),
        pytest.param(
            "entry",
            add("evidence", "demand", "prefill_ns", more=10**6),
            "crc",
            id="a prefill that no gate reads",
        ),
        pytest.param(
            "entry", add("evidence", "ttft_ns", more=10**6), "slo_ms.ttft", id="evidence's bound"
        ),
        pytest.param("entry", add("demand", "work_ms_p90"), "demand.work_ms_p90", id="header"),
        pytest.param("entry", add("slo_ms", "itl"), "slo_ms.itl", id="bound"),
        pytest.param("entry", add("at_ns"), "crc", id="instant"),
        pytest.param("entry", add("request_id"), "crc", id="request"),
        pytest.param("entry", add("policy_revision"), "policy_revision", id="revision"),
        pytest.param("entry", lambda told: told.update(tenant="b"), "crc", id="tenant"),
        pytest.param(
            "route", add("placement", "terms", "queue_ns"), "placement.terms.queue_ns", id="term"
        ),
        pytest.param(
            "route", add("placement", "incarnation"), "placement.incarnation", id="incarnation"
        ),
        pytest.param("route", add("evidence", "blocks"), "evidence.blocks", id="blocks"),
        pytest.param("route", add("slack_ns", more=10**6), "admission.slack_ms", id="route slack"),
        pytest.param(
            "route",
            lambda told: told["route"].update(replica_group="pool-9"),
            "route.replica_group",
            id="replica",
        ),
    ],
)
def test_an_edited_decision_is_named(
    kept: Path, tmp_path: Path, capsys: Output, kind: str, change: Callable[[Any], None], field: str
) -> None:
    log = tmp_path / "edited"
    line = edited(kept / "log", log, kind, change)
    assert main(["decisions", "verify", str(log)]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert re.match(
        rf"{re.escape(str(log))}: line {line} \(decision \d+\) differs in {re.escape(field)}", out
    )
    assert " was recorded, " in out
    assert out.endswith(" follows\n")
    assert len(out) < 500


def test_a_changed_configuration_changes_what_follows(
    kept: Path, tmp_path: Path, capsys: Output
) -> None:
    def stricter(told: Any) -> None:
        config = json.loads(told["config"])
        config["admission"]["margin_ms"] += 100
        told["config"] = json.dumps(config)

    log = tmp_path / "stricter"
    edited(kept / "log", log, "config", stricter)
    assert main(["decisions", "verify", str(log)]) == 1
    assert "differs in admission.slack_ms" in capsys.readouterr().out


def test_a_log_that_cannot_be_read_is_told(kept: Path, tmp_path: Path, capsys: Output) -> None:
    log = tmp_path / "log"
    lines = (kept / "log").read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:4], b'{"kind": "dream"}\n']))
    assert main(["decisions", "verify", str(log)]) == 2
    assert capsys.readouterr().err.startswith(f"headrace: {log}: line 5: unknown kind 'dream'")
    log.write_bytes(b'{"format":"headrace.decisions","version":2}\n')
    assert main(["decisions", "verify", str(log)]) == 2
    assert "is no decision log of version 1" in capsys.readouterr().err
    missing = tmp_path / "missing"
    assert main(["decisions", "verify", str(missing)]) == 2
    assert capsys.readouterr().err == f"headrace: {missing}: no such file or directory\n"
