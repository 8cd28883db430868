"""The closed form of a segment's length, and its inverse."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.replica.segment import least_steps, total


@given(alpha=st.integers(1, 10**11), beta=st.integers(0, 10**8), steps=st.integers(1, 3_000))
def test_total_is_the_sum_of_its_steps(alpha: int, beta: int, steps: int) -> None:
    assert total(alpha, beta, steps) == sum(alpha + beta * nth for nth in range(steps))


@given(
    alpha=st.integers(1, 10**11),
    beta=st.one_of(st.integers(0, 5), st.integers(0, 10**9)),
    span=st.one_of(st.integers(-5, 10**6), st.integers(1, 10**17)),
)
def test_least_steps_reach_the_span_and_one_less_does_not(alpha: int, beta: int, span: int) -> None:
    steps = least_steps(alpha, beta, span)
    assert steps >= 1
    assert total(alpha, beta, steps) >= span
    assert steps == 1 or total(alpha, beta, steps - 1) < span


@given(alpha=st.integers(1, 10**6), beta=st.integers(0, 10**6), steps=st.integers(1, 500))
def test_a_span_of_whole_steps_is_met_exactly(alpha: int, beta: int, steps: int) -> None:
    assert least_steps(alpha, beta, total(alpha, beta, steps)) == steps
    assert least_steps(alpha, beta, total(alpha, beta, steps) + 1) == steps + 1
