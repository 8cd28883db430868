"""The load's caller sees what a user sees, however the bytes are cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.load.caller import Answer, Failure, Place, ask
from headrace.units import ms

pytestmark = pytest.mark.asyncio

CHUNK = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"code":"upstream_error"}}\n\n'
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def refusal(status: int, code: str) -> bytes:
    body = b'{"error":{"message":"no","code":"%s"}}' % code.encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@asynccontextmanager
async def serving(reply: bytes, pieces: int) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Serve one canned reply in pieces; yields the port and the requests' heads."""
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        size = max(1, -(-len(reply) // pieces))
        for at in range(0, len(reply), size):
            writer.write(reply[at : at + size])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heads


async def asked(reply: bytes, pieces: int = 1) -> Answer:
    async with serving(reply, pieces) as (port, _):
        place = Place(host="127.0.0.1", port=port)
        return await ask(place, b"{}", {}, gap_bound_ns=ms(80), patience_s=10.0)


@pytest.mark.parametrize("pieces", [1, 7, 10_000])
async def test_complete_stream_is_counted_alike_however_it_is_cut(pieces: int) -> None:
    answer = await asked(STREAM + CHUNK + CHUNK + USAGE + DONE, pieces)

    assert (answer.status, answer.complete, answer.code) == (200, True, None)
    assert answer.timing.tokens == answer.output_tokens == 2
    assert answer.ttft_ns is not None


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (STREAM + CHUNK + ERROR + DONE, "upstream_error"),
        (STREAM + CHUNK, None),
        (STREAM + b"data: {nonsense\n\n" + DONE, "unreadable"),
    ],
    ids=["error event", "cut", "garbage"],
)
async def test_stream_that_went_wrong_is_not_complete(reply: bytes, code: str | None) -> None:
    answer = await asked(reply)

    assert not answer.complete
    assert answer.code == code


async def test_refusal_keeps_its_status_and_code() -> None:
    answer = await asked(refusal(429, "rate_limit_exceeded"), pieces=5)

    assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
    assert answer.timing.tokens == 0


async def test_nobody_listening_is_an_answer_without_status() -> None:
    async with serving(b"", 1) as (port, _):
        pass  # closed again: the port is free

    place = Place(host="127.0.0.1", port=port)
    answer = await ask(place, b"{}", {}, gap_bound_ns=ms(80), patience_s=10.0)

    assert (answer.status, answer.failure) == (0, Failure.CONNECT)
