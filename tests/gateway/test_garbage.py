"""Requests that are over leave nothing for the garbage collector, which looks at old objects rarely."""

import asyncio
import gc
import json

import pytest

from headrace.ports.engine import Route
from tests.fuzz.serving import Engine, Front, Saying, fronted
from tests.gateway.scenes import KEYS, MODEL

pytestmark = pytest.mark.service

COUNT = 20
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BEGUN = (HEAD, b"%x\r\n%s\r\n" % (len(WORD), WORD))
ENDED = (*BEGUN, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


class _Silent(Engine):
    """An engine that goes silent once it has begun."""

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        goes_on = await super()._one(reader, writer)
        if self.asked and len(self.says.pieces) == len(BEGUN):
            await reader.read()
            return False
        return goes_on


def _request() -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": MODEL, "messages": messages, "stream": True}).encode()
    head = (
        f"POST {Route.CHAT} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {KEYS['free']}\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _leave(front: Front, port: int) -> None:
    """Leave a stream once it has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request())
    await reader.readuntil(b"delta")
    writer.transport.abort()
    await front.settled()


def _left_over() -> list[str]:
    """Return our own and uvicorn's objects that only the garbage collector finds."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        kinds = [type(one) for one in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return sorted(
        kind.__qualname__
        for kind in kinds
        if kind.__module__.startswith(("headrace", "uvicorn", "httptools"))
    )


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "left"])
def test_nothing_is_left_over(*, ends: bool) -> None:
    with fronted(engine=_Silent()) as front:
        front.engine.says = Saying(ENDED if ends else BEGUN)
        gc.collect()
        gc.disable()
        try:
            for _ in range(COUNT):
                if ends:
                    answer = front.run(front.exchange([_request()]))
                    assert answer.endswith(b"0\r\n\r\n")
                    front.run(front.settled())
                else:
                    front.run(_leave(front, front.port))
            front.run(asyncio.sleep(0.05))
            assert not _left_over()
        finally:
            gc.enable()
