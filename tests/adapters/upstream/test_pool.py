"""Connections: used again or not, tried again or not, bounded, never leaked."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from headrace.adapters.upstream.pool import Limits
from headrace.ports.upstream import (
    CutError,
    LostError,
    PoolFullError,
    SilentError,
    UnreachableError,
    UpstreamError,
    Wait,
)
from headrace.units import NS_PER_MS, DurationNs
from tests.adapters.upstream.scenes import (
    DONE,
    EVENTS,
    LAST,
    OK,
    WORD,
    Peer,
    Scene,
    anonymous,
    answers,
    chunk,
)

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

STREAM = EVENTS + chunk(WORD + DONE) + LAST


def silent(_: Peer) -> None:
    """Answer nothing."""


@pytest.mark.parametrize("reply", [OK, STREAM])
async def test_a_thousand_requests_in_turn_use_one_connection(scene: Scene, reply: bytes) -> None:
    server = await scene.server(answers(reply))
    pool = scene.pool(server)
    for _ in range(1_000):
        _, result = await scene.get(pool, body=b"{}")
        assert (result.error, result.status, result.attempts) == (None, 200, 1)
    assert (len(server.peers), pool.dialled, pool.idle) == (1, 1, 1)


@pytest.mark.parametrize(
    "reply",
    [
        OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"),
        OK.replace(b"HTTP/1.1", b"HTTP/1.0"),
        OK + b"x",
        OK + b"\r\n",
        STREAM + STREAM,
    ],
)
async def test_a_connection_that_may_not_be_kept_is_made_anew(scene: Scene, reply: bytes) -> None:
    server = await scene.server(answers(reply))
    pool = scene.pool(server)
    for _ in range(3):
        _, result = await scene.get(pool)
        assert (result.error, result.attempts, pool.idle) == (None, 1, 0)
    assert len(server.peers) == 3


async def test_simultaneous_requests_have_connections_of_their_own(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    calls = [scene.ask(pool) for _ in range(40)]
    await scene.until(lambda: server.requests == 40)
    for peer in server.peers:
        assert len(peer.requests) == 1, "pipelined"
        peer.say(OK)
    for call in calls:
        assert (await scene.result(call)).error is None
    assert (pool.idle, pool.busy, len(server.peers)) == (40, 0, 40)


async def test_the_connection_used_last_is_used_next(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    calls = [scene.ask(pool) for _ in range(3)]
    await scene.until(lambda: server.requests == 3)
    second = server.peers[1]
    for peer in (server.peers[0], server.peers[2], second):
        peer.say(OK)
        await scene.until(lambda: sum(bool(call.results) for call in calls) == pool.idle)
    await scene.until(lambda: pool.idle == 3)
    server.behave = answers(OK)
    await scene.get(pool)
    assert len(second.requests) == 2


@pytest.mark.parametrize("spoil", [Peer.close, lambda peer: peer.say(b"x"), Peer.reset])
async def test_bytes_or_an_end_while_idle_drop_the_connection(
    scene: Scene, spoil: Callable[[Peer], None]
) -> None:
    server = await scene.server(answers(OK))
    pool = scene.pool(server)
    await scene.get(pool)
    spoil(server.peer)
    await scene.until(lambda: not server.open_peers)
    await scene.turns()
    assert pool.idle == 0
    _, result = await scene.get(pool)
    assert (result.error, result.attempts, len(server.peers)) == (None, 1, 2)


# Stale connections ------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
async def test_a_stale_connection_costs_an_attempt_and_nothing_else(
    scene: Scene, end: Callable[[Peer], None]
) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    calls = [scene.ask(pool) for _ in range(3)]
    await scene.until(lambda: server.requests == 3)
    for peer in server.peers:
        peer.say(OK)
    for call in calls:
        await scene.result(call)

    def behave(peer: Peer) -> None:
        if len(peer.requests) > 1:
            end(peer)
        else:
            peer.say(OK)

    server.behave = behave
    _, result = await scene.get(pool, body=b"{}")
    assert (result.error, result.attempts, result.reused) == (None, 2, False)
    assert len(server.peers) == 4
    await scene.until(lambda: len(server.open_peers) == 1)
    assert pool.idle == 1, "the others were suspected and dropped"


async def test_a_server_that_restarts_is_not_noticed(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    calls = [scene.ask(pool) for _ in range(8)]
    await scene.until(lambda: server.requests == 8)
    for peer in server.peers:
        peer.say(OK)
    for call in calls:
        await scene.result(call)
    old = list(server.peers)
    server.stop_listening()
    await server.listen(server.port)
    server.behave = lambda peer: peer.close() if peer in old else peer.say(OK)
    again = [scene.ask(pool) for _ in range(8)]
    for call in again:
        result = await scene.result(call)
        assert (result.error, result.status, result.attempts) == (None, 200, 2)


@pytest.mark.parametrize("part", [b"H", OK[:-1], EVENTS + chunk(WORD)])
async def test_after_one_byte_nothing_is_tried_again(scene: Scene, part: bytes) -> None:
    server = await scene.server(answers(OK))
    pool = scene.pool(server)
    await scene.get(pool)
    server.behave = lambda peer: peer.close(part)
    _, result = await scene.get(pool)
    assert isinstance(result.error, CutError)
    assert (result.attempts, result.reused, result.error.retryable) == (1, True, False)
    assert len(server.peers) == 1


async def test_a_fresh_connection_is_not_tried_again(scene: Scene) -> None:
    server = await scene.server(Peer.close)
    pool = scene.pool(server)
    _, result = await scene.get(pool)
    assert isinstance(result.error, LostError)
    assert (result.attempts, result.error.retryable) == (1, True)


async def test_it_is_tried_again_only_once(scene: Scene) -> None:
    server = await scene.server(answers(OK))
    pool = scene.pool(server)
    await scene.get(pool)
    server.behave = Peer.close
    _, result = await scene.get(pool)
    assert isinstance(result.error, LostError)
    assert (result.attempts, len(server.peers)) == (2, 2)


async def test_a_server_that_closes_at_once_is_lost(scene: Scene) -> None:
    server = await scene.server(silent)
    server.on_connect = Peer.close
    pool = scene.pool(server)
    _, result = await scene.get(pool)
    assert isinstance(result.error, LostError)


async def test_a_server_that_is_down_is_told_apart(scene: Scene) -> None:
    server = await scene.server(answers(OK))
    pool = scene.pool(server)
    await scene.get(pool)
    server.peer.close()
    server.stop_listening()
    await scene.until(lambda: not server.open_peers)
    _, result = await scene.get(pool)
    assert isinstance(result.error, UnreachableError)
    assert (result.status, result.error.retryable) == (0, True)


# Bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
async def test_what_this_machine_lacks_is_not_blamed_on_the_server(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, lacks: int
) -> None:
    async def dial(*_: Any, **__: Any) -> None:
        raise OSError(lacks, "none left")

    server = await scene.server(answers(OK))
    pool = scene.pool(server)
    monkeypatch.setattr(pool, "_dial", dial)
    assert isinstance((await scene.get(pool))[1].error, PoolFullError)
    monkeypatch.undo()
    assert (await scene.get(pool))[1].error is None


async def test_a_full_pool_says_so_at_once(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server, Limits(connections=2))
    calls = [scene.ask(pool) for _ in range(3)]
    assert not calls[2].results, "not before `open` returned"
    error = (await scene.result(calls[2])).error
    assert isinstance(error, PoolFullError)
    assert error.retryable
    await scene.until(lambda: server.requests == 2)
    for peer in server.peers:
        peer.say(OK)
    for call in calls[:2]:
        assert (await scene.result(call)).error is None
    server.behave = answers(OK)
    assert (await scene.get(pool))[1].error is None


class Dials:
    """A loop whose connections are made when the test says so."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gates: list[asyncio.Future[None]] = []
        self.after: Callable[[], None] = lambda: None
        real = scene.loop.create_connection

        async def create(*args: Any, **more: Any) -> Any:
            self.gates.append(scene.loop.create_future())
            scene.changed()
            await self.gates[-1]
            made = await real(*args, **more)
            scene.loop.call_soon(self.after)
            scene.loop.call_soon(scene.changed)
            return made

        class Loop:
            def __getattr__(self, name: str) -> Any:
                return create if name == "create_connection" else getattr(scene.loop, name)

        monkeypatch.setattr(asyncio, "get_running_loop", Loop)


async def test_dials_are_bounded_and_who_waits_takes_what_is_free(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await scene.server(silent)
    with monkeypatch.context() as patch:
        dials = Dials(scene, patch)
        pool = scene.pool(server, Limits(dials=2))
    calls = [scene.ask(pool) for _ in range(4)]
    await scene.until(lambda: len(dials.gates) == 2)
    await scene.turns()
    assert (len(dials.gates), pool.busy) == (2, 4)
    dials.gates[0].set_result(None)
    await scene.until(lambda: len(dials.gates) == 3 and server.requests == 1)
    server.peer.say(OK)  # the fourth takes it, before it could dial
    await scene.until(lambda: server.requests == 2)
    assert (len(server.peers), len(dials.gates)) == (1, 3)
    server.behave = answers(OK)
    server.peer.say(OK)
    for gate in dials.gates[1:]:
        gate.set_result(None)
    for call in calls:
        assert (await scene.result(call)).error is None
    assert pool.dialled == 3


async def test_who_leaves_while_dialling_makes_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await scene.server(answers(OK))
    with monkeypatch.context() as patch:
        dials = Dials(scene, patch)
        pool = scene.pool(server, Limits(dials=1))
    first, second, third = (scene.ask(pool) for _ in range(3))
    await scene.until(lambda: len(dials.gates) == 1)
    second.abort()
    first.abort()
    assert pool.busy == 1
    await scene.until(lambda: len(dials.gates) == 2)
    dials.gates[1].set_result(None)
    assert (await scene.result(third)).error is None
    assert not first.results
    assert not second.results
    assert len(server.peers) == 1


async def test_a_connection_made_for_who_left_serves_another(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await scene.server(answers(OK))
    with monkeypatch.context() as patch:
        dials = Dials(scene, patch)
        pool = scene.pool(server)
    first = scene.ask(pool)
    dials.after = first.abort  # the connection is there, and the pool has not heard of it yet
    await scene.until(lambda: len(dials.gates) == 1)
    dials.gates[0].set_result(None)
    await scene.until(lambda: pool.idle == 1)
    _, result = await scene.get(pool)
    assert (result.error, result.attempts, pool.dialled, first.results) == (None, 1, 1, [])


async def test_a_dial_that_hangs_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await scene.server(silent)
    with monkeypatch.context() as patch:
        dials = Dials(scene, patch)
        pool = scene.pool(server, Limits(dials=1, connect_ns=DurationNs(20 * NS_PER_MS)))
    calls = [scene.ask(pool) for _ in range(2)]
    for call in calls:
        error = (await scene.result(call)).error
        assert isinstance(error, SilentError)
        assert (error.wait, error.retryable) == (Wait.CONNECT, True)
    assert len(dials.gates) <= 2
    assert pool.busy == 0


async def test_what_is_no_fault_of_the_network_is_not_swallowed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await scene.server(silent)
    told: list[Any] = []
    scene.loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    with monkeypatch.context() as patch:
        dials = Dials(scene, patch)
        pool = scene.pool(server)
    call = scene.ask(pool)
    await scene.until(lambda: len(dials.gates) == 1)
    dials.gates[0].set_exception(ValueError("a bug"))
    await scene.turns()
    assert [str(error) for error in told] == ["a bug"]
    call.abort()


async def test_a_closed_pool_tells_nobody_and_opens_nothing(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    calls = [scene.ask(pool) for _ in range(2)]
    await scene.until(lambda: server.requests == 2)
    calls.append(scene.ask(pool))
    pool.close()
    await scene.until(lambda: not server.open_peers)
    assert not any(call.results for call in calls)
    assert isinstance((await scene.get(pool))[1].error, UnreachableError)


# What is sent -----------------------------------------------------------------------------------


async def test_a_request_is_sent_as_it_is_with_our_credentials(scene: Scene) -> None:
    server = await scene.server(answers(OK))
    pool = scene.pool(server, headers=((b"Authorization", b"Bearer ours"),))
    await scene.get(pool, headers=[(b"x-a", b"b"), (b"authorization", b"theirs")], body=b"{}")
    await scene.get(pool, "GET")
    await scene.get(pool, "POST")
    assert server.peer.requests == [
        b"POST /v1/chat/completions HTTP/1.1\r\n"
        b"host: 127.0.0.1:%d\r\nAuthorization: Bearer ours\r\nx-a: b\r\n"
        b"content-length: 2\r\n\r\n{}" % server.port,
        b"GET /v1/chat/completions HTTP/1.1\r\n"
        b"host: 127.0.0.1:%d\r\nAuthorization: Bearer ours\r\n\r\n" % server.port,
        b"POST /v1/chat/completions HTTP/1.1\r\n"
        b"host: 127.0.0.1:%d\r\nAuthorization: Bearer ours\r\n"
        b"content-length: 0\r\n\r\n" % server.port,
    ]


@pytest.mark.parametrize(
    "header", [(b"x", b"a\r\nb: c"), (b"x", b"a\nb"), (b"x\r", b"a"), (b"Host", b"x")]
)
async def test_a_header_that_would_be_another_is_a_bug(
    scene: Scene, header: tuple[bytes, bytes]
) -> None:
    pool = scene.pool(await scene.server(silent))
    with pytest.raises(AssertionError):
        scene.ask(pool, headers=[header])


async def test_small_writes_are_sent_at_once(scene: Scene) -> None:
    server = await scene.server(silent)
    pool = scene.pool(server)
    call = scene.ask(pool)
    await scene.until(lambda: server.requests == 1)
    (connection,) = pool._busy
    assert connection.socket_option(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    call.abort()


async def test_tls_is_spoken_where_it_is_asked_for(scene: Scene) -> None:
    server = await scene.server(answers(STREAM), ssl=anonymous(ssl.PROTOCOL_TLS_SERVER))
    pool = scene.pool(server, tls=anonymous(ssl.PROTOCOL_TLS_CLIENT))
    for _ in range(3):
        call, result = await scene.get(pool)
        assert (result.error, call.data) == (None, WORD + DONE)
    assert pool.dialled == 1
    strict = scene.pool(server, tls=ssl.create_default_context())
    error: UpstreamError | None = (await scene.get(strict))[1].error
    assert isinstance(error, UnreachableError)
