"""Worked examples of the objectives: each test is named after its id and says its sentence."""

import pytest
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.slo import (
    Indicator,
    Objective,
    Outcome,
    Per,
    Slo,
    gaps_within,
    misses,
)
from headrace.report.beside import NOT_COMPARABLE, side_by_side
from headrace.report.compare import NotComparable, Verdict, compare
from headrace.report.littles_law import little
from headrace.report.objectives import ObjectiveVerdict
from headrace.report.summary import summarise
from headrace.report.tables import render, render_comparison
from headrace.units import ms, to_ms
from tests.report.making import BOUNDS, Pair, lost, refused, run, served

TTFT = Objective(indicator=Indicator.TTFT, threshold_ms=2_000)
GAPS = Objective(indicator=Indicator.GAP, threshold_ms=80, per=Per.GAP)
SLOS = (Slo(name="interactive", objectives=(TTFT, GAPS)),)


def test_ex_1_ttft_p99_of_1_8_s_meets_99_percent_within_2_s() -> None:
    pairs = [served(i, prefill_ms=1_790) for i in range(99)] + [served(99, prefill_ms=5_000)]
    summary = summarise(run(pairs, slos=SLOS))
    assert summary.total.latency.ttft is not None
    assert summary.total.latency.ttft.p99_ns == ms(1_800)
    assert summary.objectives[0].verdict is ObjectiveVerdict.HOLDS


@pytest.mark.parametrize(
    ("over", "verdict"), [(10, ObjectiveVerdict.HOLDS), (11, ObjectiveVerdict.MISSED)]
)
def test_ex_1_of_1_000_gaps_11_over_80_ms_fail_though_every_mean_is_40_ms(
    over: int, verdict: ObjectiveVerdict
) -> None:
    even = [40.0] * 100
    uneven = [40.0] * (100 - 2 * over) + [81.0] * over
    uneven += [(sum(even) - sum(uneven)) / over] * over
    pairs = [served(i, gaps_ms=even) for i in range(9)] + [served(9, gaps_ms=uneven)]
    summary = summarise(run(pairs, slos=SLOS))
    assert summary.total.latency.tpot is not None
    assert to_ms(summary.total.latency.tpot.max_ns) == pytest.approx(40)
    pooled = summary.objectives[1]
    assert (pooled.over_admitted.met, pooled.over_admitted.counted) == (1_000 - over, 1_000)
    assert pooled.verdict is verdict


def test_ex_1_only_disconnects_before_admission_are_excluded() -> None:
    pairs = [served(0), refused(1, reason=None)]
    pairs += [lost(2, outcome=Outcome.CLIENT_CANCEL, reason=None)]
    pairs += [served(3, outcome=Outcome.CLIENT_CANCEL), refused(4)]
    told = summarise(run(pairs, slos=SLOS)).objectives[0]
    assert told.excluded == 1
    assert (told.over_admitted.met, told.over_admitted.counted) == (1, 3)
    assert told.over_offered is not None
    assert (told.over_offered.met, told.over_offered.counted) == (1, 4)

    nothing_excluded = replace(SLOS[0], exclusions=())
    told = summarise(run(pairs, slos=(nothing_excluded,))).objectives[0]
    assert told.excluded == 0
    assert told.over_offered is not None
    assert told.over_offered.counted == 5


def test_ex_2_one_stall_of_3_s_in_500_gaps_of_20_ms_passes_tpot_and_fails_max_stall() -> None:
    bounds = replace(BOUNDS, stall_ns=ms(1_000))
    _, row = served(0, gaps_ms=[20] * 250 + [3_000] + [20] * 249, bounds=bounds)
    seen, timing = row.indicators, row.timing
    assert seen is not None
    assert timing is not None
    tpot = seen.tpot_ns()
    assert tpot is not None
    assert to_ms(round(tpot)) == pytest.approx(26, abs=0.05)
    assert misses(seen, bounds) == (Indicator.MAX_STALL,)
    assert seen.max_stall_ns == ms(3_000)
    assert gaps_within(timing, ms(80)) == 499
    assert seen.route_ns + seen.queue_ns + seen.prefill_ns + seen.first_decode_ns == seen.ttft_ns
    assert seen.ttft_ns + seen.gaps_ns + seen.postprocess_ns == seen.e2e_ns


def test_ex_3_goodput_and_attainment_are_both_printed_and_never_one_for_the_other() -> None:
    light = summarise(run([served(i) for i in range(100)], label="10 rps", trace_hash="aa"))
    late = [served(i, prefill_ms=3_000) for i in range(800, 1_000)]
    heavy = summarise(run([served(i) for i in range(800)] + late, label="100 rps", trace_hash="bb"))
    assert (light.total.request_goodput, light.total.attained_admitted) == (10, 1.0)
    assert (heavy.total.request_goodput, heavy.total.attained_admitted) == (80, 0.8)
    with pytest.raises(NotComparable, match="different offered requests"):
        compare(light, heavy)
    text = render(side_by_side([light, heavy]))
    assert NOT_COMPARABLE in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "request goodput, requests/s 10.0 80.0" in lines
    assert "attainment over admitted 100.0 % 80.0 %" in lines


def test_ex_3_compare_prints_both_for_one_trace() -> None:
    pairs = [served(i) for i in range(10)]
    text = render_comparison(compare(run(pairs), run(pairs, label="other")))
    assert "attainment over admitted" in text
    assert "attainment over offered" in text
    assert "request goodput" in text
    assert "work goodput" in text


def test_ex_5_twenty_inside_at_ten_a_second_take_two_seconds() -> None:
    assert little(20, 10) == 2


def test_ex_5_the_law_holds_in_the_records_means() -> None:
    # One request every 100 ms, each 2 s inside: L = lambda * W holds over the whole run.
    gaps = [100.0] * 18
    pairs = [
        served(i, at_s=i / 10, queue_ms=50, prefill_ms=149, gaps_ms=gaps) for i in range(2_000)
    ]
    system, queue = summarise(run(pairs, span_s=199.9)).little
    assert system.mean_time_s == 2
    assert system.mean_inside == pytest.approx(20, rel=0.01)
    assert system.rate == pytest.approx(10, rel=0.01)
    assert queue.mean_time_s == 0.05


def picky_and_honest() -> tuple[list[Pair], list[Pair]]:
    picky = [served(i) if i < 100 else refused(i) for i in range(1_000)]
    honest = [served(i) if i < 700 else lost(i) for i in range(1_000)]
    return [(replace(o, output_tokens=4), row) for o, row in picky], [
        (replace(o, output_tokens=4), row) for o, row in honest
    ]


def test_ex_13_a_policy_that_rejects_90_percent_attains_all_and_is_worse() -> None:
    picky, honest = picky_and_honest()
    base, other = summarise(run(honest)), summarise(run(picky, label="picky"))
    assert other.total.attained_admitted == 1.0
    assert base.total.attained_admitted == 0.7
    assert base.total.work_attained is not None
    assert other.total.work_attained is not None
    assert other.total.work_attained < base.total.work_attained
    assert other.total.rejected_by == {Reason.DEADLINE_QUEUE: 900}
    found = compare(base, other)
    assert found.verdict is Verdict.WORSE
    assert "picky is worse than tenant_first" in render_comparison(found)
