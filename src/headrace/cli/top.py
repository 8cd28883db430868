"""`headrace top`: a running gateway at a glance, off its admin listener."""

import time
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli.errors import FAILED, OK, fail
from headrace.cli.listener import KEY_ENV, URL, UnreadableError, Url, call
from headrace.gateway.overview import GroupState, State
from headrace.ports.actuator import Stage

PLAIN_WIDTH = 140
"""Columns where no terminal says how many there are."""
ROWS = 20
"""Tenants shown, those with most offered first."""

Key = Annotated[
    str | None,
    Parameter(
        help="Admin key; better in the environment, where `ps` does not show it.",
        env_var=KEY_ENV,
        show_default=False,
    ),
]
Once = Annotated[bool, Parameter(negative=(), help="Print once and end.")]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON, one line a look.")]
Every = Annotated[float, Parameter(help="Seconds between two looks.")]


def top(
    *,
    url: Url = URL,
    key: Key = None,
    once: Once = False,
    as_json: AsJson = False,
    every: Every = 1.0,
) -> int:
    """Show tenants, classes, queues and replicas of a running gateway until Ctrl-C."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    try:
        if as_json:
            for content in _looks(url, key, every, once=once):
                print(content.decode(), flush=True)
        elif once:
            console.print(_screen(_state(call(url, key, "/state"))))
        else:
            with Live(console=console, screen=True, auto_refresh=False) as shown:
                for content in _looks(url, key, every, once=False):
                    shown.update(_screen(_state(content)), refresh=True)
    except UnreadableError as error:
        fail(str(error))
        return FAILED
    return OK


def _looks(url: str, key: str | None, every: float, *, once: bool) -> Iterator[bytes]:
    while True:
        yield call(url, key, "/state")
        if once:
            return
        time.sleep(max(0.1, every))


def _state(content: bytes) -> State:
    try:
        return msgspec.json.decode(content, type=State)
    except msgspec.DecodeError as error:
        raise UnreadableError(f"not a state of a gateway: {error}") from None


def _screen(state: State) -> Group:
    troubles = [Text(f"{name} is not ready: {why}") for name, why in state.troubles.items()]
    groups = [_group(one) for one in state.groups if one.stage != Stage.READY]
    return Group(
        _head(state),
        *_cost(state),
        *troubles,
        *groups,
        _classes(state),
        _tenants(state),
        _replicas(state),
    )


def _group(group: GroupState) -> Text:
    """Return the line on a group of processes that does not serve."""
    why = f": {group.why}" if group.why else ""
    return Text(f"group {group.group} is {group.stage} for {group.for_s:,.0f} s{why}")


def _head(state: State) -> Text:
    """Return the line above everything: the process, and what is out of the ordinary."""
    words = [
        f"headrace {state.version}",
        state.at,
        f"up {state.uptime_s:,.0f} s",
        f"policy revision {state.revision}",
        f"live {state.live}",
    ]
    if state.mode != "enforce":
        words.append(f"gates: {state.mode}")
    for told, word in (
        (not state.ready, "NOT READY"),
        (state.draining, "DRAINING"),
        (state.frozen, "FROZEN"),
    ):
        if told:
            words.append(word)
    return Text("  ".join(words))


def _cost(state: State) -> list[Text]:
    """Return the line on what was paid for."""
    return [] if state.cost is None else [Text(f"since the start: {state.cost}")]


def _table(title: str, *columns: str, names: int = 1) -> Table:
    """Return an empty table whose first columns are names, the others numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for nth, column in enumerate(columns):
        table.add_column(column, justify="left" if nth < names else "right", no_wrap=True)
    return table


def _classes(state: State) -> Table:
    table = _table(
        "Classes, per second of the last 10",
        "class",
        "offered",
        "admitted",
        "refused",
        "met",
        "level",
        "tokens",
        "waiting",
        "oldest",
        "slack",
        "TTFT p50",
        "TTFT p99",
        "stall p99",
    )
    for one in state.classes:
        queues = [queue for queue in state.queues if queue.slo_class == one.slo_class]
        rates = one.rates
        table.add_row(
            one.slo_class,
            f"{rates.offered:.1f}",
            f"{rates.admitted:.1f}",
            f"{rates.rejected:.1f}",
            f"{rates.met:.1f}",
            str(max((queue.level for queue in queues), default=0)),
            f"{rates.output_tokens:,.0f}",
            str(sum(queue.waiting for queue in queues)),
            _of(max, [queue.age_s for queue in queues], "s"),
            _of(min, [queue.earliest_slack_s for queue in queues], "s"),
            _of(max, [one.ttft_p50_ms], "ms"),
            _of(max, [one.ttft_p99_ms], "ms"),
            _of(max, [one.stall_p99_ms], "ms"),
        )
    return table


def _tenants(state: State) -> Table:
    table = _table(
        "Tenants, since the start",
        "tenant",
        "class",
        "offered",
        "admitted",
        "deferred",
        "refused",
        "live",
        "met",
        "met of admitted",
        "met of offered",
        "work met",
        names=2,
    )
    rows = sorted(state.tenants, key=lambda one: -one.offered)
    for one in rows[:ROWS]:
        table.add_row(
            one.tenant,
            one.slo_class,
            str(one.offered),
            str(one.admitted),
            str(one.deferred),
            str(one.refused),
            str(one.live),
            str(one.met),
            _share(one.met, one.admitted),
            _share(one.met, one.offered),
            f"{one.met_work_s:,.1f} s",
        )
    if len(rows) > ROWS:
        table.caption = f"and {len(rows) - ROWS} more"
    return table


def _replicas(state: State) -> Table:
    table = _table(
        "Replicas",
        "replica",
        "model",
        "pool",
        "prefill sent",
        "decodes",
        "KV reserved",
        "last report",
        names=3,
    )
    for one in state.replicas:
        table.add_row(
            one.replica,
            one.model,
            one.pool,
            f"{one.pending_prefill_s * 1_000:,.0f} ms",
            str(one.decodes),
            _share(one.kv_blocks_reserved, one.kv_blocks_total),
            _of(max, [one.report_age_s], "s ago"),
        )
    return table


def _of(choose: Callable[[list[float]], float], values: list[float | None], unit: str) -> str:
    """Return the chosen of the known values, or a dash: unknown is not zero."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    value = choose(known)
    return f"{value:,.0f} {unit}" if unit == "ms" else f"{value:,.1f} {unit}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
