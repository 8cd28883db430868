"""The table of errors: complete, and honest about repeating."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.bodies import body, broken
from headrace.gateway.errors import (
    EDGES,
    REASONS,
    Edge,
    Face,
    Fault,
    edge,
    failed,
    headers,
    refused,
)
from headrace.model.decision import Gate, Reason, Reject, Verdict
from headrace.model.ids import DecisionId
from headrace.ports.engine import Route
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs

# conventions of OpenAI's callers: what SDKs and dashboards key on.
TYPES = {
    400: {"invalid_request_error"},
    401: {"invalid_request_error"},
    403: {"invalid_request_error"},
    404: {"invalid_request_error"},
    405: {"invalid_request_error"},
    408: {"timeout_error"},
    410: {"invalid_request_error"},
    413: {"invalid_request_error"},
    422: {"invalid_request_error"},
    431: {"invalid_request_error"},
    429: {"rate_limit_error", "insufficient_quota"},
    500: {"server_error"},
    502: {"server_error"},
    503: {"service_unavailable_error"},
    504: {"timeout_error"},
}


_INVALID, _SERVER, _OURS = "invalid_request_error", "server_error", "service_unavailable_error"
ROWS: dict[tuple[int, str], set[str]] = {
    (400, _INVALID): {
        "context_length_exceeded",
        "invalid_value",
        "unsupported_parameter",
        "batch_over",
    },
    (401, _INVALID): {"invalid_api_key"},
    (403, _INVALID): {"model_not_allowed"},
    (404, _INVALID): {
        "model_not_found",
        "not_found",
        "job_not_found",
        "file_not_found",
        "batch_not_found",
    },
    (405, _INVALID): {"method_not_allowed"},
    (410, _INVALID): {"job_cancelled"},
    (422, _INVALID): {"idempotency_mismatch"},
    (429, "rate_limit_error"): {
        "rate_limit_exceeded",
        "concurrency_limit_exceeded",
        "slow_down",
        "too_many_files",
    },
    (408, "timeout_error"): {"request_timeout"},
    (413, _INVALID): {"request_too_large"},
    (431, _INVALID): {"headers_too_large"},
    (502, _SERVER): {"upstream_error"},
    (429, "insufficient_quota"): {"insufficient_quota", "budget_exceeded"},
    (500, _SERVER): {"internal_error"},
    (503, _OURS): {"server_is_overloaded", "no_ready_replica"},
    (504, "timeout_error"): {"deadline_exceeded"},
}
"""Every status and type that callers may see, with its codes."""
DROPPED = {
    "rejected-saturated", "rejected-no-endpoints", "rejected-ttl-expired", "rejected-context-cancelled",
    "rejected-shutting-down", "rejected-internal", "evicted", "evicted-queue-pressure", "evicted-priority",
}  # fmt: skip
AGAIN = {
    Reason.QUEUE_PRESSURE: "evicted-queue-pressure",
    Reason.RESTARTED: "rejected-shutting-down",
    Reason.SHUT_DOWN: "rejected-shutting-down",
    Edge.SHUTTING_DOWN: "rejected-shutting-down",
    Edge.ENGINE_FULL: "evicted",
    Edge.JOBS_TROUBLE: "rejected-internal",
}
"""What a 503 that is not for want of capacity at the door tells routers."""
NEVER = {Reason.TOKEN_LIMIT, Reason.DEADLINE_IMPOSSIBLE, Edge.JOB_FAILED, Edge.FILES_OF_TENANT}
"""What is refused by 429, 502 or 503, and would be again."""


def face_of(cause: Reason | Edge) -> Face:
    return REASONS[cause] if isinstance(cause, Reason) else EDGES[cause]


def test_the_table_of_statuses_types_and_codes_is_complete_and_kept() -> None:
    found: dict[tuple[int, str], set[str]] = {}
    for face in (*REASONS.values(), *EDGES.values()):
        found.setdefault((face.status, face.type), set()).add(face.code)
    assert found == ROWS


@pytest.mark.parametrize("cause", [*REASONS, *EDGES])
def test_routers_are_told_who_was_dropped_for_our_sake_and_nobody_for_its_own(
    cause: Reason | Edge,
) -> None:
    face = face_of(cause)
    expected = None  # a limit or a fault of the caller's own
    match face.status, face.code:
        case 503, "no_ready_replica":
            expected = "rejected-no-endpoints"
        case 503, _:
            expected = AGAIN.get(cause, "rejected-saturated")
        case 504, _:
            expected = "rejected-ttl-expired"
        case 502, _ if cause in (Reason.REPLICA_LOST, Reason.DRAINED):
            expected = "evicted"
    assert face.dropped == expected
    assert face.dropped is None or face.dropped in DROPPED


@pytest.mark.parametrize("cause", [*REASONS, *EDGES])
def test_a_repeat_is_asked_for_where_it_can_help_alone(cause: Reason | Edge) -> None:
    face = face_of(cause)
    may_help = face.status in (408, 429, 502, 503) and cause not in NEVER
    assert face.retryable is may_help
    told = dict(headers(Fault(face=face, detail=edge(Edge.INTERNAL).detail), lambda _: 0))
    assert told[b"x-should-retry"] == b"false", "without a wait nobody is asked to come again"


@pytest.mark.parametrize(
    ("wait_s", "left_s", "should"),
    [(3, None, None), (3, 4, None), (3, 3, None), (3, 2.9, b"false"), (3, 0, b"false")],
)
def test_a_wait_beyond_what_is_left_is_told_whole_and_not_to_be_waited_for(
    wait_s: int, left_s: float | None, should: bytes | None
) -> None:
    left = None if left_s is None else DurationNs(int(left_s * NS_PER_S))
    wait = wait_s * NS_PER_S
    fault = refused(
        DecisionId(1), rejection(Reason.DEADLINE_QUEUE, Gate.DEADLINE, wait), 1, left_ns=left
    )
    told = dict(headers(fault, lambda _: 0))
    assert told[b"retry-after"] == b"%d" % wait_s, "never shortened"
    assert told.get(b"x-should-retry") == should
    assert fault.detail.retryable is (should is None)
    stretched = dict(headers(fault, lambda bound: bound - 1))
    if left_s == wait_s:
        assert stretched[b"x-should-retry"] == b"false", "what is told is what counts"


def test_an_evicted_request_is_told_not_to_come_again_after_its_own_time() -> None:
    late = failed(DecisionId(1), Reason.QUEUE_PRESSURE, 1, left_ns=DurationNs(NS_PER_S - 1))
    soon = failed(DecisionId(1), Reason.QUEUE_PRESSURE, 1, left_ns=DurationNs(NS_PER_S))
    assert dict(headers(late, lambda _: 0))[b"x-should-retry"] == b"false"
    assert b"x-should-retry" not in dict(headers(soon, lambda _: 0))


def test_every_reason_has_a_face() -> None:
    assert set(REASONS) == set(Reason)
    assert set(EDGES) == set(Edge)


@pytest.mark.parametrize("cause", [*REASONS, *EDGES])
def test_a_face_is_of_its_status(cause: Reason | Edge) -> None:
    face = face_of(cause)
    assert face.type in TYPES[face.status]
    assert not (face.retryable and face.status < 429 and face.status != 408)
    assert not (face.retryable and face.status == 504), "504 is never to be repeated"
    assert face.dropped is None or face.status >= 502


def rejection(reason: Reason, gate: Gate, retry_after_ns: int | None) -> Reject:
    verdict = Verdict(gate=gate, reason=reason, measured=12, threshold=10)
    return Reject(
        reason=reason,
        gate=gate,
        slack_ns=0,
        retry_after_ns=None if retry_after_ns is None else DurationNs(retry_after_ns),
        verdicts=(Verdict(gate=Gate.CONTRACT, reason=None), verdict),
    )


def test_numbers_are_shown_only_where_they_are_the_callers() -> None:
    shown = refused(DecisionId(7), rejection(Reason.TOKEN_RATE, Gate.BUDGET, NS_PER_S), 3)
    told = json.loads(body(shown))["error"]["headrace"]
    assert told == {
        "gate": "budget",
        "outcome": "reject",
        "reason": "token_rate",
        "retryable": True,
        "decision_id": 7,
        "policy_revision": 3,
        "measured": 12,
        "threshold": 10,
        "margin": -2,
    }
    hidden = refused(DecisionId(7), rejection(Reason.DEADLINE_QUEUE, Gate.DEADLINE, NS_PER_S), 3)
    told = json.loads(body(hidden))["error"]["headrace"]
    assert not {"measured", "threshold", "margin"} & set(told)


def test_a_code_is_text_and_a_param_may_be_null() -> None:
    error = json.loads(body(edge(Edge.INTERNAL)))["error"]
    assert set(error) == {"message", "type", "param", "code", "headrace"}
    assert error["param"] is None
    assert isinstance(error["code"], str)


@given(wait=st.integers(0, 1 << 50), draw=st.floats(0, 1, exclude_max=True))
def test_a_wait_is_stretched_by_at_most_a_quarter_and_never_shortened(
    wait: int, draw: float
) -> None:
    fault = refused(DecisionId(1), rejection(Reason.TOKEN_RATE, Gate.BUDGET, wait), 1)
    told = dict(headers(fault, lambda bound: int(draw * bound)))
    seconds, millis = int(told[b"retry-after"]), int(told[b"retry-after-ms"])
    assert seconds >= 1
    assert millis * NS_PER_MS >= wait
    assert seconds * NS_PER_S >= wait
    assert millis * NS_PER_MS <= wait * 5 // 4 + 2 * NS_PER_MS
    assert seconds * NS_PER_S <= wait * 5 // 4 + 2 * NS_PER_S
    assert (b"x-should-retry" in told) is (millis > 60_000), "SDKs heed no longer wait"


def test_where_nobody_knows_how_long_it_is_a_second() -> None:
    told = dict(headers(failed(DecisionId(1), Reason.REPLICA_LOST, 1), lambda _: 0))
    assert (told[b"retry-after"], told[b"retry-after-ms"]) == (b"1", b"1000")


@pytest.mark.parametrize("reason", [Reason.EXPIRED, Reason.TOKEN_LIMIT, Reason.KV_TOO_LARGE])
def test_what_repeating_does_not_help_says_so(reason: Reason) -> None:
    told = dict(headers(failed(DecisionId(1), reason, 1), lambda _: 0))
    assert told[b"x-should-retry"] == b"false"
    assert b"retry-after" not in told


def test_a_plane_that_knows_no_wait_is_believed() -> None:
    fault = refused(DecisionId(1), rejection(Reason.GAP_BOUND, Gate.DEADLINE, None), 1)
    assert fault.detail.retryable is False
    assert dict(headers(fault, lambda _: 0))[b"x-should-retry"] == b"false"


def test_slow_requests_and_long_heads_are_told_by_their_conventional_names() -> None:
    slow, long = (
        json.loads(body(edge(one)))["error"] for one in (Edge.REQUEST_TIMEOUT, Edge.HEAD_TOO_LARGE)
    )
    assert (slow["type"], slow["code"]) == ("timeout_error", "request_timeout")
    assert (long["type"], long["code"]) == ("invalid_request_error", "headers_too_large")


LOST = failed(DecisionId(1), Reason.REPLICA_LOST, 1)


@pytest.mark.parametrize("route", [route for route in Route if route is not Route.MESSAGES])
def test_openai_routes_share_one_body(route: Route) -> None:
    assert body(LOST, route) == body(LOST)


# The types that Anthropic documents, by status.
ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@pytest.mark.parametrize(
    "fault",
    [*(failed(DecisionId(1), reason, 1) for reason in REASONS), *map(edge, EDGES)],
    ids=lambda fault: fault.detail.reason,
)
def test_messages_have_anthropics_body(fault: Fault) -> None:
    told, plain = json.loads(body(fault, Route.MESSAGES)), json.loads(body(fault))["error"]
    assert set(told) == {"type", "error"}
    assert told["type"] == "error"
    named = told["error"].pop("type")
    if fault.face.status in ANTHROPIC:
        assert named == ANTHROPIC[fault.face.status]
    del plain["type"]
    assert told["error"] == plain


@pytest.mark.parametrize(
    ("reason", "params"),
    [
        (Reason.INPUT_EMPTY, ("messages", "prompt", "input", "messages", "input")),
        (
            Reason.OUTPUT_TOO_LONG,
            ("max_tokens", "max_tokens", "max_output_tokens", "max_tokens", "max_tokens"),
        ),
        (Reason.MODEL_UNKNOWN, ("model",) * 5),
    ],
)
def test_a_field_is_called_what_its_route_calls_it(reason: Reason, params: tuple[str, ...]) -> None:
    fault = failed(DecisionId(1), reason, 1)
    told = (json.loads(body(fault, route))["error"]["param"] for route in Route)
    assert tuple(told) == params
    own = edge(Edge.MALFORMED, "Wrong.", "messages")
    assert json.loads(body(own, Route.RESPONSES))["error"]["param"] == "messages"


@pytest.mark.parametrize("route", [Route.CHAT, Route.COMPLETIONS])
def test_a_broken_stream_ends_with_the_error_and_then_its_end(route: Route) -> None:
    assert broken(LOST, route) == b"data: " + body(LOST) + b"\n\ndata: [DONE]\n\n"


def test_a_broken_stream_of_messages_ends_with_an_error_event() -> None:
    assert broken(LOST, Route.MESSAGES) == (
        b"event: error\ndata: " + body(LOST, Route.MESSAGES) + b"\n\n"
    )


def test_a_broken_stream_of_responses_ends_with_an_error_event() -> None:
    """With the event's own fields, and with the object that makes OpenAI's SDK raise."""
    name, data, *rest = broken(LOST, Route.RESPONSES).split(b"\n")
    assert (name, rest) == (b"event: error", [b"", b""])
    told = json.loads(data.removeprefix(b"data: "))
    error = json.loads(body(LOST))["error"]
    assert told == {
        "type": "error",
        "code": "upstream_error",
        "message": "The replica was lost.",
        "param": None,
        "error": error,
    }
