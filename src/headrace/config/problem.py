"""One thing in a configuration that does not fit, and where."""

from enum import StrEnum

from msgspec import Struct


class Severity(StrEnum):
    """Whether a problem stops the start."""

    ERROR = "error"
    WARNING = "warning"


class Problem(Struct, frozen=True, kw_only=True, gc=False):
    """One thing that does not fit, and where."""

    path: str
    """As in `$.deployment.pools[0].model`."""
    message: str
    severity: Severity = Severity.ERROR


def warning(path: str, message: str) -> Problem:
    """Return what works, though hardly as meant."""
    return Problem(path=path, message=message, severity=Severity.WARNING)
