"""Drawn worlds keep every invariant, with faults and after them."""

from collections import Counter
from pathlib import Path

import pytest

from headrace.model.decision import Reason
from headrace.model.slo import Outcome
from headrace.policy.ordering.orders import Fifo
from headrace.sim.faults import ColdCache, Crash, Drain, Reports, Restart, Slow, Starts
from headrace.sim.swarm import COSTS, ORDERS, REQUESTS_MAX, SwarmResult, draw, run, run_many
from headrace.units import seconds
from tests.sim.scenes import profile

SEEDS = Path(__file__).with_name("seeds.txt")
KINDS = (
    *("crash", "drain", "leavers", "report late", "report lost", "report twice", "restart", "slow"),
    "cold_cache",
)
OF_GROUPS = ("canary", "domain_loss", "rank", "starts", "update")


def kept() -> list[int]:
    """Return the seeds that once failed."""
    lines = [line for line in SEEDS.read_text().splitlines() if not line.startswith("#")]
    found = [line.split(maxsplit=1) for line in lines if line.strip()]
    assert all(len(parts) == 2 for parts in found), "each seed has its reason"
    return [int(parts[0]) for parts in found]


@pytest.fixture(scope="module")
def found() -> SwarmResult:
    """Return what forty new worlds showed; it would not, had an invariant broken."""
    return run_many(range(100, 140), profile())


def test_new_seeds_are_clean(found: SwarmResult) -> None:
    assert found.seeds == 40
    assert found.steps > found.requests > 40 * 300
    assert set(found.faults) >= set(KINDS)
    assert min(found.outcomes[name] for name in ("success", "error", "client_cancel", "timeout"))


@pytest.mark.parametrize("seed", kept())
def test_a_seed_that_once_failed_is_clean(seed: int) -> None:
    drawn, world, checker = run(seed, profile())
    assert checker.steps > drawn.rows == world.offered


def test_each_kind_of_fault_is_drawn_often_enough() -> None:
    drawn = [draw(seed, profile())[0] for seed in range(300)]
    kinds = Counter(kind for one in drawn for kind in one.faults)
    assert {kind for kind in KINDS if kinds[kind] < 20} == set()
    assert {kind for kind in OF_GROUPS if kinds[kind] < 10} == set()
    quiet = sum(not one.faults for one in drawn)
    assert 90 < quiet < 150  # noise hides quiet bugs
    sizes = [one.rows for one in drawn]
    assert min(sizes) > 0
    assert max(sizes) <= REQUESTS_MAX
    assert sum(sizes) > 300 * 300


def test_fleets_of_every_shape_are_drawn() -> None:
    """Pools of several sizes, two models, and a pool for each class."""
    shapes: Counter[str] = Counter()
    for seed in range(300):
        deployment = draw(seed, profile())[0].scenario.deployment
        pools = deployment.pools
        shapes["two models"] += len({pool.model for pool in pools}) > 1
        sizes = {pool.profile.kv_capacity_tokens for pool in pools if pool.model == "m"}
        shapes["sizes of one model"] += len(sizes) > 1
        shapes["a pool for each class"] += len({pool.classes for pool in pools}) > 2
        shapes["some classes"] += any(pool.classes for pool in pools)
        sources = draw(seed, profile())[0].scenario.mix
        assert sources is not None
        shapes["named"] += any(source.model is not None for source in sources.sources)
    assert min(shapes.values()) >= 20, shapes


def test_trees_of_shares_orders_and_costs_of_every_kind_are_drawn() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(300):
        scenario = draw(seed, profile())[0].scenario
        plane = scenario.deployment
        kinds["order " + type(plane.ordering).__name__] += 1
        kinds["within " + type(scenario.engine_ordering).__name__] += 1
        kinds["cost " + type(plane.fairness.cost).__name__] += 1
        kinds["lanes"] += any(one.lane for one in plane.classes)
        kinds["organisations"] += any(one.organisation for one in plane.tenants)
        kinds["aging"] += plane.fairness.aging_tokens_per_s > 0
        kinds["boost"] += plane.fairness.boost_tokens > 0
        for level in ("lanes", "classes", "organisations", "tenants"):
            kinds[f"minimum of {level}"] += any(one.minimum for one in getattr(plane, level))
            kinds[f"maximum of {level}"] += any(one.maximum < 1 for one in getattr(plane, level))
    orders = {type(order).__name__ for order in (*ORDERS, Fifo())}
    wanted = {f"{where} {name}" for where in ("order", "within") for name in orders}
    assert wanted | {f"cost {type(one).__name__}" for one in COSTS} <= kinds.keys()
    assert min(kinds.values()) >= 5, kinds


def test_ladders_are_drawn_and_gone_down() -> None:
    levels: Counter[int] = Counter()
    for seed in range(100, 120):
        _, world, _ = run(seed, profile())
        levels.update(row.level for row in world.concluded.values() if row.admitted)
    assert min(levels[level] for level in (0, 1, 2)) >= 20, levels
    kinds: Counter[str] = Counter()
    for seed in range(300):
        plane = draw(seed, profile())[0].scenario.deployment
        ladders = [one.degrade for one in plane.classes if one.degrade is not None]
        kinds["ladders"] += bool(ladders)
        kinds["smaller models"] += any(one.model for one in ladders)
        kinds["no consent"] += bool(ladders) and any(not one.degrade for one in plane.tenants)
    assert min(kinds.values()) >= 20, kinds


def test_configurations_change_in_mid_run() -> None:
    drawn = [draw(seed, profile())[0] for seed in range(300)]
    changed = [one for one in drawn if one.changes]
    assert len(changed) >= 30
    kinds = Counter(kind for one in changed for kind in (one.faults or ("none",)))
    assert min(kinds["crash"], kinds["leavers"], kinds["none"]) >= 5
    first = next(one for one in changed if one.changes[0][1] != one.scenario.deployment)
    _, world, checker = run(first.seed, profile())
    assert world.plane.state.revision == 2
    assert world.scenario.deployment == first.changes[0][1]
    assert checker.steps > first.rows


def test_once_faults_are_over_the_backlog_drains() -> None:
    """Whoever is left waiting is served, unless nothing that may serve it came back."""
    drained = 0
    for seed in range(140, 160):
        drawn, world, _ = run(seed, profile())  # the checker demands it of every request: INV-11
        faults = drawn.scenario.faults
        broke = [f.at_s for f in faults if isinstance(f, Crash | Drain | Restart)]
        if not broke:
            continue
        after = seconds(max(broke))
        later = [row for row in world.concluded.values() if row.ended_at > after]
        drained += sum(row.outcome is Outcome.SUCCESS for row in later)
    assert drained > 500


def test_lost_reports_alone_stop_nobody() -> None:
    """Unknown is neither zero nor full: without a single report work is still served."""
    for seed in range(400):
        drawn, _ = draw(seed, profile())
        harmless = Starts | ColdCache | Slow
        faults = [one for one in drawn.scenario.faults if not isinstance(one, harmless)]
        if faults == [Reports(lost=1.0, twice=0.0)]:
            break
    else:
        pytest.fail("no such world was drawn")
    _, world, _ = run(seed, profile())
    assert world.plane.state.ignored.get("report", 0) == 0
    served = [row for row in world.concluded.values() if row.outcome is Outcome.SUCCESS]
    assert len(served) > 50
    assert not [row for row in world.concluded.values() if row.reason is Reason.REPLICA_LOST]


def test_a_failing_seed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seed: int, _: object) -> None:
        raise AssertionError(f"INV-0 in {seed}")

    monkeypatch.setattr("headrace.sim.swarm.run", broken)
    with pytest.raises(AssertionError, match="INV-0 in 7") as failed:
        run_many(range(7, 9), profile())
    assert failed.value.__notes__ == ["reproduce: headrace swarm --seed 7"]
