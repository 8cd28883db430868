"""Does goodput survive offered load far above capacity (ADM-7)?

The same offered trace with and without admission at 0.5 to 10 times capacity; refusals by prompt
length show whether the gate lives on short prompts.
"""

from typing import Any

from benchmarks.harness import CLAIM_SEEDS, Result, at_least, at_most, interval95
from benchmarks.scenes import AZURE_CONV, capacity, met_work, one_class, poisson
from headrace.report.run import RunRecord
from headrace.sim.experiment import simulate, without_control

LOADS = (0.5, 1.0, 2.0, 4.0, 10.0)


def run(quick: bool) -> Result:
    """Measure on one H100 8B replica, conversation lengths, 2 s to first token, 80 ms gaps."""
    seeds = CLAIM_SEEDS[:2] if quick else CLAIM_SEEDS
    duration = 90.0 if quick else 180.0
    deployment = one_class("h100-8b-tp1", 1)
    tuning = (0,) if quick else (0, 1, 2, 3, 4)
    rate = capacity(deployment, AZURE_CONV, duration_s=duration, seeds=tuning)
    table: list[dict[str, Any]] = []
    gated: dict[float, list[float]] = {load: [] for load in LOADS}
    deciles: dict[str, Any] = {}
    for load in LOADS:
        scene = poisson(deployment, rate * load, duration, AZURE_CONV)
        for seed in seeds:
            run = simulate(scene, seed)
            gated[load].append(met_work(run))
            if load == LOADS[-1] and seed == seeds[0]:
                deciles = rejected_by_decile(run)
        mean = interval95(gated[load])
        offered = sum(one.work_ns for one in run.offered) / run.span_ns
        table.append({"load": load, "goodput_work": mean._asdict(), "offered_work": offered})
    best = max(sum(values) / len(values) for values in gated.values())
    late = []
    for seed in seeds:
        scene = without_control(poisson(deployment, rate * 2, duration, AZURE_CONV))
        late.append(met_work(simulate(scene, seed), since_s=60.0))
    at_ten = sum(gated[10.0]) / len(seeds)
    return Result(
        name="overload",
        seeds=list(seeds),
        claims=[
            at_least("work goodput at 10x over its best", at_ten / best, 0.9),
            at_most(
                "without admission at 2x, after 60 s, over the best",
                sum(late) / len(late) / best,
                0.3,
            ),
        ],
        detail={
            "capacity_rps": rate,
            "loads": table,
            "without_admission_2x_after_60s": interval95(late)._asdict(),
            "rejected_by_prompt_decile_at_10x": deciles,
        },
    )


def rejected_by_decile(run: RunRecord) -> dict[str, Any]:
    """Return the share refused in each decile of the offered prompt lengths."""
    refused = {row.request for row in run.rows if not row.met}
    ordered = sorted(run.offered, key=lambda one: (one.input_tokens, one.request))
    size = len(ordered)
    shares = {}
    for nth in range(10):
        part = ordered[size * nth // 10 : size * (nth + 1) // 10]
        edges = f"{part[0].input_tokens}-{part[-1].input_tokens}"
        shares[edges] = round(sum(one.request in refused for one in part) / len(part), 3)
    return shares
