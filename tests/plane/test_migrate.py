"""Streams of a group that drains, in the plane's books: who is moved where, and what becomes of each place."""

from typing import Any

import pytest

from headrace.model.deployment import PoolSpec
from headrace.model.effect import Cancel, Migrate, RecallGroup, StopGroup
from headrace.model.event import GroupTold, Migrated, ReplicaUp
from headrace.model.group import GroupStep
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName, RequestId
from headrace.model.profile import Profile
from headrace.model.scaling_spec import Scaling
from headrace.plane import groups
from headrace.policy.scaling.moving import Running, in_turn
from headrace.units import NS_PER_MS, DurationNs, Tokens
from tests.plane import invariants
from tests.plane.scenes import H100, MS, Driver, S, config, small, usage
from tests.plane.test_groups import QUICK, TIMES

P = PoolName("p")


def pool(*, others: int = 1, able: bool = True, profile: Profile = H100, **more: Any) -> Driver:
    """Return a driver of a pool that scales: r0, whose streams are to go, and others."""
    given: dict[str, Any] = {"times": TIMES, "max": 4, "tick_s": 600.0} | QUICK | more
    spec = PoolSpec(name="p", model="m", profile=profile, scaling=Scaling(**given))
    made = Driver(config(pools=(spec,)), replicas=0)
    for nth in range(1 + others):
        name = ReplicaName(f"r{nth}")
        made.tell(GroupTold(group=name, pool=P, step=GroupStep.READY, gpus=1))
        life = Incarnation(next(made.incarnations))
        made.tell(ReplicaUp(replica=name, incarnation=life, pool=P, migrates=able))
        if not nth:
            for _ in range(3):
                stream(made)
    return made


def stream(made: Driver) -> RequestId:
    request = made.arrive()
    made.first(made.live(request).attempt)
    return request


def of(made: Driver, kind: type) -> list[Any]:
    return [effect for effect in made.seen if isinstance(effect, kind)]


def drain(made: Driver, name: str = "r0") -> None:
    """Drain a group, and let the next progress be told."""
    books = made.plane.state.pools[P]
    made.plane._machine.out = []
    groups.drain(made.plane._machine, P, books.groups[ReplicaName(name)], made.now)
    progress(made)


def progress(made: Driver) -> None:
    made.now = type(made.now)(made.now + 100 * MS)
    made.tick()
    invariants.hold(made.plane, made.now)


def end(made: Driver, *, done: bool = True, nth: int = -1) -> None:
    move = of(made, Migrate)[nth]
    made.tell(Migrated(attempt=move.attempt, incarnation=move.target_incarnation, done=done))
    invariants.hold(made.plane, made.now)


def attempts(made: Driver, life: int) -> int:
    return made.plane.state.ledger.loads[Incarnation(life)].attempts


def test_streams_go_one_after_the_other_and_the_group_is_given_back_at_the_last() -> None:
    made = pool()
    drain(made)
    assert len(of(made, Migrate)) == 1
    assert (attempts(made, 1), attempts(made, 2)) == (3, 1)
    progress(made)
    assert len(of(made, Migrate)) == 1, "one at a time"
    for left in (2, 1, 0):
        assert not of(made, StopGroup)
        end(made)
        assert (attempts(made, 1), attempts(made, 2)) == (left, 3 - left + bool(left))
    assert [one.group for one in of(made, StopGroup)] == ["r0"]
    assert len({one.attempt for one in of(made, Migrate)}) == 3


def test_a_moved_stream_is_cancelled_where_it_runs_and_settled_once() -> None:
    made = pool()
    drain(made)
    end(made)
    move = of(made, Migrate)[0]
    request = made.plane.state.ledger.flights[move.attempt].request
    made.leave(request)
    (cancel,) = of(made, Cancel)
    assert (cancel.replica, cancel.incarnation) == (move.target, move.target_incarnation)
    invariants.hold(made.plane, made.now)


def test_what_it_found_cached_says_nothing_of_the_replica_that_it_ends_on() -> None:
    made = pool()
    drain(made)
    end(made)
    move = of(made, Migrate)[0]
    made.end(move.attempt, usage=usage(1_000, 50, 900), timing=made.timing(50))
    there = made.known.fleet.replicas[move.target]
    assert (there.cached_told, there.reliability) == (0, None)


@pytest.mark.parametrize("how", ["ended", "left", "source lost", "target lost", "restart"])
def test_a_place_is_free_again_however_a_move_ends(how: str) -> None:
    made = pool()
    drain(made)
    move = of(made, Migrate)[0]
    request = made.plane.state.ledger.flights[move.attempt].request
    match how:
        case "ended":
            made.end(move.attempt, usage=usage(1_000, 1), timing=made.timing(1))
        case "left":
            made.leave(request)
        case "source lost":
            made.down("r0", move.incarnation)
        case "target lost":
            made.down("r1", move.target_incarnation)
        case _:
            made.restart()
    assert not made.plane.state.ledger.berths
    if how in ("ended", "left", "source lost"):
        assert attempts(made, move.target_incarnation) == 0
    before = made.plane.state.ignored.get("migrated", 0)
    end(made, nth=0)
    assert made.plane.state.ignored["migrated"] == before + 1
    if how == "target lost":
        assert made.plane.state.ledger.flights[move.attempt].incarnation == move.incarnation


def test_a_stream_that_stayed_is_tried_again_after_the_others() -> None:
    made = pool()
    drain(made)
    end(made, done=False)
    assert len(of(made, Migrate)) == 1, "not in the same instant"
    progress(made)
    first, second = (one.attempt for one in of(made, Migrate))
    assert first != second
    end(made)
    end(made)
    assert [one.attempt for one in of(made, Migrate)][-1] == first


def test_a_drain_that_is_called_off_lets_the_move_that_has_begun_end_and_begins_no_other() -> None:
    made = pool()
    drain(made)
    made.plane._machine.out = []
    group = made.plane.state.pools[P].groups[ReplicaName("r0")]
    groups.recall(made.plane._machine, P, group, made.now)
    assert isinstance(made.plane._machine.out[0], RecallGroup)
    end(made)
    progress(made)
    assert len(of(made, Migrate)) == 1
    assert (attempts(made, 1), attempts(made, 2)) == (2, 1)


def test_two_groups_that_drain_share_no_link() -> None:
    made = pool(others=2)
    drain(made)
    move = of(made, Migrate)[0]
    other = "r1" if move.target == "r2" else "r2"
    stream(made)
    drain(made, other)
    progress(made)
    assert len({one.target for one in of(made, Migrate)}) == len(of(made, Migrate))


@pytest.mark.parametrize(
    "more",
    [
        {"able": False},
        {"migrate": False},
        {"others": 0, "min": 0},
        {"profile": small(1_024 * 16, running=4), "full": True},
    ],
)
def test_nothing_is_moved_where_it_cannot_or_shall_not_be(more: dict[str, Any]) -> None:
    full = more.pop("full", False)
    made = pool(**more)
    if full:
        for _ in range(5):
            stream(made)
    drain(made)
    progress(made)
    assert not of(made, Migrate)
    assert attempts(made, 1) >= 3


def running(attempt: int, made: int, predicted: int, stayed: int = 0) -> Running:
    return Running(
        attempt=AttemptId(attempt), made=Tokens(made), predicted=Tokens(predicted), stayed=stayed
    )


def test_the_longest_goes_first_and_what_is_about_to_end_stays() -> None:
    step = DurationNs(10 * NS_PER_MS)
    streams = [
        running(1, 100, 400),
        running(2, 100, 150),  # half a second is left
        running(3, 900, 400),  # as long again as it has been
        running(4, 0, 5_000, stayed=1),
        running(5, 20, 320),
    ]
    assert in_turn(streams, step) == [3, 1, 5, 4]
    assert 100 * step == S
