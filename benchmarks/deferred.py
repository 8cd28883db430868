"""Do deferred jobs fill what live traffic leaves over, and does it not notice?

One H100 8B replica behind the gateway's own driver, desk and dispatcher, in virtual time. Live requests
come in bursts of 4 s, six times as dense as the 16 s between, and take a third of what the replica can do;
there is always another job. The identical live trace without jobs and with them, and jobs alone: what
the replica can do. Time in steps says little, as one decode fills it; the work done is held against the same
bound. All is counted after the first 10 s, in which jobs become more one by one.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import looptime

from benchmarks.harness import CLAIM_SEEDS, Result, at_least, at_most, interval95
from headrace.policy.catalog import Window
from headrace.units import NS_PER_MS, ms, to_ms
from tests.gateway.leftover import Seen
from tests.gateway.leftover import run as served

WINDOW_NS = ms(Window().prefill_ms)
"""The dispatch window: how soon new dispatches are to be live traffic's."""


def run(quick: bool) -> Result:
    """Measure the three runs of each seed."""
    span_s = 50 if quick else 170
    rows = [_row(seed, span_s) for seed in CLAIM_SEEDS]

    def interval(name: str) -> tuple[float, float, float]:
        return interval95([row[name] for row in rows])

    busy, work, lost = interval("busy"), interval("work"), interval("lost")
    return Result(
        name="deferred",
        seeds=list(CLAIM_SEEDS),
        claims=[
            at_least("same live trace with and without jobs, of all seeds", _all(rows, "same"), 1),
            at_least("busy part of the time, lower end of the interval", busy[1], 0.9),
            at_least("work over that of jobs alone, lower end", work[1], 0.9),
            at_most("attainment that jobs cost, upper end of the interval", lost[2], 0.01),
            at_least("bursts", sum(row["bursts"] for row in rows), len(rows)),
            at_most(
                "longest from a burst's begin to its first dispatch, ms",
                max(row["first_dispatch_ms"] for row in rows),
                to_ms(WINDOW_NS),
            ),
            at_most(
                "jobs sent while live requests had waited for a window",
                sum(row["in_the_way"] for row in rows),
                0,
            ),
        ],
        detail={"busy": busy, "work": work, "lost": lost, "span_s": span_s, "runs": rows},
    )


def _all(rows: Sequence[dict[str, Any]], name: str) -> float:
    return sum(bool(row[name]) for row in rows) / len(rows)


def _row(seed: int, span_s: int) -> dict[str, Any]:
    """Return what one seed's runs come to."""
    alone = virtual(lambda: served(seed, span_s, live=True, jobs=False))
    full = virtual(lambda: served(seed, span_s, live=False, jobs=True))
    both = virtual(lambda: served(seed, span_s, live=True, jobs=True))
    firsts = both.first_dispatches_ns()
    return {
        "seed": seed,
        "same": alone.offered == both.offered,
        "live_requests": len(both.offered),
        "busy_alone": alone.busy,
        "busy": both.busy,
        "work_alone": alone.work_ns / full.work_ns,
        "work": both.work_ns / full.work_ns,
        "attainment_alone": alone.attainment,
        "attainment": both.attainment,
        "lost": alone.attainment - both.attainment,
        "jobs": len(both.jobs_sent),
        "bursts": len(firsts),
        "first_dispatch_ms": max(
            (math.inf if one is None else one / NS_PER_MS for one in firsts), default=math.inf
        ),
        "in_the_way": both.jobs_in_the_way(WINDOW_NS),
    }


def virtual(doing: Callable[[], Any]) -> Seen:
    """Return what comes of a coroutine whose waits take no time."""
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        found: Seen = runner.run(doing())
    return found
