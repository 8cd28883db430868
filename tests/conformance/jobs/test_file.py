"""The file of the durable store: who may read it, which ones are refused, and what its troubles look like."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from headrace.adapters.jobs.schema import VERSION
from headrace.adapters.jobs.sqlite import PENDING_MAX, SqliteJobs
from headrace.model.ids import TenantId
from headrace.ports.batch import FileId
from headrace.ports.batches import Kept
from headrace.ports.job import JobId, State
from headrace.ports.jobs import (
    SWEEP_MAX,
    Ending,
    Finished,
    Limits,
    Put,
    Refused,
    Result,
    StoreBusyError,
    StoreFaultError,
    StoreFullError,
    Swept,
)
from headrace.units import MIB, Bytes
from tests.conformance.jobs.batching import filed, paper
from tests.conformance.jobs.scenes import DONE, ask, at, finish, ids, order, put, spec, state

ACME = TenantId("acme")


def content(path: Path) -> bytes:
    """Return what is in a file."""
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the file is to be."""
    return tmp_path / "jobs.db"


@pytest.mark.asyncio
async def test_everything_is_there_after_a_close(path: Path) -> None:
    store = SqliteJobs(path)
    await put(store, spec("a", "x"), spec("b", "y", key="k"), spec("c", "y"))
    (claim,) = await store.claim(ask(1), order(), at(0))
    await finish(store, claim.lease, DONE, 1)
    before = (await store.page(TenantId("x")), await store.page(TenantId("y")))
    await store.close()
    store = SqliteJobs(path)
    assert (await store.page(TenantId("x")), await store.page(TenantId("y"))) == before
    assert await store.result(TenantId("x"), JobId("a")) == DONE.result
    (claim,) = await store.claim(ask(1), order(), at(1))
    assert claim.job.spec.id == "b", "whose turn it is was remembered"
    await store.close()


@pytest.mark.asyncio
async def test_no_file_of_it_is_for_others_eyes(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT, 0o644))
    store = SqliteJobs(path)
    await put(store, spec("a"))
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()}
    assert modes == dict.fromkeys(["jobs.db", "jobs.db-wal", "jobs.db-shm"], 0o600)
    await store.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("over", ["done", "cancelled", "expired"])
async def test_nothing_of_a_prompt_is_left_once_its_job_is_over(path: Path, over: str) -> None:
    store = SqliteJobs(path)
    secret = b"a prompt of somebody's" * 1_000
    await put(store, spec("a", deadline=10), body=secret)
    if over == "done":
        (claim,) = await store.claim(ask(), order(), at(0))
        await finish(store, claim.lease, DONE, 1)
    elif over == "cancelled":
        await store.cancel(ACME, [JobId("a")], at(1))
    else:
        await store.sweep(at(10))
    assert await state(store, "a") is State(over)
    await store.close()
    assert b"of somebody's" not in content(path)
    assert [one.name for one in path.parent.iterdir()] == ["jobs.db"]


@pytest.mark.asyncio
async def test_nothing_of_a_file_is_left_once_it_is_gone(path: Path) -> None:
    store = SqliteJobs(path)
    await filed(store, paper("a"), b"a prompt of somebody's" * 100_000)
    await filed(store, paper("b", until=10), b"a prompt of somebody's")
    assert await store.delete_file(ACME, FileId("a"), at(1))
    while await store.purge_files(at(10)):
        pass
    await store.close()
    assert b"of somebody's" not in content(path)


@pytest.mark.asyncio
@pytest.mark.parametrize("version", [0, VERSION + 1])
async def test_a_file_of_another_version_is_refused_unchanged(path: Path, version: int) -> None:
    await SqliteJobs(path).close()
    with sqlite3.connect(path) as sql:
        sql.execute(f"pragma user_version = {version}")
    sql.close()
    before = content(path)
    with pytest.raises(
        StoreFaultError, match=f"version {version}, this program's are of {VERSION}"
    ):
        SqliteJobs(path)
    assert content(path) == before


@pytest.mark.asyncio
async def test_a_file_of_an_older_version_is_brought_up_with_all_that_is_in_it(path: Path) -> None:
    with sqlite3.connect(path) as sql:
        sql.executescript(Path(__file__).with_name("version-1.sql").read_text("ascii"))
    sql.close()
    store = SqliteJobs(path)
    assert [one.state for one in await store.page(ACME)] == [
        State.DONE,
        State.CLAIMED,
        State.QUEUED,
    ]
    assert await store.result(ACME, JobId("done")) == DONE.result
    assert [(one.state, one.jobs) for one in await store.counts()] == [
        (State.CLAIMED, 1),
        (State.DONE, 1),
        (State.QUEUED, 1),
    ]
    await store.recover(at(3), frozenset())
    assert sorted(ids(await store.claim(ask(), order(), at(3)))) == ["held", "waits"]
    assert await store.kept() == Kept()
    await store.close()
    await SqliteJobs(path).close()


def test_a_file_that_is_something_else_is_refused_unchanged(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreFaultError, match=r"jobs\.db: .*not a database"):
        SqliteJobs(path)
    assert path.read_bytes() == b"no database at all" * 100
    path.unlink()
    with sqlite3.connect(path) as sql:
        sql.execute("create table other (x)")
    sql.close()
    before, mode = path.read_bytes(), path.stat().st_mode
    with pytest.raises(StoreFaultError, match="no file of jobs"):
        SqliteJobs(path)
    assert (path.read_bytes(), path.stat().st_mode) == (before, mode)


def test_a_file_that_cannot_be_had_is_told_with_its_path(path: Path) -> None:
    with pytest.raises(StoreFaultError, match="missing/jobs"):
        SqliteJobs(path.parent / "missing" / "jobs.db")


@pytest.mark.asyncio
async def test_a_lock_that_another_keeps_is_told_once_and_passes(path: Path) -> None:
    told: list[str] = []
    store = SqliteJobs(path, busy_ms=0, tell=told.append)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin immediate")
    for _ in range(3):
        with pytest.raises(StoreBusyError) as caught:
            await put(store, spec("a"))
        assert caught.value.retryable
    assert store.trouble == "database is locked"
    assert await store.get(ACME, JobId("a")) is None, "looking is not locked out"
    other.execute("rollback")
    other.close()
    await put(store, spec("a"))
    await put(store, spec("b"))
    assert [line.rpartition(": ")[2] for line in told] == ["database is locked", "works again"]
    await store.close()


@pytest.mark.asyncio
async def test_a_full_store_takes_no_job_but_the_answers_to_those_it_has(path: Path) -> None:
    store = SqliteJobs(path, limits=Limits(store_bytes=Bytes(2 * MIB), lost_max=2))
    body, taken = b"x" * 100_000, 0
    while isinstance((await store.put([(spec(f"{taken}"), body)]))[0], Put):
        taken += 1
    assert taken > 5
    assert await store.put([(spec("more"), body)]) == [Refused.STORE_FULL]
    answer = Ending(state=State.DONE, result=Result(status=200, body=b"y" * 100_000))
    for claim in await store.claim(ask(), order(), at(0)):
        assert await finish(store, claim.lease, answer, 1) is Finished.STORED
    assert len(content(path)) <= 2 * MIB
    assert await store.purge(at(10**6)) == taken
    await put(store, spec("more"), body=body)
    await store.close()


@pytest.mark.asyncio
async def test_what_finds_no_room_is_told_once_and_leaves_nothing_behind(path: Path) -> None:
    told: list[str] = []
    limits = Limits(store_bytes=Bytes(MIB), put_share=100)
    store = SqliteJobs(path, limits=limits, tell=told.append)
    await put(store, spec("a"))
    (claim,) = await store.claim(ask(), order(), at(0))
    whole = [(spec("b"), b"small"), (spec("c"), b"x" * 2 * MIB)]
    for _ in range(2):
        with pytest.raises(StoreFullError):
            await store.put(whole)
    big = Ending(state=State.DONE, result=Result(status=200, body=b"x" * 2 * MIB))
    with pytest.raises(StoreFullError):
        await finish(store, claim.lease, big, 1)
    assert len(told) == 1
    assert [job.spec.id for job in await store.page(ACME)] == ["a"]
    assert await finish(store, claim.lease, DONE, 1) is Finished.STORED
    assert len(told) == 2
    await store.close()


@pytest.mark.asyncio
async def test_what_somebody_was_told_is_flushed_and_what_can_be_done_again_is_not(
    path: Path,
) -> None:
    store = SqliteJobs(path)
    levels: dict[str, str] = {}
    for name in (
        "put",
        "claim",
        "renew",
        "cancel",
        "release",
        "finish",
        "sweep",
        "recover",
        "purge",
    ):
        statements: list[str] = []
        store._tables._sql.set_trace_callback(statements.append)
        arguments: dict[str, tuple[object, ...]] = {
            "claim": (ask(), order(), at(0)),
            "cancel": (ACME, [], at(0)),
            "recover": (at(0), frozenset()),
            "put": ([],),
            "renew": ([], at(0)),
            "finish": ([], at(0)),
            "release": ([], at(0)),
        }
        await getattr(store, name)(*arguments.get(name, (at(0),)))
        begins = statements.index("begin immediate")
        levels[name] = statements[begins - 1].removeprefix("pragma synchronous = ")
    assert {name for name, level in levels.items() if level == "full"} == {
        "put",
        "cancel",
        "finish",
    }
    assert set(levels.values()) == {"full", "normal"}
    await store.close()


@pytest.mark.asyncio
async def test_nothing_past_its_deadline_is_handed_out_though_a_sweep_leaves_some(
    path: Path,
) -> None:
    store = SqliteJobs(path)
    await put(store, *(spec(f"{n}", deadline=10) for n in range(SWEEP_MAX + 50)))
    await put(store, spec("far", priority=1))
    assert ids(await store.claim(ask(), order(), at(10))) == ["far"]
    assert await store.sweep(at(10)) == Swept(expired=50)
    assert (await store.purge(at(10**6)), await store.purge(at(10**6))) == (SWEEP_MAX, 50)
    await store.close()


@pytest.mark.asyncio
async def test_what_waits_for_the_thread_is_bounded(path: Path) -> None:
    store = SqliteJobs(path)
    store._pending = PENDING_MAX
    with pytest.raises(StoreBusyError):
        await store.counts()
    store._pending = 0
    assert await store.counts() == []
    await store.close()


@pytest.mark.asyncio
async def test_looking_for_work_reads_no_more_rows_for_a_longer_queue(path: Path) -> None:
    store = SqliteJobs(path)
    sql = store._tables._sql
    await put(store, *(spec(f"{n}", "hog") for n in range(50)), spec("few", "few"))
    plans: dict[str, list[str]] = {}
    for name in ("_NEXT", "_DUE", "_LAPSED", "_HELD", "_LINES", "_LIVE"):
        query = getattr(__import__("headrace.adapters.jobs.tables", fromlist=[name]), name)
        values = [None] * query.count("?")
        plans[name] = [row[3] for row in sql.execute(f"explain query plan {query}", values)]
    scans = {name for name, plan in plans.items() if any("SCAN" in step for step in plan)}
    sorts = {name for name, plan in plans.items() if any("B-TREE" in step for step in plan)}
    assert (scans - {"_HELD"}, sorts) == (set(), set()), plans
    assert "job_lease" in plans["_HELD"][0]
    await store.close()
