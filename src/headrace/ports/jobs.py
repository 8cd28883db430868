"""Where does deferred work wait, and who works on what?

At least once: a job is handed out under a lease, again if that runs out, and its end is stored exactly once.
Nothing waits on the loop; every operation is one transaction that happened whole or not at all, whatever
becomes of the process. What `put`, `cancel` and `finish` returned outlives a power cut too; the rest may then
have to be done again. Processes may
share a store. Nobody's job is seen under another tenant's name. What a caller or worker may run into is told by
values; exceptions are the store's own troubles.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.policy.fairness.claims import ClaimOrder
from headrace.ports.job import OVER, BatchId, Job, JobId, JobSpec, Lease, State, UnixNs
from headrace.units import MIB, Bytes, Service

CLAIM_MAX = 1_000
"""Most jobs of one claim: all their bodies are held in memory."""
SWEEP_MAX = 1_000
"""Most jobs of a kind that one sweep or purge looks at, so that nobody waits long behind it."""
PAGE_MAX = 1_000
"""Most jobs of one page."""


class JobStoreError(Exception):
    """The store could not do what was asked; nothing of it happened."""

    retryable = False


class StoreFullError(JobStoreError):
    """The disk is full, or the store as large as it may be. Ends and purges make room."""


class StoreBusyError(JobStoreError):
    """Others kept it locked for too long, or too many operations wait."""

    retryable = True


class StoreFaultError(JobStoreError):
    """It cannot be read or written, is no store of jobs, or is one of another version."""


class Limits(Struct, frozen=True, kw_only=True):
    """How much a store takes."""

    tenant_jobs: int = 100_000
    """Jobs of one tenant that are not over. 100,000: two of the largest batches of OpenAI's API."""
    body_bytes: Bytes = Bytes(16 * MIB)
    """Of one request."""
    result_bytes: Bytes = Bytes(16 * MIB)
    """Of one answer."""
    store_bytes: Bytes = Bytes(8_192 * MIB)
    """Of everything, on disk."""
    put_share: float = 0.75
    """Part of that beyond which no job is taken any more: the rest is for the answers to those taken."""
    tenant_files: int = 1_000
    """Files of one tenant, but for those of answers."""
    tenant_batches: int = 100
    """Batches of one tenant that are not over."""
    lost_max: int = 5
    """Leases that run out on a job before it has failed: it may be what takes its workers down."""


class Refused(StrEnum):
    """Why a job was not taken. Also a metric label: a closed list."""

    KEY_MISMATCH = "key_mismatch"
    """The tenant used that idempotency key for another request (422)."""
    ID_TAKEN = "id_taken"
    """Another job has that id."""
    TENANT_FULL = "tenant_full"
    STORE_FULL = "store_full"
    BODY_TOO_LARGE = "body_too_large"


class Put(Struct, frozen=True, kw_only=True):
    """A job that is in the store."""

    job: Job
    fresh: bool
    """It was put now; else it is an earlier one by the same id or key, however far it is."""


class Claim(Struct, frozen=True, kw_only=True):
    """A job that was handed out."""

    job: Job
    lease: Lease
    body: bytes


class ClaimAsk(Struct, frozen=True, kw_only=True):
    """Who asks for how much work."""

    model: ModelName
    owner: str
    limit: int
    until_ns: UnixNs
    """When the leases end, unless they are renewed."""


class Renewal(StrEnum):
    """What a worker hears about a job it works on."""

    HELD = "held"
    STOP = "stop"
    """Held, but its caller cancelled it: stop, and say so by `finish`."""
    LOST = "lost"
    """It is another's, or over: stop, and say nothing."""


class Result(Struct, frozen=True, kw_only=True):
    """An answer to keep for the caller."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes


class Ending(Struct, frozen=True, kw_only=True):
    """How a job ended, by its owner's word."""

    state: State
    result: Result | None = None
    spent: Service | None = None
    """What it took in truth; None: as predicted."""

    def __post_init__(self) -> None:
        """Refuse what is no end."""
        assert self.state in OVER, f"{self.state} is no end"


class Finished(StrEnum):
    """What became of a worker's word."""

    STORED = "stored"
    REPEATED = "repeated"
    """The same claim had ended it before; what was stored then stays."""
    LOST = "lost"
    """The claim is not the last one, or the job ended without it: nothing is stored."""
    TOO_LARGE = "too_large"
    """The result is; the job is still held."""


class Cancel(StrEnum):
    """What became of a caller's wish not to have a job."""

    CANCELLED = "cancelled"
    ASKED = "asked"
    """It is being worked on; its worker is told, and may be done before it hears."""
    OVER = "over"
    UNKNOWN = "unknown"


class Tally(Struct, frozen=True, kw_only=True, gc=False):
    """How many jobs there are of a kind."""

    tenant: TenantId
    slo_class: ClassName
    model: ModelName
    state: State
    jobs: int


class Swept(Struct, frozen=True, kw_only=True, gc=False):
    """What time alone did to jobs."""

    requeued: int = 0
    expired: int = 0
    cancelled: int = 0
    failed: int = 0
    more: bool = False
    """There was more to do than one sweep does."""


class JobStore(Protocol):
    """Jobs of all tenants; every operation raises `JobStoreError`."""

    async def put(self, jobs: Sequence[tuple[JobSpec, bytes]]) -> list[Put | Refused]:
        """Take jobs with their bodies, each by itself; what was put before by id or key is found again."""
        ...

    async def claim(self, ask: ClaimAsk, order: ClaimOrder, now: UnixNs) -> list[Claim]:
        """Hand out jobs whose turn it is, none twice and none past its deadline, and charge for them.

        Sweeps first, so that a lease that ran out gives its job to this claim.
        """
        ...

    async def renew(self, leases: Sequence[Lease], until: UnixNs) -> list[Renewal]:
        """Hold jobs for longer, unless somebody else has them. Also how a worker hears of a cancel."""
        ...

    async def finish(self, endings: Sequence[tuple[Lease, Ending]], now: UnixNs) -> list[Finished]:
        """End jobs and keep their results, both or neither; what they were charged is set right."""
        ...

    async def release(self, leases: Sequence[Lease], now: UnixNs) -> list[bool]:
        """Give back what was not worked on, and what it was charged; False: it was held no more."""
        ...

    async def cancel(self, tenant: TenantId, jobs: Sequence[JobId], now: UnixNs) -> list[Cancel]:
        """Not want jobs any more."""
        ...

    async def get(self, tenant: TenantId, job: JobId) -> Job | None:
        """Return a job as it stands, or None if the tenant has none by that id."""
        ...

    async def result(self, tenant: TenantId, job: JobId) -> Result | None:
        """Return the answer to a job, or None if there is none (yet)."""
        ...

    async def page(
        self, tenant: TenantId, *, after: int = 0, limit: int = 100, batch: BatchId | None = None
    ) -> list[Job]:
        """Return the tenant's jobs, of one batch or all, in sequence from behind that of `after`."""
        ...

    async def counts(self) -> list[Tally]:
        """Return how many jobs there are, by tenant, class, model and state."""
        ...

    async def oldest(self) -> UnixNs | None:
        """Return when the job came that has waited longest, or None if none waits."""
        ...

    async def sweep(self, now: UnixNs) -> Swept:
        """End what is past its deadline, and take back what leases have run out on."""
        ...

    async def recover(self, now: UnixNs, alive: frozenset[str]) -> Swept:
        """Sweep, and take back at once what owners have that are not `alive`: at a start.

        If none is, files that were still coming are given up as well.
        """
        ...

    async def purge(self, now: UnixNs) -> int:
        """Forget jobs whose time after their end is over; returns how many, at most `SWEEP_MAX`."""
        ...

    async def close(self) -> None:
        """Let go of everything; nothing is asked after this."""
        ...
