"""`headrace demo`: what the control plane does, on one machine, in a minute.

Three tenants call a live gateway over HTTP while the load rises past capacity; then the very same
requests are simulated without admission and fairness, and both stand side by side.
"""

import asyncio
import sys
import time
from pathlib import Path
from socket import socket
from typing import Annotated

import uvloop
from cyclopts import Parameter
from rich.console import Console
from rich.live import Live

from headrace.cli import demo_scene as scene
from headrace.cli.demo_table import Board
from headrace.cli.errors import OK
from headrace.cli.live import recorded
from headrace.gateway.auth import key_hash, minted
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.server import Gateway, listen
from headrace.load.caller import Answer, Place
from headrace.load.openloop import Target, offer
from headrace.model.effect import Concluded
from headrace.report.beside import side_by_side
from headrace.report.html import html_report
from headrace.report.run import RunRecord
from headrace.report.summary import Summary, summarise
from headrace.report.tables import render
from headrace.sim.experiment import simulate, without_control
from headrace.sim.scenario import Scenario, rows_of
from headrace.trace.row import TraceRow
from headrace.units import DurationNs, ms

REFRESH_S = 0.5
REPORT = Path("headrace-demo-report.html")

Seconds = Annotated[float, Parameter(help="How long requests are offered.")]
Report = Annotated[Path, Parameter(help="Where the HTML report goes.")]


def demo(*, seconds: Seconds = 30.0, report: Report = REPORT) -> int:
    """Show three tenants under rising load, live, then what would be without admission and fairness."""
    console = Console(highlight=False)
    scenario = scene.scenario(seconds)
    rows = rows_of(scenario, scene.SEED)
    console.print(_INTRO.format(requests=len(rows), seconds=seconds))
    with (
        listen("127.0.0.1", 0) as sock,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        live = runner.run(_live(console, scenario, rows, sock))
    console.print(
        "\nThe same requests, simulated: with the same policy, and without control\n(first come first served, no admission) ..."
    )
    began = time.process_time()
    runs = [
        live,
        simulate(scenario, scene.SEED, rows, label="simulated, same"),
        simulate(
            without_control(scenario),
            scene.SEED,
            rows,
            label="simulated, no control",
        ),
    ]
    console.print(f"... took {time.process_time() - began:.1f} s of CPU\n")
    _show(console, [summarise(run) for run in runs])
    report.write_text(html_report("Headrace demo", runs), encoding="utf-8")
    console.print(f"\nReport: {report.resolve()}")
    return OK


_INTRO = """[bold]Headrace demo[/bold]
Two emulated A100 70B replicas behind the gateway, {requests} requests in {seconds:.0f} s over real HTTP.
  chat     interactive, within its share: first token within 2 s
  hog      interactive, same class, rising to 8 times its share
  nightly  batch, within its share
"""


async def _live(
    console: Console, scenario: Scenario, rows: list[TraceRow], sock: socket
) -> RunRecord:
    """Serve and offer the trace; return what the gateway recorded."""
    loop = asyncio.get_running_loop()
    keys = {tenant: minted() for tenant in scene.TENANTS}
    settings = scene.settings({tenant: key_hash(key) for tenant, key in keys.items()})
    ended: list[Concluded] = []
    clock = MonotonicClock(loop)
    gateway = Gateway(settings, clock, concluded=ended.append)
    serving = loop.create_task(gateway.serve(sock))
    host, port = sock.getsockname()[:2]
    target = Target(
        place=Place(host=host, port=port),
        model=scene.MODEL,
        keys=keys,
        gap_ns=lambda _row: ms(scene.ITL_MS),
        trusted=True,
        spoken=False,
    )
    board = Board(gateway.driver, clock, scene.TENANTS, DurationNs(rows[-1].at))
    try:

        def answered(index: int, answer: Answer) -> None:
            tenant = rows[index].tenant
            assert tenant is not None
            board.answered(tenant, answer)

        offering = loop.create_task(offer(rows, target, answered, clock=clock.now))
        await _watch(console, board, offering)
        await offering
    finally:
        gateway.stop()
        await serving
    return recorded(scenario, scene.SEED, rows, ended)


async def _watch(console: Console, board: Board, offering: "asyncio.Task[object]") -> None:
    """Show the table until everything is answered: redrawn on a terminal, else now and then."""
    with Live(board.table(), console=console, auto_refresh=False, transient=False) as shown:
        while not offering.done():
            await asyncio.wait([offering], timeout=REFRESH_S)
            if console.is_terminal:
                shown.update(board.table(), refresh=True)
            else:
                board.line(sys.stdout)
        shown.update(board.table(), refresh=True)


def _show(console: Console, told: list[Summary]) -> None:
    """Say what the three runs mean, then show every denominator."""
    console.print("[bold]Who got what they were promised, of all they asked for[/bold]")
    console.print(f"  {'':24}" + "".join(f"{tenant:>10}" for tenant in scene.TENANTS))
    for summary in told:
        shares = {group.tenant: group.attained_offered for group in summary.by_tenant}
        cells = "".join(f"{(shares.get(tenant) or 0.0):>10.1%}" for tenant in scene.TENANTS)
        console.print(f"  {summary.label:24}{cells}")
    console.print()
    print(render(side_by_side(told)))  # as wide as it is: nothing may be folded
