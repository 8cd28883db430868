"""How many requests does the simulator run per CPU-second, with the plane, checkers off?

The Azure 2023 conversation trace on four H100 8B replicas where HEADRACE_DATA is set, else a
generated trace of its lengths at its rate.
"""

import gc
import os
import time
from pathlib import Path

from msgspec.structs import replace

from benchmarks.harness import Result, at_least, calibration
from benchmarks.scenes import AZURE_CONV, one_class, poisson
from headrace.sim.scenario import Scenario, TraceFile, rows_of
from headrace.sim.world import World
from headrace.trace.read import Azure

RATE = 5.53
"""Requests per second of the trace."""


def scene(quick: bool) -> tuple[Scenario, tuple[Path, ...]]:
    """Return what is run and where its trace lies."""
    deployment = one_class("h100-8b-tp1", 4)
    data = os.environ.get("HEADRACE_DATA")
    made = poisson(deployment, RATE, 900.0 if quick else 3_500.0, AZURE_CONV)
    if data is None:
        return made, ()
    file = TraceFile(
        path="traces/azure2023_conv.csv.gz", format=Azure(), first=5_000 if quick else None
    )
    return replace(made, mix=None, trace=file, name="azure-conv"), (Path(data),)


def run(quick: bool) -> Result:
    """Measure the run alone: reading the trace before it and reporting after it do not count."""
    scenario, folders = scene(quick)
    rows = rows_of(scenario, 0, folders)
    times = []
    for _ in range(3 if quick else 5):
        world = World(scenario, rows, 0)
        gc.collect()
        began = time.process_time()
        world.run()
        times.append(time.process_time() - began)
    speed = len(rows) / min(times)
    return Result(
        name="simspeed",
        seeds=[0],
        claims=[at_least("requests per CPU-second with plane", speed, 3_000)],
        detail={
            "trace": scenario.name,
            "requests": len(rows),
            "cpu_s": [round(one, 3) for one in times],
            "calibration_s": calibration(),
        },
    )
