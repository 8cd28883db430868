"""A class goes down where there is too little for all, and comes back once there was enough for long."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.model.ladder import Pressure
from headrace.policy.degrade.level import REFUSED, Degrading
from headrace.units import MICRO, DurationNs, ms, seconds

CONFIG = Degrading()
RATE = MICRO
SEEN = Pressure(
    level=0,
    lowest=2,
    offered=(2 * RATE, RATE, RATE // 2),
    rate_micro=RATE,
    wait_ns=DurationNs(0),
    refused=0,
    calm_ns=DurationNs(0),
    quiet_ns=DurationNs(0),
    failed=0,
)
LIGHT = (RATE // 2, RATE // 4, RATE // 8)


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({}, 0),  # whatever comes in: nobody waits
        ({"refused": 1}, 2),  # the first that fits
        ({"refused": 1, "offered": (2 * RATE, RATE // 2, 1)}, 1),
        ({"refused": 1, "offered": (9 * RATE,) * 3}, 2),
        ({"refused": 2, "offered": LIGHT}, 0),  # chance
        ({"refused": 2, "offered": LIGHT, "wait_ns": ms(501)}, 0),  # one burst, with two signs
        ({"refused": 3, "offered": LIGHT}, 1),  # one further than the forecast says
        ({"refused": 3, "offered": LIGHT, "level": 1}, 2),
        ({"refused": 3, "offered": LIGHT, "level": 2}, 2),
        ({"wait_ns": ms(501)}, 2),
        ({"wait_ns": ms(500)}, 0),
        ({"wait_ns": ms(501), "offered": LIGHT}, 0),
        ({"wait_ns": ms(501), "offered": LIGHT, "level": 1}, 1),
        ({"refused": 3, "rate_micro": 0}, 0),
        ({"level": 2, "rate_micro": 0, "calm_ns": seconds(99)}, 2),
        ({"level": 2, "calm_ns": seconds(9.9)}, 2),
        ({"level": 2, "calm_ns": seconds(10)}, 1),
        ({"level": 1, "calm_ns": seconds(10)}, 0),
        ({"level": 0, "calm_ns": seconds(10)}, 0),
        ({"level": 2, "calm_ns": seconds(10), "refused": 3}, 2),
        ({"level": 2, "calm_ns": seconds(10), "wait_ns": ms(501)}, 2),
        ({"level": 2, "quiet_ns": seconds(59)}, 2),
        ({"level": 2, "quiet_ns": seconds(60)}, 1),
        ({"level": 2, "quiet_ns": seconds(60), "failed": 1}, 2),
        ({"level": 2, "quiet_ns": seconds(120), "failed": 1}, 1),
        ({"level": 2, "quiet_ns": seconds(60 * 32), "failed": 99}, 1),
        ({"level": 3}, 2),  # the ladder was longer before
    ],
)
def test_level(changed: dict[str, object], level: int) -> None:
    assert CONFIG.level(replace(SEEN, **changed)) == level


@pytest.mark.parametrize(
    ("changed", "calm"),
    [
        ({}, True),  # there is none above
        ({"level": 1, "offered": (RATE * 8 // 10, 1, 1)}, True),
        ({"level": 1, "offered": (RATE * 8 // 10 + 1, 1, 1)}, False),
        ({"level": 2, "offered": (9 * RATE, RATE // 2, 1)}, True),
        ({"level": 2, "offered": LIGHT, "refused": 3}, False),
        ({"level": 2, "offered": LIGHT, "wait_ns": ms(501)}, False),
    ],
)
def test_calm(changed: dict[str, object], calm: bool) -> None:
    assert CONFIG.is_calm(replace(SEEN, **changed)) is calm


def test_marks_upside_down_are_refused() -> None:
    with pytest.raises(ValueError, match=r"low 0\.9 is not below high 0\.9"):
        Degrading(high=0.9, low=0.9)


durations = st.integers(0, 4_000 * 10**9).map(DurationNs)
pressures = st.builds(
    lambda level, lowest, offered, rate, wait, refused, calm, quiet, failed: Pressure(
        level=level,
        lowest=lowest,
        offered=tuple(sorted(offered, reverse=True))[: lowest + 1],
        rate_micro=rate,
        wait_ns=wait,
        refused=refused,
        calm_ns=calm,
        quiet_ns=quiet,
        failed=failed,
    ),
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 10 * RATE), min_size=4, max_size=4),
    st.integers(0, 4 * RATE),
    durations,
    st.integers(0, 3),
    durations,
    durations,
    st.integers(0, 9),
)


@given(pressures)
def test_a_level_is_one_of_the_ladder_and_moves_as_it_should(seen: Pressure) -> None:
    at, level = min(seen.level, seen.lowest), CONFIG.level(seen)
    assert 0 <= level <= seen.lowest
    assert level >= at - 1  # up by one step at most
    if level > at:
        assert CONFIG.is_short(seen)
    if level < at:
        assert not CONFIG.is_short(seen)
    if seen.refused == REFUSED and seen.rate_micro:
        assert level == seen.lowest or level > at


@given(pressures, st.sampled_from(["offered", "wait_ns", "refused", "rate_micro"]), st.data())
def test_more_work_or_fewer_replicas_never_put_a_class_higher(
    seen: Pressure, name: str, data: st.DataObject
) -> None:
    grow: dict[str, Callable[[], object]] = {
        "offered": lambda: tuple(one + data.draw(st.just(RATE)) for one in seen.offered),
        "wait_ns": lambda: seen.wait_ns + data.draw(durations),
        "refused": lambda: REFUSED,
        "rate_micro": lambda: data.draw(st.integers(1, seen.rate_micro)),
    }
    if not seen.rate_micro:
        return
    assert CONFIG.level(replace(seen, **{name: grow[name]()})) >= CONFIG.level(seen)
