"""Does a conforming tenant stay served beside a hog of its own class (recipe B6, gate on)?

A sends 1.5 req/s, B, the hog, 12 req/s in the same class, both with 1 s to the first token, C 1.5
req/s of batch. The gate predicts the wait of the fair queue; for comparison the same trace with the
gate believing in the whole backlog, and without any gate.
"""

from typing import Any

from msgspec.structs import replace

from benchmarks.harness import CLAIM_SEEDS, Result, at_least, interval95
from benchmarks.scenes import AZURE_CONV, MODEL, attainment_over_offered
from headrace.config.profiles import load_profile
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import ClassName, TenantId
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import PlaneConfig
from headrace.sim.experiment import simulate, with_fifo_wait
from headrace.sim.scenario import Scenario
from headrace.trace.mix import Mix, Poisson, TenantSource

DURATION_S = 200.0


def scene() -> Scenario:
    """Return the three tenants on one A100 8B replica."""
    chat, batch = ClassName("chat"), ClassName("batch")
    deployment = PlaneConfig(
        models=(ModelSpec(name=MODEL),),
        pools=(PoolSpec(name="pool", model=MODEL, profile=load_profile("a100-8b-tp1")),),
        tenants=(TenantSpec(name="A"), TenantSpec(name="B"), TenantSpec(name="C")),
        classes=(
            ClassSpec(name=chat, ttft_ms=1_000.0),
            ClassSpec(name=batch, ttft_ms=120_000.0, itl_ms=1_000.0),
        ),
    )
    sources = tuple(
        TenantSource(
            tenant=TenantId(name), slo_class=kind, arrivals=Poisson(rate), lengths=AZURE_CONV
        )
        for name, kind, rate in (("A", chat, 1.5), ("B", chat, 12.0), ("C", batch, 1.5))
    )
    return Scenario(
        name="hog",
        deployment=deployment,
        mix=Mix(sources=sources, duration_s=DURATION_S),
        drain_s=600.0,
    )


def run(quick: bool) -> Result:
    """Measure each tenant's attainment over offered under three gates."""
    seeds = CLAIM_SEEDS[:2] if quick else CLAIM_SEEDS
    fair = scene()
    deployment = replace(fair.deployment, admission=Gates(mode=GateMode.AUDIT))
    variants = {
        "fair wait": fair,
        "fifo wait": with_fifo_wait(fair),
        "no gate": replace(fair, deployment=deployment),
    }
    shares: dict[str, dict[str, Any]] = {}
    for label, one in variants.items():
        runs = [simulate(one, seed) for seed in seeds]
        shares[label] = {
            tenant: interval95([attainment_over_offered(r, tenant) for r in runs])._asdict()
            for tenant in "ABC"
        }
    conforming = shares["fair wait"]["A"]["mean"]
    return Result(
        name="fairwait",
        seeds=list(seeds),
        claims=[
            at_least("conforming tenant's attainment over offered", conforming, 0.9),
            at_least(
                "fair wait over FIFO wait, conforming tenant",
                conforming - shares["fifo wait"]["A"]["mean"],
                0.0,
            ),
        ],
        detail=shares,
    )
