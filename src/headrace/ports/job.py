"""What is a deferred job, and what may become of it?

Pure: the moves of its life are functions from one `Job` to the next, so that every store makes the same
ones. Time is the wall's, in nanoseconds since 1970, because a job outlives the process that took it.
"""

from enum import StrEnum
from hashlib import sha256
from typing import NewType

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.ports.engine import Route
from headrace.units import DurationNs, Service

UnixNs = NewType("UnixNs", int)
"""Wall-clock time in nanoseconds since 1970 (UTC)."""
JobId = NewType("JobId", str)
"""One deferred job; minted by the driver, and not to be guessed."""
BatchId = NewType("BatchId", str)
"""One batch of jobs that were handed in together."""


class State(StrEnum):
    """Where a job is. Also a metric label: a closed list."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    """Its owner works on it, until its lease is over."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.CLAIMED, State.CANCELLED, State.EXPIRED}),
    State.CLAIMED: frozenset(
        {State.QUEUED, State.DONE, State.FAILED, State.CANCELLED, State.EXPIRED}
    ),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
    State.EXPIRED: frozenset(),
}
"""From each state, those that may follow."""
OVER = frozenset(state for state, after in MOVES.items() if not after)
"""States that nothing follows: each job reaches one of them once."""


class JobSpec(Struct, frozen=True, kw_only=True):
    """What was asked for, without the body; never changes."""

    id: JobId
    tenant: TenantId
    """Who pays, and alone may look at it."""
    slo_class: ClassName
    model: ModelName
    route: Route
    headers: tuple[tuple[str, str], ...] = ()
    """Of the caller's own, those that decide how it is served."""
    priority: int = 0
    """Within the line of its tenant and class; lower goes first."""
    service: Service
    """Predicted, in the unit of the counters it is charged to."""
    created_ns: UnixNs
    deadline_ns: UnixNs
    """From when on it is not handed out any more."""
    keep_ns: DurationNs
    """How long it is kept after its end; one of a batch, until its answer is written."""
    key: str | None = None
    """The caller's idempotency key: one job for each tenant and key, for as long as it is kept."""
    batch: BatchId | None = None
    custom_id: str | None = None
    """What the caller knows it by within its batch."""


class Lease(Struct, frozen=True, gc=False):
    """The right to finish a job; worth nothing once another claim of it was made."""

    job: JobId
    owner: str
    """Who works on it: one life of a process, never its name alone (trap 16)."""
    attempt: int
    """Which claim of the job this is, from 1."""


class Job(Struct, frozen=True, kw_only=True):
    """A job as it stands."""

    spec: JobSpec
    seq: int
    """Its place in the order in which jobs came."""
    state: State = State.QUEUED
    attempts: int = 0
    """How often it was claimed."""
    lost: int = 0
    """How often a lease ran out on it."""
    owner: str | None = None
    """Who has it, or finished it."""
    lease_until_ns: UnixNs | None = None
    cancel_asked: bool = False
    """Its owner is to stop; it will not be handed out again."""
    ended_ns: UnixNs | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing will become of it any more."""
        return self.state in OVER

    @property
    def kept_until_ns(self) -> UnixNs | None:
        """When it may be purged; None: it is not over, or its batch says when."""
        if self.ended_ns is None or self.spec.batch is not None:
            return None
        return UnixNs(self.ended_ns + self.spec.keep_ns)

    def is_held_by(self, lease: Lease) -> bool:
        """Return whether a lease is the one of its last claim, which may have ended it."""
        return self.owner == lease.owner and self.attempts == lease.attempt


def fingerprint(route: Route, body: bytes) -> bytes:
    """Return what tells apart requests that came with the same idempotency key."""
    return sha256(route.encode() + b"\0" + body).digest()


def _advance(job: Job, to: State) -> State:
    assert to in MOVES[job.state], f"{job.spec.id}: {job.state} -> {to}"
    return to


def claimed(job: Job, owner: str, until: UnixNs) -> Job:
    """Return a queued job as its owner has it."""
    return replace(
        job,
        state=_advance(job, State.CLAIMED),
        attempts=job.attempts + 1,
        owner=owner,
        lease_until_ns=until,
    )


def ended(job: Job, state: State, now: UnixNs, *, owner: str | None = None) -> Job:
    """Return a job that is over; `owner`: whose word that is, None: nobody's."""
    assert state in OVER, f"{state} is no end"
    return replace(job, state=_advance(job, state), owner=owner, lease_until_ns=None, ended_ns=now)


def given_back(job: Job, now: UnixNs, *, lost: bool = False, lost_max: int = 0) -> Job:
    """Return a claimed job whose owner has it no more.

    It waits again, unless it was cancelled, is past its deadline, or was lost `lost_max` times: what
    takes its worker down with it must not do so for ever.
    """
    if lost:
        job = replace(job, lost=job.lost + 1)
    if job.cancel_asked:
        return ended(job, State.CANCELLED, now)
    if job.spec.deadline_ns <= now:
        return ended(job, State.EXPIRED, now)
    if lost and job.lost >= lost_max:
        return ended(job, State.FAILED, now)
    return replace(job, state=_advance(job, State.QUEUED), owner=None, lease_until_ns=None)


def cancelled(job: Job, now: UnixNs) -> Job:
    """Return a job that its caller does not want: ended, or its owner asked to stop."""
    if job.is_over:
        return job
    if job.state is State.CLAIMED:
        return replace(job, cancel_asked=True)
    return ended(job, State.CANCELLED, now)
