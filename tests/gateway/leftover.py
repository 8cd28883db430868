"""Live traffic in bursts beside jobs that never end: one emulated replica, in virtual time."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

from msgspec import Struct

from headrace.adapters.engines.answer import lengths as drawn
from headrace.adapters.engines.emulated import EmulatedEngine
from headrace.adapters.engines.inprocess import InProcessEngine
from headrace.config.schema import ServerSpec
from headrace.model.effect import Concluded
from headrace.model.evidence import DecisionRecord, RouteRecord
from headrace.model.ids import (
    ClassName,
    Incarnation,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.request import Request
from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.policy.fairness.leftover import Leftover
from headrace.ports.clock import Clock
from headrace.ports.engine import Route
from headrace.ports.job import Job, JobId, JobSpec, Lease, State, UnixNs
from headrace.ports.jobs import Claim, ClaimAsk, Finished, Renewal, Tally
from headrace.replica.core import Replica
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, InstantNs, Service, Tokens
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.gateway.deferring import Deferring
from tests.gateway.scenes import MODEL, PROFILE, ask

WARM_S = 10
"""Until then jobs are becoming more: nothing is counted."""
EVERY_S, QUIET_S = 20, 16
"""Bursts come so often, after so much quiet."""
CALM, DENSE = 4.0, 24.0
"""Live requests a second between bursts and in them."""
_BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'


def lengths(draw: Random) -> tuple[int, int]:
    """Return prompt and answer of a request, in tokens."""
    return int(draw.lognormvariate(6.5, 0.7)), max(1, int(draw.lognormvariate(5, 0.7)))


class Endless(NaiveBatches):
    """There is always another job; what becomes of them nobody keeps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw, self._nth = Random(f"{seed}/jobs"), 0

    async def counts(self) -> list[Tally]:
        return [
            Tally(
                tenant=TenantId("free"),
                slo_class=ClassName("batch"),
                model=ModelName(MODEL),
                state=State.QUEUED,
                jobs=1,
            )
        ]

    async def claim(self, ask: ClaimAsk, _order: Any, now: UnixNs) -> list[Claim]:
        return [self._job(ask, now) for _ in range(ask.limit)]

    def _job(self, ask: ClaimAsk, now: UnixNs) -> Claim:
        given, made = lengths(self._draw)
        self._nth += 1
        spec = JobSpec(
            id=JobId(f"job_{self._nth}"),
            tenant=TenantId("free"),
            slo_class=ClassName("batch"),
            model=ModelName(MODEL),
            route=Route.CHAT,
            headers=(
                ("x-headrace-replay-input", str(given)),
                ("x-headrace-replay-output", str(made)),
            ),
            service=Service(1),
            created_ns=now,
            deadline_ns=UnixNs(now + 3_600 * NS_PER_S),
            keep_ns=DurationNs(NS_PER_S),
        )
        job = Job(spec=spec, seq=self._nth, state=State.CLAIMED, attempts=1, owner=ask.owner)
        return Claim(job=job, lease=Lease(spec.id, ask.owner, 1), body=_BODY)

    async def renew(self, leases: Sequence[Lease], _until: UnixNs) -> list[Renewal]:
        return [Renewal.HELD for _ in leases]

    async def finish(self, endings: Sequence[Any], _now: UnixNs) -> list[Finished]:
        return [Finished.STORED for _ in endings]

    async def release(self, leases: Sequence[Lease], _now: UnixNs) -> list[bool]:
        return [True for _ in leases]


class Wait(Struct):
    """One live request, until it has a replica or none is looked for any more."""

    begun: InstantNs
    over: InstantNs | None = None
    sent: bool = False


class Seen(Struct, frozen=True, kw_only=True):
    """What was seen of one run after its first seconds."""

    rows: list[Concluded]
    """Ends of live requests and jobs."""
    offered: list[tuple[InstantNs, int, int]]
    """Live requests: when, prompt and answer."""
    waits: dict[RequestId, Wait]
    jobs_sent: list[InstantNs]
    bursts: list[InstantNs]
    """When each burst's first request came."""
    busy: float
    """Part of the time that the replica had something to do."""

    @property
    def work_ns(self) -> int:
        """GPU time of what was served, by predicted work of true lengths."""
        return sum(row.work_ns for row in self.rows)

    @property
    def attainment(self) -> float:
        """Live requests that met every bound, of those that ended, refused ones among them."""
        live = [row for row in self.rows if row.slo_class == "interactive"]
        return sum(row.met for row in live) / len(live)

    def first_dispatches_ns(self) -> list[int | None]:
        """Return after what time each burst had a first dispatch; None: never."""
        sent = sorted(w.over for w in self.waits.values() if w.sent and w.over is not None)
        return [next((at - begun for at in sent if at >= begun), None) for begun in self.bursts]

    def jobs_in_the_way(self, window_ns: int) -> int:
        """Return how many jobs were sent while a live request had waited for longer than a window."""
        late = [
            (wait.begun + window_ns, wait.over)
            for wait in self.waits.values()
            if wait.over is not None and wait.over > wait.begun + window_ns
        ]
        return sum(any(low < at < high for low, high in late) for at in self.jobs_sent)


class Leaving:
    """A gateway with live callers and jobs, and what is seen of it."""

    def __init__(self, seed: int, *, jobs: bool) -> None:
        def engines(clock: Clock) -> list[Any]:
            self.replica = Replica(ReplicaName("p-0"), Incarnation(1), PROFILE, ChunkedPrefill())
            engine = EmulatedEngine(self.replica, PoolName("p"), clock, drawn(0))
            return [InProcessEngine(engine, clock)]

        self.gateway = Deferring(
            engines,
            store=Endless(seed),
            server=ServerSpec(trusted_replay=True),
            leftover=Leftover(),
        )
        self.gateway.aside = not jobs
        self.rows: list[Concluded] = []
        self.waits: dict[RequestId, Wait] = {}
        self.jobs_sent: list[InstantNs] = []
        self.offered: list[tuple[InstantNs, int, int]] = []
        self.bursts: list[InstantNs] = []
        driver = self.gateway.driver
        driver._concluded, driver._decided = self._ended, self._sent
        self._draw = Random(f"{seed}/live")
        self._callers: list[asyncio.Future[None]] = []

    def _ended(self, row: Concluded) -> None:
        self.rows.append(row)
        wait = self.waits.get(row.request)
        if wait is not None and wait.over is None:
            wait.over = row.ended_at

    def _sent(self, record: DecisionRecord) -> None:
        if not isinstance(record, RouteRecord):
            return
        wait = self.waits.get(record.request_id)
        if wait is None:
            self.jobs_sent.append(record.at)
        elif wait.over is None:
            wait.over, wait.sent = record.at, True

    async def offer(self, span_s: int, begun: InstantNs) -> None:
        """Have live callers come."""
        at, bursting = 0.0, False
        while True:
            burst = at % EVERY_S >= QUIET_S
            at += self._draw.expovariate(DENSE if burst else CALM)
            if at >= span_s:
                return
            await self.gateway.until(begun / NS_PER_MS + at * 1_000)
            given, made = lengths(self._draw)
            now = self.gateway.clock.now()
            if at % EVERY_S >= QUIET_S and not bursting and at >= WARM_S:
                self.bursts.append(now)
            bursting = at % EVERY_S >= QUIET_S
            self._one(now, given, made, InstantNs(now - begun))

    def _one(self, now: InstantNs, given: int, made: int, after: InstantNs) -> None:
        request = Request(
            id=self.gateway.driver.mint(),
            tenant=TenantId("free"),
            model=ModelName(MODEL),
            input_tokens=Tokens(given),
            slo_class=ClassName("interactive"),
        )
        self.offered.append((after, given, made))
        self.waits[request.id] = Wait(now)
        stream = self.gateway.driver.offer(request, ask(replay_output=made))
        self._callers.append(asyncio.ensure_future(_drain(stream)))

    async def end(self) -> None:
        """Stop all of it; what is cut off says nothing."""
        for caller in self._callers:
            caller.cancel()
        assert self.gateway.driver.broken is None
        await self.gateway.end()


async def run(seed: int, span_s: int, *, live: bool, jobs: bool) -> Seen:
    """Serve for so many seconds."""
    one = Leaving(seed, jobs=jobs)
    begun = one.gateway.clock.now()

    def busy_ps() -> int:
        return one.replica.totals(one.gateway.clock.now()).busy_ps

    async def warm() -> int:
        await one.gateway.until(begun / NS_PER_MS + WARM_S * 1_000)
        return busy_ps()

    warming = asyncio.ensure_future(warm())
    if live:
        await one.offer(span_s, begun)
    await one.gateway.until(begun / NS_PER_MS + span_s * 1_000)
    before = await warming
    busy = (busy_ps() - before) / 1_000 / ((span_s - WARM_S) * NS_PER_S)
    rows = list(one.rows)
    since = begun + WARM_S * NS_PER_S
    await one.end()
    return Seen(
        rows=[row for row in rows if row.ended_at >= since],
        offered=one.offered,
        waits=one.waits,
        jobs_sent=one.jobs_sent,
        bursts=one.bursts,
        busy=busy,
    )


async def _drain(stream: Any) -> None:
    while (await stream.chunk()).end is None:
        pass
