"""Engines that die, fall silent, restart, or speak unusually (3, 4, 16, 17, 21)."""

import json
from collections.abc import Callable

import pytest

from tests.adapters.upstream.scenes import DONE, EVENTS, LAST, PING, USAGE, WORD, Peer, chunk
from tests.gateway.pitfalls.scenes import (
    SHOWN,
    STREAM,
    WHOLE,
    Answer,
    World,
    post,
    says,
    silent,
    sized,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

WAYS: list[Callable[[Peer], None]] = [Peer.close, Peer.reset]
UNTIL_CLOSE = EVENTS.replace(b"Transfer-Encoding: chunked\r\n", b"")


def failure(answer: Answer, before: bytes = b"") -> str:
    """Return the code of the error that a stream ends with, in whole frames, after `before`."""
    assert (answer.status, answer.whole) == (200, True)
    assert answer.body.startswith(before)
    error, done, end = answer.body[len(before) :].split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return str(json.loads(error.removeprefix(b"data: "))["error"]["code"])


# 3 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("said", "passed"),
    [
        (chunk(WORD), WORD),
        (chunk(WORD) + b"3", WORD),
        (chunk(WORD) + b"31\r", WORD),
        (chunk(WORD) + b"31\r\n", WORD),
        (chunk(WORD)[:-2], WORD),
        (chunk(WORD)[:-1], WORD),
        (chunk(WORD) + chunk(WORD)[:20], WORD),
        (chunk(WORD) + chunk(WORD[:20]), WORD),
        (chunk(WORD + WORD[:-1]), WORD),
        (chunk(WORD) + chunk(USAGE), WORD),
        (chunk(WORD) + chunk(USAGE) + chunk(DONE[:9]), WORD),
    ],
)
async def test_death_within_a_stream_ends_it_with_an_error(
    world: World, said: bytes, passed: bytes, way: Callable[[Peer], None]
) -> None:
    await world.start(silent)
    caller = await world.dial(post(stream=True))
    peer = await world.sent()
    peer.say(EVENTS, said)
    await world.until(lambda: passed in caller.received)
    await world.pass_time(0.01)
    way(peer)
    (answer,) = await world.answered(caller)
    assert failure(answer, passed) == "upstream_error"
    assert world.gateway.driver.outcomes == {"error": 1}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "said",
    [b"", b"H", b"HTTP/1.1 200 OK\r\n", EVENTS, EVENTS + chunk(WORD[:20]), EVENTS + b"3"],
)
async def test_death_before_a_frame_is_502(
    world: World, said: bytes, way: Callable[[Peer], None]
) -> None:
    await world.start(silent)
    world.pool.drop_idle()
    caller = await world.dial(post(stream=True))
    peer = await world.sent()
    peer.say(said)
    await world.pass_time(0.01)
    way(peer)
    (answer,) = await world.answered(caller)
    assert (answer.status, answer.code) == (502, "upstream_error")
    assert len(world.engine.peers) == 2


@pytest.mark.parametrize("way", WAYS)
async def test_death_within_a_large_frame_is_a_cut(
    world: World, way: Callable[[Peer], None], caplog: pytest.LogCaptureFixture
) -> None:
    await world.start(silent)
    caller = await world.dial(post(stream=True))
    peer = await world.sent()
    large = b'data: {"choices":"' + b"x" * 200_000
    peer.say(EVENTS, chunk(WORD), chunk(large))
    await world.until(lambda: len(caller.received) > 200_000)
    way(peer)
    await world.until(lambda: caller.over)
    assert (caller.answer.body, caller.answer.whole) == (WORD + large, False)
    assert world.gateway.driver.outcomes == {"error": 1}
    (told,) = caplog.records
    assert (told.name, told.levelname) == ("headrace.engines", "WARNING")


async def test_a_cut_is_no_clean_end_even_where_the_end_is_the_connections(world: World) -> None:
    await world.start(silent)
    caller = await world.dial(post(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
    peer = await world.sent()
    peer.say(EVENTS, chunk(b"data: " + b"x" * 200_000))
    await world.until(lambda: len(caller.received) > 200_000)
    peer.close()
    await world.until(lambda: not caller.is_open)
    assert isinstance(caller.fault, ConnectionResetError)


async def test_death_after_the_end_mark_takes_nothing_from_anybody(world: World) -> None:
    await world.start(silent)
    caller = await world.dial(post(stream=True))
    peer = await world.sent()
    peer.close(STREAM.removesuffix(LAST))
    (answer,) = await world.answered(caller)
    assert (answer.body, answer.whole) == (SHOWN, True)
    assert world.gateway.driver.outcomes == {"success": 1}
    assert world.pool.idle == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("said", [b"", sized()[:-1], sized()[:30]])
async def test_death_within_a_whole_answer_is_502(
    world: World, said: bytes, way: Callable[[Peer], None]
) -> None:
    await world.start(silent)
    world.pool.drop_idle()
    caller = await world.dial(post())
    peer = await world.sent()
    peer.say(said)
    await world.pass_time(0.01)
    way(peer)
    (answer,) = await world.answered(caller)
    assert (answer.status, answer.code) == (502, "upstream_error")


async def test_an_error_of_the_engines_own_within_a_stream(world: World) -> None:
    error = b'data: {"error":{"message":"out of memory"}}\n\n'
    await world.start(silent)
    caller = await world.dial(post(stream=True))
    peer = await world.sent()
    peer.say(EVENTS, chunk(WORD))
    await world.until(lambda: WORD in caller.received)
    peer.say(chunk(error), chunk(DONE), LAST)
    assert failure((await world.answered(caller))[0], WORD) == "upstream_error"
    assert world.pool.idle == 1


async def test_what_failed_before_a_byte_was_sent_has_a_status_of_its_own(world: World) -> None:
    error = b'data: {"error":{"message":"out of memory"}}\n\n'
    await world.start(says(EVENTS + chunk(WORD + error) + chunk(DONE) + LAST))
    answer = await world.ask(post(stream=True))
    assert (answer.status, answer.code) == (502, "upstream_error")


# 4 ----------------------------------------------------------------------------------------------


def pinging(world: World, first: bytes, ping: bytes) -> Callable[[Peer], None]:
    """Return a behaviour that says something, and then something else each second."""

    def behave(peer: Peer) -> None:
        peer.say(first)
        world.loop.call_later(1.0, again, peer)

    def again(peer: Peer) -> None:
        if peer.is_open:
            peer.say(ping)
            world.loop.call_later(1.0, again, peer)

    return behave


@pytest.mark.parametrize(
    ("said", "ping", "waited_s", "status"),
    [
        (b"", b"", 4.5, 502),
        (b"HTTP/1.1 200 OK\r\nx: ", b"y", 4.5, 502),
        (EVENTS, b"", 4.5, 502),
        (EVENTS, chunk(PING), 4.5, 200),
        (EVENTS + chunk(WORD), b"", 2.5, 200),
        (EVENTS + chunk(WORD), chunk(PING), 2.5, 200),
        (EVENTS + chunk(WORD) + b"31\r\n", b"", 2.5, 200),
    ],
)
async def test_silence_ends_a_stream_in_time_even_through_comments(
    world: World, said: bytes, ping: bytes, waited_s: float, status: int
) -> None:
    await world.start(silent, upstream={"first_byte_s": 4.5, "gap_s": 2.5})
    world.behave = pinging(world, said, ping)
    begun = world.loop.time()
    answer = await world.ask(post(stream=True))
    assert round(world.loop.time() - begun, 2) == waited_s
    assert (answer.status, answer.whole) == (status, True)
    if status == 200:
        comments = answer.body.count(PING) * PING
        assert failure(answer, (WORD if WORD in said else b"") + comments) == "upstream_error"
    else:
        assert answer.code == "upstream_error"
    assert world.engine.requests == 1, "silence is not tried again"


async def test_silence_before_a_whole_answer_ends_in_time(world: World) -> None:
    await world.start(silent, upstream={"first_byte_s": 4.5, "gap_s": 2.5})
    begun = world.loop.time()
    assert (await world.ask(post())).status == 502
    assert round(world.loop.time() - begun, 2) == 4.5


# 16 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_in_a_row_use_one_connection(world: World, *, stream: bool) -> None:
    await world.start(says(STREAM if stream else sized()))
    caller = await world.dial()
    for _ in range(100):
        caller.received.clear()
        caller.say(post(stream=stream))
        assert (await world.answered(caller))[0].status == 200
    assert (world.pool.dialled, len(world.engine.peers)) == (1, 1)


@pytest.mark.slow
async def test_a_thousand_requests_use_one_connection(world: World) -> None:
    await world.start(says(STREAM))
    for _ in range(1_000):
        assert (await world.ask(post(stream=True))).body == SHOWN
    assert (world.pool.dialled, len(world.engine.peers)) == (1, 1)


@pytest.mark.parametrize(
    "reply",
    [
        sized(WHOLE, b"200 OK", b"connection: close"),
        sized().replace(b"HTTP/1.1", b"HTTP/1.0"),
        sized() + b"x",
        sized() + sized(),
        STREAM + b"\r\n",
        STREAM + STREAM,
    ],
)
async def test_a_connection_that_is_not_clean_is_not_used_again(world: World, reply: bytes) -> None:
    await world.start(says(reply))
    for _ in range(3):
        answer = await world.ask(post(stream=reply.startswith(STREAM)))
        assert answer.body == (SHOWN if reply.startswith(STREAM) else WHOLE)
    assert (world.pool.dialled, world.pool.idle) == (3, 0)


# 17 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_restart_with_a_warm_pool_costs_one_attempt_and_no_error(
    world: World, way: Callable[[Peer], None]
) -> None:
    await world.start(says(STREAM))
    callers = [await world.dial(post(stream=True)) for _ in range(3)]
    for caller in callers:
        await world.answered(caller)

    def behave(peer: Peer) -> None:
        if peer is world.engine.peers[-1] and len(peer.requests) == 1:
            peer.say(STREAM)
        else:
            way(peer)  # it was alive when the gateway last looked

    world.behave = behave
    before = world.engine.requests
    assert (await world.ask(post(stream=True))).body == SHOWN
    assert world.engine.requests == before + 2
    assert world.pool.idle == 1, "the others were of the same life"


async def test_closed_after_one_byte_is_not_tried_again(world: World) -> None:
    await world.start(says(STREAM))
    await world.ask(post(stream=True))
    world.behave = lambda peer: peer.close(b"H")
    assert (await world.ask(post(stream=True))).status == 502
    assert world.engine.requests == 2


async def test_an_engine_that_is_down_is_502_then_503_and_comes_back(world: World) -> None:
    await world.start(says(STREAM), poll_ms=1_000.0)
    world.engine.stop_listening()
    for peer in world.engine.peers:
        peer.reset()
    await world.until(lambda: not world.pool.idle)
    answer = await world.ask(post(stream=True))
    assert (answer.status, answer.code) == (502, "upstream_error")
    answer = await world.ask(post(stream=True))
    assert (answer.status, answer.code) == (503, "no_ready_replica")
    await world.engine.listen(world.engine.port)
    await world.until(lambda: world.gateway.driver.ready_replicas == 1)
    assert (await world.ask(post(stream=True))).body == SHOWN


async def test_who_is_under_way_when_an_engine_goes_down_is_told(world: World) -> None:
    await world.start(says(EVENTS + chunk(WORD)), poll_ms=1_000.0)
    caller = await world.dial(post(stream=True))
    await world.until(lambda: WORD in caller.received)
    world.engine.stop_listening()
    for peer in world.engine.open_peers:
        if not peer.requests:
            peer.reset()
    await world.until(lambda: not world.gateway.driver.ready_replicas)
    (answer,) = await world.answered(caller)
    assert failure(answer, WORD)


# 21 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "interim",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 3,
        b"HTTP/1.1 102 Processing\r\ncontent-length: 5\r\n\r\n",
    ],
)
async def test_interim_answers_of_an_engine_are_skipped(world: World, interim: bytes) -> None:
    await world.start(says(interim + STREAM))
    for _ in range(2):
        answer = await world.ask(post(stream=True))
        assert (answer.status, answer.body) == (200, SHOWN)
    assert world.pool.dialled == 1


@pytest.mark.parametrize("status", [b"101 Switching Protocols", b"100 Continue"])
async def test_interim_answers_without_end_or_of_another_protocol_are_502(
    world: World, status: bytes
) -> None:
    upgrade = b"\r\nconnection: upgrade\r\nupgrade: x" if status.startswith(b"101") else b""
    await world.start(says((b"HTTP/1.1 " + status + upgrade + b"\r\n\r\n") * 20))
    assert (await world.ask(post(stream=True))).status == 502


async def test_a_body_that_ends_with_the_connection(world: World) -> None:
    replies = [
        UNTIL_CLOSE + WORD + USAGE + DONE,
        UNTIL_CLOSE + WORD,
        sized().replace(b"content-length: %d" % len(WHOLE), b"x: y"),
        sized()[:-1],
    ]
    await world.start(lambda peer: peer.close(replies.pop(0)))
    answer = await world.ask(post(stream=True))
    assert (answer.body, answer.whole) == (WORD + DONE, True)
    assert failure(await world.ask(post(stream=True)), WORD) == "upstream_error"
    assert (await world.ask(post())).body == WHOLE
    assert (await world.ask(post())).status == 502
    assert world.pool.idle == 0
