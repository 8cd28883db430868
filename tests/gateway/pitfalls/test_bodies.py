"""Bodies that are large, slow, waited for, or answered before they came (7, 9, 10, 19)."""

import pytest

from headrace.gateway.connection import Connection
from tests.adapters.upstream.scenes import Peer
from tests.gateway.pitfalls.scenes import (
    HEALTH,
    WHOLE,
    World,
    head,
    post,
    says,
    silent,
    sized,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

BODY = post().partition(b"\r\n\r\n")[2]
EXPECT = b"expect: 100-continue"
CODING = b"transfer-encoding: chunked"
LIMIT = 4_096
KIB, MIB = 1_024, 1_048_576
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def length(size: int) -> bytes:
    return b"content-length: %d" % size


# 7 ----------------------------------------------------------------------------------------------


async def test_who_expects_it_is_told_once_to_continue(world: World) -> None:
    await world.start(says(sized()))
    caller = await world.dial(head(length(len(BODY)), EXPECT))
    await world.until(lambda: bool(caller.received))
    assert bytes(caller.received) == CONTINUE
    caller.say(BODY[:9])
    await world.pass_time(0.01)
    caller.say(BODY[9:], HEALTH)
    answers = await world.answered(caller, 2)
    assert [one.status for one in answers] == [100, 200, 200]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (head(length(5), EXPECT, key=None), 401),
        (head(length(LIMIT + 1), EXPECT), 413),
        (head(length(5), EXPECT, path=b"/none"), 404),
        (head(length(5), EXPECT, path=b"/health"), 405),
        (head(length(5), EXPECT, CODING), 400),
    ],
)
async def test_who_is_refused_is_not_told_to_continue(
    world: World, request_: bytes, status: int
) -> None:
    await world.start(silent, body_limit_bytes=LIMIT)
    caller = await world.dial(request_)
    await world.until(lambda: caller.over)
    assert [one.status for one in caller.answers] == [status]
    assert caller.answer.headers[b"connection"] == b"close", "or what follows could be a body"
    caller.say(HEALTH)
    await world.until(lambda: not world.gateway.server.server_state.connections)
    assert len(caller.answers) == 1


# 9 ----------------------------------------------------------------------------------------------


async def test_a_length_over_the_limit_is_413_before_a_byte_of_it(world: World) -> None:
    await world.start(silent, body_limit_bytes=LIMIT)
    caller = await world.dial(head(length(LIMIT + 1)))
    (answer,) = await world.answered(caller)
    assert (answer.status, answer.code) == (413, "request_too_large")


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1])
async def test_the_limit_itself_passes(world: World, size: int) -> None:
    await world.start(says(sized()), body_limit_bytes=LIMIT)
    body = BODY.ljust(size)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    for request in (head(length(size)) + body, head(CODING) + chunks):
        assert (await world.ask(request)).status == (413 if size > LIMIT else 200)


async def test_chunks_over_the_limit_are_413_at_the_limit(world: World) -> None:
    await world.start(silent, body_limit_bytes=LIMIT)
    caller = await world.dial(head(CODING))
    said = 0
    while not caller.received:
        caller.say(b"400\r\n%s\r\n" % (b" " * KIB))
        said += KIB
        await world.pass_time(0.001)
    assert said <= LIMIT + KIB
    assert (await world.answered(caller))[0].status == 413


# 10 ---------------------------------------------------------------------------------------------


async def dripping(world: World, first: bytes, rest: bytes) -> tuple[int, float]:
    """Say something, and then a byte each second; return what it comes to, and when."""
    caller = await world.dial(first)
    begun, at = world.loop.time(), 0

    def drip() -> None:
        nonlocal at
        if not caller.over:
            caller.say(rest[at : at + 1])
            at += 1
            world.loop.call_later(1.0, drip)

    if rest:
        drip()
    await world.until(lambda: caller.over)
    took = world.loop.time() - begun
    return caller.answer.status if caller.received else 0, round(took, 2)


@pytest.mark.parametrize(
    ("first", "rest", "status"),
    [
        (b"", b"", 0),
        (b"", HEALTH, 408),
        (HEALTH[:-2] + b"x: ", b"y" * 99, 408),
        (head(length(99)), b" " * 99, 408),
        (head(CODING), b"1\r\n \r\n" * 20, 408),
        (head(length(99), key=None), b" " * 99, 401),
    ],
)
async def test_who_is_slower_than_allowed_is_hung_up_on(
    world: World, first: bytes, rest: bytes, status: int
) -> None:
    await world.start(silent, header_timeout_s=4.5)
    found, took = await dripping(world, first, rest)
    assert (found, took) == (status, 4.5 if status != 401 else 0)
    begun = world.loop.time()
    await world.until(lambda: not world.gateway.server.server_state.connections)
    assert world.loop.time() - begun <= 4.5, "nor is it read from for ever"


# 19 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status"), [(head(length(3 * MIB), key=None), 401), (head(length(3 * MIB)), 413)]
)
async def test_who_is_answered_early_may_send_on_and_read_the_answer(
    world: World, request_: bytes, status: int
) -> None:
    await world.start(silent, body_limit_bytes=LIMIT)
    caller = await world.dial(request_)
    caller.stop_reading()
    sent = b" " * (64 * KIB)
    for _ in range(3 * MIB // len(sent)):
        caller.say(sent)
        await world.until(lambda: not caller.is_stalled)
    assert caller.is_open
    caller.read_on()
    await world.until(lambda: caller.over)
    assert (caller.answer.status, caller.answer.whole) == (status, True)
    caller.finish()
    await world.until(lambda: not world.gateway.server.server_state.connections)
    assert (caller.ended, caller.fault) == (True, None), "not a reset"


async def test_what_is_sent_on_after_an_answer_is_taken_up_to_a_limit(world: World) -> None:
    await world.start(silent, body_limit_bytes=LIMIT)
    caller = await world.dial(head(length(1_000 * MIB)))
    sent = 0
    while caller.is_open and sent < 100 * MIB:
        caller.say(b" " * (64 * KIB))
        sent += 64 * KIB
        await world.pass_time(0.0)
        await world.until(lambda: not caller.is_stalled or not caller.is_open)
    assert Connection.drain_bytes_max <= sent < 20 * MIB, "and what sockets hold"
    assert caller.answer.status == 413


async def test_an_engine_that_answers_early_is_heard_and_not_used_again(world: World) -> None:
    await world.start(silent)

    def early(peer: Peer) -> None:
        assert peer.transport is not None
        peer.transport.pause_reading()
        peer.say(sized(b'{"error":{}}', b"413 Too Large"))

    world.engine.early = early
    answer = await world.ask(post(BODY[:-1] + b" " * (8 * MIB - 200) + BODY[-1:]))
    assert (answer.status, answer.body) == (413, b'{"error":{}}')
    assert world.pool.idle == 0
    peer = world.engine.peer
    assert peer.transport is not None
    peer.transport.resume_reading()
    await world.until(lambda: not peer.is_open)


async def test_an_answer_to_a_whole_request_keeps_the_connection(world: World) -> None:
    await world.start(says(sized(WHOLE)))
    caller = await world.dial(post(key=None), post(path=b"/none"), post())
    assert [one.status for one in await world.answered(caller, 3)] == [401, 404, 200]


@pytest.mark.parametrize("said", [b"", head()[:-9], head(length(9), key=None), HEALTH])
async def test_nobody_whom_no_answer_is_owed_delays_the_end(world: World, said: bytes) -> None:
    await world.start(silent)
    await world.dial(said)
    await world.pass_time(0.5)
    begun, state = world.loop.time(), world.gateway.server.server_state
    world.gateway.stop()
    await world.until(lambda: not state.connections)
    assert world.loop.time() - begun < 1.0
