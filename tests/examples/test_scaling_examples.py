"""Worked examples of whole groups and scaling."""

from msgspec.structs import replace

from headrace.model.group import (
    GroupShape,
    Place,
    Proof,
    RankGroup,
    RankPhase,
    asked,
    capacity,
    gpus_held,
    moved,
)
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.scaling import Signal
from headrace.policy.scaling.formula import groups_for, need_micro
from headrace.units import InstantNs
from tests.policy.scaling.made import S, decided, demand, sample

SHAPE = GroupShape(tp=8, pp=2)
DESIRED = 4


def group(name: str, ranks: int) -> RankGroup:
    """Return a group of which so many ranks have their place; a whole one has made a token."""
    made = asked(ReplicaName(name), PoolName("p"), SHAPE, "v1", InstantNs(0))
    for rank in range(ranks):
        node = Place(node=f"{name}-{SHAPE.stage_of(rank)}", zone="a", region="r")
        made = moved(made, rank, RankPhase.PLACED, InstantNs(1), node)
    if ranks < SHAPE.gpus:
        return made
    token = Proof(at=InstantNs(2), revision="v1", shape=SHAPE, correct=True)
    return replace(made, proof=token)


def test_ex_10_a_partial_group_holds_its_gpus_and_serves_nothing() -> None:
    groups = [group("a", 16), group("b", 16), group("c", 8), group("d", 0)]
    assert len(groups) == DESIRED
    assert gpus_held(groups) == 40
    assert capacity(groups) == 2  # what admission opens for
    assert [one.is_partial for one in groups] == [False, False, True, False]


def test_ex_8_the_formula_is_exact() -> None:
    second = 1_000_000_000
    need = need_micro(1_200_000, 3_000_000, 45 * second, 30 * second)
    assert need == 5_100_000
    assert groups_for(need, (), 800_000) == 7
    assert groups_for(need, (), 850_000) == 6, "an exact quotient does not round up"


def test_ex_11_a_busy_pool_whose_interactive_queue_is_empty_does_not_grow() -> None:
    busy = tuple(sample(name, held=100, utilization_ppm=950_000) for name in ("r0", "r1"))
    leftover = demand(0.2, leftover_ns=10_000 * S)
    decision = decided(demand=leftover, samples=busy)
    assert decision.need == 1
    assert not decision.steps.grows
    assert decision.supply.utilization_ppm == 950_000


def test_ex_12_a_calm_pool_whose_kv_blocks_are_full_grows() -> None:
    full = tuple(sample(name, held=980, utilization_ppm=400_000) for name in ("r0", "r1"))
    decision = decided(urgent=0.6, samples=full)
    assert decision.winner is Signal.KV
    assert decision.steps.ask == 1
