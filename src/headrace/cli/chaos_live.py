"""A chaos scenario against the live gateway over its emulated fleet: real HTTP, callers who count.

Expectations are the simulator's, and look at an account that is made of what the callers saw, of what the
scaler's decision log says, and of what the actuator has. Beside them must hold that each answer has as
many tokens as it says it has, that the journal replays, and that the gateway recorded what was seen.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import uvloop
from msgspec import Struct
from msgspec.structs import replace

from headrace.adapters.journal.ring import segments
from headrace.cli.chaos_fleet import Fleet
from headrace.cli.chaos_havoc import Havoc
from headrace.cli.live import BrokenError, StoppedError, named, settings_of, target_of
from headrace.cli.replay_setup import by_deployment
from headrace.config.schema import Settings
from headrace.gateway.auth import minted
from headrace.gateway.clock import LoopClock, MonotonicClock
from headrace.gateway.server import Gateway, listen
from headrace.load.caller import Answer
from headrace.load.judge import SERVER, offered
from headrace.load.lag import LIMIT_NS, LoopLag
from headrace.load.openloop import Ask, Target, offer
from headrace.load.replay import Replay
from headrace.model.effect import Concluded
from headrace.model.engine import Usage
from headrace.model.ids import RequestId, TenantId
from headrace.model.scaling import ScaleRecord
from headrace.model.slo import Outcome
from headrace.plane.journal import JournalError, Verified, verify
from headrace.report.decisions import ScaleLine, read, scale_record
from headrace.sim.chaos import Chaos
from headrace.sim.chaos_run import Ran, injected
from headrace.sim.chaos_watch import Watch
from headrace.sim.expect import Account, judge
from headrace.sim.expect import Fleet as Held
from headrace.sim.faults import Restart
from headrace.sim.scenario import Scenario, rows_of
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_MS, DurationNs, InstantNs, Tokens, ceil_div

_HOST = "127.0.0.1"
_MS_PER_S = 1_000


class Steady(LoopClock):
    """The time of a whole run: a gateway that comes back finds it, and does not set it."""

    def go_on_from(self, instant: InstantNs) -> None:
        """Go on as ever: the gateway before it read the same clock."""


class Fast(Steady, MonotonicClock):
    """The machine's time, so many times as fast for gateway, fleet and callers alike.

    What this machine itself takes counts as many times over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, speed: int) -> None:
        """Go so many times as fast as `loop`."""
        super().__init__(loop)
        self._machine, self._speed = loop, speed

    def now(self) -> InstantNs:
        """Return the machine's monotonic time, multiplied."""
        return InstantNs(super().now() * self._speed)

    def arm(self, when: InstantNs, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Have the loop call at `when`, rounded up to the whole milliseconds that it knows."""
        left = max(0, when - self.now())
        ms = ceil_div(left, NS_PER_MS * self._speed)
        return self._machine.call_later(ms / _MS_PER_S, callback)


class Front(Protocol):
    """How callers reach a gateway."""

    @property
    def ask(self) -> Ask | None:
        """What asks once; None: whatever asks over the network."""
        ...

    def open(self, gateway: Gateway, accepting: Callable[[], None]) -> None:
        """Have a gateway serve, in place of a killed one if there was one, and tell when it does."""
        ...

    async def over(self) -> None:
        """Return, or raise, once the gateway has ended though nobody killed it."""
        ...

    async def close(self, gateway: Gateway) -> None:
        """Have it end."""
        ...


class Loopback:
    """Callers come through a socket of this machine, which outlives the gateway."""

    ask: Ask | None = None

    def __init__(self, sock: socket.socket) -> None:
        """Serve on a listening socket."""
        self._sock = sock
        self._serving: asyncio.Task[bool] | None = None
        self._past: list[asyncio.Task[bool]] = []

    def open(self, gateway: Gateway, accepting: Callable[[], None]) -> None:
        """Serve in real HTTP."""
        if self._serving is not None:
            self._past.append(self._serving)
        serving = gateway.serve(self._sock.dup(), accepting=accepting)
        self._serving = asyncio.get_running_loop().create_task(serving)

    async def over(self) -> None:
        """Raise once the gateway has ended."""
        while (serving := self._serving) is not None:
            well = await asyncio.shield(serving)
            if serving is self._serving:  # else it was killed
                if well:
                    raise StoppedError("stopped before everything was answered")
                raise BrokenError("the gateway was stopped by a bug of its own; see above")

    async def close(self, gateway: Gateway) -> None:
        """Wait for its end."""
        gateway.stop()
        if self._serving is not None:
            await asyncio.wait([self._serving, *self._past])


class Counted(Struct, frozen=True, kw_only=True):
    """What the callers of a live run counted, beside what was expected of it."""

    requests: int
    whole: int
    """Answers that came to their end."""
    tokens: int
    """That they had, counted one by one."""
    loop_lag_p99_ns: DurationNs
    """In the time of the run."""

    @property
    def valid(self) -> bool:
        """Whether this machine kept up: if not, what fails may be its fault, and what holds does so."""
        return self.loop_lag_p99_ns <= LIMIT_NS


class LiveRan(Struct, frozen=True, kw_only=True):
    """One live run."""

    ran: Ran
    counted: Counted


def run_chaos_live(
    chaos: Chaos, seed: int, *, speed: int = 1, told: Callable[[int, Answer], None]
) -> LiveRan:
    """Run a scenario in real time, or so many times as fast; `told` hears of each answer.

    Raises StoppedError and BrokenError.
    """
    rows = named(chaos, rows_of(chaos, seed))
    with (
        TemporaryDirectory(prefix="headrace-chaos-") as folder,
        listen(_HOST, 0) as sock,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):

        async def main() -> LiveRan:
            clock = Fast(asyncio.get_running_loop(), speed)
            live = Live(chaos, seed, rows, clock, Loopback(sock), Path(folder))
            return await live.run(sock.getsockname()[1], speed=speed, told=told)

        return runner.run(main())


class Live:
    """One run: a scenario, a clock and a way for callers to come in."""

    def __init__(
        self,
        chaos: Chaos,
        seed: int,
        rows: Sequence[TraceRow],
        clock: LoopClock,
        front: Front,
        folder: Path,
    ) -> None:
        """Lay it all out; `folder` gets journal and decision log."""
        self.chaos, self.seed, self.rows = chaos, seed, rows
        self.clock, self.front = clock, front
        self.keys = {TenantId(spec.name): minted() for spec in chaos.deployment.tenants}
        self._journal, self._log = folder / "journal", folder / "decisions.jsonl"
        settings = replace(
            settings_of(chaos, seed, self.keys, self._journal), decision_log=str(self._log)
        )
        self.watch = Watch()
        self.fleet = Fleet(settings, clock, self.watch, _real(settings, chaos))
        self.havoc = Havoc(chaos, seed, self.fleet, self._restart)
        self._accepts = asyncio.Event()

    async def run(self, port: int, *, speed: int, told: Callable[[int, Answer], None]) -> LiveRan:
        """Offer the trace, have it go wrong, and judge."""
        target = target_of(self.chaos, self.seed, self.keys, port)
        replay = Replay(self.rows, by_deployment(self.chaos.deployment), target.model)

        def answered(index: int, answer: Answer) -> None:
            replay.answered(index, answer)
            told(index, answer)

        lag = LoopLag()
        self._open()
        try:
            await self._offered(target, answered, speed)
            end = self.fleet.now
            self.fleet.look()
            held = list(self.watch.fleet)
        finally:
            lag.stop()
            await self.front.close(self.fleet.gateway)
        return self._judged(replay, end, held, DurationNs(lag.p99_ns() * speed))

    async def _offered(
        self, target: Target, answered: Callable[[int, Answer], None], speed: int
    ) -> None:
        """Offer all of it, once it is served; raise if that ends before."""
        loop, clock = asyncio.get_running_loop(), self.clock

        async def offering() -> None:
            await self._accepts.wait()
            self.fleet.began = clock.now()
            self.fleet.look()
            self.havoc.begin()
            ask = self.front.ask
            await offer(self.rows, target, answered, clock=clock.now, ask_once=ask, speed=speed)

        tasks = loop.create_task(offering()), loop.create_task(self.front.over())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            task.result()

    def _restart(self) -> None:
        self.fleet.kill()
        self.watch.tell("the gateway was killed, and is back", self.fleet.now)
        self._open()

    def _open(self) -> None:
        def accepting() -> None:
            self._accepts.set()
            self.fleet.look()

        self.front.open(self.fleet.begin(), accepting)

    def _judged(
        self, replay: Replay, end: InstantNs, held: list[Held], lag_ns: DurationNs
    ) -> LiveRan:
        rows = {index: seen(row, replay.answers[index]) for index, row in replay.ended.items()}
        judged = by_deployment(self.chaos.deployment)
        account = Account(
            offered=[
                offered(RequestId(nth + 1), row, judged(row)) for nth, row in enumerate(self.rows)
            ],
            rows=list(rows.values()),
            decisions=[replace(one, at=self._instant(one.at)) for one in _scaled(self._log)],
            fleet=held,
            end=end,
        )
        happened = [*injected(self.chaos.faults), *self.watch.happened]
        answers = list(replay.answers.values())
        ran = Ran(
            scenario=self.chaos.name,
            seed=self.seed,
            broken=self._broken(answers),
            happened=tuple(sorted(happened, key=lambda one: one.at)),
            verdicts=judge(self.chaos.expect, account),
        )
        counted = Counted(
            requests=len(answers),
            whole=sum(map(_whole, answers)),
            tokens=sum(one.words for one in answers),
            loop_lag_p99_ns=lag_ns,
        )
        return LiveRan(ran=ran, counted=counted)

    def _instant(self, at: InstantNs) -> InstantNs:
        return InstantNs(max(0, at - (self.fleet.began or 0)))

    def _broken(self, answers: Sequence[Answer]) -> str | None:
        """Return what does not hold of any run, if something does not."""
        wrong = [one for one in answers if _whole(one) and one.words != one.output_tokens]
        if wrong:
            first = wrong[0]
            return f"{len(wrong)} answers have other tokens than they say: {first.words} of {first.output_tokens}"
        recorded = sum(row.outcome is Outcome.SUCCESS for row in self.fleet.rows)
        whole = sum(map(_whole, answers))
        killed = any(isinstance(one, Restart) for one in self.chaos.faults)
        if recorded != whole and not killed:  # what a kill cuts may be over on one side alone
            return f"{recorded} answers are recorded as whole, {whole} came"
        try:
            found = verify(segments(self._journal))
        except JournalError as error:
            return f"the journal cannot be read: {error}"
        if not isinstance(found, Verified):
            return f"the journal does not replay: record {found.index} ({found.event}): {found.why}"
        return None


def seen(row: Concluded, answer: Answer) -> Concluded:
    """Return a request's row with the tokens that its caller counted.

    It is lost if those are not all, if its replica failed before the first, or if the connection ended
    without a word.
    """
    usage = Usage(
        input_tokens=row.entry.input_tokens,
        cached_tokens=answer.cached_tokens or Tokens(0),
        output_tokens=Tokens(answer.words),
    )
    short = row.outcome is Outcome.SUCCESS and answer.words != answer.output_tokens
    silent = not answer.status and answer.failure is not None
    if short or silent or answer.status == HTTPStatus.BAD_GATEWAY:
        return replace(row, usage=usage, admitted=True, replica=SERVER, outcome=Outcome.ERROR)
    return replace(row, usage=usage)


def _whole(answer: Answer) -> bool:
    return answer.complete and answer.failure is None


def _scaled(log: Path) -> list[ScaleRecord]:
    return [scale_record(line, line.decision) for line in read(log) if isinstance(line, ScaleLine)]


def _real(settings: Settings, scenario: Scenario) -> Settings:
    """Return what starts are emulated by: as long as they really take."""
    if scenario.starts is None:
        return settings
    pools = tuple(
        pool if pool.scaling is None
        else replace(pool, scaling=replace(pool.scaling, times=scenario.starts))
        for pool in settings.deployment.pools
    )  # fmt: skip
    return replace(settings, deployment=replace(settings.deployment, pools=pools))
