"""Processes that die or race over one file: every job ends exactly once, and nobody's work is done twice."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Self

import pytest

from headrace.adapters.jobs.sqlite import SqliteJobs
from headrace.model.ids import TenantId
from headrace.ports.batch import Stage
from headrace.ports.batches import Progress
from headrace.ports.job import OVER, BatchId, Job, JobId, State
from headrace.ports.jobs import Finished
from tests.conformance.jobs.batching import batch, filed, go_on, lines, paper
from tests.conformance.jobs.scenes import DONE, ask, at, finish, order, put, spec
from tests.conformance.jobs.worker import UNTIL

ACME, BETA = TenantId("acme"), TenantId("beta")
ROOT = Path(__file__).parents[3]


class Worker:
    """Another process."""

    def __init__(self, path: Path, owner: str) -> None:
        """Start it, and wait until it has the store open."""
        command = [sys.executable, "-m", "tests.conformance.jobs.worker", str(path), owner]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"

    def ask(self, command: str) -> None:
        """Give it something to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """Return the next thing it says; empty: it says nothing more."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def lines(self) -> Iterator[str]:
        """Yield what it says until it is over or dead."""
        while (told := self.line()) not in ("", "over"):
            yield told

    def kill(self) -> None:
        """Have it die where it stands."""
        self.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


async def whole(store: SqliteJobs) -> dict[str, Job]:
    """Return all jobs of both tenants."""
    pages = [await store.page(tenant, limit=1_000) for tenant in (ACME, BETA)]
    return {job.spec.id: job for page in pages for job in page}


LATE = [f"late{n}" for n in range(20)]
"""Past their deadline when a process is there again."""
UNWANTED = [f"not{n}" for n in range(20)]


async def fill(store: SqliteJobs) -> None:
    """Put 550 jobs, some of which are never to be done."""
    await put(store, *(spec(f"acme{n}") for n in range(400)))
    await put(store, *(spec(f"beta{n}", "beta") for n in range(110)))
    await put(store, *(spec(name, deadline=9, priority=1) for name in LATE))
    await put(store, *(spec(name, priority=1) for name in UNWANTED))


async def die_at_work(store: SqliteJobs, path: Path, said: int) -> tuple[list[str], set[str]]:
    """Have a process claim 50 jobs, work on and be killed once it has told of so many ends.

    Returns the ends it told of, and what was cancelled while it had it.
    """
    with Worker(path, "first") as worker:
        worker.ask("claim 50")
        running = worker.line().split()
        assert len(running) == 50
        stopped = [name for name in running if name.startswith("acme")][:5]
        cancelled = [JobId(name) for name in UNWANTED + stopped]
        assert len(set(await store.cancel(ACME, cancelled, at(6)))) == 2
        worker.ask("churn")
        told = [worker.line() for _ in range(said)]
        worker.kill()
        return [*told, *worker.lines()], set(stopped)


async def work_off(store: SqliteJobs) -> list[str]:
    """Do everything that is left; return what was handed out for it."""
    handed: list[str] = []
    while claims := await store.claim(ask(90, owner="second", until=UNTIL), order(), at(11)):
        for claim in claims:
            handed.append(claim.job.spec.id)
            assert await finish(store, claim.lease, DONE, 11) is Finished.STORED
    return handed


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("said", [1, 7, 60])
async def test_after_a_kill_each_job_ends_exactly_once(tmp_path: Path, said: int) -> None:
    path = tmp_path / "jobs.db"
    store = SqliteJobs(path)
    await fill(store)
    told, stopped = await die_at_work(store, path, said)
    await store.close()

    store = SqliteJobs(path)
    before = await whole(store)
    assert len(before) == 550, "none is lost"
    first = {name for name, job in before.items() if job.state is State.DONE}
    assert set(told) <= first, "whatever was told to be stored is"
    held = sum(job.state is State.CLAIMED for job in before.values())
    assert held >= 50
    swept = await store.recover(at(10), frozenset())
    assert (swept.requeued, swept.cancelled) == (held - len(stopped), len(stopped))
    assert swept.expired == len(LATE)

    handed = await work_off(store)
    after = await whole(store)
    ends = {state: {n for n, job in after.items() if job.state is state} for state in State}
    assert len(handed) == len(set(handed)), "none is handed out twice"
    assert not first & set(handed), "none ends twice"
    assert ends[State.DONE] == first | set(handed)
    assert ends[State.CANCELLED] == {*UNWANTED, *stopped}
    assert ends[State.EXPIRED] == set(LATE)
    assert len(after) == 550 == sum(len(names) for state, names in ends.items() if state in OVER)
    for name in first:
        result = await store.result(after[name].spec.tenant, JobId(name))
        assert result is not None
        assert result.body == b"first"
    await store.close()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_two_processes_that_claim_at_once_never_have_the_same_job(tmp_path: Path) -> None:
    """A claim is compared and set, under a lease (trap 22)."""
    path = tmp_path / "jobs.db"
    store = SqliteJobs(path)
    await put(store, *(spec(f"{n}") for n in range(300)))
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(path, owner)) for owner in ("left", "right")]
        for worker in workers:
            worker.ask("race")
        told = [list(worker.lines()) for worker in workers]
    assert Counter(told[0] + told[1]) == Counter({f"{n}": 1 for n in range(300)})
    for owner, names in zip(("left", "right"), told, strict=True):
        for name in names:
            result = await store.result(ACME, JobId(name))
            assert result is not None
            assert result.body == owner.encode()
    assert [(t.state, t.jobs) for t in await store.counts()] == [("done", 300)]
    await store.close()


@pytest.mark.slow
def test_processes_that_make_the_file_at_once_all_have_it(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    command = [sys.executable, "-m", "tests.conformance.jobs.worker", str(path), "any"]
    started = [
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    told = [process.communicate("")[0] for process in started]
    assert told == ["ready\n"] * 4


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("steps", [1, 5, 12, 25])
async def test_each_line_of_a_batch_is_answered_once_whoever_dies_or_races(
    tmp_path: Path, steps: int
) -> None:
    path, names = tmp_path / "jobs.db", ["a", "b", "c", "d", "e"]
    store = SqliteJobs(path)
    await filed(store, paper("in"))
    for name in names:
        assert isinstance(await store.put_batch(batch(name, deadline=1)), Progress)
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(Worker(path, f"w{n}")) for n in range(3))
        for worker in (first, second, third):
            worker.ask("batches 1050")
        list(islice(first.lines(), steps))
        first.kill()
        for worker in (second, third):
            list(worker.lines())
    await store.recover(at(5), frozenset())
    while hold := await store.take_batch("last", at(9), at(5)):
        await go_on(store, hold, 1_050, at(5))
    for name in names:
        found = await store.batch(ACME, BatchId(name))
        assert found is not None
        assert (found.batch.stage, found.failed) == (Stage.EXPIRED, 1_050)
        told = await lines(store, found.batch.error_file)
        assert [one["custom_id"] for one in told] == [f"{n}" for n in range(1_050)]
        assert found.batch.output_file is None
    assert await store.counts() == []
    await store.close()
