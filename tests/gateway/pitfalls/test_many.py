"""Many at once: nobody is refused, idle streams cost nothing, and a mass leave is cleaned up (11, 12)."""

import socket
import struct
import tracemalloc
from pathlib import Path

import pytest

from tests.adapters.upstream.scenes import EVENTS, WORD, chunk
from tests.gateway.pitfalls.scenes import HEALTH, SHOWN, STREAM, TURNS, Caller, World, post, says

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

KIB = 1_024
SIZES = [100, pytest.param(500, marks=pytest.mark.slow)]
STREAMS = [100, pytest.param(2_000, marks=pytest.mark.slow)]
BACKLOG = 4_096
SOMAXCONN = int(Path("/proc/sys/net/core/somaxconn").read_text())


def backlog(sock: socket.socket) -> int:
    """Return how many connections may wait to be accepted."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    (most,) = struct.unpack_from("I", info, 28)
    return int(most)


@pytest.mark.parametrize("count", SIZES)
async def test_none_of_many_that_connect_at_once_is_refused(world: World, count: int) -> None:
    await world.start(says(STREAM))
    assert world._sock is not None
    assert backlog(world._sock) == min(BACKLOG, SOMAXCONN)
    address = world._sock.getsockname()
    socks = []
    for _ in range(count):  # the gateway gets no turn meanwhile
        sock = socket.create_connection(address)
        sock.sendall(HEALTH)
        sock.setblocking(False)
        socks.append(sock)
    callers: list[Caller] = []
    for sock in socks:
        _, caller = await world.loop.create_connection(Caller, sock=sock)
        callers.append(caller)
    world.callers += callers
    await world.until(lambda: all(caller.received for caller in callers))
    assert all(caller.has() for caller in callers)
    assert world.loop.time() < 1.0


async def idle_streams(world: World, count: int) -> list[Caller]:
    """Start streams that have said one word."""
    callers = [await world.dial(post(stream=True, max_tokens=2)) for _ in range(count)]
    await world.until(lambda: all(caller.received.endswith(chunk(WORD)) for caller in callers))
    return callers


async def turns_of(world: World, seconds: float) -> int:
    """Return how often the loop turned in so much time."""
    before = world.turns.count
    await world.pass_time(seconds)
    return world.turns.count - before


@pytest.mark.parametrize("count", STREAMS)
async def test_idle_streams_cost_little_and_leave_together(world: World, count: int) -> None:
    await world.start(says(EVENTS + chunk(WORD)), replicas=1 + count // 100)
    (one,) = await idle_streams(world, 1)
    alone = await turns_of(world, 2.0)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    callers = await idle_streams(world, count)
    await world.pass_time(1.0)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / count < 50 * KIB, "caller and engine included"
    together = await turns_of(world, 2.0)
    assert together < 1.5 * alone, "no timer for each of them"

    world.behave = says(STREAM)
    turns = world.turns.count
    assert (await world.ask(post(stream=True))).body == SHOWN
    assert world.turns.count - turns < 4 * TURNS

    turns, time = world.turns.count, world.loop.time()
    for caller in [one, *callers]:
        caller.leave()
    await world.settled()
    await world.until(lambda: len(world.engine.open_peers) == world.idle)
    assert world.turns.count - turns <= 2 * TURNS
    assert world.loop.time() == time
    assert world.gateway.driver.outcomes == {"client_cancel": count + 1, "success": 1}
