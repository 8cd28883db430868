"""What a benchmark claims, and how it measures.

Speed is CPU time, the best of several runs, read beside `calibration()`: the time the same machine
takes, then and there, for a loop that never changes. Policies are compared over seeds, with an
interval. Says nothing about what is measured; that is each benchmark's own module.
"""

import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

CLAIM_SEEDS = (100, 101, 102, 103, 104)
"""Seeds that figures are claimed on; whatever was tuned was tuned on others (0 to 4)."""

# fmt: off
STUDENT_T_975 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110,
    18: 2.101, 19: 2.093, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980,
}
# fmt: on
"""Quantile .975 of Student's t by degrees of freedom."""


class Claim(Struct, frozen=True, kw_only=True):
    """One figure and the bound it is held against."""

    claim: str
    value: float
    bound: str
    holds: bool


class Result(Struct, frozen=True, kw_only=True):
    """What one benchmark found.

    `detail` holds whatever explains the claims: anything that msgspec can write as JSON. `table` is
    printed below them.
    """

    name: str
    claims: list[Claim]
    seeds: Sequence[int] = ()
    detail: dict[str, Any] = {}
    table: str = ""


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def at_most(name: str, value: float, limit: float) -> Claim:
    """Claim that a figure is no more than a limit. A NaN holds no claim."""
    return Claim(claim=name, value=value, bound=f"<= {limit:.12g}", holds=value <= limit)


def at_least(name: str, value: float, limit: float) -> Claim:
    """Claim that a figure is no less than a limit. A NaN holds no claim."""
    return Claim(claim=name, value=value, bound=f">= {limit:.12g}", holds=value >= limit)


def best_of(n: int, fn: Callable[[], object]) -> float:
    """Return the least CPU time, in seconds, of `n` calls: what disturbs a run only adds to it.

    Counts this process, all threads, and no child.
    """
    return min(_cpu_seconds(fn) for _ in range(n))


def calibration() -> float:
    """Return the CPU seconds of a fixed pure-Python loop, best of 5; print it by a speed figure."""
    return best_of(5, _fixed_loop)


def interval95(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % interval: mean -+ t(n - 1) * s / sqrt(n), t being Student's.

    Between the table's rows the wider one is taken. One value says nothing about spread: its
    interval is infinite. No value at all is a mistake.
    """
    mean = statistics.fmean(values)
    freedom = len(values) - 1
    if freedom == 0:
        return Interval(mean, -math.inf, math.inf)
    t = STUDENT_T_975[max(row for row in STUDENT_T_975 if row <= freedom)]
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def commit_id() -> str:
    """Return the commit measured, marked -dirty if files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(  # noqa: S603 - a fixed command
            command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def machine() -> dict[str, str | int]:
    """Return what a reader needs to judge a figure: platform, interpreter, number of CPUs."""
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cpus": os.cpu_count() or 0,
    }


def _cpu_seconds(fn: Callable[[], object]) -> float:
    began = time.process_time()
    fn()
    return time.process_time() - began


def _fixed_loop() -> int:
    # Changing this makes all earlier figures incomparable.
    total = 0
    for i in range(1_000_000):
        total = (total * 31 + i) & 0xFFFF
    return total
