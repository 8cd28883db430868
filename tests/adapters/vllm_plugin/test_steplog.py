"""The writer of the step log: nothing is lost below its bounds, and what is lost is told."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.adapters.vllm_plugin import steplog
from headrace.adapters.vllm_plugin.steplog import NAME_MAX, StepWriter
from headrace.model.ids import ClassName, TenantId
from headrace.model.steplog import Alive, Arrived, Ended, Head, Line, Note, Step
from headrace.units import MIB, NS_PER_S, InstantNs, Tokens

HEAD = Head(
    engine="vllm 0.32.0",
    mode="enforce",
    started_unix_ms=1_700_000_000_000,
    block_tokens=16,
    blocks=640,
    ordering="edf",
    batching="paced",
    running_limit=32,
    token_budget=Tokens(2_048),
)
DECODER = msgspec.json.Decoder(Line)


def arrived(n: int, **more: Any) -> Arrived:
    """Return a request."""
    row: dict[str, Any] = {
        "n": n,
        "request": f"cmpl-{n}",
        "at_ns": InstantNs(n),
        "tenant": TenantId("a"),
        "slo_class": ClassName("chat"),
        "prompt_tokens": Tokens(10),
    }
    return Arrived(**{**row, **more})


def ended(n: int) -> Ended:
    """Return its end."""
    return Ended(n=n, reason="stop", output_tokens=Tokens(1), cached_tokens=Tokens(0))


def step(number: int, **more: Any) -> Step:
    """Return a step, one millisecond after the one before."""
    return Step(step=number, at_ns=InstantNs(number * 1_000_000), **more)


def lines(path: Path) -> list[Head | Step | Note]:
    """Return the lines of a file, all of which are whole."""
    return [DECODER.decode(line) for line in path.read_bytes().splitlines(keepends=True)]


def written(path: Path, put: Iterable[Step | Note], **more: Any) -> StepWriter:
    """Write lines, and close."""
    writer = StepWriter(path, HEAD, **more)
    for line in put:
        writer.put(line)
    writer.close()
    return writer


def test_nothing_is_lost_below_the_bound_and_only_the_owner_may_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    put = [step(n, decodes=(n, n + 1)) for n in range(1_000)]
    note = Note(at_ns=InstantNs(1), text="batching fell back: no profile")
    writer = written(path, [*put, note])
    assert writer.dropped == 0
    assert lines(path) == [HEAD, *put, note]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_closing_twice_and_putting_after_it_is_harmless(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    writer = written(path, [])
    writer.close()
    writer.put(step(1))
    assert lines(path) == [HEAD]


def test_the_file_of_an_earlier_life_is_kept_as_the_one_before(tmp_path: Path) -> None:
    path, before = tmp_path / "steps.jsonl", tmp_path / "steps.jsonl.1"
    written(path, [step(1)])
    written(path, [step(2)])
    assert (lines(before), lines(path)) == ([HEAD, step(1)], [HEAD, step(2)])
    written(path, [step(3)])
    assert (lines(before), lines(path)) == ([HEAD, step(2)], [HEAD, step(3)])


def test_names_from_outside_are_cut_and_made_text(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    row = arrived(1, request="x" * 1_000, tenant=TenantId("\ud800"))
    written(path, [step(1, arrived=(row,))])
    told = lines(path)[1]
    assert isinstance(told, Step)
    assert told.arrived == (replace(row, request="x" * NAME_MAX, tenant=TenantId("?")),)


# The bound of the file ---------------------------------------------------------------------------


def test_a_full_file_becomes_the_one_before_and_each_reads_alone(tmp_path: Path) -> None:
    path, before = tmp_path / "steps.jsonl", tmp_path / "steps.jsonl.1"
    long = tuple(range(10_000))  # 49 KB a line
    put = [
        step(
            1,
            arrived=tuple(map(arrived, range(5))),
            started=(0, 1, 2),
            decodes=long,
        ),
        step(2, preempted=(1,), ended=(ended(0),), decodes=long),
        *(step(n, decodes=long) for n in range(3, 32)),
    ]
    writer = written(path, put, mib=1)
    assert writer.dropped == 0
    old, new = lines(before), lines(path)
    assert [*old[1:], *new[1:]] == put, "nothing is lost at the turn"
    assert old[0] == HEAD
    assert new[0] == replace(
        HEAD,
        alive=(
            Alive(arrived=arrived(1), started=True, running=False),
            Alive(arrived=arrived(2), started=True, running=True),
            Alive(arrived=arrived(3), started=False, running=False),
            Alive(arrived=arrived(4), started=False, running=False),
        ),
    )
    assert before.stat().st_size <= MIB
    assert stat.S_IMODE(before.stat().st_mode) == 0o600


def test_two_files_are_all_there_ever_is(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    long = tuple(range(10_000))
    written(path, [step(n, decodes=long) for n in range(100)], mib=1)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["steps.jsonl", "steps.jsonl.1"]
    assert all(one.stat().st_size <= MIB for one in tmp_path.iterdir())
    last = lines(path)[-1]
    assert last == step(99, decodes=long)


def test_a_line_larger_than_the_bound_has_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    huge = tuple(range(10**6, 10**6 + 150_000))
    writer = written(path, [step(1), step(2, decodes=huge), step(3)], mib=1)
    assert writer.dropped == 0
    assert lines(path) == [HEAD, step(3)]


# The bound of the queue --------------------------------------------------------------------------


class Gate:
    """Holds up the writer's thread where it encodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, self._held, encode = Event(), Event(), steplog._encode

        def held(line: object) -> bytes:
            self._held.set()
            assert self._open.wait(60)
            return encode(line)

        monkeypatch.setattr(steplog, "_encode", held)

    def reached(self) -> None:
        """Wait until the thread stands before it."""
        assert self._held.wait(60)

    def open(self) -> None:
        """Let it pass."""
        self._open.set()


def test_what_a_full_queue_has_no_room_for_is_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gate = tmp_path / "steps.jsonl", Gate(monkeypatch)
    writer = StepWriter(path, HEAD, queue_max=3)
    gate.reached()  # at the head: what is put stays in the queue
    for n in range(10):
        writer.put(step(n))
    assert writer.dropped == 7
    gate.open()
    writer.close()
    lost = Note(at_ns=InstantNs(9_000_000), text="7 lines lost: the queue to the disk was full")
    assert lines(path) == [HEAD, step(0), step(1), step(2), lost]


def test_the_next_step_tells_what_became_of_whom_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gate = tmp_path / "steps.jsonl", Gate(monkeypatch)
    writer = StepWriter(path, HEAD, queue_max=1)
    gate.reached()
    first = step(0, arrived=tuple(map(arrived, range(4))), started=(0, 1, 2))
    writer.put(first)
    writer.put(step(1, arrived=(arrived(4), arrived(5)), started=(4,), preempted=(1, 2)))
    writer.put(step(2, resumed=(1,), ended=(ended(0), ended(4)), decodes=(1,)))
    writer.put(step(3, started=(3,)))
    gate.open()
    while writer._queue.qsize():
        pass
    writer.put(step(4, resumed=(2,), decodes=(1, 3)))
    writer.close()
    assert writer.dropped == 3
    assert lines(path) == [
        HEAD,
        first,
        Note(at_ns=InstantNs(4_000_000), text="3 lines lost: the queue to the disk was full"),
        step(
            4,
            arrived=(arrived(5),),
            started=(3,),
            resumed=(1, 2),
            decodes=(1, 3),
            ended=(ended(0),),
        ),
    ]


# The disk ----------------------------------------------------------------------------------------


class Disk:
    """Takes what is written, or does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.tries = 0
        write = os.write

        def tried(file: int, content: bytes) -> int:
            self.tries += 1
            if not self.full:
                return write(file, content)
            return write(file, content[: len(content) // 2])

        monkeypatch.setattr("headrace.adapters.journal.append.os.write", tried)


def test_a_full_disk_is_told_once_and_the_log_goes_on_when_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, disk, told = tmp_path / "steps.jsonl", Disk(monkeypatch), list[str]()
    file = steplog._File(path, HEAD, MIB, told.append)
    first = step(0, arrived=(arrived(0),))
    file.begin()
    file.put(first)
    disk.full = True
    file.put(step(1, arrived=(arrived(1),), started=(0,)))
    tries = disk.tries
    for n in range(2, 900):
        file.put(step(n))
    assert disk.tries == tries, "a full disk is not tried at every step"
    later = step(1_001)
    file.put(later)
    assert disk.tries == tries + 1
    disk.full = False
    last = replace(later, step=2_001, at_ns=InstantNs(2_001_000_000))
    file.put(last)
    file.close()
    assert told == [f"step log {path}: {os.strerror(errno.ENOSPC).lower()}"]
    lost = Note(at_ns=last.at_ns, text="900 lines lost: the file could not be written")
    merged = replace(last, arrived=(arrived(1),), started=(0,))
    assert lines(path) == [HEAD, first, lost, merged]
    assert file.lost.total == 900


def test_no_room_for_the_head_of_the_next_file_loses_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, disk, told = tmp_path / "steps.jsonl", Disk(monkeypatch), list[str]()
    file = steplog._File(path, HEAD, 1_000, told.append)
    file.begin()
    long = tuple(range(200))
    file.put(step(0, decodes=long))
    disk.full = True
    file.put(step(1, decodes=long))
    assert not path.exists()
    disk.full = False
    after = Step(step=2, at_ns=InstantNs(2 * NS_PER_S))
    file.put(after)
    file.close()
    assert lines(path.with_name("steps.jsonl.1")) == [HEAD, step(0, decodes=long)]
    assert lines(path) == [
        HEAD,
        Note(at_ns=after.at_ns, text="1 line lost: the file could not be written"),
        after,
    ]


@pytest.mark.parametrize("kind", ["no folder", "a folder", "a pipe"])
def test_a_path_that_takes_no_file_is_told_once_and_the_engine_goes_on(
    tmp_path: Path, kind: str
) -> None:
    path, told = tmp_path / "there" / "steps.jsonl", list[str]()
    if kind == "a folder":
        path.mkdir(parents=True)
    elif kind == "a pipe":
        path.parent.mkdir()
        os.mkfifo(path)
    writer = written(path, [step(n) for n in range(10)], told=told.append)
    assert writer.dropped == 10
    assert told == [
        f"step log {path}: "
        + (
            "no such file or directory"
            if kind == "no folder"
            else "it is there and no regular file"
        )
    ]


def test_a_line_that_is_no_json_costs_only_itself(tmp_path: Path) -> None:
    path, told = tmp_path / "steps.jsonl", list[str]()
    bad = step(1, arrived=(arrived(7),), ended=(replace(ended(7), reason="\ud800"),))
    put = [step(0), bad, step(2, started=(7,), preempted=(7,), ended=(ended(7),))]
    writer = written(path, put, told=told.append)
    assert lines(path) == [HEAD, put[0], put[2]]
    assert writer.dropped == 1
    assert len(told) == 1


# Any life of requests ----------------------------------------------------------------------------


@st.composite
def lives(draw: st.DrawFn) -> list[Step]:
    """Draw steps in which requests arrive, start, are preempted, resumed and end as they may."""
    waiting, running, gone = list[int](), list[int](), list[int]()
    steps = list[Step]()
    for number in range(draw(st.integers(1, 30))):
        came = [len(waiting) + len(running) + len(gone)] if draw(st.booleans()) else []
        fresh = [n for n in waiting if n not in {m for s in steps for m in s.started}] + came
        held = [n for n in waiting if n not in fresh]
        started = [n for n in fresh if draw(st.booleans())]
        resumed = [n for n in held if draw(st.booleans())]
        preempted = [n for n in running if draw(st.integers(0, 3)) == 0]
        waiting = [n for n in waiting + came + preempted if n not in started + resumed]
        running = [n for n in running if n not in preempted] + started + resumed
        over = [n for n in waiting + running if draw(st.integers(0, 3)) == 0]
        waiting, running = ([n for n in who if n not in over] for who in (waiting, running))
        gone += over
        steps.append(
            step(
                number,
                arrived=tuple(map(arrived, came)),
                started=tuple(started),
                resumed=tuple(resumed),
                preempted=tuple(preempted),
                ended=tuple(map(ended, over)),
            )
        )
    return steps


def alive(steps: Iterable[Step]) -> dict[int, Alive]:
    """Return who is alive after the steps."""
    found: dict[int, Alive] = {}
    for one in steps:
        steplog._follow(found, one)
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=lives(), lost=st.sets(st.integers(0, 28)))
def test_whatever_is_lost_who_is_alive_stays_known(steps: list[Step], lost: set[int]) -> None:
    missing, kept = steplog._Lost("drawn"), list[Step]()
    for index, one in enumerate(steps):
        if index in lost and index < len(steps) - 1:
            missing.add(one)
        else:
            kept.append(missing.within(one))
            missing.clear()
    assert alive(kept) == alive(steps)


def test_the_writer_needs_msgspec_alone() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import headrace.adapters.vllm_plugin.steplog\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(names - set(sys.stdlib_module_names)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    # msgspec takes typing_extensions along where there is one.
    assert set(ran.stdout.split()) - {"typing_extensions"} == {"headrace", "msgspec"}
