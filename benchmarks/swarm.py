"""Do hundreds of random worlds with faults keep every invariant, in bounded time?"""

import time

from benchmarks.harness import Result, at_least, at_most
from headrace.config.profiles import load_profile
from headrace.sim.swarm import REQUESTS_MAX, draw, run_many

KINDS = ("crash", "leavers", "report late", "report lost", "report twice", "restart", "slow")


def run(quick: bool) -> Result:
    """Run 300 seeds (60 when quick) with all checkers; a broken invariant ends the benchmark."""
    seeds = range(60 if quick else 300)
    profile = load_profile("h100-8b-tp1")
    sizes = [draw(seed, profile)[0].rows for seed in seeds]
    began = time.process_time()
    found = run_many(seeds, profile)
    took = time.process_time() - began
    least = min(found.faults.get(kind, 0) for kind in KINDS)
    return Result(
        name="swarm",
        seeds=[seeds.start, seeds.stop - 1],
        claims=[
            at_least("requests per seed, mean", found.requests / found.seeds, 300),
            at_most("requests of a seed, most", max(sizes), REQUESTS_MAX),
            at_least("seeds of the rarest fault", least, 20 * len(seeds) / 300),
            at_most("CPU seconds", took, 120),
        ],
        detail={
            "steps": found.steps,
            "requests": found.requests,
            "faults": found.faults,
            "outcomes": found.outcomes,
        },
    )
