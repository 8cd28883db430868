"""`headrace simulate`: run a scenario in virtual time and say what came of it."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter, validators
from msgspec.structs import replace

from headrace.adapters.journal.ring import JournalRing, segment_paths
from headrace.cli.errors import OK, fail
from headrace.cli.out import show
from headrace.model.evidence import DecisionRecord
from headrace.policy.catalog import canonical
from headrace.policy.ordering.orders import (
    EarliestDeadline,
    Fifo,
    LeastSlack,
    Niyama,
    Score,
    ShortestFirst,
    TenantFirst,
    VtcOrder,
)
from headrace.report.beside import side_by_side, tenants_beside
from headrace.report.decisions import config_line, header_line, to_line
from headrace.report.html import html_report
from headrace.report.run import RunRecord
from headrace.report.summary import Summary, summarise
from headrace.report.sweep import sweep_point
from headrace.report.tables import render, render_summary
from headrace.sim.experiment import simulate as run_one
from headrace.sim.experiment import with_fifo_wait, with_order, without_control
from headrace.sim.reading import load_scenario
from headrace.sim.scenario import LOAD_MAX, LOAD_MIN, Scenario, rows_of


class Beside(StrEnum):
    """Another policy on the identical trace, shown beside the scenario's own."""

    NO_CONTROL = "no_control"
    """First come first served, capacity gates only watching."""
    FIFO_WAIT = "fifo_wait"
    """The deadline gate believing in the whole backlog."""
    FIFO = "fifo"
    """This order, and those below, with the scenario's own gates."""
    SJF = "sjf"
    EDF = "edf"
    LEAST_SLACK = "least_slack"
    NIYAMA = "niyama"
    VTC = "vtc"
    TENANT_FIRST = "tenant_first"
    SCORE = "score"


_VARIANTS: dict[Beside, Callable[[Scenario], Scenario]] = {
    Beside.NO_CONTROL: without_control,
    Beside.FIFO_WAIT: with_fifo_wait,
    Beside.FIFO: with_order(Fifo()),
    Beside.SJF: with_order(ShortestFirst()),
    Beside.EDF: with_order(EarliestDeadline()),
    Beside.LEAST_SLACK: with_order(LeastSlack()),
    Beside.NIYAMA: with_order(Niyama()),
    Beside.VTC: with_order(VtcOrder()),
    Beside.TENANT_FIRST: with_order(TenantFirst()),
    Beside.SCORE: with_order(Score()),
}

File = Annotated[Path, Parameter(help="Scenario, YAML or JSON.")]
Seeds = Annotated[
    tuple[int, ...], Parameter(name="--seed", negative=(), help="Seed; may be given again.")
]
Json = Annotated[
    str | None,
    Parameter(
        name="--json", allow_leading_hyphen=True, help="Figures as JSON to a file; - prints."
    ),
]
Html = Annotated[Path | None, Parameter(help="Write a one-file HTML report.")]
JournalDir = Annotated[Path | None, Parameter(help="Write the plane's journal to a folder.")]
Decisions = Annotated[Path | None, Parameter(help="Write the decision log to a file.")]
Loads = Annotated[
    tuple[float, ...],
    Parameter(
        name="--load",
        negative=(),
        validator=validators.Number(gte=LOAD_MIN, lte=LOAD_MAX),
        help="Offered rate as a multiple; may be given again.",
    ),
]
Besides = Annotated[
    tuple[Beside, ...], Parameter(name="--beside", negative=(), help="Also run this policy.")
]
Stepwise = Annotated[
    bool, Parameter(name="--step-by-step", negative=(), help="Take engine steps one by one.")
]


def simulate(  # noqa: PLR0913 - a command's options
    file: File,
    /,
    *,
    seeds: Seeds = (),
    loads: Loads = (),
    beside: Besides = (),
    json: Json = None,
    html: Html = None,
    journal: JournalDir = None,
    decisions: Decisions = None,
    step_by_step: Stepwise = False,
) -> int:
    """Run a scenario in virtual time: same seed, same bytes.

    With several seeds, loads or policies each combination is run on its own trace of that seed and
    load, which all policies share. Journal and decision log are those of the first run.
    """
    if journal is not None and any(segment_paths(journal)):
        return fail(f"{journal}: holds a journal already")
    scenario = load_scenario(file)
    folders = trace_folders(file)
    factors = loads or (1.0,)
    for factor in factors:
        if not LOAD_MIN <= scenario.load * factor <= LOAD_MAX:
            own = f" times the scenario's own {scenario.load:g}" if scenario.load != 1.0 else ""
            return fail(f"load {factor:g}{own}: expected {LOAD_MIN:g} to {LOAD_MAX:g} in all")
    runs: list[tuple[RunRecord, float]] = []
    with ExitStack() as open_files:
        sink, note = _logs(open_files, scenario, journal, decisions)
        for factor in factors:
            offered = replace(scenario, load=scenario.load * factor)
            for seed in seeds or (scenario.seed,):
                rows = rows_of(offered, seed, folders)
                for variant in (None, *beside):
                    one = offered if variant is None else _VARIANTS[variant](offered)
                    what = scenario.name if variant is None else f"{scenario.name} {variant}"
                    told = f"{what} seed {seed} load {factor:g}"
                    _progress(f"{told}: {len(rows)} requests")
                    run = run_one(
                        one,
                        seed,
                        rows,
                        sink=sink,
                        decisions=note,
                        fast_forward=not step_by_step,
                    )
                    sink = note = None
                    runs.append((run, factor))
    _write(runs, json, html, swept=len(loads) > 1)
    return OK


def trace_folders(file: Path) -> tuple[Path, ...]:
    """Return where relative trace paths are looked for: beside the file, then HEADRACE_DATA."""
    data = os.environ.get("HEADRACE_DATA")
    return (file.parent, Path(data)) if data else (file.parent,)


def _logs(
    files: ExitStack, scenario: Scenario, journal: Path | None, decisions: Path | None
) -> tuple[Callable[[bytes, bool], None] | None, Callable[[DecisionRecord], None] | None]:
    sink = note = None
    if journal is not None:
        ring = JournalRing(journal)
        files.callback(ring.close)
        sink = ring.put
    if decisions is not None:
        out = files.enter_context(decisions.open("wb"))
        config = config_line(1, canonical(scenario.deployment))
        out.write(header_line() + config)
        last = 0

        def note(record: DecisionRecord) -> None:
            nonlocal last
            if record.decision_id <= last:  # the driver came back and counts from its checkpoint
                out.write(config)
            last = record.decision_id
            out.write(to_line(record))

    return sink, note


def _write(
    runs: list[tuple[RunRecord, float]], json: str | None, html: Path | None, *, swept: bool
) -> None:
    told = [(summarise(run), factor) for run, factor in runs]
    if json is not None and json != "-":
        Path(json).write_text(_text(told), encoding="utf-8")
    if html is not None:
        points = [sweep_point(summary, factor) for summary, factor in told]
        page = html_report(
            runs[0][0].scenario,
            [run for run, _ in runs[:4]],
            points if swept else None,
            load="load, times the scenario's own",
        )
        html.write_text(page, encoding="utf-8")
        _progress(f"report: {html}")
    if json == "-":
        show(_text(told), end="")
    else:
        _print(told)


def _text(told: list[tuple[Summary, float]]) -> str:
    """Return one summary as an object, several as an array."""
    summaries: Any = [summary for summary, _ in told]
    content = msgspec.json.encode(summaries[0] if len(summaries) == 1 else summaries)
    return msgspec.json.format(content, indent=2).decode() + "\n"


def _print(told: list[tuple[Summary, float]]) -> None:
    summaries = [summary for summary, _ in told]
    if len(summaries) == 1:
        show(render_summary(summaries[0]))
        return
    by_trace: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_trace.setdefault(summary.trace_hash, []).append(summary)
    for same in by_trace.values():
        show(f"{same[0].scenario}, seed {same[0].seed}, trace {same[0].trace_hash[:12]}")
        show(render(side_by_side(same)))
        show(render(tenants_beside(same)))


def _progress(line: str) -> None:
    show(line, file=sys.stderr)
