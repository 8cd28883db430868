"""An engine behind HTTP as the driver knows it: when it is up, when it is down, what it tells."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.adapters.engines.remote import FAILURES, Patience, RemoteEngine
from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.pool import Limits
from headrace.model.effect import Dispatch
from headrace.model.engine import Snapshot
from headrace.model.ids import (
    AttemptId,
    ClassName,
    DecisionId,
    Incarnation,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.meter import Meter
from headrace.model.slo import Outcome
from headrace.ports.engine import Ask, Call, Ending, EngineClient, Route
from headrace.units import NS_PER_S, DurationNs, InstantNs, Tokens
from tests.adapters.upstream.scenes import DONE, EVENTS, LAST, OK, WORD, Peer, Scene, chunk
from tests.gateway.scenes import request

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

_BODY = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}'


def answer(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


class Heard:
    """A listener that remembers."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.lives: list[tuple[str, int]] = []
        self.data = b""
        self.ends: list[tuple[int, Ending]] = []

    def up(self, engine: EngineClient) -> None:
        self._note("up", engine)

    def down(self, engine: EngineClient) -> None:
        self._note("down", engine)

    def _note(self, what: str, engine: EngineClient) -> None:
        self.lives.append((what, engine.incarnation))
        self._scene.changed()

    def produced(self, attempt: AttemptId, data: bytes) -> None:  # noqa: ARG002 - one at a time
        self.data += data
        self._scene.changed()

    def ended(self, attempt: AttemptId, ending: Ending) -> None:
        self.ends.append((attempt, ending))
        self._scene.changed()

    def reported(self, snapshot: Snapshot) -> None:
        raise AssertionError(snapshot)


class World:
    """One server and the engine that it is."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.heard = scene, Heard(scene)
        self.health = OK
        self.asked: list[Peer] = []
        self.looks = 0

    async def start(self, connections: int = 8) -> None:
        self.server = await self.scene.server(self._behave)
        upstream = Upstream(
            f"http://127.0.0.1:{self.server.port}",
            self.scene.clock,
            limits=Limits(connections=connections),
        )
        self.scene.pools.append(upstream.pool)
        wait = DurationNs(30 * NS_PER_S)
        self.engine = RemoteEngine(
            ReplicaName("r"),
            PoolName("p"),
            upstream,
            self.scene.clock,
            model="theirs",
            patience=Patience(first_byte_ns=wait, gap_ns=wait),
        )
        self.engine.connect(self.heard)
        self.engine.poll()

    async def up(self) -> "World":
        await self.start()
        await self.scene.until(lambda: self.engine.is_up)
        return self

    def _behave(self, peer: Peer) -> None:
        if peer.requests[-1].startswith(b"GET /health"):
            self.looks += 1
            peer.say(self.health)
        else:
            self.asked.append(peer)
            self.scene.changed()

    async def submit(self, nth: int = 1, *, stream: bool = True) -> Meter:
        """Send an attempt, and wait until the server has it."""
        before = len(self.asked)
        meter = self.send(nth, stream=stream)
        await self.scene.until(lambda: len(self.asked) > before)
        return meter

    def send(self, nth: int = 1, *, stream: bool = True) -> Meter:
        meter = Meter(bound_ns=DurationNs(NS_PER_S))
        ask = Ask(
            route=Route.CHAT,
            body=b'{"model":"m","stream":%s}' % (b"true" if stream else b"false"),
            stream=stream,
            usage_shown=False,
        )
        self.engine.submit(Call(dispatch=dispatch(nth), request=request(nth), ask=ask, meter=meter))
        return meter

    async def end(self) -> Ending:
        await self.scene.until(lambda: bool(self.heard.ends))
        return self.heard.ends[-1][1]

    async def polls(self, count: int) -> None:
        """Let so many probes come and go."""
        for _ in range(count):
            await asyncio.sleep(1)
            self.engine.poll()
            await self.scene.turns(20)


def dispatch(nth: int) -> Dispatch:
    return Dispatch(
        request=RequestId(nth),
        attempt=AttemptId(nth),
        decision=DecisionId(nth),
        replica=ReplicaName("r"),
        incarnation=Incarnation(1),
        output_limit=Tokens(100),
        tenant=TenantId("t"),
        slo_class=ClassName("c"),
        deadline=InstantNs(0),
        relegated=False,
        counter=0,
        weight=1,
        gap_ns=DurationNs(1),
    )


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await made.assert_nothing_left()


@pytest.mark.parametrize("status", [200, 204, 404])
async def test_it_is_up_after_the_first_probe_that_is_answered(scene: Scene, status: int) -> None:
    world = World(scene)
    world.health = answer(503, b"{}")
    await world.start()
    await world.polls(5)
    assert world.heard.lives == []
    world.health = b"HTTP/1.1 204 X\r\n\r\n" if status == 204 else answer(status, b"{}")
    await world.polls(3)
    assert world.heard.lives == [("up", 1)]


async def test_three_bad_probes_in_a_row_take_it_down_and_a_good_one_begins_a_life(
    scene: Scene,
) -> None:
    world = await World(scene).up()
    for bad in (FAILURES - 1, FAILURES - 1):
        world.health = answer(500, b"{}")
        await world.polls(bad)
        world.health = OK
        await world.polls(1)
    assert world.heard.lives == [("up", 1)], "not in a row"
    world.health = answer(500, b"{}")
    await world.polls(FAILURES + 2)
    assert world.heard.lives == [("up", 1), ("down", 1)]
    world.health = OK
    await world.polls(1)
    assert world.heard.lives[2:] == [("up", 2)]


async def test_a_refused_probe_takes_it_down_at_once(scene: Scene) -> None:
    world = await World(scene).up()
    world.server.stop_listening()
    for peer in world.server.open_peers:
        peer.close()
    await world.polls(1)
    assert world.heard.lives == [("up", 1), ("down", 1)]
    await world.server.listen(world.server.port)
    await world.polls(1)
    assert world.heard.lives[2:] == [("up", 2)]


async def test_a_poll_that_comes_a_little_early_is_not_missed(scene: Scene) -> None:
    world = await World(scene).up()
    looks = world.looks
    for early in (0.0, 0.03, -0.03, 0.0):
        await asyncio.sleep(1 - early)
        world.engine.poll()
        await scene.turns(20)
    assert world.looks == looks + 4


async def test_an_answer_that_is_cut_has_its_engine_looked_after_at_once(scene: Scene) -> None:
    world = await World(scene).up()
    await world.submit(1)
    looks = world.looks
    world.asked[-1].say(EVENTS, chunk(WORD))
    world.asked[-1].close()
    await world.end()
    await scene.turns(30)
    assert world.looks == looks + 1
    world.server.stop_listening()
    for peer in world.server.open_peers:
        peer.close()
    await scene.turns(30)
    assert world.heard.lives == [("up", 1)], "one request's bad luck"


async def test_an_attempt_that_finds_nobody_takes_it_down_and_every_other_along(
    scene: Scene,
) -> None:
    world = await World(scene).up()
    await world.submit(1)
    await world.submit(2)
    world.server.stop_listening()
    world.send(3)
    await scene.until(lambda: len(world.heard.lives) > 1)
    assert world.heard.lives[1:] == [("down", 1)]
    assert not world.heard.ends, "what is lost with it is told by that alone"
    await scene.until(lambda: not any(peer.is_open for peer in world.asked))


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_who_is_blamed_gets_the_engines_own_words(scene: Scene, status: int) -> None:
    world = await World(scene).up()
    meter = await world.submit()
    world.asked[-1].say(answer(status, b'{"error":"yours"}'))
    ending = await world.end()
    assert ending.outcome is Outcome.ERROR
    assert ending.refusal is not None
    assert (ending.refusal.status, ending.refusal.body) == (status, b'{"error":"yours"}')
    assert (world.heard.data, meter.tokens) == (b"", 0)


@pytest.mark.parametrize("status", [301, 401, 403, 408, 429, 500, 503])
async def test_what_is_between_us_and_the_engine_is_nobody_elses(scene: Scene, status: int) -> None:
    world = await World(scene).up()
    await world.submit()
    world.asked[-1].say(answer(status, b'{"error":"secret"}'))
    ending = await world.end()
    assert (ending.outcome, ending.refusal, world.heard.data) == (Outcome.ERROR, None, b"")
    assert world.heard.lives == [("up", 1)]


async def test_operators_are_told_why_and_not_again_and_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    world = await World(scene).up()
    for nth in range(1, 4):
        await world.submit(nth)
        world.asked[-1].say(answer(401, b'{"error":"secret"}'))
        await scene.until(lambda: len(world.heard.ends) == nth)  # noqa: B023 - awaited at once
    assert caplog.messages == ["engine r: it answers 401"]
    world.health = answer(503, b"{}")
    await world.polls(3)
    assert caplog.messages[1:] == ["engine r: its health is 503"]


async def test_a_whole_answer_is_noted_when_it_comes(scene: Scene) -> None:
    world = await World(scene).up()
    meter = await world.submit(stream=False)
    await asyncio.sleep(2)
    assert meter.tokens == 0
    world.asked[-1].say(answer(200, _BODY))
    ending = await world.end()
    assert (ending.outcome, world.heard.data, meter.tokens) == (Outcome.SUCCESS, _BODY, 5)
    assert meter.first_at == meter.last_at == scene.clock.now()
    assert ending.usage is not None
    assert ending.usage.output_tokens == 5


async def test_who_pauses_is_told_nothing_until_it_goes_on(scene: Scene) -> None:
    world = await World(scene).up()
    await world.submit()
    world.engine.pause(AttemptId(1))
    world.asked[-1].say(EVENTS, chunk(WORD), chunk(WORD + DONE), LAST)
    await scene.turns(30)
    assert (world.heard.data, world.heard.ends) == (b"", [])
    world.engine.resume(AttemptId(1))
    assert world.heard.data == WORD + WORD + DONE
    assert world.heard.ends[0][1].outcome is Outcome.SUCCESS


async def test_a_full_pool_is_an_error_and_no_death(scene: Scene) -> None:
    world = World(scene)
    await world.start(connections=1)
    await scene.until(lambda: world.engine.is_up)
    await world.submit(1)
    world.send(2)
    assert (await world.end()).outcome is Outcome.ERROR
    assert [attempt for attempt, _ in world.heard.ends] == [2]
    await world.polls(FAILURES + 1)
    assert world.heard.lives == [("up", 1)], "all connections are at work: it lives"
    world.engine.abort(AttemptId(1))


@pytest.mark.parametrize("full", [True, False])
async def test_once_closed_it_tells_nothing(scene: Scene, *, full: bool) -> None:
    world = World(scene)
    await world.start(connections=1 if full else 8)
    await scene.until(lambda: world.engine.is_up)
    await world.submit(1)
    world.send(2)
    await asyncio.sleep(1)
    before = list(world.heard.ends)
    world.send(3)
    world.engine.poll()
    world.engine.close()
    await world.polls(5)
    world.engine.abort(AttemptId(1))
    world.engine.resume(AttemptId(2))
    assert (world.heard.lives, world.heard.data) == ([("up", 1)], b"")
    assert world.heard.ends == before
    await scene.until(lambda: not world.server.open_peers)


async def test_an_attempt_has_an_id_that_is_no_prefix_and_no_callers(scene: Scene) -> None:
    world = await World(scene).up()
    ids: list[bytes] = []
    for nth in (1, 11, 111):
        await world.submit(nth)
        lines = world.asked[-1].requests[-1].split(b"\r\n")
        ids += [one.partition(b": ")[2] for one in lines if one.startswith(b"x-request-id")]
    assert len(set(ids)) == 3
    pairs: list[Any] = [(a, b) for a in ids for b in ids if a != b]
    assert not any(b.startswith(a) for a, b in pairs)
    for nth in (1, 11, 111):
        world.engine.abort(AttemptId(nth))
    await scene.until(lambda: not any(peer.is_open for peer in world.asked))
