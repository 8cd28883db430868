"""The engine behind every gateway: canned answers, paced streams, a count of connections.

Must be far cheaper than what it helps to measure, hence a bare Protocol: heads are searched, not
parsed, and all streams share one timer.
"""

import asyncio
import os
import sys
import time
from contextlib import suppress
from typing import cast

import msgspec
import uvloop
from msgspec import Struct

from benchmarks.gateway import wire

HOST = "127.0.0.1"
_TICK_S = 0.001
_WHEEL = 8_192
"""Ticks around the wheel; the slowest pace must be below."""
_BACKLOG = 4_096


class Stats(Struct):
    """What an engine has seen since it started; answered to GET /stats."""

    accepted: int = 0
    """Connections, those of whoever asks for these figures included."""
    requests: int = 0
    cpu_s: float = 0.0


class Stream:
    """One stream on its way."""

    __slots__ = ("caller", "every", "fd", "left")

    def __init__(self, caller: asyncio.WriteTransport, every: int) -> None:
        self.caller, self.every, self.left = caller, every, wire.CHUNKS - 1
        self.fd = caller.get_extra_info("socket").fileno()

    def send(self, data: bytes) -> None:
        """Write past the loop where nothing waits: half the cost."""
        sent = 0
        if not self.caller.get_write_buffer_size():
            with suppress(BlockingIOError, ConnectionError):  # the loop will tell
                sent = os.write(self.fd, data)
        if sent < len(data):
            self.caller.write(data[sent:])


class Wheel:
    """Streams by the tick at which their next chunk is due."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._slots = loop, [list[Stream]() for _ in range(_WHEEL)]
        self._now, self._due = 0, loop.time()
        self._chunk, self._end = wire.chunk(), wire.stream_end()
        self._turn()

    def start(self, caller: asyncio.WriteTransport, every: int) -> None:
        """Begin a stream; its next chunk is due after `every` ticks."""
        self._slots[(self._now + every) % _WHEEL].append(Stream(caller, every))

    def finish(self) -> None:
        """End every stream now, in good order."""
        for slot in self._slots:
            for stream in slot:
                if not stream.caller.is_closing():
                    stream.send(self._end)
            slot.clear()

    def _turn(self) -> None:
        now = self._loop.time()
        while self._due <= now:  # what is late is sent at once: the pace stays
            self._due += _TICK_S
            self._now = (self._now + 1) % _WHEEL
            if self._slots[self._now]:
                self._send(self._slots[self._now])
                self._slots[self._now] = []
        # Never until the exact moment: what is less than a millisecond away uvloop would spin for.
        self._loop.call_later(_TICK_S, self._turn)

    def _send(self, due: list[Stream]) -> None:
        chunk, slots = self._chunk, self._slots
        for stream in due:
            if stream.caller.is_closing():
                continue
            stream.left -= 1
            if stream.left:
                stream.send(chunk)
                slots[(self._now + stream.every) % _WHEEL].append(stream)
            else:
                stream.send(self._end)


class Answering(asyncio.Protocol):
    """One connection from the gateway."""

    head, first = wire.stream_head(), wire.chunk()
    whole, empty = wire.answer(), wire.plain(b"{}")
    unknown = wire.plain(b'{"detail":"Not Found"}', "404 Not Found")
    rendered = wire.plain(b'{"token_ids":[%b]}' % b",".join(b"%d" % n for n in range(120)))
    models = wire.plain(b'{"object":"list","data":[{"id":"%b"}]}' % wire.MODEL.encode())

    def __init__(self, wheel: Wheel, stats: Stats) -> None:
        self._wheel, self._stats, self._got = wheel, stats, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it."""
        self._caller = cast("asyncio.WriteTransport", transport)  # uvloop's own class is neither
        self._stats.accepted += 1

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        got = self._got + data if self._got else data
        while (end := got.find(b"\r\n\r\n")) >= 0:
            head = got[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            end += 4 + length
            if len(got) < end:
                break
            if head.startswith(b"post /v1/chat/completions "):
                self._chat(got[end - length : end])
            else:
                self._look(head)
            got = got[end:]
        self._got = got

    def _chat(self, body: bytes) -> None:
        if body == b"{}":  # a gateway that tries its key
            self._caller.write(self.unknown)
            return
        self._stats.requests += 1
        if wire.wants_stream(body):
            self._caller.write(self.head + self.first)
            self._wheel.start(self._caller, wire.pace_ms(body))
        else:
            self._caller.write(self.whole)

    def _look(self, head: bytes) -> None:
        if head.startswith(b"get /stats "):
            self._stats.cpu_s = time.process_time()
            self._caller.write(wire.plain(msgspec.json.encode(self._stats)))
        elif head.startswith(b"get /v1/models "):
            self._caller.write(self.models)
        elif head.startswith(b"get /finish "):
            self._wheel.finish()
            self._caller.write(self.empty)
        elif head.startswith(b"get "):
            self._caller.write(self.empty)
        elif head.startswith(b"post /v1/chat/completions/render "):
            self._caller.write(self.rendered)
        else:
            self._caller.write(self.unknown)


async def serve(port: int) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    wheel, stats = Wheel(loop), Stats()
    server = await loop.create_server(lambda: Answering(wheel, stats), HOST, port, backlog=_BACKLOG)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve at the port given."""
    uvloop.run(serve(int(sys.argv[1])))
