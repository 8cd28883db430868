"""Which status, type and code does a caller see, and may the request be repeated?

One table over the plane's reasons and one over what the gateway refuses itself; nothing else in the
gateway names a status. Numbers are shown only where they are the caller's own limits.
"""

from collections.abc import Callable

from msgspec import UNSET, Struct
from msgspec.structs import replace

from headrace.gateway.edges import (
    EDGES,
    INVALID,
    LIMIT,
    OURS,
    QUOTA,
    SERVER,
    TIMEOUT,
    Edge,
    Face,
)
from headrace.model.decision import Gate, Reason, Reject, Verdict
from headrace.model.features import Feature
from headrace.model.ids import DecisionId
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, ceil_div

__all__ = ["EDGES", "REASONS", "Edge", "Face", "Fault", "Headers", "edge", "unfit"]

Headers = list[tuple[bytes, bytes]]


REASONS: dict[Reason, Face] = {
    Reason.TENANT_UNKNOWN: Face(401, INVALID, "invalid_api_key", "Incorrect API key provided."),
    Reason.MODEL_UNKNOWN: Face(
        404, INVALID, "model_not_found", "The model does not exist.", param="model"
    ),
    Reason.MODEL_NOT_ALLOWED: Face(
        403, INVALID, "model_not_allowed", "This key may not use the model.", param="model"
    ),
    Reason.CLASS_NOT_ALLOWED: Face(
        400,
        INVALID,
        "invalid_value",
        "This key may not ask for that objective.",
        param="x-llm-d-inference-objective",
    ),
    Reason.CONTEXT_TOO_LONG: Face(
        400,
        INVALID,
        "context_length_exceeded",
        "Prompt and answer together exceed the model's context.",
        param="messages",
    ),
    Reason.OUTPUT_TOO_LONG: Face(
        400,
        INVALID,
        "invalid_value",
        "More output tokens are asked for than the model gives.",
        param="max_tokens",
    ),
    Reason.INPUT_EMPTY: Face(
        400, INVALID, "invalid_value", "The prompt is empty.", param="messages"
    ),
    Reason.FEATURE_UNSUPPORTED: Face(
        400, INVALID, "unsupported_parameter", "The model does not do that."
    ),
    Reason.FAN_OUT_UNSUPPORTED: Face(
        400,
        INVALID,
        "unsupported_parameter",
        "More answers are asked for at once than the model gives; each prompt is one.",
        param="n",
    ),
    Reason.REQUEST_RATE: Face(
        429, LIMIT, "rate_limit_exceeded", "Limit of requests per minute reached.", retryable=True
    ),
    Reason.TOKEN_RATE: Face(
        429, LIMIT, "rate_limit_exceeded", "Limit of tokens per minute reached.", retryable=True
    ),
    Reason.TOKEN_LIMIT: Face(
        429, QUOTA, "insufficient_quota", "The request is larger than the whole token quota."
    ),
    Reason.BUDGET_RATE: Face(
        429, LIMIT, "rate_limit_exceeded", "The budget of this minute is spent.", retryable=True
    ),
    Reason.QUOTA_SPENT: Face(
        429, QUOTA, "insufficient_quota", "The quota is used up.", retryable=True
    ),
    Reason.BUDGET_SPENT: Face(
        429, QUOTA, "budget_exceeded", "The budget is spent.", retryable=True
    ),
    Reason.SESSIONS: Face(
        429, LIMIT, "concurrency_limit_exceeded", "Limit of sessions at once.", retryable=True
    ),
    Reason.CONCURRENCY: Face(
        429,
        LIMIT,
        "concurrency_limit_exceeded",
        "Limit of requests in parallel reached.",
        retryable=True,
    ),
    Reason.TENANT_QUEUE_FULL: Face(
        429, LIMIT, "slow_down", "Too many of your requests are waiting.", retryable=True
    ),
    Reason.NO_READY_REPLICA: Face(
        503,
        OURS,
        "no_ready_replica",
        "No replica of the model is ready.",
        retryable=True,
        dropped="rejected-no-endpoints",
    ),
    Reason.KV_TOO_LARGE: Face(
        400,
        INVALID,
        "context_length_exceeded",
        "Prompt and answer together fit into no replica's memory.",
        param="messages",
    ),
    Reason.DEADLINE_IMPOSSIBLE: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The first token could not come in time even without a queue.",
        dropped="rejected-saturated",
    ),
    Reason.DEADLINE_QUEUE: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The first token would come too late.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Reason.GAP_BOUND: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The answer would slow down others beyond what they were promised.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Reason.TPOT_BOUND: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The tokens would come more slowly than was promised, its own or others'.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Reason.LENGTH_SHARE: Face(
        503,
        OURS,
        "server_is_overloaded",
        "Longer prompts are let in too seldom, and what room there is is theirs.",
        retryable=True,
        dropped="rejected-saturated",
    ),
    Reason.QUEUE_PRESSURE: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The queue is full, and this request was furthest over its share.",
        retryable=True,
        dropped="evicted-queue-pressure",
    ),
    Reason.EXPIRED: Face(
        504,
        TIMEOUT,
        "deadline_exceeded",
        "The deadline of the first token passed in the queue.",
        dropped="rejected-ttl-expired",
    ),
    Reason.WAITED_OUT: Face(
        504,
        TIMEOUT,
        "deadline_exceeded",
        "It waited in the queue for as long as the request lets it.",
        param="x-llm-d-inference-ttl",
        dropped="rejected-ttl-expired",
    ),
    Reason.REPLICA_LOST: Face(
        502, SERVER, "upstream_error", "The replica was lost.", retryable=True, dropped="evicted"
    ),
    Reason.DRAINED: Face(
        502,
        SERVER,
        "upstream_error",
        "The replica had to go before the answer was complete.",
        retryable=True,
        dropped="evicted",
    ),
    Reason.UPSTREAM_ERROR: Face(
        502, SERVER, "upstream_error", "The engine failed.", retryable=True
    ),
    Reason.RESTARTED: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The gateway was restarted.",
        retryable=True,
        dropped="rejected-shutting-down",
    ),
    Reason.SHUT_DOWN: Face(
        503,
        OURS,
        "server_is_overloaded",
        "The gateway shut down before the answer was complete.",
        retryable=True,
        dropped="rejected-shutting-down",
    ),
}
"""Every reason of the plane."""

OWN_BOUND = Face(
    400,
    INVALID,
    "invalid_value",
    "No first token can come that soon, even without a queue.",
    param="x-slo-ttft-ms",
)
"""`DEADLINE_IMPOSSIBLE`, where the bound is a tighter one of the caller's own."""

FEATURES: dict[Feature, str] = {
    Feature.STREAMING: "stream",
    Feature.TOOLS: "tools",
    Feature.JSON: "response_format",
    Feature.SCHEMA: "response_format",
    Feature.LOGPROBS: "logprobs",
    Feature.BEST_OF: "best_of",
    Feature.PRIORITY: "priority",
}
"""By which field chat and completions ask for it."""


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
    left_ns: DurationNs | None = None
    """What is left of the time that the caller gave itself, where it gave any: who is asked to wait longer
    is told not to repeat."""
    message: str | None = None
    param: str | None = None
    """Instead of the face's, where the very field is known."""


_HEEDED_NS = 60 * NS_PER_S
"""The longest wait that SDKs go by."""


def refused(
    decision: DecisionId,
    rejection: Reject,
    revision: int,
    own_ttft_ns: DurationNs | None = None,
    left_ns: DurationNs | None = None,
) -> Fault:
    """Return how a rejection at the door looks.

    `own_ttft_ns`: the bound that the caller gave; `left_ns`: of all that it gave, what is left.
    """
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
        retryable=wait is not None and (left_ns is None or wait <= left_ns),
        decision_id=decision,
        policy_revision=revision,
        **numbers,
    )
    limit = next((one.limit for one in rejection.verdicts if one.reason is rejection.reason), UNSET)
    message = None if limit is UNSET else f"{face.message[:-1]}: {limit}."
    if rejection.reason is Reason.FEATURE_UNSUPPORTED and limit is not UNSET:
        face = replace(face, param=FEATURES[Feature(limit)])
    return Fault(face=face, detail=detail, retry_after_ns=wait, left_ns=left_ns, message=message)


def _own_numbers(rejection: Reject) -> dict[str, int]:
    """Return measured, threshold and margin where they are limits of the caller's own (DEG-3)."""
    if rejection.gate not in (Gate.CONTRACT, Gate.BUDGET):
        return {}
    for verdict in rejection.verdicts:
        if verdict.gate is rejection.gate and (found := _numbers(verdict)):
            return found
    return {}


def _numbers(verdict: Verdict) -> dict[str, int]:
    if not verdict.measured and not verdict.threshold:
        return {}
    return {
        "measured": verdict.measured,
        "threshold": verdict.threshold,
        "margin": verdict.margin,
    }


def failed(
    decision: DecisionId,
    reason: Reason,
    revision: int,
    *,
    sent: bool = False,
    left_ns: DurationNs | None = None,
) -> Fault:
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
    return Fault(face=face, detail=detail, retry_after_ns=_least_wait(face), left_ns=left_ns)


def unfit(verdict: Verdict) -> Fault:
    """Return the refusal of what one gate finds at fault, without a decision."""
    assert verdict.reason is not None, "it is at fault"
    detail = Detail(
        gate=verdict.gate,
        outcome="reject",
        reason=verdict.reason,
        retryable=False,
        decision_id=None,
        policy_revision=None,
        **_numbers(verdict),
    )
    return Fault(face=REASONS[verdict.reason], detail=detail)


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


def headers(fault: Fault, below: Callable[[int], int]) -> Headers:
    """Return what tells SDKs and routers whether and when to repeat.

    `below(n)` draws from 0 to n-1: waits are spread upwards by up to a quarter, never shortened.
    SDKs take no wait above a minute for one, and would be back within a second: they are told not to. So
    is who would come again when its own time is over (ADM-4).
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
    if wait > (_HEEDED_NS if fault.left_ns is None else min(_HEEDED_NS, fault.left_ns)):
        found.append((b"x-should-retry", b"false"))
    return found
