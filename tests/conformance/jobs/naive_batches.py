"""A store of files and batches in dictionaries, beside the plain store of jobs: what every store must do."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from headrace.ports.batch import (
    Batch,
    File,
    FileId,
    LineError,
    Purpose,
    Stage,
    checked,
    closed,
    finalizing,
    unwanted,
    written,
)
from headrace.ports.batches import (
    BATCHES_PAGE_MAX,
    FILES_PAGE_MAX,
    PIECE_BYTES,
    STEP_BYTES,
    STEP_JOBS,
    Declined,
    Entry,
    Hold,
    Kept,
    Page,
    Progress,
)
from headrace.ports.job import BatchId, Job, State, UnixNs
from headrace.ports.jobs import Limits, Put, Swept
from tests.conformance.jobs.naive import LIVE, NaiveJobs
from tests.conformance.jobs.naive import Entry as JobEntry

EVER = UnixNs((1 << 63) - 1)


class Paper(Struct):
    """A file with its content."""

    file: File
    content: bytes = b""
    seen: bool = False


class Row(Struct):
    """A batch, and who has it."""

    batch: Batch
    turn: int
    owner: str | None = None
    until: int = 0
    term: int = 0


class NaiveBatches(NaiveJobs):
    """The same as a `BatchStore`."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.papers: dict[FileId, Paper] = {}
        self.rows: dict[BatchId, Row] = {}

    def _room(self, size: int) -> bool:
        limits = self.naive.limits
        had = sum(len(one.content) for one in self.papers.values())
        return had + size <= limits.store_bytes * limits.put_share

    async def open_file(self, file: File) -> Declined | None:
        mine = [
            one
            for one in self.papers.values()
            if one.file.tenant == file.tenant
            and one.file.purpose is Purpose.BATCH
            and one.file.until_ns > file.created_ns
        ]
        if len(mine) >= self.naive.limits.tenant_files:
            return Declined.TENANT_FILES
        self.papers[file.id] = Paper(file)
        return None

    async def append(self, file: FileId, data: bytes) -> Declined | None:
        if not self._room(len(data)):
            return Declined.STORE_FULL
        if file not in self.papers:
            return Declined.NO_FILE
        self.papers[file].content += data
        return None

    async def keep_file(self, file: File) -> Declined | None:
        paper = self.papers.get(file.id)
        if paper is None or paper.file.until_ns <= file.created_ns:
            return Declined.NO_FILE
        paper.file, paper.seen = file, True
        return None

    def _seen(self, tenant: str, now: UnixNs) -> list[File]:
        return [
            replace(one.file, bytes=len(one.content))
            for one in self.papers.values()
            if one.seen and one.file.tenant == tenant and one.file.until_ns > now
        ]

    async def file(self, tenant: str, file: FileId, now: UnixNs) -> File | None:
        return next((one for one in self._seen(tenant, now) if one.id == file), None)

    async def files(
        self, tenant: str, page: Page, purpose: Purpose | None, now: UnixNs
    ) -> list[File]:
        mine = [one.file.id for one in self.papers.values() if one.file.tenant == tenant]
        asked = [one for one in self._seen(tenant, now) if purpose in (None, one.purpose)]
        behind = _behind(mine, page)
        found = [one for one in asked if one.id in behind]
        return (found if page.ascending else found[::-1])[: min(page.limit, FILES_PAGE_MAX + 1)]

    async def piece(self, file: FileId, nth: int) -> bytes | None:
        paper = self.papers.get(file)
        at = nth * PIECE_BYTES
        return (paper.content[at : at + PIECE_BYTES] or None) if paper is not None else None

    async def delete_file(self, tenant: str, file: FileId, now: UnixNs) -> bool:
        paper = self.papers.get(file)
        if paper is None or paper.file.tenant != tenant or not now < paper.file.until_ns < EVER:
            return False
        paper.file = replace(paper.file, until_ns=now)
        return True

    async def put_batch(self, batch: Batch) -> Progress | Declined:
        for row in self.rows.values():
            had = row.batch
            if batch.key is not None and (had.tenant, had.key) == (batch.tenant, batch.key):
                same = (had.input_file, had.endpoint, had.window, had.metadata, had.keep_ns)
                told = (batch.input_file, batch.endpoint, batch.window, batch.metadata)
                found = self._progress(had)
                return found if same == (*told, batch.keep_ns) else Declined.KEY_MISMATCH
        file = await self.file(batch.tenant, batch.input_file, batch.created_ns)
        if file is None or file.purpose is not Purpose.BATCH:
            return Declined.NO_FILE
        open_ = [
            one.batch
            for one in self.rows.values()
            if one.batch.tenant == batch.tenant and not one.batch.is_over
        ]
        if len(open_) >= self.naive.limits.tenant_batches:
            return Declined.TENANT_BATCHES
        if not self._room(1):
            return Declined.STORE_FULL
        self.rows[batch.id] = Row(batch, batch.created_ns)
        return self._progress(batch)

    def _jobs(self, batch: BatchId) -> list[JobEntry]:
        return [one for one in self.naive.entries.values() if one.spec.batch == batch]

    def _progress(self, batch: Batch) -> Progress:
        states = Counter(one.state for one in self._jobs(batch.id) if one.state not in LIVE)
        done = states.pop(State.DONE, 0)
        return Progress(
            batch=batch,
            completed=batch.completed + done,
            failed=batch.failed + states.total(),
        )

    async def batch(self, tenant: str, batch: BatchId) -> Progress | None:
        row = self.rows.get(batch)
        return None if row is None or row.batch.tenant != tenant else self._progress(row.batch)

    async def batches(self, tenant: str, page: Page) -> list[Progress]:
        mine = [one.batch for one in self.rows.values() if one.batch.tenant == tenant]
        behind = _behind([one.id for one in mine], page)
        found = [self._progress(one) for one in mine if one.id in behind]
        return (found if page.ascending else found[::-1])[: min(page.limit, BATCHES_PAGE_MAX + 1)]

    async def cancel_batch(self, tenant: str, batch: BatchId, now: UnixNs) -> bool:
        row = self.rows.get(batch)
        if row is None or row.batch.tenant != tenant:
            return False
        if row.batch.stage is Stage.IN_PROGRESS and self._has_ended(row.batch):
            return False
        row.batch = unwanted(row.batch, now)
        return row.batch.stage is Stage.CANCELLING and self._cancel_some(row.batch, now)

    def _has_ended(self, batch: Batch) -> bool:
        return not batch.left and all(one.state not in LIVE for one in self._jobs(batch.id))

    def _cancel_some(self, batch: Batch, now: UnixNs) -> bool:
        jobs = self._jobs(batch.id)
        queued = [one for one in jobs if one.state is State.QUEUED][:STEP_JOBS]
        running = [one for one in jobs if one.state is State.CLAIMED]
        self.naive.cancel(batch.tenant, [one.spec.id for one in (*queued, *running)], now)
        return len(queued) == STEP_JOBS

    async def take_batch(self, owner: str, until: UnixNs, now: UnixNs) -> Hold | None:
        ready = [one for one in self.rows.values() if one.until <= now and self._has_work(one)]
        if not ready:
            return None
        row = min(ready, key=lambda one: one.turn)
        row.owner, row.until, row.turn, row.term = owner, until, now, row.term + 1
        return Hold(batch=row.batch, owner=owner, term=row.term)

    def _has_work(self, row: Row) -> bool:
        batch = row.batch
        if batch.is_over:
            return False
        states = {one.state for one in self._jobs(batch.id)}
        return (
            batch.stage in (Stage.VALIDATING, Stage.FINALIZING)
            or batch.left > 0
            or states.isdisjoint(LIVE)
            or (batch.stage is Stage.CANCELLING and State.QUEUED in states)
        )

    def _given_back(self, hold: Hold, until: int = 0) -> Row | None:
        row = self.rows.get(hold.batch.id)
        if row is None or (row.owner, row.term) != (hold.owner, hold.term):
            return None
        row.until = until
        return row

    def _held(self, hold: Hold) -> Row | None:
        row = self._given_back(hold)
        return None if row is None or row.batch.is_over else row

    async def hold_batch(self, hold: Hold, until: UnixNs) -> bool:
        return self._given_back(hold, until) is not None

    async def leave_batch(self, hold: Hold) -> None:
        self._given_back(hold)

    async def check_batch(
        self, hold: Hold, lines: int, errors: tuple[LineError, ...], now: UnixNs
    ) -> bool:
        row = self._held(hold)
        if row is None:
            return False
        row.batch = checked(row.batch, lines, errors, now)
        return True

    async def enqueue(
        self, hold: Hold, entries: Sequence[Entry], rest: UnixNs, now: UnixNs
    ) -> list[Job] | None:
        row = self._held(hold)
        if row is None:
            return None
        batch, jobs = row.batch, list[Job]()
        for one in entries:
            unwanted_state = State.CANCELLED if batch.stage is Stage.CANCELLING else State.EXPIRED
            if unwanted_state is State.EXPIRED and batch.deadline_ns > now:
                (put,) = self.naive.put([(one.spec, one.body)])
                if not isinstance(put, Put):
                    break
                jobs.append(put.job)
                continue
            self.naive.seq += 1
            entry = JobEntry(spec=one.spec, seq=self.naive.seq, body=b"", asked=b"")
            self.naive.entries[one.spec.id] = entry
            entry.end(unwanted_state, now)
            jobs.append(entry.job())
        if not jobs:
            row.until = rest
            return []
        read = entries[len(jobs) - 1].end
        row.batch = replace(batch, put=batch.put + len(jobs), read=read)
        return jobs

    async def write_out(
        self, hold: Hold, names: tuple[FileId, FileId], now: UnixNs
    ) -> Batch | None:
        row = self._held(hold)
        if row is None:
            return None
        if row.batch.stage is Stage.CANCELLING:
            self._cancel_some(row.batch, now)
        if not self._has_ended(row.batch):
            return row.batch
        batch, size = finalizing(row.batch, now), 0
        for one in self._jobs(batch.id)[:STEP_JOBS]:
            if size > STEP_BYTES:
                break
            line = written(one.job(), one.result)
            size += len(line)
            batch = self._told(batch, one.state, line, names, now)
            del self.naive.entries[one.spec.id]
        if not self._jobs(batch.id):
            batch = closed(batch, now)
            for file, kind in ((batch.output_file, "output"), (batch.error_file, "error")):
                if file is not None:
                    paper = self.papers[file]
                    name, until = f"{batch.id}_{kind}.jsonl", UnixNs(now + batch.keep_ns)
                    paper.file = replace(paper.file, name=name, created_ns=now, until_ns=until)
                    paper.seen = True
        row.batch = batch
        return batch

    def _told(
        self, batch: Batch, state: State, line: bytes, names: tuple[FileId, FileId], now: UnixNs
    ) -> Batch:
        done = state is State.DONE
        file = batch.output_file if done else batch.error_file
        if file is None:
            file = names[0] if done else names[1]
            begun = File(
                id=file,
                tenant=batch.tenant,
                purpose=Purpose.BATCH_OUTPUT,
                name="",
                created_ns=now,
                until_ns=EVER,
            )
            self.papers[file] = Paper(begun)
        self.papers[file].content += line
        if done:
            return replace(batch, completed=batch.completed + 1, output_file=file)
        expired = batch.expired + (state is State.EXPIRED)
        return replace(batch, failed=batch.failed + 1, expired=expired, error_file=file)

    async def recover(self, now: UnixNs, alive: frozenset[str]) -> Swept:
        for row in self.rows.values():
            if row.owner not in alive:
                row.until = 0
        for paper in self.papers.values():
            if not alive and not paper.seen and now < paper.file.until_ns < EVER:
                paper.file = replace(paper.file, until_ns=now)
        return self.naive.recover(now, alive)

    async def purge_files(self, now: UnixNs) -> bool:
        needed = {one.batch.input_file for one in self.rows.values() if one.batch.reads}
        for file, paper in list(self.papers.items()):
            if paper.file.until_ns <= now and file not in needed:
                del self.papers[file]
        for ident, row in list(self.rows.items()):
            if row.batch.ended_ns is not None and row.batch.ended_ns + row.batch.keep_ns <= now:
                del self.rows[ident]
        return False

    async def kept(self) -> Kept:
        stages = Counter(one.batch.stage for one in self.rows.values())
        size = sum(len(one.content) for one in self.papers.values())
        return Kept(files=len(self.papers), bytes=size, batches=dict(sorted(stages.items())))


def _behind(idents: Sequence[str], page: Page) -> set[str]:
    if page.after is None:
        return set(idents)
    if page.after not in idents:
        return set()
    at = idents.index(page.after)
    return set(idents[at + 1 :] if page.ascending else idents[:at])
