"""What the benchmark before a real vLLM makes of measured figures; vLLM itself is not needed here."""

import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import vllm as benchmark
from benchmarks.vllm import plan
from benchmarks.vllm.alone import Alone, holding, line, profile
from benchmarks.vllm.behind import Mode, Run, config, counted
from headrace.config.resolve import resolved
from headrace.load.caller import Answer, Failure
from headrace.load.judge import Terms
from headrace.load.replay import Replay
from headrace.model.ids import ClassName, TenantId
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.slo import Bounds
from headrace.units import InstantNs, Tokens, ms

TTFT = {32: 60.0, 64: 92.0, 112: 140.0, 192: 220.0}
TPOT = {1: 22.0, 8: 36.0, 16: 52.0, 32: 84.0}


def test_step_times_are_fitted_exactly_where_they_are_lines() -> None:
    found = profile(TTFT, TPOT, 66.0)
    assert found.mixed is not None
    assert found.decode is not None
    assert (found.mixed.a_ms, found.mixed.b_ms) == pytest.approx((28, 1))
    assert (found.decode.a_ms, found.decode.c_ms) == pytest.approx((20, 2))
    assert found.max_running == found.reference_batch == 8, "46 / (2 + 112 / 32)"


@pytest.mark.parametrize(("bound", "streams"), [(1.0, 1), (26.0, 1), (31.1, 2), (1e6, plan.SLOTS)])
def test_streams_at_once_are_at_least_one_and_at_most_the_slots(bound: float, streams: int) -> None:
    assert holding(20, 1, 2, bound) == streams


def test_a_falling_line_is_flat_and_a_step_takes_time() -> None:
    assert line([1, 2], [5, 3]) == (7, 1e-3)
    assert line([1, 2], [1, 5])[0] == 1e-3


def test_a_trace_is_its_seeds_and_keeps_its_rate() -> None:
    rows = plan.trace(20.0, 100.0, seed=1)
    assert rows == plan.trace(20.0, 100.0, seed=1) != plan.trace(20.0, 100.0, seed=2)
    assert abs(len(rows) - 2_000) < 200
    assert all(plan.PROMPTS[0] <= row.input_tokens <= plan.PROMPTS[1] for row in rows)


def answer(**fields: object) -> Answer:
    """Return an answer that began at once, and was whole after 31 tokens of 10 ms."""
    timing = StreamTiming(
        tokens=Tokens(31),
        first_at=InstantNs(ms(100)),
        last_at=InstantNs(ms(400)),
        max_gap_ns=ms(10),
        gaps_over=0,
        gap_counts=(),
    )
    base: dict[str, object] = {"status": 200, "timing": timing, "complete": True}
    base |= {"sent_at": InstantNs(0), "ended_at": InstantNs(ms(400))}
    return Answer(**(base | fields))  # type: ignore[arg-type]


def test_every_row_is_counted_once_by_what_became_of_it() -> None:
    rows = [replace(plan.row(0, 64, 31), tenant=TenantId("bench")) for _ in range(4)]
    bounds = Bounds(ttft_ns=ms(200), gap_ns=ms(50), tpot_ns=ms(10))
    terms = Terms(slo_class=ClassName("c"), bounds=bounds, profile=profile(TTFT, TPOT, 66.0))
    told = Replay(rows, lambda _: terms, "small")
    told.answered(0, answer())
    told.answered(1, answer(sent_at=InstantNs(-ms(150))))
    told.answered(2, answer(status=503, reason="deadline_queue", timing=NO_STREAM, complete=False))
    told.answered(3, answer(status=0, failure=Failure.TIMEOUT, timing=NO_STREAM, complete=False))
    run = counted(told, 7, 2.0, Mode.OURS)
    assert (run.offered, run.admitted, run.left, run.finished, run.met) == (4, 3, 1, 2, 1)
    assert run.refused == {"deadline_queue": 1}
    assert run.met_per_s == 0.5


def run_of(seed: int, met: int, mode: Mode) -> Run:
    return Run(
        mode=mode,
        seed=seed,
        span_s=10.0,
        offered=100,
        refused={},
        admitted=50,
        left=0,
        finished=50,
        met=met,
        met_per_s=met / 10.0,
        ttft_p50_ms=1.0,
    )


def test_traces_are_compared_with_themselves_and_none_met_counts_as_one() -> None:
    pairs = {1: (40, 10), 2: (30, 0), 3: (40, 20)}
    runs = [run_of(seed, met, Mode.OURS) for seed, (met, _) in pairs.items()]
    runs += [run_of(seed, met, Mode.OPEN) for seed, (_, met) in pairs.items()]
    claims = benchmark.claims(runs, 2.0)
    assert [claim.value for claim in claims] == pytest.approx([4, 2, 110 / 150])


def test_the_gateways_configuration_is_one() -> None:
    alone = Alone(
        ttft_ms=TTFT,
        tpot_ms=TPOT,
        ttft_bound_ms=700,
        tpot_bound_ms=66,
        capacity_rps=4,
        profile=profile(TTFT, TPOT, 66.0),
    )
    found = resolved(json.dumps(config("http://127.0.0.1:1", alone)), "made", Path(), {}, {})
    assert not found.warnings
    assert math.isclose(found.settings.deployment.classes[0].tpot_ms or 0, 66)


def test_without_an_environment_it_is_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HEADRACE_VLLM", raising=False)
    monkeypatch.setattr(benchmark, "_BUILT", tmp_path)
    result = benchmark.run(quick=True)
    assert result.claims == []
    assert "absent" in result.detail
