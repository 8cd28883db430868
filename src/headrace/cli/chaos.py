"""`headrace chaos`: have a fleet go wrong, and see whether what is expected of it holds."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter, validators

from headrace.cli.chaos_havoc import unfit
from headrace.cli.chaos_live import Counted, LiveRan, run_chaos_live
from headrace.cli.errors import FAILED, INTERRUPTED, INVALID, OK, fail
from headrace.cli.live import BrokenError, StoppedError
from headrace.cli.out import show
from headrace.load.caller import Answer
from headrace.load.lag import LIMIT_NS
from headrace.sim.chaos import Chaos, load_chaos, shipped_names
from headrace.sim.chaos_run import Ran, run_chaos
from headrace.sim.expect import Verdict
from headrace.units import seconds, to_ms, to_seconds

PROGRESS_EVERY_S = 60

Name = Annotated[str | None, Parameter(name="SCENARIO", help="A name of the list, or a file.")]
Seed = Annotated[int | None, Parameter(help="Seed; the scenario's own if none is given.")]
Json = Annotated[
    str | None,
    Parameter(name="--json", allow_leading_hyphen=True, help="All of it as JSON; - prints."),
]
List = Annotated[bool, Parameter(name="--list", negative=(), help="List those that ship.")]
Live = Annotated[
    bool,
    Parameter(
        negative=(), help="Against the live gateway over its emulated fleet, by callers over HTTP."
    ),
]
Speed = Annotated[
    int,
    Parameter(
        validator=validators.Number(gte=1, lte=100),
        help="With --live: how many seconds of the scenario pass in one of this machine's.",
    ),
]
SPEED = 10
"""Six minutes and more in 40 s; a machine adds a tenth of a second to what it takes 10 ms for."""


def chaos(
    scenario: Name = None,
    /,
    *,
    seed: Seed = None,
    live: Live = False,
    speed: Speed = SPEED,
    json: Json = None,
    listed: List = False,
) -> int:
    """Run a chaos scenario with all checkers on and say whether its expectations hold.

    Without a scenario, those that ship are listed. Exit code 1: one does not hold, or an invariant is broken.
    With --live it is the gateway that serves, and 3 says that this machine was too busy to tell.
    """
    if scenario is None or listed:
        _list()
        return OK
    loaded = load_chaos(scenario)
    number = loaded.seed if seed is None else seed
    if live:
        return _live(loaded, number, speed, json)
    ran = run_chaos(loaded, number)
    _put(ran, json, told(loaded.about, ran))
    return OK if ran.holds else FAILED


def _live(loaded: Chaos, seed: int, speed: int, json: str | None) -> int:
    """Run a scenario live, and return the exit code."""
    if problem := unfit(loaded):
        return fail(f"{loaded.name}: {problem}")
    try:
        found = run_chaos_live(loaded, seed, speed=speed, told=_Progress())
    except (StoppedError, BrokenError) as ended:
        show(f"headrace: {ended}", file=sys.stderr)
        return INTERRUPTED if isinstance(ended, StoppedError) else FAILED
    lines = told(loaded.about, found.ran) + "\n" + counted(found.counted, speed)
    _put(found, json, lines)
    if found.ran.holds:
        return OK
    return FAILED if found.counted.valid else INVALID


def _put(found: Ran | LiveRan, json: str | None, lines: str) -> None:
    if json is not None:
        text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
        if json == "-":
            show(text, end="")
        else:
            Path(json).write_text(text, encoding="utf-8")
    if json != "-":
        show(lines)


class _Progress:
    """Tells now and then how far a live run is."""

    def __init__(self) -> None:
        self._over = self._short = 0
        self._told_s = 0

    def __call__(self, _index: int, answer: Answer) -> None:
        self._over += 1
        self._short += not answer.complete
        at_s = answer.ended_at // seconds(PROGRESS_EVERY_S) * PROGRESS_EVERY_S
        if at_s > self._told_s:
            self._told_s = at_s
            show(
                f"  {at_s} s: {self._over} requests over, {self._short} of them without a whole answer",
                file=sys.stderr,
            )


def counted(found: Counted, speed: int) -> str:
    """Return what the callers of a live run counted, in a line."""
    lag = f"loop lag p99 {to_ms(found.loop_lag_p99_ns):.0f} ms at speed {speed}"
    busy = (
        ""
        if found.valid
        else f", beyond {to_ms(LIMIT_NS):.0f} ms: what fails may be this machine's"
    )
    return f"live: {found.whole} of {found.requests} answers whole, {found.tokens} tokens counted; {lag}{busy}"


def told(about: str, ran: Ran) -> str:
    """Return a run as lines: what it is about, what happened, and what came of the expectations."""
    lines = [f"{ran.scenario}, seed {ran.seed}: {about}", ""]
    lines += [f"{to_seconds(one.at):9.1f} s  {one.what}" for one in ran.happened]
    lines += ["", *map(_said, ran.verdicts)]
    if ran.broken is not None:
        lines.append(f"BROKEN  {ran.broken}")
    lines.append("holds" if ran.holds else "does not hold")
    return "\n".join(lines)


def _said(one: Verdict) -> str:
    figure = "nothing" if one.measured is None else f"{one.measured:.6g}"
    when = f", {one.window}" if one.window else ""
    return f"{'ok' if one.holds else 'FAILED':7} {one.what}{when}: {figure} ({one.bound})"


def _list() -> None:
    names = shipped_names()
    wide = max(map(len, names), default=0)
    for name in names:
        show(f"{name:{wide}}  {load_chaos(name).about}")
