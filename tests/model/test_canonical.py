"""A configuration's canonical bytes are a fixed point: they start every journal."""

from headrace.config.profiles import load_profile
from headrace.model.deployment import ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import TenantId
from headrace.model.slo import Indicator, Objective, Sla, Slo
from headrace.policy.catalog import PlaneConfig, canonical, decode


def test_canonical_bytes_decode_to_the_same_bytes_with_every_default_left_out() -> None:
    slo = Slo(name="s", objectives=(Objective(indicator=Indicator.TTFT, threshold_ms=5.0),))
    config = PlaneConfig(
        models=(ModelSpec(name="m"),),
        pools=(PoolSpec(name="p", model="m", profile=load_profile("h100-8b-tp1")),),
        tenants=(TenantSpec(name="t"),),
        slos=(slo,),
        slas=(Sla(customer=TenantId("t"), slos=("s",)),),
    )

    assert canonical(decode(canonical(config))) == canonical(config)
