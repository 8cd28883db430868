"""Generated traces repeat, hold their rates, and their sources do not disturb each other."""

import math
from collections.abc import Callable, Iterable
from itertools import islice, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.model.ids import TenantId
from headrace.trace import generate as generate_module
from headrace.trace.builtin import ARXIV, AZURE_CONV, BIMODAL, CHAT, REASONING
from headrace.trace.generate import arrival_times, generate, length_draw
from headrace.trace.mix import (
    Always,
    Arrivals,
    Blend,
    Empirical,
    Even,
    Exact,
    Fixed,
    Gamma,
    Headroom,
    Lengths,
    Lognormal,
    MaxTokens,
    Mix,
    OnOff,
    OptionalParts,
    Part,
    Poisson,
    Quantiles,
    Ramp,
    Segment,
    SharedPrefix,
    TenantSource,
    Uniform,
)
from headrace.trace.row import TraceRow, trace_hash
from headrace.trace.streams import stream

RNG_NAME = "test"


def source(tenant: str = "a", **changes: Any) -> TenantSource:
    plain = TenantSource(tenant=TenantId(tenant), arrivals=Poisson(2), lengths=Fixed(10, 5))
    return replace(plain, **changes)


def draws(lengths: Lengths, count: int = 20_000) -> list[tuple[int, int]]:
    rng, draw = stream(1, RNG_NAME), length_draw(lengths)
    return [draw(rng) for _ in range(count)]


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Poisson(4), 1.0),
        (Gamma(4, 2.0), 2.0),
        (Gamma(4, 0.5), 0.5),
        (Even(4), 0.0),
        (OnOff(4, 10, 0), 1.0),
    ],
)
def test_rate_and_burstiness_are_as_asked(arrivals: Arrivals, cv: float) -> None:
    times = list(islice(arrival_times(arrivals, stream(1, RNG_NAME)), 20_001))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    average = mean(gaps)
    assert average == pytest.approx(0.25, rel=0.03)
    spread = math.sqrt(mean((gap - average) ** 2 for gap in gaps)) / average
    assert spread == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_even_arrivals_start_at_once_and_drift_nowhere() -> None:
    rows = generate(Mix(sources=(source(arrivals=Even(3)),), duration_s=10_000), 1)
    assert len(rows) == 30_000
    assert [row.at for row in rows[:4]] == [0, 333_333_333, 666_666_667, 1_000_000_000]
    assert rows[-3].at == 9_999_000_000_000


def test_phases_are_silent_between() -> None:
    even = list(islice(arrival_times(OnOff(0.5, 60, 60, even=True), stream(1, RNG_NAME)), 60))
    assert even[:3] == [0, 2, 4]
    assert even[29:32] == [58, 120, 122]
    drawn = list(islice(arrival_times(OnOff(5, 2, 3), stream(1, RNG_NAME)), 5_000))
    assert all(at % 5 < 2 for at in drawn)
    assert drawn[-1] == pytest.approx(5_000 / 5 * 5 / 2, rel=0.05)


def test_ramp_holds_each_rate_and_ends() -> None:
    ramp = Ramp((Segment(100, 10), Segment(200, 0), Segment(300, 40), Segment(301, 0)))
    times = list(arrival_times(ramp, stream(1, RNG_NAME)))
    counts = [sum(start <= at < start + 100 for at in times) for start in (0, 100, 200, 300)]
    assert counts[0] == pytest.approx(1_000, rel=0.1)
    assert counts[2] == pytest.approx(4_000, rel=0.05)
    assert (counts[1], counts[3]) == (0, 0)
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("lengths", "given_mean", "made_mean"),
    [
        (Fixed(7, 3), 7, 3),
        (Uniform(10, 20, 1, 3), 15, 2),
        (Lognormal(100, 50, 0.5, 0.0), 100 * math.exp(0.125), 50),
        (Quantiles(((0, 100), (50, 200), (100, 400)), ((0, 5), (100, 5))), 225, 5),
        (Empirical(((10, 1), (20, 3))), 15, 2),
        (Blend((Part(3, Fixed(10, 1)), Part(1, Fixed(50, 9)))), 20, 3),
        (AZURE_CONV, 1154, 211),
        (CHAT, 458, 156),
        (REASONING, 1324, 1245),
        (ARXIV, 2588, 291),
        (BIMODAL, 1154 * 0.8 + 16_384 * 0.2, 211 * 0.8 + 512 * 0.2),
    ],
    ids=[
        "fixed",
        "uniform",
        "lognormal",
        "quantiles",
        "empirical",
        "blend",
        "conv",
        "chat",
        "reasoning",
        "arxiv",
        "bimodal",
    ],
)
def test_lengths_have_the_mean_asked_for(
    lengths: Lengths, given_mean: float, made_mean: float
) -> None:
    pairs = draws(lengths)
    assert mean(pair[0] for pair in pairs) == pytest.approx(given_mean, rel=0.04)
    assert mean(pair[1] for pair in pairs) == pytest.approx(made_mean, rel=0.03)


def test_lengths_stay_inside_their_range() -> None:
    assert set(draws(Uniform(1, 3, 5, 5), 500)) == {(1, 5), (2, 5), (3, 5)}
    wide = draws(Lognormal(100, 100, 10, 10, 20, 30, 40, 50), 500)
    assert {pair[0] for pair in wide} >= {20, 30}
    assert {pair[1] for pair in wide} >= {40, 50}
    assert all(20 <= given <= 30 and 40 <= made <= 50 for given, made in wide)
    bounded = Empirical(((10, 1), (20, 3), (9, 9)), total_below=18, input_below=10_000)
    assert set(draws(bounded, 50)) == {(10, 1)}
    assert set(draws(replace(bounded, total_below=None, input_below=10), 50)) == {(9, 9)}


@given(st.integers(0, 2**64), st.floats(0.1, 50), st.floats(0.2, 4))
def test_trace_is_sorted_repeats_and_depends_on_its_seed(seed: int, rate: float, cv: float) -> None:
    mix = Mix(sources=(source("a", arrivals=Gamma(rate, cv)), source("b", lengths=CHAT)), rows=40)
    rows = generate(mix, seed)
    assert len(rows) == 40
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert trace_hash(rows) == trace_hash(generate(mix, seed))
    assert trace_hash(rows) != trace_hash(generate(mix, seed + 1))


def test_sources_do_not_disturb_each_other() -> None:
    def of_a(*others: TenantSource, **changes: Any) -> list[TraceRow]:
        mix = Mix(sources=(*others, source("a", **changes)), duration_s=50)
        return [row for row in generate(mix, 9) if row.tenant == "a"]

    alone = of_a(lengths=CHAT)
    assert of_a(source("b", arrivals=Poisson(30)), source("c"), lengths=CHAT) == alone
    # Nor do one source's settings: other lengths, same arrivals; other bounds, same lengths.
    other = of_a(lengths=REASONING, max_tokens=Headroom(), prefix=SharedPrefix(512, 4))
    assert [row.at for row in other] == [row.at for row in alone]
    plain = of_a(lengths=REASONING)
    assert [row.output_tokens for row in other] == [row.output_tokens for row in plain]


def test_ties_go_by_place_in_the_mix() -> None:
    mix = Mix(sources=(source("b", arrivals=Even(1)), source("a", arrivals=Even(1))), rows=4)
    assert [(row.at, row.tenant) for row in generate(mix, 1)] == [
        (0, "b"),
        (0, "a"),
        (1_000_000_000, "b"),
        (1_000_000_000, "a"),
    ]


def test_source_starts_and_stops_when_told() -> None:
    late = source(arrivals=Even(1), start_s=5, stop_s=8, slo_class="chat", model="m")
    rows = generate(Mix(sources=(late,), duration_s=100), 1)
    assert [row.at / 1e9 for row in rows] == [5, 6, 7]
    assert {(row.slo_class, row.model) for row in rows} == {("chat", "m")}
    assert len(generate(Mix(sources=(late,), duration_s=7), 1)) == 2


@pytest.mark.parametrize(
    ("rule", "made", "low", "high"),
    [(Exact(), 100, 100, 100), (Always(30), 30, 30, 30), (Headroom(2, 3), 100, 200, 300)],
)
def test_declared_bound_follows_its_rule(rule: MaxTokens, made: int, low: int, high: int) -> None:
    mix = Mix(sources=(source(lengths=Fixed(1, 100), max_tokens=rule),), rows=50)
    for row in generate(mix, 1):
        assert row.output_tokens == made
        assert low <= (row.max_tokens or 0) <= high


def test_prefix_groups_share_chunks_within_a_source_only() -> None:
    shared = SharedPrefix(tokens=1_024, groups=3, chunk_tokens=256)
    mix = Mix(sources=(source("a", prefix=shared), source("b", prefix=shared)), rows=200)
    rows = generate(mix, 1)
    mine = {row.prefix for row in rows if row.tenant == "a"}
    theirs = {row.prefix for row in rows if row.tenant == "b"}
    assert (len(mine), len(theirs)) == (3, 3)
    ids = [chunk for prefix in mine | theirs for chunk in prefix]
    assert len(set(ids)) == len(ids) == 6 * 4
    assert {(row.input_tokens, row.prefix_tokens) for row in rows} == {(1_034, 256)}


@pytest.mark.parametrize(
    ("given", "share", "parts", "optional"),
    [
        (1_000, 0.4, 4, (100,) * 4),
        (1_001, 0.4, 4, (100,) * 4),
        (9, 0.4, 4, ()),
        (10, 0.4, 4, (1,) * 4),
    ],
)
def test_a_share_of_each_prompt_is_optional_in_equal_parts(
    given: int, share: float, parts: int, optional: tuple[int, ...]
) -> None:
    marked = source("a", lengths=Fixed(given, 5), optional=OptionalParts(share, parts), lowest=1)
    (row,) = generate(Mix(sources=(marked,), rows=1), 0)
    assert (row.input_tokens, row.optional, row.lowest) == (given, optional, 1)
    plain = source("a", lengths=Fixed(given, 5))
    (other,) = generate(Mix(sources=(plain,), rows=1), 0)
    assert replace(row, optional=(), lowest=3) == other  # nothing else is drawn anew


def test_what_is_shared_is_not_optional() -> None:
    marked = source("a", prefix=SharedPrefix(512, 1), optional=OptionalParts(0.5, 1))
    (row,) = generate(Mix(sources=(marked,), rows=1), 0)
    assert (row.input_tokens, row.optional) == (522, (5,))


def test_runaway_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module, "ROWS_MAX", 10)
    with pytest.raises(ValueError, match="at most 10 rows"):
        generate(Mix(sources=(source(arrivals=Poisson(1e6)),), duration_s=100), 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"sources":[]}', r"length >= 1"),
        ('{"sources":[SRC]}', "expected duration_s, rows or both"),
        ('{"sources":[SRC,SRC],"rows":1}', "two sources .*different names"),
        ('{"sources":[SRC],"rows":1,"row":1}', "unknown field `row`"),
    ],
)
def test_mix_is_refused_with_a_path(text: str, problem: str) -> None:
    one = msgspec.json.encode(source()).decode()
    with pytest.raises(msgspec.ValidationError, match=problem):
        msgspec.json.decode(text.replace("SRC", one), type=Mix)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Ramp((Segment(2, 1), Segment(2, 1))), "rising until_s"),
        (lambda: Uniform(2, 1, 1, 1), "minimum at most"),
        (lambda: Lognormal(1, 1, output_min=9, output_max=8), "minimum at most"),
        (lambda: Quantiles((), ((0, 1), (100, 1))), "from 0 to 100"),
        (lambda: Quantiles(((0, 1), (99, 1)), ((0, 1), (100, 1))), "from 0 to 100"),
        (lambda: Quantiles(((0, 1), (0, 1), (100, 1)), ()), "rising percents"),
        (lambda: Quantiles(((0, 2), (100, 1)), ()), "do not fall"),
        (lambda: Empirical(((5, 5),), total_below=10), "at least one pair"),
        (lambda: Headroom(3, 2), "low at most high"),
        (lambda: SharedPrefix(500), "multiple of 512"),
    ],
    ids=[
        "ramp",
        "uniform",
        "lognormal",
        "no-points",
        "no-end",
        "percents",
        "values",
        "nothing-kept",
        "headroom",
        "partial-chunk",
    ],
)
def test_contradiction_in_settings_is_refused(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


@pytest.mark.parametrize(
    ("lengths", "arrivals"),
    [
        (AZURE_CONV, OnOff(1, 2, 3)),
        (BIMODAL, Ramp((Segment(1, 1),))),
        (Empirical(((1, 2),)), Even(2)),
        (Lognormal(5, 6), Gamma(1, 2)),
    ],
    ids=["quantiles", "blend", "empirical", "lognormal"],
)
def test_mix_survives_a_file(lengths: Lengths, arrivals: Arrivals) -> None:
    mix = Mix(sources=(source(lengths=lengths, arrivals=arrivals, max_tokens=Always(9)),), rows=3)
    assert msgspec.json.decode(msgspec.json.encode(mix), type=Mix) == mix
