"""The path that every pitfall is on, walked without one: what reaches the engine, and what does not."""

import json
import socket

import pytest

from headrace.gateway.connection import Connection
from tests.gateway.pitfalls.scenes import (
    ENGINE_KEY,
    SHOWN,
    STREAM,
    WHOLE,
    World,
    post,
    says,
    silent,
    sized,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

CONTROLS = (
    b"x-llm-d-slo-ttft-ms: 1000",
    b"x-slo-tpot-ms: 50",
    b"x-llm-d-inference-objective: batch",
    b"x-llm-d-inference-fairness-id: rich",
    b"x-gateway-model-name-rewrite: gpt",
    b"x-headrace-replay-output: 3",
    b"x-session-id: s",
    b"x-llm-d-inference-ttl: 2s",
    b"idempotency-key: i",
    b"x-api-key: sk-free",
    b"cookie: c",
    b"x-request-id: mine",
)


async def test_a_stream_and_a_whole_answer(world: World) -> None:
    await world.start(says(STREAM, sized()))
    answer = await world.ask(post(stream=True))
    assert (answer.status, answer.body, answer.whole) == (200, SHOWN, True)
    answer = await world.ask(post())
    assert (answer.status, answer.body) == (200, WHOLE)
    assert world.gateway.driver.outcomes == {"success": 2}


async def test_control_headers_and_the_callers_key_stay_here(world: World) -> None:
    await world.start(says(STREAM))
    assert (await world.ask(post(None, *CONTROLS, stream=True))).status == 200
    (request,) = world.engine.peer.requests
    top, _, body = request.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in top.split(b"\r\n")[1:])
    mark = fields.pop(b"x-request-id")
    assert mark.startswith(b"headrace-")
    assert len(fields.pop(b"x-session-id")) == 32, "a hash, of the caller's session"
    assert fields == {
        b"host": b"127.0.0.1:%d" % world.engine.port,
        b"authorization": b"bearer " + ENGINE_KEY.encode(),
        b"content-type": b"application/json",
        b"accept-encoding": b"identity",
        b"content-length": b"%d" % len(body),
    }
    assert json.loads(body)["stream_options"] == {"include_usage": True}


async def test_small_pieces_are_sent_at_once_on_both_sides(world: World) -> None:
    await world.start(silent)
    caller = await world.dial(post(stream=True))
    peer = await world.sent()
    (connection,) = world.gateway.server.server_state.connections
    assert isinstance(connection, Connection)
    option = (socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert connection._socket.get_extra_info("socket").getsockopt(*option)
    (upstream,) = world.pool._busy
    assert upstream.socket_option(*option)
    peer.say(STREAM)
    assert (await world.answered(caller))[0].body == SHOWN


async def test_every_engine_of_a_pool_is_used(world: World) -> None:
    await world.start(silent, replicas=3)
    callers = [await world.dial(post(stream=True)) for _ in range(6)]
    await world.until(lambda: world.engine.requests == 6)
    assert [pool.busy for pool in world.pools] == [2, 2, 2]
    for caller in callers:
        caller.leave()
