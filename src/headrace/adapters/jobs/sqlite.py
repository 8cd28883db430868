"""A durable store of jobs in one SQLite file, for asyncio: no operation waits on the loop.

One thread has the connection and does one operation after another; what waits for it is bounded. Other
processes may use the same file: SQLite's lock makes their transactions take turns. Troubles of the disk
become `JobStoreError`s, and are told once each, not once for every operation that meets them.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.adapters.jobs.batches import BatchTables
from headrace.adapters.jobs.schema import opened
from headrace.model.ids import TenantId
from headrace.policy.fairness.claims import ClaimOrder
from headrace.ports.batch import Batch, File, FileId, LineError, Purpose
from headrace.ports.batches import Declined, Entry, Hold, Kept, Page, Progress
from headrace.ports.job import BatchId, Job, JobId, JobSpec, Lease, UnixNs
from headrace.ports.jobs import (
    Cancel,
    Claim,
    ClaimAsk,
    Ending,
    Finished,
    JobStoreError,
    Limits,
    Put,
    Refused,
    Renewal,
    Result,
    StoreBusyError,
    StoreFaultError,
    StoreFullError,
    Swept,
    Tally,
)

T = TypeVar("T")

BUSY_MS = 10_000
"""How long an operation waits for another process, in its thread. 10 s: hundreds of transactions."""
PENDING_MAX = 1_000
"""Operations that wait for the thread; one more is refused."""

_KINDS: dict[int, type[JobStoreError]] = {
    sqlite3.SQLITE_FULL: StoreFullError,
    sqlite3.SQLITE_BUSY: StoreBusyError,
    sqlite3.SQLITE_LOCKED: StoreBusyError,
}
_PRIMARY = 0xFF
"""The part of a code of SQLite that says of which kind it is."""


def store_error(error: sqlite3.Error | OSError) -> JobStoreError:
    """Return what a trouble of SQLite or its file means to callers."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return _KINDS.get(code & _PRIMARY, StoreFaultError)(str(error))


class SqliteJobs:
    """A `BatchStore` in a file."""

    def __init__(
        self,
        path: Path,
        *,
        limits: Limits | None = None,
        busy_ms: int = BUSY_MS,
        tell: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """Open or make the file; raises `JobStoreError`.

        `tell` gets a line when the store gets into trouble, into another, and out of it.
        """
        limits = limits or Limits()
        try:
            self._tables = BatchTables(opened(path, limits, busy_ms), limits)
        except (sqlite3.Error, OSError) as error:
            meant = store_error(error)
            raise type(meant)(f"{path}: {meant}") from error
        self._path, self._tell = path, tell
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jobs")
        self._pending = 0
        self._trouble: JobStoreError | None = None

    @property
    def trouble(self) -> str | None:
        """Why the last operation failed; None: it did not."""
        return None if self._trouble is None else str(self._trouble)

    async def _do(self, call: Callable[[], T]) -> T:
        if self._pending >= PENDING_MAX:
            raise StoreBusyError(f"{self._pending} operations wait")
        self._pending += 1
        done = asyncio.get_running_loop().run_in_executor(self._thread, call)
        done.add_done_callback(self._passed)
        try:
            found = await done
        except sqlite3.Error as error:
            meant = store_error(error)
            self._note(meant)
            raise meant from error
        self._note(None)
        return found

    def _passed(self, _done: object) -> None:
        self._pending -= 1

    def _note(self, trouble: JobStoreError | None) -> None:
        """Remember how the store is, and tell if that is news."""
        before, self._trouble = self._trouble, trouble
        if type(before) is type(trouble):
            return
        self._tell(f"{self._path}: {'works again' if trouble is None else trouble}")

    async def put(self, jobs: Sequence[tuple[JobSpec, bytes]]) -> list[Put | Refused]:
        """See `JobStore` and `BatchStore`, here and below."""
        return await self._do(lambda: self._tables.put(jobs))

    async def claim(self, ask: ClaimAsk, order: ClaimOrder, now: UnixNs) -> list[Claim]:
        return await self._do(lambda: self._tables.claim(ask, order, now))

    async def renew(self, leases: Sequence[Lease], until: UnixNs) -> list[Renewal]:
        return await self._do(lambda: self._tables.renew(leases, until))

    async def finish(self, endings: Sequence[tuple[Lease, Ending]], now: UnixNs) -> list[Finished]:
        return await self._do(lambda: self._tables.finish(endings, now))

    async def release(self, leases: Sequence[Lease], now: UnixNs) -> list[bool]:
        return await self._do(lambda: self._tables.release(leases, now))

    async def cancel(self, tenant: TenantId, jobs: Sequence[JobId], now: UnixNs) -> list[Cancel]:
        return await self._do(lambda: self._tables.cancel(tenant, jobs, now))

    async def get(self, tenant: TenantId, job: JobId) -> Job | None:
        return await self._do(lambda: self._tables.get(tenant, job))

    async def result(self, tenant: TenantId, job: JobId) -> Result | None:
        return await self._do(lambda: self._tables.result(tenant, job))

    async def page(
        self, tenant: TenantId, *, after: int = 0, limit: int = 100, batch: BatchId | None = None
    ) -> list[Job]:
        return await self._do(lambda: self._tables.page(tenant, after, limit, batch))

    async def counts(self) -> list[Tally]:
        return await self._do(self._tables.counts)

    async def oldest(self) -> UnixNs | None:
        return await self._do(self._tables.oldest)

    async def sweep(self, now: UnixNs) -> Swept:
        return await self._do(lambda: self._tables.sweep(now))

    async def recover(self, now: UnixNs, alive: frozenset[str]) -> Swept:
        return await self._do(lambda: self._tables.recover(now, alive))

    async def purge(self, now: UnixNs) -> int:
        return await self._do(lambda: self._tables.purge(now))

    async def open_file(self, file: File) -> Declined | None:
        return await self._do(lambda: self._tables.open_file(file))

    async def append(self, file: FileId, data: bytes) -> Declined | None:
        return await self._do(lambda: self._tables.append(file, data))

    async def keep_file(self, file: File) -> Declined | None:
        return await self._do(lambda: self._tables.keep_file(file))

    async def file(self, tenant: TenantId, file: FileId, now: UnixNs) -> File | None:
        return await self._do(lambda: self._tables.file(tenant, file, now))

    async def files(
        self, tenant: TenantId, page: Page, purpose: Purpose | None, now: UnixNs
    ) -> list[File]:
        return await self._do(lambda: self._tables.files(tenant, page, purpose, now))

    async def piece(self, file: FileId, nth: int) -> bytes | None:
        return await self._do(lambda: self._tables.piece(file, nth))

    async def delete_file(self, tenant: TenantId, file: FileId, now: UnixNs) -> bool:
        return await self._do(lambda: self._tables.delete_file(tenant, file, now))

    async def put_batch(self, batch: Batch) -> Progress | Declined:
        return await self._do(lambda: self._tables.put_batch(batch))

    async def batch(self, tenant: TenantId, batch: BatchId) -> Progress | None:
        return await self._do(lambda: self._tables.batch(tenant, batch))

    async def batches(self, tenant: TenantId, page: Page) -> list[Progress]:
        return await self._do(lambda: self._tables.batches(tenant, page))

    async def cancel_batch(self, tenant: TenantId, batch: BatchId, now: UnixNs) -> bool:
        return await self._do(lambda: self._tables.cancel_batch(tenant, batch, now))

    async def take_batch(self, owner: str, until: UnixNs, now: UnixNs) -> Hold | None:
        return await self._do(lambda: self._tables.take_batch(owner, until, now))

    async def hold_batch(self, hold: Hold, until: UnixNs) -> bool:
        return await self._do(lambda: self._tables.hold_batch(hold, until))

    async def leave_batch(self, hold: Hold) -> None:
        await self._do(lambda: self._tables.leave_batch(hold))

    async def check_batch(
        self, hold: Hold, lines: int, errors: tuple[LineError, ...], now: UnixNs
    ) -> bool:
        return await self._do(lambda: self._tables.check_batch(hold, lines, errors, now))

    async def enqueue(
        self, hold: Hold, entries: Sequence[Entry], rest: UnixNs, now: UnixNs
    ) -> list[Job] | None:
        return await self._do(lambda: self._tables.enqueue(hold, entries, rest, now))

    async def write_out(
        self, hold: Hold, names: tuple[FileId, FileId], now: UnixNs
    ) -> Batch | None:
        return await self._do(lambda: self._tables.write_out(hold, names, now))

    async def purge_files(self, now: UnixNs) -> bool:
        return await self._do(lambda: self._tables.purge_files(now))

    async def kept(self) -> Kept:
        return await self._do(self._tables.kept)

    async def close(self) -> None:
        """Finish what waits, then close the file."""
        await self._do(self._tables.close)
        self._thread.shutdown(wait=False)
