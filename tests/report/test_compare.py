"""Policies compare on identical offered requests or not at all."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.model.ids import PoolName
from headrace.report.beside import NOT_COMPARABLE, side_by_side
from headrace.report.compare import (
    COSTS,
    DECIDING,
    NotComparable,
    Verdict,
    compare,
    compare_many,
)
from headrace.report.run import PoolTotals, RunRecord
from headrace.report.summary import summarise
from headrace.report.tables import render, render_comparison
from headrace.units import MICRO, NS_PER_S, DurationNs
from tests.report.making import Pair, refused, run, served


def made(met: int, of: int = 10, **told: Any) -> RunRecord:
    pairs: list[Pair] = [served(i) for i in range(met)]
    pairs += [(replace(o, output_tokens=4), row) for o, row in (refused(i) for i in range(met, of))]
    return run(pairs, **told)


@pytest.mark.parametrize(
    ("base", "other", "verdict"),
    [(5, 8, Verdict.BETTER), (8, 5, Verdict.WORSE), (5, 5, Verdict.EQUAL)],
)
def test_the_verdict_goes_by_work_goodput_over_offered(
    base: int, other: int, verdict: Verdict
) -> None:
    found = compare(made(base), made(other, label="other"))
    assert found.verdict is verdict
    change = next(c for c in found.changes if c.name == DECIDING)
    assert change.base == base / 10
    assert change.other == other / 10
    assert change.difference == pytest.approx((other - base) / 10)
    assert change.relative == pytest.approx((other - base) / base)


def test_more_requests_of_less_work_are_worse() -> None:
    small = [served(0, work_ms=100), *(refused(i, work_ms=1) for i in range(1, 10))]
    many = [refused(0, work_ms=100), *(served(i, work_ms=1) for i in range(1, 10))]
    one, two = ([(replace(o, output_tokens=4), r) for o, r in pairs] for pairs in (small, many))
    found = compare(run(one), run(two))
    assert found.verdict is Verdict.WORSE
    goodput = next(c for c in found.changes if c.name == "request goodput")
    assert goodput.difference is not None
    assert goodput.difference > 0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"trace_hash": "beef"}, "different offered requests"),
        ({"formula": "goodput-0"}, "different formulas"),
        ({"span_ns": DurationNs(5)}, "offered span differ"),
    ],
)
def test_what_was_offered_and_how_it_is_judged_must_agree(
    changed: dict[str, object], why: str
) -> None:
    with pytest.raises(NotComparable, match=why):
        compare(made(5), replace(made(5), **changed))


def test_one_hash_over_different_requests_is_found() -> None:
    with pytest.raises(NotComparable, match="offered requests differ: 10 and 9"):
        compare(made(5), made(5, of=9))


def test_records_and_summaries_compare_alike() -> None:
    assert compare(made(5), made(6)) == compare(summarise(made(5)), summarise(made(6)))


def pairs_of(*met: tuple[int, int]) -> list[tuple[RunRecord, RunRecord]]:
    return [
        (
            made(base, seed=seed, trace_hash=f"{seed}"),
            made(other, seed=seed, trace_hash=f"{seed}", label="other"),
        )
        for seed, (base, other) in enumerate(met)
    ]


@pytest.mark.parametrize(
    ("met", "verdict"),
    [
        (((5, 8), (5, 7), (4, 7)), Verdict.BETTER),
        (((8, 5), (7, 5), (7, 4)), Verdict.WORSE),
        (((5, 8), (8, 5), (5, 6)), Verdict.UNCLEAR),
        (((5, 5), (6, 6)), Verdict.EQUAL),
    ],
)
def test_several_seeds_give_a_mean_difference_with_its_interval(
    met: tuple[tuple[int, int], ...], verdict: Verdict
) -> None:
    found = compare_many(pairs_of(*met))
    assert found.verdict is verdict
    assert found.seeds == tuple(range(len(met)))
    change = next(c for c in found.changes if c.name == DECIDING)
    mean = sum(other - base for base, other in met) / 10 / len(met)
    assert change.difference == pytest.approx(mean, abs=1e-6)
    assert change.low <= change.difference <= change.high


def test_one_pair_has_no_interval() -> None:
    with pytest.raises(NotComparable, match="at least two"):
        compare_many(pairs_of((5, 8)))


def test_pairs_must_be_of_two_policies_on_one_scenario() -> None:
    odd = [*pairs_of((5, 8)), *[(b, replace(o, label="third")) for b, o in pairs_of((5, 8))]]
    with pytest.raises(NotComparable, match="'third'"):
        compare_many(odd)


def test_a_figure_undefined_in_one_pair_is_left_out() -> None:
    pairs = pairs_of((0, 5), (5, 8))
    found = compare_many(pairs)
    names = [change.name for change in found.changes]
    assert "attainment over admitted" not in names
    assert DECIDING in names


def test_comparisons_are_json() -> None:
    for found in (compare(made(5), made(6)), compare_many(pairs_of((5, 8), (5, 7)))):
        assert msgspec.json.decode(msgspec.json.encode(found))["verdict"] in ("better", "unclear")


def test_the_verdict_is_the_first_line() -> None:
    one = render_comparison(compare(made(5), made(8, label="other"))).splitlines()
    assert one[0] == "other is better than tenant_first, by work goodput over offered"
    many = render_comparison(compare_many(pairs_of((5, 8), (8, 5)))).splitlines()
    assert many[0].startswith("other is not clearly better or worse than tenant_first")


def test_runs_of_one_trace_stand_side_by_side_without_a_warning() -> None:
    told = [summarise(made(5)), summarise(made(6))]
    assert NOT_COMPARABLE not in render(side_by_side(told))
    told.append(summarise(made(6, trace_hash="beef")))
    assert NOT_COMPARABLE in render(side_by_side(told))


def test_cost_is_compared_where_it_was_counted_and_not_shown_elsewhere() -> None:
    held = [
        PoolTotals(pool=PoolName("p"), gpu_ns=of * NS_PER_S, serving_ns=0, micro_usd=of * MICRO)
        for of in (10, 20)
    ]
    one, two = (replace(made(5), pools=[pool]) for pool in held)
    changes = {c.name: (c.base, c.other) for c in compare(one, two).changes}
    assert changes["GPU time per request that met"] == (2.0, 4.0)
    assert changes["cost per 1,000 that met"] == (2_000.0, 4_000.0)
    text = render(side_by_side([summarise(one), summarise(two)]))
    assert "GPU-seconds per request that met" in text
    assert "cost per 1,000 requests that met" in text
    plain = made(5)
    assert not set(COSTS) & {c.name for c in compare(plain, plain).changes}
    assert "GPU" not in render(side_by_side([summarise(plain)])).replace("GPU-s/s", "")
