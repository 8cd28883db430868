"""An engine behind HTTP as the driver knows it: when it is up, when it is down, what it tells."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from headrace.adapters.engines.remote import DENIED_NS, FAILURES, Patience, RemoteEngine
from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.pool import Limits
from headrace.model.effect import Dispatch
from headrace.model.engine import EngineKind, Scheduler, Snapshot
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
from tests.adapters.upstream.scenes import (
    DONE,
    EVENTS,
    KEY_TAKEN,
    LAST,
    OK,
    WORD,
    Peer,
    Scene,
    chunk,
    is_look,
    look,
)
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

    def forgot(self, engine: EngineClient) -> None:
        self._note("forgot", engine)


class World:
    """One server and the engine that it is."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.heard = scene, Heard(scene)
        self.health, self.key = OK, KEY_TAKEN
        self.looks = 0
        self.asked: list[Peer] = []

    async def start(
        self,
        connections: int = 8,
        *,
        continuous_usage: bool = False,
        proven: bool = False,
        kind: EngineKind | None = EngineKind.OPENAI,
        scheduler: Scheduler = Scheduler.OWN,
    ) -> None:
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
            kind=kind,
            scheduler=scheduler,
            continuous_usage=continuous_usage,
            proven=proven,
        )
        self.engine.connect(self.heard)
        self.engine.poll()

    async def up(self) -> "World":
        await self.start()
        await self.scene.until(lambda: self.engine.is_up)
        return self

    def _behave(self, peer: Peer) -> None:
        if is_look(peer.requests[-1]):
            self.looks += 1
            peer.say(look(peer.requests[-1], self.health, self.key))
        else:
            self.asked.append(peer)
            self.scene.changed()

    async def submit(self, nth: int = 1, *, stream: bool = True, **more: Any) -> Meter:
        """Send an attempt, and wait until the server has it."""
        before = len(self.asked)
        meter = self.send(nth, stream=stream, **more)
        await self.scene.until(lambda: len(self.asked) > before)
        return meter

    def send(
        self,
        nth: int = 1,
        *,
        stream: bool = True,
        route: Route = Route.CHAT,
        each: bool = False,
        answers: int = 1,
    ) -> Meter:
        meter = Meter(bound_ns=DurationNs(NS_PER_S))
        ask = Ask(
            route=route,
            body=b'{"model":"m","stream":%s}' % (b"true" if stream else b"false"),
            stream=stream,
            usage_shown=each,
            each_usage_shown=each,
        )
        asked = replace(request(nth), fan_out=answers)
        self.engine.submit(Call(dispatch=dispatch(nth), request=asked, ask=ask, meter=meter))
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
        way=(),
        counters=(),
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


async def test_one_that_was_seen_to_serve_is_up_without_a_probe_and_down_like_any_other(
    scene: Scene,
) -> None:
    world = World(scene)
    world.health = answer(503, b"{}")
    await world.start(proven=True)
    assert world.heard.lives == [("up", 1)]
    await world.polls(FAILURES + 1)
    assert world.heard.lives == [("up", 1), ("down", 1)]
    world.health = OK
    await world.polls(1)
    assert world.heard.lives[2:] == [("up", 2)]


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


DENIED_S = DENIED_NS // NS_PER_S
REFUSED = "it refuses our key, with %d: see `key_env` of its upstream"


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("where", ["health", "key"])
async def test_who_refuses_our_key_is_not_up_until_it_takes_it(
    scene: Scene, caplog: pytest.LogCaptureFixture, where: str, status: int
) -> None:
    world = World(scene)
    setattr(world, where, answer(status, b"{}"))
    await world.start()
    await world.polls(DENIED_S)
    assert (world.heard.lives, world.engine.is_up) == ([], False)
    assert world.engine.trouble == REFUSED % status
    assert caplog.messages == [f"engine r: {world.engine.trouble}"]
    assert world.looks <= 4, "two in this time: engines count wrong keys"
    world.health, world.key = OK, KEY_TAKEN
    await world.polls(DENIED_S)
    assert world.heard.lives == [("up", 1)]
    assert not world.engine.trouble


@pytest.mark.parametrize("status", [405, 501])
async def test_what_knows_no_chat_is_no_engine(scene: Scene, status: int) -> None:
    world = World(scene)
    world.key = answer(status, b"")
    await world.start()
    await world.polls(3)
    assert (world.heard.lives, world.engine.is_up) == ([], False)
    assert world.engine.trouble == f"it answers a chat with {status}: is this an engine?"
    world.key = KEY_TAKEN
    await world.polls(2)
    assert world.heard.lives == [("up", 1)]


async def test_each_life_that_ends_is_told_of(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the second death of a minute, for the same reason, would be silent."""
    world = await World(scene).up()
    for _ in range(2):
        world.health = answer(503, b"")
        await world.polls(FAILURES)
        assert not world.engine.is_up
        world.health = OK
        await world.polls(1)
        assert world.engine.is_up
    assert [one for one in caplog.messages if "503" in one] == ["engine r: its health is 503"] * 2


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_was_taken_back_takes_it_down(scene: Scene, status: int) -> None:
    world = await World(scene).up()
    world.key = answer(status, b"{}")
    await world.polls(5)
    assert world.heard.lives == [("up", 1)], "it is asked only where there is doubt"
    await world.submit()
    world.asked[-1].say(answer(status, b"{}"))
    assert (await world.end()).outcome is Outcome.ERROR
    await world.polls(1)
    assert world.heard.lives == [("up", 1), ("down", 1)]
    world.key = answer(429, b"{}")
    await world.polls(2 * DENIED_S)
    assert world.heard.lives == [("up", 1), ("down", 1)], "too many wrong keys: nothing new"
    world.key = KEY_TAKEN
    await world.polls(DENIED_S)
    assert world.heard.lives[2:] == [("up", 2)]


@pytest.mark.parametrize("key", [KEY_TAKEN, answer(500, b""), answer(429, b""), b""])
async def test_one_refused_request_does_not_condemn_the_key(scene: Scene, key: bytes) -> None:
    world = await World(scene).up()
    world.key = key
    for nth in (1, 2, 3):
        await world.submit(nth)
        world.asked[-1].say(answer(403, b"{}"))
        await scene.until(lambda: len(world.heard.ends) == nth)  # noqa: B023 - awaited at once
        await world.polls(6)
    assert world.heard.lives == [("up", 1)]
    world.engine.close()
    await scene.turns(20)


async def test_a_name_that_cannot_be_looked_up_once_takes_nobody_down(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await World(scene).up()
    await world.submit(1)

    async def unresolved(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with monkeypatch.context() as patch:
        patch.setattr(scene.loop, "create_connection", unresolved)
        world.engine.upstream.pool.drop_idle()
        world.send(2)
        assert (await world.end()).outcome is Outcome.ERROR
        await world.polls(FAILURES - 1)
        assert world.heard.lives == [("up", 1)]
    assert world.asked[0].is_open, "open connections go on"
    await world.polls(2)
    assert world.heard.lives == [("up", 1)]
    with monkeypatch.context() as patch:
        patch.setattr(scene.loop, "create_connection", unresolved)
        world.engine.upstream.pool.drop_idle()
        await world.polls(FAILURES)
    assert world.heard.lives == [("up", 1), ("down", 1)], "probes confirm it"
    assert "name resolution" in str(world.engine.trouble)


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


def told(made: int) -> bytes:
    """Return a frame of four words that tells the usage so far."""
    usage = b'{"prompt_tokens":7,"total_tokens":%d,"completion_tokens":%d}' % (made + 7, made)
    return b'data: {"choices":[{"index":0,"delta":{"content":"a b c d"}}],"usage":%s}\n\n' % usage


@pytest.mark.parametrize("route", [Route.CHAT, Route.COMPLETIONS])
@pytest.mark.parametrize("who", ["we", "caller", "nobody", "we, of an engine that does not tell"])
async def test_a_stream_is_counted_by_the_usage_its_frames_tell(
    scene: Scene, route: Route, who: str
) -> None:
    world = World(scene)
    await world.start(continuous_usage=who.startswith("we"))
    await scene.until(lambda: world.engine.is_up)
    meter = await world.submit(route=route, each=who == "caller")
    wanted = b'"continuous_usage_stats":true' in world.asked[-1].requests[-1]
    assert wanted is who.startswith("we"), "what the caller asks for is in its own words"
    tells = who in ("we", "caller")
    frames = [told(made) if tells else WORD for made in (0, 4, 9, 9)]
    world.asked[-1].say(EVENTS)
    seen = []
    for frame in frames:
        world.asked[-1].say(chunk(frame))
        before = len(world.heard.data)
        await scene.until(lambda: len(world.heard.data) > before)  # noqa: B023 - awaited at once
        seen.append(meter.tokens)
    assert seen == ([1, 4, 9, 9] if tells else [1, 2, 3, 4])
    assert (b"usage" in world.heard.data) is (who == "caller")
    world.engine.abort(AttemptId(1))
    assert meter.timing().tokens == seen[-1]
    assert sum(meter.timing().gap_counts) == seen[-1] - 1
    await scene.until(lambda: not any(peer.is_open for peer in world.asked))


@pytest.mark.parametrize("route", Route)
async def test_usage_in_each_frame_is_asked_for_only_where_there_is_one_stream_of_it(
    scene: Scene, route: Route
) -> None:
    world = World(scene)
    await world.start(continuous_usage=True)
    await scene.until(lambda: world.engine.is_up)
    has = route in (Route.CHAT, Route.COMPLETIONS)
    asked: tuple[dict[str, Any], ...] = ({}, {"stream": False}, {"answers": 2})
    for nth, more in enumerate(asked, start=1):
        await world.submit(nth, route=route, **more)
        sent = world.asked[-1].requests[-1]
        assert (b"continuous_usage_stats" in sent) is (has and not more)
        world.engine.abort(AttemptId(nth))
    await scene.until(lambda: not any(peer.is_open for peer in world.asked))


@pytest.mark.parametrize("told", [1, 3, 9])
async def test_a_stream_of_frames_of_several_tokens_is_timed_by_its_usage(
    scene: Scene, told: int
) -> None:
    world = await World(scene).up()
    await world.submit()
    world.asked[-1].say(EVENTS, chunk(WORD))
    await asyncio.sleep(1)
    world.asked[-1].say(chunk(WORD))
    await asyncio.sleep(1)
    usage = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d}}' % told
    world.asked[-1].say(chunk(WORD + b"data: " + usage + b"\n\n" + DONE), LAST)
    timing = (await world.end()).timing
    assert timing.tokens == max(3, told), "never fewer than were seen"
    assert sum(timing.gap_counts) == timing.tokens - 1
    assert timing.gap_counts[0] == timing.tokens - 3, "those of one frame came together"
    assert timing.first_at is not None
    assert timing.last_at == timing.first_at + 2 * NS_PER_S


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_of_nothing_is_an_error(scene: Scene, *, stream: bool) -> None:
    world = await World(scene).up()
    await world.submit(stream=stream)
    world.asked[-1].say(answer(200, b""))
    ending = await world.end()
    assert (ending.outcome, ending.refusal, world.heard.data) == (Outcome.ERROR, None, b"")
    assert ending.usage is None


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
