"""How can an engine behind HTTP fail?

A closed set, so that whoever asked can say to its own caller what happened without knowing sockets.
An engine that answers with an error status has not failed in this sense: that is an answer.
"""

from enum import StrEnum


class Wait(StrEnum):
    """What was waited for in vain. Also a metric label: a closed list."""

    CONNECT = "connect"
    FIRST_BYTE = "first_byte"
    GAP = "gap"
    DEADLINE = "deadline"


class UpstreamError(Exception):
    """An exchange that did not end as it should."""

    retryable = False
    """Nothing of an answer came and the engine is not known to be at work: ask again, perhaps
    elsewhere, within the retry budget (RET-1)."""


class PoolFullError(UpstreamError):
    """As many connections as allowed are busy, or as this machine can have; nothing was sent."""

    retryable = True


class UnreachableError(UpstreamError):
    """No connection could be made: refused, bad certificate; nothing was sent."""

    retryable = True


class UnresolvedError(UpstreamError):
    """The server's name could not be looked up, which says nothing of the server; nothing was sent."""

    retryable = True


class LostError(UpstreamError):
    """The connection ended before a byte of the answer; the engine may have begun work."""

    retryable = True


class SilentError(UpstreamError):
    """Nothing came for too long. Safe to repeat only where nothing had been sent."""

    def __init__(self, wait: Wait) -> None:
        """Say what was waited for."""
        super().__init__(f"waited in vain: {wait}")
        self.wait = wait
        self.retryable = wait is Wait.CONNECT


class CutError(UpstreamError):
    """The answer began and did not end: the engine died, or closed too early."""


class MalformedError(UpstreamError):
    """What came is not HTTP as we accept it."""


class ReportedError(UpstreamError):
    """The engine itself ended its stream with an error event."""

    def __init__(self, data: bytes) -> None:
        """Hold the event's data, as it came."""
        super().__init__("the engine reported an error within its stream")
        self.data = data
