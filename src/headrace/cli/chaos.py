"""`headrace chaos`: have a fleet go wrong, and see whether what is expected of it holds."""

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from headrace.cli.errors import FAILED, OK
from headrace.cli.out import show
from headrace.sim.chaos import load_chaos, shipped_names
from headrace.sim.chaos_run import Ran, run_chaos
from headrace.sim.expect import Verdict
from headrace.units import to_seconds

Name = Annotated[str | None, Parameter(name="SCENARIO", help="A name of the list, or a file.")]
Seed = Annotated[int | None, Parameter(help="Seed; the scenario's own if none is given.")]
Json = Annotated[
    str | None,
    Parameter(name="--json", allow_leading_hyphen=True, help="All of it as JSON; - prints."),
]
List = Annotated[bool, Parameter(name="--list", negative=(), help="List those that ship.")]


def chaos(
    scenario: Name = None, /, *, seed: Seed = None, json: Json = None, listed: List = False
) -> int:
    """Run a chaos scenario with all checkers on and say whether its expectations hold.

    Without a scenario, those that ship are listed. Exit code 1: one does not hold, or an invariant is broken.
    """
    if scenario is None or listed:
        _list()
        return OK
    loaded = load_chaos(scenario)
    ran = run_chaos(loaded, loaded.seed if seed is None else seed)
    if json is not None:
        text = msgspec.json.format(msgspec.json.encode(ran), indent=2).decode() + "\n"
        if json == "-":
            show(text, end="")
        else:
            Path(json).write_text(text, encoding="utf-8")
    if json != "-":
        show(told(loaded.about, ran))
    return OK if ran.holds else FAILED


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
