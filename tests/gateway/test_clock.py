"""The clock never calls early and never spins."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from headrace.gateway.clock import LoopClock, MonotonicClock
from headrace.units import NS_PER_MS, InstantNs, later


@pytest.mark.asyncio
@pytest.mark.looptime
@pytest.mark.parametrize("when", [1, 999, 1_000, 1_001, 123_456_789, 10**12 + 7])
async def test_a_call_comes_at_or_just_after_its_instant(when: int) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    called = asyncio.get_running_loop().create_future()
    clock.call_at(InstantNs(when), lambda: called.set_result(clock.now()))
    assert 0 <= await called - when < 1_000


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_call_that_was_cancelled_never_comes() -> None:
    clock = LoopClock(asyncio.get_running_loop())
    calls: list[str] = []
    timer = clock.call_at(InstantNs(5), lambda: calls.append("cancelled"))
    done = asyncio.get_running_loop().create_future()
    clock.call_at(InstantNs(10 * NS_PER_MS), lambda: done.set_result(None))
    timer.cancel()
    await done
    assert not calls


class EarlyLoop:
    """A loop that calls whenever the test wants."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.armed: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.seconds

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        self.armed.append((when, callback))


def test_a_loop_that_calls_early_is_asked_again() -> None:
    loop = EarlyLoop()
    clock = LoopClock(cast("asyncio.AbstractEventLoop", loop))
    calls: list[int] = []
    clock.call_at(InstantNs(5 * NS_PER_MS), lambda: calls.append(clock.now()))
    for loop.seconds in (0.004, 0.004_999, 0.005):
        assert not calls
        loop.armed.pop()[1]()
    assert calls == [5 * NS_PER_MS]
    assert not loop.armed


def test_a_call_that_fails_is_told_to_whoever_wants_to_know() -> None:
    loop = EarlyLoop()
    clock = LoopClock(cast("asyncio.AbstractEventLoop", loop))
    failures: list[Exception] = []

    def fail() -> None:
        raise AssertionError("impossible")

    clock.call_at(InstantNs(0), fail)
    with pytest.raises(AssertionError):
        loop.armed.pop()[1]()
    clock.on_error = failures.append
    clock.call_at(InstantNs(0), fail)
    loop.armed.pop()[1]()
    assert [str(one) for one in failures] == ["impossible"]


@pytest.mark.asyncio
async def test_the_machines_clock_calls_no_earlier_than_it_tells() -> None:
    clock = MonotonicClock(asyncio.get_running_loop())
    when = later(clock.now(), 3_300_000)
    called = asyncio.get_running_loop().create_future()
    clock.call_at(when, lambda: called.set_result(clock.now()))
    assert await called >= when
    assert clock.now() >= when
    assert clock.wall() > 1_700_000_000
