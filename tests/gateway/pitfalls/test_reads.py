"""However bytes are cut into reads, the same comes out (14, 15, 23)."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.adapters.upstream.scenes import DONE, EVENTS, LAST, PING, USAGE, Peer, chunk
from tests.gateway.pitfalls.scenes import HEALTH, WHOLE, World, post, says, sized

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

GAP_S = 0.001
TEXT = 'data: {"choices":[{"delta":{"content":"é€😀 \\"usage\\": "}}]}\n\n'.encode()
CRLF = b'data: {"choices":[{"delta":{"content":"word"}}]}\r\n\r\n'
FRAMES = TEXT + CRLF + PING
REPLY = EVENTS + chunk(TEXT + CRLF) + chunk(PING + USAGE + DONE) + LAST
ANSWER = sized(
    "é€😀".encode().join([b'{"usage":{"prompt_tokens":7,"completion_tokens":2},"x":"', b'"}'])
)
SHOW: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def in_pieces(world: World, pieces: Callable[[], Sequence[bytes]]) -> Callable[[Peer], None]:
    """Return a behaviour that says pieces one after the other, so that each is a read of its own."""

    def behave(peer: Peer) -> None:
        for nth, piece in enumerate(pieces()):
            world.loop.call_later(nth * GAP_S, peer.say, piece)

    return behave


def seen(world: World) -> tuple[int, int]:
    """Return the frames that were counted of the last answer, and the tokens that it told of."""
    row = world.gateway.driver.recent[-1]
    assert row.timing is not None
    assert row.usage is not None
    return row.timing.tokens, row.usage.output_tokens


@pytest.mark.parametrize("shown", [True, False])
async def test_every_place_in_which_a_stream_is_cut(world: World, *, shown: bool) -> None:
    at = 0
    await world.start(in_pieces(world, lambda: (REPLY[:at], REPLY[at:])))
    request = post(**SHOW) if shown else post(stream=True)
    body = FRAMES + USAGE + DONE if shown else FRAMES + DONE
    for at in range(1, len(REPLY)):  # noqa: B007 - the engine looks at it
        answer = await world.ask(request)
        assert (answer.status, answer.body, answer.whole) == (200, body, True)
        assert seen(world) == (2, 2)
    assert world.pool.dialled <= 4, "only a cut within the end itself leaves a doubt"


@pytest.mark.parametrize("shown", [True, False])
async def test_a_stream_that_comes_byte_by_byte(world: World, *, shown: bool) -> None:
    await world.start(in_pieces(world, lambda: [bytes([byte]) for byte in REPLY]))
    for _ in range(2):
        answer = await world.ask(post(**SHOW) if shown else post(stream=True))
        assert answer.body == (FRAMES + USAGE + DONE if shown else FRAMES + DONE)
        assert seen(world) == (2, 2)


async def test_every_place_in_which_a_whole_answer_is_cut(world: World) -> None:
    at = 0
    await world.start(in_pieces(world, lambda: (ANSWER[:at], ANSWER[at:])))
    for at in range(1, len(ANSWER)):  # noqa: B007 - as above
        answer = await world.ask(post())
        assert answer.body == ANSWER.partition(b"\r\n\r\n")[2]
        assert seen(world) == (2, 2)
    assert world.pool.dialled == 1


@pytest.mark.parametrize("chunked", [True, False])
async def test_every_place_in_which_a_request_is_cut(world: World, *, chunked: bool) -> None:
    request = post(messages=[{"role": "user", "content": "é€😀"}])
    if chunked:
        top, _, body = request.partition(b"\r\n\r\n")
        top = top.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
        request = top + b"\r\n\r\n" + chunk(body[:40]) + chunk(body[40:]) + b"0\r\nx: y\r\n\r\n"
    await world.start(says(sized()))
    caller = await world.dial()
    for at in range(1, len(request)):
        caller.received.clear()
        caller.say(request[:at])
        await world.pass_time(GAP_S)
        caller.say(request[at:])
        (answer,) = await world.answered(caller)
        assert (answer.status, answer.body) == (200, WHOLE)
    bodies = {one.partition(b"\r\n\r\n")[2] for one in world.engine.peer.requests}
    assert len(bodies) == 1


async def test_a_request_that_comes_byte_by_byte(world: World) -> None:
    await world.start(says(sized()))
    caller = await world.dial()
    for byte in post() + HEALTH:
        caller.say(bytes([byte]))
        await world.pass_time(GAP_S)
    assert [one.status for one in await world.answered(caller, 2)] == [200, 200]


# 23 ---------------------------------------------------------------------------------------------

NULL = TEXT.replace(b"}]}\n\n", b'}],"usage":null}\n\n')
FINAL = (
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
)


@pytest.mark.parametrize(
    ("shown", "with_done", "null", "bare"), list(itertools.product([True, False], repeat=4))
)
async def test_usage_is_hidden_or_shown_however_it_is_told(
    world: World, *, shown: bool, with_done: bool, null: bool, bare: bool
) -> None:
    last = USAGE if bare else FINAL
    first = NULL if null else TEXT
    ends = [last + DONE] if with_done else [last, DONE]
    await world.start(says(EVENTS + b"".join(map(chunk, [first, CRLF, *ends])) + LAST))
    answer = await world.ask(post(**SHOW) if shown else post(stream=True))
    hidden = b"" if bare else FINAL[: FINAL.index(b',"usage"')] + b"}\n\n"
    if shown:
        assert answer.body == first + CRLF + last + DONE
    else:
        assert answer.body == TEXT + CRLF + hidden + DONE
    assert seen(world)[1] == 2
