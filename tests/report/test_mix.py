"""Two mixes agree, or they are told apart by what differs."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.model.ids import ClassName, RequestId, TenantId
from headrace.report.mix import (
    Mix,
    checks,
    chi_square,
    chi_square_limit,
    distance,
    mix_of,
    variation,
)
from headrace.report.run import Offered
from headrace.units import NS_PER_S, DurationNs, InstantNs, Tokens, WorkNs

Draw = Callable[[Random], int]
COUNTS = st.dictionaries(st.integers(1, 50), st.integers(1, 30), min_size=1, max_size=20)


def short(rng: Random) -> int:
    return rng.randint(100, 1_000)


def drawn(  # noqa: PLR0913 - each is one thing that may differ
    seed: int,
    count: int = 1_000,
    *,
    tenants: Sequence[float] = (0.7, 0.3),
    batch: float = 0.3,
    given: Draw = short,
    made: Draw = short,
    span_s: float = 100.0,
) -> Mix:
    rng = Random(seed)
    rows = [
        Offered(
            request=RequestId(nth),
            at=InstantNs(0),
            tenant=TenantId(rng.choices(["a", "b"], tenants)[0]),
            slo_class=ClassName("batch" if rng.random() < batch else "interactive"),
            input_tokens=Tokens(given(rng)),
            output_tokens=Tokens(made(rng)),
            work_ns=WorkNs(1),
        )
        for nth in range(count)
    ]
    return mix_of(rows, DurationNs(round(span_s * NS_PER_S)))


def wrong(one: Mix, two: Mix) -> str:
    return "; ".join(check.name for check in checks(one, two) if not check.agrees)


@pytest.mark.parametrize("seed", range(10))
def test_draws_of_one_mix_agree(seed: int) -> None:
    assert not wrong(drawn(seed), drawn(seed + 100, 1_100, span_s=110.0))


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (drawn(9, tenants=(0.5, 0.5)), "share of each tenant;"),
        (drawn(9, batch=0.5), "share of each class;"),
        (drawn(9, given=lambda rng: rng.randint(100, 1_500)), "input lengths"),
        (drawn(9, made=lambda rng: rng.randint(100, 700)), "output lengths of class batch"),
        (drawn(9, span_s=60.0), "rate"),
    ],
    ids=["tenant", "class", "input", "output", "rate"],
)
def test_what_differs_is_named(other: Mix, name: str) -> None:
    assert name in f"{wrong(drawn(1), other)};"


def test_lengths_that_changed_places_between_tenants_do_not_agree() -> None:
    def mix(swapped: bool) -> Mix:
        rows = [
            Offered(
                request=RequestId(nth),
                at=InstantNs(0),
                tenant=TenantId("ab"[nth % 2]),
                slo_class=ClassName("c"),
                input_tokens=Tokens(100 if (nth + swapped) % 2 else 900),
                output_tokens=Tokens(10),
                work_ns=WorkNs(1),
            )
            for nth in range(400)
        ]
        return mix_of(rows, DurationNs(NS_PER_S))

    found = wrong(mix(swapped=False), mix(swapped=True))

    assert found == "input lengths of tenant a; input lengths of tenant b"


def test_few_requests_tell_nothing() -> None:
    assert "requests in the smaller: 99" in wrong(drawn(1, 99), drawn(2))


def test_a_large_run_is_not_refused_for_what_nobody_notices() -> None:
    one, two = drawn(1, 40_000), drawn(2, 40_000, tenants=(0.72, 0.28))

    assert not wrong(one, two)


@given(COUNTS, COUNTS)
def test_distance_is_the_largest_gap_of_the_distributions(
    one: dict[int, int], two: dict[int, int]
) -> None:
    def below(counts: dict[int, int], value: int) -> Fraction:
        return Fraction(sum(n for k, n in counts.items() if k <= value), sum(counts.values()))

    expected = max(abs(below(one, value) - below(two, value)) for value in range(51))
    assert distance(one, two) == distance(two, one) == expected
    assert distance(one, one) == 0


@given(COUNTS, COUNTS, st.integers(2, 5))
def test_shares_do_not_depend_on_how_many_there_are(
    one: dict[int, int], two: dict[int, int], times: int
) -> None:
    mine, its = ({str(k): n for k, n in side.items()} for side in (one, two))
    more = {name: n * times for name, n in mine.items()}

    assert variation(mine, its) == variation(more, its) == variation(its, mine)
    assert 0 <= variation(mine, its) <= 1
    assert variation(mine, more) == chi_square(mine, more)[0] == 0


def test_chi_square_of_a_textbook_table() -> None:
    # Rows 20, 30 and 30, 20 of 50 each: 4 cells 5 off an expected 25.
    assert chi_square({"a": 20, "b": 30}, {"a": 30, "b": 20}) == (Fraction(4), 1)


def test_rare_names_are_counted_together() -> None:
    one = {"a": 100, "b": 2, "c": 1}
    two = {"a": 100, "d": 3}

    assert chi_square(one, two) == (Fraction(0), 1)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 10.828), (10, 29.588), (20, 45.315)])
def test_limits_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert chi_square_limit(freedom) == pytest.approx(quantile, rel=0.003)
