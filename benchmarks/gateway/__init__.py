"""What does our data path cost beside those of other gateways?

Every gateway in turn on one core, canned engine and bare callers on another, in the same run:
CPU time of its process tree per request and per received chunk, memory per stream. Only ratios
within a run mean anything. Quick: ours and nginx, once.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from benchmarks.gateway import processes
from benchmarks.gateway.load import Job, Mode
from benchmarks.gateway.processes import Cores, FailedError, Running
from benchmarks.gateway.stacks import NGINX, OURS, STACKS, AbsentError, Stack
from benchmarks.gateway.table import Row, claims, lines
from benchmarks.gateway.wire import PACE_MS
from benchmarks.harness import Result

RUNS = 5
_CONCURRENCY = 64
_CHUNKS_WARM_S = 1.5


def run(quick: bool) -> Result:
    """Measure all gateways that can be had, interleaved."""
    wanted = [one for one in STACKS if not quick or one.name in (NGINX, OURS)]
    stacks, versions, absent = found(wanted)
    cores = processes.cores()
    rows: list[Row] = []
    with processes.ended_in_order(), processes.engine(cores.load) as engine_port:
        for nth in range(1 if quick else RUNS):
            for stack in turned(stacks, nth):
                try:
                    rows += one_gateway(stack, nth, engine_port, cores, quick=quick)
                except FailedError as error:  # ours then has no figures, and so holds no claim
                    print(error, file=sys.stderr, flush=True)
                    absent.setdefault(stack.name, f"run {nth}: {str(error).splitlines()[0]}")
    for line in lines(rows, absent):
        print(line)
    return Result(
        name="gateway",
        claims=claims(rows, quick=quick),
        detail={
            "versions": versions,
            "absent": absent,
            "cores": msgspec.to_builtins(cores),
            "rows": [described(row) for row in rows],
        },
    )


def found(wanted: Sequence[Stack]) -> tuple[list[Stack], dict[str, str], dict[str, str]]:
    """Return the gateways that are there or could be installed, their versions, and the others."""
    versions, absent = {}, {}
    for stack in wanted:
        try:
            versions[stack.name] = stack.prepare()
        except AbsentError as error:
            absent[stack.name] = str(error)
    return [one for one in wanted if one.name in versions], versions, absent


def turned(stacks: Sequence[Stack], nth: int) -> list[Stack]:
    """Return the gateways in another order each run, so that no place in it favours one."""
    at = nth % len(stacks)
    return [*stacks[at:], *stacks[:at]]


def one_gateway(
    stack: Stack, nth: int, engine_port: int, cores: Cores, *, quick: bool
) -> Iterator[Row]:
    """Yield the measurements of one gateway, started for them."""
    with processes.gateway(stack, engine_port, cores.gateway) as running:
        for job in jobs(stack, running, engine_port, quick=quick):
            yield Row(
                run=nth,
                stack=stack.name,
                mode=job.mode,
                connections=job.connections,
                sample=processes.measure(job, cores.load),
                offered=job.connections * 1_000 / PACE_MS if job.mode is Mode.CHUNKS else None,
            )


def jobs(stack: Stack, running: Running, engine_port: int, *, quick: bool) -> Iterator[Job]:
    """Yield what is measured; memory first, while the gateway has not grown by other work."""
    plan = (
        (Mode.MEMORY, stack.memory_streams, 0.0),
        (Mode.REQUESTS, _CONCURRENCY, 1.0),
        (Mode.CHUNKS, stack.streams // 2 if quick else stack.streams, _CHUNKS_WARM_S),
    )
    for mode, connections, warm_s in plan:
        yield Job(
            mode=mode,
            port=running.port,
            root=running.root,
            engine_port=engine_port,
            connections=connections,
            key=running.key,
            exact=stack.exact,
            warm_s=warm_s,
            least_s=1.0 if quick else 2.0,
            least_cpu_s=0.5 if quick else 1.2,
        )


def described(row: Row) -> dict[str, Any]:
    """Return a row for the record, with what is worked out from it."""
    told: dict[str, Any] = msgspec.to_builtins(row)
    return told | {"figure": row.figure, "valid": row.valid, "saturated": row.saturated}
