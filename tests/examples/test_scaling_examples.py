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
from headrace.units import InstantNs

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
