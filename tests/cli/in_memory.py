"""Callers of a live chaos run without a socket, so that it runs in virtual time."""

import asyncio
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from headrace.gateway.server import Gateway
from headrace.gateway.wire import WIRE
from headrace.load.caller import Answer, Failure, Now, _Reading
from headrace.model.meter import Meter
from headrace.trace.row import TraceRow
from headrace.units import ms


class InMemory:
    """The application itself, asked over ASGI; whoever is in when the gateway is killed hears no more."""

    def __init__(self) -> None:
        self.gateway: Gateway | None = None
        self.lives = 0
        self.drop: Callable[[bytes], bytes] = lambda part: part
        """What becomes of a part of an answer on its way."""
        self._open: set[_Exchange] = set()

    def open(self, gateway: Gateway, accepting: Callable[[], None]) -> None:
        for one in tuple(self._open):
            one.cut()
        self.gateway, self.lives = gateway, self.lives + 1
        gateway.begin()
        accepting()

    async def over(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self, gateway: Gateway) -> None:
        gateway.driver.stop()
        gateway.driver.unrecord()
        gateway._files.close()

    async def ask(self, _row: TraceRow, body: bytes, fields: Mapping[str, str], now: Now) -> Answer:
        assert self.gateway is not None
        exchange = _Exchange(body, fields, now, self.drop)
        self._open.add(exchange)
        try:
            return await exchange.answered(self.gateway)
        finally:
            self._open.discard(exchange)


class _Exchange:
    """One request and its answer, and the wire that they go over."""

    has_all = is_gone = False
    on_gone: Callable[[], None] | None = None

    def __init__(
        self, body: bytes, fields: Mapping[str, str], now: Now, drop: Callable[[bytes], bytes]
    ) -> None:
        self._body, self._now, self._drop = body, now, drop
        told = {"content-length": str(len(body)), **fields}
        self._scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
            "client": ("127.0.0.1", 50_000),
            "headers": [(name.lower().encode(), value.encode()) for name, value in told.items()],
            "extensions": {WIRE: self},
        }  # fmt: skip
        self._reading = _Reading(Meter(bound_ns=ms(100)))
        self._gone = asyncio.get_running_loop().create_future()
        self._read = False

    async def answered(self, gateway: Gateway) -> Answer:
        sent_at = self._now()
        running = asyncio.ensure_future(gateway.app(self._scope, self._receive, self._send))
        await asyncio.wait([running, self._gone], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
        whole = self._reading.over or self._reading.marked
        return self._reading.answer(sent_at, self._now(), None if whole else Failure.BROKEN)

    # What a wire does

    def answer(self, *_: object) -> bool:
        return False

    def write(self, _: bytes) -> bool:
        return False

    def cut(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    async def _receive(self) -> dict[str, Any]:
        if self._read:
            await self._gone
            return {"type": "http.disconnect"}
        self._read = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if self._gone.done():
            return
        if message["type"] == "http.response.start":
            lines = [b"HTTP/1.1 %d Told" % message["status"]]
            lines += [
                name + b": " + value
                for name, value in message["headers"]
                if name.lower() not in (b"content-length", b"transfer-encoding")
            ]
            lines.append(b"transfer-encoding: chunked")
            self._reading.feed(b"\r\n".join(lines) + b"\r\n\r\n", self._now())
            return
        part = self._drop(message["body"])
        if part:
            self._reading.feed(b"%x\r\n%s\r\n" % (len(part), part), self._now())
        if not message.get("more_body", False):
            self._reading.feed(b"0\r\n\r\n", self._now())
