"""What callers may do to a connection: send slowly, at length, in part, and leave."""

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from headrace.config.schema import ServerSpec, Settings
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.http import HEAD_BYTES_MAX
from headrace.gateway.server import Gateway, listen
from tests.adapters.upstream.scenes import anonymous
from tests.gateway.scenes import KEYS, MODEL, assert_books_closed, deployment, keys

pytestmark = pytest.mark.service

CHAT = json.dumps(
    {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
).encode()
LONG = CHAT.replace(b'"max_tokens": 2', b'"max_tokens": 9000')
HEALTH = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
ENTRY = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"


def post(body: bytes = CHAT, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    fields = f"authorization: Bearer {KEYS['free']}\r\ncontent-length: {length}\r\n\r\n"
    return ENTRY + fields.encode() + body


class Wire:
    """A raw connection to a gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and content of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        content = await self.reader.readexactly(int(fields["content-length"]))
        return int(head[0].split()[1]), fields, json.loads(content)

    async def rest(self) -> bytes:
        """Return what comes until the other side closes."""
        return await self.reader.read()

    def close(self) -> None:
        self.writer.transport.abort()


Dial = Callable[[], Awaitable[Wire]]


def served(
    talk: Callable[[Gateway, Dial], Awaitable[None]],
    *,
    patience_s: float = 0.2,
    tls: bool = False,
    **server: Any,
) -> None:
    """Talk to a gateway on the loop that `headrace serve` runs on."""

    async def serve() -> None:
        spec = ServerSpec(port=0, drain_s=0, header_timeout_s=patience_s)
        given = Settings(deployment=deployment(), keys=keys(), server=replace(spec, **server))
        gateway = Gateway(given, MonotonicClock(asyncio.get_running_loop()))
        if tls:
            gateway.server.config.ssl = anonymous(ssl.PROTOCOL_TLS_SERVER)
        sock = listen("127.0.0.1", 0)
        place = sock.getsockname()
        running = asyncio.create_task(gateway.serve(sock))
        wires: list[Wire] = []

        async def dial() -> Wire:
            wires.append(Wire(*await asyncio.open_connection(*place)))
            return wires[-1]

        try:
            await asyncio.wait_for(talk(gateway, dial), 20)
        finally:
            for wire in wires:
                wire.close()
            gateway.stop()
            assert await running
            assert_books_closed(gateway.driver.plane)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("part", [b"GET", HEALTH[:-2], post()[: len(ENTRY)], HEALTH + b"GET /heal"])
def test_half_a_head_is_408_in_time(part: bytes) -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        await wire.send(part)
        if part.startswith(HEALTH):
            assert (await wire.answer())[0] == 200
        status, fields, content = await wire.answer()
        assert (status, content["error"]["code"]) == (408, "request_timeout")
        assert fields["connection"] == "close"
        assert await wire.rest() == b""

    served(talk)


@pytest.mark.parametrize("part", [b"", b"\x16\x03\x01\x02\x00\x01\x00", b"\x16"])
def test_who_does_not_go_on_with_a_handshake_is_hung_up_on(part: bytes) -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        place = wire.writer.get_extra_info("peername")
        client = anonymous(ssl.PROTOCOL_TLS_CLIENT)
        well = Wire(*await asyncio.open_connection(*place, ssl=client))
        await well.send(HEALTH)
        assert (await well.answer())[0] == 200
        well.close()
        await wire.send(part)
        assert await wire.rest() == b"", "long before the loop's own minute"

    served(talk, tls=True)


def test_a_head_that_drips_gets_no_more_time_for_it() -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()

        async def drip() -> None:
            await wire.send(b"GET /health HTTP/1.1\r\nx: ")
            while True:
                await wire.send(b"y")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert (await wire.answer())[0] == 408
        dripping.cancel()

    served(talk)


def test_who_says_nothing_is_hung_up_on() -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        assert await wire.rest() == b""

    served(talk)


@pytest.mark.parametrize("rest", [0, 1, len(CHAT) - 1])
def test_half_a_body_is_408_in_time_and_holds_no_slot(rest: int) -> None:
    async def talk(gateway: Gateway, dial: Dial) -> None:
        slow = await dial()
        await slow.send(post(CHAT[:rest], len(CHAT)))
        await until(lambda: not gateway.app._reading._free)
        other = await dial()
        await other.send(HEALTH)
        assert (await other.answer())[0] == 200, "a probe is always answered"
        assert gateway.app._open._free == 1
        status, fields, content = await slow.answer()
        assert (status, content["error"]["code"]) == (408, "request_timeout")
        assert "retry-after" in fields
        assert await slow.rest() == b""
        await other.send(post())
        assert (await other.answer())[0] == 200, "the slot is free again"

    served(talk, patience_s=0.4, concurrency=1)


def test_a_body_that_nobody_wants_is_not_waited_for() -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        await wire.send(post(length=10**12))
        assert (await wire.answer())[0] == 413

        async def drip() -> None:
            while True:
                await wire.send(b"y")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await wire.reader.readexactly(1)
        dripping.cancel()

    served(talk)


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nx: "]
)
def test_a_head_without_end_is_431(start: bytes) -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        await wire.send(start)
        line = b"y" * 1_000 if start.endswith((b"/", b" ")) else b"y: " + b"y" * 1_000 + b"\r\n"
        answering = asyncio.create_task(wire.answer())
        for _ in range(2 * HEAD_BYTES_MAX // 1_000):
            if answering.done():
                break
            await wire.send(line)
            await asyncio.sleep(0.001)
        status, _, content = await answering
        assert (status, content["error"]["code"]) == (431, "headers_too_large")

    served(talk, patience_s=5)


def test_a_long_head_that_comes_at_once_is_431_too() -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        for size, status in ((HEAD_BYTES_MAX // 2, 200), (HEAD_BYTES_MAX, 431)):
            await wire.send(HEALTH[:-2] + b"x: " + b"y" * size + b"\r\n\r\n")
            assert (await wire.answer())[0] == status

    served(talk, patience_s=5)


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_who_leaves_takes_every_request_of_the_connection_along(
    asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        await wire.send(post(LONG) * asked)
        await until(lambda: gateway.driver.live == 1)
        wire.close()
        await until(lambda: gateway.driver.live == 0)
        await asyncio.sleep(0.05)
        assert gateway.driver.outcomes == {"client_cancel": 1}

    with caplog.at_level(logging.WARNING):
        served(talk)
    assert not caplog.records


def test_requests_in_a_row_are_answered_in_a_row() -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        await wire.send(post() * 3 + HEALTH)
        found = [(await wire.answer())[2] for _ in range(4)]
        assert [one.get("object") for one in found] == [*["chat.completion"] * 3, None]
        await asyncio.sleep(0.4)
        await wire.send(HEALTH)
        assert (await wire.answer())[0] == 200, "an idle connection is not one that dawdles"

    served(talk)


def test_an_answer_under_way_is_not_cut_for_the_next_heads_sake() -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        slow = CHAT.replace(b'"max_tokens": 2', b'"max_tokens": 60')
        await wire.send(post(slow) + b"GET /heal")
        status, _, content = await wire.answer()
        assert (status, content["object"]) == (200, "chat.completion")
        assert await wire.rest() == b""

    served(talk, patience_s=0.05)


def test_an_early_answer_can_be_read_by_who_sends_on() -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        await wire.send(post(length=2**21).replace(KEYS["free"].encode(), b"wrong"))
        for _ in range(8):
            await wire.send(b" " * 2**17)
        status, fields, _ = await wire.answer()
        assert (status, fields["connection"]) == (401, "close")
        assert await wire.rest() == b"", "an end, not a reset"

    served(talk, patience_s=5)


def test_half_a_request_sent_ahead_hides_nobody_who_leaves() -> None:
    async def talk(gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        await wire.send(post(LONG))
        await until(lambda: gateway.driver.live == 1)
        await wire.send(post(b" " * 100_000))
        await asyncio.sleep(0.05)
        wire.close()
        await until(lambda: gateway.driver.live == 0)

    served(talk, patience_s=5)


def test_what_is_refused_with_its_head_is_no_bug_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        await wire.send(ENTRY + b"transfer-encoding: chunked\r\n\r\nno size\r\n")
        assert (await wire.answer())[0] == 400
        assert await wire.rest() == b""

    served(talk)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_http_1_0_is_answered_until_the_connection_ends() -> None:
    async def talk(_gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        streamed = CHAT.replace(b'"max_tokens"', b'"stream": true, "max_tokens"')
        await wire.send(post(streamed).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, content = (await wire.rest()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert content.startswith(b"data: {")
        assert content.endswith(b"data: [DONE]\n\n")

    served(talk)
