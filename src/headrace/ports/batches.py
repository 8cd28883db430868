"""Where are callers' files, and how far are the batches made of them?

A store of jobs has them beside its jobs, so that a line becomes a job, and an ended job a line of a file of
answers, in one transaction: whatever becomes of a process, each line of a batch is a job once and an answer once.
What works on a batch holds it, and is refused once another does. As for jobs, nothing waits on the loop,
nobody sees another tenant's, and every operation raises `JobStoreError`.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from headrace.model.ids import TenantId
from headrace.ports.batch import Batch, File, FileId, LineError, Purpose, Stage
from headrace.ports.job import BatchId, Job, JobSpec, UnixNs
from headrace.ports.jobs import JobStore
from headrace.units import MIB

PIECE_BYTES = MIB // 4
"""What a file is kept and read by; the last piece is shorter."""
FILES_PAGE_MAX = 10_000
"""Most files of one page, as in OpenAI's API; a store gives one more, which tells that there is a next page."""
BATCHES_PAGE_MAX = 100
"""Most batches of one page, likewise."""
STEP_JOBS = 500
"""Most jobs that one step of a batch puts, cancels or writes, so that nobody waits long behind it."""
STEP_BYTES = 4 * MIB
"""From how many bytes on a step takes no further job."""


class Declined(StrEnum):
    """Why a file or batch was not taken. Also a metric label: a closed list."""

    TENANT_FILES = "tenant_files"
    TENANT_BATCHES = "tenant_batches"
    STORE_FULL = "store_full"
    NO_FILE = "no_file"
    """There is no such file that could be a batch's."""
    KEY_MISMATCH = "key_mismatch"
    """The tenant used that idempotency key for another batch (422)."""


class Page(Struct, frozen=True, kw_only=True):
    """Which part of a list is asked for."""

    limit: int
    after: str | None = None
    """The id that the page begins behind; an unknown one: the page is empty."""
    ascending: bool = False
    """The oldest first."""


class Progress(Struct, frozen=True, kw_only=True):
    """A batch and how its jobs fare, written or not."""

    batch: Batch
    completed: int
    failed: int


def asks_the_same(one: Batch, other: Batch) -> bool:
    """Return whether two batches that came with the same idempotency key ask for the same."""
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("input_file", "endpoint", "window", "metadata", "keep_ns")
    )


class Hold(Struct, frozen=True, kw_only=True):
    """The right to take one step with a batch; worth nothing once another was given."""

    batch: Batch
    owner: str
    term: int
    """Which hold on the batch this is, from 1."""


class Entry(Struct, frozen=True, kw_only=True):
    """A line that becomes a job."""

    spec: JobSpec
    body: bytes
    end: int
    """Where in its file the next line begins."""


class Kept(Struct, frozen=True, kw_only=True):
    """Files and batches at a glance."""

    files: int = 0
    bytes: int = 0
    batches: dict[Stage, int] = {}


class BatchStore(JobStore, Protocol):
    """A store of jobs with the files and batches of all tenants."""

    async def open_file(self, file: File) -> Declined | None:
        """Begin a file, which nobody sees before `keep_file`; it goes at its `until_ns`."""
        ...

    async def append(self, file: FileId, data: bytes) -> Declined | None:
        """Add to a file that was begun."""
        ...

    async def keep_file(self, file: File) -> Declined | None:
        """Have a file that was begun be there from `created_ns` on, as told but for its size, if it was not given up."""
        ...

    async def file(self, tenant: TenantId, file: FileId, now: UnixNs) -> File | None:
        """Return a file without its content."""
        ...

    async def files(
        self, tenant: TenantId, page: Page, purpose: Purpose | None, now: UnixNs
    ) -> list[File]:
        """Return a tenant's files in the order they came."""
        ...

    async def piece(self, file: FileId, nth: int) -> bytes | None:
        """Return a piece of a file, from 0; None: there is none, or not any more."""
        ...

    async def delete_file(self, tenant: TenantId, file: FileId, now: UnixNs) -> bool:
        """Have a file be gone; False: there was none. What a batch still reads of it stays until it has."""
        ...

    async def put_batch(self, batch: Batch) -> Progress | Declined:
        """Take a batch of one of its tenant's files; one that was put before by its key is found again."""
        ...

    async def batch(self, tenant: TenantId, batch: BatchId) -> Progress | None:
        """Return a batch as it stands."""
        ...

    async def batches(self, tenant: TenantId, page: Page) -> list[Progress]:
        """Return a tenant's batches in the order they came."""
        ...

    async def cancel_batch(self, tenant: TenantId, batch: BatchId, now: UnixNs) -> bool:
        """Not want a batch any more, and cancel some of its jobs; True: ask again, there are more.

        One that is over, or whose jobs are, stays as it is.
        """
        ...

    async def take_batch(self, owner: str, until: UnixNs, now: UnixNs) -> Hold | None:
        """Hold the batch that waited longest for its next step, of those that have one and are not held."""
        ...

    async def hold_batch(self, hold: Hold, until: UnixNs) -> bool:
        """Hold it for longer; False: another has it."""
        ...

    async def leave_batch(self, hold: Hold) -> None:
        """Give it back as it is."""
        ...

    async def check_batch(
        self, hold: Hold, lines: int, errors: tuple[LineError, ...], now: UnixNs
    ) -> bool:
        """Say what was found in its file, and give it back; False: another has it, or it is over."""
        ...

    async def enqueue(
        self, hold: Hold, entries: Sequence[Entry], rest: UnixNs, now: UnixNs
    ) -> list[Job] | None:
        """Make its next lines jobs, as many as there is room for, and give it back; None: another has it.

        Of what is cancelled or past its deadline already, the job is over at once and its body is not kept.
        Where there was room for none, nobody is given it before `rest`.
        """
        ...

    async def write_out(
        self, hold: Hold, names: tuple[FileId, FileId], now: UnixNs
    ) -> Batch | None:
        """Write jobs that are over into its files of output and errors, and forget them; give it back.

        Writing the last one closes it, and lets the files be seen. Jobs of a cancelled batch are cancelled
        first. `names`: of the files, where they are still to be begun. None: another has it.
        """
        ...

    async def purge_files(self, now: UnixNs) -> bool:
        """Forget files and batches whose time is over, some at a time; True: there are more."""
        ...

    async def kept(self) -> Kept:
        """Return everything at a glance."""
        ...
