"""One exchange over raw sockets: what is handed over, in which order, and how it ends."""

import asyncio
from collections.abc import Callable

import pytest

from headrace.adapters.upstream.exchange import QUEUE_HIGH
from headrace.adapters.upstream.sse import FRAME_MAX
from headrace.model.engine import Usage
from headrace.model.meter import Meter
from headrace.ports.engine import Route
from headrace.ports.upstream import CutError, MalformedError, ReportedError
from headrace.units import DurationNs, Tokens
from tests.adapters.upstream.scenes import (
    DONE,
    EVENTS,
    LAST,
    OK,
    PING,
    USAGE,
    WORD,
    Call,
    Peer,
    Scene,
    answers,
    chunk,
)

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

READ = 262_144  # what either loop reads at most at once
MIB = 1 << 20
ERROR = b'data: {"error":{"message":"out of memory"}}\n\n'
TOLD = Usage(
    input_tokens=Tokens(7),
    cached_tokens=Tokens(0),
    output_tokens=Tokens(2),
    tells_cached=False,
)


def silent(_: Peer) -> None:
    """Answer nothing."""


async def test_a_stream_is_handed_over_as_it_comes(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    meter = Meter(bound_ns=DurationNs(0))
    call = scene.ask(pool, body=b"{}", meter=meter)
    await scene.until(lambda: server.requests == 1)
    server.peer.say(EVENTS)
    await scene.until(lambda: call.status == 200)
    assert (b"transfer-encoding", b"chunked") in call.headers
    server.peer.say(chunk(WORD))
    await scene.until(lambda: call.data == WORD)
    assert (call.frames, meter.tokens) == (1, 1)
    server.peer.say(chunk(PING + WORD + WORD), chunk(USAGE + DONE), LAST)
    result = await scene.result(call)
    assert (call.data, call.frames) == (WORD + PING + WORD + WORD + USAGE + DONE, 3)
    assert (result.error, result.status, result.attempts, result.frames) == (None, 200, 1, 3)
    assert (result.done, result.usage, result.whole, meter.tokens) == (True, TOLD, True, 3)


@pytest.mark.parametrize("hide", [True, False])
@pytest.mark.parametrize("together", [True, False])
async def test_usage_is_hidden_from_who_did_not_ask(
    scene: Scene, hide: bool, together: bool
) -> None:
    end = chunk(USAGE + DONE) if together else chunk(USAGE) + chunk(DONE)
    server = await scene.server(answers(EVENTS + chunk(WORD) + end + LAST))
    pool = scene.pool(server)
    call, result = await scene.get(pool, hide_usage=hide)
    assert call.data == WORD + (b"" if hide else USAGE) + DONE
    assert (result.usage, result.done, pool.idle) == (TOLD, True, 1)


async def test_every_cut_gives_the_same(scene: Scene) -> None:
    word = WORD.replace(b"word", "wörd 🌊".encode())
    raw = EVENTS + chunk(word + PING[:3]) + chunk(PING[3:] + USAGE) + chunk(DONE) + LAST
    server = await scene.server(silent)
    pool = scene.pool(server)
    for parts in [[raw[:at], raw[at:]] for at in range(1, len(raw))] + [
        [raw[at : at + 1] for at in range(len(raw))]
    ]:
        call = scene.ask(pool, hide_usage=True)
        await scene.until(lambda: pool.dialled == 1)
        assert call.exchange is not None
        for part in parts:
            call.exchange.received(part)
        (result,) = call.results
        assert (call.data, result.usage, result.frames) == (word + PING + DONE, TOLD, 1)
        assert (result.error, result.done) == (None, True)


async def test_an_answer_without_frames_is_handed_over_whole(scene: Scene) -> None:
    body = b'{"choices":[{"index":0}],"usage":{"prompt_tokens":7,"completion_tokens":2}}'
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    server = await scene.server(silent)
    pool = scene.pool(server)
    call = scene.ask(pool, hide_usage=True)
    await scene.until(lambda: server.requests == 1)
    server.peer.say(head, chunk(body[:20]))
    await scene.until(lambda: call.status == 200)
    await scene.turns()
    assert not call.pieces
    server.peer.say(chunk(body[20:30]), chunk(body[30:]), LAST)
    result = await scene.result(call)
    assert (call.pieces, call.frames, pool.idle) == ([body], 0, 1)
    assert (result.error, result.usage, result.whole, result.done) == (None, TOLD, True, False)


async def test_an_error_status_tells_no_usage(scene: Scene) -> None:
    server = await scene.server(answers(OK.replace(b"200", b"429")))
    call, result = await scene.get(scene.pool(server))
    assert (call.status, call.pieces, call.frames) == (429, [b"ok"], 0)
    assert (result.error, result.status, result.usage) == (None, 429, None)


async def test_an_answer_has_its_limit(scene: Scene) -> None:
    server = await scene.server(answers(OK, OK.replace(b"2\r\n", b"9999\r\n")))
    pool = scene.pool(server)
    call, result = await scene.get(pool, answer_limit=2)
    assert (call.pieces, result.error, pool.idle) == ([b"ok"], None, 1)
    call, result = await scene.get(pool, answer_limit=1)
    assert isinstance(result.error, MalformedError)
    assert (call.pieces, result.whole, pool.idle) == ([], True, 0)


async def test_a_whole_answer_waits_for_a_listener_that_pauses(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    call = scene.ask(pool)
    await scene.until(lambda: server.requests == 1)
    call.pause()
    server.peer.say(OK)
    await scene.until(lambda: pool.idle == 1)
    assert not call.pieces
    call.resume()
    assert (call.pieces, call.results[0].error) == ([b"ok"], None)


async def test_head_and_empty_answers_do_not_hang(scene: Scene) -> None:
    server = await scene.server(answers(OK.removesuffix(b"ok"), b"HTTP/1.1 204 No\r\n\r\n", OK))
    pool = scene.pool(server)
    call, result = await scene.get(pool, "HEAD")
    assert (call.status, call.data, result.error, pool.idle) == (200, b"", None, 0)
    call, result = await scene.get(pool, "OPTIONS")
    assert (call.status, call.data, result.error, pool.idle) == (204, b"", None, 1)
    call, _ = await scene.get(pool)
    assert (call.data, len(server.peers)) == (b"ok", 2)


async def test_interim_answers_and_trailers_leave_no_trace(scene: Scene) -> None:
    raw = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
        + EVENTS + chunk(DONE) + b"0\r\nX-Trailer: 1\r\n\r\n"
    )  # fmt: skip
    server = await scene.server(answers(raw, OK))
    pool = scene.pool(server)
    call, result = await scene.get(pool)
    assert (call.status, call.data, result.error) == (200, DONE, None)
    assert [name for name, _ in call.headers] == [b"content-type", b"transfer-encoding"]
    call, _ = await scene.get(pool)
    assert (call.headers, len(server.peers)) == ([(b"content-length", b"2")], 1)


# Ends before the end ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
@pytest.mark.parametrize(
    "last",
    [b"", b"2", b"5\r\n", chunk(WORD[:9]), chunk(WORD)[:-9], chunk(WORD + DONE)[:-2], b"0\r\n"],
)
async def test_an_engine_that_dies_never_ends_cleanly(
    scene: Scene, end: Callable[[Peer], None], last: bytes
) -> None:
    server = await scene.server(silent)
    call = scene.ask(scene.pool(server))
    await scene.until(lambda: server.requests == 1)
    server.peer.say(EVENTS, chunk(WORD))
    await scene.until(lambda: call.frames == 1)
    server.peer.say(last)
    await scene.turns()
    end(server.peer)
    result = await scene.result(call)
    assert isinstance(result.error, CutError)
    assert not result.error.retryable
    assert (result.whole, result.status) == (True, 200)
    assert call.data in (WORD, WORD + WORD + DONE), "only whole frames"


async def test_an_engine_that_dies_within_a_large_frame_leaves_it_open(scene: Scene) -> None:
    server = await scene.server(silent)
    call = scene.ask(scene.pool(server))
    await scene.until(lambda: server.requests == 1)
    server.peer.say(EVENTS, chunk(b"data: " + b"x" * 2 * FRAME_MAX))
    await scene.until(lambda: len(call.data) == 2 * FRAME_MAX + 6)
    server.peer.close()
    result = await scene.result(call)
    assert isinstance(result.error, CutError)
    assert not result.whole


async def test_a_body_that_ends_with_the_connection_needs_its_end_mark(scene: Scene) -> None:
    head = EVENTS.replace(b"Transfer-Encoding: chunked\r\n", b"")
    replies = [head + WORD + DONE, head + WORD, OK.replace(b"Content-Length: 2", b"X: y")]
    server = await scene.server(lambda peer: peer.close(replies[len(server.peers) - 1]))
    pool = scene.pool(server)
    call, result = await scene.get(pool)
    assert (call.data, result.error, result.done) == (WORD + DONE, None, True)
    call, result = await scene.get(pool)
    assert isinstance(result.error, CutError)
    assert call.data == WORD
    call, result = await scene.get(pool)
    assert (call.data, result.error) == (b"ok", None)


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize(
    ("route", "name", "last"),
    [
        (Route.MESSAGES, b"content_block_delta", b"message_stop"),
        (Route.RESPONSES, b"response.output_text.delta", b"response.completed"),
    ],
)
async def test_a_stream_that_names_its_end_needs_it(
    scene: Scene, route: Route, name: bytes, last: bytes, close: bool
) -> None:
    content, end = [b"event: %s\ndata: {}\n\n" % kind for kind in (name, last)]

    def say(peer: Peer) -> None:
        body = content + end if server.requests == 1 else content
        if close:
            peer.close(EVENTS.replace(b"Transfer-Encoding: chunked\r\n", b""), body)
        else:
            peer.say(EVENTS, chunk(body), LAST)

    server = await scene.server(say)
    pool = scene.pool(server)
    call, result = await scene.get(pool, route=route)
    assert (call.data, result.error, result.done) == (content + end, None, True)
    call, result = await scene.get(pool, route=route)
    assert isinstance(result.error, CutError)
    assert (call.data, result.whole, result.frames) == (content, True, 1)


async def test_half_a_frame_is_not_handed_over_before_an_error(scene: Scene) -> None:
    head = EVENTS.replace(b"Transfer-Encoding: chunked\r\n", b"")
    server = await scene.server(lambda peer: peer.close(head + WORD + WORD[:-2]))
    call, result = await scene.get(scene.pool(server))
    assert isinstance(result.error, CutError)
    assert (call.data, result.whole, result.frames) == (WORD, True, 1)


async def test_an_end_before_the_length_is_no_end(scene: Scene) -> None:
    server = await scene.server(lambda peer: peer.close(OK[:-1]))
    call, result = await scene.get(scene.pool(server))
    assert isinstance(result.error, CutError)
    assert (call.status, call.data, result.whole) == (200, b"", True)


async def test_an_error_within_the_stream_is_an_error(scene: Scene) -> None:
    server = await scene.server(answers(EVENTS + chunk(WORD + ERROR) + chunk(DONE) + LAST))
    pool = scene.pool(server)
    call, result = await scene.get(pool)
    assert isinstance(result.error, ReportedError)
    assert result.error.data == b'{"error":{"message":"out of memory"}}'
    assert (call.data, result.done, result.frames, pool.idle) == (WORD, False, 1, 1)


@pytest.mark.parametrize(
    "reply",
    [
        OK.replace(b"Content-Length: 2", b"Transfer-Encoding: gzip, chunked"),
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
        b"\x15\x03\x01",
        EVENTS + b"zz\r\n",
    ],
)
async def test_what_is_no_plain_http_ends_the_exchange(scene: Scene, reply: bytes) -> None:
    server = await scene.server(answers(reply))
    _, result = await scene.get(scene.pool(server))
    assert isinstance(result.error, MalformedError)
    await scene.until(lambda: not server.open_peers)


async def test_an_answer_before_the_request_was_read_is_heard(scene: Scene) -> None:
    def refuse(peer: Peer) -> None:
        assert peer.transport is not None
        peer.transport.pause_reading()
        peer.say(OK.replace(b"200", b"413"))

    server = await scene.server(silent)
    server.early = refuse
    pool = scene.pool(server)
    call, result = await scene.get(pool, body=b"x" * 16 * MIB)
    assert (call.status, call.data, result.error) == (413, b"ok", None)
    assert pool.idle == 0, "half a request is on that connection"
    assert server.peer.transport is not None
    server.peer.transport.resume_reading()


# Leaving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200", EVENTS, EVENTS + chunk(WORD)])
async def test_who_leaves_takes_the_request_with_it(scene: Scene, said: bytes) -> None:
    server = await scene.server(answers(said))
    pool = scene.pool(server)
    call = scene.ask(pool)
    await scene.until(lambda: server.requests == 1)
    if said.startswith(EVENTS):
        await scene.until(lambda: call.status == 200)
    call.abort()
    call.abort()
    assert (pool.busy, pool.idle) == (0, 0)
    told = call.data
    await scene.until(lambda: not server.open_peers)
    assert not call.results
    assert call.data == told


@pytest.mark.parametrize("when", ["head", "frames"])
async def test_who_leaves_within_a_callback_hears_no_more(scene: Scene, when: str) -> None:
    server = await scene.server(answers(EVENTS + chunk(WORD) + chunk(DONE) + LAST))
    pool = scene.pool(server)
    call = scene.ask(pool)
    call.hook = lambda what: call.abort() if what == when else None
    await scene.until(lambda: not server.open_peers and call.status == 200)
    assert not call.results
    assert bool(call.data) == (when == "frames")
    assert (pool.busy, pool.idle) == (0, 0)


async def test_who_leaves_a_pool_that_is_full_hears_nothing(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    pool.close()
    call = scene.ask(pool)
    call.abort()
    await scene.turns()
    assert not call.results


# A slow listener --------------------------------------------------------------------------------


def paused(call: Call) -> Call:
    """Have a listener pause with each piece it gets."""
    call.hook = lambda what: call.pause() if what == "frames" else None
    return call


async def drain(scene: Scene, call: Call) -> int:
    """Take one piece after the other; return the most that was held meanwhile."""
    exchange = call.exchange
    assert exchange is not None
    most = 0
    while not call.results:
        await scene.turns(3)
        most = max(most, exchange.queued)
        call.resume()
    return most


async def test_one_huge_chunk_reaches_a_slow_listener_whole_and_bounded(scene: Scene) -> None:
    frame = b"data: " + b"0123456789abcdef" * MIB + b"\n\n"
    server = await scene.server(answers(EVENTS + chunk(frame) + chunk(DONE) + LAST))
    pool = scene.pool(server)
    call = paused(scene.ask(pool))
    await scene.until(lambda: server.peer.is_stalled if server.peers else False)
    exchange = call.exchange
    assert exchange is not None
    await scene.until(lambda: bool(call.pieces))
    await scene.turns(100)
    assert QUEUE_HIGH <= exchange.queued <= QUEUE_HIGH + READ
    assert exchange.paused_since is not None
    assert server.peer.is_stalled
    most = await drain(scene, call)
    assert most <= QUEUE_HIGH + READ
    assert max(len(piece) for piece in call.pieces) <= READ + FRAME_MAX
    assert call.data == frame + DONE
    (result,) = call.results
    assert (result.error, result.whole, result.done, pool.idle) == (None, True, True, 1)


async def test_many_frames_reach_a_slow_listener_in_order(scene: Scene) -> None:
    frames = [WORD.replace(b"word", b"%06d" % number) for number in range(20_000)]
    server = await scene.server(answers(EVENTS + b"".join(map(chunk, frames)) + LAST))
    call = paused(scene.ask(scene.pool(server)))
    await scene.until(lambda: bool(call.pieces))
    await drain(scene, call)
    assert call.data == b"".join(frames)
    assert (call.frames, call.results[0].frames) == (20_000, 20_000)
    assert all(piece.endswith(b"\n\n") for piece in call.pieces)


async def test_the_end_waits_for_a_listener_that_pauses(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    call = scene.ask(pool)
    await scene.until(lambda: server.requests == 1)
    call.pause()
    server.peer.say(EVENTS, chunk(WORD + DONE), LAST)
    await scene.until(lambda: call.status == 200)
    await scene.turns()
    assert (pool.busy, pool.idle) == (0, 1), "the connection need not wait"
    assert not call.pieces
    assert not call.results
    call.resume()
    assert (call.data, call.results[0].error) == (WORD + DONE, None)


async def test_an_error_comes_after_what_was_held(scene: Scene) -> None:
    server = await scene.server(silent)
    call = scene.ask(scene.pool(server))
    await scene.until(lambda: server.requests == 1)
    call.pause()
    server.peer.close(EVENTS, chunk(WORD))
    await scene.until(lambda: not server.open_peers and call.status == 200)
    await scene.turns()
    assert not call.results
    call.resume()
    assert call.data == WORD
    assert isinstance(call.results[0].error, CutError)


async def test_who_leaves_while_pausing_hears_nothing(scene: Scene) -> None:
    server = await scene.server(answers(EVENTS + chunk(WORD) + LAST))
    pool = scene.pool(server)
    call = scene.ask(pool)
    call.pause()
    await scene.until(lambda: call.status == 200)
    await scene.turns()
    call.abort()
    call.resume()
    assert not call.pieces
    assert not call.results


async def test_a_listener_may_pause_and_resume_in_one_breath(scene: Scene) -> None:
    server = await scene.server(silent)
    call = scene.ask(scene.pool(server))
    await scene.until(lambda: server.requests == 1)
    call.pause()
    server.peer.say(EVENTS, chunk(WORD * 3_000), LAST)
    await scene.until(lambda: call.status == 200)
    await scene.turns()

    def flicker(what: str) -> None:
        if what == "frames":
            call.pause()
            call.resume()

    call.hook = flicker
    call.resume()
    await scene.result(call)
    assert call.data == WORD * 3_000


async def test_a_listener_that_fails_loses_its_connection_and_no_other(scene: Scene) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    server = await scene.server(answers(EVENTS + chunk(WORD)))
    pool = scene.pool(server)

    def fail(what: str) -> None:
        if what == "frames":
            raise ValueError("a bug")

    call = scene.ask(pool, hook=fail)
    result = await scene.result(call)
    assert isinstance(result.error, CutError)
    assert told
    assert (pool.busy, pool.idle) == (0, 0)
