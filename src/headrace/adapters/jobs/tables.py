"""Jobs in a SQLite file: each operation one transaction of one connection, in whichever thread calls.

Rows become `Job`s, the life cycle says what they become, and rows are written back: no rule of it is written
in SQL. Whose turn it is, the policy says; its memory is changed in the transaction that claims.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.adapters.jobs.rows import Rows
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.policy.fairness.claims import ClaimOrder, Line, Memory, Turns
from headrace.ports.job import (
    OVER,
    BatchId,
    Job,
    JobId,
    JobSpec,
    Lease,
    State,
    UnixNs,
    cancelled,
    claimed,
    ended,
    fingerprint,
    given_back,
)
from headrace.ports.jobs import (
    CLAIM_MAX,
    PAGE_MAX,
    SWEEP_MAX,
    Cancel,
    Claim,
    ClaimAsk,
    Ending,
    Finished,
    Put,
    Refused,
    Renewal,
    Result,
    Swept,
    Tally,
)

_JOB = "select seq, spec, state, attempts, lost, owner, lease_until_ns, cancel_asked, ended_ns from job "
_BY_ID = _JOB + "where id = ?"
_BY_TENANT = _JOB + "where tenant = ? and id = ?"
_BY_KEY = _JOB + "where tenant = ? and key = ?"
_INSERT = (
    "insert into job (id, tenant, slo_class, model, key, batch, print, priority, deadline_ns, spec, state,"
    " attempts, lost, cancel_asked) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued', 0, 0, 0)"
)
_UPDATE = (
    "update job set state = ?, attempts = ?, lost = ?, owner = ?, lease_until_ns = ?, cancel_asked = ?,"
    " ended_ns = ?, kept_until_ns = ? where seq = ?"
)
# The states are written out: only so does SQLite use the indexes that hold these rows alone.
_NEXT = _JOB + (
    "where model = ? and tenant = ? and slo_class = ? and state = 'queued' and deadline_ns > ?"
    " order by priority, deadline_ns, seq limit 1"
)
_OLDEST = _JOB + "where state = 'queued' order by seq limit 1"
_DUE = _JOB + "where state = 'queued' and deadline_ns <= ? order by deadline_ns limit ?"
_LAPSED = _JOB + "where state = 'claimed' and lease_until_ns <= ? order by lease_until_ns limit ?"
_HELD = _JOB + "where state = 'claimed' order by lease_until_ns"
_LINES = "select tenant, slo_class from tally where model = ? and state = 'queued'"
_LIVE = (
    "select coalesce(sum(jobs), 0) from tally where tenant = ? and state in ('queued', 'claimed')"
)
_OWE = (
    "insert into owed values (?, ?, ?, ?)"
    " on conflict do update set service = service + excluded.service"
)

_pack = msgspec.msgpack.Encoder().encode
_spec = msgspec.msgpack.Decoder(JobSpec).decode
_result = msgspec.msgpack.Decoder(Result).decode
_memory = msgspec.msgpack.Decoder(Memory).decode


class Tables(Rows):
    """The operations of `JobStore`, without waiting."""

    # Coming and going ------------------------------------------------------------------------

    def put(self, jobs: Sequence[tuple[JobSpec, bytes]]) -> list[Put | Refused]:
        """See `JobStore`."""
        with self._transaction(told=True):
            return [self._put(spec, body) for spec, body in jobs]

    def _put(self, spec: JobSpec, body: bytes) -> Put | Refused:
        if len(body) > self._limits.body_bytes:
            return Refused.BODY_TOO_LARGE
        shown = fingerprint(spec.route, body)
        known = self._known(spec, shown)
        if known is not None:
            return known
        if self._one(_LIVE, spec.tenant)[0] >= self._limits.tenant_jobs:
            return Refused.TENANT_FULL
        if not self._has_room(len(body)):
            return Refused.STORE_FULL
        job = self._add(spec, shown)
        self._sql.execute("insert into body values (?, ?)", (job.seq, body))
        return Put(job=job, fresh=True)

    def _add(self, spec: JobSpec, shown: bytes) -> Job:
        named = (spec.id, spec.tenant, spec.slo_class, spec.model, spec.key, spec.batch)
        values = (*named, shown, spec.priority, spec.deadline_ns, _pack(spec))
        seq = self._sql.execute(_INSERT, values).lastrowid
        assert seq is not None
        return Job(spec=spec, seq=seq)

    def _known(self, spec: JobSpec, shown: bytes) -> Put | Refused | None:
        """Return the job that was put before by the same key or id, or why this one cannot be."""
        job = None if spec.key is None else self._job(_BY_KEY, spec.tenant, spec.key)
        wrong = Refused.KEY_MISMATCH
        if job is None:
            job, wrong = self._job(_BY_ID, spec.id), Refused.ID_TAKEN
        if job is None:
            return None
        had = self._one("select print from job where seq = ?", job.seq)[0]
        same = job.spec.tenant == spec.tenant and job.spec.key == spec.key and had == shown
        return Put(job=job, fresh=False) if same else wrong

    def cancel(self, tenant: TenantId, jobs: Sequence[JobId], now: UnixNs) -> list[Cancel]:
        """See `JobStore`."""
        with self._transaction(told=True):
            return [self._cancel(tenant, job, now) for job in jobs]

    def _cancel(self, tenant: TenantId, ident: JobId, now: UnixNs) -> Cancel:
        job = self._job(_BY_TENANT, tenant, ident)
        if job is None:
            return Cancel.UNKNOWN
        if job.is_over:
            return Cancel.OVER
        job = cancelled(job, now)
        self._save(job)
        return Cancel.CANCELLED if job.is_over else Cancel.ASKED

    def purge(self, now: UnixNs) -> int:
        """See `JobStore`."""
        with self._transaction():
            gone = self._sql.execute(
                "select seq from job where kept_until_ns <= ? order by kept_until_ns limit ?",
                (now, SWEEP_MAX),
            ).fetchall()
            self._sql.executemany("delete from result where seq = ?", gone)
            self._sql.executemany("delete from job where seq = ?", gone)
        return len(gone)

    # Work ------------------------------------------------------------------------------------

    def claim(self, ask: ClaimAsk, order: ClaimOrder, now: UnixNs) -> list[Claim]:
        """See `JobStore`."""
        with self._transaction():
            self._sweep(now)
            turns = self._turns(ask.model, order)
            found: list[Claim] = []
            while len(found) < min(ask.limit, CLAIM_MAX) and (line := turns.next()) is not None:
                job = self._job(_NEXT, ask.model, line.tenant, line.slo_class, now)
                if job is None:
                    turns.drop(line)
                    continue
                turns.charge(line, job.spec.service)
                found.append(self._hand_out(job, ask))
            self._drop_empty(turns, ask.model)
            packed = _pack(turns.memory())
            self._sql.execute("insert or replace into memory values (?, ?)", (ask.model, packed))
            self._sql.execute("delete from owed where model = ?", (ask.model,))
        return found

    def _turns(self, model: ModelName, order: ClaimOrder) -> Turns:
        packed = self._sql.execute("select packed from memory where model = ?", (model,)).fetchone()
        memory = Memory() if packed is None else _memory(packed[0])
        query = "select tenant, slo_class, service from owed where model = ?"
        owed = {
            Line(TenantId(t), ClassName(c)): s for t, c, s in self._sql.execute(query, (model,))
        }
        return Turns(order, memory, self._lines(model), owed)

    def _lines(self, model: ModelName) -> set[Line]:
        rows = self._sql.execute(_LINES, (model,))
        return {Line(TenantId(tenant), ClassName(name)) for tenant, name in rows}

    def _drop_empty(self, turns: Turns, model: ModelName) -> None:
        """Have nobody remembered as waiting of whom the last job was taken."""
        left = self._lines(model)
        for line in turns.lines():
            if line not in left:
                turns.drop(line)

    def _hand_out(self, job: Job, ask: ClaimAsk) -> Claim:
        job = claimed(job, ask.owner, ask.until_ns)
        self._save(job)
        body = self._one("select bytes from body where seq = ?", job.seq)[0]
        return Claim(job=job, lease=Lease(job.spec.id, ask.owner, job.attempts), body=body)

    def renew(self, leases: Sequence[Lease], until: UnixNs) -> list[Renewal]:
        """See `JobStore`."""
        with self._transaction():
            return [self._renew(lease, until) for lease in leases]

    def _renew(self, lease: Lease, until: UnixNs) -> Renewal:
        job = self._held(lease)
        if job is None:
            return Renewal.LOST
        self._save(msgspec.structs.replace(job, lease_until_ns=until))
        return Renewal.STOP if job.cancel_asked else Renewal.HELD

    def finish(self, endings: Sequence[tuple[Lease, Ending]], now: UnixNs) -> list[Finished]:
        """See `JobStore`."""
        with self._transaction(told=True):
            return [self._finish(lease, ending, now) for lease, ending in endings]

    def _finish(self, lease: Lease, ending: Ending, now: UnixNs) -> Finished:
        result = ending.result
        if result is not None and len(result.body) > self._limits.result_bytes:
            return Finished.TOO_LARGE
        job = self._job(_BY_ID, lease.job)
        if job is None or not job.is_held_by(lease):
            return Finished.LOST
        if job.is_over:
            return Finished.REPEATED
        self._save(ended(job, ending.state, now, owner=lease.owner))
        if result is not None:
            self._sql.execute("insert into result values (?, ?)", (job.seq, _pack(result)))
        if ending.spent is not None:
            self._owe(job, ending.spent - job.spec.service)
        return Finished.STORED

    def release(self, leases: Sequence[Lease], now: UnixNs) -> list[bool]:
        """See `JobStore`."""
        with self._transaction():
            return [self._release(lease, now) for lease in leases]

    def _release(self, lease: Lease, now: UnixNs) -> bool:
        job = self._held(lease)
        if job is None:
            return False
        self._save(given_back(job, now))
        self._owe(job, -job.spec.service)
        return True

    def _held(self, lease: Lease) -> Job | None:
        job = self._job(_BY_ID, lease.job)
        held = job is not None and job.state is State.CLAIMED and job.is_held_by(lease)
        return job if held else None

    def _owe(self, job: Job, service: int) -> None:
        """Have the next claim charge a job's line for so much more."""
        if service:
            spec = job.spec
            self._sql.execute(_OWE, (spec.model, spec.tenant, spec.slo_class, service))

    # Time ------------------------------------------------------------------------------------

    def sweep(self, now: UnixNs) -> Swept:
        """See `JobStore`."""
        with self._transaction():
            return self._sweep(now)

    def recover(self, now: UnixNs, alive: frozenset[str]) -> Swept:
        """See `JobStore`."""
        with self._transaction():
            for job in self._jobs(_HELD):
                if job.owner not in alive:
                    self._save(msgspec.structs.replace(job, lease_until_ns=now))
            return self._sweep(now)

    def _sweep(self, now: UnixNs) -> Swept:
        lapsed = self._jobs(_LAPSED, now, SWEEP_MAX)
        due = self._jobs(_DUE, now, SWEEP_MAX)
        lost_max = self._limits.lost_max
        moved = [given_back(job, now, lost=True, lost_max=lost_max) for job in lapsed]
        moved += [ended(job, State.EXPIRED, now) for job in due]
        counts = dict.fromkeys(State, 0)
        for job in moved:
            self._save(job)
            counts[job.state] += 1
        return Swept(
            requeued=counts[State.QUEUED],
            expired=counts[State.EXPIRED],
            cancelled=counts[State.CANCELLED],
            failed=counts[State.FAILED],
            more=SWEEP_MAX in (len(lapsed), len(due)),
        )

    # Questions -------------------------------------------------------------------------------

    def get(self, tenant: TenantId, job: JobId) -> Job | None:
        """See `JobStore`."""
        return self._job(_BY_TENANT, tenant, job)

    def result(self, tenant: TenantId, job: JobId) -> Result | None:
        """See `JobStore`."""
        query = "select packed from result join job using (seq) where tenant = ? and id = ?"
        row = self._sql.execute(query, (tenant, job)).fetchone()
        return None if row is None else _result(row[0])

    def page(self, tenant: TenantId, after: int, limit: int, batch: BatchId | None) -> list[Job]:
        """See `JobStore`."""
        limit = min(limit, PAGE_MAX)
        if batch is None:
            query = _JOB + "where tenant = ? and seq > ? order by seq limit ?"
            return self._jobs(query, tenant, after, limit)
        query = _JOB + "where tenant = ? and batch = ? and seq > ? order by seq limit ?"
        return self._jobs(query, tenant, batch, after, limit)

    def counts(self) -> list[Tally]:
        """See `JobStore`."""
        query = "select tenant, slo_class, model, state, jobs from tally order by 1, 2, 3, 4"
        names = ("tenant", "slo_class", "model", "state", "jobs")
        rows = [dict(zip(names, row, strict=True)) for row in self._sql.execute(query)]
        return msgspec.convert(rows, list[Tally])

    def oldest(self) -> UnixNs | None:
        """See `JobStore`."""
        job = self._job(_OLDEST)
        return None if job is None else job.spec.created_ns

    # Rows ------------------------------------------------------------------------------------

    def _job(self, query: str, *values: object) -> Job | None:
        found = self._jobs(query, *values)
        return found[0] if found else None

    def _jobs(self, query: str, *values: object) -> list[Job]:
        return [_from_row(row) for row in self._sql.execute(query, values).fetchall()]

    def _find_jobs(self, where: str, *values: object) -> list[Job]:
        return self._jobs(f"{_JOB}where {where}", *values)

    def _save(self, job: Job) -> None:
        """Write back what may have changed of a job; one that is over needs its body no more."""
        stands = (job.state, job.attempts, job.lost, job.owner, job.lease_until_ns)
        ends = (job.cancel_asked, job.ended_ns, job.kept_until_ns)
        self._sql.execute(_UPDATE, (*stands, *ends, job.seq))
        if job.state in OVER:
            self._sql.execute("delete from body where seq = ?", (job.seq,))


def _from_row(row: tuple[Any, ...]) -> Job:
    seq, spec, state, attempts, lost, owner, lease_until_ns, cancel_asked, ended_ns = row
    return Job(
        spec=_spec(spec),
        seq=seq,
        state=State(state),
        attempts=attempts,
        lost=lost,
        owner=owner,
        lease_until_ns=lease_until_ns,
        cancel_asked=bool(cancel_asked),
        ended_ns=ended_ns,
    )
