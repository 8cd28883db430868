"""Callers that are slower than their engine: nothing is lost, and little is held (1, 13)."""

import hashlib
import socket
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from headrace.gateway.connection import Connection
from tests.adapters.upstream.scenes import DONE, EVENTS, LAST, WORD, Peer, chunk
from tests.gateway.pitfalls.scenes import Caller, Pouring, World, post, silent

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

KIB, MIB = 1_024, 1_048_576
WINDOW = 4 * KIB
SOCKETS = 24 * MIB
"""What kernels hold at most of one stream, in two sockets."""
LONG = 40 * MIB


class Sink:
    """Takes what comes, counts it, and keeps nothing."""

    def __init__(self) -> None:
        self.size = 0
        self.digest = hashlib.sha256()
        self.last = b""

    def __call__(self, data: bytes) -> None:
        self.size += len(data)
        self.digest.update(data)
        self.last = (self.last + data)[-len(LAST) :]


def long_stream(size: int) -> Iterator[bytes]:
    """Yield a stream of about so many bytes, in chunks of 64 KiB."""
    yield EVENTS
    frames = WORD * (64 * KIB // len(WORD))
    for _ in range(size // len(frames)):
        yield chunk(frames)
    yield chunk(DONE) + LAST


def held(world: World) -> int:
    """Return the bytes that the process holds of the only stream, outside of the kernel."""
    driver = world.gateway.driver
    (stream,) = driver._streams.values()
    (exchange,) = world.pool._busy.values()
    (connection,) = world.gateway.server.server_state.connections
    assert isinstance(connection, Connection)
    return stream._size + exchange.queued + connection._socket.get_write_buffer_size()


def short_of_buffers(peer: Peer) -> None:
    """Have the engine's own socket hold little."""
    assert peer.transport is not None
    sock = peer.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * KIB)


async def stalled(world: World, pouring: Pouring) -> Peer:
    """Wait until the engine cannot say more."""
    peer = world.engine.peer
    await world.until(lambda: peer.is_stalled)
    poured = -1
    while poured != pouring.poured:
        poured = pouring.poured
        await world.pass_time(1.0)
    assert peer.is_stalled
    return peer


async def slow(world: World) -> tuple[Caller, Sink]:
    """Ask, and read nothing but the beginning."""
    world.engine.on_connect = short_of_buffers
    world.pool.drop_idle()
    caller, sink = await world.dial(post(stream=True), window=WINDOW), Sink()
    caller.taken = sink
    await world.until(lambda: sink.size > 0)
    caller.stop_reading()
    return caller, sink


@pytest.mark.parametrize("size", [LONG, pytest.param(85 * MIB, marks=pytest.mark.slow)])
async def test_who_stops_reading_holds_the_engine_back_and_little_here(
    world: World, size: int
) -> None:
    pouring = Pouring(world.loop, long_stream(size))
    await world.start(pouring)
    tracemalloc.start()
    try:
        caller, sink = await slow(world)
        await stalled(world, pouring)
        assert held(world) < MIB
        assert pouring.poured < SOCKETS
        caller.read_on()
        await world.until(lambda: sink.last == LAST)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * MIB, "the engine's own included"
    assert sink.size > 0.99 * size
    assert world.gateway.driver.outcomes == {"success": 1}


async def test_who_never_reads_again_is_gone_in_time(world: World) -> None:
    pouring = Pouring(world.loop, long_stream(LONG))
    await world.start(pouring, write_stall_s=30.0)
    caller, _ = await slow(world)
    await stalled(world, pouring)
    begun = world.loop.time()
    await world.settled()
    assert 20 < world.loop.time() - begun <= 30
    await world.until(lambda: not world.engine.open_peers)
    assert world.gateway.driver.outcomes == {"client_cancel": 1}
    caller.leave()


@pytest.mark.parametrize("way", [Caller.leave, Caller.finish])
async def test_who_stalls_and_leaves_is_let_go_at_once(
    world: World, way: Callable[[Caller], None]
) -> None:
    pouring = Pouring(world.loop, long_stream(LONG))
    await world.start(pouring, write_stall_s=30.0)
    caller, _ = await slow(world)
    await stalled(world, pouring)
    begun = world.loop.time()
    way(caller)
    state = world.gateway.server.server_state
    await world.until(lambda: not world.busy and not state.tasks)
    await world.until(lambda: not world.engine.open_peers)
    assert world.loop.time() == begun
    await world.until(lambda: not state.connections)
    assert world.loop.time() - begun <= 30
    caller.leave()


@pytest.mark.parametrize("ends", [b"connection: close", b"connection: keep-alive"])
async def test_the_last_of_an_answer_that_is_not_read_does_not_keep_its_connection(
    world: World, ends: bytes
) -> None:
    await world.start(silent, write_stall_s=20.0)
    caller = await world.dial(post(None, ends, stream=True), window=WINDOW)
    caller.stop_reading()
    peer = await world.sent()
    state = world.gateway.server.server_state
    (connection,) = state.connections
    assert isinstance(connection, Connection)
    peer.say(EVENTS)
    while not connection._socket.get_write_buffer_size():
        peer.say(chunk(WORD * 200))
        await world.pass_time(0.001)
    peer.say(chunk(DONE), LAST)
    await world.settled()
    begun = world.loop.time()
    assert state.connections
    await world.until(lambda: not state.connections)
    assert 15 <= world.loop.time() - begun <= 25.1, "and 5 s of idling"
    caller.read_on()
    await world.until(lambda: caller.over)


async def test_one_chunk_of_16_mib_reaches_a_slow_caller_intact(world: World) -> None:
    frame = b'data: {"choices":[{"delta":{"content":"' + b"x" * 16 * MIB + b'"}}]}\n\n'

    def pieces() -> Iterator[bytes]:
        whole = EVENTS + chunk(frame) + chunk(DONE) + LAST
        for at in range(0, len(whole), 64 * KIB):
            yield whole[at : at + 64 * KIB]

    pouring = Pouring(world.loop, pieces())
    await world.start(pouring)
    caller = await world.dial(post(stream=True), window=WINDOW)
    found = hashlib.sha256()
    size = 0
    rest = bytearray()

    def take(data: bytes) -> None:
        """Read the chunks of the body as they come."""
        nonlocal size
        rest.extend(data)
        if not size:
            at = rest.find(b"\r\n\r\n")
            del rest[: at + 4]
            size = at
        while (at := rest.find(b"\r\n")) >= 0 and len(rest) >= (end := at + 4 + int(rest[:at], 16)):
            found.update(rest[at + 2 : end - 2])
            del rest[:end]

    caller.taken = take
    most, reads = 0, 0
    while world.gateway.driver.live or not reads:
        reads += 1
        caller.stop_reading()
        await world.pass_time(0.05)
        if world.gateway.driver.live and world.pool._busy:
            most = max(most, held(world))
        caller.read_on()
        await world.pass_time(0.05)
    await world.until(lambda: not rest)
    assert found.hexdigest() == hashlib.sha256(frame + DONE).hexdigest()
    assert 0 < most < MIB
