"""What befalls groups and spells of replicas: each does what its description says, and is over when it is."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.model.effect import Effect
from headrace.model.event import GroupTold, ReplicaForgot, ReplicaReported
from headrace.model.group import Domain, GroupShape, GroupStep
from headrace.model.scaling_spec import Scaling
from headrace.model.slo import Outcome
from headrace.sim.checks import Checker
from headrace.sim.faults import (
    Canary,
    ColdCache,
    DomainLoss,
    Fault,
    RankLoss,
    Reports,
    Restart,
    Slow,
    Update,
)
from headrace.sim.world import World
from headrace.units import NS_PER_S, Tokens, seconds
from tests.sim.scaled import run, scaled, starts, steady
from tests.sim.scenes import Ran

FOUR = Scaling(
    min=3, max=6, times=starts(10), shape=GroupShape(tp=4), partial_s=20.0, tick_s=5.0,
    cancel_window_s=10.0, in_window_s=30.0, min_life_s=10.0, forecast=None,
)  # fmt: skip
ZONES = replace(FOUR, domains=("eu/a", "eu/b", "eu/c"), reserve_domain=Domain.ZONE)


class Watch:
    """Keeps how many groups were ready, and the GPUs held, at each look."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, int]] = []
        self.checker = Checker()

    def __call__(self, world: World, effects: Sequence[Effect]) -> None:
        self.checker(world, effects)
        groups = world.provider.groups.values()
        ready = len(world.provider.serving())
        self.seen.append((world.now / NS_PER_S, ready, sum(one.gpus for one in groups)))

    def within(self, begin: float, end: float) -> tuple[set[int], set[int]]:
        """Return the numbers of ready groups and of GPUs held that were seen meanwhile."""
        span = [one for one in self.seen if begin <= one[0] < end]
        return {one[1] for one in span}, {one[2] for one in span}


def watched(
    faults: Sequence[Fault], settings: Scaling = FOUR, replicas: int = 3, until: float = 90.0
) -> tuple[Watch, World]:
    """Return a run of a light load over groups of four GPUs, all checks on."""
    watch, rows = Watch(), steady(((0.0, until, 1.0),), given=1_000)
    scenario = scaled(settings, replicas=replicas, faults=faults)
    world = World(scenario, rows, 0, after=watch).run()
    watch.checker.finish(world)
    return watch, world


def events(ran: Ran) -> list[tuple[int, object]]:
    return [(one.now, one.event) for one in ran.records()]


def test_a_group_without_a_rank_serves_nothing_until_the_rank_is_back() -> None:
    fault = RankLoss(group=1, at_s=20, noticed_after_s=0.0, back_after_s=5)
    watch, world = watched([fault])
    assert watch.within(10, 20) == ({3}, {12})
    assert watch.within(20.1, 25) == ({2}, {11})
    assert watch.within(40, 90) == ({3}, {12})
    assert list(world.provider.groups) == ["pool-0", "pool-1", "pool-2"]


def test_a_group_whose_rank_stays_away_is_given_back_whole_and_replaced() -> None:
    watch, world = watched([RankLoss(group=1, at_s=20, noticed_after_s=0.0)])
    assert min(watch.within(20.1, 60)[0]) == 2
    assert watch.within(70, 90) == ({3}, {12})
    assert "pool-1" not in world.provider.groups


def test_a_broken_gpu_is_held_until_its_group_is_given_back() -> None:
    watch, world = watched([RankLoss(group=0, at_s=20, held=True, noticed_after_s=0.0)])
    assert watch.within(20.1, 24) == ({2}, {12})
    assert max(watch.within(24, 90)[1]) == 16
    assert watch.within(80, 90) == ({3}, {12})
    assert "pool-0" not in world.provider.groups


@pytest.mark.parametrize("name", ["eu/b", None])
def test_nothing_is_placed_in_a_domain_that_is_lost_before_it_is_back(name: str | None) -> None:
    fault = DomainLoss(of=Domain.ZONE, name=name, at_s=20, back_after_s=1_000)
    _, world = watched([fault], ZONES)
    gone = name or "eu/a"
    zones = [one.place.within(Domain.ZONE) for one in world.provider.groups.values()]
    assert gone not in zones
    assert len(zones) == 3


def test_a_region_takes_all_of_its_zones_with_it() -> None:
    two = replace(ZONES, domains=("eu/a", "eu/b", "us/a"))
    watch, world = watched([DomainLoss(of=Domain.REGION, name="eu", at_s=20)], two)
    assert min(watch.within(20.1, 30)[0]) == 1
    places = {one.place.within(Domain.ZONE) for one in world.provider.groups.values()}
    assert places == {"us/a"}


def test_a_lost_node_leaves_the_ranks_on_the_other_nodes_of_a_group() -> None:
    wide = replace(FOUR, shape=GroupShape(tp=4, pp=2, ranks_per_node=4), min=2)
    fault = DomainLoss(of=Domain.NODE, at_s=21, noticed_after_s=0.0)
    watch, world = watched([fault], wide, replicas=2, until=70.0)
    assert watch.within(21.1, 25)[1] == {12}
    assert "pool-0" not in world.provider.groups


def test_groups_are_restarted_one_at_a_time_and_no_stream_is_lost() -> None:
    faults = [Update(at_s=20, time_s=60, recompiles=False)]
    watch, world = watched(faults, until=150.0)
    assert min(watch.within(20, 150)[0]) == 2
    lives = {name: one.life for name, one in world.provider.groups.items() if "." not in name}
    assert set(lives.values()) == {2}
    lost = [row for row in world.concluded.values() if row.outcome is Outcome.ERROR]
    assert lost == []


def test_an_update_goes_on_over_a_restart_of_the_driver() -> None:
    faults: list[Fault] = [
        Update(at_s=20, time_s=60, recompiles=False),
        Restart(at_s=21.5),
    ]
    _, world = watched(faults, until=150.0)
    assert all(one.life == 2 for name, one in world.provider.groups.items() if "." not in name)


def test_starts_after_an_update_compile_anew() -> None:
    times = replace(starts(10), compile=replace(starts(10).weights, p50_s=30.0, p90_s=30.0))
    watch, _ = watched([Update(at_s=20)], replace(FOUR, times=times), until=80.0)
    assert watch.within(22, 50)[0] == {2}


def test_a_canary_that_is_wrong_counts_nothing_and_is_given_back() -> None:
    watch, world = watched([Canary(at_s=20, correct=False)])
    assert watch.within(20.1, 60)[0] == {3}
    assert 16 in watch.within(20.1, 60)[1]
    assert list(world.provider.groups) == ["pool-0", "pool-1", "pool-2"]


def test_a_canary_that_is_slow_serves_at_its_own_pace() -> None:
    watch, world = watched(
        [Canary(at_s=20, factor=3.0)], replace(FOUR, cancel_window_s=60.0), until=45.0
    )
    assert max(watch.within(30, 45)[0]) == 4
    declared = world.nodes[0].declared
    assert world.engines.slower == {"pool-canary.1": 3.0}
    assert all(node.declared == declared for node in world.nodes)


def answer_times(faults: Sequence[Fault]) -> list[int]:
    """Return how long lone answers took that came every ten seconds."""
    one = scaled(replace(FOUR, min=1), replicas=1, faults=faults)
    ran = run(one, rows=steady(((0.0, 60.0, 0.1),)))
    rows = sorted(ran.world.concluded.values(), key=lambda row: row.request)
    return [row.ended_at - row.entry.arrived_at for row in rows]


@pytest.mark.parametrize("replica", [0, None])
def test_a_replica_is_slow_for_as_long_as_is_said(replica: int | None) -> None:
    usual = answer_times(())
    slow = answer_times([Slow(replica=replica, factor=2.0, at_s=15, until_s=35)])
    ratio = [round(one / other, 1) for one, other in zip(slow, usual, strict=True)]
    assert ratio == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]


def test_prefixes_are_dropped_at_once_and_cached_anew() -> None:
    rows = [
        replace(row, prefix=(7,), prefix_tokens=Tokens(4_096))
        for row in steady(((0.0, 60.0, 0.1),))
    ]
    fault = ColdCache(at_s=25, told=True)
    ran = run(scaled(replace(FOUR, min=1), replicas=1, faults=[fault]), rows=rows)
    ended = sorted(ran.world.concluded.values(), key=lambda row: row.request)
    cached = [row.usage.cached_tokens for row in ended if row.usage is not None]
    assert [bool(one) for one in cached] == [False, True, True, False, True, True]
    told = [now for now, one in events(ran) if isinstance(one, ReplicaForgot)]
    assert min(told) == seconds(25)


def test_no_report_arrives_while_they_are_silent() -> None:
    ran = run(
        scaled(FOUR, replicas=1, faults=[Reports(lost=1.0, at_s=10, until_s=20)]),
        rows=steady(((0.0, 30.0, 1.0),)),
    )
    heard = [now / NS_PER_S for now, one in events(ran) if isinstance(one, ReplicaReported)]
    assert not [at for at in heard if 10 <= at < 20]
    assert [at for at in heard if at < 10]
    assert [at for at in heard if at >= 20]


def test_what_is_told_of_a_hurt_group_is_what_it_holds() -> None:
    fault = RankLoss(group=1, at_s=20, back_after_s=5)
    patient = replace(FOUR, cancel_window_s=60.0)
    ran = run(scaled(patient, replicas=3, faults=[fault]), rows=steady(((0.0, 60.0, 2.0),)))
    told = [
        (one.step, one.gpus)
        for _, one in events(ran)
        if isinstance(one, GroupTold) and one.group == "pool-1"
    ]
    assert told[:3] == [(GroupStep.READY, 4), (GroupStep.LOST, 3), (GroupStep.COMING, 4)]
    assert (GroupStep.READY, 4) in told[3:]


@pytest.mark.parametrize("kind", [Slow, Reports])
def test_a_spell_that_is_over_before_it_begins_is_refused(kind: type[Slow | Reports]) -> None:
    with pytest.raises(ValueError, match="until_s 5 is not after at_s 5"):
        kind(at_s=5, until_s=5)
