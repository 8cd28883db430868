"""Does an engine fail, or does it only take no more just now?

vLLM says so by status 503, but to a stream, whose head it sent already, by an event of code 503.
"""

import msgspec
from msgspec import Struct

from headrace.adapters.upstream.usage import UNREADABLE
from headrace.ports.upstream import ReportedError, UpstreamError

_FULL = frozenset({503, 529})
"""Statuses of one that is full; the second is Anthropic's."""
_FULL_TYPES = frozenset({"overloaded_error", "ServiceUnavailableError"})
"""Where an error has no code: Anthropic's word, and vLLM's under Anthropic's shape."""


class _Error(Struct):
    code: int | str | None = None
    type: str | None = None

    def full(self) -> bool:
        return str(self.code) in map(str, _FULL) or self.type in _FULL_TYPES


class _Response(Struct):
    error: _Error | None = None


class _Event(Struct):
    error: _Error | None = None
    response: _Response | None = None
    code: int | str | None = None


_EVENT = msgspec.json.Decoder(_Event)


def is_full(status: int, error: UpstreamError | None) -> bool:
    """Return whether an answer's status, or what ended its stream, says that the engine is full."""
    if error is None:
        return status in _FULL
    if not isinstance(error, ReportedError):
        return False
    try:
        told = _EVENT.decode(error.data)
    except UNREADABLE:
        return False
    within = None if told.response is None else told.response.error
    errors = (told.error, within, _Error(code=told.code))
    return any(one.full() for one in errors if one is not None)
