"""Which exit code, and which line, does a fault get?

Faults of the caller and of the world end in one clear line; a fault of ours keeps its traceback.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

OK = 0
FAILED = 1
"""A check ran and found something."""
USAGE = 2
"""The command line, a file or a setting is wrong."""
INVALID = 3
"""A check ran, and this machine was too busy for it to tell anything."""
INTERRUPTED = 130
READER_GONE = 141
"""What a shell reports of a program that a closed pipe ended."""


class Outcome(Struct):
    """How a command ended."""

    code: int = OK


@contextmanager
def reported() -> Iterator[Outcome]:
    """Turn known faults raised inside into a line on stderr and an exit code."""
    outcome = Outcome()
    try:
        yield outcome
        sys.stdout.flush()
    except KeyboardInterrupt:
        outcome.code = INTERRUPTED
    except BrokenPipeError:
        # The reader has gone, as `head` does; whatever is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        outcome.code = READER_GONE
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        outcome.code = fail(f"{place}{(error.strerror or str(error)).lower()}")
    except ValueError as error:
        if not _is_callers(error):
            raise
        outcome.code = fail(str(error))


def fail(message: str) -> int:
    """Print each line of a message on stderr and return the exit code for wrong usage."""
    for line in message.splitlines():
        print(f"headrace: {line}", file=sys.stderr)
    return USAGE


def _is_callers(error: ValueError) -> bool:
    # Imported only now: a command that never reads a trace should not pay for its readers.
    from headrace.config.errors import ConfigError  # noqa: PLC0415
    from headrace.trace.lines import TraceError  # noqa: PLC0415

    return isinstance(error, ConfigError | TraceError)
