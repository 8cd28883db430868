"""What does holding requests back in our own queues cost: throughput, and time per operation?

Throughput: a saturated plane with its dispatch window beside one that sends everything at once; the
same offered requests, so that what differs is only where they wait.
"""

import gc
from itertools import count
from math import log2
from typing import Any

from msgspec.structs import replace

from benchmarks.harness import Claim, at_least, at_most, best_of
from benchmarks.scenes import AZURE_CONV, CHAT, one_class, poisson
from headrace.model.ids import TenantId
from headrace.model.paths import Level, Link, path
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import Window
from headrace.policy.fairness.backlog import NONE, Backlog, Turn, Waiting
from headrace.policy.fairness.shares import Shares
from headrace.policy.ordering.orders import Fifo, Order, Place, TenantFirst, VtcOrder
from headrace.report.run import RunRecord
from headrace.sim.experiment import LIMIT_MAX, simulate
from headrace.sim.scenario import Scenario
from headrace.trace.streams import stream
from headrace.units import NS_PER_S, InstantNs, WorkNs

WARM_S = 20.0
"""Until the batches are full."""
SATURATED = (("h100-8b-tp1", 60.0), ("a100-8b-tp1", 40.0), ("h100-70b-tp4", 20.0))
"""Profiles and offered req/s to two replicas: one and a half times what they serve, or more."""


def saturated(profile: str, rate: float, duration_s: float, *, unbounded: bool) -> Scenario:
    """Return a scene in which queues are as long as it takes and no bound is missed."""
    deployment = one_class(profile, 2, ttft_ms=3_600_000.0)
    deployment = replace(
        deployment,
        admission=Gates(mode=GateMode.AUDIT),
        window=Window(unbounded=unbounded),
        classes=tuple(
            replace(one, itl_ms=1_000.0, tenant_queue=LIMIT_MAX, queue=LIMIT_MAX)
            for one in deployment.classes
        ),
    )
    return poisson(deployment, rate, duration_s, AZURE_CONV)


def work_rate(run: RunRecord, duration_s: float) -> float:
    """Return GPU-seconds of ended requests per second, between the warm-up and the last arrival."""
    inside = [one for one in run.samples if WARM_S <= one.at / NS_PER_S <= duration_s]
    first, last = inside[0], inside[-1]
    done = sum(last.work_ns.values()) - sum(first.work_ns.values())
    return done / (last.at - first.at)


def window(quick: bool, seed: int) -> tuple[list[Claim], dict[str, Any]]:
    """Hold throughput with the dispatch window against throughput without bound."""
    duration = 60.0 if quick else 180.0
    detail: dict[str, Any] = {}
    for profile, rate in SATURATED[:1] if quick else SATURATED:
        bounded, free = (
            work_rate(simulate(saturated(profile, rate, duration, unbounded=one), seed), duration)
            for one in (False, True)
        )
        detail[profile] = {"window": bounded, "unbounded": free, "ratio": bounded / free}
    least = min(one["ratio"] for one in detail.values())
    claim = at_least("throughput with the dispatch window over unlimited", least, 0.98)
    return [claim], {"work_rate": detail}


# Time per operation ----------------------------------------------------------------------------

TENANTS = 10_000
QUEUED = (1_000, 10_000, 100_000)


class Queues:
    """A fair queue with so many requests of up to `TENANTS` tenants."""

    def __init__(self, order: Order, queued: int) -> None:
        """Fill it."""
        self.order, self.backlog, self.shares = order, Backlog(), Shares()
        self._rng = stream(0, "queueing")
        self._ways = [
            path(Link(Level.CLASS, "interactive"), Link(Level.TENANT, f"t{nth}"))
            for nth in range(TENANTS)
        ]
        self._ids = count(1)
        self._now = 0
        for _ in range(queued):
            self.add()

    def add(self) -> None:
        """Queue a request of some tenant."""
        self._now += 1_000
        now, nth, request = self._now, self._rng.randrange(TENANTS), next(self._ids)
        way = self._ways[nth]
        prompt = self._rng.randint(20, 4_000)
        start = InstantNs(now + 3_600 * NS_PER_S - prompt * 1_000)
        deadline = InstantNs(now + 3_600 * NS_PER_S)
        place = Place(request, deadline, start, prompt, WorkNs(prompt))
        waiting = Waiting(
            request=request,
            key=self.order.key(place),
            arrived_at=InstantNs(now),
            start=start,
            work=prompt,
        )
        tenant = TenantId(f"t{nth}")
        self.backlog.add(self.order, self.shares, way, tenant, CHAT, waiting)
        self.backlog.refresh(self.order, self.shares, way[-1].key, InstantNs(now))

    def turn(self) -> Turn:
        """Return whose turn it is."""
        found = self.backlog.next_turn(self.order, self.shares, NONE)
        assert found is not None, "somebody waits"
        return found

    def take(self, turn: Turn) -> None:
        """Take the request of that turn out and charge its queue."""
        way = self.backlog.queues[turn.queue].way
        work = self.backlog.slots[turn.request].work
        left = self.backlog.take(self.order, self.shares, turn.request)
        if left is not None:
            self.backlog.refresh(self.order, self.shares, left, InstantNs(self._now))
        self.shares.charge(way, 0, work)


def operations(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """Hold the time of one turn, taken and replaced by a newcomer, against what log n allows."""
    cycles, rounds = (1_000, 4) if quick else (10_000, 7)
    allowed = log2(QUEUED[-1]) / log2(QUEUED[0]) * NOISE
    claims: list[Claim] = []
    detail: dict[str, Any] = {"allowed": allowed, "cycles": cycles, "tenants": TENANTS}
    for order in (VtcOrder(), TenantFirst()) if quick else (Fifo(), VtcOrder(), TenantFirst()):
        took = {queued: cycle_us(Queues(order, queued), cycles, rounds) for queued in QUEUED}
        name = type(order).__name__
        growth = took[QUEUED[-1]] / took[QUEUED[0]]
        detail[name] = {"us": {str(queued): us for queued, us in took.items()}, "growth": growth}
        claims.append(at_most(f"{name}, us a turn at 100,000 over 1,000 queued", growth, allowed))
    return claims, detail


NOISE = 1.25
"""What a cold cache and a busy machine may add to a ratio."""


def cycle_us(queues: Queues, cycles: int, rounds: int) -> float:
    """Return the least CPU time of add, turn and take in several rounds, in us."""

    def turnover() -> None:
        for _ in range(cycles):
            queues.add()
            queues.take(queues.turn())

    gc.collect()
    gc.freeze()
    gc.disable()
    took = best_of(rounds, turnover)
    gc.enable()
    gc.unfreeze()
    return 1e6 * took / cycles
