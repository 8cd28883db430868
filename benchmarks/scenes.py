"""The deployments, loads and measures that several benchmarks share.

Goodput of policies is compared in work: predicted GPU-seconds of requests that met their SLO, for
counts of requests reward picking short prompts. *Capacity* of a scene is the highest Poisson work
rate at which first come first served without gates keeps 90 % attainment over offered.
"""

from msgspec.structs import replace

from headrace.config.profiles import load_profile
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import ClassName, TenantId
from headrace.policy.catalog import PlaneConfig
from headrace.report.run import RunRecord
from headrace.sim.scenario import Scenario
from headrace.trace.builtin import AZURE_CONV
from headrace.trace.mix import Lengths, Mix, Poisson, TenantSource
from headrace.units import NS_PER_S

MODEL = "llama-3.1-8b"
CHAT = ClassName("interactive")


def one_class(profile: str, replicas: int, *, ttft_ms: float = 2_000.0) -> PlaneConfig:
    """Return a deployment of one model, one pool, one tenant and one interactive class."""
    return PlaneConfig(
        models=(ModelSpec(name=MODEL),),
        pools=(
            PoolSpec(name="pool", model=MODEL, profile=load_profile(profile), replicas=replicas),
        ),
        tenants=(TenantSpec(name="tenant"),),
        classes=(ClassSpec(name=CHAT, ttft_ms=ttft_ms),),
    )


def poisson(deployment: PlaneConfig, rate: float, duration_s: float, lengths: Lengths) -> Scenario:
    """Return a scene in which one tenant sends at a constant rate (req/s)."""
    source = TenantSource(
        tenant=TenantId("tenant"), slo_class=CHAT, arrivals=Poisson(rate), lengths=lengths
    )
    return Scenario(
        name="poisson",
        deployment=deployment,
        mix=Mix(sources=(source,), duration_s=duration_s),
        drain_s=600.0,
    )


def met_work(run: RunRecord, *, since_s: float = 0.0, until_s: float | None = None) -> float:
    """Return GPU-seconds of met requests that arrived in a span, per second of the span.

    Work is that of the true lengths as if nothing were cached: alike for every policy. Counted by
    arrival, so what meets its SLO after the span's end counts as well: at most one bound's worth,
    since what waits longer has missed its first token, which is small beside a span of minutes.
    """
    end = run.span_ns / NS_PER_S if until_s is None else until_s
    met = {row.request for row in run.rows if row.met}
    inside = (
        one.work_ns
        for one in run.offered
        if one.request in met and since_s * NS_PER_S <= one.at < end * NS_PER_S
    )
    return sum(inside) / NS_PER_S / max(1e-9, end - since_s)


def attainment_over_offered(run: RunRecord, tenant: str | None = None) -> float:
    """Return met / offered, of one tenant or of all."""
    offered = [one for one in run.offered if tenant is None or one.tenant == tenant]
    met = {row.request for row in run.rows if row.met}
    return sum(one.request in met for one in offered) / max(1, len(offered))


def scaled(scene: Scenario, factor: float) -> Scenario:
    """Return the scene with each source's Poisson rate multiplied."""
    assert scene.mix is not None
    sources = []
    for source in scene.mix.sources:
        assert isinstance(source.arrivals, Poisson)
        sources.append(replace(source, arrivals=Poisson(source.arrivals.rate * factor)))
    return replace(scene, mix=replace(scene.mix, sources=tuple(sources)))


__all__ = [
    "AZURE_CONV",
    "CHAT",
    "MODEL",
    "attainment_over_offered",
    "met_work",
    "one_class",
    "poisson",
    "scaled",
]
