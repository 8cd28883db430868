"""Worked examples of routing."""

from headrace.config.profiles import load_profile
from headrace.model.deployment import PoolSpec
from headrace.model.ids import ReplicaName
from tests.plane.scenes import Driver, config

POOL = PoolSpec(name="p", model="m", profile=load_profile("h100-8b-tp1"))


def test_ex_6_two_32k_reasoning_requests_outweigh_ten_short_tool_calls() -> None:
    made = Driver(config(pools=(POOL,)), replicas=0)
    made.up("long")
    for _ in range(2):
        live = made.live(made.arrive("a", 32_768, slo_class="long_reasoning", max_output=4_096))
        made.first(live.attempt)
    made.up("short")
    for _ in range(10):
        live = made.live(made.arrive("b", 200, max_output=50))
        assert live.replica == "short"
        made.first(live.attempt)
    request = made.arrive("c", 1_000)
    assert made.live(request).replica == "short"
    costs = {view.replica: view for view in made.routes()[-1].evidence.replicas}
    assert costs[ReplicaName("short")].decodes == 10
    assert costs[ReplicaName("long")].decodes == 2
    routing = config().routing
    long, short = (
        routing.terms(costs[ReplicaName(name)], 200, 100, 10**10) for name in ("long", "short")
    )
    assert long.interference_ns > 4 * short.interference_ns
    assert long.total_ns > short.total_ns


def test_ex_6_so_it_is_while_all_of_them_still_prefill() -> None:
    made = Driver(config(pools=(POOL,)), replicas=0)
    made.up("long")
    made.arrive("a", 32_768, slo_class="long_reasoning", max_output=4_096)
    made.up("short")
    for _ in range(10):
        live = made.live(made.arrive("b", 100, max_output=50))
        assert live.replica == "short"
    request = made.arrive("c", 300)
    assert made.live(request).replica == "short"
