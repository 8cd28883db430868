"""Does the simulator foretell what happens live?

Two emulated A100 70B replicas, conversation lengths, three tenants, Poisson, five minutes of real
time: at 0.8 of capacity requests end alike, at twice it the shares and the goodput agree. The seeds of
one load are judged together; a run in which this machine's event loop lagged is repeated, and claims
nothing if it lags again.
"""

import math
from typing import Any

from msgspec.structs import replace

from benchmarks.harness import Claim, Result, at_least, at_most
from benchmarks.scenes import AZURE_CONV, attainment_over_offered
from headrace.cli.parity import ParityReport, compared
from headrace.config.profiles import load_profile
from headrace.load.lag import LIMIT_NS
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import ClassName, TenantId
from headrace.policy.catalog import PlaneConfig
from headrace.sim.experiment import simulate, without_control
from headrace.sim.knee import bisect
from headrace.sim.scenario import Scenario
from headrace.trace.mix import Mix, Poisson, TenantSource
from headrace.units import to_ms

MODEL = "llama-3.1-70b"
PARTS = (("chat", "interactive", 0.4), ("app", "interactive", 0.4), ("nightly", "batch", 0.2))
"""(tenant, class, part of all requests)."""
LOADS = (0.8, 2.0)
SEEDS = (100, 101, 102)
TUNING = (0, 1, 2)


def scene(rate: float, duration_s: float) -> Scenario:
    """Return the three tenants at `rate` requests a second in all, as in examples/parity.yaml."""
    deployment = PlaneConfig(
        models=(ModelSpec(name=MODEL),),
        pools=(
            PoolSpec(name="a100", model=MODEL, profile=load_profile("a100-70b-tp4"), replicas=2),
        ),
        tenants=tuple(TenantSpec(name=tenant) for tenant, _, _ in PARTS),
        classes=(
            ClassSpec(name="interactive", ttft_ms=2_000.0, itl_ms=150.0),
            ClassSpec(name="batch", ttft_ms=60_000.0, itl_ms=1_000.0, expire=False),
        ),
    )
    sources = tuple(
        TenantSource(
            tenant=TenantId(tenant),
            slo_class=ClassName(slo_class),
            arrivals=Poisson(round(rate * part, 6)),
            lengths=AZURE_CONV,
        )
        for tenant, slo_class, part in PARTS
    )
    return Scenario(
        name="parity",
        deployment=deployment,
        mix=Mix(sources=sources, duration_s=duration_s),
        drain_s=600.0,
    )


def capacity_rps(duration_s: float) -> float:
    """Return the rate at which FIFO without gates still keeps 90 % over offered."""

    def holds(rate: float) -> bool:
        bare = without_control(scene(rate, duration_s))
        shares = [attainment_over_offered(simulate(bare, seed)) for seed in TUNING]
        return sum(shares) / len(shares) >= 0.9

    return bisect(holds, 0.0, 32.0, 8)


def run(quick: bool) -> Result:
    """Measure: half an hour of real time, or a minute."""
    seeds = SEEDS[:1] if quick else SEEDS
    duration_s = 30.0 if quick else 300.0
    capacity = 6.125 if quick else capacity_rps(300.0)
    claims: list[Claim] = []
    detail: dict[str, Any] = {"capacity_rps": capacity, "loads": {}}
    for load in LOADS:
        scenario = replace(scene(capacity * load, duration_s), name=f"parity at {load:g}x")
        report = compared(scenario, seeds)
        claims += _claims(report, load, quick=quick)
        detail["loads"][f"{load:g}"] = _told(report)
    return Result(name="parity", seeds=list(seeds), claims=claims, detail=detail)


def _claims(report: ParityReport, load: float, *, quick: bool) -> list[Claim]:
    lag = max(one.loop_lag_p99_ms for one in report.seeds)
    head = f"{load:g}x: "
    if not report.valid:
        return [at_most(f"{head}loop lag p99, ms (invalid: repeat on a quiet machine)", lag, 20)]
    replayed = sum(one.journal.whole for one in report.seeds)
    claims = [
        at_most(f"{head}loop lag p99, ms", lag, to_ms(LIMIT_NS)),
        at_least(
            f"{head}journals that replay, of {len(report.seeds)}", replayed, len(report.seeds)
        ),
    ]
    found = report.parity
    if load < 1:
        claims.append(
            at_least(
                f"{head}requests that end alike",
                found.ended_alike / found.requests,
                0.95 if quick else 0.98,
            )
        )
    for check in found.checks:
        if check.name == "requests that end otherwise":
            continue
        value, limit = abs(check.difference), check.limit
        if quick:  # half a minute of one seed shows the direction, not three points
            limit *= 3
        claims.append(at_most(head + check.name, value, limit))
    return claims


def _told(report: ParityReport) -> dict[str, Any]:
    return {
        "requests": report.parity.requests,
        "ended_alike": report.parity.ended_alike / max(1, report.parity.requests),
        "met_alike": report.parity.met_alike / max(1, report.parity.requests),
        "checks": report.parity.checks,
        "cells": report.parity.cells,
        "seeds": [
            {
                "seed": one.seed,
                "loop_lag_p99_ms": one.loop_lag_p99_ms,
                "valid": one.valid,
                "journal": one.journal,
                "checks": one.parity.checks,
                "work_attained": [
                    side.total.work_attained or math.nan for side in (one.simulated, one.live)
                ],
            }
            for one in report.seeds
        ],
    }
