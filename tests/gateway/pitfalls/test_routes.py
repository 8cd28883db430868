"""Every route times every exit: nobody is left with anything, and each is told in its own words."""

import json
from typing import Any

import pytest

from headrace.ports.engine import Route
from tests.adapters.upstream.scenes import DONE, EVENTS, LAST, WORD, chunk
from tests.gateway.pitfalls.scenes import TURNS, World, head, says, silent, sized
from tests.gateway.scenes import MODEL

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
ASKED: dict[Route, dict[str, Any]] = {
    Route.CHAT: {"messages": MESSAGES},
    Route.COMPLETIONS: {"prompt": "hi"},
    Route.RESPONSES: {"input": "hi"},
    Route.MESSAGES: {"messages": MESSAGES, "max_tokens": 20},
    Route.EMBEDDINGS: {"input": "hi"},
}
NAMED = b"event: %s\ndata: {}\n\n"
SAID: dict[Route, tuple[bytes, bytes]] = {
    Route.CHAT: (WORD, DONE),
    Route.COMPLETIONS: (WORD, DONE),
    Route.RESPONSES: (NAMED % b"response.output_text.delta", NAMED % b"response.completed"),
    Route.MESSAGES: (NAMED % b"content_block_delta", NAMED % b"message_stop"),
}
"""A word and the end of a stream, in the route's words."""


def asked(route: Route, *, stream: bool = True) -> bytes:
    """Return a request of a route."""
    more = {"stream": True} if stream else {}
    body = json.dumps({"model": MODEL, **ASKED[route], **more}).encode()
    return head(b"content-length: %d" % len(body), path=route.encode()) + body


@pytest.mark.parametrize("route", SAID)
async def test_a_stream_of_any_route_ends_well(world: World, route: Route) -> None:
    word, end = SAID[route]
    await world.start(says(EVENTS + chunk(word) + chunk(end) + LAST))
    answer = await world.ask(asked(route))
    assert (answer.status, answer.body, answer.whole) == (200, word + end, True)
    assert world.gateway.driver.outcomes == {"success": 1}
    assert world.engine.peer.requests[0].startswith(b"POST " + route.encode() + b" ")


@pytest.mark.parametrize("route", SAID)
async def test_death_within_a_stream_of_any_route_is_told(world: World, route: Route) -> None:
    word, end = SAID[route]
    await world.start(silent)
    caller = await world.dial(asked(route))
    peer = await world.sent()
    peer.say(EVENTS, chunk(word))
    await world.until(lambda: word in caller.received)
    peer.close(chunk(end[:-9]))
    (answer,) = await world.answered(caller)
    assert answer.whole
    assert answer.body.startswith(word)
    assert b"error" in answer.body[len(word) :]
    assert world.gateway.driver.outcomes == {"error": 1}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", Route)
async def test_who_leaves_any_route_is_let_go_at_once(
    world: World, route: Route, *, stream: bool
) -> None:
    await world.start(silent)
    caller = await world.dial(asked(route, stream=stream and route in SAID))
    peer = await world.sent()
    before = world.turns.count
    caller.leave()
    await world.until(lambda: not peer.is_open)
    assert world.turns.count - before <= TURNS
    await world.settled()
    assert world.gateway.driver.outcomes == {"client_cancel": 1}


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request", b"500 Oh", b"429 Slow"])
@pytest.mark.parametrize("route", Route)
async def test_whole_answers_of_any_route_and_status_end(
    world: World, route: Route, status: bytes
) -> None:
    await world.start(says(sized(b"{}", status)))
    answer = await world.ask(asked(route, stream=False))
    blamed = status[:3] in (b"200", b"400")
    assert answer.status == (int(status[:3]) if blamed else 502)
    assert (answer.body == b"{}") == blamed
    assert world.pool.idle == 1
