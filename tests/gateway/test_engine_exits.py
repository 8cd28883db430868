"""How an engine behind HTTP may end an answer, in every phase and on every route: one settlement.

The whole gateway over a real engine's adapter and a server on loopback, in virtual time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import NamedTuple

import pytest
import pytest_asyncio

from headrace.adapters.engines.remote import Patience, RemoteEngine
from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.sse import FRAME_MAX
from headrace.gateway.stream import HIGH
from headrace.model.deployment import ClassSpec, TenantSpec
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.slo import Outcome
from headrace.policy.catalog import PlaneConfig
from headrace.ports.engine import Route
from headrace.units import NS_PER_S, DurationNs
from tests.adapters.upstream.scenes import (
    EVENTS,
    LAST,
    OK,
    UNHEALTHY,
    Peer,
    Scene,
    chunk,
    is_look,
    look,
)
from tests.gateway.exits import SHAPES, Ends, Mode, Phase, Settlements, SlowCaller, check, turns
from tests.gateway.scenes import Gateway, deployment, reach

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

FIRST_BYTE_S, GAP_S = 20, 10
_READ = 400_000


class Words(NamedTuple):
    """What a route's events look like."""

    word: bytes
    end: bytes
    shown: bytes
    """Of the end, what a caller sees that did not ask for usage."""
    error: bytes
    whole: bytes
    """A whole answer."""
    full: bytes = b'data: {"error":{"message":"later","code":503}}\n\n' + b"data: [DONE]\n\n"
    """What a stream is told when the engine takes no more."""


def named(name: str, rest: str = "") -> bytes:
    return f'event: {name}\ndata: {{"type":"{name}"{rest}}}\n\n'.encode()


_TOLD = '"usage":{"prompt_tokens":7,"completion_tokens":2}'
_DONE = b"data: [DONE]\n\n"
_FAULT = b'data: {"error":{"message":"out of memory","code":"theirs"}}\n\n'
_COUNTED = '"usage":{"input_tokens":7,"output_tokens":2}'
_ALL = f',"response":{{{_COUNTED}}}'
WORDS: dict[Route, Words] = {
    Route.CHAT: Words(
        word=b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n',
        end=b'data: {"choices":[],%s}\n\n' % _TOLD.encode() + _DONE,
        shown=_DONE,
        error=_FAULT,
        whole=b'{"choices":[],%s}' % _TOLD.encode(),
    ),
    Route.COMPLETIONS: Words(
        word=b'data: {"choices":[{"text":"word"}]}\n\n',
        end=b'data: {"choices":[],%s}\n\n' % _TOLD.encode() + _DONE,
        shown=_DONE,
        error=_FAULT,
        whole=b'{"choices":[],%s}' % _TOLD.encode(),
    ),
    Route.RESPONSES: Words(
        word=named("response.output_text.delta", ',"delta":"word"'),
        end=named("response.completed", _ALL),
        shown=named("response.completed", _ALL),
        error=named("response.failed", ',"response":{"error":{"code":"theirs"}}'),
        full=named("error", ',"code":"503"'),
        whole=b'{"output":[],%s}' % _COUNTED.encode(),
    ),
    Route.MESSAGES: Words(
        word=named("content_block_delta", ',"delta":{"type":"text_delta","text":"word"}'),
        end=named("message_stop"),
        shown=named("message_stop"),
        error=named("error", ',"error":{"type":"api_error","code":"theirs"}'),
        full=named("error", ',"error":{"type":"ServiceUnavailableError"}'),
        whole=b'{"content":[],%s}' % _COUNTED.encode(),
    ),
    Route.EMBEDDINGS: Words(
        word=b"",
        end=b"",
        shown=b"",
        error=b"",
        whole=b'{"data":[],"usage":{"prompt_tokens":7,"total_tokens":7}}',
    ),
}


class Exit(StrEnum):
    """What ends an answer."""

    FINISH = "finish"
    REFUSED_400 = "400"
    REFUSED_404 = "404"
    REFUSED_413 = "413"
    REFUSED_422 = "422"
    KEY_401 = "401"
    LIMIT_429 = "429"
    BROKEN_500 = "500"
    UNSERVED = "404 of our model"
    NOTHING = "200 with nothing"
    LOADED_503 = "503"
    ERROR_EVENT = "error event"
    FULL_EVENT = "event of a full engine"
    CLOSES = "engine closes"
    RESETS = "engine resets"
    HALF = "engine dies within a frame"
    LARGE_HALF = "engine dies within a large frame"
    SILENCE = "engine silent"
    DOWN = "engine down by its health"
    LEAVES = "caller leaves"
    CANCELLED = "handler cancelled"
    STOP = "shutdown"


PHASES = tuple(phase for phase in Phase if phase not in (Phase.READING, Phase.QUEUED))
PASSED = {Exit.REFUSED_400, Exit.REFUSED_404, Exit.REFUSED_413, Exit.REFUSED_422}
STATUSES = {*PASSED, Exit.KEY_401, Exit.LIMIT_429, Exit.BROKEN_500, Exit.LOADED_503}
HIDDEN = STATUSES - PASSED

DONE = Ends(outcome=Outcome.SUCCESS, status=200)
FAILED = Ends(outcome=Outcome.ERROR, reason="upstream_error", status=502, code="upstream_error")
FULL = Ends(outcome=Outcome.ERROR, reason="upstream_error", status=503, code="server_is_overloaded")
LOST = Ends(outcome=Outcome.ERROR, reason="replica_lost", status=502, code="upstream_error")
LEFT = Ends(outcome=Outcome.CLIENT_CANCEL, aborted=True)
STOPPED = Ends(
    outcome=Outcome.ERROR,
    reason="shut_down",
    status=503,
    code="server_is_overloaded",
    aborted=True,
)
ONE_STATUS: dict[Phase, Ends | str] = dict.fromkeys(PHASES, "an answer has one status")
ENDED = "its end mark was seen: the answer is complete, whatever follows"


def always(ends: Ends) -> dict[Phase, Ends | str]:
    return dict.fromkeys(PHASES, ends)


TABLE: dict[Exit, dict[Phase, Ends | str]] = {
    Exit.FINISH: always(DONE),
    **{
        exit_: {
            **ONE_STATUS,
            Phase.SENT: Ends(
                outcome=Outcome.ERROR, reason="upstream_error", status=int(exit_), code="theirs"
            ),
        }
        for exit_ in Exit
        if exit_ in PASSED
    },
    **{exit_: {**ONE_STATUS, Phase.SENT: FAILED} for exit_ in Exit if exit_ in HIDDEN},
    Exit.UNSERVED: {**ONE_STATUS, Phase.SENT: FAILED},
    Exit.NOTHING: {**ONE_STATUS, Phase.SENT: FAILED},
    Exit.LOADED_503: {**ONE_STATUS, Phase.SENT: FULL},
    Exit.FULL_EVENT: {
        **always(FAILED),
        Phase.SENT: FULL,
        Phase.HEAD: FULL,
        Phase.LAST: "what follows the end mark is not read",
    },
    Exit.ERROR_EVENT: {**always(FAILED), Phase.LAST: "what follows the end mark is not read"},
    Exit.CLOSES: {**always(FAILED), Phase.LAST: DONE},
    Exit.RESETS: {**always(FAILED), Phase.LAST: DONE},
    Exit.HALF: {**always(FAILED), Phase.SENT: "no frame before the head", Phase.LAST: ENDED},
    Exit.LARGE_HALF: {
        **dict.fromkeys(PHASES, "as within any other frame"),
        Phase.FIRST: FAILED,
        Phase.MID: FAILED,
    },
    Exit.SILENCE: {
        **always(FAILED),
        Phase.HELD: "an engine that is held back may be silent",
        Phase.LAST: DONE,
    },
    Exit.DOWN: always(LOST),
    Exit.LEAVES: always(LEFT),
    Exit.CANCELLED: always(LEFT),
    Exit.STOP: always(STOPPED),
}
"""How a request ends, or why it cannot end so in that phase."""

NO_MODE: dict[tuple[Phase | Exit, Mode], str] = {
    (Phase.FIRST, Mode.WHOLE): "an answer in one piece has no first token that shows",
    (Phase.HELD, Mode.WHOLE): "an answer in one piece is taken as it comes",
    (Phase.LAST, Mode.WHOLE): "an answer in one piece ends with its last byte",
    (Exit.ERROR_EVENT, Mode.WHOLE): "no events",
    (Exit.FULL_EVENT, Mode.WHOLE): "no events",
    (Exit.HALF, Mode.WHOLE): "no frames",
    (Exit.LARGE_HALF, Mode.WHOLE): "no frames",
}

CASES = [
    pytest.param(exit_, phase, route, mode, ends, id=f"{exit_}-{phase}-{route}-{mode}")
    for exit_, by_phase in TABLE.items()
    for phase, ends in by_phase.items()
    for route, mode in SHAPES
    if isinstance(ends, Ends) and not {(phase, mode), (exit_, mode)} & NO_MODE.keys()
]


class World:
    """A gateway, one engine behind HTTP, and one request."""

    def __init__(self, scene: Scene, route: Route, mode: Mode) -> None:
        self.scene, self.route, self.mode = scene, route, mode
        self.words = WORDS[route]
        self.healthy = True
        self.answering: Callable[[Peer], None] | None = None
        self.peer: Peer | None = None
        self.sent = b""
        """What a caller may see of what the engine said."""

    async def start(self, tenants: tuple[TenantSpec, ...] = ()) -> None:
        self.server = await self.scene.server(self.behave)
        clock = self.scene.clock
        upstream = Upstream(f"http://127.0.0.1:{self.server.port}", clock)
        self.scene.pools.append(upstream.pool)
        self.engine = RemoteEngine(
            ReplicaName("p-0"),
            PoolName("p"),
            upstream,
            clock,
            model="served",
            patience=Patience(
                first_byte_ns=DurationNs(FIRST_BYTE_S * NS_PER_S),
                gap_ns=DurationNs(GAP_S * NS_PER_S),
            ),
        )
        plain = deployment(tenants=tenants)
        spec = ClassSpec(name="interactive", early_200=self.mode is Mode.EARLY)
        config = PlaneConfig(
            models=plain.models, pools=plain.pools, classes=(spec,), tenants=plain.tenants
        )
        self.gateway = Gateway(lambda _: [self.engine], config=config)
        await self.scene.until(lambda: self.engine.is_up)

    def behave(self, peer: Peer) -> None:
        if is_look(peer.requests[-1]):
            peer.say(look(peer.requests[-1], OK if self.healthy else UNHEALTHY))
            return
        self.peer = peer
        if self.answering is not None:
            self.answering(peer)

    async def pass_ms(self, span: float) -> None:
        await reach(self.gateway.clock, self.scene.loop.time() * 1_000 + span)
        await turns(20)

    async def reach(self, phase: Phase) -> None:
        """Bring the request to a phase."""
        self.caller = SlowCaller(self.gateway, self.route, self.mode)
        await self.scene.until(lambda: self.peer is not None)
        await self.pass_ms(10)
        if phase is Phase.SENT:
            return
        if self.mode is Mode.WHOLE:
            self.say(self.head, b"")
        else:
            self.say(EVENTS, b"")
        await self.pass_ms(10)
        if phase is Phase.HEAD:
            return
        if self.mode is Mode.WHOLE:
            self.say(self.words.whole[:9], self.words.whole[:9])
            await self.pass_ms(10)
            return
        self.frame(self.words.word)
        await self.pass_ms(10)
        if phase is Phase.FIRST:
            return
        self.frame(self.words.word)
        await self.pass_ms(100)
        if phase is Phase.HELD:
            await self.hold()
        if phase is Phase.LAST:
            self.say(chunk(self.words.end), self.words.shown)
            await self.pass_ms(10)

    async def hold(self) -> None:
        """Have the caller take nothing until the engine is held back."""
        self.caller.taking.clear()
        for size in (1, HIGH, _READ, _READ):
            self.frame(self.words.word * (1 + size // len(self.words.word)))
            await self.pass_ms(10)
        (flight,) = self.engine._flights.values()
        assert flight.exchange.paused_since is not None
        assert flight.exchange.queued

    @property
    def head(self) -> bytes:
        length = len(self.words.whole)
        return (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % length
        )

    def say(self, data: bytes, shown: bytes) -> None:
        assert self.peer is not None
        self.peer.say(data)
        self.sent += shown

    def frame(self, data: bytes) -> None:
        self.say(chunk(data), data)

    # Exits ------------------------------------------------------------------------------------

    def finish(self, phase: Phase) -> None:
        if self.mode is Mode.WHOLE:
            whole = self.words.whole
            if phase is Phase.SENT:
                self.say(self.head, b"")
            self.say(whole[len(self.sent) :], whole[len(self.sent) :])
            return
        if phase is Phase.SENT:
            self.say(EVENTS, b"")
        if phase is not Phase.LAST:
            self.frame(self.words.word)
            self.say(chunk(self.words.end), self.words.shown)
        self.say(LAST, b"")

    def status(self, status: int, body: bytes = b'{"error":{"code":"theirs"}}') -> None:
        self.say(
            b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (status, len(body), body),
            b"",
        )

    def error_event(self, phase: Phase, event: bytes) -> None:
        if phase is Phase.SENT:
            self.say(EVENTS, b"")
        self.say(chunk(event) + LAST, b"")

    def die(self, how: Callable[[Peer], None]) -> None:
        """End the connection, and that of a second attempt."""
        assert self.peer is not None
        self.answering = how
        how(self.peer)

    def act(self, exit_: Exit, phase: Phase) -> None:
        if exit_ in STATUSES:
            self.status(int(exit_))
            return
        half = chunk(self.words.word)[:-9]
        large = b"data: " + b"x" * 2 * FRAME_MAX
        acts: dict[Exit, Callable[[], object]] = {
            Exit.FINISH: lambda: self.finish(phase),
            Exit.UNSERVED: lambda: self.status(404, b'{"error":"theirs: `served` is not there"}'),
            Exit.NOTHING: lambda: self.status(200, b""),
            Exit.ERROR_EVENT: lambda: self.error_event(phase, self.words.error),
            Exit.FULL_EVENT: lambda: self.error_event(phase, self.words.full),
            Exit.CLOSES: lambda: self.die(Peer.close),
            Exit.RESETS: lambda: self.die(Peer.reset),
            Exit.HALF: lambda: self.die(lambda peer: peer.close(half)),
            Exit.LARGE_HALF: lambda: self.die(lambda peer: peer.close(chunk(large))),
            Exit.SILENCE: lambda: None,
            Exit.DOWN: self.sicken,
            Exit.LEAVES: self.caller.leave,
            Exit.CANCELLED: self.caller.task.cancel,
            Exit.STOP: self.gateway.driver.stop,
        }
        acts[exit_]()

    def sicken(self) -> None:
        self.healthy = False


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    """Yield servers and what waits for them; assert that nothing of them is left."""
    made = Scene()
    yield made
    await made.assert_nothing_left()


@pytest.fixture
def world(scene: Scene, route: Route, mode: Mode) -> World:
    """Return a gateway that is not started: fixtures know no virtual time."""
    return World(scene, route, mode)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Settlements:
    """Return what counts settlements."""
    return Settlements(monkeypatch)


@pytest.mark.parametrize(("exit_", "phase", "route", "mode", "ends"), CASES)
async def test_every_end_of_an_engine_settles_once_and_reaches_its_caller(
    world: World,
    settled: Settlements,
    exit_: Exit,
    phase: Phase,
    ends: Ends,
) -> None:
    """A request that an engine refuses leaves no stream open and silent (trap 12)."""
    await world.start()
    await world.reach(phase)
    caller, peer, scene = world.caller, world.peer, world.scene
    began = scene.loop.time()
    assert peer is not None
    world.act(exit_, phase)
    if ends.aborted:
        await turns(20)
        assert not peer.is_open, "at once: no time may pass"
        assert scene.loop.time() == began
    if phase is Phase.HELD:
        if exit_ is Exit.DOWN:
            await world.pass_ms(4_000)
        caller.taking.set()
    await asyncio.wait({caller.task}, timeout=600)
    assert caller.task.done()
    check_time(exit_, phase, world.mode, scene.loop.time() - began)
    check_told(world, ends, exit_, phase)
    assert caller.task.cancelled() is (exit_ is Exit.CANCELLED)
    assert not world.engine._flights
    world.gateway.finish()
    check(world.gateway, settled, 1, ends, asked=1)
    (row,) = world.gateway.driver.recent
    if ends == DONE and world.route is not Route.MESSAGES:
        assert row.usage is not None
        assert row.usage.input_tokens == 7


def check_time(exit_: Exit, phase: Phase, mode: Mode, passed: float) -> None:
    """Check when a request ended."""
    if exit_ is Exit.SILENCE:
        first = phase is Phase.SENT or (phase is Phase.HEAD and mode is not Mode.WHOLE)
        wait = FIRST_BYTE_S if first else GAP_S
        assert wait - 1 < passed <= wait
    elif exit_ is Exit.DOWN:
        assert 1.5 < passed <= 4.1, "three probes, a second apart"
    else:
        assert passed < 0.1


def check_told(world: World, ends: Ends, exit_: Exit, phase: Phase) -> None:
    """Check what the caller was told."""
    caller = world.caller
    begun = world.mode is Mode.EARLY or (
        world.mode is Mode.EVENTS and phase not in (Phase.SENT, Phase.HEAD)
    )
    if ends.status is None:
        assert caller.status == (200 if begun else None)
        return
    assert caller.status == (200 if begun else ends.status)
    assert caller.is_cut is (begun and exit_ is Exit.LARGE_HALF)
    if caller.is_cut:
        assert caller.content.startswith(world.sent)
    elif ends.code is None:
        assert caller.content == world.sent
    elif exit_ in PASSED and begun:
        assert caller.told == "upstream_error", "too late for a status"
        caller.check_failed(sent=True)
    else:
        assert caller.told == ends.code
        if exit_ not in PASSED:
            caller.check_failed(sent=True)
        if phase is Phase.HELD and exit_ in (Exit.DOWN, Exit.STOP):
            # What was still held behind the gateway is lost, at a frame's edge.
            whole = caller.content.count(world.words.word) * world.words.word
            assert len(whole) > HIGH
            assert caller.content.startswith(whole)
        else:
            assert not begun or caller.content.startswith(world.sent)
        assert (exit_ in PASSED) is (b"theirs" in caller.content)


async def test_the_table_has_every_phase_of_every_exit() -> None:
    assert set(TABLE) == set(Exit)
    assert all(set(by_phase) == set(PHASES) for by_phase in TABLE.values())
