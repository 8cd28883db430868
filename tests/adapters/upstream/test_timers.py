"""Silence in virtual time: what counts as a word, what does not, and who is to blame."""

import pytest

from headrace.adapters.upstream.pool import Limits, Origin, Pool
from headrace.ports.engine import Route
from headrace.ports.upstream import SilentError, Wait
from headrace.units import NS_PER_S
from tests.adapters.upstream.scenes import (
    DONE,
    EVENTS,
    LAST,
    OK,
    PING,
    WORD,
    Call,
    CountingClock,
    Peer,
    Scene,
    answers,
    chunk,
    timeouts,
)

pytestmark = [pytest.mark.asyncio(loop_factories=["asyncio"]), pytest.mark.looptime]


def silent(_: Peer) -> None:
    """Answer nothing."""


def pinging(scene: Scene, every_s: float, *first: bytes, rest: bytes = chunk(PING)) -> "Pinging":
    """Return a behaviour that says something, and then something else over and over."""
    return Pinging(scene, every_s, first, rest)


class Pinging:
    """Says `first`, then `rest` for as long as the connection is open."""

    def __init__(self, scene: Scene, every_s: float, first: tuple[bytes, ...], rest: bytes) -> None:
        self._loop, self._every, self._first, self._rest = scene.loop, every_s, first, rest

    def __call__(self, peer: Peer) -> None:
        peer.say(*self._first)
        self._loop.call_later(self._every, self._again, peer)

    def _again(self, peer: Peer) -> None:
        if peer.is_open:
            peer.say(self._rest)
            self._loop.call_later(self._every, self._again, peer)


async def silence(scene: Scene, call: Call) -> tuple[Wait, float]:
    """Wait for the end; return what was waited for, and the time."""
    result = await scene.result(call)
    assert isinstance(result.error, SilentError)
    assert (result.attempts, result.error.retryable) == (1, False)
    return result.error.wait, round(scene.loop.time(), 3)


@pytest.mark.parametrize("said", [b"", EVENTS, b"HTTP/1.1 200 O", EVENTS + chunk(WORD[:9])])
async def test_the_first_byte_is_waited_for_so_long(scene: Scene, said: bytes) -> None:
    server = await scene.server(answers(said))
    call = scene.ask(scene.pool(server), timeouts=timeouts(first_byte_s=30.0, gap_s=1.0))
    assert await silence(scene, call) == (Wait.FIRST_BYTE, 30.0)
    await scene.until(lambda: not server.open_peers)


async def test_comments_are_no_first_byte(scene: Scene) -> None:
    server = await scene.server(pinging(scene, 3.0, EVENTS))
    call = scene.ask(scene.pool(server), timeouts=timeouts(first_byte_s=30.0))
    assert await silence(scene, call) == (Wait.FIRST_BYTE, 30.0)
    assert call.data == PING * 9


async def test_beginnings_are_no_first_byte(scene: Scene) -> None:
    created = b"event: response.created\ndata: {}\n\n"
    word = b"event: response.output_text.delta\ndata: {}\n\n"
    limits = timeouts(first_byte_s=30.0, gap_s=5.0)
    server = await scene.server(answers(EVENTS + chunk(created)))
    call = scene.ask(scene.pool(server), route=Route.RESPONSES, timeouts=limits)
    assert await silence(scene, call) == (Wait.FIRST_BYTE, 30.0)
    assert call.data == created
    server = await scene.server(answers(EVENTS + chunk(created + word)))
    call = scene.ask(scene.pool(server), route=Route.RESPONSES, timeouts=limits)
    assert await silence(scene, call) == (Wait.GAP, 35.0)


async def test_pings_are_no_word_within_a_gap(scene: Scene) -> None:
    ping = b"event: ping\ndata: {}\n\n"
    word = b"event: content_block_delta\ndata: {}\n\n"
    server = await scene.server(pinging(scene, 3.0, EVENTS, chunk(word), rest=chunk(ping)))
    limits = timeouts(first_byte_s=60.0, gap_s=10.0)
    call = scene.ask(scene.pool(server), route=Route.MESSAGES, timeouts=limits)
    assert await silence(scene, call) == (Wait.GAP, 10.0)
    assert call.data == word + ping * 3


async def test_comments_are_no_word_within_a_gap(scene: Scene) -> None:
    server = await scene.server(pinging(scene, 3.0, EVENTS, chunk(WORD)))
    call = scene.ask(scene.pool(server), timeouts=timeouts(first_byte_s=60.0, gap_s=10.0))
    assert await silence(scene, call) == (Wait.GAP, 10.0)
    assert call.data == WORD + PING * 3


async def test_an_endless_head_is_silence(scene: Scene) -> None:
    server = await scene.server(pinging(scene, 1.0, b"HTTP/1.1 200 OK\r\nX: ", rest=b"x"))
    call = scene.ask(scene.pool(server), timeouts=timeouts(first_byte_s=30.0))
    assert await silence(scene, call) == (Wait.FIRST_BYTE, 30.0)


async def test_words_in_time_keep_a_stream_alive_until_the_deadline(scene: Scene) -> None:
    server = await scene.server(pinging(scene, 9.0, EVENTS, rest=chunk(WORD)))
    limits = timeouts(first_byte_s=10.0, gap_s=10.0, deadline_s=500.0)
    call = scene.ask(scene.pool(server), timeouts=limits)
    assert await silence(scene, call) == (Wait.DEADLINE, 500.0)
    assert call.frames == 55


async def test_pieces_of_a_large_frame_are_words(scene: Scene) -> None:
    first = EVENTS + chunk(b"data: " + b"x" * 70_000)
    server = await scene.server(pinging(scene, 9.0, first, rest=chunk(b"x")))
    limits = timeouts(gap_s=10.0, deadline_s=100.0)
    call = scene.ask(scene.pool(server), timeouts=limits)
    assert await silence(scene, call) == (Wait.DEADLINE, 100.0)


async def test_without_frames_the_head_and_each_byte_are_words(scene: Scene) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"
    server = await scene.server(pinging(scene, 9.0, head, rest=b"x"))
    limits = timeouts(first_byte_s=10.0, gap_s=10.0, deadline_s=100.0)
    call = scene.ask(scene.pool(server), timeouts=limits)
    assert await silence(scene, call) == (Wait.DEADLINE, 100.0)
    assert (call.status, call.data) == (200, b"")


async def test_a_deadline_that_has_passed_ends_it(scene: Scene) -> None:
    server = await scene.server(silent)
    call = scene.ask(scene.pool(server), timeouts=timeouts(deadline_s=0.0))
    assert await silence(scene, call) == (Wait.DEADLINE, 0.0)


async def test_the_second_attempt_has_its_own_wait_for_the_first_byte(scene: Scene) -> None:
    server = await scene.server(answers(OK))
    pool = scene.pool(server)
    await scene.get(pool)

    def behave(peer: Peer) -> None:
        if len(peer.requests) > 1:
            scene.loop.call_later(2.0, peer.close)

    server.behave = behave
    call = scene.ask(pool, timeouts=timeouts(first_byte_s=30.0))
    result = await scene.result(call)
    assert isinstance(result.error, SilentError)
    assert (result.error.wait, result.attempts) == (Wait.FIRST_BYTE, 2)
    assert round(scene.loop.time(), 3) == 32.0


async def test_silence_is_never_tried_again(scene: Scene) -> None:
    server = await scene.server(answers(OK))
    pool = scene.pool(server)
    await scene.get(pool)
    server.behave = silent
    call = scene.ask(pool, timeouts=timeouts(first_byte_s=30.0))
    assert await silence(scene, call) == (Wait.FIRST_BYTE, 30.0)
    assert len(server.peers) == 1


async def test_time_in_which_we_did_not_read_is_no_gap(scene: Scene) -> None:
    server = await scene.server(silent)
    call = scene.ask(scene.pool(server), timeouts=timeouts(gap_s=10.0))
    await scene.until(lambda: server.requests == 1)
    call.pause()
    server.peer.say(EVENTS, chunk(WORD * 100_000))
    await scene.until(lambda: server.peer.is_stalled)
    woken = scene.loop.create_future()
    scene.loop.call_later(1_000.0, woken.set_result, None)
    await woken
    assert not call.results
    assert call.exchange is not None
    assert call.exchange.paused_since is not None
    call.resume()
    assert await silence(scene, call) == (Wait.GAP, 1_010.0)
    assert call.frames == 100_000


async def test_a_listener_that_pauses_does_not_excuse_a_silent_engine(scene: Scene) -> None:
    server = await scene.server(answers(EVENTS + chunk(WORD)))
    pool = scene.pool(server)
    call = scene.ask(pool, timeouts=timeouts(gap_s=10.0))
    call.pause()
    await scene.until(lambda: call.status == 200 and not server.open_peers)
    assert round(scene.loop.time(), 3) == 10.0
    assert not call.results
    call.resume()
    assert await silence(scene, call) == (Wait.GAP, 10.0)


async def test_no_timer_is_made_for_a_chunk(scene: Scene) -> None:
    server = await scene.server(silent)
    clock = CountingClock(scene.clock)
    pool = Pool(Origin(host="127.0.0.1", port=server.port), clock)
    scene.pools.append(pool)
    call = scene.ask(pool, timeouts=timeouts(first_byte_s=30.0, gap_s=10.0, deadline_s=900.0))
    await scene.until(lambda: server.requests == 1)
    server.peer.say(EVENTS)
    for count in range(1, 1_001):
        server.peer.say(chunk(WORD))
        await scene.until(lambda count=count: call.frames == count)  # type: ignore[misc]
    server.peer.say(chunk(DONE), LAST)
    assert (await scene.result(call)).error is None
    assert clock.armed <= 4


async def test_idle_connections_grow_old(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    calls = [scene.ask(pool) for _ in range(2)]
    await scene.until(lambda: server.requests == 2)
    for number, peer in enumerate(server.peers):
        scene.loop.call_later(number * 1.0, peer.say, OK)
    for call in calls:
        await scene.result(call)
    assert pool.idle == 2
    await scene.until(lambda: len(server.open_peers) == 1)
    assert round(scene.loop.time(), 3) == 4.0
    await scene.until(lambda: not server.open_peers)
    assert (round(scene.loop.time(), 3), pool.idle) == (5.0, 0)


async def test_a_connection_in_use_stays_young(scene: Scene) -> None:
    server = await scene.server(answers(OK))
    pool = scene.pool(server)
    for _ in range(10):
        _, result = await scene.get(pool)
        assert (result.error, len(server.peers)) == (None, 1)
        woken = scene.loop.create_future()
        scene.loop.call_later(3.9, woken.set_result, None)
        await woken
    await scene.until(lambda: not server.open_peers)
    await scene.get(pool)
    assert len(server.peers) == 2


async def test_an_old_connection_is_not_used_even_if_nobody_swept(scene: Scene) -> None:
    server = await scene.server(answers(OK))
    pool = scene.pool(server, Limits(idle_ns=Limits().idle_ns))
    await scene.get(pool)
    (connection,) = pool._idle
    connection.idle_since = type(connection.idle_since)(-5 * NS_PER_S)
    _, result = await scene.get(pool)
    assert (result.error, result.reused, len(server.peers)) == (None, False, 2)
