"""Heads that are too long, or that two readers could understand differently (5, 6, 18, 20)."""

import pytest

from headrace.gateway import health
from headrace.gateway.connection import Connection
from headrace.ports.engine import Route
from tests.adapters.upstream.scenes import EVENTS
from tests.gateway.pitfalls.scenes import (
    HEALTH,
    SHOWN,
    STREAM,
    WHOLE,
    World,
    post,
    says,
    sized,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

BODY = post().partition(b"\r\n\r\n")[2]
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"content-length: %d" % len(BODY)
CODING = b"transfer-encoding: chunked"
KIB = 1_024


# 5 ----------------------------------------------------------------------------------------------


def padded(size: int) -> bytes:
    """Return a request whose head is so long."""
    return HEALTH[:-2] + b"x: " + b"y" * (size - len(HEALTH) - 5) + b"\r\n\r\n"


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("cap", [16 * KIB, 32 * KIB, 64 * KIB])
async def test_a_head_up_to_the_cap_passes_and_a_longer_one_is_431(
    world: World, monkeypatch: pytest.MonkeyPatch, cap: int, *, at_once: bool
) -> None:
    monkeypatch.setattr(Connection, "head_bytes_max", cap)
    await world.start(says(sized()))
    for size, status in ((cap - 100, 200), (cap + 100, 431)):
        request = padded(size)
        caller = await world.dial()
        for at in range(0, size, size if at_once else KIB):
            caller.say(request[at : at + (size if at_once else KIB)])
            await world.pass_time(0.001)
        answer = (await world.answered(caller))[0]
        assert answer.status == status
    assert answer.code == "headers_too_large"
    assert answer.headers[b"connection"] == b"close"


async def test_a_head_without_end_is_not_kept(world: World) -> None:
    await world.start(says(sized()))
    caller = await world.dial(HEALTH[:-2] + b"x: ")
    await world.until(lambda: bool(world.gateway.server.server_state.connections))
    (connection,) = world.gateway.server.server_state.connections
    assert isinstance(connection, Connection)
    for _ in range(200):
        caller.say(b"y" * KIB)
        await world.pass_time(0.001)
        assert connection._arriving < 70 * KIB
    assert caller.answer.status == 431
    caller.finish()
    await world.until(lambda: not world.gateway.server.server_state.connections)
    assert (caller.ended, caller.fault) == (True, None), "it could be read"


async def test_a_hundred_headers_pass_and_one_more_is_431(world: World) -> None:
    await world.start(says(sized()))
    for more, status in ((99, 200), (100, 431)):
        lines = b"".join(b"x-%d: y\r\n" % nth for nth in range(more))
        assert (await world.ask(HEALTH[:-2] + lines + b"\r\n")).status == status


@pytest.mark.parametrize("size", [60 * KIB, 80 * KIB])
async def test_heads_of_engines_are_bounded_too(world: World, size: int) -> None:
    await world.start(says(sized(WHOLE, b"200 OK", b"x: " + b"y" * size)))
    answer = await world.ask(post())
    assert answer.status == (200 if size < 64 * KIB else 502)


# 6 ----------------------------------------------------------------------------------------------


def asked(*lines: bytes, version: bytes = b"HTTP/1.1", host: bool = True) -> bytes:
    """Return a head as told, with a right key."""
    first = [b"POST /v1/chat/completions " + version, *([b"host: h"] if host else [])]
    return b"\r\n".join([*first, b"authorization: Bearer sk-free", *lines, b"", b""])


MALFORMED = {
    "length and coding": asked(LENGTH, CODING) + CHUNKED,
    "coding and length": asked(CODING, LENGTH) + CHUNKED,
    "two lengths": asked(LENGTH, LENGTH) + BODY,
    "two other lengths": asked(LENGTH, b"content-length: 1") + BODY,
    "a list of lengths": asked(LENGTH + b", %d" % len(BODY)) + BODY,
    "a signed length": asked(LENGTH.replace(b": ", b": +")) + BODY,
    "a negative length": asked(LENGTH.replace(b": ", b": -")) + BODY,
    "no number": asked(b"content-length: x") + BODY,
    "no host": asked(LENGTH, host=False) + BODY,
    "two hosts": asked(LENGTH, b"host: i") + BODY,
    "gzip": asked(b"transfer-encoding: gzip") + BODY,
    "gzip, chunked": asked(b"transfer-encoding: gzip, chunked") + CHUNKED,
    "chunked, gzip": asked(b"transfer-encoding: chunked, gzip") + CHUNKED,
    "chunked twice": asked(CODING, CODING) + CHUNKED,
    "chunked, chunked": asked(CODING + b", chunked") + CHUNKED,
    "not quite chunked": asked(b"transfer-encoding: xchunked") + CHUNKED,
    "identity": asked(b"transfer-encoding: identity", LENGTH) + BODY,
    "coding in 1.0": asked(CODING, version=b"HTTP/1.0") + CHUNKED,
    "a folded header": asked(LENGTH, b"x: y", b" z") + BODY,
    "a folded coding": asked(b"transfer-encoding:", b" chunked") + CHUNKED,
    "a space before the colon": asked(LENGTH.replace(b":", b" :")) + BODY,
    "a bare LF": asked(LENGTH).replace(b"\r\n", b"\n") + BODY,
    "one bare LF": asked(LENGTH).replace(b"h\r\n", b"h\n") + BODY,
    "a bare CR": asked(LENGTH, b"x: y\rz") + BODY,
    "a zero byte": asked(LENGTH, b"x: \0") + BODY,
    "a chunk size of LF": asked(CODING) + CHUNKED.replace(b"\r\n", b"\n"),
    "no chunk size": asked(CODING) + b"zz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a negative chunk": asked(CODING) + b"-1\r\n",
    "a chunk too long": asked(CODING) + b"%x\r\n%sxx\r\n0\r\n\r\n" % (len(BODY), BODY),
    "HTTP/2": asked(LENGTH, version=b"HTTP/2.0") + BODY,
    "HTTP/0.9": asked(LENGTH, version=b"HTTP/0.9") + BODY,
    "no HTTP": b"\x16\x03\x01\x02\x00\x01",
    "an address of another": b"GET http://h HTTP/1.1\r\nhost: h\r\n\r\n",
    "connect": b"CONNECT h:80 HTTP/1.1\r\nhost: h\r\n\r\n",
}


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=list(MALFORMED))
async def test_what_two_could_read_differently_is_400_and_nothing_upstream(
    world: World, request_: bytes
) -> None:
    await world.start(says(sized()))
    caller = await world.dial(request_, HEALTH)
    await world.until(lambda: caller.over)
    assert caller.answer.status == 400
    assert caller.answer.code == "invalid_value"
    assert caller.answer.headers[b"connection"] == b"close"
    assert caller.fault is None
    assert world.engine.requests == 0
    assert not world.gateway.driver.outcomes


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b" chunked "])
async def test_plain_chunks_pass(world: World, coding: bytes) -> None:
    await world.start(says(sized()))
    caller = await world.dial(asked(b"Transfer-Encoding: " + coding) + CHUNKED, HEALTH)
    assert [one.status for one in await world.answered(caller, 2)] == [200, 200]


async def test_http_1_0_gets_an_answer_that_ends_with_the_connection(world: World) -> None:
    await world.start(says(STREAM, sized()))
    streamed = post(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"host: h\r\n", b"")
    for request, body in ((streamed, SHOWN), (post().replace(b"P/1.1", b"P/1.0"), WHOLE)):
        caller = await world.dial(request)
        await world.until(lambda caller=caller: caller.over)  # type: ignore[misc]
        answer = caller.answer
        assert (answer.status, answer.body, answer.whole) == (200, body, True)
        assert b"transfer-encoding" not in answer.headers
        assert answer.headers[b"connection"] == b"close"


@pytest.mark.parametrize("split", range(0, 200, 40))
async def test_another_protocol_that_is_offered_is_not_taken(world: World, split: int) -> None:
    await world.start(says(sized()))
    offer = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMA")
    request = post(None, *offer)
    caller = await world.dial(request[:split])
    await world.pass_time(0.001)
    caller.say(request[split:], HEALTH)
    assert [one.status for one in await world.answered(caller, 2)] == [200, 200]
    assert world.engine.requests == 1
    assert b"pgrade" not in world.engine.peer.requests[0]


# 18 ---------------------------------------------------------------------------------------------

PATHS = [*Route, "/v1/models", health.LIVE[0], health.READY[0], "/none"]


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", PATHS)
async def test_head_and_options_do_not_hang_and_leave_the_connection_usable(
    world: World, path: str, method: str
) -> None:
    await world.start(says(sized()))
    request = f"{method} {path} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer sk-free\r\n\r\n"
    caller = await world.dial(request.encode())
    await world.until(lambda: b"\r\n\r\n" in caller.received)
    if method == "HEAD":
        assert caller.received.endswith(b"\r\n\r\n"), "no body"
    else:
        (answer,) = await world.answered(caller)
        assert answer.status in (404, 405)
    caller.received.clear()
    caller.say(HEALTH)
    assert (await world.answered(caller))[0].status == 200
    assert world.engine.requests == 0


# 20 ---------------------------------------------------------------------------------------------


async def test_trailers_of_callers_are_headers_of_no_request(world: World) -> None:
    await world.start(says(sized()))
    trailers = b"x-slo-ttft-ms: bad\r\nx-llm-d-inference-objective: batch\r\nx-request-id: t\r\n"
    request = asked(CODING) + CHUNKED[:-2] + trailers + b"\r\n"
    caller = await world.dial(request, request, HEALTH)
    answers = await world.answered(caller, 3)
    assert [one.status for one in answers] == [200] * 3
    assert not any(one.headers[b"x-request-id"] == b"t" for one in answers)
    assert [row.slo_class for row in world.gateway.driver.recent] == ["interactive"] * 2


@pytest.mark.parametrize("line", [b"y: " + b"z" * 1_000 + b"\r\n", b"y" * 1_000])
async def test_trailers_without_end_are_refused(world: World, line: bytes) -> None:
    await world.start(says(sized()))
    caller = await world.dial(asked(CODING) + CHUNKED[:-2])
    for _ in range(200):
        caller.say(line)
        await world.pass_time(0.001)
    assert caller.answer.status == 431
    assert world.engine.requests == 0


async def test_trailers_of_engines_are_dropped_and_the_connection_used_again(
    world: World,
) -> None:
    await world.start(says(STREAM[:-2] + b"x-late: 1\r\ncontent-type: x\r\n\r\n"))
    for _ in range(2):
        answer = await world.ask(post(stream=True))
        assert (answer.body, answer.whole) == (SHOWN, True)
        assert b"x-late" not in answer.headers
    assert world.pool.dialled == 1


async def test_two_lengths_of_an_engine_are_refused(world: World) -> None:
    await world.start(says(EVENTS[:-2] + b"content-length: 5\r\n\r\n" + STREAM[len(EVENTS) :]))
    assert (await world.ask(post(stream=True))).status == 502
