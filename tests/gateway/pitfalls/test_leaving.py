"""Callers that leave: the engine is let go of in the same turns of the loop (2, 8, 22)."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.gateway.exchange import COMMENT
from tests.adapters.upstream.scenes import EVENTS, WORD, chunk
from tests.gateway.pitfalls.scenes import (
    HEALTH,
    SHOWN,
    STREAM,
    TURNS,
    WHOLE,
    Caller,
    World,
    head,
    post,
    says,
    silent,
    sized,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

WAYS: list[Callable[[Caller], None]] = [Caller.leave, Caller.finish]
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 16_000}], "stream": True}


async def gone(world: World, caller: Caller, way: Callable[[Caller], None] = Caller.leave) -> None:
    """Have a caller leave; everything about it is over in so many turns, without any time."""
    before, time = world.turns.count, world.loop.time()
    way(caller)
    await world.settled()
    await world.until(lambda: not world.gateway.server.server_state.connections)
    await world.until(lambda: len(world.engine.open_peers) == world.pool.idle)
    assert world.turns.count - before <= TURNS
    assert world.loop.time() == time


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200", EVENTS, EVENTS + chunk(WORD[:9])])
async def test_leaving_before_the_head(
    world: World, said: bytes, way: Callable[[Caller], None]
) -> None:
    await world.start(says(said))
    caller = await world.dial(post(stream=True))
    await world.sent()
    await gone(world, caller, way)
    assert (bytes(caller.received), world.engine.requests) == (b"", 1)
    assert world.gateway.driver.outcomes == {"client_cancel": 1}


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_within_a_stream(world: World, way: Callable[[Caller], None]) -> None:
    await world.start(says(EVENTS + chunk(WORD)))
    caller = await world.dial(post(stream=True))
    await world.until(lambda: caller.received.endswith(chunk(WORD)))
    await gone(world, caller, way)
    assert world.gateway.driver.outcomes == {"client_cancel": 1}


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_before_a_whole_answer(world: World, way: Callable[[Caller], None]) -> None:
    await world.start(says(sized()[:-5]))
    caller = await world.dial(post())
    await world.sent()
    await gone(world, caller, way)


async def test_leaving_while_it_dials(world: World) -> None:
    await world.start(silent)
    world.pool.drop_idle()
    world.pool._dial = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    caller = await world.dial(post(stream=True))
    await world.until(lambda: world.pool.busy == 1)
    await gone(world, caller)
    assert world.engine.requests == 0


async def test_leaving_the_queue(world: World) -> None:
    await world.start(silent)
    first = await world.dial(post(**LONG))
    await world.sent()
    second = await world.dial(post(**LONG))
    await world.until(lambda: world.gateway.driver.live == 2)
    before = world.turns.count
    second.leave()
    await world.until(lambda: world.gateway.driver.live == 1)
    assert world.turns.count - before <= TURNS
    assert world.engine.requests == 1
    await gone(world, first)


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_before_the_body_is_here(world: World, way: Callable[[Caller], None]) -> None:
    await world.start(silent)
    caller = await world.dial(post()[:-1])
    await world.until(lambda: bool(world.gateway.server.server_state.tasks))
    await gone(world, caller, way)
    assert (bytes(caller.received), world.engine.requests) == (b"", 0)
    assert not world.gateway.driver.outcomes


async def test_leaving_half_a_head(world: World) -> None:
    await world.start(silent)
    caller = await world.dial(head()[:-2])
    await world.until(lambda: bool(world.gateway.server.server_state.connections))
    await gone(world, caller, Caller.finish)
    assert bytes(caller.received) == b""


async def test_who_closes_its_sending_side_after_the_answer_has_all_of_it(world: World) -> None:
    await world.start(says(STREAM))
    caller = await world.dial(post(stream=True))
    (answer,) = await world.answered(caller)
    caller.finish()
    await world.until(lambda: caller.over)
    assert (answer.body, answer.whole, caller.fault) == (SHOWN, True, None)


# Requests sent ahead ----------------------------------------------------------------------------


async def test_three_sent_ahead_are_answered_in_order(world: World) -> None:
    bodies = [WHOLE.replace(b"word", word) for word in (b"one", b"two", b"three")]
    await world.start(says(*map(sized, bodies)))
    caller = await world.dial(post() * 3, HEALTH)
    answers = await world.answered(caller, 4)
    assert [one.body for one in answers[:3]] == bodies
    assert answers[3].json == {"status": "ok"}
    assert len(world.engine.peers) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("more", [HEALTH, post(), post()[:-1], head()[:-9], HEALTH * 3])
async def test_who_sent_ahead_is_seen_to_leave(
    world: World, way: Callable[[Caller], None], more: bytes
) -> None:
    await world.start(says(EVENTS + chunk(WORD)))
    caller = await world.dial(post(stream=True))
    await world.until(lambda: bool(caller.received))
    caller.say(more)
    await world.pass_time(0.5)
    await gone(world, caller, way)
    assert world.engine.requests == 1
    assert world.gateway.driver.outcomes == {"client_cancel": 1}


@pytest.mark.parametrize("more", [HEALTH * 30, post(b" " * 100_000)])
async def test_too_much_sent_ahead_is_not_kept_and_leaving_still_seen(
    world: World, more: bytes
) -> None:
    await world.start(says(EVENTS + chunk(WORD)))
    caller = await world.dial(post(stream=True))
    await world.until(lambda: bool(caller.received))
    caller.say(more)
    await world.pass_time(0.5)
    (connection,) = world.gateway.server.server_state.connections
    assert len(connection._lines) <= 9  # type: ignore[union-attr]
    assert all(len(one.cycle.body) < 70_000 for one in connection._lines)  # type: ignore[union-attr]
    await gone(world, caller)


async def test_what_was_sent_ahead_beyond_is_not_answered(world: World) -> None:
    await world.start(silent)
    caller = await world.dial(post())
    peer = await world.sent()
    caller.say(HEALTH * 30)
    await world.pass_time(0.5)
    peer.say(sized())
    await world.until(lambda: caller.over)
    assert caller.fault is None
    assert [one.status for one in caller.answers] == [200] * 9
    assert caller.answers[-1].headers[b"connection"] == b"close"


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\n\r\n", b"\0\r\n\r\n"])
async def test_nonsense_sent_ahead_does_not_spoil_the_answer_before(
    world: World, bad: bytes
) -> None:
    await world.start(silent)
    caller = await world.dial(post(stream=True), bad)
    peer = await world.sent()
    peer.say(EVENTS, chunk(WORD))
    await world.until(lambda: bool(caller.received))
    caller.say(b"more")
    peer.say(STREAM[len(EVENTS) :])
    await world.until(lambda: caller.over)
    assert (caller.answer.body, caller.answer.whole) == (WORD + SHOWN, True)
    assert caller.fault is None


# Streams that begin before they are admitted ----------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_a_stream_that_began_early(
    world: World, way: Callable[[Caller], None]
) -> None:
    await world.start(silent, early_200=True)
    caller = await world.dial(post(stream=True))
    await world.until(lambda: COMMENT in caller.received)
    assert world.engine.requests == 1
    await gone(world, caller, way)


async def test_an_early_stream_ends_with_the_refusal(world: World) -> None:
    await world.start(silent, early_200=True)
    answer = await world.ask(post(stream=True, max_tokens=9_000_000))
    assert (answer.status, answer.whole) == (200, True)
    assert b"invalid_request_error" in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")
