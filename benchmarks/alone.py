"""One emulated engine alone: a trace in, each request's times and each tenant's service out.

Without a plane, so that what is seen is the order inside the engine and nothing else. Requests are
offered on time whether or not earlier ones are done.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from benchmarks.service import ServiceLog
from headrace.model.ids import AttemptId, TenantId
from headrace.model.paths import Level, Link, path
from headrace.replica.core import Replica
from headrace.replica.job import Finished, FirstTokenMade, Job
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_S, DurationNs, InstantNs, later, seconds

NEVER = InstantNs(1 << 62)
MINUTE_NS = seconds(60.0)
GAP_BOUND_NS = DurationNs(NS_PER_S)


class Arrival(Struct, frozen=True, gc=False):
    """One job and when it comes."""

    at: InstantNs
    job: Job


def arrivals(
    rows: Iterable[TraceRow],
    *,
    ttft_s: Mapping[TenantId, float] | float = 1e9,
    weights: Mapping[TenantId, int] | None = None,
) -> list[Arrival]:
    """Return a trace as jobs; `ttft_s` after arrival is a tenant's deadline for its first token."""
    found = []
    for nth, row in enumerate(rows):
        assert row.tenant is not None
        bound = ttft_s[row.tenant] if isinstance(ttft_s, Mapping) else ttft_s
        job = Job(
            attempt=AttemptId(nth),
            prompt_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            gap_bound_ns=GAP_BOUND_NS,
            tenant=row.tenant,
            deadline=later(row.at, seconds(bound)),
            way=path(Link(Level.TENANT, row.tenant, (weights or {}).get(row.tenant, 1))),
        )
        found.append(Arrival(row.at, job))
    return found


class Served(Struct, kw_only=True):
    """What became of one request; instants in ns, None for what did not happen."""

    at: InstantNs
    job: Job
    first_at: InstantNs | None = None
    ended_at: InstantNs | None = None

    @property
    def ttft_s(self) -> float | None:
        """Return the wait for the first token."""
        return None if self.first_at is None else (self.first_at - self.at) / NS_PER_S

    @property
    def in_time(self) -> bool:
        """Say whether the first token came by the job's deadline."""
        return self.first_at is not None and self.first_at <= self.job.deadline


class Outcome(Struct, frozen=True, kw_only=True):
    """A whole run."""

    requests: Sequence[Served]
    end: InstantNs
    """When the last thing happened, at most the time limit."""
    busy_share: float
    """Time in steps over the time in which anything waited or ran."""
    tokens: int
    """Prompt tokens computed and output tokens made."""

    def of(self, tenant: TenantId) -> list[Served]:
        """Return one tenant's requests."""
        return [one for one in self.requests if one.job.tenant == tenant]

    def attainment(self, tenant: TenantId) -> float:
        """Return the share of a tenant's offered requests whose first token came in time."""
        mine = self.of(tenant)
        return sum(one.in_time for one in mine) / max(1, len(mine))

    def met(self) -> int:
        """Return how many requests had their first token in time."""
        return sum(one.in_time for one in self.requests)

    def tokens_per_s(self) -> float:
        """Return input and output tokens of the requests that ended, over the whole run."""
        ended = (one.job for one in self.requests if one.ended_at is not None)
        tokens = sum(job.prompt_tokens + job.output_tokens for job in ended)
        return tokens * NS_PER_S / max(1, self.end)

    def mean_ttft_s(self, tenant: TenantId) -> float:
        """Return a tenant's mean wait for the first token, over those that had one."""
        waits = [one.ttft_s for one in self.of(tenant) if one.ttft_s is not None]
        return sum(waits) / max(1, len(waits))


class _Run:
    """The state of one run: the driver's side of `serve`."""

    def __init__(self, engine: Replica, log: ServiceLog | None) -> None:
        self.engine, self.log = engine, log
        self.requests: dict[AttemptId, Served] = {}
        self._made: dict[AttemptId, int] = {}
        self._started: set[AttemptId] = set()
        self.unfinished = 0

    def submit(self, one: Arrival) -> None:
        refused = self.engine.submit(one.job, one.at)
        assert refused is None, f"{refused=}"
        self.requests[one.job.attempt] = Served(at=one.at, job=one.job)
        self.unfinished += 1
        if self.log is not None:
            self.log.arrived(one.job)
            self._tokens_then_starts(one.at, [])

    def advance(self, now: InstantNs) -> None:
        events = self.engine.advance(now)
        for event in events:
            if isinstance(event, FirstTokenMade):
                self.requests[event.attempt].first_at = event.at
            else:
                self.requests[event.attempt].ended_at = event.timing.last_at
                self.unfinished -= 1
        if self.log is not None:
            self._tokens_then_starts(now, events)

    def _tokens_then_starts(
        self, now: InstantNs, events: Sequence[FirstTokenMade | Finished]
    ) -> None:
        """Tell the log of the tokens that a step made, then of who starts in the next one."""
        log = self.log
        assert log is not None
        counts = self.engine.progress(now)
        ended = [(e.attempt, e.usage.output_tokens) for e in events if isinstance(e, Finished)]
        for attempt, made in (*counts, *ended):
            before = self._made.get(attempt, 0)
            log.made(self.requests[attempt].job.tenant, made - before)
            self._made[attempt] = made
        log.look(now)
        starts = [
            attempt for attempt, _, _ in self.engine.prompts(now) if attempt not in self._started
        ]
        for attempt in starts:
            self._started.add(attempt)
            log.started(self.requests[attempt].job)
        if starts:
            log.look(now)


def serve(
    engine: Replica,
    offered: Sequence[Arrival],
    *,
    log: ServiceLog | None = None,
    until: InstantNs = NEVER,
) -> Outcome:
    """Run a trace through an idle engine, to the end of all work or to `until`.

    With a log the engine must take steps one by one (`fast_forward=False`): service is seen at the
    boundaries that the engine names.
    """
    run = _Run(engine, log)
    work_ns, now = 0, InstantNs(0)
    queue = list(reversed(offered))
    while True:
        due = engine.next_event()
        arrival = queue[-1].at if queue else NEVER
        at = arrival if due is None else min(due, arrival)
        if at > until or (due is None and not queue):
            break
        work_ns += (at - now) if run.unfinished else 0
        now = at
        if due is not None and due <= arrival:
            run.advance(now)
        else:
            run.submit(queue.pop())
    end = now if until == NEVER else until
    work_ns += (end - now) if run.unfinished else 0
    totals = engine.totals(end)
    return Outcome(
        requests=[*run.requests.values(), *(Served(at=one.at, job=one.job) for one in queue)],
        end=end,
        busy_share=totals.busy_ps / max(1, 1_000 * work_ns),
        tokens=totals.prompt_tokens_computed + totals.tokens_made,
    )


class Limited(Struct, frozen=True):
    """What a limit per client lets through."""

    rows: Sequence[TraceRow]
    rejected: int


def limited(
    rows: Iterable[TraceRow], per_window: int, window_ns: DurationNs = MINUTE_NS
) -> Limited:
    """Refuse a request of a client that had `per_window` taken in the window before it.

    The published baseline: refused requests do not count, and no limit looks at what is idle.
    """
    taken: dict[TenantId | None, list[InstantNs]] = {}
    kept, rejected = [], 0
    for row in rows:
        recent = [at for at in taken.get(row.tenant, []) if row.at - at <= window_ns]
        if len(recent) >= per_window:
            rejected += 1
        else:
            recent.append(row.at)
            kept.append(row)
        taken[row.tenant] = recent
    return Limited(kept, rejected)
