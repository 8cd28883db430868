"""What does sizing each step from the cost model win over fixed chunks and over whole prompts?

One A100 8B engine and requests of arXiv lengths (recipe B3), the same for every policy. Where gaps
are alike, prompts come sooner; where prompts come too late, steps take the time that gaps have left;
and no step with a prompt breaks a bound, however long the prompt. `tokens_*` hold further parts.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import tokens_preempt
from benchmarks.harness import CLAIM_SEEDS, Claim, Result, at_least, at_most, interval95
from benchmarks.scenes import one_class, poisson
from benchmarks.served import Served, serve
from headrace.config.profiles import load_profile
from headrace.model.ids import AttemptId, Incarnation, ReplicaName, TenantId
from headrace.policy.batching import (
    Batching,
    ChunkedPrefill,
    DecodeFirst,
    DynamicChunk,
    PacedPrefill,
    PrefillFirst,
)
from headrace.replica.core import Replica
from headrace.replica.job import Job
from headrace.replica.seen import seen
from headrace.sim.scenario import rows_of
from headrace.trace.builtin import ARXIV
from headrace.trace.mix import Blend, Empirical, Fixed, Lengths, Part, Quantiles
from headrace.trace.row import TraceRow
from headrace.trace.tables import read_lengths
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, InstantNs, Tokens

TUNING_SEEDS = (0, 1, 2, 3, 4)
GAP_NS = DurationNs(80 * NS_PER_MS)
CALM = (1.2, 2_000 * NS_PER_MS)
PRESSED = (3.2, 1_000 * NS_PER_MS)
"""Rate (req/s) and first-token bound. Pressed: where the best fixed budget keeps some 95 %."""
DURATION_S = 500.0
BUDGETS = (512, 640, 800, 896, 1_024)
"""Fixed budgets among which the best is known in hindsight only."""
CHUNK = ChunkedPrefill(token_budget=512)
Part_ = tuple[list[Claim], dict[str, Any]]
"""What a part of this benchmark claims, and what explains it."""


def run(quick: bool) -> Result:
    """Measure every part."""
    seeds = CLAIM_SEEDS[:2] if quick else CLAIM_SEEDS
    parts: dict[str, Callable[[Sequence[int]], Part_]] = {
        "decision": decision,
        "calm": calm,
        "pressed": pressed,
        "long prompts": long_prompts,
    }
    found = {name: part(seeds) for name, part in parts.items()}
    found["preemption"] = tokens_preempt.measure(quick)
    return Result(
        name="tokens",
        seeds=list(seeds),
        claims=[claim for claims, _ in found.values() for claim in claims],
        detail={name: detail for name, (_, detail) in found.items()},
    )


# What a decision costs ------------------------------------------------------------------------------


def decision(_seeds: Sequence[int]) -> Part_:
    """Time one decision, with the view it is made by, at 256 running and 1,000 waiting requests.

    All of it has to be looked at: a relegated prompt is in front, and those behind are in a hurry.
    """
    replica = Replica(ReplicaName("r"), Incarnation(1), load_profile("a100-8b-tp1"), PacedPrefill())
    for nth in range(1_256):
        last = nth == 255  # to get a slot
        replica.submit(
            Job(
                attempt=AttemptId(nth),
                prompt_tokens=Tokens(100_000 if last else 60 if nth < 255 else 400),
                output_tokens=Tokens(1_000),
                gap_bound_ns=GAP_NS,
                tenant=TenantId("t"),
                deadline=InstantNs(NS_PER_S),
                relegated=last,
            ),
            InstantNs(NS_PER_S * (0 if nth < 255 else 3 if last else 4)),
        )
    replica.advance(InstantNs(5 * NS_PER_S))
    policy = PacedPrefill()
    batch, now = replica._batch, replica._boundary()  # noqa: SLF001 - what the engine shows of itself
    view = seen(batch, replica.profile, now)
    assert (view.decodes, view.prefills, view.waiting) == (255, 1, 1_000)
    assert policy.knobs(view).chunk_limit is not None
    micros = []
    for _nth in range(2_000):
        began = time.process_time_ns()
        policy.knobs(seen(batch, replica.profile, now))
        micros.append((time.process_time_ns() - began) / 1_000)
    p50 = statistics.median(micros)
    claims = [at_most("CPU us of one decision, p50, 256 running, 1,000 waiting", p50, 150)]
    return claims, {"p50_us": p50, "p99_us": percentile(micros, 99)}


# What it wins ---------------------------------------------------------------------------------------


def calm(seeds: Sequence[int]) -> Part_:
    """Compare at a moderate load: gaps, first tokens and stalls."""
    trace = traces(CALM[0], arxiv())
    tuned = [one(CHUNK, trace, seed) for seed in TUNING_SEEDS[: len(seeds)]]
    pace = percentile([gap for run in tuned for gap in run.every_gap()], 99) / NS_PER_MS
    policies: dict[str, Batching] = {
        "paced": PacedPrefill(step_ms=pace),
        "chunk 512": CHUNK,
        "prefill first": PrefillFirst(),
        "paced, as it ships": PacedPrefill(),
        "chunk 2048": ChunkedPrefill(token_budget=2_048),
        "dynamic chunk": DynamicChunk(),
        "decode first": DecodeFirst(),
    }
    runs = {name: [one(policy, trace, seed) for seed in seeds] for name, policy in policies.items()}
    gap, wait, mean, stall = (
        ratios(runs, "chunk 512", figure) for figure in (gap_p99, ttft_p99, ttft, longest)
    )
    claims = [
        at_most("gap p99 over that of a fixed chunk of 512", gap["mean"], 1.03),
        at_most("TTFT p99 over its", wait["mean"], 1.0),
        at_most("mean TTFT over its", mean["mean"], 1.0),
        at_most("longest gap over its", stall["mean"], 1.0),
        at_most("gap p99 over whole prompts'", ratios(runs, "prefill first", gap_p99)["mean"], 0.3),
        at_most("longest gap over theirs", ratios(runs, "prefill first", longest)["mean"], 0.1),
        bound_holds("calm", runs["paced, as it ships"]),
    ]
    detail = {
        "requests_per_s": CALM[0],
        "longest_step_ms": pace,
        "over_chunk_512": {"gap_p99": gap, "ttft_p99": wait, "ttft_mean": mean, "stall": stall},
        "ttft_mean_over_prefill_first": ratios(runs, "prefill first", ttft),
        "policies": {name: table(each) for name, each in runs.items()},
    }
    return claims, detail


def pressed(seeds: Sequence[int]) -> Part_:
    """Compare where first tokens are about to come too late."""
    rate, ttft_ns = PRESSED
    trace = traces(rate, arxiv())
    fixed = {f"chunk {tokens}": ChunkedPrefill(token_budget=tokens) for tokens in BUDGETS}
    policies: dict[str, Batching] = {
        "paced": PacedPrefill(),
        "prefill first": PrefillFirst(),
        "dynamic chunk": DynamicChunk(),
        **fixed,
    }
    runs = {
        name: [one(policy, trace, seed, ttft_ns) for seed in seeds]
        for name, policy in policies.items()
    }
    best = max(fixed, key=lambda name: statistics.fmean(run.met_work() for run in runs[name]))
    pairs = {
        name: [
            mine.met_work() - its.met_work()
            for mine, its in zip(runs["paced"], runs[name], strict=True)
        ]
        for name in (best, "chunk 512")
    }
    claims = [
        at_least(
            "met work less that of a chunk of 512, of offered",
            statistics.fmean(pairs["chunk 512"]),
            0.08,
        ),
        at_least(
            "met work less that of the fixed budget that is best in hindsight",
            statistics.fmean(pairs[best]),
            0.0,
        ),
        bound_holds("pressed", runs["paced"]),
    ]
    detail = {
        "requests_per_s": rate,
        "ttft_ms": ttft_ns / NS_PER_MS,
        "best_fixed": best,
        "met_work_won": {name: interval95(won)._asdict() for name, won in pairs.items()},
        "policies": {name: table(each) for name, each in runs.items()},
    }
    return claims, detail


def long_prompts(seeds: Sequence[int]) -> Part_:
    """Compare where every fiftieth prompt is a book, each of whose tokens is dear."""
    book = Part(weight=1, lengths=Fixed(input=64_000, output=300))
    trace = traces(CALM[0], Blend(parts=(Part(weight=49, lengths=arxiv()), book)))
    policies: dict[str, Batching] = {
        "paced": PacedPrefill(),
        "chunk 512": CHUNK,
        "prefill first": PrefillFirst(),
    }
    runs = {name: [one(policy, trace, seed) for seed in seeds] for name, policy in policies.items()}
    claims = [bound_holds("prompts of 64,000 tokens", runs["paced"])]
    return claims, {"policies": {name: table(each) for name, each in runs.items()}}


_Number = TypeVar("_Number", int, float)
Traces = Callable[[int], list[TraceRow]]
Figure = Callable[[Served], float]


def traces(rate: float, lengths: Lengths) -> Traces:
    """Return what is offered at each seed."""
    scene = poisson(one_class("a100-8b-tp1", 1), rate, DURATION_S, lengths)
    return lambda seed: rows_of(scene, seed)


def arxiv() -> Quantiles | Empirical:
    """Return the real lengths where HEADRACE_DATA names the folder of public traces, or their like."""
    data = os.environ.get("HEADRACE_DATA")
    if data is None:
        return ARXIV
    pairs = read_lengths(Path(data) / "traces" / "arxiv_summarization_lengths.csv.gz")
    return Empirical(tuple(pairs), total_below=16_000)


def one(policy: Batching, trace: Traces, seed: int, ttft_ns: int = CALM[1]) -> Served:
    """Run one seed under one policy."""
    return serve(policy, trace(seed), ttft_ns=DurationNs(ttft_ns), gap_ns=GAP_NS)


def bound_holds(where: str, runs: Sequence[Served]) -> Claim:
    """Claim that no step of any seed is longer than the bound less the margin that is kept."""
    worst = max(longest(run) for run in runs)
    margin = PacedPrefill().margin_percent
    return at_most(f"longest gap, ms, {where}", worst, GAP_NS / NS_PER_MS * (1 - margin / 100))


def gap_p99(run: Served) -> float:
    """Return the 99th percentile of all gaps, in ms."""
    return percentile(run.every_gap(), 99) / NS_PER_MS


def ttft_p99(run: Served) -> float:
    """Return the 99th percentile of TTFT, in ms."""
    return percentile(run.waits, 99) / NS_PER_MS


def ttft(run: Served) -> float:
    """Return the mean TTFT, in ms."""
    return statistics.fmean(run.waits) / NS_PER_MS


def longest(run: Served) -> float:
    """Return the longest gap of all, in ms."""
    return max(run.every_gap()) / NS_PER_MS


def ratios(runs: dict[str, list[Served]], its: str, figure: Figure) -> dict[str, float]:
    """Return a figure of the paced over that of another policy, seed by seed, with its interval."""
    pairs = zip(runs["paced"], runs[its], strict=True)
    return interval95([figure(mine) / figure(other) for mine, other in pairs])._asdict()


def table(runs: list[Served]) -> dict[str, Any]:
    """Return what a policy came to, with its denominators; intervals over seeds."""
    figures: dict[str, Figure] = {
        "ttft_mean_ms": ttft,
        "ttft_p99_ms": ttft_p99,
        "gap_mean_ms": lambda run: statistics.fmean(run.every_gap()) / NS_PER_MS,
        "gap_p99_ms": gap_p99,
        "gap_max_ms": longest,
        "met_requests_over_offered": Served.met_requests,
        "met_work_over_offered": Served.met_work,
        "steps_over_bound": lambda run: float(run.over()),
    }
    return {
        "offered": [len(run.rows) for run in runs],
        "input_tokens": [sum(row.input_tokens for row in run.rows) for run in runs],
        "output_tokens": [sum(row.output_tokens for row in run.rows) for run in runs],
        **{name: interval95([of(run) for run in runs])._asdict() for name, of in figures.items()},
    }


def percentile(values: Sequence[_Number], percent: int) -> _Number:
    """Return the value that so many percent do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[-(-len(ranked) * percent // 100) - 1]
