"""A `Ranked` is a sorted list with weights, only faster."""

from bisect import insort
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.policy.fairness import ranked
from headrace.policy.fairness.ranked import Ranked


class AgainstSortedList(RuleBasedStateMachine):
    """Every answer is that of a sorted list of (key, id, weight)."""

    @initialize(start=st.integers(0, 400))
    def begin(self, start: int) -> None:
        self.ranked: Ranked[int] = Ranked()
        self.pairs: list[tuple[int, int]] = []
        self.weights: dict[tuple[int, int], int] = {}
        self.ident = 0
        for nth in range(start):
            self.add(nth * 37 % 101, nth % 5)

    @rule(key=st.integers(-20, 120), weight=st.integers(0, 9))
    def add(self, key: int, weight: int) -> None:
        self.ident += 1
        self.ranked.add(key, self.ident, weight)
        insort(self.pairs, (key, self.ident))
        self.weights[key, self.ident] = weight

    @precondition(lambda self: self.pairs)
    @rule(share=st.floats(0, 1, exclude_max=True))
    def remove(self, share: float) -> None:
        pair = self.pairs.pop(int(share * len(self.pairs)))
        assert self.ranked.remove(*pair) == self.weights.pop(pair)

    @precondition(lambda self: self.pairs)
    @rule(share=st.floats(0, 1, exclude_max=True), key=st.integers(-20, 120))
    def move(self, share: float, key: int) -> None:
        old, ident = self.pairs.pop(int(share * len(self.pairs)))
        self.ranked.move(old, key, ident)
        insort(self.pairs, (key, ident))
        self.weights[key, ident] = self.weights.pop((old, ident))

    @precondition(lambda self: self.pairs)
    @rule(count=st.integers(1, 150))
    def drain(self, count: int) -> None:
        for pair in self.pairs[:count]:
            assert self.ranked.first() == pair
            assert self.ranked.remove(*pair) == self.weights.pop(pair)
        del self.pairs[:count]

    @rule(key=st.integers(-30, 130), ident=st.integers(0, 500))
    def ahead(self, key: int, ident: int) -> None:
        expected = sum(self.weights[pair] for pair in self.pairs if pair < (key, ident))
        assert self.ranked.ahead(key, ident) == expected

    @invariant()
    def is_the_list(self) -> None:
        assert list(self.ranked) == self.pairs
        assert list(self.ranked.backwards()) == self.pairs[::-1]
        assert self.ranked.first() == (self.pairs[0] if self.pairs else None)
        assert self.ranked.last() == (self.pairs[-1] if self.pairs else None)
        assert self.ranked.size == len(self.pairs)
        assert self.ranked.total == sum(self.weights.values())

    @invariant()
    def runs_are_short_and_add_up(self) -> None:
        runs, weights, sums = self.ranked.runs, self.ranked.weights, self.ranked.sums
        assert len(runs) == len(weights) == len(sums)
        assert all(0 < len(run) <= ranked.RUN for run in runs)
        assert [len(run) for run in runs] == [len(each) for each in weights]
        assert sums == [sum(each) for each in weights]


TestAgainstSortedList = AgainstSortedList.TestCase
TestAgainstSortedList.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("run", [1, 2, 3])
def test_the_shortest_runs_work_as_well(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked, "RUN", run)
    found: Ranked[int] = Ranked()
    for nth in range(40):
        found.add(nth * 7 % 40, nth, nth)
    assert [key for key, _ in found] == list(range(40))
    assert found.ahead(20, 0) == sum(nth for nth in range(40) if nth * 7 % 40 < 20)
    for nth in range(40):
        assert found.remove(nth * 7 % 40, nth) == nth
    assert (found.runs, found.size, found.total) == ([], 0, 0)


def test_equal_keys_go_by_id() -> None:
    found: Ranked[str] = Ranked()
    for name in ("b", "c", "a"):
        found.add(5, name)
    assert [name for _, name in found] == ["a", "b", "c"]


def test_a_pair_is_there_once() -> None:
    found: Ranked[int] = Ranked()
    found.add(1, 1)
    with pytest.raises(AssertionError, match="there already"):
        found.add(1, 1)


@pytest.mark.parametrize("pair", [(0, 0), (2, 1), (9, 9)], ids=["before", "between", "after"])
def test_what_is_not_there_cannot_be_taken_out(pair: tuple[int, int]) -> None:
    found: Ranked[int] = Ranked()
    found.add(1, 1)
    found.add(3, 3)
    with pytest.raises(AssertionError, match="is not there"):
        found.remove(*pair)
    with pytest.raises(AssertionError, match="is not there"):
        Ranked[int]().remove(*pair)


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 3)), max_size=300))
def test_it_comes_back_from_bytes_as_it_was(items: list[tuple[int, int]]) -> None:
    found: Ranked[int] = Ranked()
    for ident, (key, weight) in enumerate(items):
        found.add(key, ident, weight)
    back: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Ranked[int])
    assert back == found
    back.add(0, 10_000, 1)
    found.add(0, 10_000, 1)
    assert list(back) == list(found)
