"""`headrace explain`: everything decided about a request, told so that it adds up; or why it is not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.adapters.journal.ring import segment_paths
from headrace.cli import main
from headrace.model.event import Ended, RequestArrived
from headrace.plane.journal import Record, frame_bytes, frames
from tests.cli.scenarios import small

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a simulated journal (two lives) and decision log; some are refused."""
    folder = tmp_path_factory.mktemp("kept")
    flags = ["--journal", str(folder / "journal"), "--decisions", str(folder / "log")]
    busy = ("input_median: 600", "input_median: 6000"), ("rate: 40", "rate: 80")
    early = ("at_s: 1.6", "at_s: 1.1")  # so that it goes on deciding after it
    assert main(["simulate", small(folder, *busy, early), *flags]) == 0
    return folder


def told(capsys: Output, *words: str) -> Any:
    """Return what the command tells as JSON."""
    assert main(["explain", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def text(capsys: Output, *words: str) -> str:
    assert main(["explain", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def lines(kept: Path) -> list[Any]:
    found = [json.loads(line) for line in (kept / "log").read_bytes().splitlines()]
    return [line for line in found if line.get("kind") in ("entry", "route")]


def first(kept: Path, kind: str, **admission: str) -> Any:
    return next(
        line
        for line in lines(kept)
        if line["kind"] == kind and admission.items() <= line["admission"].items()
    )


def test_every_request_of_a_journal_can_be_told(kept: Path, capsys: Output) -> None:
    journal = str(kept / "journal")
    for number in range(1, 121, 5):
        found = told(capsys, str(number), journal)
        assert found["entry"]["request_id"] == found["request_id"] == number
        assert found["ended"] or found["notes"]
        assert text(capsys, str(number), journal).startswith(f"Request {number} of tenant ")


def test_an_admitted_request_is_told_from_the_door_to_its_end(kept: Path, capsys: Output) -> None:
    number = next(
        line["request_id"]
        for line in lines(kept)
        if line["kind"] == "route" and line["evidence"]["lent"] is False
    )
    found = told(capsys, str(number), str(kept / "journal"))
    page = text(capsys, str(number), str(kept / "journal"))
    for title in (
        "What it asks for",
        "Gates",
        "Its slack to the first token",
        "The wait that was forecast",
        "Its turn",
        "Where it went: cost by replica, in ms",
        "How it ended",
    ):
        assert f"\n{title}\n" in page
    assert f"(decision {found['entry']['decision_id']}, policy revision 1)" in page
    assert re.search(
        rf"^  {found['routes'][0]['placement']['replica']} .* chosen, ", page, re.MULTILINE
    )
    assert "It was sent to " in page
    assert "It was admitted" in page


def test_the_slack_is_the_bound_less_what_is_shown(kept: Path, capsys: Output) -> None:
    for line in lines(kept)[:40]:
        if line["kind"] != "entry":
            continue
        page = text(capsys, str(line["request_id"]), str(kept / "journal"))
        (table,) = re.findall(r"Its slack to the first token\n(.*?)\n\n", page, re.DOTALL)
        values = [
            float(found.replace(",", ""))
            for found in re.findall(r"^  \S.*?  +(-?[\d,]+\.\d)  ms", table, re.MULTILINE)
        ]
        *parts, slack = values
        assert len(parts) == 7
        assert sum(parts) == pytest.approx(slack, abs=0.5), "each is rounded to a tenth"
        assert slack == pytest.approx(line["admission"]["slack_ms"], abs=0.06)


def test_a_refusal_says_which_gate_by_how_much_and_whether_to_come_again(
    kept: Path, capsys: Output
) -> None:
    refused = first(kept, "entry", result="reject")
    page = text(capsys, str(refused["request_id"]), str(kept / "journal"))
    assert "It was refused by the deadline gate: deadline queue; repeating can help after" in page
    assert re.search(
        r"^  deadline +deadline queue +[\d,.]+ +2,000.0 +-[\d,.]+ +ms$", page, re.MULTILINE
    )
    assert "Its turn" not in page


@pytest.mark.parametrize("kind", ["entry", "route"])
def test_a_decision_leads_to_its_request(kept: Path, capsys: Output, kind: str) -> None:
    for line in (first(kept, kind), [one for one in lines(kept) if one["kind"] == kind][-1]):
        number = str(line["decision_id"])
        for source in ([str(kept / "journal")], ["--log", str(kept / "log")]):
            found = told(capsys, number, *source, "--decision")
            ids = [found["entry"]["decision_id"], *(one["decision_id"] for one in found["routes"])]
            assert found["request_id"] == line["request_id"]
            assert line["decision_id"] in ids


def test_a_log_tells_the_same_decisions_and_no_end(kept: Path, capsys: Output) -> None:
    for line in lines(kept)[:30]:
        number = str(line["request_id"])
        by_log = told(capsys, number, "--log", str(kept / "log"))
        by_journal = told(capsys, number, str(kept / "journal"))
        for part in ("request_id", "entry", "routes"):
            assert by_log[part] == by_journal[part]
        assert by_log["ended"] is None
        assert by_log["notes"] == ["a decision log does not tell how a request ended"]
    assert "Its turn" in text(
        capsys, str(first(kept, "route")["request_id"]), "--log", str(kept / "log")
    )


# What cannot be told -------------------------------------------------------------------------------


def failed(capsys: Output, code: int, *words: str) -> str:
    assert main(["explain", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_unknown_ids_are_told_with_what_there_is(kept: Path, capsys: Output) -> None:
    journal, log = str(kept / "journal"), str(kept / "log")
    assert failed(capsys, 1, "999", journal) == (
        f"headrace: {journal}: no request 999 in the journal, which has 1 to 120\n"
    )
    last = lines(kept)[-1]["decision_id"]
    assert failed(capsys, 1, "9999", journal, "--decision") == (
        f"headrace: {journal}: no decision 9999 in the journal: its last is {last}\n"
    )
    assert failed(capsys, 1, "999", journal, "--log", log).splitlines()[1] == (
        f"headrace: {log}: no request 999 in the decision log"
    )
    said = failed(capsys, 1, "9999", "--log", log, "--decision")
    assert said == f"headrace: {log}: no decision 9999 in the decision log\n"
    assert failed(capsys, 1, "0", journal, "--decision").endswith("begins with decision 1\n")


def test_no_source_or_a_missing_one_is_told(kept: Path, capsys: Output) -> None:
    assert "name a journal" in failed(capsys, 2, "1")
    missing = kept / "missing"
    assert (
        failed(capsys, 2, "1", str(missing)) == f"headrace: {missing}: no such file or directory\n"
    )
    empty = kept / "empty"
    empty.mkdir(exist_ok=True)
    assert failed(capsys, 2, "1", str(empty)) == f"headrace: {empty}: holds no journal\n"
    assert "is no decision log" in failed(capsys, 2, "1", "--log", str(kept / "small.yaml"))


def test_what_lies_before_the_kept_ring_is_told_as_far_as_it_is_known(
    kept: Path, tmp_path: Path, capsys: Output
) -> None:
    later = segment_paths(kept / "journal")[1]
    (tmp_path / later.name).write_bytes(later.read_bytes())
    assert failed(capsys, 1, "1", str(tmp_path)) == (
        f"headrace: {tmp_path}: request 1 lies before what the journal keeps, or never was\n"
    )
    said = failed(capsys, 1, "1", str(tmp_path), "--decision")
    assert re.search(r"decision 1 is not kept: the journal begins with decision \d+$", said)
    live = next(
        frame.event.request.id
        for frame in frames(segment_paths(kept / "journal")[0].read_bytes())
        if isinstance(frame, Record)
        and isinstance(frame.event, RequestArrived)
        and main(["explain", str(frame.event.request.id), str(tmp_path), "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["request_id"] == live
    assert (found["entry"], found["ended"]["reason"]) == (None, "restarted")
    assert "how it was let in is not told" in found["notes"][0]
    assert text(capsys, str(live), str(tmp_path)).startswith(f"Request {live}.\n")
    by_log = told(capsys, "1", str(tmp_path), "--log", str(kept / "log"))
    assert by_log["entry"]["request_id"] == 1, "the log remembers longer"


def test_a_damaged_journal_tells_no_more_than_follows(
    kept: Path, tmp_path: Path, capsys: Output
) -> None:
    content = segment_paths(kept / "journal")[0].read_bytes()
    out: list[bytes] = []
    index, broken, arrived = 0, None, []
    for frame in frames(content):
        changed = frame
        if isinstance(frame, Record):
            event = frame.event
            if broken is None and isinstance(event, RequestArrived):
                arrived.append(event.request.id)
            if broken is None and isinstance(event, Ended) and event.usage is not None:
                usage = replace(event.usage, cached_tokens=3)
                changed, broken = replace(frame, event=replace(event, usage=usage)), index
            index += 1
        out.append(frame_bytes(changed))
    path = tmp_path / "edited.journal"
    path.write_bytes(b"".join(out))
    stories = [told(capsys, str(request), str(path)) for request in arrived]
    cut = [found["notes"] for found in stories if found["ended"] is None]
    assert cut
    for notes in cut:
        assert notes[0].startswith(f"record {broken} of the journal does not follow")
    assert all(found["entry"] is not None for found in stories)
    torn = tmp_path / "torn.journal"
    torn.write_bytes((3).to_bytes(4, "big") + b"abc")
    assert "no frame at byte 0" in failed(capsys, 2, "1", str(torn))
    assert "no frame at byte 0" in failed(capsys, 2, "1", str(torn), "--decision")
