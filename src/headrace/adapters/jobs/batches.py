"""Batches in a SQLite file, beside their jobs: what becomes of both is one transaction.

As for jobs, the life of a batch is Python (`ports/batch.py`): a row is read, moved and written back. How many of
its jobs are where is counted by triggers.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from headrace.adapters.jobs.files import FileTables, behind
from headrace.adapters.jobs.tables import Tables
from headrace.model.ids import TenantId
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
    STEP_BYTES,
    STEP_JOBS,
    Declined,
    Entry,
    Hold,
    Kept,
    Page,
    Progress,
    asks_the_same,
)
from headrace.ports.job import BatchId, Job, State, UnixNs, cancelled, ended, fingerprint
from headrace.ports.jobs import SWEEP_MAX, Put, Swept

_LIVE = (State.QUEUED, State.CLAIMED)
# The first of those that have something to do: a line to read or put, or no job that is not over.
_NEXT = (
    "select seq, term, packed from batch where kept_until_ns is null"
    " and (lease_until_ns is null or lease_until_ns <= ?)"
    " and (stage in ('validating', 'finalizing') or lines_left > 0"
    " or not exists (select 1 from batch_tally where batch = batch.id and state in ('queued', 'claimed'))"
    " or (stage = 'cancelling' and exists"
    " (select 1 from batch_tally where batch = batch.id and state = 'queued')))"
    " order by turn_ns, seq limit 1"
)
_ROW = "select packed from batch "
_PLACE = "select seq from batch as begun where begun.tenant = batch.tenant and id = ?"
_QUEUED = "batch = ? and state = 'queued' order by seq limit ?"
_RUNNING = "batch = ? and state = 'claimed' and cancel_asked = 0"
_ALL = "tenant = ? and batch = ? order by seq limit ?"

_PAST = (
    "select exists (select 1 from batch where kept_until_ns <= ?)"
    " or exists (select 1 from file where until_ns <= ?)"
)

_pack = msgspec.msgpack.Encoder().encode
_batch = msgspec.msgpack.Decoder(Batch).decode


class BatchTables(Tables, FileTables):
    """The operations of `BatchStore`, without waiting."""

    # Callers ---------------------------------------------------------------------------------

    def put_batch(self, batch: Batch) -> Progress | Declined:
        """See `BatchStore`."""
        with self._transaction(told=True):
            query = _ROW + "where tenant = ? and key = ?"
            row = self._sql.execute(query, (batch.tenant, batch.key)).fetchone()
            if row is not None:
                had = self._progress(_batch(row[0]))
                return had if asks_the_same(had.batch, batch) else Declined.KEY_MISMATCH
            file = self.file(batch.tenant, batch.input_file, batch.created_ns)
            if file is None or file.purpose is not Purpose.BATCH:
                return Declined.NO_FILE
            query = "select count(*) from batch where tenant = ? and kept_until_ns is null"
            if self._one(query, batch.tenant)[0] >= self._limits.tenant_batches:
                return Declined.TENANT_BATCHES
            packed = _pack(batch)
            if not self._has_room(len(packed)):
                return Declined.STORE_FULL
            named = (batch.id, batch.tenant, batch.key, batch.input_file, batch.stage)
            self._sql.execute(
                "insert into batch (id, tenant, key, input, stage, reads, lines_left, term, turn_ns,"
                " packed) values (?, ?, ?, ?, ?, 1, 0, 0, ?, ?)",
                (*named, batch.created_ns, packed),
            )
        return Progress(batch=batch, completed=0, failed=0)

    def batch(self, tenant: TenantId, batch: BatchId) -> Progress | None:
        """See `BatchStore`."""
        found = self._batch_of(tenant, batch)
        return None if found is None else self._progress(found)

    def _batch_of(self, tenant: TenantId, batch: BatchId) -> Batch | None:
        query = _ROW + "where tenant = ? and id = ?"
        row = self._sql.execute(query, (tenant, batch)).fetchone()
        return None if row is None else _batch(row[0])

    def _progress(self, batch: Batch) -> Progress:
        jobs = self._tally(batch.id)
        failed = jobs[State.FAILED] + jobs[State.EXPIRED] + jobs[State.CANCELLED]
        return Progress(
            batch=batch,
            completed=batch.completed + jobs[State.DONE],
            failed=batch.failed + failed,
        )

    def _tally(self, batch: BatchId) -> Counter[State]:
        """Return how many jobs of a batch are where, of those that are not written yet."""
        query = "select state, jobs from batch_tally where batch = ?"
        return Counter({State(s): jobs for s, jobs in self._sql.execute(query, (batch,))})

    def batches(self, tenant: TenantId, page: Page) -> list[Progress]:
        """See `BatchStore`."""
        where, values = behind(page, _PLACE)
        order = "asc" if page.ascending else "desc"
        query = f"{_ROW}where tenant = ?{where} order by seq {order} limit ?"
        limit = min(page.limit, BATCHES_PAGE_MAX + 1)
        rows = self._sql.execute(query, (tenant, *values, limit)).fetchall()
        return [self._progress(_batch(packed)) for (packed,) in rows]

    def cancel_batch(self, tenant: TenantId, batch: BatchId, now: UnixNs) -> bool:
        """See `BatchStore`."""
        with self._transaction(told=True):
            found = self._batch_of(tenant, batch)
            if found is None:
                return False
            if found.stage is Stage.IN_PROGRESS and self._has_ended(found):
                return False  # nothing of it is left to be cancelled
            moved = unwanted(found, now)
            if moved is not found:
                self._keep_batch(moved)
            return moved.stage is Stage.CANCELLING and self._cancel_some(moved, now)

    def _has_ended(self, batch: Batch) -> bool:
        """Return whether all its lines are jobs, and none of those is under way."""
        tally = self._tally(batch.id)
        return not batch.left and not any(tally[state] for state in _LIVE)

    def _cancel_some(self, batch: Batch, now: UnixNs) -> bool:
        """Cancel what waits and ask what runs to stop; return whether more waits."""
        waiting = self._find_jobs(_QUEUED, batch.id, STEP_JOBS)
        running = self._find_jobs(_RUNNING, batch.id)
        for job in (*waiting, *running):
            self._save(cancelled(job, now))
        return len(waiting) == STEP_JOBS

    # Work ------------------------------------------------------------------------------------

    def take_batch(self, owner: str, until: UnixNs, now: UnixNs) -> Hold | None:
        """See `BatchStore`."""
        if self._sql.execute(_NEXT, (now,)).fetchone() is None:  # mostly: spare the lock
            return None
        with self._transaction():
            row = self._sql.execute(_NEXT, (now,)).fetchone()
            if row is None:
                return None
            seq, term, packed = row
            self._sql.execute(
                "update batch set owner = ?, lease_until_ns = ?, term = ?, turn_ns = ? where seq = ?",
                (owner, until, term + 1, now, seq),
            )
        return Hold(batch=_batch(packed), owner=owner, term=term + 1)

    def hold_batch(self, hold: Hold, until: UnixNs) -> bool:
        """See `BatchStore`."""
        with self._transaction():
            return self._lease(hold, until)

    def leave_batch(self, hold: Hold) -> None:
        """See `BatchStore`."""
        with self._transaction():
            self._lease(hold, None)

    def _lease(self, hold: Hold, until: UnixNs | None) -> bool:
        """Set when a hold is over; return whether it still counts."""
        query = "update batch set lease_until_ns = ? where id = ? and owner = ? and term = ?"
        values = (until, hold.batch.id, hold.owner, hold.term)
        return self._sql.execute(query, values).rowcount > 0

    def _held_batch(self, hold: Hold) -> Batch | None:
        """Return a batch as it stands, given back; None: another has it, or it is over."""
        if not self._lease(hold, None):
            return None
        batch = self._batch_of(hold.batch.tenant, hold.batch.id)
        return None if batch is None or batch.is_over else batch

    def check_batch(
        self, hold: Hold, lines: int, errors: tuple[LineError, ...], now: UnixNs
    ) -> bool:
        """See `BatchStore`."""
        with self._transaction(told=True):
            batch = self._held_batch(hold)
            if batch is None:
                return False
            self._keep_batch(checked(batch, lines, errors, now))
        return True

    def enqueue(
        self, hold: Hold, entries: Sequence[Entry], rest: UnixNs, now: UnixNs
    ) -> list[Job] | None:
        """See `BatchStore`."""
        with self._transaction():
            batch = self._held_batch(hold)
            if batch is None:
                return None
            jobs: list[Job] = []
            for entry in entries:
                job = self._enqueue(batch, entry, now)
                if job is None:
                    break
                jobs.append(job)
            if not jobs:
                self._lease(hold, rest)
                return []
            put, read = batch.put + len(jobs), entries[len(jobs) - 1].end
            self._keep_batch(msgspec.structs.replace(batch, put=put, read=read))
        return jobs

    def _enqueue(self, batch: Batch, entry: Entry, now: UnixNs) -> Job | None:
        """Make a line a job; None: there is no room."""
        state = State.CANCELLED if batch.stage is Stage.CANCELLING else State.EXPIRED
        if state is State.EXPIRED and batch.deadline_ns > now:
            put = self._put(entry.spec, entry.body)
            return put.job if isinstance(put, Put) else None
        job = ended(self._add(entry.spec, fingerprint(entry.spec.route, entry.body)), state, now)
        self._save(job)
        return job

    def write_out(self, hold: Hold, names: tuple[FileId, FileId], now: UnixNs) -> Batch | None:
        """See `BatchStore`."""
        with self._transaction(told=True):
            batch = self._held_batch(hold)
            if batch is None:
                return None
            if batch.stage is Stage.CANCELLING:
                self._cancel_some(batch, now)
            if not self._has_ended(batch):
                return batch
            batch = self._written(finalizing(batch, now), names, now)
            if not self._tally(batch.id):
                batch = closed(batch, now)
                self._show(batch)
            self._keep_batch(batch)
        return batch

    def _written(self, batch: Batch, names: tuple[FileId, FileId], now: UnixNs) -> Batch:
        """Write some jobs into their files and forget them."""
        lines: dict[bool, list[bytes]] = {True: [], False: []}
        expired = size = 0
        for job in self._find_jobs(_ALL, batch.tenant, batch.id, STEP_JOBS):
            if size > STEP_BYTES:
                break
            line = written(job, self.result(batch.tenant, job.spec.id))
            lines[job.state is State.DONE].append(line)
            size += len(line)
            expired += job.state is State.EXPIRED
            self._sql.execute("delete from result where seq = ?", (job.seq,))
            self._sql.execute("delete from job where seq = ?", (job.seq,))
        return msgspec.structs.replace(
            batch,
            completed=batch.completed + len(lines[True]),
            failed=batch.failed + len(lines[False]),
            expired=batch.expired + expired,
            output_file=self._told(batch, batch.output_file, names[0], lines[True], now),
            error_file=self._told(batch, batch.error_file, names[1], lines[False], now),
        )

    def _told(
        self,
        batch: Batch,
        file: FileId | None,
        name: FileId,
        lines: list[bytes],
        now: UnixNs,
    ) -> FileId | None:
        """Add lines to a file of answers, which is begun with the first; return which it is."""
        if not lines:
            return file
        if file is None:
            file = name
            self._begin_lasting(_answers(batch, file, "", now))
        self._append(file, b"".join(lines))
        return file

    def _show(self, batch: Batch) -> None:
        """Have the files of a batch that is over be seen, for as long as it is."""
        assert batch.ended_ns is not None, "it is over"
        for file, kind in ((batch.output_file, "output"), (batch.error_file, "error")):
            if file is not None:
                self._keep(_answers(batch, file, kind, batch.ended_ns))

    def _keep_batch(self, batch: Batch) -> None:
        until = None if batch.ended_ns is None else batch.ended_ns + batch.keep_ns
        self._sql.execute(
            "update batch set stage = ?, reads = ?, lines_left = ?, kept_until_ns = ?, packed = ?"
            " where id = ?",
            (batch.stage, batch.reads, batch.left, until, _pack(batch), batch.id),
        )

    # Time ------------------------------------------------------------------------------------

    def recover(self, now: UnixNs, alive: frozenset[str]) -> Swept:
        """See `JobStore`; batches of those that are gone are given back too, files that came to them given up."""
        with self._transaction():
            if not alive:
                self._give_up(now)
            query = (
                "select distinct owner from batch where kept_until_ns is null and owner is not null"
            )
            gone = [(owner,) for (owner,) in self._sql.execute(query) if owner not in alive]
            query = (
                "update batch set lease_until_ns = null where owner = ? and kept_until_ns is null"
            )
            self._sql.executemany(query, gone)
        return super().recover(now, alive)

    def purge_files(self, now: UnixNs) -> bool:
        """See `BatchStore`."""
        if not self._one(_PAST, now, now)[0]:  # mostly: spare the lock
            return False
        with self._transaction():
            batches = self._sql.execute(
                "delete from batch where seq in (select seq from batch where kept_until_ns <= ?"
                " order by kept_until_ns limit ?)",
                (now, SWEEP_MAX),
            ).rowcount
            return self._purge_pieces(now) or batches == SWEEP_MAX

    def kept(self) -> Kept:
        """See `BatchStore`."""
        files, size = self._one("select count(*), coalesce(sum(bytes), 0) from file")
        stages = self._sql.execute(
            "select stage, count(*) from batch group by stage order by stage"
        )
        return Kept(files=files, bytes=size, batches={Stage(name): n for name, n in stages})


def _answers(batch: Batch, file: FileId, kind: str, now: UnixNs) -> File:
    return File(
        id=file,
        tenant=batch.tenant,
        purpose=Purpose.BATCH_OUTPUT,
        name=f"{batch.id}_{kind}.jsonl",
        created_ns=now,
        until_ns=UnixNs(now + batch.keep_ns),
    )
