"""`headrace steps`: what it tells of step logs, cut and turned over ones too, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from headrace.adapters.vllm_plugin.steplog import StepWriter
from headrace.cli import main
from headrace.model.ids import ClassName, TenantId
from headrace.model.steplog import Alive, Arrived, Ended, Head, Note, Step
from headrace.units import DurationNs, InstantNs, Tokens

Output = pytest.CaptureFixture[str]

HEAD = Head(
    engine="vllm 0.32.0",
    mode="enforce",
    started_unix_ms=1,
    block_tokens=16,
    blocks=640,
    ordering="edf",
    batching="paced",
    running_limit=32,
    token_budget=Tokens(2_048),
)


def arrived(n: int, tenant: str) -> Arrived:
    """Return a request of ten prompt tokens with a deadline of its own."""
    return Arrived(
        n=n,
        request=f"cmpl-{n}",
        at_ns=InstantNs(0),
        tenant=TenantId(tenant),
        slo_class=ClassName("chat"),
        prompt_tokens=Tokens(10),
        left_ms=100 - n,
        marked=True,
    )


def step(number: int, **more: object) -> Step:
    """Return a step of 2 ms, of which scheduling took 0.1 ms."""
    return msgspec.structs.replace(
        Step(
            step=number,
            at_ns=InstantNs(number * 2_000_000),
            schedule_ns=DurationNs(100_000),
            took_ns=DurationNs(2_000_000),
            running=2,
        ),
        **more,
    )


ROWS = (arrived(0, "a"), arrived(1, "a"), arrived(2, "b"), arrived(3, "b"))
STEPS = (
    step(1, arrived=ROWS, started=(1, 2), prefills=((1, 0, 10), (2, 0, 10))),
    step(2, decodes=(1, 2)),
    step(3, decodes=(1, 2), preempted=(), started=(0,), prefills=((0, 0, 10),)),
    step(
        4,
        decodes=(2,),
        preempted=(1,),
        ended=(Ended(n=2, reason="stop", output_tokens=Tokens(4), cached_tokens=Tokens(0)),),
    ),
)


def written(path: Path, *steps: Step | Note, head: Head = HEAD) -> Path:
    """Write a log as the engine would."""
    writer = StepWriter(path, head)
    for line in steps:
        writer.put(line)
    writer.close()
    return path


def told(capsys: Output, *paths: Path, flags: tuple[str, ...] = ()) -> list[dict[str, object]]:
    """Return what is told of the logs."""
    assert main(["steps", *map(str, paths), "--json", *flags]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: list[dict[str, object]] = json.loads(out)
    return found


def test_a_log_is_told_in_tables(tmp_path: Path, capsys: Output) -> None:
    note = Note(at_ns=InstantNs(9_000_000), text="batching fell back: no profile")
    path = written(tmp_path / "steps.jsonl", *STEPS, note)
    assert main(["steps", str(path)]) == 0
    assert capsys.readouterr() == (
        """\
steps.jsonl  (vllm 0.32.0, enforce, edf, paced)
  SPAN        8.00 ms
  STEPS       4, p50 2.00 ms, p99 2.00 ms
  SCHEDULING  p50 0.100 ms, p99 0.100 ms
  CONTENDED   3 steps: two tenants or more waited
  ORDER       50.0 % of 2 pairs started earliest deadline first

By tenant
  tenant  requests  ended  prompt  again  cached  output  service   share  of steps  queue p50      p99  preempted
  a              2      0      20      0       0       4       28  46.7 %         3    2.00 ms  6.00 ms          1
  b              2      1      10      0       0       4       18  53.3 %         3    2.00 ms  2.00 ms          0
  tokens: prompt computed, computed again, cached, output; share of what backlogged tenants got, of contended steps in which it waited

Prefill between tokens
  tenant  gaps  p50  p99  max
  a          1   10   10   10
  b          2    0   10   10
  prompt tokens, everybody's, computed between two decode steps of one request

By class
  class    requests  preempted
  chat            4          1

Steps by requests running
  running  steps  step p50      p99  scheduling p50       p99
      2-3      4   2.00 ms  2.00 ms        0.100 ms  0.100 ms

Notes
      s
  0.007  batching fell back: no profile
""",
        "",
    )


def test_json_has_the_same(tmp_path: Path, capsys: Output) -> None:
    (found,) = told(capsys, written(tmp_path / "steps.jsonl", *STEPS))
    assert (found["steps"], found["contended_steps"]) == (4, 3)
    assert found["order"] == {"pairs": 2, "kept": 1}
    (lighter,) = told(capsys, tmp_path / "steps.jsonl", flags=("--output-weight", "0.5"))
    assert lighter["tenants"] != found["tenants"]


def test_a_log_that_was_turned_over_is_one(tmp_path: Path, capsys: Output) -> None:
    (whole,) = told(capsys, written(tmp_path / "whole", *STEPS))
    before = written(tmp_path / "steps.1", *STEPS[:2])
    alive = tuple(
        Alive(arrived=row, started=row.n in {1, 2}, running=row.n in {1, 2}) for row in ROWS
    )
    after = written(tmp_path / "steps", *STEPS[2:], head=replace(HEAD, alive=alive))
    (found,) = told(capsys, after, before)
    assert found.pop("files") == ["steps.1", "steps"]
    whole.pop("files")
    assert found == whole
    (alone,) = told(capsys, after)
    assert alone["steps"] == 2


def test_two_lives_are_told_one_after_the_other(tmp_path: Path, capsys: Output) -> None:
    later = written(tmp_path / "b", *STEPS[:2], head=replace(HEAD, started_unix_ms=2))
    first = written(tmp_path / "c", *STEPS)
    assert [one["steps"] for one in told(capsys, later, first)] == [4, 2]


def test_a_cut_last_line_is_left_out(tmp_path: Path, capsys: Output) -> None:
    path = written(tmp_path / "steps.jsonl", *STEPS)
    path.write_bytes(path.read_bytes()[:-7])
    (found,) = told(capsys, path)
    assert found["steps"] == 3


def test_without_its_head_a_log_is_told_of_strangers(tmp_path: Path, capsys: Output) -> None:
    path = written(tmp_path / "steps.jsonl", *STEPS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[2:]))
    (found,) = told(capsys, path)
    assert (found["head"], found["steps"]) == (None, 3)
    tenants = found["tenants"]
    assert isinstance(tenants, list)
    assert [(one["tenant"], one["requests"]) for one in tenants] == [("?", 3)]
    assert main(["steps", str(path)]) == 0
    assert "STEPS" in capsys.readouterr().out


def test_a_log_of_no_step_is_told(tmp_path: Path, capsys: Output) -> None:
    (found,) = told(capsys, written(tmp_path / "steps.jsonl"))
    assert (found["steps"], found["tenants"]) == (0, [])


def changed(change: Callable[[list[bytes]], list[bytes]], path: Path) -> Path:
    """Write a log with its lines changed."""
    written(path, *STEPS)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda _: [], "{path}: holds no step log", id="empty"),
        pytest.param(
            lambda _: [b'{"model":"x"}\n'],
            "{path}: no step log of version 1: Object missing required field `kind`",
            id="something else",
        ),
        pytest.param(
            lambda lines: [lines[0].replace(b'"version":1', b'"version":9'), *lines[1:]],
            "{path}:1: version 9, this reads 1",
            id="of the future",
        ),
        pytest.param(
            lambda lines: [*lines[:2], b"{}\n", *lines[2:]],
            "{path}:3: Object missing required field `kind`",
            id="a broken line within",
        ),
        pytest.param(
            lambda lines: [*lines, lines[2]],
            "steps.jsonl: step 2 follows step 4: files of two engines, or one given twice",
            id="steps twice",
        ),
    ],
)
def test_what_is_no_log_is_refused_with_its_place(
    tmp_path: Path, capsys: Output, change: Callable[[list[bytes]], list[bytes]], said: str
) -> None:
    path = changed(change, tmp_path / "steps.jsonl")
    assert main(["steps", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"headrace: {said.format(path=path)}\n")


def test_a_file_that_is_not_there_is_told(tmp_path: Path, capsys: Output) -> None:
    assert main(["steps", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"headrace: {tmp_path / 'none'}: no such file or directory\n"
    assert main(["steps"]) == 2
    assert capsys.readouterr().err == "headrace: steps: expected a file\n"
