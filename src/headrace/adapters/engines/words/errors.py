"""What went wrong, as vLLM tells it on each path: an error's `code` is a number.

`/v1/messages` has errors of Anthropic's shape, under vLLM's types. In a stream that has a head
already, an error is an event; what the path's streams end with follows it.
"""

from headrace.adapters.engines.words.frame import DONE, encoded, event, named

_MESSAGES, _RESPONSES = "/v1/messages", "/v1/responses"
_TYPES = {
    400: "BadRequestError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error(kind: str, status: int, message: str, param: str | None = None) -> bytes:
    """Return the body of an error on a path."""
    if kind == _MESSAGES:
        told = {"type": _TYPES[status], "message": message}
        return encoded({"type": "error", "error": told})
    fault = {"message": message, "type": _TYPES[status], "param": param, "code": status}
    return encoded({"error": fault})


def streamed(kind: str, status: int, message: str) -> bytes:
    """Return all of a stream that has an error instead of an answer."""
    if kind == _MESSAGES:
        return named("error", error(kind, status, message))
    if kind == _RESPONSES:
        told = {"type": "error", "sequence_number": 0, "code": str(status), "message": message}
        return named("error", encoded({**told, "param": None}))
    return event(error(kind, status, message)) + DONE
