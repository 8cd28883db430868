"""The search for a knee: found on any curve that falls, near it in noise, and always in bounded questions."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sim.knee import WIDENINGS, NoKneeError, bisect, knee


def counted(holds: Callable[[float], bool]) -> tuple[Callable[[float], bool], dict[float, bool]]:
    """Return the same question, and the answers it was given."""
    asked: dict[float, bool] = {}

    def ask(rate: float) -> bool:
        assert rate not in asked, "asked twice"
        asked[rate] = holds(rate)
        return asked[rate]

    return ask, asked


@given(st.floats(0.01, 1_000), st.floats(0.01, 100), st.sampled_from((0.2, 0.05, 0.01, 0.001)))
def test_a_curve_that_falls_once_is_found_to_the_precision(
    true: float, off: float, precision: float
) -> None:
    ask, asked = counted(lambda rate: rate <= true)
    found = knee(ask, true * off, precision)
    assert found <= true < found * (1 + precision) * (1 + 1e-9)
    assert len(asked) <= WIDENINGS + 2 + 12


@given(st.integers(0, 2**32), st.floats(0.2, 5))
def test_noise_near_the_knee_moves_it_no_further_than_it_reaches(seed: int, off: float) -> None:
    rng = Random(seed)
    ask, asked = counted(lambda rate: rate <= 8.0 * rng.uniform(0.95, 1.05))
    found = knee(ask, 8.0 * off, 0.01)
    assert 8.0 * 0.94 <= found <= 8.0 * 1.05
    assert all(rate > found for rate, held in asked.items() if not held)
    assert asked[found]


@pytest.mark.parametrize("answer", [True, False])
def test_what_always_or_never_holds_has_none_and_is_not_asked_for_ever(answer: bool) -> None:
    ask, asked = counted(lambda _: answer)
    with pytest.raises(NoKneeError, match="even"):
        knee(ask, 3.0, 0.01)
    assert len(asked) <= WIDENINGS + 2


def test_bisection_asks_as_often_as_it_is_told_to() -> None:
    ask, asked = counted(lambda rate: rate <= 5.3)
    assert bisect(ask, 0.0, 64.0, 9) == 5.25
    assert len(asked) == 9
    assert bisect(ask, 2.0, 3.0, 0) == 2.0
