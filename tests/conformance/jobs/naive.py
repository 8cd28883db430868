"""A store of jobs in a dictionary: what every store must do, written as plainly as can be.

The second implementation of the port, and the model that the durable one is compared with. Whose turn it is
comes from the same policy; the life of a job and its leases are written anew here.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from headrace.policy.fairness.claims import ClaimOrder, Line, Memory, Turns
from headrace.ports.job import Job, JobId, JobSpec, Lease, State, UnixNs
from headrace.ports.jobs import (
    Cancel,
    Claim,
    ClaimAsk,
    Ending,
    Finished,
    Limits,
    Put,
    Refused,
    Renewal,
    Result,
    Swept,
    Tally,
)

LIVE = (State.QUEUED, State.CLAIMED)


class Entry(Struct):
    """A job and what belongs to it."""

    spec: JobSpec
    seq: int
    body: bytes
    asked: bytes
    state: State = State.QUEUED
    attempts: int = 0
    lost: int = 0
    owner: str | None = None
    until: Any = None
    cancel: bool = False
    ended: Any = None
    result: Result | None = None

    def job(self) -> Job:
        """Return it as the port tells it."""
        return Job(
            spec=self.spec,
            seq=self.seq,
            state=self.state,
            attempts=self.attempts,
            lost=self.lost,
            owner=self.owner,
            lease_until_ns=self.until,
            cancel_asked=self.cancel,
            ended_ns=self.ended,
        )

    def end(self, state: State, now: UnixNs, owner: str | None = None) -> None:
        """End it."""
        assert self.state in LIVE
        self.state, self.ended, self.owner, self.until = state, now, owner, None

    def back(self, now: UnixNs) -> None:
        """Have nobody work on it."""
        if self.cancel:
            self.end(State.CANCELLED, now)
        elif self.spec.deadline_ns <= now:
            self.end(State.EXPIRED, now)
        else:
            self.state, self.owner, self.until = State.QUEUED, None, None


class Naive(Struct):
    """The operations, without waiting."""

    limits: Limits = field(default_factory=Limits)
    entries: dict[str, Entry] = {}
    memory: dict[str, Memory] = {}
    owed: dict[tuple[str, Line], int] = {}
    seq: int = 0

    def put(self, jobs: Sequence[tuple[JobSpec, bytes]]) -> list[Put | Refused]:
        return [self._put(spec, body) for spec, body in jobs]

    def _put(self, spec: JobSpec, body: bytes) -> Put | Refused:
        if len(body) > self.limits.body_bytes:
            return Refused.BODY_TOO_LARGE
        asked = spec.route.encode() + b" " + body
        for one in self.entries.values():
            if spec.key is not None and (one.spec.tenant, one.spec.key) == (spec.tenant, spec.key):
                if one.asked != asked:
                    return Refused.KEY_MISMATCH
                return Put(job=one.job(), fresh=False)
        if spec.id in self.entries:
            one = self.entries[spec.id]
            same = (one.spec.tenant, one.spec.key, one.asked) == (spec.tenant, spec.key, asked)
            return Put(job=one.job(), fresh=False) if same else Refused.ID_TAKEN
        live = [
            e for e in self.entries.values() if e.spec.tenant == spec.tenant and e.state in LIVE
        ]
        if len(live) >= self.limits.tenant_jobs:
            return Refused.TENANT_FULL
        self.seq += 1
        entry = self.entries[spec.id] = Entry(spec=spec, seq=self.seq, body=body, asked=asked)
        return Put(job=entry.job(), fresh=True)

    def _lines(self, model: str) -> set[Line]:
        return {
            Line(e.spec.tenant, e.spec.slo_class)
            for e in self.entries.values()
            if e.state is State.QUEUED and e.spec.model == model
        }

    def claim(self, ask: ClaimAsk, order: ClaimOrder, now: UnixNs) -> list[Claim]:
        self.sweep(now)
        owed = {line: s for (model, line), s in self.owed.items() if model == ask.model}
        memory = self.memory.get(ask.model, Memory())
        turns = Turns(order, memory, self._lines(ask.model), owed)
        found: list[Claim] = []
        while len(found) < ask.limit and (line := turns.next()) is not None:
            queued = [
                e
                for e in self.entries.values()
                if e.state is State.QUEUED
                and e.spec.model == ask.model
                and Line(e.spec.tenant, e.spec.slo_class) == line
            ]
            if not queued:
                turns.drop(line)
                continue
            first = min(queued, key=lambda e: (e.spec.priority, e.spec.deadline_ns, e.seq))
            turns.charge(line, first.spec.service)
            first.state, first.owner, first.until = State.CLAIMED, ask.owner, ask.until_ns
            first.attempts += 1
            lease = Lease(first.spec.id, ask.owner, first.attempts)
            found.append(Claim(job=first.job(), lease=lease, body=first.body))
        for line in turns.lines():
            if line not in self._lines(ask.model):
                turns.drop(line)
        self.memory[ask.model] = turns.memory()
        self.owed = {at: s for at, s in self.owed.items() if at[0] != ask.model}
        return found

    def _held(self, lease: Lease) -> Entry | None:
        entry = self.entries.get(lease.job)
        if entry is None or entry.state is not State.CLAIMED:
            return None
        return entry if (entry.owner, entry.attempts) == (lease.owner, lease.attempt) else None

    def _owe(self, entry: Entry, service: int) -> None:
        if service:
            at = (entry.spec.model, Line(entry.spec.tenant, entry.spec.slo_class))
            self.owed[at] = self.owed.get(at, 0) + service

    def renew(self, leases: Sequence[Lease], until: UnixNs) -> list[Renewal]:
        return [self._renew(lease, until) for lease in leases]

    def _renew(self, lease: Lease, until: UnixNs) -> Renewal:
        entry = self._held(lease)
        if entry is None:
            return Renewal.LOST
        entry.until = until
        return Renewal.STOP if entry.cancel else Renewal.HELD

    def finish(self, endings: Sequence[tuple[Lease, Ending]], now: UnixNs) -> list[Finished]:
        return [self._finish(lease, ending, now) for lease, ending in endings]

    def _finish(self, lease: Lease, ending: Ending, now: UnixNs) -> Finished:
        if ending.result is not None and len(ending.result.body) > self.limits.result_bytes:
            return Finished.TOO_LARGE
        entry = self.entries.get(lease.job)
        if entry is None or (entry.owner, entry.attempts) != (lease.owner, lease.attempt):
            return Finished.LOST
        if entry.state not in LIVE:
            return Finished.REPEATED
        entry.end(ending.state, now, lease.owner)
        entry.result = ending.result
        if ending.spent is not None:
            self._owe(entry, ending.spent - entry.spec.service)
        return Finished.STORED

    def release(self, leases: Sequence[Lease], now: UnixNs) -> list[bool]:
        return [self._release(lease, now) for lease in leases]

    def _release(self, lease: Lease, now: UnixNs) -> bool:
        entry = self._held(lease)
        if entry is None:
            return False
        entry.back(now)
        self._owe(entry, -entry.spec.service)
        return True

    def cancel(self, tenant: str, jobs: Sequence[JobId], now: UnixNs) -> list[Cancel]:
        return [self._cancel(tenant, job, now) for job in jobs]

    def _cancel(self, tenant: str, job: JobId, now: UnixNs) -> Cancel:
        entry = self.entries.get(job)
        if entry is None or entry.spec.tenant != tenant:
            return Cancel.UNKNOWN
        if entry.state is State.QUEUED:
            entry.end(State.CANCELLED, now)
            return Cancel.CANCELLED
        if entry.state is State.CLAIMED:
            entry.cancel = True
            return Cancel.ASKED
        return Cancel.OVER

    def get(self, tenant: str, job: JobId) -> Job | None:
        entry = self.entries.get(job)
        return entry.job() if entry is not None and entry.spec.tenant == tenant else None

    def result(self, tenant: str, job: JobId) -> Result | None:
        entry = self.entries.get(job)
        return entry.result if entry is not None and entry.spec.tenant == tenant else None

    def page(self, tenant: str, after: int, limit: int, batch: str | None) -> list[Job]:
        found = [
            e.job()
            for e in self.entries.values()
            if e.spec.tenant == tenant and e.seq > after and batch in (None, e.spec.batch)
        ]
        return found[:limit]

    def counts(self) -> list[Tally]:
        found = Counter(
            (e.spec.tenant, e.spec.slo_class, e.spec.model, e.state) for e in self.entries.values()
        )
        return [
            Tally(tenant=t, slo_class=c, model=m, state=s, jobs=n)
            for (t, c, m, s), n in sorted(found.items())
        ]

    def oldest(self) -> UnixNs | None:
        queued = [e for e in self.entries.values() if e.state is State.QUEUED]
        return min(queued, key=lambda e: e.seq).spec.created_ns if queued else None

    def sweep(self, now: UnixNs) -> Swept:
        before = {name: entry.state for name, entry in self.entries.items()}
        for entry in self.entries.values():
            if entry.state is State.QUEUED and entry.spec.deadline_ns <= now:
                entry.end(State.EXPIRED, now)
            elif entry.state is State.CLAIMED and entry.until <= now:
                entry.lost += 1
                alive = not entry.cancel and entry.spec.deadline_ns > now
                if alive and entry.lost >= self.limits.lost_max:
                    entry.end(State.FAILED, now)
                else:
                    entry.back(now)
        moved = Counter(e.state for name, e in self.entries.items() if e.state is not before[name])
        return Swept(
            requeued=moved[State.QUEUED],
            expired=moved[State.EXPIRED],
            cancelled=moved[State.CANCELLED],
            failed=moved[State.FAILED],
        )

    def recover(self, now: UnixNs, alive: frozenset[str]) -> Swept:
        for entry in self.entries.values():
            if entry.state is State.CLAIMED and entry.owner not in alive:
                entry.until = now
        return self.sweep(now)

    def purge(self, now: UnixNs) -> int:
        gone = [
            name
            for name, e in self.entries.items()
            if e.ended is not None and e.spec.batch is None and e.ended + e.spec.keep_ns <= now
        ]
        for name in gone:
            del self.entries[name]
        return len(gone)

    def close(self) -> None:
        """Nothing is open."""


class NaiveJobs:
    """The same as a `JobStore`."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.naive = Naive(limits=limits or Limits())

    async def put(self, jobs: Sequence[tuple[JobSpec, bytes]]) -> list[Put | Refused]:
        return self.naive.put(jobs)

    async def claim(self, ask: ClaimAsk, order: ClaimOrder, now: UnixNs) -> list[Claim]:
        return self.naive.claim(ask, order, now)

    async def renew(self, leases: Sequence[Lease], until: UnixNs) -> list[Renewal]:
        return self.naive.renew(leases, until)

    async def finish(self, endings: Sequence[tuple[Lease, Ending]], now: UnixNs) -> list[Finished]:
        return self.naive.finish(endings, now)

    async def release(self, leases: Sequence[Lease], now: UnixNs) -> list[bool]:
        return self.naive.release(leases, now)

    async def cancel(self, tenant: str, jobs: Sequence[JobId], now: UnixNs) -> list[Cancel]:
        return self.naive.cancel(tenant, jobs, now)

    async def get(self, tenant: str, job: JobId) -> Job | None:
        return self.naive.get(tenant, job)

    async def result(self, tenant: str, job: JobId) -> Result | None:
        return self.naive.result(tenant, job)

    async def page(
        self, tenant: str, *, after: int = 0, limit: int = 100, batch: str | None = None
    ) -> list[Job]:
        return self.naive.page(tenant, after, limit, batch)

    async def counts(self) -> list[Tally]:
        return self.naive.counts()

    async def oldest(self) -> UnixNs | None:
        return self.naive.oldest()

    async def sweep(self, now: UnixNs) -> Swept:
        return self.naive.sweep(now)

    async def recover(self, now: UnixNs, alive: frozenset[str]) -> Swept:
        return self.naive.recover(now, alive)

    async def purge(self, now: UnixNs) -> int:
        return self.naive.purge(now)

    async def close(self) -> None:
        self.naive.close()
