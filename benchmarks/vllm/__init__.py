"""Is a real vLLM, offered three times what it can do, worth more behind admission than without?

vLLM on this machine's CPU with random weights in SmolLM2-135M's layers, this gateway as a process of its
own, open-loop callers. First vLLM alone is measured: unloaded medians, which set the bounds (first token
5 times, time per token 3 times its own), step times, of which the gateway's hardware profile is made, and
its throughput with every slot busy, which is taken for its capacity. Then the same trace is offered with
admission and with `--observe`, which lets all pass, in turns; nothing vLLM is told differs. Last, for
information, all pass to a vLLM whose own bound (`--max-num-queued-reqs`) is as many as the gateway sends.

Absent without vLLM's environment: HEADRACE_VLLM, or build/vllm as `make build/vllm/.stamp` makes it.
"""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.gateway.processes import ended_in_order
from benchmarks.harness import Claim, Result, at_least
from benchmarks.vllm.alone import Alone, measured
from benchmarks.vllm.behind import Mode, Run, offered
from benchmarks.vllm.plan import OVERLOAD, SERVER_FLAGS, SIZE, SLOTS
from tests.services import vllm

REPEATS, QUICK_REPEATS = 3, 1
_BUILT = Path(__file__).parents[2] / "build" / "vllm"


def run(quick: bool) -> Result:
    """Measure: some ten minutes, or two and a half with a single short run of each."""
    home = vllm.environment() or (_BUILT if (_BUILT / ".stamp").exists() else None)
    if home is None:
        print("vllm: absent, no environment of vLLM here")
        return Result(name="vllm", claims=[], detail={"absent": "no environment of vLLM"})
    runs: list[Run] = []
    seeds = range(100, 100 + (QUICK_REPEATS if quick else REPEATS))
    with ended_in_order():
        with vllm.serving(home, SERVER_FLAGS, size=SIZE) as server:
            alone = measured(server, quick=quick)
            print(told(alone), flush=True)
            for nth, seed in enumerate(seeds):
                for mode in (Mode.OPEN, Mode.OURS) if nth % 2 else (Mode.OURS, Mode.OPEN):
                    runs.append(offered(server, alone, seed, mode, quick=quick))
                    print(line(runs[-1]), flush=True)
        bound = ("--max-num-queued-reqs", str(alone.profile.max_running))
        with vllm.serving(home, (*SERVER_FLAGS, *bound), size=SIZE) as server:
            for seed in seeds:
                runs.append(offered(server, alone, seed, Mode.BOUND, quick=quick))
                print(line(runs[-1]), flush=True)
    return Result(
        name="vllm",
        seeds=list(seeds),
        claims=claims(runs, 1.0 if quick else 2.0),
        detail={"alone": alone, "runs": runs},
    )


def claims(runs: list[Run], least: float) -> list[Claim]:
    """Return what is claimed of the same traces with and without admission."""
    ratios = []
    for seed in sorted({one.seed for one in runs}):
        met = {one.mode: one.met for one in runs if one.seed == seed}
        # One that was met where none was: so much the ratio is at least.
        ratios.append(met[Mode.OURS] / max(1, met[Mode.OPEN]))
    ours = [one for one in runs if one.mode is Mode.OURS]
    whole = statistics.mean(one.met / max(1, one.admitted) for one in ours)
    return [
        at_least(
            "goodput with admission over without, median pair", statistics.median(ratios), least
        ),
        at_least("goodput with admission over without, worst pair", min(ratios), 1.0),
        at_least("met of those admitted, mean", whole, 0.5),
    ]


def told(alone: Alone) -> str:
    """Return what was found of vLLM alone, in lines."""
    first = ", ".join(f"{at} tokens {ms:.0f}" for at, ms in alone.ttft_ms.items())
    steps = ", ".join(f"{at} streams {ms:.0f}" for at, ms in alone.tpot_ms.items())
    return (
        f"  alone: first token in ms: {first}\n"
        f"         per token in ms: {steps}\n"
        f"         bounds: first token {alone.ttft_bound_ms:.0f} ms, per token"
        f" {alone.tpot_bound_ms:.0f} ms\n"
        f"         sent at once {alone.profile.max_running} of vLLM's {SLOTS} slots;"
        f" capacity {alone.capacity_rps:.2f}/s; offered {OVERLOAD:g} times that"
    )


def line(run: Run) -> str:
    """Return one run with its denominators."""
    fields: dict[str, Any] = {
        "offered": run.offered,
        "admitted": run.admitted,
        "left": run.left,
        "finished": run.finished,
        "met": run.met,
    }
    counts = ", ".join(f"{name} {value}" for name, value in fields.items())
    refused = ", ".join(f"{why} {n}" for why, n in run.refused.items()) or "none"
    p50 = "none" if run.ttft_p50_ms is None else f"{run.ttft_p50_ms:.0f} ms"
    return (
        f"  {run.mode:<13} seed {run.seed}: {counts}; refused {refused}; met {run.met_per_s:.2f}/s of"
        f" {run.offered / run.span_s:.2f}/s; first token p50 {p50}"
    )
