"""Jobs fill what live traffic leaves over, and it does not notice: emulated engines in virtual time."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from headrace.config.schema import ServerSpec
from headrace.model.effect import Concluded
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.request import Request
from headrace.policy.fairness.leftover import Leftover
from headrace.ports.engine import Route
from headrace.ports.job import Job, JobId, JobSpec, Lease, State, UnixNs
from headrace.ports.jobs import Claim, ClaimAsk, Finished, Renewal, Tally
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, Service, Tokens
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.gateway.deferring import Deferring
from tests.gateway.scenes import MODEL, ask

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime, pytest.mark.slow]
SPAN_S, WARM_S = 40, 10
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'


def lengths(draw: Random) -> tuple[int, int]:
    """Return prompt and answer of a request, in tokens."""
    return int(draw.lognormvariate(6.5, 0.7)), max(1, int(draw.lognormvariate(5, 0.7)))


class Endless(NaiveBatches):
    """There is always another job; what becomes of them nobody keeps."""

    def __init__(self) -> None:
        super().__init__()
        self._draw, self._nth = Random(2), 0

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
        return Claim(job=job, lease=Lease(spec.id, ask.owner, 1), body=BODY)

    async def renew(self, leases: Sequence[Lease], _until: UnixNs) -> list[Renewal]:
        return [Renewal.HELD for _ in leases]

    async def finish(self, endings: Sequence[Any], _now: UnixNs) -> list[Finished]:
        return [Finished.STORED for _ in endings]

    async def release(self, leases: Sequence[Lease], _now: UnixNs) -> list[bool]:
        return [True for _ in leases]


async def run(*, live: bool, jobs: bool) -> list[Concluded]:
    """Return what ended after the first seconds; live traffic comes in bursts of 4 s, six times as dense."""
    gateway = Deferring(
        store=Endless(), server=ServerSpec(trusted_replay=True), leftover=Leftover()
    )
    gateway.aside = not jobs
    rows: list[Concluded] = []
    gateway.driver._concluded = rows.append
    draw, at, callers = Random(1), 0.0, []
    begun = gateway.clock.now()
    while live and at < SPAN_S:
        burst = at % 20 >= 16
        at += draw.expovariate(24.0 if burst else 4.0)
        await gateway.until(begun / NS_PER_MS + at * 1_000)
        given, made = lengths(draw)
        request = Request(
            id=gateway.driver.mint(),
            tenant=TenantId("free"),
            model=ModelName(MODEL),
            input_tokens=Tokens(given),
            slo_class=ClassName("interactive"),
        )
        stream = gateway.driver.offer(request, ask(replay_output=made))
        callers.append(asyncio.ensure_future(_drain(stream)))
    await gateway.until(begun / NS_PER_MS + SPAN_S * 1_000)
    ended = tuple(rows)  # what is cut off says nothing
    for caller in callers:
        caller.cancel()
    assert gateway.driver.broken is None
    await gateway.end()
    return [row for row in ended if row.ended_at - begun >= WARM_S * NS_PER_S]


async def _drain(stream: Any) -> None:
    while (await stream.chunk()).end is None:
        pass


def work(rows: list[Concluded]) -> int:
    return sum(row.work_ns for row in rows)


def attainment(rows: list[Concluded]) -> float:
    live = [row for row in rows if row.slo_class == "interactive"]
    return sum(row.met for row in live) / len(live)


async def test_idle_capacity_is_filled_and_live_traffic_does_not_notice() -> None:
    alone = await run(live=True, jobs=False)
    full = await run(live=False, jobs=True)
    both = await run(live=True, jobs=True)
    assert work(alone) < 0.4 * work(full), "there is capacity left over"
    assert work(both) >= 0.9 * work(full)
    assert attainment(both) >= attainment(alone) - 0.01
