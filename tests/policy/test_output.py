"""Output lengths are learnt online, finest group first, in bounded memory."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.predict.output import OutputPrediction
from headrace.policy.predict.windows import Window, Windows

PREDICTION = OutputPrediction(window=32, enough=4, groups=16)


def groups(tenant: str = "a", slo_class: str = "chat", prompt: int = 1_000) -> tuple[str, ...]:
    return PREDICTION.groups_of(tenant, slo_class, "m", prompt)


def learnt(*lengths: int, given_: OutputPrediction = PREDICTION) -> Windows:
    state = Windows()
    for tokens in lengths:
        given_.learn(state, groups(), tokens)
    return state


def test_before_anything_is_known_the_prior_answers() -> None:
    assert PREDICTION.predict(Windows(), groups()) == (200, 480)
    assert PREDICTION.predict(learnt(9, 9, 9), groups()) == (200, 480), "three are not enough"


def test_quantiles_are_those_of_the_window() -> None:
    state = learnt(*range(1, 21))
    assert PREDICTION.predict(state, groups()) == (11, 19)


@given(st.lists(st.integers(1, 10_000), min_size=4, max_size=100))
def test_the_window_is_the_last_lengths_and_p50_is_at_most_p90(lengths: list[int]) -> None:
    state = learnt(*lengths)
    recent = sorted(lengths[-32:])
    p50, p90 = PREDICTION.predict(state, groups())
    assert (p50, p90) == (recent[len(recent) // 2], recent[len(recent) * 9 // 10])
    assert p50 <= p90
    assert sum(length <= p90 for length in recent) * 10 >= len(recent) * 9


def test_a_group_that_knows_too_little_asks_the_next_coarser_one() -> None:
    state = learnt(7, 7, 7, 7)
    assert PREDICTION.predict(state, groups(prompt=50_000)) == (7, 7), "same tenant, other prompts"
    assert PREDICTION.predict(state, groups(tenant="b")) == (7, 7), "same class"
    assert PREDICTION.predict(state, groups(slo_class="batch")) == (7, 7), "same model"
    other = PREDICTION.groups_of("a", "chat", "n", 1_000)
    assert PREDICTION.predict(state, other) == (200, 480)


def test_the_finest_group_that_knows_enough_answers() -> None:
    state = learnt(5, 5, 5, 5)
    for _ in range(4):
        PREDICTION.learn(state, groups(tenant="b"), 900)
    assert PREDICTION.predict(state, groups()) == (5, 5)
    assert PREDICTION.predict(state, groups(tenant="b")) == (900, 900)


def test_prompts_are_grouped_by_powers_of_two() -> None:
    assert groups(prompt=512) == groups(prompt=1_023)
    assert groups(prompt=511)[0] != groups(prompt=512)[0]
    assert groups(prompt=511)[1:] == groups(prompt=512)[1:]
    assert len(set(groups())) == 4


def test_groups_are_bounded_and_the_longest_untaught_goes() -> None:
    state = learnt(1)
    for nth in range(30):
        PREDICTION.learn(state, groups(tenant=f"t{nth}"), 1)
        assert len(state.windows) <= 16
    assert groups()[0] not in state.windows
    assert groups()[2] in state.windows, "the class and the model are taught by everybody"
    assert groups(tenant="t29")[0] in state.windows


@pytest.mark.parametrize("new", [8, 16, 64])
def test_a_changed_window_keeps_the_newest(new: int) -> None:
    seen = Window()
    lengths = list(range(100, 150))
    for tokens in lengths[:40]:
        seen.add(tokens, 32)
    for tokens in lengths[40:]:
        seen.add(tokens, new)
    kept = lengths[-min(new, 42) :] if new > 32 else lengths[-new:]
    assert sorted(seen.recent) == seen.ordered == kept


@given(st.lists(st.tuples(st.integers(1, 99), st.sampled_from((8, 9, 20))), max_size=120))
def test_whatever_the_window_does_both_orders_hold_the_same(adds: list[tuple[int, int]]) -> None:
    seen, size = Window(), 0
    for tokens, size in adds:
        seen.add(tokens, size)
        assert sorted(seen.recent) == seen.ordered
        assert len(seen.recent) <= size
    if adds and size:
        assert adds[-1][0] in seen.recent


def test_a_prior_upside_down_is_refused() -> None:
    with pytest.raises(ValueError, match="prior_p90 10 is below prior_p50 20"):
        OutputPrediction(prior_p50=20, prior_p90=10)
    with pytest.raises(msgspec.ValidationError, match="more than the window of 8"):
        msgspec.convert({"window": 8, "enough": 9}, OutputPrediction)
