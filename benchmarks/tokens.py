"""What does sizing each step from the cost model win over fixed chunks and over whole prompts?

One A100 8B engine and requests of arXiv lengths (recipe B3), the same for every policy. Where gaps
are alike, prompts come sooner; where prompts come too late, steps take the time that gaps have left;
and no step with a prompt breaks a bound, however long the prompt. `tokens_*` hold further parts.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from benchmarks.harness import CLAIM_SEEDS, Claim, Result, at_least, at_most, interval95
from benchmarks.scenes import one_class, poisson
from benchmarks.served import Served, serve
from headrace.config.profiles import load_profile
from headrace.model.ids import AttemptId, Incarnation, ReplicaName, TenantId
from headrace.policy.batching import (
    ChunkedPrefill,
    DecodeFirst,
    DynamicChunk,
    PacedPrefill,
    PrefillFirst,
)
from headrace.policy.batching.knobs import BatchingPolicy
from headrace.replica.core import Replica
from headrace.replica.job import Job
from headrace.sim.scenario import rows_of
from headrace.trace.builtin import ARXIV
from headrace.trace.mix import Blend, Fixed, Lengths, Part
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, InstantNs, Tokens, to_ms

TUNING_SEEDS = (0, 1, 2, 3, 4)
PROFILE = load_profile("a100-8b-tp1")
GAP_NS = DurationNs(80 * NS_PER_MS)
CALM = (1.2, 2_000 * NS_PER_MS)
PRESSED = (3.6, 1_000 * NS_PER_MS)
"""Rate (req/s) and first-token bound. Pressed: where a fixed chunk of 512 keeps some 90 %."""
DURATION_S = 500.0
LONG = Blend(
    parts=(Part(weight=49, lengths=ARXIV), Part(weight=1, lengths=Fixed(input=64_000, output=300)))
)
"""Every fiftieth prompt is a book."""
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
    replica = Replica(ReplicaName("r"), Incarnation(1), PROFILE, PacedPrefill())
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
    seen = replica._view()  # noqa: SLF001 - what the engine makes for each decision
    assert (seen.decodes, seen.prefills, seen.waiting) == (255, 1, 1_000)
    assert policy.knobs(seen).chunk_limit is not None
    micros = []
    for _nth in range(2_000):
        began = time.process_time_ns()
        policy.knobs(replica._view())  # noqa: SLF001
        micros.append((time.process_time_ns() - began) / 1_000)
    p50 = statistics.median(micros)
    claims = [at_most("CPU us of one decision, p50, 256 running, 1,000 waiting", p50, 150)]
    return claims, {"p50_us": p50, "p99_us": percentile(micros, 99)}


# What it wins ---------------------------------------------------------------------------------------


def calm(seeds: Sequence[int]) -> Part_:
    """Compare at a moderate load: gaps, first tokens and stalls."""
    trace = traces(CALM[0], ARXIV)
    steps = [step for seed in TUNING_SEEDS[: len(seeds)] for step in one(CHUNK, trace, seed).steps]
    pace = to_ms(DurationNs(percentile(steps, 99)))
    policies: dict[str, BatchingPolicy] = {
        "paced": PacedPrefill(step_ms=pace),
        "chunk 512": CHUNK,
        "chunk 2048": ChunkedPrefill(token_budget=2_048),
        "prefill first": PrefillFirst(),
        "dynamic chunk": DynamicChunk(),
        "paced, as it ships": PacedPrefill(),
    }
    runs = {name: [one(policy, trace, seed) for seed in seeds] for name, policy in policies.items()}
    if len(seeds) > 2:
        runs["decode first"] = [one(DecodeFirst(), trace, seed) for seed in seeds]
    gap, wait, mean, stall = (
        ratios(runs, "paced", "chunk 512", figure) for figure in (gap_p99, ttft_p99, ttft, longest)
    )
    whole = ratios(runs, "paced", "prefill first", gap_p99)
    whole_stall = ratios(runs, "paced", "prefill first", longest)
    claims = [
        at_most("gap p99 over that of a fixed chunk of 512", gap["mean"], 1.03),
        at_most("TTFT p99 over its", wait["mean"], 1.0),
        at_most("mean TTFT over its, upper end of the interval", mean["high"], 1.0),
        at_most("longest gap over its", stall["mean"], 1.0),
        at_most("gap p99 over that of whole prompts first", whole["mean"], 0.35),
        at_most("longest gap over its (whole prompts)", whole_stall["mean"], 0.1),
        at_most("steps over the ITL bound", late(runs, "paced"), 0),
    ]
    detail = {
        "requests_per_s": CALM[0],
        "longest_step_ms": pace,
        "over_chunk_512": {"gap_p99": gap, "ttft_p99": wait, "ttft_mean": mean, "stall": stall},
        "ttft_mean_over_prefill_first": ratios(runs, "paced", "prefill first", ttft),
        "policies": {name: table(each) for name, each in runs.items()},
    }
    return claims, detail


def pressed(seeds: Sequence[int]) -> Part_:
    """Compare where first tokens are about to come too late."""
    rate, ttft_ns = PRESSED
    trace = traces(rate, ARXIV)
    policies: dict[str, BatchingPolicy] = {
        "paced": PacedPrefill(),
        "chunk 512": CHUNK,
        "chunk 1024": ChunkedPrefill(token_budget=1_024),
        "chunk 2048": ChunkedPrefill(token_budget=2_048),
        "prefill first": PrefillFirst(),
        "dynamic chunk": DynamicChunk(),
    }
    runs = {
        name: [one(policy, trace, seed, ttft_ns) for seed in seeds]
        for name, policy in policies.items()
    }
    won = [
        ours.met_work() - its.met_work()
        for ours, its in zip(runs["paced"], runs["chunk 512"], strict=True)
    ]
    claims = [
        at_least("met work over a fixed chunk's of 512, of offered", statistics.fmean(won), 0.03),
        at_most("steps over the ITL bound under pressure", late(runs, "paced"), 0),
    ]
    detail = {
        "requests_per_s": rate,
        "ttft_ms": to_ms(DurationNs(ttft_ns)),
        "met_work_won": interval95(won)._asdict(),
        "policies": {name: table(each) for name, each in runs.items()},
    }
    return claims, detail


def long_prompts(seeds: Sequence[int]) -> Part_:
    """Compare where a few prompts are so long that each of their tokens is dear."""
    trace = traces(CALM[0], LONG)
    policies: dict[str, BatchingPolicy] = {
        "paced": PacedPrefill(),
        "chunk 512": CHUNK,
        "prefill first": PrefillFirst(),
    }
    runs = {name: [one(policy, trace, seed) for seed in seeds] for name, policy in policies.items()}
    claims = [
        at_most("steps over the ITL bound with prompts of 64,000 tokens", late(runs, "paced"), 0)
    ]
    return claims, {"policies": {name: table(each) for name, each in runs.items()}}


_Number = TypeVar("_Number", int, float)
Traces = Callable[[int], list[TraceRow]]
Figure = Callable[[Served], float]


def traces(rate: float, lengths: Lengths) -> Traces:
    """Return what is offered at each seed."""
    scene = poisson(one_class("a100-8b-tp1", 1), rate, DURATION_S, lengths)
    return lambda seed: rows_of(scene, seed)


def one(policy: BatchingPolicy, trace: Traces, seed: int, ttft_ns: int = CALM[1]) -> Served:
    """Run one seed under one policy."""
    rows = trace(seed)
    return serve(PROFILE, policy, rows, ttft_ns=DurationNs(ttft_ns), gap_ns=GAP_NS, seed=seed)


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


def late(runs: dict[str, list[Served]], name: str) -> int:
    """Return the steps of a policy that computed prompts and broke a bound, all seeds together."""
    return sum(run.late_steps for run in runs[name])


def ratios(runs: dict[str, list[Served]], ours: str, its: str, figure: Figure) -> dict[str, float]:
    """Return a figure under one policy over that under another, seed by seed, with its interval."""
    pairs = zip(runs[ours], runs[its], strict=True)
    return interval95([figure(mine) / figure(other) for mine, other in pairs])._asdict()


def table(runs: list[Served]) -> dict[str, Any]:
    """Return what a policy came to, with its denominators; intervals over seeds."""
    figures: dict[str, Figure] = {
        "ttft_mean_ms": ttft,
        "ttft_p99_ms": ttft_p99,
        "gap_mean_ms": lambda run: statistics.fmean(run.every_gap()) / NS_PER_MS,
        "gap_p99_ms": gap_p99,
        "gap_max_ms": longest,
        "met_requests_over_offered": Served.attainment,
        "met_work_over_offered": Served.met_work,
        "steps_over_bound": lambda run: float(run.late_steps),
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
