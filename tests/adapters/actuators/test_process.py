"""Groups of processes: every way up, every way down, and nothing left behind."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from headrace.adapters.actuators.process.log import CappedLog
from headrace.adapters.actuators.process.look import pause
from headrace.adapters.actuators.process.records import (
    KEPT,
    LOGS_KEPT,
    MARK,
    Child,
    Records,
    stat,
)
from headrace.gateway.clock import LoopClock
from headrace.model.ids import ReplicaName
from headrace.ports.actuator import Stage, stage_seconds
from headrace.units import later, seconds, to_seconds
from tests.adapters.actuators.scenes import POOL, lives, scene, until

pytestmark = pytest.mark.service
ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells of processes in /proc"
)
UP = [Stage.PLACED, Stage.LISTENING, Stage.HEALTHY, Stage.LOADED, Stage.READY]


@pytest.mark.asyncio
async def test_a_group_goes_through_every_stage_and_each_is_timed(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.start("g")
        await made.until("g", Stage.READY)
        assert made.stages("g") == [Stage.ASKED, *UP]
        group = made.group("g")
        assert (group.stage, group.ranks, group.running, group.pool) == (Stage.READY, 1, 1, POOL)
        (pid,) = made.pids("g")
        assert os.getsid(pid) == os.getpgid(pid) == pid, "a session of its own"
        made.stop("g")
        made.stop("g")
        await made.until("g", Stage.STOPPED)
        assert made.stages("g") == [Stage.ASKED, *UP, Stage.STOPPING, Stage.STOPPED]
        assert not lives(pid)
        assert made.actuator.groups() == ()
        told = list(made.actuator.record)
        assert told == made.heard
        took = stage_seconds(told)
        assert all(one >= 0 for one in took.values())
        assert sum(took.values()) == pytest.approx(to_seconds(told[-1].at - told[0].at))


@pytest.mark.asyncio
async def test_several_groups_have_ports_and_names_of_their_own(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.start("a", "b", "c")
        for name in "abc":
            await made.until(name, Stage.READY)
        assert len({group.url for group in made.actuator.groups()}) == 3
        with pytest.raises(AssertionError):
            made.start("b")
        made.stop("b")
        await made.until("b", Stage.STOPPED)
        assert [group.name for group in made.actuator.groups()] == ["a", "c"]
        made.start("b")
        await until(lambda: made.stages("b").count(Stage.READY) == 2)


@pytest.mark.asyncio
async def test_health_and_a_list_of_models_are_not_yet_a_token(tmp_path: Path) -> None:
    async with scene(tmp_path, "mute", start_s=1.5, restarts=0) as made:
        made.start("g")
        lost = await made.until("g", Stage.LOST)
        assert made.stages("g")[:5] == [Stage.ASKED, *UP[:-1]]
        assert "not ready" in lost.why
        await made.until("g", Stage.GIVEN_UP)
        assert made.actuator.groups() == (), "what it held is given back"


@pytest.mark.asyncio
async def test_one_that_dies_is_started_again_so_many_times_and_then_given_up(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, "dies", restarts=2) as made:
        made.start("g")
        over = await made.until("g", Stage.GIVEN_UP, life=3)
        lost = [event for event in made.heard if event.stage is Stage.LOST]
        assert [event.life for event in lost] == [1, 2, 3]
        assert all("rank 0 ended with 3" in event.why for event in lost)
        assert "lost 3 times" in over.why
        assert Stage.READY not in made.stages("g")


@pytest.mark.asyncio
async def test_one_that_is_lost_while_it_serves_comes_back_at_another_life(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.start("g")
        await made.until("g", Stage.READY)
        os.kill(made.pids("g")[0], signal.SIGKILL)
        await made.until("g", Stage.READY, life=2)
        assert made.stages("g", life=1)[-1] is Stage.LOST
        assert made.stages("g", life=2) == UP


@pytest.mark.asyncio
async def test_a_group_of_several_ranks_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    async with scene(tmp_path, ranks=3) as made:
        made.start("g")
        await made.until("g", Stage.READY)
        before = made.pids("g")
        assert (len(before), made.group("g").running) == (3, 3)
        os.kill(before[2], signal.SIGKILL)
        lost = await made.until("g", Stage.LOST)
        assert "rank 2" in lost.why
        assert not any(map(lives, before))
        await made.until("g", Stage.READY, life=2)


@pytest.mark.asyncio
async def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with scene(tmp_path, command=("no-such-program",)) as made:
        made.start("g")
        refused = await made.until("g", Stage.REFUSED)
        assert "no-such-program" in refused.why
        assert made.stages("g") == [Stage.ASKED, Stage.REFUSED]
        assert made.actuator.groups() == ()


@pytest.mark.asyncio
async def test_one_that_is_stopped_on_its_way_up_never_becomes_ready(tmp_path: Path) -> None:
    async with scene(tmp_path, "mute") as made:
        made.start("early", "late")
        made.stop("early")
        await made.until("early", Stage.STOPPED)
        assert made.stages("early") == [Stage.ASKED, Stage.STOPPING, Stage.STOPPED]
        await made.until("late", Stage.LOADED)
        made.stop("late")
        await made.until("late", Stage.STOPPED)
        assert made.stages("late")[-2:] == [Stage.STOPPING, Stage.STOPPED]


@pytest.mark.asyncio
async def test_what_is_deaf_to_being_asked_is_made_to_end_with_all_that_it_started(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, "deaf", "child") as made:
        made.start("g")
        await made.until("g", Stage.READY)
        found = re.search(r"child (\d+)", made.said("g"))
        assert found is not None
        child = int(found.group(1))
        assert lives(child)
        made.stop("g")
        await made.until("g", Stage.STOPPED)
        await until(lambda: not lives(child))


@pytest.mark.asyncio
async def test_a_leader_that_dies_takes_its_own_children_along(tmp_path: Path) -> None:
    async with scene(tmp_path, "child", restarts=0) as made:
        made.start("g")
        await made.until("g", Stage.READY)
        found = re.search(r"child (\d+)", made.said("g"))
        assert found is not None
        os.kill(made.pids("g")[0], signal.SIGKILL)
        await made.until("g", Stage.GIVEN_UP)
        await until(lambda: not lives(int(found.group(1))))


@pytest.mark.asyncio
async def test_a_child_gets_what_it_needs_of_our_environment_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-secret")
    monkeypatch.setenv("HEADRACE_SERVER__PORT", "1")
    async with scene(tmp_path, "tells", env={"GIVEN": "at {port} for {rank}"}) as made:
        made.start("g")
        await made.until("g", Stage.READY)
        said = made.said("g")
        port = made.group("g").url.rpartition(":")[2]
        assert f"GIVEN=at {port} for 0" in said
        assert "PATH=" in said
        for absent in ("sk-secret", "ENGINE_KEY", "HEADRACE_SERVER"):
            assert absent not in said


@pytest.mark.asyncio
async def test_a_log_keeps_the_newest_and_never_more_than_its_bound(tmp_path: Path) -> None:
    async with scene(tmp_path, "chatty", log_bytes=262_144) as made:
        made.start("g")
        await made.until("g", Stage.READY)
        made.stop("g")
        await made.until("g", Stage.STOPPED)
        logs = list(made.actuator._records.own.glob("*.log"))
        assert len(logs) == 2
        assert sum(path.stat().st_size for path in logs) <= 262_144
        assert made.said("g").endswith("all said\n")
        assert all(path.stat().st_mode & 0o077 == 0 for path in logs), "for us alone"
        assert made.actuator._records.own.stat().st_mode & 0o077 == 0


@pytest.mark.asyncio
async def test_a_mark_in_the_log_tells_of_a_stage(tmp_path: Path) -> None:
    async with scene(
        tmp_path, "mute", "tells", marks={"GIVEN=": Stage.LOADED}, env={"GIVEN": "1"}
    ) as made:
        made.start("g")
        await made.until("g", Stage.HEALTHY)
        stages = made.stages("g")
        assert stages.count(Stage.LOADED) == 1
        assert stages.index(Stage.LOADED) < stages.index(Stage.HEALTHY)


# What is left behind ---------------------------------------------------------------------------

OWNER = """
import asyncio, sys
from pathlib import Path
from tests.adapters.actuators.scenes import Scene, recipe
from headrace.ports.actuator import Stage

async def main():
    made = Scene(Path(sys.argv[1]), recipe(*sys.argv[2:]))
    made.start("a", "b")
    for name in "ab":
        await made.until(name, Stage.READY)
    print(*made.pids("a"), *made.pids("b"), made.actuator._records.own, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def owner(folder: Path, *wrong: str) -> "tuple[subprocess.Popen[str], list[int], Path]":
    """Start a process that has two groups; return it, their processes, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), *wrong],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    *pids, own = process.stdout.readline().split()
    return process, list(map(int, pids)), Path(own)


def killed(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@ON_LINUX
@pytest.mark.asyncio
async def test_no_child_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    process, pids, _ = owner(tmp_path, "deaf")
    try:
        assert all(map(lives, pids))
    finally:
        killed(process)
    await until(lambda: not any(map(lives, pids)))


@ON_LINUX
@pytest.mark.asyncio
async def test_the_next_one_ends_what_is_left_and_touches_nothing_of_one_that_lives(
    tmp_path: Path,
) -> None:
    process, pids, own = owner(tmp_path, "child")
    living, theirs, their_own = owner(tmp_path)
    try:
        said = "".join(path.read_text() for path in own.glob("*.log"))
        children = [int(pid) for pid in re.findall(r"child (\d+)", said)]
        killed(process)
        await until(lambda: not any(map(lives, pids)))
        assert all(map(lives, children)), "the kernel ends whom we started, not whom they did"
        async with scene(tmp_path) as made:
            assert sorted(made.actuator.swept) == sorted(children)
            await until(lambda: not any(map(lives, children)))
            assert all(map(lives, theirs))
            assert list(their_own.glob("*.json"))
            assert not list(own.glob("*.json"))
            assert list(own.glob("*.log")), "what they said is kept"
    finally:
        killed(process)
        killed(living)


@ON_LINUX
@pytest.mark.parametrize("differs", ["nothing", "start", "mark", "session"])
def test_a_process_id_that_is_used_again_is_nobody_to_end(tmp_path: Path, differs: str) -> None:
    mark = "ours"
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, MARK: "another" if differs == "mark" else mark},
        start_new_session=differs != "session",
    ) as other:
        try:
            found = stat(other.pid)
            assert found is not None
            started = found.started - (differs == "start")
            record = Child(pid=other.pid, started=started, mark=mark)
            gone = tmp_path / "4194303-1"
            gone.mkdir()
            gone.joinpath("g.0.json").write_bytes(msgspec.json.encode(record))
            swept = Records(tmp_path).sweep()
            assert swept == ((other.pid,) if differs == "nothing" else ())
            if differs == "nothing":
                assert other.wait() == -signal.SIGKILL
            else:
                assert other.poll() is None
        finally:
            other.kill()


def test_a_sweep_reads_whatever_is_there_and_keeps_few_folders(tmp_path: Path) -> None:
    for nth in range(KEPT + 3):
        gone = tmp_path / f"4194303-{nth}"
        gone.mkdir()
        gone.joinpath("g.0.json").write_bytes((b"", b"{", b"[]", b'{"pid": "x"}')[nth % 4])
        gone.joinpath("g.0.log").write_text("said")
    tmp_path.joinpath("of-somebody-else").mkdir()
    tmp_path.joinpath("a-file").write_text("")
    assert Records(tmp_path).sweep() == ()
    if sys.platform == "linux":
        assert len(list(tmp_path.glob("4194303-*"))) == KEPT
    assert tmp_path.joinpath("of-somebody-else").is_dir()


# What fails again and again, and what others clear away ----------------------------------------


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_what_can_never_start_is_tried_ever_more_rarely_by_whatever_name(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, command=("no-such-program",)) as made:
        for nth in range(30):
            made.start(f"g{nth}")
            await made.until(f"g{nth}", Stage.REFUSED)
    at = [to_seconds(one.at) for one in made.heard if one.stage is Stage.REFUSED]
    pauses = [round(after - before, 1) for before, after in pairwise(at)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 23]


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_logs_of_groups_that_are_over_are_kept_in_bounds(tmp_path: Path) -> None:
    async with scene(tmp_path, command=("no-such-program",), ranks=2) as made:
        for nth in range(LOGS_KEPT + 5):
            for rank in range(2):
                path = made.actuator._records.log_path(f"g{nth}", rank)
                path.write_text("said")
                path.with_suffix(".old.log").write_text("said")
            made.start(f"g{nth}")
            await made.until(f"g{nth}", Stage.REFUSED)
        kept = {path.name.split(".")[0] for path in made.actuator._records.own.iterdir()}
        assert kept == {f"g{nth}" for nth in range(5, LOGS_KEPT + 5)}


@pytest.mark.asyncio
async def test_groups_start_and_write_though_somebody_cleared_their_folder_away(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as made:
        made.start("a")
        await made.until("a", Stage.READY)
        shutil.rmtree(made.actuator._records.own)
        made.start("b")
        await made.until("b", Stage.READY)
        assert made.actuator.log_path(ReplicaName("b")).exists()


def test_a_log_whose_folder_is_gone_keeps_to_its_own_file_and_bound(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "g.log"
    path.parent.mkdir()
    log = CappedLog(path, 131_072)
    kept = os.dup(log._file)
    shutil.rmtree(path.parent)
    with (tmp_path / "another").open("wb") as other:  # takes whatever number is let go of
        for _ in range(10):
            log.put(b"x" * 40_000)
            assert os.fstat(kept).st_size <= 131_072
        assert os.fstat(other.fileno()).st_size == 0
        assert os.path.sameopenfile(kept, log._file)
    log.close()
    os.close(kept)


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_pause_that_is_over_as_its_waiter_goes_is_no_error() -> None:
    loop, wrong = asyncio.get_running_loop(), list[Exception]()
    clock = LoopClock(loop)
    clock.on_error = wrong.append
    waiting = asyncio.create_task(pause(clock, 1.0))

    def leave() -> None:  # in the same turn as the pause ends, and before it
        waiting.cancel()

    clock.call_at(later(clock.now(), seconds(1.0)), leave)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert wrong == []
