"""`headrace replay`: offer a trace to a live server, open-loop, and say what came of it."""

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
import uvloop
from cyclopts import Parameter, validators

from headrace.cli.errors import INTERRUPTED, INVALID, OK
from headrace.cli.out import show
from headrace.cli.replay_setup import (
    PROFILE,
    Shape,
    first_model,
    judge_of,
    keys_of,
    owned,
    place_of,
    rows_of,
    weights,
)
from headrace.gateway.clock import MonotonicClock
from headrace.load.caller import Answer
from headrace.load.judge import logged
from headrace.load.lag import LoopLag
from headrace.load.openloop import CONNECTIONS, PATIENCE_S, Target, offer
from headrace.load.replay import Replay, Setting
from headrace.report.client_table import client_table
from headrace.report.html import html_report
from headrace.report.live import report_of
from headrace.report.tables import render, render_summary
from headrace.units import DurationNs, seconds, to_seconds

PROGRESS_EVERY_S = 5

Trace = Annotated[Path, Parameter(help="Trace; relative to here, or to HEADRACE_DATA.")]
Url = Annotated[str, Parameter(help="Address of the API, such as http://127.0.0.1:8000.")]
Key = Annotated[
    tuple[str, ...],
    Parameter(
        name="--key",
        negative=(),
        show_default=False,
        help="NAME=KEY of a tenant; may be given again. `ps` shows it: better --keys.",
    ),
]
Keys = Annotated[Path | None, Parameter(help="File of NAME=KEY lines.")]
Kind = Annotated[
    Literal["headrace", "azure", "mooncake", "arena"], Parameter(help="Format of the trace.")
]
Speed = Annotated[
    float,
    Parameter(validator=validators.Number(gt=0), help="How much faster than the trace to send."),
]
First = Annotated[
    int | None, Parameter(validator=validators.Number(gte=1), help="Offer only so many requests.")
]
For = Annotated[
    float | None,
    Parameter(
        name="--for",
        validator=validators.Number(gt=0),
        help="Offer only what is due within so many seconds.",
    ),
]
Tenant = Annotated[
    tuple[str, ...],
    Parameter(
        name="--tenant",
        negative=(),
        show_default=False,
        help="NAME or NAME=WEIGHT, drawn for rows that name none; may be given again [default: all"
        " keys, alike].",
    ),
]
Class = Annotated[
    tuple[str, ...],
    Parameter(
        name="--class",
        negative=(),
        show_default=False,
        help="Likewise, the class that is asked for.",
    ),
]
Model = Annotated[
    str | None, Parameter(help="Model, for all rows [default: the row's, or the server's first].")
]
Cap = Annotated[
    int | None, Parameter(validator=validators.Number(gte=1), help="Cut longer ones, in tokens.")
]
Trusted = Annotated[
    bool, Parameter(negative=(), help="The server trusts replays: tell it the true lengths.")
]
Config = Annotated[
    Path | None,
    Parameter(help="The server's configuration: its classes judge, its profiles price work."),
]
ProfileName = Annotated[
    str | None, Parameter(help=f"What prices work without --config [default: {PROFILE}].")
]
Connections = Annotated[
    int,
    Parameter(
        validator=validators.Number(gte=1),
        help="Open at once; a request beyond is counted and not sent.",
    ),
]
Patience = Annotated[
    float, Parameter(validator=validators.Number(gt=0), help="Seconds an answer may take.")
]
Seed = Annotated[int, Parameter(help="Draws tenants, classes and prompts.")]
Out = Annotated[Path | None, Parameter(help="Write the report, JSON, for `headrace compare`.")]
Html = Annotated[Path | None, Parameter(help="Write a one-file HTML report.")]
Log = Annotated[Path | None, Parameter(name="--requests", help="Write one JSON line a request.")]
Label = Annotated[str, Parameter(help="What the report calls this run.")]


def replay(  # noqa: PLR0913 - a command's options
    trace: Trace,
    /,
    *,
    url: Url,
    key: Key = (),
    keys: Keys = None,
    kind: Annotated[Kind, Parameter(name="--format")] = "headrace",
    speed: Speed = 1.0,
    first: First = None,
    for_s: For = None,
    tenant: Tenant = (),
    slo_class: Class = (),
    model: Model = None,
    input_max: Cap = None,
    output_max: Cap = None,
    trusted: Trusted = False,
    config: Config = None,
    profile: ProfileName = None,
    connections: Connections = CONNECTIONS,
    patience: Patience = PATIENCE_S,
    seed: Seed = 0,
    label: Label = "live",
    out: Out = None,
    html: Html = None,
    requests: Log = None,
) -> int:
    """Offer a trace to a live server: each request at its time, whatever the answers do.

    Prompts are made up to the trace's lengths and shared beginnings. Ctrl-C stops and reports what
    there is. Ends with 3 if this machine was too busy to send in time.
    """
    place, known = place_of(url), keys_of(key, keys)
    judge, priced = judge_of(config, profile)
    shape = Shape(kind, speed, first, for_s, input_max, output_max, nameless=model is not None)
    rows = rows_of(trace, shape)
    rows = owned(rows, known, weights("--tenant", tenant), weights("--class", slo_class), seed)
    target = Target(
        place=place,
        model=model or first_model(place, next(iter(known.values()), None)),
        keys=known,
        gap_ns=lambda row: judge(row).bounds.gap_ns,
        trusted=trusted,
        salt=str(seed),
        patience_s=patience,
        connections=connections,
    )
    made = Setting(
        label=label,
        scenario=trace.name,
        seed=seed,
        url=url,
        trusted=trusted,
        speed=speed,
        profile=priced,
    )
    replayed = Replay(rows, judge, target.model)
    with nullcontext() if requests is None else requests.open("wb") as log:
        lag_ns, stopped = _offered(target, replayed, log)
    return _told(replayed, made, lag_ns, stopped=stopped, out=out, html=html)


def _offered(target: Target, replayed: Replay, log: BinaryIO | None) -> tuple[DurationNs, bool]:
    """Send everything; return the loop's lag, and whether it was stopped."""
    rows = replayed.rows
    span_s = to_seconds(rows[-1].at)
    show(
        f"{len(rows)} requests in {span_s:.1f} s to {target.place.host}:{target.place.port},"
        f" model {target.model}; Ctrl-C stops",
        file=sys.stderr,
    )
    progress = _Progress(len(rows))

    def answered(index: int, answer: Answer) -> None:
        end = replayed.answered(index, answer)
        if log is not None:
            log.write(msgspec.json.encode(logged(rows[index], answer, end)) + b"\n")
        progress.answered(answer)

    async def main() -> tuple[DurationNs, bool]:
        clock = MonotonicClock(asyncio.get_running_loop())
        lag = LoopLag(clock.now)
        stopped = False
        try:
            await offer(rows, target, answered, clock=clock.now)
        except asyncio.CancelledError:  # Ctrl-C: what is there is reported
            stopped = True
        finally:
            lag.stop()
        return lag.p99_ns(), stopped

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


class _Progress:
    """Tells now and then how far it is."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._done = self._failed = self._told_s = 0

    def answered(self, answer: Answer) -> None:
        self._done += 1
        self._failed += not answer.complete
        at_s = answer.ended_at // seconds(PROGRESS_EVERY_S) * PROGRESS_EVERY_S
        if at_s > self._told_s:
            self._told_s = at_s
            show(
                f"  {at_s} s: {self._done} of {self._requests} over, {self._failed} of them"
                " without a whole answer",
                file=sys.stderr,
            )


def _told(
    replayed: Replay,
    setting: Setting,
    lag_ns: DurationNs,
    *,
    stopped: bool,
    out: Path | None,
    html: Path | None,
) -> int:
    """Report what there is, and return the exit code."""
    if not replayed.answers:
        show("headrace: stopped before anything was sent", file=sys.stderr)
        return INTERRUPTED
    run = replayed.run(setting)
    report = report_of(run, replayed.client(setting, lag_ns))
    assert report.client is not None
    if out is not None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2)
        out.write_bytes(text + b"\n")
    if html is not None:
        page = html_report(f"{setting.scenario} to {setting.url}", [run])
        html.write_text(page, encoding="utf-8")
    show(render(client_table(report.client, report.total.offered)))
    show(render_summary(report))
    if stopped:
        return INTERRUPTED
    return OK if report.client.valid else INVALID
