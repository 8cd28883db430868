"""Two tenants with one prefix: whichever comes first, they pay alike but for computing it once."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.profiles import load_profile
from headrace.model.deployment import ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Concluded
from headrace.model.ids import TenantId
from headrace.policy.catalog import PlaneConfig
from headrace.policy.fairness.costs import Cost, price
from headrace.policy.fairness.vtc import Vtc
from headrace.sim.scenario import Scenario
from headrace.sim.world import World
from headrace.trace.mix import Even, Fixed, Mix, TenantSource
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_S, InstantNs, Tokens
from tests.plane.scenes import COSTS

PROFILE = load_profile("h100-8b-tp1")
CHUNK, CHUNKS = 512, 8
SHARED = CHUNK * CHUNKS
OWN, OUTPUT = 300, 20


def row(nth: int, tenant: str, apart_ns: int) -> TraceRow:
    """Return a request whose first 4,096 tokens are everybody's."""
    return TraceRow(
        at=InstantNs(nth * apart_ns),
        input_tokens=Tokens(SHARED + OWN),
        output_tokens=Tokens(OUTPUT),
        max_tokens=Tokens(OUTPUT),
        tenant=TenantId(tenant),
        prefix=tuple(range(CHUNKS)),
        prefix_tokens=CHUNK,
    )


def run(order: Sequence[str], cost: Cost, apart_ns: int = NS_PER_S) -> list[Concluded]:
    """Serve requests of the tenants in that order."""
    deployment = PlaneConfig(
        models=(ModelSpec(name="m"),),
        pools=(PoolSpec(name="p", model="m", profile=PROFILE),),
        tenants=(TenantSpec(name="a"), TenantSpec(name="b")),
        fairness=Vtc(cost=cost),
    )
    unused = TenantSource(tenant=TenantId("a"), arrivals=Even(1.0), lengths=Fixed(1, 1))
    one = Scenario(name="shared", deployment=deployment, mix=Mix(sources=(unused,), rows=1))
    world = World(one, [row(nth, name, apart_ns) for nth, name in enumerate(order)], 0).run()
    assert not world.plane.state.ledger.flights
    return list(world.concluded.values())


def services(rows: Sequence[Concluded], cost: Cost) -> dict[str, int]:
    """Return what each tenant was charged, by the engine's usage."""
    found, listed = {"a": 0, "b": 0}, price(cost, "m", PROFILE)
    for one in rows:
        usage = one.usage
        assert usage is not None
        fresh = usage.input_tokens - usage.cached_tokens
        found[one.tenant] += listed.service(fresh, usage.cached_tokens, usage.output_tokens)
    return found


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@given(order=st.permutations("aaabbb"))
@settings(max_examples=6)
def test_the_order_decides_only_who_computes_the_prefix(cost: Cost, order: list[str]) -> None:
    listed = price(cost, "m", PROFILE)
    found = services(run(order, cost), cost)
    rider = listed.service(OWN, SHARED, OUTPUT)
    extra = listed.service(SHARED + OWN, 0, OUTPUT) - rider
    first, other = order[0], "b" if order[0] == "a" else "a"
    assert found[other] == 3 * rider
    assert found[first] == 3 * rider + extra


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_who_comes_together_pays_for_what_each_of_them_computed(cost: Cost) -> None:
    rows = run("abab" * 3, cost, apart_ns=1)
    listed = price(cost, "m", PROFILE)
    dearest = listed.service(SHARED + OWN, 0, OUTPUT)
    cheapest = listed.service(OWN, SHARED, OUTPUT)
    found = services(rows, cost)
    assert all(6 * cheapest <= amount <= 6 * dearest for amount in found.values())
    computed = [one.usage.input_tokens - one.usage.cached_tokens for one in rows if one.usage]
    assert len(computed) == 12
    assert max(computed) == SHARED + OWN, "somebody computed it"
