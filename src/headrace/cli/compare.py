"""`headrace compare`: did a policy do better on the very same requests?"""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from headrace.cli.errors import FAILED, OK, fail
from headrace.cli.out import show
from headrace.report.compare import Comparison, ManyComparison, NotComparable, compare_many
from headrace.report.compare import compare as compare_two
from headrace.report.live import Report as Run
from headrace.report.live import decoded
from headrace.report.tables import render_comparison

Report = Annotated[
    Path, Parameter(help="Figures as `simulate --json` or `replay --out` writes them.")
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]


def compare(base: Report, other: Report, /, *, as_json: AsJson = False) -> int:
    """Compare two reports; refuses unless both were offered the identical trace (SLO-5).

    Two live replays may have had different requests of one mix: classes, tenants, lengths and rate
    are tested, and if they do not agree the runs are not comparable. Reports of several seeds are paired seed by seed and compared with a 95 % interval.
    """
    told = [_read(path) for path in (base, other)]
    if isinstance(told[0], str):
        return fail(told[0])
    if isinstance(told[1], str):
        return fail(told[1])
    for path, runs in zip((base, other), told, strict=True):
        if not runs:
            return fail(f"{path}: no runs in this report")
    found: Comparison | ManyComparison
    try:
        if len(told[0]) == len(told[1]) == 1:
            found = compare_two(told[0][0], told[1][0])
        else:
            found = compare_many(list(zip(told[0], told[1], strict=True)))
    except NotComparable as refused:
        show(f"headrace: not comparable: {refused}", file=sys.stderr)
        return FAILED
    except ValueError:
        return fail(f"{base} has {len(told[0])} runs, {other} has {len(told[1])}")
    if as_json:
        show(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show(render_comparison(found))
    return OK


def _read(path: Path) -> list[Run] | str:
    """Return a report's runs, or what is wrong with the file."""
    try:
        return decoded(path.read_bytes())
    except msgspec.DecodeError as error:
        return f"{path}: no report: {error}"
