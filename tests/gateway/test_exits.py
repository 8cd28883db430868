"""Every route, every phase, every exit: one settlement, nothing left, and the caller knows.

The engine here does as it is told, so that each exit comes in the very phase; how a real engine ends
an answer is in `test_engine_exits.py`.
"""

import asyncio
import json
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import pytest
import uvicorn
from msgspec.structs import replace
from uvicorn.server import ServerState

from headrace.gateway.connection import patient
from headrace.gateway.stream import HIGH
from headrace.model.deployment import ClassSpec, TenantSpec
from headrace.model.ids import AttemptId
from headrace.model.meter import NO_STREAM
from headrace.model.slo import Outcome
from headrace.policy.catalog import PlaneConfig
from headrace.ports.clock import Clock
from headrace.ports.engine import Ending, Route
from headrace.units import InstantNs
from tests.gateway.exits import (
    SHAPES,
    Ends,
    Mode,
    Phase,
    Settlements,
    SlowCaller,
    check,
    is_begun,
    turns,
)
from tests.gateway.scenes import (
    KEYS,
    MODEL,
    Gateway,
    ObedientEngine,
    ask,
    deployment,
    reach,
    request,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class Exit(StrEnum):
    """What ends a request."""

    FINISH = "finish"
    FAILURE = "engine failure"
    CUT = "engine failure within a frame"
    LEAVES = "caller leaves"
    CANCELLED = "handler cancelled"
    STALL = "write stall"
    SLOW_BODY = "body too slow"
    EXPIRY = "deadline in the queue"
    PRESSURE = "queue pressure"
    DOWN = "replica down"
    DRAINED = "drain end"
    STOP = "shutdown"
    BROKEN = "gateway broken"


SENT_ON = tuple(phase for phase in Phase if phase not in (Phase.READING, Phase.QUEUED))
BY_ENGINE = {
    Phase.READING: "the engine has nothing of it",
    Phase.QUEUED: "the engine has nothing of it",
}


def sent_on(ends: Ends) -> dict[Phase, Ends | str]:
    return dict.fromkeys(SENT_ON, ends)


UNSEEN = Ends(rows=0)
LEFT = Ends(outcome=Outcome.CLIENT_CANCEL)
STOPPED = Ends(outcome=Outcome.CLIENT_CANCEL, aborted=True)
CLOSING = Ends(rows=0, status=503, code="server_is_overloaded")
ENDED = Ends(outcome=Outcome.ERROR, reason="shut_down", status=503, code="server_is_overloaded")
CUT_OFF = replace(ENDED, aborted=True)
FAILED = Ends(outcome=Outcome.ERROR, reason="upstream_error", status=502, code="upstream_error")
EXPIRED = Ends(outcome=Outcome.TIMEOUT, reason="expired", status=504, code="deadline_exceeded")

TABLE: dict[Exit, dict[Phase, Ends | str]] = {
    Exit.FINISH: {**BY_ENGINE, **sent_on(Ends(outcome=Outcome.SUCCESS, status=200))},
    Exit.FAILURE: {**BY_ENGINE, **sent_on(FAILED)},
    Exit.CUT: {
        **BY_ENGINE,
        **sent_on(FAILED),
        Phase.SENT: "no frame has begun",
        Phase.LAST: "the last frame was whole",
    },
    Exit.LEAVES: {Phase.READING: UNSEEN, Phase.QUEUED: LEFT, **sent_on(STOPPED)},
    Exit.CANCELLED: {Phase.READING: UNSEEN, Phase.QUEUED: LEFT, **sent_on(STOPPED)},
    Exit.STALL: {
        **dict.fromkeys(Phase, "nothing waits to be written"),
        Phase.HELD: STOPPED,
    },
    Exit.SLOW_BODY: {
        **dict.fromkeys(Phase, "the body is there"),
        Phase.READING: Ends(rows=0, status=408, code="request_timeout"),
    },
    Exit.EXPIRY: {
        Phase.READING: "its deadline counts from when it was read",
        Phase.QUEUED: EXPIRED,
        **dict.fromkeys(SENT_ON, "it left the queue"),
    },
    Exit.PRESSURE: {
        Phase.READING: "it is in no queue yet",
        Phase.QUEUED: Ends(
            outcome=Outcome.ERROR,
            reason="queue_pressure",
            status=503,
            code="server_is_overloaded",
        ),
        **dict.fromkeys(SENT_ON, "it left the queue"),
    },
    Exit.DOWN: {
        Phase.READING: Ends(reason="no_ready_replica", status=503, code="no_ready_replica"),
        Phase.QUEUED: EXPIRED,  # it waits for another replica as long as its deadline lets it
        # The engine itself says that it is gone: nobody is left to be told to stop.
        **sent_on(
            Ends(outcome=Outcome.ERROR, reason="replica_lost", status=502, code="upstream_error")
        ),
    },
    Exit.DRAINED: {Phase.READING: CLOSING, Phase.QUEUED: ENDED, **sent_on(CUT_OFF)},
    Exit.STOP: {Phase.READING: CLOSING, Phase.QUEUED: ENDED, **sent_on(CUT_OFF)},
    # A plane that failed is never asked again: nothing is settled, and the process ends.
    Exit.BROKEN: dict.fromkeys(Phase, Ends(rows=0, status=500, code="internal_error")),
}
"""How a request ends, or why it cannot end so in that phase."""

NO_MODE = {
    (Phase.HELD, Mode.WHOLE): "an answer in one piece is taken as it comes",
}
"""Phases that a way of answering does not have."""

CASES = [
    pytest.param(exit_, phase, route, mode, ends, id=f"{exit_}-{phase}-{route}-{mode}")
    for exit_, by_phase in TABLE.items()
    for phase, ends in by_phase.items()
    for route, mode in SHAPES
    if isinstance(ends, Ends) and (phase, mode) not in NO_MODE
]


class TimedEngine(ObedientEngine):
    """Remembers when it was told to stop."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.stops: list[tuple[AttemptId, InstantNs]] = []

    def abort(self, attempt: AttemptId) -> None:
        super().abort(attempt)
        self.stops.append((attempt, self._clock.now()))


def config(mode: Mode) -> PlaneConfig:
    """Return a deployment whose queue takes one request of all tenants."""
    small = deployment(tenants=(TenantSpec(name="free"), TenantSpec(name="other", weight=1_000)))
    spec = ClassSpec(name="interactive", queue=1, early_200=mode is Mode.EARLY)
    return PlaneConfig(
        models=small.models, pools=small.pools, classes=(spec,), tenants=small.tenants
    )


class Scene:
    """One request, brought to a phase."""

    def __init__(self, route: Route, mode: Mode) -> None:
        self.gateway = Gateway(lambda clock: [TimedEngine(clock)], config=config(mode))
        (engine,) = self.gateway.engines
        assert isinstance(engine, TimedEngine)
        self.engine, self.driver, self.mode = engine, self.gateway.driver, mode
        self.route = route
        self.asked = 1
        self.mine = 0
        self.sent = b""
        """What the engine said."""

    async def reach(self, phase: Phase) -> None:
        """Bring the request to a phase."""
        if phase is Phase.QUEUED:
            self.block()
        self.caller = SlowCaller(
            self.gateway, self.route, self.mode, in_parts=phase is Phase.READING
        )
        self.mine = self.driver._requests + 1
        await reach(self.gateway.clock, 10)
        if phase in (Phase.READING, Phase.QUEUED, Phase.SENT):
            return
        self.say("event: x\ndata: {}\n\n", 0)
        if phase is Phase.HEAD:
            return
        self.say("data: {}\n\n", 1)
        if phase is Phase.FIRST:
            return
        await reach(self.gateway.clock, 150)
        self.say("data: {}\n\n", 1)
        if phase is Phase.HELD:
            await turns()
            self.caller.taking.clear()
            self.say("data: {}\n\n", 1)
            await turns()
            self.say(f'data: "{"x" * HIGH}"\n\n', 1)
            assert self.engine.held == [(self.attempt, True)]
        if phase is Phase.LAST:
            self.say("data: {}\n\n", 0)

    def say(self, text: str, tokens: int) -> None:
        if tokens:
            self.engine._meters[self.attempt].note(self.gateway.clock.now(), tokens)
        self.engine.tell.produced(self.attempt, text.encode())
        self.sent += text.encode()

    @property
    def attempt(self) -> AttemptId:
        return self.engine.calls[-1].dispatch.attempt

    def block(self) -> None:
        """Have another's long prompt keep everybody waiting."""
        self.asked += 1
        blocker = request(self.driver.mint(), tokens=20_000)
        self.driver.offer(blocker, ask())
        self.blocker = blocker.id

    def end(self, *, whole: bool) -> None:
        ending = Ending(outcome=Outcome.ERROR, usage=None, timing=NO_STREAM, whole=whole)
        self.engine.tell.ended(self.attempt, ending)

    def push(self) -> None:
        self.asked += 1
        other = request(self.driver.mint(), "other")
        assert not self.driver.offer(other, ask()).ended

    def lose(self) -> None:
        self.driver.down(self.engine)

    def fail(self) -> None:
        def impossible(*_: object, **__: object) -> None:
            raise AssertionError("a state that cannot be")

        self.driver._handle = impossible  # type: ignore[assignment]
        self.driver.offer(request(self.driver.mint()), ask())

    def stall(self) -> None:
        self.caller.leave()  # the connection sees to it: see below

    def act(self, exit_: Exit) -> None:
        """End it."""
        acts: dict[Exit, Callable[[], object]] = {
            Exit.FINISH: self.engine_ends,
            Exit.FAILURE: lambda: self.end(whole=True),
            Exit.CUT: lambda: self.end(whole=False),
            Exit.LEAVES: self.caller.leave,
            Exit.CANCELLED: self.caller.task.cancel,
            Exit.STALL: self.stall,
            Exit.SLOW_BODY: lambda: None,
            Exit.EXPIRY: lambda: None,
            Exit.PRESSURE: self.push,
            Exit.DOWN: self.lose,
            Exit.DRAINED: self.driver.end_all,
            Exit.STOP: self.driver.stop,
            Exit.BROKEN: self.fail,
        }
        acts[exit_]()

    def engine_ends(self) -> None:
        self.engine.end(self.attempt)


@pytest.mark.parametrize(("exit_", "phase", "route", "mode", "ends"), CASES)
async def test_every_exit_settles_once_and_tells_its_caller(
    exit_: Exit,
    phase: Phase,
    route: Route,
    mode: Mode,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled = Settlements(monkeypatch)
    scene = Scene(route, mode)
    await scene.reach(phase)
    await turns()
    gateway, engine, caller = scene.gateway, scene.engine, scene.caller
    calls, left_at = len(engine.calls), gateway.clock.now()
    scene.act(exit_)
    await turns()
    if ends.aborted:
        assert engine.stops == [(scene.attempt, left_at)], "at once: no time may pass"
    if phase is Phase.READING and exit_ in (Exit.DOWN, Exit.DRAINED, Exit.STOP, Exit.BROKEN):
        caller.send_rest()
    caller.taking.set()
    await asyncio.wait({caller.task}, timeout=600)
    assert caller.task.done()

    begun = is_begun(phase, mode) or (mode is Mode.EARLY and exit_ is Exit.DOWN)
    check_told(scene, ends, exit_, phase, begun=begun)
    mine = () if phase in (Phase.READING, Phase.QUEUED) else (scene.attempt,)
    assert [one for one in engine.aborted if one in mine] == (list(mine) if ends.aborted else [])
    assert len(engine.calls) == calls, "nothing is sent in vain"
    if phase is Phase.QUEUED and exit_ is not Exit.DOWN:
        scene.driver.leave(scene.blocker)
    if exit_ is Exit.PRESSURE:
        scene.driver.leave(engine.calls[-1].request.id)
    if exit_ is Exit.BROKEN:
        assert engine.closed
    else:
        gateway.finish()
    counted = exit_ is not Exit.BROKEN and ends != UNSEEN
    check(gateway, settled, scene.mine, ends, asked=scene.asked, decided=counted)


def check_told(scene: Scene, ends: Ends, exit_: Exit, phase: Phase, *, begun: bool) -> None:
    """Check what the caller was told."""
    caller = scene.caller
    assert caller.task.cancelled() is (exit_ is Exit.CANCELLED)
    if ends.status is None:
        assert caller.status == (200 if begun else None)
        assert scene.sent.startswith(caller.content) or exit_ is not Exit.CANCELLED
        return
    assert caller.status == (200 if begun else ends.status)
    assert caller.is_cut is (begun and exit_ is Exit.CUT)
    if caller.is_cut:
        assert caller.content == scene.sent
        return
    if ends.code is None:
        assert caller.content == scene.sent
    else:
        assert caller.told == ends.code
        assert caller.content.startswith(scene.sent if begun else b"{")
        if phase is not Phase.READING:
            caller.check_failed(sent=phase is not Phase.QUEUED)


async def test_the_table_has_every_phase_of_every_exit() -> None:
    assert set(TABLE) == set(Exit)
    assert all(set(by_phase) == set(Phase) for by_phase in TABLE.values())


class FakeTransport(asyncio.Transport):
    """A socket whose other side reads nothing more once it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed_at: float | None = None
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed_at is not None

    def close(self) -> None:
        if self.closed_at is None:
            loop = asyncio.get_running_loop()
            self.closed_at = loop.time()
            loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@pytest.mark.parametrize("route", [route for route in Route if route is not Route.EMBEDDINGS])
async def test_a_caller_that_stops_reading_is_gone_after_its_time(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = Settlements(monkeypatch)
    scene = Scene(route, Mode.EVENTS)
    loop, engine = asyncio.get_running_loop(), scene.engine
    http = patient(10.0, 7.0)
    settings = uvicorn.Config(scene.gateway.app, http=http, lifespan="off", log_config=None)
    settings.load()
    wire, connection = FakeTransport(), http(settings, ServerState(), {})
    wire.protocol = connection
    connection.connection_made(wire)
    body = json.dumps(BODY | {"prompt": "x", "input": "x"}).encode()
    connection.data_received(
        f"POST {route} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {KEYS['free']}\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    scene.mine = 1
    await reach(scene.gateway.clock, 10)
    scene.say("data: {}\n\n", 1)
    await turns()
    assert wire.written.startswith(b"HTTP/1.1 200")
    connection.pause_writing()
    stalled_at = loop.time()
    scene.say("data: {}\n\n", 1)
    await turns()
    scene.say(f'data: "{"x" * HIGH}"\n\n', 1)
    assert engine.held == [(scene.attempt, True)]
    await reach(scene.gateway.clock, (stalled_at + 6.9) * 1_000)
    assert not engine.stops
    await reach(scene.gateway.clock, (stalled_at + 7.1) * 1_000)
    assert wire.closed_at == pytest.approx(stalled_at + 7.0)
    assert [attempt for attempt, _ in engine.stops] == [scene.attempt]
    assert engine.stops[0][1] == pytest.approx((stalled_at + 7.0) * 1e9)
    scene.gateway.finish()
    check(scene.gateway, settled, 1, STOPPED, asked=1)


BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello there"}],
    "max_tokens": 500,
    "stream": True,
}
