"""What is wrong with a configuration, and where exactly?"""

from collections.abc import Iterable

from msgspec import Struct

SHOWN_MAX = 50
"""Most faults told at once: enough for a screen, and the rest often follow from them."""


class Origin(Struct, frozen=True, gc=False):
    """Where a value was written: a file with a line, a variable of the environment, a flag."""

    source: str
    line: int | None = None
    """Counted from 1; None where there are no lines."""
    column: int | None = None

    def __str__(self) -> str:
        """Return `file:line`, as editors and terminals understand it."""
        return ":".join(str(part) for part in (self.source, self.line, self.column) if part)


class Fault(Struct, frozen=True, gc=False):
    """One thing that is wrong at one place."""

    origin: Origin
    message: str
    path: str = ""
    """As in `$.deployment.pools[0]`; empty where the text has no structure yet."""
    hint: str = ""

    def place(self) -> tuple[str, int]:
        """Return what to sort faults by: file, then line."""
        return self.origin.source, self.origin.line or 0

    def __str__(self) -> str:
        """Return the fault in one line."""
        place = f" at `{self.path}`" if self.path else ""
        hint = f" ({self.hint})" if self.hint else ""
        # A newline in a quoted value must not break "one fault, one line".
        return f"{self.origin}: {self.message}{place}{hint}".replace("\n", "\\n")


class ConfigError(ValueError):
    """A configuration that cannot be used: every fault found, one a line."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        """Hold the faults, at least one."""
        self.faults = tuple(faults)
        assert self.faults, "an error without a fault"
        lines = [str(fault) for fault in self.faults[:SHOWN_MAX]]
        if len(self.faults) > SHOWN_MAX:
            lines.append(f"and {len(self.faults) - SHOWN_MAX} more")
        super().__init__("\n".join(lines))
