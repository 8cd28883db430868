"""A decision tells in rows what each signal said, what held, and what is done."""

import pytest
from hypothesis import given

from headrace.model.scaling import Brake, Signal
from headrace.model.scaling_spec import By, Scaling
from headrace.policy.scaling.decide import decide
from headrace.policy.scaling.explain import BRAKES, explained, written
from tests.policy.scaling.made import NOW, S, decided, groups
from tests.policy.scaling.test_decide import Drawn, drawn


def test_each_brake_has_its_words() -> None:
    assert set(BRAKES) == set(Brake)


def test_who_wins_is_marked_and_numbers_have_units() -> None:
    rows = explained(Scaling(), decided(urgent=5.0))
    (winner,) = (row for row in rows if row.wins)
    assert (winner.what, winner.groups) == (Signal.WORK, 6)
    assert "need 5.5 s/s" in winner.numbers
    assert {row.what for row in rows if row.what in set(Signal)} == set(Signal) - set(By)
    (ask,) = (row for row in rows if row.what == "ask")
    assert ask.groups == 4
    assert next(row for row in rows if row.what == "need").groups == 6


def test_a_floor_wins_where_no_signal_asks_for_as_much() -> None:
    rows = explained(Scaling(min=3), decided(Scaling(min=3), groups=groups(3)))
    assert [row.what for row in rows if row.wins] == ["floor"]


def test_what_holds_is_told_in_words() -> None:
    young = decided(groups=groups(4, since=NOW - S))
    rows = {row.what: row for row in explained(Scaling(), young)}
    assert rows[Brake.YOUNG].why == BRAKES[Brake.YOUNG]
    drained = {row.what: row for row in explained(Scaling(), decided(groups=groups(4)))}
    assert drained["drain"].why == "r0"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("need_micro", 1_250_000, "need 1.25 s/s"),
        ("waiting_ns", 1_500_000_000, "waiting 1.5 s"),
        ("error_ppm", 250_000, "error 25 %"),
        ("held", 7, "held 7"),
    ],
)
def test_numbers_are_written_by_their_unit(name: str, value: int, text: str) -> None:
    assert written(name, value) == text


@given(drawn())
def test_every_decision_can_be_explained(it: Drawn) -> None:
    said = decide(it.settings, it.facts)
    rows = explained(it.settings, said)
    assert all(row.why for row in rows)
    assert sum(row.wins for row in rows) == 1
