"""`headrace steps`: what did the steps of an engine come to, by its step log?"""

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter, validators

from headrace.cli.errors import OK, fail
from headrace.cli.out import show
from headrace.report.steps import OUTPUT_WEIGHT, token_service
from headrace.report.steps_read import BadSteps, read_steps
from headrace.report.steps_table import steps_report, steps_tables
from headrace.report.tables import render_all

File = Annotated[
    Path,
    Parameter(help="Step logs of engines, in any order: NAME.1 and NAME together are one."),
]
Weight = Annotated[
    float,
    Parameter(
        validator=validators.Number(gt=0, lte=100),
        help="Service of an output token in those of an input token, as in `cost`.",
    ),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]


def steps(*files: File, output_weight: Weight = OUTPUT_WEIGHT, as_json: AsJson = False) -> int:
    """Tell who got what in an engine that our scheduler runs in, and in which order.

    Every life of an engine is told by itself: durations of steps and of scheduling, then by tenant what
    it was served, its share while at least two tenants waited, its time in the engine's queue and how
    much prefill came between its tokens; who was preempted, and how far deadlines were kept in order.
    """
    if not files:
        return fail("steps: expected a file")
    try:
        logs = read_steps(files)
    except BadSteps as broken:
        return fail(str(broken))
    rates = token_service(output_weight)
    found = [steps_report(log, rates) for log in logs]
    if as_json:
        show(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show(render_all(table for one in found for table in steps_tables(one)), end="")
    return OK
