"""`headrace swarm`: many small random worlds with faults, every invariant checked at every step."""

import sys
import traceback
from typing import Annotated

import msgspec
from cyclopts import Parameter, validators

from headrace.cli.errors import FAILED, OK
from headrace.config.profiles import load_profile
from headrace.sim import swarm as worlds

Count = Annotated[int, Parameter(validator=validators.Number(gt=0), help="How many seeds to run.")]
Seed = Annotated[int | None, Parameter(help="Run this seed alone and print what was drawn.")]
Start = Annotated[int, Parameter(name="--from", help="First seed.")]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]


def swarm(
    *, seeds: Count = 50, start: Start = 0, seed: Seed = None, as_json: AsJson = False
) -> int:
    """Draw worlds from seeds and run them; a failure prints the seed that reproduces it."""
    profile = load_profile("h100-8b-tp1")
    chosen = range(start, start + seeds) if seed is None else range(seed, seed + 1)
    if seed is not None:
        drawn, _ = worlds.draw(seed, profile)
        print(msgspec.json.format(msgspec.json.encode(drawn), indent=2).decode(), file=sys.stderr)
    try:
        found = worlds.run_many(chosen, profile)
    except Exception as failed:  # noqa: BLE001 - whatever broke, the seed must be told
        traceback.print_exception(failed)
        return FAILED
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return OK
    print(f"{found.seeds} seeds, {found.requests} requests, {found.steps} steps: clean")
    for title, counts in (("seeds with", found.faults), ("ended", found.outcomes)):
        print(f"  {title}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    return OK
