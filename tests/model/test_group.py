"""A group serves when all of its ranks do, or not at all; what it holds is counted all the same."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.model.group import (
    LIFE_MOVES,
    RANK_MOVES,
    Domain,
    GroupShape,
    Lack,
    Life,
    Place,
    Proof,
    RankGroup,
    RankPhase,
    advanced,
    asked,
    capacity,
    gpus_held,
    is_ready,
    lacks,
    moved,
    overdue,
    told,
)
from headrace.model.ids import PoolName, ReplicaName
from headrace.units import DurationNs, InstantNs

SHAPE = GroupShape(tp=8, pp=2)
NEW = InstantNs(0)
LATER = InstantNs(10)


def place(node: str, **more: str) -> Place:
    return Place(node=node, zone="a", region="r", **more)


def group(shape: GroupShape = SHAPE) -> RankGroup:
    return asked(ReplicaName("g"), PoolName("p"), shape, "v1", NEW)


def placed(made: RankGroup, ranks: int | None = None) -> RankGroup:
    """Place ranks stage by stage, a node each."""
    for rank in range(made.shape.gpus if ranks is None else ranks):
        node = f"n{made.shape.stage_of(rank)}"
        made = moved(made, rank, RankPhase.PLACED, LATER, place(node))
    return made


def proved(made: RankGroup, **more: object) -> RankGroup:
    said = {"at": LATER, "revision": "v1", "shape": made.shape, "correct": True, **more}
    return replace(made, proof=Proof(**said))  # type: ignore[arg-type]


def ready() -> RankGroup:
    return proved(placed(group()))


@pytest.mark.parametrize(
    ("tp", "pp", "per_node", "gpus", "nodes"),
    [(1, 1, 8, 1, 1), (8, 2, 8, 16, 2), (4, 2, 8, 8, 1), (4, 3, 8, 12, 2), (3, 4, 8, 12, 2)],
)
def test_shape_gives_gpus_and_nodes(tp: int, pp: int, per_node: int, gpus: int, nodes: int) -> None:
    shape = GroupShape(tp=tp, pp=pp, ranks_per_node=per_node)
    assert (shape.gpus, shape.nodes) == (gpus, nodes)


def test_a_stage_that_no_node_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit one node"):
        GroupShape(tp=16)


def test_a_whole_group_with_a_correct_token_is_ready() -> None:
    assert lacks(ready()) == ()
    assert is_ready(ready())
    assert not is_ready(placed(group())), "nobody has seen a token of it"


def test_leader_ready_and_ranks_unplaced_is_no_capacity() -> None:
    made = proved(placed(group(), 13))
    made = told(made, 0, communicator=True, loaded=True, revision="v1", healthy=True)
    assert lacks(made) == (Lack.RANKS,)
    assert capacity([made]) == 0
    assert made.is_partial
    assert gpus_held([made]) == 13


@pytest.mark.parametrize(
    ("news", "lack"),
    [
        ({"communicator": False}, Lack.COMMUNICATOR),
        ({"loaded": False}, Lack.SHARDS),
        ({"revision": "v0"}, Lack.REVISION),
        ({"healthy": False}, Lack.HEALTH),
    ],
)
def test_one_rank_is_enough_to_keep_a_group_from_serving(news: dict[str, bool], lack: Lack) -> None:
    for rank in range(SHAPE.gpus):
        made = told(ready(), rank, **news)  # type: ignore[arg-type]
        assert lacks(made) == (lack,)
        assert made.gpus_held == SHAPE.gpus


@pytest.mark.parametrize(
    "said",
    [
        {"correct": False},
        {"revision": "v0"},
        {"shape": GroupShape(tp=8)},
        {"at": InstantNs(9)},
    ],
)
def test_a_token_proves_only_what_it_was_made_by(said: dict[str, object]) -> None:
    assert lacks(proved(placed(group()), **said)) == (Lack.TOKEN,)


def test_a_rank_that_was_lost_and_placed_again_needs_a_new_token() -> None:
    made = moved(ready(), 3, RankPhase.LOST, InstantNs(20))
    assert lacks(made) == (Lack.RANKS, Lack.TOKEN)
    made = moved(made, 3, RankPhase.PLACED, InstantNs(30), place("n0"))
    assert lacks(made) == (Lack.TOKEN,)
    assert is_ready(proved(made, at=InstantNs(30)))


def test_what_was_told_of_a_rank_is_forgotten_with_its_life() -> None:
    made = moved(told(ready(), 3, healthy=False), 3, RankPhase.LOST, InstantNs(20))
    made = moved(made, 3, RankPhase.PLACED, InstantNs(30), place("n0"))
    assert made.ranks[3].healthy is None


def test_topology_is_a_stage_a_node_and_no_node_too_full() -> None:
    spread = group()
    for rank in range(16):  # as many a node as it takes, but stages are mixed
        spread = moved(spread, rank, RankPhase.PLACED, LATER, place(f"n{rank % 2}"))
    assert lacks(proved(spread)) == (Lack.TOPOLOGY,)
    crowded = group()
    for rank in range(16):
        crowded = moved(crowded, rank, RankPhase.PLACED, LATER, place("n0"))
    assert lacks(proved(crowded)) == (Lack.TOPOLOGY,)
    unknown = moved(group(GroupShape()), 0, RankPhase.PLACED, LATER)
    assert lacks(proved(unknown)) == (Lack.TOPOLOGY,)


@pytest.mark.parametrize("life", [life for life in Life if life is not Life.WANTED])
def test_only_a_wanted_group_serves(life: Life) -> None:
    made = replace(ready(), life=life)
    assert Lack.LIFE in lacks(made)
    assert made.gpus_held == 16


def test_ranks_and_groups_make_the_moves_of_their_tables_and_no_others() -> None:
    for before, after in product(RankPhase, RankPhase):
        made = group(GroupShape())
        made = replace(made, ranks=(replace(made.ranks[0], phase=before),))
        if after in RANK_MOVES[before]:
            assert moved(made, 0, after, LATER).ranks[0].phase is after
        else:
            with pytest.raises(ValueError, match="cannot go from"):
                moved(made, 0, after, LATER)
    for first, second in product(Life, Life):
        made = replace(group(), life=first)
        if second in LIFE_MOVES[first]:
            assert advanced(made, second).life is second
        else:
            with pytest.raises(ValueError, match="cannot go from"):
                advanced(made, second)


def test_news_of_no_rank_or_of_one_without_a_place_are_refused() -> None:
    with pytest.raises(ValueError, match="has no rank 16"):
        moved(group(), 16, RankPhase.PLACED, LATER)
    with pytest.raises(ValueError, match="tells nothing"):
        told(group(), 0, loaded=True)
    with pytest.raises(ValueError, match="has no place"):
        moved(ready(), 0, RankPhase.LOST, LATER, place("n0"))


def test_a_partial_group_is_overdue_from_its_oldest_gap_on() -> None:
    limit = DurationNs(100)
    made = placed(group(), 8)
    assert not overdue(made, InstantNs(99), limit)
    assert overdue(made, InstantNs(100), limit)
    lost = moved(ready(), 0, RankPhase.LOST, InstantNs(500))
    lost = moved(lost, 1, RankPhase.LOST, InstantNs(590))
    assert not overdue(lost, InstantNs(599), limit)
    assert overdue(lost, InstantNs(600), limit)
    assert not overdue(ready(), InstantNs(10**12), limit)
    assert not overdue(replace(lost, life=Life.STOPPING), InstantNs(600), limit)


def test_domains_are_told_apart_by_what_they_lie_in() -> None:
    here = Place(node="n0", rack="k1", zone="a", region="r")
    there = replace(here, zone="b")
    for domain in (Domain.NODE, Domain.RACK, Domain.ZONE):
        assert here.within(domain) != there.within(domain)
    assert here.within(Domain.REGION) == there.within(Domain.REGION)
    rackless = replace(here, rack=None)
    assert rackless.within(Domain.RACK) == rackless.within(Domain.NODE)
    assert ready().domains(Domain.NODE) == {"r/a//n0", "r/a//n1"}


@given(st.lists(st.sampled_from(["place", "lose", "bad", "well", "token"]), max_size=40), st.data())
def test_capacity_is_whole_groups_and_holdings_are_ranks(
    moves: list[str], data: st.DataObject
) -> None:
    made = group(GroupShape(tp=2, pp=2, ranks_per_node=2))
    for now, move in enumerate(moves, 1):
        rank = data.draw(st.integers(0, 3))
        held = made.ranks[rank].held
        if move == "place" and not held:
            node = place(f"n{made.shape.stage_of(rank)}")
            made = moved(made, rank, RankPhase.PLACED, InstantNs(now), node)
        elif move == "lose" and held:
            made = moved(made, rank, RankPhase.LOST, InstantNs(now))
        elif move in ("bad", "well") and held:
            made = told(made, rank, healthy=move == "well")
        elif move == "token":
            made = proved(made, at=InstantNs(now))
        held_now = [one.held for one in made.ranks]
        assert made.gpus_held == sum(held_now)
        assert capacity([made]) <= all(held_now)
        assert made.is_partial == (any(held_now) and not all(held_now))
        assert is_ready(made) == (not lacks(made))
