"""The engines that others measured take the steps, and give the latencies, that were found with them."""

import csv
import gzip
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from benchmarks.engines import LARGE, SMALL, UNMIXED, Engine, chunked, token_times
from headrace.model.ids import AttemptId, TenantId
from headrace.replica.job import Job
from headrace.units import DurationNs, InstantNs, Tokens, seconds, to_ms

Lengths = tuple[int, int]


def jobs(lengths: Iterable[Lengths], rate: float, rng: Random) -> list[tuple[InstantNs, Job]]:
    """Return jobs of given lengths with Poisson arrivals."""
    at, out = 0.0, []
    for nth, (given, made) in enumerate(lengths):
        at += rng.expovariate(rate)
        arrival = InstantNs(seconds(at))
        out.append((arrival, job(nth, given, made)))
    return out


def job(nth: int, given: int, made: int) -> Job:
    """Return a job of no tenant in particular."""
    return Job(
        attempt=AttemptId(nth),
        prompt_tokens=Tokens(given),
        output_tokens=Tokens(made),
        gap_bound_ns=DurationNs(0),
        tenant=TenantId("t"),
        deadline=InstantNs(0),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of all lie below."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


class Row:
    """What was seen of a run, in ms."""

    def __init__(self, engine: Engine, offered: list[tuple[InstantNs, Job]]) -> None:
        times = token_times(engine, offered)
        waits = [to_ms(mine[0] - at) for mine, (at, _) in zip(times, offered, strict=True)]
        gaps = [to_ms(then - now) for mine in times for now, then in pairwise(mine)]
        self.gap_p99, self.stall = percentile(gaps, 0.99), max(gaps)
        self.ttft_p50, self.ttft_p99 = percentile(waits, 0.5), percentile(waits, 0.99)


@pytest.mark.parametrize(
    ("decodes", "context", "prompt", "expected"),
    [
        (0, 0, 512, 3.5 + 29.66 + 1.55e-6 * 512**2),
        (32, 40_000, 0, 3.5 + 9.79 + 0.6 + 8.1e-5 * 40_000 + 0.0053 * 32),
        (56, 90_000, 200, 3.5 + 16.97 + 0.6 + 8.1e-5 * 90_000 + 0.0053 * 56 + 1.55e-6 * 200**2),
    ],
)
def test_large_engine_takes_steps_as_measured(
    decodes: int, context: int, prompt: int, expected: float
) -> None:
    step = LARGE.profile.step_ps(decodes, context, prompt, prompt**2)
    assert step / 1e9 == pytest.approx(expected, rel=1e-3)


def test_small_engine_takes_steps_as_measured() -> None:
    assert SMALL.profile.step_ps(0, 0, 1_666, 1_666**2) / 1e9 == pytest.approx(1.0 + 0.214 * 1_666)
    step = SMALL.profile.step_ps(10, 4_000, 0, 0)
    assert step / 1e9 == pytest.approx(15.29 + 2.542 + 8.64)


def test_small_engine_lets_its_prompts_in_together_and_reserves_their_peak() -> None:
    offered = [(InstantNs(nth), job(nth, 256, 256)) for nth in range(40)]
    times = token_times(SMALL, offered)
    first = [mine[0] for mine in times]
    # One that found it idle; then six prompts of 256 every ten steps, up to the pool's peak.
    batches = [first.count(at) for at in sorted(set(first))]
    assert batches[:4] == [1, 6, 6, 6]
    assert max(batches) == 6
    # Held to the end at once, 19 would fill the pool; but they end one after the other.
    end = min(mine[-1] for mine in times)
    assert sum(at <= end for at in first) == 20 > 10_000 // (256 + 256)


def test_chunks_trade_first_tokens_for_steady_ones() -> None:
    rng = Random(5)
    lengths = [(rng.randint(500, 6_000), rng.randint(20, 300)) for _ in range(150)]
    offered = jobs(lengths, 1.2, rng)
    whole, strict, loose = (Row(one, offered) for one in (UNMIXED, chunked(512), chunked(2_048)))
    assert whole.gap_p99 > loose.gap_p99 > strict.gap_p99
    assert whole.stall > 3 * loose.stall > 6 * strict.stall
    assert whole.ttft_p50 < loose.ttft_p50 < strict.ttft_p50


@pytest.mark.data
def test_chunks_on_summaries_of_papers_give_the_latencies_found_before(data_dir: Path) -> None:
    rng = Random(0)
    with gzip.open(data_dir / "traces/arxiv_summarization_lengths.csv.gz", "rt") as file:
        rows = [
            (int(row["input_length"]), int(row["output_length"])) for row in csv.DictReader(file)
        ]
    short = [one for one in rows if sum(one) < 16_000 and min(one) > 0]
    offered = jobs([rng.choice(short) for _ in range(600)], 1.2, Random(7))
    for engine, expected in (
        (UNMIXED, (173, 1_316, 180, 550)),
        (chunked(512), (40, 43, 240, 760)),
        (chunked(2_048), (119, 132, 200, 600)),
    ):
        row = Row(engine, offered)
        found = (row.gap_p99, row.stall, row.ttft_p50, row.ttft_p99)
        assert found == pytest.approx(expected, rel=0.1), engine.batching
