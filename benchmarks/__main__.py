"""Run benchmarks and hold their claims against their bounds.

    python -m benchmarks NAME [--quick] [--seeds FIRST] [--json FILE]

NAME is one of REGISTRY, or `all`. Each is a module of this package with `run(quick) -> Result`;
`quick` is a matter of seconds and shows the direction only. One that can be claimed on other seeds than
its own takes `seeds` as well. The exit status is 1 if a claim fails.
"""

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from benchmarks import harness

REGISTRY = (
    "decision", "metrics", "prompt_tokens", "simspeed", "capacity", "scaling", "tokens", "overload", "fairwait", "fairness",
    "swarm", "soak", "deferred", "gateway", "parity", "live_overload", "live_fairness", "vllm", "vllm_plugin",
)  # fmt: skip
"""Every benchmark, in the order `all` runs them."""


class Benchmark(Protocol):
    """Which claims does Headrace make here, and do they hold?"""

    def run(self, quick: bool) -> harness.Result:
        """Measure; `quick` within a minute of CPU time, otherwise within twenty."""
        ...


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One run as written to the JSON file: complete without its neighbours."""

    name: str
    quick: bool
    commit: str
    machine: dict[str, str | int]
    calibration_s: float
    cpu_s: float
    seeds: Sequence[int]
    claims: list[harness.Claim]
    detail: dict[str, Any]
    table: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments name. Return 0, 1 if a claim fails, 2 if there is no such benchmark."""
    args = _arguments().parse_args(argv)
    names = REGISTRY if args.name == "all" else (args.name,)
    if complaint := _complaint(names, args.seeds):
        print(complaint, file=sys.stderr)
        return 2
    records = [measure(name, quick=args.quick, first_seed=args.seeds) for name in names]
    if args.json is not None:
        # One benchmark gives an object, `all` an array of them.
        written = records if args.name == "all" else records[0]
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")
    failed = [f"{r.name}: {c.claim}" for r in records for c in r.claims if not c.holds]
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if failed else 0


def measure(name: str, *, quick: bool, first_seed: int | None = None) -> Record:
    """Run one benchmark, print its claims, and return the record of the run."""
    benchmark = cast("Benchmark", importlib.import_module(f"benchmarks.{name}"))
    more: dict[str, Any] = {}
    if first_seed is not None:
        more["seeds"] = range(first_seed, first_seed + len(harness.CLAIM_SEEDS))
    calibration_s = harness.calibration()
    began = time.process_time()
    result = benchmark.run(quick, **more)
    record = Record(
        name=name,
        quick=quick,
        commit=harness.commit_id(),
        machine=harness.machine(),
        calibration_s=calibration_s,
        cpu_s=time.process_time() - began,
        seeds=list(result.seeds),
        claims=result.claims,
        detail=result.detail,
        table=result.table,
    )
    print(render(record), flush=True)
    return record


def render(record: Record) -> str:
    """Return a run as a heading, one line a claim, and its table."""
    form = "quick" if record.quick else "full"
    head = (
        f"{record.name} ({form}): {record.cpu_s:.1f} s CPU; "
        f"calibration loop {1000 * record.calibration_s:.1f} ms; commit {record.commit[:12]}"
    )
    width = max((len(claim.claim) for claim in record.claims), default=0)
    rows = [
        f"  {'holds' if claim.holds else 'FAILS'}  {claim.claim:<{width}}  "
        f"{claim.value:.6g} ({claim.bound})"
        for claim in record.claims
    ]
    return "\n".join([head, *rows, *([record.table] if record.table else [])])


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks.")
    parser.add_argument("name", metavar="NAME", help=f"all, or one of: {', '.join(REGISTRY)}")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes: direction only")
    parser.add_argument(
        "--seeds", type=int, metavar="FIRST", help="claim on as many seeds from this one on"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    return parser


def _complaint(names: Sequence[str], first_seed: int | None) -> str | None:
    """Return what is wrong with the names, before the first of them has run for minutes."""
    for name in names:
        if name not in REGISTRY:
            return f"no benchmark {name!r}; there are: all, {', '.join(REGISTRY)}"
        if importlib.util.find_spec(f"benchmarks.{name}") is None:
            return f"benchmark {name!r} is registered, but benchmarks/{name}.py is not there"
        run = importlib.import_module(f"benchmarks.{name}").run
        if first_seed is not None and "seeds" not in signature(run).parameters:
            return f"benchmark {name!r} has seeds of its own"
    return None


if __name__ == "__main__":
    sys.exit(main())
