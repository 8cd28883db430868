"""Which status, type and code does a caller see, and may the request be repeated?

One table over the plane's reasons and one over what the gateway refuses itself; nothing else in the
gateway names a status. Numbers are shown only where they are the caller's own limits.
"""

from collections.abc import Callable
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.model.decision import Gate, Reason, Reject
from headrace.model.ids import DecisionId
from headrace.ports.engine import Route
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, ceil_div

Headers = list[tuple[bytes, bytes]]


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


_INVALID, _LIMIT, _QUOTA = "invalid_request_error", "rate_limit_error", "insufficient_quota"
_OURS, _TIMEOUT, _SERVER = "service_unavailable_error", "timeout_error", "server_error"

REASONS: dict[Reason, Face] = {
    Reason.TENANT_UNKNOWN: Face(401, _INVALID, "invalid_api_key", "Incorrect API key provided."),
    Reason.MODEL_UNKNOWN: Face(
        404, _INVALID, "model_not_found", "The model does not exist.", param="model"
    ),
    Reason.MODEL_NOT_ALLOWED: Face(
        403, _INVALID, "model_not_allowed", "This key may not use the model.", param="model"
    ),
    Reason.CLASS_NOT_ALLOWED: Face(
        400,
        _INVALID,
        "invalid_value",
        "This key may not ask for that objective.",
        param="x-llm-d-inference-objective",
    ),
    Reason.CONTEXT_TOO_LONG: Face(
        400,
        _INVALID,
        "context_length_exceeded",
        "Prompt and answer together exceed the model's context.",
        param="messages",
    ),
    Reason.OUTPUT_TOO_LONG: Face(
        400,
        _INVALID,
        "invalid_value",
        "More output tokens are asked for than the model gives.",
        param="max_tokens",
    ),
    Reason.INPUT_EMPTY: Face(
        400, _INVALID, "invalid_value", "The prompt is empty.", param="messages"
    ),
    Reason.FAN_OUT_UNSUPPORTED: Face(
        400,
        _INVALID,
        "unsupported_parameter",
        "More answers are asked for at once than the model gives; each prompt is one.",
        param="n",
    ),
    Reason.REQUEST_RATE: Face(
        429, _LIMIT, "rate_limit_exceeded", "Limit of requests per minute reached.", retryable=True
    ),
    Reason.TOKEN_RATE: Face(
        429, _LIMIT, "rate_limit_exceeded", "Limit of tokens per minute reached.", retryable=True
    ),
    Reason.TOKEN_LIMIT: Face(
        429, _QUOTA, "insufficient_quota", "The request is larger than the whole token quota."
    ),
    Reason.CONCURRENCY: Face(
        429,
        _LIMIT,
        "concurrency_limit_exceeded",
        "Limit of requests in parallel reached.",
        retryable=True,
    ),
    Reason.TENANT_QUEUE_FULL: Face(
        429, _LIMIT, "slow_down", "Too many of your requests are waiting.", retryable=True
    ),
    Reason.NO_READY_REPLICA: Face(
        503,
        _OURS,
        "no_ready_replica",
        "No replica of the model is ready.",
        retryable=True,
        dropped="rejected-no-endpoints",
    ),
    Reason.KV_TOO_LARGE: Face(
        400,
        _INVALID,
        "context_length_exceeded",
        "Prompt and answer together fit into no replica's memory.",
        param="messages",
    ),
    Reason.DEADLINE_IMPOSSIBLE: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "The first token could not come in time even without a queue.",
        dropped="rejected-saturated",
    ),
    Reason.DEADLINE_QUEUE: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "The first token would come too late.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Reason.GAP_BOUND: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "The answer would slow down others beyond what they were promised.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Reason.LENGTH_SHARE: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "Longer prompts are let in too seldom, and what room there is is theirs.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Reason.QUEUE_PRESSURE: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "The queue is full, and this request was furthest over its share.",
        retryable=True,
        dropped="evicted-queue-pressure",
    ),
    Reason.EXPIRED: Face(
        504,
        _TIMEOUT,
        "deadline_exceeded",
        "The deadline of the first token passed in the queue.",
        dropped="rejected-ttl-expired",
    ),
    Reason.WAITED_OUT: Face(
        504,
        _TIMEOUT,
        "deadline_exceeded",
        "It waited in the queue for as long as the request lets it.",
        param="x-llm-d-inference-ttl",
        dropped="rejected-ttl-expired",
    ),
    Reason.REPLICA_LOST: Face(
        502, _SERVER, "upstream_error", "The replica was lost.", retryable=True, dropped="evicted"
    ),
    Reason.UPSTREAM_ERROR: Face(
        502, _SERVER, "upstream_error", "The engine failed.", retryable=True
    ),
    Reason.RESTARTED: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "The gateway was restarted.",
        retryable=True,
        dropped="rejected-shutting-down",
    ),
    Reason.SHUT_DOWN: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "The gateway shut down before the answer was complete.",
        retryable=True,
        dropped="rejected-shutting-down",
    ),
}
"""Every reason of the plane."""

OWN_BOUND = Face(
    400,
    _INVALID,
    "invalid_value",
    "No first token can come that soon, even without a queue.",
    param="x-slo-ttft-ms",
)
"""`DEADLINE_IMPOSSIBLE`, where the bound is a tighter one of the caller's own."""

EDGES: dict[Edge, Face] = {
    Edge.NO_SUCH_PATH: Face(404, _INVALID, "not_found", "Nothing is served under this path."),
    Edge.METHOD: Face(405, _INVALID, "method_not_allowed", "The path does not take this method."),
    Edge.BODY_TOO_LARGE: Face(413, _INVALID, "request_too_large", "The body is too large."),
    Edge.REQUEST_TIMEOUT: Face(
        408,
        _TIMEOUT,
        "request_timeout",
        "The request took too long to arrive.",
        retryable=True,
    ),
    Edge.HEAD_TOO_LARGE: Face(431, _INVALID, "headers_too_large", "The headers are too large."),
    Edge.MALFORMED: Face(400, _INVALID, "invalid_value", "The request is not valid."),
    Edge.OPEN_REQUESTS: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "Too many requests are open.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Edge.WRONG_KEYS: Face(
        429, _LIMIT, "slow_down", "Too many wrong keys from this address.", retryable=True
    ),
    Edge.SHUTTING_DOWN: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "The gateway is shutting down.",
        retryable=True,
        dropped="rejected-shutting-down",
    ),
    Edge.UPSTREAM: Face(
        502, _SERVER, "upstream_error", "The engine failed within its answer.", retryable=True
    ),
    Edge.ENGINE_FULL: Face(
        503,
        _OURS,
        "server_is_overloaded",
        "The engine takes no more just now.",
        retryable=True,
        dropped="evicted",
    ),
    Edge.INTERNAL: Face(500, _SERVER, "internal_error", "The gateway failed; this is a bug."),
}
"""Every refusal of the gateway's own."""


class Detail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Our part of an error body; SDKs ignore it."""

    gate: Gate | None
    outcome: str
    """`reject` at the door, `fail` after admission."""
    reason: str
    retryable: bool
    decision_id: DecisionId | None = None
    policy_revision: int | None = None
    measured: int | None = None
    threshold: int | None = None
    margin: int | None = None


class Fault(Struct, frozen=True, kw_only=True):
    """One error as a caller is to see it."""

    face: Face
    detail: Detail
    retry_after_ns: DurationNs | None = None
    """At least how long to wait; None: repeating does not help."""
    message: str | None = None
    param: str | None = None
    """Instead of the face's, where the very field is known."""


class _Error(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str
    headrace: Detail


class _Body(Struct, frozen=True):
    error: _Error


class _Typed(Struct, frozen=True, tag_field="type", tag="error"):
    """Anthropic's body and event."""

    error: _Error


class _Event(Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The event of responses: its own fields, and the object that makes SDKs raise."""

    code: str
    message: str
    param: str | None
    error: _Error


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types by status; any other is an `api_error`."""

_FIELDS: dict[Route, dict[str, str]] = {
    Route.COMPLETIONS: {"messages": "prompt"},
    Route.RESPONSES: {"messages": "input", "max_tokens": "max_output_tokens"},
    Route.EMBEDDINGS: {"messages": "input"},
}
"""What a face calls by chat's names, where it is called otherwise."""

DONE = b"data: [DONE]\n\n"
"""The last event of every stream of chat and completions."""

_ENCODE = msgspec.json.Encoder().encode


def refused(
    decision: DecisionId,
    rejection: Reject,
    revision: int,
    own_ttft_ns: DurationNs | None = None,
) -> Fault:
    """Return how a rejection at the door looks; `own_ttft_ns`: the bound that the caller gave."""
    face = REASONS[rejection.reason]
    if rejection.reason is Reason.DEADLINE_IMPOSSIBLE and any(
        one.gate is Gate.DEADLINE and one.threshold == own_ttft_ns for one in rejection.verdicts
    ):
        face = OWN_BOUND
    wait = rejection.retry_after_ns if face.retryable else None
    numbers = _own_numbers(rejection)
    detail = Detail(
        gate=rejection.gate,
        outcome="reject",
        reason=rejection.reason,
        retryable=wait is not None,
        decision_id=decision,
        policy_revision=revision,
        **numbers,
    )
    return Fault(face=face, detail=detail, retry_after_ns=wait)


def _own_numbers(rejection: Reject) -> dict[str, int]:
    """Return measured, threshold and margin where they are limits of the caller's own (DEG-3)."""
    if rejection.gate not in (Gate.CONTRACT, Gate.BUDGET):
        return {}
    for verdict in rejection.verdicts:
        if verdict.gate is rejection.gate and (verdict.measured or verdict.threshold):
            return {
                "measured": verdict.measured,
                "threshold": verdict.threshold,
                "margin": verdict.margin,
            }
    return {}


def failed(decision: DecisionId, reason: Reason, revision: int, *, sent: bool = False) -> Fault:
    """Return how the failure of an admitted request looks; `sent`: an engine had it."""
    face = REASONS[reason]
    if sent and face.dropped is not None:
        face = replace(face, dropped="evicted")  # the other words promise that none had
    detail = Detail(
        gate=None,
        outcome="fail",
        reason=reason,
        retryable=face.retryable,
        decision_id=decision,
        policy_revision=revision,
    )
    return Fault(face=face, detail=detail, retry_after_ns=_least_wait(face))


def unknown_key() -> Fault:
    """Return the refusal of a key that no tenant has; it never reaches the plane."""
    detail = Detail(
        gate=Gate.CONTRACT, outcome="reject", reason=Reason.TENANT_UNKNOWN, retryable=False
    )
    return Fault(face=REASONS[Reason.TENANT_UNKNOWN], detail=detail)


def edge(
    cause: Edge,
    message: str | None = None,
    param: str | None = None,
    *,
    decision: DecisionId | None = None,
    revision: int | None = None,
) -> Fault:
    """Return the gateway's own refusal; with the decision that admitted a request, its failure."""
    face = EDGES[cause]
    detail = Detail(
        gate=None,
        outcome="reject" if decision is None else "fail",
        reason=cause,
        retryable=face.retryable,
        decision_id=decision,
        policy_revision=None if decision is None else revision,
    )
    wait = _least_wait(face)
    return Fault(face=face, detail=detail, retry_after_ns=wait, message=message, param=param)


def _least_wait(face: Face) -> DurationNs | None:
    """A second where nobody computed how long it takes."""
    return DurationNs(NS_PER_S) if face.retryable else None


def body(fault: Fault, route: Route | None = None) -> bytes:
    """Return the error body as a route's callers know it; OpenAI's where there is no route."""
    error = _error(fault, route)
    return _ENCODE(_Typed(error) if route is Route.MESSAGES else _Body(error))


def broken(fault: Fault, route: Route) -> bytes:
    """Return the events that end a stream with an error: never a clean end alone."""
    error = _error(fault, route)
    match route:
        case Route.MESSAGES:
            return b"event: error\ndata: " + _ENCODE(_Typed(error)) + b"\n\n"
        case Route.RESPONSES:
            event = _Event(code=error.code, message=error.message, param=error.param, error=error)
            return b"event: error\ndata: " + _ENCODE(event) + b"\n\n"
        case Route.CHAT | Route.COMPLETIONS | Route.EMBEDDINGS:
            return b"data: " + _ENCODE(_Body(error)) + b"\n\n" + DONE


def _error(fault: Fault, route: Route | None) -> _Error:
    face = fault.face
    param = fault.param
    if param is None and face.param is not None:
        param = _FIELDS.get(route, {}).get(face.param, face.param) if route else face.param
    named = _ANTHROPIC.get(face.status, "api_error")
    return _Error(
        message=fault.message or face.message,
        type=named if route is Route.MESSAGES else face.type,
        param=param,
        code=face.code,
        headrace=fault.detail,
    )


def headers(fault: Fault, below: Callable[[int], int]) -> Headers:
    """Return what tells SDKs and routers whether and when to repeat.

    `below(n)` draws from 0 to n-1: waits are spread upwards by up to a quarter, never shortened.
    """
    found: Headers = []
    if fault.face.dropped is not None:
        found.append((b"x-llm-d-request-dropped-reason", fault.face.dropped.encode()))
    if fault.detail.decision_id is not None:
        found.append((b"x-headrace-decision-id", b"%d" % fault.detail.decision_id))
    if fault.retry_after_ns is None:
        found.append((b"x-should-retry", b"false"))
        return found
    wait = max(1, fault.retry_after_ns)
    wait += below(wait // 4 + 1)
    found.append((b"retry-after", b"%d" % ceil_div(wait, NS_PER_S)))
    found.append((b"retry-after-ms", b"%d" % ceil_div(wait, NS_PER_MS)))
    return found
