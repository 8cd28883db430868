"""How does what the gateway itself refuses, or fails, look from outside?

One table beside that of the plane's reasons (`errors`).
"""

from enum import StrEnum

from msgspec import Struct

INVALID, LIMIT, QUOTA = "invalid_request_error", "rate_limit_error", "insufficient_quota"
OURS, TIMEOUT, SERVER = "service_unavailable_error", "timeout_error", "server_error"


class Face(Struct, frozen=True):
    """How one cause looks from outside."""

    status: int
    type: str
    code: str
    message: str
    retryable: bool = False
    """Whether the same request, repeated later, can succeed."""
    param: str | None = None
    dropped: str | None = None
    """`x-llm-d-request-dropped-reason`: ours to blame, so that routers before us know."""


class Edge(StrEnum):
    """What the gateway refuses or fails itself, without asking the plane."""

    NO_SUCH_PATH = "no_such_path"
    METHOD = "method"
    REQUEST_TIMEOUT = "request_timeout"
    BODY_TOO_LARGE = "body_too_large"
    HEAD_TOO_LARGE = "head_too_large"
    MALFORMED = "malformed"
    OPEN_REQUESTS = "open_requests"
    WRONG_KEYS = "wrong_keys"
    SHUTTING_DOWN = "shutting_down"
    UPSTREAM = "upstream"
    ENGINE_FULL = "engine_full"
    INTERNAL = "internal"
    NO_SUCH_JOB = "no_such_job"
    KEY_MISMATCH = "key_mismatch"
    JOBS_OF_TENANT = "jobs_of_tenant"
    JOBS_FULL = "jobs_full"
    JOBS_TROUBLE = "jobs_trouble"
    JOB_CANCELLED = "job_cancelled"
    JOB_EXPIRED = "job_expired"
    JOB_FAILED = "job_failed"
    NO_SUCH_FILE = "no_such_file"
    NO_SUCH_BATCH = "no_such_batch"
    BATCH_OVER = "batch_over"
    FILES_OF_TENANT = "files_of_tenant"
    BATCHES_OF_TENANT = "batches_of_tenant"


EDGES: dict[Edge, Face] = {
    Edge.NO_SUCH_PATH: Face(404, INVALID, "not_found", "Nothing is served under this path."),
    Edge.METHOD: Face(405, INVALID, "method_not_allowed", "The path does not take this method."),
    Edge.BODY_TOO_LARGE: Face(413, INVALID, "request_too_large", "The body is too large."),
    Edge.REQUEST_TIMEOUT: Face(
        408,
        TIMEOUT,
        "request_timeout",
        "The request took too long to arrive.",
        retryable=True,
    ),
    Edge.HEAD_TOO_LARGE: Face(431, INVALID, "headers_too_large", "The headers are too large."),
    Edge.MALFORMED: Face(400, INVALID, "invalid_value", "The request is not valid."),
    Edge.OPEN_REQUESTS: Face(
        503,
        OURS,
        "server_is_overloaded",
        "Too many requests are open.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Edge.WRONG_KEYS: Face(
        429, LIMIT, "slow_down", "Too many wrong keys from this address.", retryable=True
    ),
    Edge.SHUTTING_DOWN: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The gateway is shutting down.",
        retryable=True,
        dropped="rejected-shutting-down",
    ),
    Edge.UPSTREAM: Face(
        502, SERVER, "upstream_error", "The engine failed within its answer.", retryable=True
    ),
    Edge.ENGINE_FULL: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The engine takes no more just now.",
        retryable=True,
        dropped="evicted",
    ),
    Edge.INTERNAL: Face(500, SERVER, "internal_error", "The gateway failed; this is a bug."),
    Edge.NO_SUCH_JOB: Face(404, INVALID, "job_not_found", "There is no such job, or no more."),
    Edge.KEY_MISMATCH: Face(
        422,
        INVALID,
        "idempotency_mismatch",
        "The idempotency key was used for another request.",
        param="idempotency-key",
    ),
    Edge.JOBS_OF_TENANT: Face(
        429, LIMIT, "slow_down", "Too many of your deferred requests wait.", retryable=True
    ),
    Edge.JOBS_FULL: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The queue of deferred requests is full.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Edge.JOBS_TROUBLE: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The queue of deferred requests does not answer.",
        retryable=True,
        dropped="rejected-internal",
    ),
    Edge.JOB_CANCELLED: Face(410, INVALID, "job_cancelled", "The job was cancelled."),
    Edge.JOB_EXPIRED: Face(
        504,
        TIMEOUT,
        "deadline_exceeded",
        "The job could not be begun before its deadline.",
        dropped="rejected-ttl-expired",
    ),
    Edge.JOB_FAILED: Face(
        502, SERVER, "upstream_error", "Whoever worked on the job was lost, each time."
    ),
    Edge.NO_SUCH_FILE: Face(404, INVALID, "file_not_found", "There is no such file, or no more."),
    Edge.NO_SUCH_BATCH: Face(
        404, INVALID, "batch_not_found", "There is no such batch, or no more."
    ),
    Edge.BATCH_OVER: Face(
        400, INVALID, "batch_over", "Nothing of the batch is left to be cancelled."
    ),
    Edge.FILES_OF_TENANT: Face(
        429, LIMIT, "too_many_files", "There are too many of your files: delete some."
    ),
    Edge.BATCHES_OF_TENANT: Face(
        429, LIMIT, "slow_down", "Too many of your batches are under way.", retryable=True
    ),
}
"""Every refusal of the gateway's own."""
