"""The demo's deployment and callers: three tenants, load that rises past capacity.

Emulated A100 70B replicas: slow enough that half a minute over real HTTP shows an overload without
asking much of this machine.
"""

from headrace.config.profiles import load_profile
from headrace.config.schema import EmulatorSpec, KeySpec, ServerSpec, Settings
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import ClassName, TenantId
from headrace.model.slo import Indicator, Objective, Per, Population, Slo
from headrace.policy.catalog import PlaneConfig
from headrace.sim.scenario import Scenario
from headrace.trace.builtin import AZURE_CONV
from headrace.trace.mix import Always, Mix, Poisson, Ramp, Segment, TenantSource

MODEL = "llama-3.1-70b"
CHAT, HOG, NIGHTLY = TenantId("chat"), TenantId("hog"), TenantId("nightly")
TENANTS = (CHAT, HOG, NIGHTLY)
INTERACTIVE, BATCH = ClassName("interactive"), ClassName("batch")
TTFT_MS, ITL_MS = 2_000.0, 150.0
SEED = 1
_REPLICAS = 2
_FAIR_RATE = 2.0
"""Requests per second of one tenant's third of two replicas, about."""
_HOG = 8.0
"""The hog's last rate as a multiple of its share."""


def deployment() -> PlaneConfig:
    """Return the fleet, classes and tenants."""
    return PlaneConfig(
        models=(ModelSpec(name=MODEL),),
        pools=(
            PoolSpec(
                name="a100",
                model=MODEL,
                profile=load_profile("a100-70b-tp4"),
                replicas=_REPLICAS,
            ),
        ),
        tenants=tuple(TenantSpec(name=name) for name in TENANTS),
        classes=(
            ClassSpec(name=INTERACTIVE, ttft_ms=TTFT_MS, itl_ms=ITL_MS),
            ClassSpec(name=BATCH, ttft_ms=60_000.0, itl_ms=1_000.0, expire=False),
        ),
        slos=(
            Slo(
                name="interactive",
                population=Population(slo_class=INTERACTIVE),
                objectives=(
                    Objective(indicator=Indicator.TTFT, threshold_ms=TTFT_MS, target=0.99),
                    Objective(
                        indicator=Indicator.GAP, per=Per.GAP, threshold_ms=ITL_MS, target=0.99
                    ),
                ),
            ),
        ),
    )


def scenario(duration_s: float) -> Scenario:
    """Return the demo as a scenario: the hog's rate rises from its share to 8 times that."""
    ramp = Ramp(
        segments=tuple(
            Segment(until_s=duration_s * part, rate=_FAIR_RATE * factor)
            for part, factor in ((0.2, 1.0), (0.4, 2.0), (0.6, 4.0), (1.0, _HOG))
        )
    )
    sources = (
        TenantSource(
            tenant=CHAT,
            slo_class=INTERACTIVE,
            arrivals=Poisson(_FAIR_RATE * 0.9),
            lengths=AZURE_CONV,
            max_tokens=Always(400),
        ),
        TenantSource(
            tenant=HOG,
            slo_class=INTERACTIVE,
            arrivals=ramp,
            lengths=AZURE_CONV,
            max_tokens=Always(400),
        ),
        TenantSource(
            tenant=NIGHTLY,
            slo_class=BATCH,
            arrivals=Poisson(_FAIR_RATE * 0.3),
            lengths=AZURE_CONV,
            max_tokens=Always(400),
        ),
    )
    return Scenario(
        name="demo",
        deployment=deployment(),
        mix=Mix(sources=sources, duration_s=duration_s),
        seed=SEED,
        drain_s=600.0,
    )


def settings(hashes: dict[TenantId, str]) -> Settings:
    """Return what the gateway serves the demo with: a key each, lengths told by trusted headers."""
    return Settings(
        deployment=deployment(),
        keys=tuple(KeySpec(name=name, tenant=name, hash=hashes[name]) for name in hashes),
        emulator=EmulatorSpec(seed=SEED),
        server=ServerSpec(port=0, trusted_replay=True),
    )
