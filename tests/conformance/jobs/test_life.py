"""The life of a job: which moves there are, and that there are no others."""

from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.ports.job import MOVES, OVER, Job, State, cancelled, claimed, ended, given_back
from headrace.ports.jobs import Ending
from tests.conformance.jobs.scenes import at, spec

STATES = list(State)
PAGE = Path(__file__).parents[3] / "docs" / "deferred.md"


def job(state: State) -> Job:
    """Return a job in a state, with what is true in it."""
    new = Job(spec=spec("a", deadline=100), seq=1)
    if state is State.QUEUED:
        return new
    held = claimed(new, "one", at(30))
    return held if state is State.CLAIMED else ended(held, state, at(5), owner="one")


def moved(one: Job, after: State) -> Job:
    """Make the one move there is to a state."""
    if after in OVER:
        return ended(one, after, at(6))
    return claimed(one, "two", at(60)) if after is State.CLAIMED else given_back(one, at(6))


@pytest.mark.parametrize(("before", "after"), list(product(STATES, STATES)))
def test_only_moves_of_the_table_can_be_made(before: State, after: State) -> None:
    if after in MOVES[before]:
        assert moved(job(before), after).state is after
    else:
        with pytest.raises(AssertionError):
            moved(job(before), after)


def test_the_table_has_every_state_and_nothing_follows_an_end() -> None:
    assert MOVES.keys() == set(State)
    assert set(State) - {State.QUEUED, State.CLAIMED} == OVER


def test_the_page_tells_the_moves_there_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    told = [(before.strip(), after.strip()) for before, after in rows]
    assert told[1:] == [(b, a) for b in State for a in State if a in MOVES[b]]


@pytest.mark.parametrize("state", sorted(OVER))
def test_a_cancel_after_the_end_changes_nothing(state: State) -> None:
    assert cancelled(job(state), at(6)) == job(state)


@pytest.mark.parametrize("state", STATES)
def test_only_what_is_over_is_kept_for_a_time(state: State) -> None:
    one = job(state)
    assert one.is_over is (state in OVER)
    assert one.kept_until_ns == (at(65) if one.is_over else None)


@pytest.mark.parametrize(
    ("asked", "now", "lost", "after"),
    [
        (False, 6, 0, State.QUEUED),
        (False, 6, 1, State.FAILED),
        (False, 100, 1, State.EXPIRED),
        (True, 100, 1, State.CANCELLED),
    ],
)
def test_what_a_loss_ends_in(asked: bool, now: int, lost: int, after: State) -> None:
    one = replace(job(State.CLAIMED), cancel_asked=asked, lost=lost)
    told = given_back(one, at(now), lost=True, lost_max=2)
    assert (told.state, told.lost, told.lease_until_ns) == (after, lost + 1, None)


@pytest.mark.parametrize("state", STATES)
def test_an_ending_is_an_end(state: State) -> None:
    if state in OVER:
        assert Ending(state=state).state is state
    else:
        with pytest.raises(AssertionError):
            Ending(state=state)
