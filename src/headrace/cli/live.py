"""A gateway over emulated replicas and its callers in one process: the demo, parity, benchmarks.

Callers go through real HTTP over loopback; everything lasts as long as it does.
"""

import asyncio
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path

import uvloop
from msgspec import Struct
from msgspec.structs import replace

from headrace.config.schema import EmulatorSpec, JournalSpec, KeySpec, ServerSpec, Settings
from headrace.gateway.auth import key_hash, minted
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.collector import Collector
from headrace.gateway.providing import give
from headrace.gateway.server import Gateway, listen
from headrace.load.caller import Answer, Place
from headrace.load.lag import LoopLag
from headrace.load.openloop import Target, offer
from headrace.model.effect import Concluded
from headrace.model.ids import ModelName, RequestId, TenantId
from headrace.report.run import RunRecord
from headrace.sim.experiment import offered_rows
from headrace.sim.scenario import Scenario
from headrace.trace.row import TraceRow, trace_hash
from headrace.units import DurationNs, InstantNs, ms

_HOST = "127.0.0.1"


class Live(Struct, frozen=True, kw_only=True):
    """What a live run left."""

    run: RunRecord
    """As the gateway recorded it, its requests numbered as the trace numbers them."""
    answers: dict[int, Answer]
    """As the callers saw it, by index of the row."""
    loop_lag_p99_ns: DurationNs


class StoppedError(Exception):
    """A signal ended the gateway before its callers were done."""


class BrokenError(Exception):
    """A bug of its own ended the gateway."""


def named(scenario: Scenario, rows: Iterable[TraceRow]) -> list[TraceRow]:
    """Return rows that all name the tenant and model which the simulator would give them."""
    tenant = TenantId(scenario.deployment.tenants[0].name)
    model = ModelName(scenario.deployment.models[0].name)
    return [replace(row, tenant=row.tenant or tenant, model=row.model or model) for row in rows]


def run_live(  # noqa: PLR0913 - what is served, offered and told
    scenario: Scenario,
    seed: int,
    rows: Sequence[TraceRow],
    *,
    journal: Path | None = None,
    answered: Callable[[int, Answer], None] = lambda _index, _answer: None,
    prepare: Callable[[Gateway], None] = lambda _gateway: None,
    adjust: Callable[[Settings], Settings] = lambda settings: settings,
) -> Live:
    """Serve a scenario's deployment and offer it rows in real time.

    `adjust` has the last word on the settings, `prepare` sees the gateway before it serves. Raises
    StoppedError and BrokenError.
    """
    answers: dict[int, Answer] = {}

    def note(index: int, answer: Answer) -> None:
        answers[index] = answer
        answered(index, answer)

    keys = {TenantId(spec.name): minted() for spec in scenario.deployment.tenants}
    settings = adjust(settings_of(scenario, seed, keys, journal))
    with (
        listen(_HOST, 0) as sock,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        target = target_of(scenario, seed, keys, sock.getsockname()[1])

        async def offering(clock: MonotonicClock) -> None:
            await offer(rows, target, note, clock=clock.now)

        ended, lag_ns = runner.run(_both(settings, sock, offering, prepare))
    return Live(run=recorded(scenario, seed, rows, ended), answers=answers, loop_lag_p99_ns=lag_ns)


async def _both(
    settings: Settings,
    sock: socket.socket,
    offering: Callable[[MonotonicClock], Coroutine[None, None, None]],
    prepare: Callable[[Gateway], None],
) -> tuple[list[Concluded], DurationNs]:
    """Serve and call; return what the gateway concluded, and the loop's lag meanwhile."""
    loop = asyncio.get_running_loop()
    clock = MonotonicClock(loop)
    ended: list[Concluded] = []
    gateway = Gateway(settings, clock, concluded=ended.append)
    give(settings, clock, gateway)
    prepare(gateway)
    serving = loop.create_task(gateway.serve(sock))
    collector, lag = Collector(loop), LoopLag(clock.now)
    calling = loop.create_task(offering(clock))
    try:
        await asyncio.wait([serving, calling], return_when=asyncio.FIRST_COMPLETED)
        if not calling.done() and serving.result():
            raise StoppedError("stopped before everything was answered")
        if calling.done():
            calling.result()
    finally:
        lag.stop()
        collector.stop()
        calling.cancel()
        gateway.stop()
        await asyncio.wait([serving, calling])
    if not serving.result():
        raise BrokenError("the gateway was stopped by a bug of its own; see above")
    return ended, lag.p99_ns()


def target_of(scenario: Scenario, seed: int, keys: dict[TenantId, str], port: int) -> Target:
    """Return how the rows of a scenario are asked for on this machine, their lengths told."""
    deployment = scenario.deployment
    gaps = {spec.name: ms(spec.itl_ms) for spec in deployment.classes}
    first = deployment.classes[0].name
    return Target(
        place=Place(host=_HOST, port=port),
        model=deployment.models[0].name,
        keys=keys,
        gap_ns=lambda row: gaps[row.slo_class or first],
        trusted=True,
        salt=str(seed),
    )


def settings_of(
    scenario: Scenario, seed: int, keys: dict[TenantId, str], journal: Path | None
) -> Settings:
    """Return what a scenario is served by: its deployment, emulated, a key for each tenant."""
    return Settings(
        deployment=scenario.deployment,
        keys=tuple(
            KeySpec(name=tenant, tenant=tenant, hash=key_hash(key)) for tenant, key in keys.items()
        ),
        emulator=EmulatorSpec(
            seed=seed,
            noise_percent=scenario.noise_percent,
            batching=scenario.batching,
            preemption=scenario.preemption,
        ),
        server=ServerSpec(port=0, trusted_replay=True, drain_s=5.0),
        journal=JournalSpec(path=None if journal is None else str(journal)),
    )


def recorded(
    scenario: Scenario, seed: int, rows: Sequence[TraceRow], ended: Sequence[Concluded]
) -> RunRecord:
    """Return a live run as a record, its requests numbered as the trace numbers them."""
    numbered = {row.request: row for row in _numbered(rows, ended)}
    begin = min((row.entry.arrived_at for row in ended), default=0)
    return RunRecord(
        label="live",
        scenario=scenario.name,
        seed=seed,
        trace_hash=trace_hash(rows),
        span_ns=DurationNs(rows[-1].at - rows[0].at if rows else 0),
        end_ns=InstantNs(max((row.ended_at for row in ended), default=0) - begin),
        offered=offered_rows(scenario, rows, numbered),
        rows=list(numbered.values()),
        slos=scenario.deployment.slos,
    )


def _numbered(rows: Sequence[TraceRow], ended: Sequence[Concluded]) -> Iterator[Concluded]:
    """Yield the rows with the trace's numbers: requests that are due at once may arrive swapped.

    Requests of one tenant and one prompt length are alike; among them the order of arrival counts.
    """
    places: dict[tuple[TenantId, int], deque[int]] = defaultdict(deque)
    for nth, row in enumerate(rows, start=1):
        assert row.tenant is not None, "a live trace names its tenants"
        places[row.tenant, row.input_tokens].append(nth)
    for one in sorted(ended, key=lambda one: one.request):
        number = places[one.tenant, one.entry.input_tokens].popleft()
        yield replace(one, request=RequestId(number))
