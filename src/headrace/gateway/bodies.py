"""How is an error written, in the words of each API's callers?"""

import msgspec
from msgspec import Struct

from headrace.gateway.errors import Detail, Fault
from headrace.ports.engine import Route


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
    Route.RESPONSES: {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "logprobs": "top_logprobs",
    },
    Route.EMBEDDINGS: {"messages": "input"},
}
"""What a face calls by chat's names, where it is called otherwise."""

DONE = b"data: [DONE]\n\n"
"""The last event of every stream of chat and completions."""


_ENCODE = msgspec.json.Encoder().encode


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
