"""What does one admission decision cost, and does that grow with the queue?

`handle(RequestArrived)` on a saturated plane: evidence, four gates, booking, queueing, record. Each
call is timed alone with the CPU clock of this thread; the clock's own cost stays in the figure.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import Any

from benchmarks.harness import Result, at_most, calibration
from headrace.config.profiles import load_profile
from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Dispatch
from headrace.model.event import CallerLeft, ConfigChanged, ReplicaUp, RequestArrived
from headrace.model.ids import Incarnation, ModelName, PoolName, ReplicaName, RequestId, TenantId
from headrace.model.price import PriceSpec
from headrace.model.request import Request
from headrace.plane.core import Plane
from headrace.policy.catalog import PlaneConfig, canonical
from headrace.trace.streams import stream
from headrace.units import InstantNs, Tokens

MODEL = ModelName("m")
STEP_NS = 1_000
"""Between arrivals: time hardly passes, so nothing drains and nothing expires."""
P50_US = 90
"""60 for evidence, gates and booking, and half as much again for what all gates look at since: what was let in
by length, modes, how far cached prefixes are believed."""
AMPLE = 10**9
"""A limit that nobody reaches."""
LIMITS = {
    "rpm_limit": AMPLE,
    "tpm_limit": AMPLE,
    "max_parallel_requests": AMPLE,
    "max_parallel_sessions": AMPLE,
    "budgets": tuple(
        WindowSpec(unit=unit, per=per, soft=AMPLE / 2, hard=AMPLE)
        for unit, per in zip(Unit, Per, strict=True)
    ),
}
"""All that the budget gate can look at: rates, concurrency, sessions, and a budget of each unit and window."""


class Bench:
    """A plane with a given number of replicas, tenants and queued requests."""

    def __init__(
        self,
        replicas: int,
        tenants: int,
        queued: int,
        limits: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Build and saturate it; `limits` are every tenant's."""
        pool = PoolSpec(name="p", model=MODEL, profile=load_profile("h100-8b-tp1"))
        config = PlaneConfig(
            models=(ModelSpec(name=MODEL, price=PriceSpec(input=0.5, output=1.5)),),
            pools=(pool,),
            tenants=tuple(TenantSpec(name=f"t{nth}", **limits) for nth in range(tenants)),
            classes=(ClassSpec(name="interactive", ttft_ms=3_600_000.0),),
        )
        self.plane = Plane()
        self._rng = stream(0, "decision")
        self._tenants, self._queued = tenants, queued
        self._ids = count(1)
        self._now = 0
        self._waiting: deque[RequestId] = deque()
        self.plane.handle(ConfigChanged(revision=1, config=canonical(config)), now=InstantNs(0))
        for nth in range(replicas):
            up = ReplicaUp(
                replica=ReplicaName(f"r{nth}"),
                incarnation=Incarnation(nth + 1),
                pool=PoolName("p"),
            )
            self.plane.handle(up, now=InstantNs(0))
        while len(self._waiting) < queued:
            self.call(time.thread_time_ns)

    def call(self, clock: Callable[[], int]) -> int:
        """Time one arrival in ns; afterwards as many are queued as before."""
        self._now += STEP_NS
        request = RequestId(next(self._ids))
        arrived = RequestArrived(
            Request(
                id=request,
                tenant=TenantId(f"t{self._rng.randrange(self._tenants)}"),
                model=MODEL,
                input_tokens=Tokens(self._rng.randint(20, 4_000)),
            )
        )
        began = clock()
        effects = self.plane.handle(arrived, now=InstantNs(self._now))
        took = clock() - began
        if not any(isinstance(effect, Dispatch) for effect in effects):
            self._waiting.append(request)
        if len(self._waiting) > self._queued:
            oldest = self._waiting.popleft()
            self.plane.handle(CallerLeft(oldest), now=InstantNs(self._now))
        return took


def run(quick: bool) -> Result:
    """Measure 64 replicas and 1,000 tenants at 500 and 5,000 queued; then the large plane."""
    calls, rounds = (4_000, 3) if quick else (20_000, 5)
    figures = {}
    for queued in (500, 5_000):
        bench = Bench(64, 1_000, queued)
        figures[queued] = best(list(rounds_of(bench, rounds, calls)))
    limited = best(list(rounds_of(Bench(64, 1_000, 5_000, LIMITS), rounds, calls)))
    large = Bench(256, 10_000, 5_000)
    # A neighbour's burst shows in one run, a slow call of ours in every one.
    worst = min(max(one) for one in rounds_of(large, rounds, calls))
    p50, p99 = figures[5_000]
    # Quick runs on shared machines show the direction; the bounds proper are those of a full run.
    room = 1.5 if quick else 1.0
    return Result(
        name="decision",
        claims=[
            at_most("handle(RequestArrived) p50, us CPU", p50 / 1_000, P50_US * room),
            at_most("handle(RequestArrived) p99, us CPU", p99 / 1_000, 400 * room),
            at_most("p50 with every limit over none", limited[0] / p50, 1.5),
            at_most("p50 at 5,000 queued over 500", p50 / figures[500][0], 1.3),
            at_most("longest call at 256 replicas, 10,000 tenants, ms", worst / 1e6, 2 * room),
        ],
        detail={
            "p50_us": {str(queued): round(f[0] / 1_000, 1) for queued, f in figures.items()},
            "p50_us_with_every_limit": round(limited[0] / 1_000, 1),
            "p99_us": {str(queued): round(f[1] / 1_000, 1) for queued, f in figures.items()},
            "calls": calls,
            "rounds": rounds,
            "calibration_s": calibration(),
        },
    )


def rounds_of(bench: Bench, rounds: int, calls: int) -> Iterator[list[int]]:
    """Yield the sorted times of each round; as in the driver, garbage is collected between events."""
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(rounds):
        yield sorted(bench.call(time.thread_time_ns) for _ in range(calls))
        gc.collect()
    gc.enable()
    gc.unfreeze()


def best(rounds: list[list[int]]) -> tuple[int, int]:
    """Return the least p50 and p99 over the rounds: what disturbs a run only adds to it."""
    return (
        min(one[len(one) // 2] for one in rounds),
        min(one[len(one) * 99 // 100] for one in rounds),
    )
