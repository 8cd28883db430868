"""One thing in a configuration that does not fit, and where."""

import difflib
from collections.abc import Collection, Iterator
from enum import StrEnum

from msgspec import Struct

_COMPARED_MAX = 1_000
"""Most names that a wrong one is compared with."""


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


def unknown(path: str, word: str, name: str | None, known: Collection[str]) -> Iterator[Problem]:
    """Yield a problem if a name is none of those known; None names nothing."""
    if name is None or name in known:
        return
    near = known if len(known) <= _COMPARED_MAX else ()
    close = difflib.get_close_matches(name, near, n=1)
    hint = f": did you mean `{close[0]}`?" if close else ""
    yield Problem(path=path, message=f"unknown {word} `{name}`{hint}")
