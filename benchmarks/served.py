"""What a trace comes to on one engine alone: first tokens, gaps and who met their bounds.

Without a gateway: for comparing what happens inside an engine.
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.engines import LARGE, token_times
from headrace.model.ids import AttemptId, TenantId
from headrace.policy.batching import Batching
from headrace.replica.job import Job
from headrace.trace.row import TraceRow
from headrace.units import DurationNs, InstantNs, later


class Served(Struct, frozen=True, kw_only=True):
    """One trace under one policy. Durations in ns, in the order of the rows."""

    rows: Sequence[TraceRow]
    ttft_ns: DurationNs
    gap_ns: DurationNs
    """The bounds of every request."""
    waits: list[int]
    """To the first token."""
    gaps: list[list[int]]
    """Between the tokens of each answer."""
    pauses: list[int]
    """Before each step that made tokens for running streams, how long any of them had waited."""
    work: list[int]
    """Predicted GPU time."""

    def every_gap(self) -> list[int]:
        """Return the gaps of all answers."""
        return [gap for gaps in self.gaps for gap in gaps]

    def over(self) -> int:
        """Return the steps by whose end some stream had waited longer than it may."""
        return sum(pause > self.gap_ns for pause in self.pauses)

    def met(self) -> list[bool]:
        """Say of each request whether its first token and 99 % of its gaps came in time."""
        return [
            wait <= self.ttft_ns and 100 * sum(gap > self.gap_ns for gap in gaps) <= len(gaps)
            for wait, gaps in zip(self.waits, self.gaps, strict=True)
        ]

    def met_requests(self) -> float:
        """Return met over offered, by requests."""
        return sum(self.met()) / len(self.rows)

    def met_work(self) -> float:
        """Return met over offered, by work."""
        done = sum(work for work, well in zip(self.work, self.met(), strict=True) if well)
        return done / sum(self.work)


def serve(
    batching: Batching, rows: Sequence[TraceRow], *, ttft_ns: DurationNs, gap_ns: DurationNs
) -> Served:
    """Run a trace to its end on the large engine, which must be able to hold each request."""
    jobs = [
        Job(
            attempt=AttemptId(nth),
            prompt_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            gap_bound_ns=gap_ns,
            tenant=row.tenant or TenantId(""),
            deadline=later(row.at, ttft_ns),
        )
        for nth, row in enumerate(rows)
    ]
    times = token_times(
        replace(LARGE, batching=batching),
        [(row.at, job) for row, job in zip(rows, jobs, strict=True)],
    )
    pauses: dict[InstantNs, int] = {}
    for at, after in (pair for mine in times for pair in pairwise(mine)):
        pauses[after] = max(after - at, pauses.get(after, 0))
    profile = LARGE.profile
    return Served(
        rows=rows,
        ttft_ns=ttft_ns,
        gap_ns=gap_ns,
        waits=[mine[0] - row.at for row, mine in zip(rows, times, strict=True)],
        gaps=[[after - at for at, after in pairwise(mine)] for mine in times],
        pauses=list(pauses.values()),
        work=[profile.work_ns(row.input_tokens, 0, row.output_tokens) for row in rows],
    )
