"""Capacity for work and a queue is counted exactly."""

from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.scaling.formula import groups_for, need_micro
from headrace.policy.scaling.reserve import left_of, with_reserve
from headrace.units import MICRO, NS_PER_S

MICROS = st.integers(0, 10**8)
TIMES = st.integers(1, 10**13)


@given(st.integers(MICRO, 3 * MICRO), MICROS, TIMES, TIMES, st.integers(1, 10**7))
def test_groups_are_the_exact_quotient_rounded_up(
    headroom: int, rate: int, queued: int, drain: int, each: int
) -> None:
    need = Fraction(headroom * rate, MICRO) + Fraction(queued * MICRO, drain)
    assert groups_for(need_micro(headroom, rate, queued, drain), (), each) == ceil(need / each)


@given(st.integers(1, 200), st.integers(1, 10**7))
def test_exact_quotients_do_not_round_up(count: int, each: int) -> None:
    assert groups_for(need_micro(MICRO, count * each, 0, NS_PER_S), (), each) == count
    assert groups_for(need_micro(MICRO, count * each, 0, NS_PER_S), (each,) * count, each) == count
    assert groups_for(count * each + 1, (each,) * count, each) == count + 1


@given(st.integers(0, 10**7), st.lists(st.integers(0, 10**6), max_size=12), st.integers(1, 10**6))
def test_so_many_are_enough_whichever_go(need: int, there: list[int], each: int) -> None:
    count = groups_for(need, there, each)
    kept = sorted(there)[:count]
    assert sum(kept) + (count - len(kept)) * each >= need
    if 0 < count <= len(there):
        assert sum(kept[:-1]) < need


def one_by_one(need: int, lost: int, there: list[str], may: set[str], most: int) -> int | None:
    """Return the same by placing and taking groups one by one."""
    for count in range(need, most + 1):
        spread = dict.fromkeys(may, 0)
        for name in filter(None, there):
            spread[name] = spread.get(name, 0) + 1
        for number in range(count - sum(spread.values())):
            least = min(may, key=lambda name: spread[name]) if may else f"new{number}"
            spread[least] = spread.get(least, 0) + 1
        for _ in range(sum(spread.values()) - count):
            spread[max(spread, key=lambda name: spread[name])] -= 1
        if sum(sorted(spread.values(), reverse=True)[lost:]) >= need:
            return count
    return None


@given(
    st.integers(1, 12),
    st.integers(1, 2),
    st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=14),
    st.sets(st.sampled_from(["a", "b", "c", "d"])),
)
def test_the_reserve_is_the_least_that_leaves_what_is_needed(
    need: int, lost: int, there: list[str], may: set[str]
) -> None:
    most = need * (lost + 1) + len(there) + lost
    found = with_reserve(need, lost, there, may, most)
    assert found == one_by_one(need, lost, there, may, most)
    assert with_reserve(need, 0, there, may, most) == need
    assert with_reserve(0, lost, there, may, most) == 0


def test_reserve_depends_on_how_many_domains_there_are() -> None:
    assert with_reserve(4, 1, (), (), 99) == 5, "each its own"
    assert with_reserve(4, 1, (), ("a", "b"), 99) == 8
    assert with_reserve(4, 1, (), ("a", "b", "c"), 99) == 6
    assert with_reserve(4, 1, (), ("a",), 99) is None
    assert with_reserve(4, 2, (), ("a", "b", "c"), 99) == 12


def test_groups_that_stand_in_one_domain_are_no_reserve() -> None:
    crowded = ("a",) * 6
    assert with_reserve(2, 1, crowded, ("a", "b"), 99) == 8, "two of them elsewhere"
    assert with_reserve(2, 1, (*crowded, "b", "b"), ("a", "b"), 99) == 4, "then the fullest gives"


def test_what_is_left_is_without_the_largest() -> None:
    assert left_of([5, 1, 3], 1) == 4
    assert left_of([5], 2) == 0
