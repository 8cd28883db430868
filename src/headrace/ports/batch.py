"""What is a caller's file, what is a batch of jobs made of one, and what may become of it?

Pure: the moves of a batch's life are functions from one `Batch` to the next, and a job's line in the files of
answers is made here, so that every store makes the same ones. Names and codes are those of OpenAI's API.
"""

from enum import StrEnum
from typing import NewType

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from headrace.model.ids import ClassName, TenantId
from headrace.ports.engine import Route
from headrace.ports.job import BatchId, Job, State, UnixNs
from headrace.ports.jobs import Result
from headrace.units import DurationNs

FileId = NewType("FileId", str)
"""One file; minted by the driver, and not to be guessed."""

LINES_MAX = 50_000
"""Most requests of one batch, as in OpenAI's API."""
ERRORS_MAX = 100
"""Most lines of one file whose faults are told."""


class Purpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    """It holds a batch's requests."""
    BATCH_OUTPUT = "batch_output"


class File(Struct, frozen=True, kw_only=True):
    """A file without its content."""

    id: FileId
    tenant: TenantId
    """Who alone may look at it."""
    purpose: Purpose
    name: str
    bytes: int = 0
    created_ns: UnixNs
    until_ns: UnixNs
    """From when on it is not there any more; of one that is still coming: when it is given up."""


class Stage(StrEnum):
    """Where a batch is. Also a metric label: a closed list."""

    VALIDATING = "validating"
    FAILED = "failed"
    """Its file is at fault; none of it was run."""
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    """All its jobs are over, and their answers are being written."""
    COMPLETED = "completed"
    EXPIRED = "expired"
    """Some of its jobs could not be begun in time; the answers to the others are there."""
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.VALIDATING: frozenset({Stage.FAILED, Stage.IN_PROGRESS, Stage.CANCELLED}),
    Stage.IN_PROGRESS: frozenset({Stage.FINALIZING, Stage.CANCELLING}),
    Stage.FINALIZING: frozenset({Stage.COMPLETED, Stage.EXPIRED}),
    Stage.CANCELLING: frozenset({Stage.CANCELLED}),
    Stage.FAILED: frozenset(),
    Stage.COMPLETED: frozenset(),
    Stage.EXPIRED: frozenset(),
    Stage.CANCELLED: frozenset(),
}
"""From each stage, those that may follow."""
CLOSED = frozenset(stage for stage, after in MOVES.items() if not after)
"""Stages that nothing follows."""


class LineError(Struct, frozen=True, kw_only=True):
    """What is wrong with a line of a batch's file."""

    code: str
    message: str
    line: int | None = None
    """From 1; None: the file itself."""
    param: str | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """A batch as it stands."""

    id: BatchId
    tenant: TenantId
    slo_class: ClassName
    endpoint: Route
    input_file: FileId
    window: str
    """As it was asked for."""
    headers: tuple[tuple[str, str], ...] = ()
    """Of the caller's own, those that decide how each line is served."""
    metadata: dict[str, str] | None = None
    key: str | None = None
    """The caller's idempotency key: one batch for each tenant and key, for as long as it is kept."""
    created_ns: UnixNs
    deadline_ns: UnixNs
    """From when on no line of it is begun."""
    keep_ns: DurationNs
    """How long it is kept after its end, and the files of its answers are."""
    stage: Stage = Stage.VALIDATING
    lines: int = 0
    """How many it has; 0 until they were checked."""
    put: int = 0
    """How many of them are jobs by now."""
    read: int = 0
    """How many bytes of its file those are."""
    completed: int = 0
    """Jobs that were done and are written; the next two likewise."""
    failed: int = 0
    """Also those that expired or were cancelled."""
    expired: int = 0
    errors: tuple[LineError, ...] = ()
    output_file: FileId | None = None
    error_file: FileId | None = None
    in_progress_ns: UnixNs | None = None
    finalizing_ns: UnixNs | None = None
    cancelling_ns: UnixNs | None = None
    ended_ns: UnixNs | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing will become of it any more."""
        return self.stage in CLOSED

    @property
    def left(self) -> int:
        """How many of its lines are no jobs yet."""
        return self.lines - self.put

    @property
    def reads(self) -> bool:
        """Whether its file is still needed."""
        return self.stage is Stage.VALIDATING or (not self.is_over and self.left > 0)


def _advance(batch: Batch, to: Stage) -> Stage:
    assert to in MOVES[batch.stage], f"{batch.id}: {batch.stage} -> {to}"
    return to


def checked(batch: Batch, lines: int, errors: tuple[LineError, ...], now: UnixNs) -> Batch:
    """Return a batch whose file was read: under way, or failed if anything is wrong with it."""
    if errors:
        stage = _advance(batch, Stage.FAILED)
        return replace(batch, stage=stage, errors=errors, ended_ns=now)
    return replace(batch, stage=_advance(batch, Stage.IN_PROGRESS), lines=lines, in_progress_ns=now)


def unwanted(batch: Batch, now: UnixNs) -> Batch:
    """Return a batch that its caller does not want, if that still changes anything."""
    if batch.stage is Stage.VALIDATING:
        stage = _advance(batch, Stage.CANCELLED)
        return replace(batch, stage=stage, cancelling_ns=now, ended_ns=now)
    if batch.stage is Stage.IN_PROGRESS:
        return replace(batch, stage=_advance(batch, Stage.CANCELLING), cancelling_ns=now)
    return batch


def finalizing(batch: Batch, now: UnixNs) -> Batch:
    """Return a batch whose jobs are all over; one that is cancelled is called so all the while."""
    if batch.stage is not Stage.IN_PROGRESS:
        return batch
    return replace(batch, stage=_advance(batch, Stage.FINALIZING), finalizing_ns=now)


def closed(batch: Batch, now: UnixNs) -> Batch:
    """Return a batch whose answers are all written."""
    stage = Stage.EXPIRED if batch.expired else Stage.COMPLETED
    if batch.stage is Stage.CANCELLING:
        stage = Stage.CANCELLED
    return replace(batch, stage=_advance(batch, stage), ended_ns=now)


# Lines of answers -------------------------------------------------------------------------------


class _Error(Struct, frozen=True):
    code: str
    message: str


class _Response(Struct, frozen=True, omit_defaults=True):
    status_code: int
    request_id: str
    body: Raw
    headers: dict[str, str] = {}
    """In what lesser form it was served, if it was: nobody is given less without being told."""


class _Line(Struct, frozen=True):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


_LEVEL = "x-headrace-degrade-level"
_FORM = (
    _LEVEL,
    "x-headrace-degrade-reason",
    "x-headrace-output-limit",
    "x-headrace-optional-kept",
)
"""Headers of answers that tell of their form."""

_WITHOUT: dict[State, _Error] = {
    State.EXPIRED: _Error(
        "batch_expired", "The request could not be begun within the completion window."
    ),
    State.CANCELLED: _Error("batch_cancelled", "The batch was cancelled before the request ended."),
    State.FAILED: _Error("upstream_error", "Whoever worked on the request was lost, each time."),
}


def written(job: Job, result: Result | None) -> bytes:
    """Return the line that tells how a job ended; one that is done belongs among the output, others do not."""
    response = error = None
    if result is None:
        error = _WITHOUT[job.state]
    else:
        told = dict(result.headers)
        less = {name: told[name] for name in _FORM if name in told}
        if less.get(_LEVEL, "0") == "0":
            less = {}
        response = _Response(result.status, job.spec.id, _on_one_line(result.body), less)
    name = job.spec.id.replace("job_", "batch_req_", 1)
    return msgspec.json.encode(_Line(name, job.spec.custom_id, response, error)) + b"\n"


def _on_one_line(body: bytes) -> Raw:
    """Return a body without line breaks; what is no JSON becomes a string."""
    try:
        body.decode()  # what is within strings is not looked at by `format`
        return Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Raw(msgspec.json.encode(body.decode("utf-8", "replace")))
