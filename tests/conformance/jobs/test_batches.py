"""Every store of files and batches, operation by operation."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from headrace.adapters.jobs.sqlite import SqliteJobs
from headrace.model.ids import TenantId
from headrace.ports.batch import Batch, FileId, LineError, Purpose, Stage
from headrace.ports.batches import (
    PIECE_BYTES,
    STEP_JOBS,
    BatchStore,
    Declined,
    Hold,
    Kept,
    Page,
    Progress,
)
from headrace.ports.engine import Route
from headrace.ports.job import BatchId, JobId, State
from headrace.ports.jobs import Ending, Limits, Result
from headrace.units import MIB, Bytes
from tests.conformance.jobs.batching import ACME, batch, entries, filed, lines, paper
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.conformance.jobs.scenes import ask, at, finish, order, put, spec

OTHER = TenantId("other")
LIMITS = Limits(
    tenant_jobs=1_200,
    tenant_files=3,
    tenant_batches=2,
    result_bytes=Bytes(MIB),
    store_bytes=Bytes(8 * MIB),
    lost_max=1,
)
STORES: dict[str, Callable[[Path], BatchStore]] = {
    "naive": lambda _folder: NaiveBatches(LIMITS),
    "sqlite": lambda folder: SqliteJobs(folder / "jobs.db", limits=LIMITS),
}
NAMES = FileId("out"), FileId("err")
REST = at(5)

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture(params=list(STORES))
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BatchStore]:
    """Yield each store, empty."""
    made = STORES[request.param](tmp_path)
    yield made
    await made.close()


async def taken(store: BatchStore, now: float, owner: str = "one", until: float = 1_000) -> Hold:
    """Take the next batch."""
    hold = await store.take_batch(owner, at(until), at(now))
    assert hold is not None
    return hold


async def begun(store: BatchStore, ident: str = "b", lines: int = 3, deadline: float = 100) -> None:
    """Have a batch all of whose lines are jobs."""
    if await store.file(ACME, FileId("in"), at(0)) is None:
        await filed(store, paper("in"))
    assert isinstance(await store.put_batch(batch(ident, deadline=deadline)), Progress)
    assert await store.check_batch(await taken(store, 0), lines, (), at(0))
    for first in range(0, lines, STEP_JOBS):
        some = entries(ident, range(first, min(lines, first + STEP_JOBS)), deadline=deadline)
        jobs = await store.enqueue(await taken(store, 0), some, REST, at(0))
        assert jobs is not None
        assert len(jobs) == len(some)


async def worked(store: BatchStore, ident: str, state: State, now: float, body: bytes) -> None:
    """End a job that waits."""
    claims = await store.claim(ask(until=1_000), order(), at(now))
    for claim in claims:
        if claim.job.spec.id == ident:
            result = Result(status=200 if state is State.DONE else 400, body=body)
            await finish(store, claim.lease, Ending(state=state, result=result), now)
        else:
            await store.release([claim.lease], at(now))


async def closing(store: BatchStore, now: float) -> Batch:
    """Write a batch out, step by step."""
    found: Batch | None = None
    while found is None or not found.is_over:
        found = await store.write_out(await taken(store, now), NAMES, at(now))
        assert found is not None
    return found


# Files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1, 2], [PIECE_BYTES - 1, 1, 1], [3 * PIECE_BYTES + 5, 9], [0]])
async def test_content_comes_back_in_pieces_however_it_came(
    store: BatchStore, sizes: list[int]
) -> None:
    content = b""
    await store.open_file(paper("a"))
    for nth, size in enumerate(sizes):
        part = bytes([65 + nth]) * size
        content += part
        assert await store.append(FileId("a"), part) is None
    await store.keep_file(paper("a"))
    found = await store.file(ACME, FileId("a"), at(1))
    assert found is not None
    assert found.bytes == len(content)
    pieces = [await store.piece(FileId("a"), n) for n in range(-(-len(content) // PIECE_BYTES))]
    assert b"".join(one or b"" for one in pieces) == content
    assert all(len(one or b"") == PIECE_BYTES for one in pieces[:-1])
    assert await store.piece(FileId("a"), len(pieces)) is None


async def test_nobody_sees_a_file_that_is_still_coming_or_anothers_or_past_its_time(
    store: BatchStore,
) -> None:
    await store.open_file(paper("coming"))
    await filed(store, paper("short", until=10))
    assert await store.file(ACME, FileId("coming"), at(1)) is None
    assert await store.file(OTHER, FileId("short"), at(1)) is None
    assert not await store.delete_file(OTHER, FileId("short"), at(1))
    assert [one.id for one in await store.files(ACME, Page(limit=9), None, at(1))] == ["short"]
    assert await store.files(OTHER, Page(limit=9), None, at(1)) == []
    assert await store.file(ACME, FileId("short"), at(10)) is None
    assert await store.files(ACME, Page(limit=9), None, at(10)) == []
    while await store.purge_files(at(2_000)):
        pass
    assert await store.kept() == Kept()


async def test_files_are_listed_from_the_newest_and_page_by_page(store: BatchStore) -> None:
    for ident in ("a", "b", "c"):
        await filed(store, paper(ident))

    async def listed(**page: Any) -> list[str]:
        found = await store.files(ACME, Page(**{"limit": 9, **page}), Purpose.BATCH, at(1))
        return [one.id for one in found]

    assert await listed() == ["c", "b", "a"]
    assert await listed(ascending=True) == ["a", "b", "c"]
    assert await listed(limit=2) == ["c", "b"]
    assert await listed(limit=2, after="b") == ["a"]
    assert await listed(after="b", ascending=True) == ["c"]
    assert await listed(after="none") == []
    assert await store.files(ACME, Page(limit=9), Purpose.BATCH_OUTPUT, at(1)) == []


async def test_a_tenant_has_so_many_files_and_the_store_so_many_bytes(store: BatchStore) -> None:
    for ident in ("a", "b", "c"):
        await filed(store, paper(ident))
    assert await store.open_file(paper("d")) is Declined.TENANT_FILES
    assert await store.open_file(paper("d", OTHER)) is None
    assert await store.delete_file(ACME, FileId("a"), at(0))
    assert await store.file(ACME, FileId("a"), at(0)) is None
    assert await store.open_file(paper("e")) is None, "what is deleted counts no more"
    found = None
    for _ in range(8):
        found = found or await store.append(FileId("e"), bytes(MIB))
    assert found is Declined.STORE_FULL
    assert await store.append(FileId("none"), b"x") in (Declined.NO_FILE, Declined.STORE_FULL)


async def test_a_file_that_was_given_up_while_it_came_is_not_there(store: BatchStore) -> None:
    for ident, purged in (("a", False), ("b", True)):
        late = paper(ident, until=1)
        assert await store.open_file(late) is None
        assert await store.append(late.id, b"x") is None
        while purged and await store.purge_files(at(1)):
            pass
        kept = replace(late, created_ns=at(1), until_ns=at(9))
        assert await store.keep_file(kept) is Declined.NO_FILE
        assert await store.file(ACME, late.id, at(1)) is None


# Batches ----------------------------------------------------------------------------------------


async def test_what_is_left_of_the_store_is_not_for_batches_either(store: BatchStore) -> None:
    await filed(store, paper("in"))
    size = MIB
    while size:
        if await store.append(FileId("in"), bytes(size)) is Declined.STORE_FULL:
            size //= 2
    assert await store.put_batch(batch("b")) is Declined.STORE_FULL


async def test_a_batch_is_made_of_its_tenants_own_file(store: BatchStore) -> None:
    await filed(store, paper("in"))
    await filed(store, paper("out", purpose=Purpose.BATCH_OUTPUT))
    for wrong in (batch("b", "none"), batch("b", "out"), batch("b", tenant=OTHER)):
        assert await store.put_batch(wrong) is Declined.NO_FILE
    assert isinstance(await store.put_batch(batch("b", metadata={"a": "b"})), Progress)
    assert isinstance(await store.put_batch(batch("c")), Progress)
    assert await store.put_batch(batch("d")) is Declined.TENANT_BATCHES
    found = await store.batch(ACME, BatchId("b"))
    assert found is not None
    assert (found.batch, found.completed, found.failed) == (batch("b", metadata={"a": "b"}), 0, 0)
    assert await store.batch(OTHER, BatchId("b")) is None
    assert await store.batches(OTHER, Page(limit=9)) == []
    listed = await store.batches(ACME, Page(limit=1))
    assert [one.batch.id for one in listed] == ["c"]
    listed = await store.batches(ACME, Page(limit=9, after="c"))
    assert [one.batch.id for one in listed] == ["b"]


async def test_an_idempotency_key_finds_the_batch_that_was_put_first(store: BatchStore) -> None:
    await filed(store, paper("in"))
    await filed(store, paper("theirs", OTHER))
    first = await store.put_batch(batch("b", key="k"))
    assert (
        first == await store.put_batch(batch("c", key="k")) == await store.batch(ACME, BatchId("b"))
    )
    for changed in ({"window": "1h"}, {"endpoint": Route.EMBEDDINGS}, {"metadata": {"a": "b"}}):
        assert await store.put_batch(batch("c", key="k", **changed)) is Declined.KEY_MISMATCH
    assert isinstance(await store.put_batch(batch("d", "theirs", key="k", tenant=OTHER)), Progress)
    await store.cancel_batch(ACME, BatchId("b"), at(1))
    found = await store.put_batch(batch("c", key="k"))
    assert isinstance(found, Progress)
    assert (found.batch.id, found.batch.stage) == ("b", Stage.CANCELLED)
    await store.purge_files(at(51))
    found = await store.put_batch(batch("c", key="k"))
    assert isinstance(found, Progress)
    assert found.batch.id == "c"


async def test_each_line_is_answered_once_in_the_file_that_is_right(store: BatchStore) -> None:
    await begun(store, lines=4)
    await worked(store, "job_b_2", State.DONE, 1, b'{\n "a": "\xc3\xa9"}')
    await worked(store, "job_b_0", State.FAILED, 1, b"no JSON")
    await worked(store, "job_b_3", State.DONE, 2, b"{}")
    found = await store.batch(ACME, BatchId("b"))
    assert found is not None
    assert (found.batch.stage, found.completed, found.failed) == (Stage.IN_PROGRESS, 2, 1)
    assert await store.take_batch("one", at(9), at(3)) is None, "one of them waits"
    await store.sweep(at(100))
    over = await closing(store, 101)
    assert (over.stage, over.completed, over.failed) == (Stage.EXPIRED, 2, 2)
    assert (over.finalizing_ns, over.ended_ns) == (at(101), at(101))
    output, errors = await lines(store, over.output_file), await lines(store, over.error_file)
    assert [(one["custom_id"], one["response"]["body"]) for one in output] == [
        ("2", {"a": "é"}),
        ("3", {}),
    ]
    assert [one["custom_id"] for one in errors] == ["0", "1"]
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"] == "no JSON"
    assert errors[1]["error"]["code"] == "batch_expired"
    seen = await store.file(ACME, over.output_file or FileId(""), at(102))
    assert seen is not None
    assert (seen.name, seen.purpose) == ("b_output.jsonl", Purpose.BATCH_OUTPUT)
    assert await store.page(ACME, batch=BatchId("b")) == [], "its jobs are forgotten"
    after = await store.batch(ACME, BatchId("b"))
    assert after is not None
    assert (after.completed, after.failed) == (2, 2)
    assert await store.take_batch("one", at(999), at(200)) is None


@pytest.mark.parametrize("body", [b'{"a":"\xff"}', b"[" * 100_000, b"", b'{"a":1} 2'])
async def test_whatever_an_engine_said_is_one_line_of_json(store: BatchStore, body: bytes) -> None:
    await begun(store, lines=1)
    await worked(store, "job_b_0", State.DONE, 1, body)
    (line,) = await lines(store, (await closing(store, 2)).output_file)
    assert line["response"]["body"] == body.decode("utf-8", "replace")


async def test_answers_of_a_batch_are_kept_until_they_are_written(store: BatchStore) -> None:
    await begun(store)
    await put(store, spec("single", keep=60))
    for ident in ("job_b_0", "job_b_1", "single"):
        await worked(store, ident, State.DONE, 1, b"{}")
    assert await store.purge(at(10_000)) == 1, "the one that is of no batch"
    await worked(store, "job_b_2", State.DONE, 2, b"{}")
    over = await closing(store, 3)
    assert len(await lines(store, over.output_file)) == 3
    assert over.error_file is None
    assert over.stage is Stage.COMPLETED


async def test_a_large_batch_goes_step_by_step(store: BatchStore) -> None:
    await begun(store, lines=2 * STEP_JOBS + 7, deadline=10)
    while (await store.sweep(at(10))).more:
        pass
    steps = 0
    found: Batch | None = None
    while found is None or not found.is_over:
        found = await store.write_out(await taken(store, 11), NAMES, at(11))
        steps += 1
        assert found is not None
        seen = await store.file(ACME, NAMES[1], at(11))
        assert (seen is not None) == found.is_over, "nobody sees half of it"
    assert steps == 3
    told = await lines(store, found.error_file)
    assert [one["custom_id"] for one in told] == [f"{n}" for n in range(2 * STEP_JOBS + 7)]


async def test_only_who_holds_a_batch_may_go_on_with_it(store: BatchStore) -> None:
    await filed(store, paper("in"))
    await store.put_batch(batch("b"))
    first = await taken(store, 0, until=10)
    assert await store.take_batch("two", at(20), at(9)) is None
    assert await store.hold_batch(first, at(12))
    second = await taken(store, 12, "two", until=30)
    assert not await store.hold_batch(first, at(40))
    assert not await store.check_batch(first, 2, (), at(13))
    assert await store.check_batch(second, 2, (), at(13))
    third, fourth = await taken(store, 13, "one", until=14), await taken(store, 14, "two")
    assert await store.enqueue(third, entries("b", range(2)), REST, at(14)) is None
    assert len(await store.enqueue(fourth, entries("b", range(1)), REST, at(14)) or []) == 1
    half = await taken(store, 15)
    assert (half.batch.put, half.batch.read) == (1, 10)
    assert await store.enqueue(half, entries("b", range(1, 2)), REST, at(15))
    for number in range(2):
        await worked(store, f"job_b_{number}", State.DONE, 16, b"{}")
    late, last = await taken(store, 17, until=18), await taken(store, 18, "two")
    assert await store.write_out(late, NAMES, at(18)) is None
    over = await store.write_out(last, NAMES, at(18))
    assert over is not None
    assert over.stage is Stage.COMPLETED
    assert await store.write_out(last, NAMES, at(19)) is None, "it is over"
    assert len(await lines(store, over.output_file)) == 2


async def test_what_a_dead_process_held_is_anothers_at_once(store: BatchStore) -> None:
    await filed(store, paper("in"))
    await store.put_batch(batch("b"))
    await taken(store, 0, "dead")
    await store.recover(at(1), frozenset({"dead"}))
    assert await store.take_batch("two", at(9), at(1)) is None
    await store.recover(at(1), frozenset())
    hold = await taken(store, 1, "two")
    await store.leave_batch(hold)
    assert (await taken(store, 1, "three")).term == 3


async def test_files_that_came_to_a_dead_process_are_given_up(store: BatchStore) -> None:
    await filed(store, paper("whole"))
    coming = [paper(ident) for ident in ("one", "two")]
    for one in coming:
        assert await store.open_file(one) is None
        assert await store.append(one.id, b"x") is None
    assert await store.open_file(paper("three", created_ns=at(1))) is Declined.TENANT_FILES
    await store.recover(at(1), frozenset({"alive"}))
    assert await store.keep_file(replace(coming[0], created_ns=at(1))) is None
    await store.recover(at(1), frozenset())
    assert await store.keep_file(replace(coming[1], created_ns=at(1))) is Declined.NO_FILE
    while await store.purge_files(at(1)):
        pass
    assert (await store.kept()).files == 2
    assert await store.open_file(paper("three", created_ns=at(1))) is None


async def test_answers_that_are_being_written_outlive_a_dead_process(store: BatchStore) -> None:
    await begun(store, lines=2 * STEP_JOBS, deadline=10)
    while (await store.sweep(at(10))).more:
        pass
    hold = await taken(store, 10)
    await store.write_out(hold, (FileId("out"), FileId("err")), at(10))
    await store.recover(at(11), frozenset())
    while await store.purge_files(at(9_999)):
        pass
    over = await closing(store, 12)
    assert len(await lines(store, over.error_file)) == 2 * STEP_JOBS


async def test_where_there_is_no_room_lines_wait(store: BatchStore) -> None:
    await filed(store, paper("in"))
    await put(store, *(spec(f"s{n}") for n in range(1_199)))
    await store.put_batch(batch("b"))
    await store.check_batch(await taken(store, 0), 3, (), at(0))
    jobs = await store.enqueue(await taken(store, 0), entries("b", range(3)), REST, at(0))
    assert [one.spec.custom_id for one in jobs or ()] == ["0"]
    rest = entries("b", range(1, 3))
    assert await store.enqueue(await taken(store, 1), rest, at(5), at(1)) == []
    assert await store.take_batch("one", at(99), at(4)) is None, "it rests"
    late = await store.enqueue(await taken(store, 100), rest, at(105), at(100))
    assert [one.state for one in late or ()] == [State.EXPIRED] * 2, "they need no room"
    await store.sweep(at(100))
    over = await closing(store, 101)
    assert (over.stage, over.expired) == (Stage.EXPIRED, 3)


async def test_a_file_at_fault_fails_its_batch(store: BatchStore) -> None:
    await filed(store, paper("in"))
    await store.put_batch(batch("b"))
    wrong = (LineError(code="c", message="m", line=3, param="p"),)
    assert await store.check_batch(await taken(store, 0), 9, wrong, at(2))
    found = await store.batch(ACME, BatchId("b"))
    assert found is not None
    assert (found.batch.stage, found.batch.errors) == (Stage.FAILED, wrong)
    assert await store.take_batch("one", at(99), at(3)) is None
    await store.purge_files(at(2 + 50))
    assert await store.batch(ACME, BatchId("b")) is None


# Cancelling -------------------------------------------------------------------------------------


async def test_a_cancelled_batch_runs_no_further_and_tells_of_each_line(store: BatchStore) -> None:
    await begun(store, lines=4)
    await worked(store, "job_b_1", State.DONE, 1, b"{}")
    (claim,) = await store.claim(ask(1, until=1_000), order(), at(1))
    assert not await store.cancel_batch(OTHER, BatchId("b"), at(2))
    assert not await store.cancel_batch(ACME, BatchId("b"), at(2))
    assert await store.claim(ask(), order(), at(2)) == []
    found = await store.batch(ACME, BatchId("b"))
    assert found is not None
    assert (found.batch.stage, found.batch.cancelling_ns) == (Stage.CANCELLING, at(2))
    job = await store.get(ACME, claim.lease.job)
    assert job is not None
    assert job.cancel_asked
    assert await store.take_batch("one", at(99), at(3)) is None, "one of them runs"
    await finish(store, claim.lease, Ending(state=State.CANCELLED), 4)
    over = await closing(store, 5)
    assert (over.stage, over.completed, over.failed) == (Stage.CANCELLED, 1, 3)
    codes = [one["error"]["code"] for one in await lines(store, over.error_file)]
    assert codes == ["batch_cancelled"] * 3
    assert not await store.cancel_batch(ACME, BatchId("b"), at(6)), "that changes nothing"


async def test_a_batch_cancelled_before_all_its_lines_were_jobs_tells_of_the_rest(
    store: BatchStore,
) -> None:
    await filed(store, paper("in"))
    await store.put_batch(batch("b"))
    await store.check_batch(await taken(store, 0), 3, (), at(0))
    await store.enqueue(await taken(store, 0), entries("b", range(1)), REST, at(0))
    await store.cancel_batch(ACME, BatchId("b"), at(1))
    jobs = await store.enqueue(await taken(store, 2), entries("b", range(1, 3)), REST, at(2))
    assert [one.state for one in jobs or ()] == [State.CANCELLED] * 2
    assert await store.claim(ask(), order(), at(2)) == []
    over = await closing(store, 3)
    assert (over.stage, over.failed) == (Stage.CANCELLED, 3)


async def test_many_jobs_are_cancelled_some_at_a_time_by_whoever_asks(store: BatchStore) -> None:
    await begun(store, lines=2 * STEP_JOBS + 1)
    assert await store.cancel_batch(ACME, BatchId("b"), at(1))
    found = await store.write_out(await taken(store, 2), NAMES, at(2))
    assert found is not None
    assert found.stage is Stage.CANCELLING
    assert not await store.cancel_batch(ACME, BatchId("b"), at(2))
    assert (await closing(store, 3)).failed == 2 * STEP_JOBS + 1


async def test_what_is_all_over_or_was_never_begun_is_cancelled_or_not(store: BatchStore) -> None:
    await begun(store, "b", lines=1)
    await worked(store, "job_b_0", State.DONE, 1, b"{}")
    await store.cancel_batch(ACME, BatchId("b"), at(2))
    assert (await closing(store, 3)).stage is Stage.COMPLETED
    await store.put_batch(batch("c"))
    hold = await taken(store, 4)
    await store.cancel_batch(ACME, BatchId("c"), at(5))
    found = await store.batch(ACME, BatchId("c"))
    assert found is not None
    assert (found.batch.stage, found.batch.ended_ns) == (Stage.CANCELLED, at(5))
    assert not await store.check_batch(hold, 3, (), at(6))


# Time -------------------------------------------------------------------------------------------


async def test_a_file_that_is_deleted_stays_for_the_batch_that_reads_it(store: BatchStore) -> None:
    await filed(store, paper("in"), b"content")
    await store.put_batch(batch("b"))
    assert await store.delete_file(ACME, FileId("in"), at(0))
    await store.purge_files(at(1))
    assert await store.piece(FileId("in"), 0) == b"content"
    await store.check_batch(await taken(store, 1), 2, (), at(1))
    await store.purge_files(at(1))
    assert await store.piece(FileId("in"), 0) == b"content"
    await store.enqueue(await taken(store, 1), entries("b", range(2)), REST, at(1))
    while await store.purge_files(at(1)):
        pass
    assert await store.piece(FileId("in"), 0) is None


async def test_answers_and_batch_are_forgotten_when_their_time_is_over(store: BatchStore) -> None:
    await begun(store, lines=1)
    await worked(store, "job_b_0", State.DONE, 1, b"{}")
    over = await closing(store, 2)
    assert over.output_file is not None
    assert await store.kept() == Kept(
        files=2,
        bytes=1 + len(await store.piece(over.output_file, 0) or b""),
        batches={Stage.COMPLETED: 1},
    )
    assert await store.file(ACME, over.output_file, at(51)) is not None
    assert await store.file(ACME, over.output_file, at(52)) is None
    while await store.purge_files(at(52)):
        pass
    assert await store.batch(ACME, BatchId("b")) is None
    assert (await store.kept()).files == 1
    assert await store.get(ACME, JobId("job_b_0")) is None
