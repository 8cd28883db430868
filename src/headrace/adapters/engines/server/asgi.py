"""Bytes of one HTTP exchange over ASGI: its body in, an answer or events out, and its end.

An exchange ends when its answer is complete, when the caller leaves, or when it is cut; whoever
waits inside one waits for `gone` too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CUT = "headrace.cut"
"""The extension of a scope whose `close` closes its connection, whatever was promised on it."""
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"


class CallerGoneError(Exception):
    """The caller left before its request was read."""


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start with nothing read and nothing sent."""
        self._scope, self._receive, self._send = scope, receive, send
        self.headers: Headers = []
        """Sent with every answer."""
        self.gone = asyncio.Event()
        """The caller has left, or the connection was cut."""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return str(self._scope["method"])

    @property
    def path(self) -> str:
        """The path, without the query."""
        return str(self._scope["path"])

    @property
    def peer(self) -> str:
        """The caller's address."""
        host, _ = self._scope["client"]
        return str(host)

    def header(self, name: bytes) -> str | None:
        """Return a header's value, if it is there."""
        for known, value in self._scope["headers"]:
            if known == name:
                return bytes(value).decode("latin-1")
        return None

    async def body(self) -> bytes:
        """Return the request's body."""
        pieces: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise CallerGoneError
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(pieces)

    @contextmanager
    def watched(self, left: Callable[[], None]) -> Iterator[None]:
        """Notice inside when the caller leaves, and say so at once; the body must have been read.

        A caller that closes its sending side has left, as for every server on uvicorn.
        """

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.gone.set()
            left()

        task = asyncio.get_running_loop().create_task(watch())
        try:
            yield
        finally:
            task.cancel()

    async def begin(self, status: int, *fields: tuple[bytes, bytes]) -> None:
        """Send the head of an answer."""
        head = [*fields, *self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def send(self, content: bytes, *, more: bool = True) -> None:
        """Send some of the answer; waits while the caller is slow."""
        await self._send({"type": "http.response.body", "body": content, "more_body": more})

    async def whole(self, status: int, content: bytes, kind: bytes = JSON) -> None:
        """Send an answer in one piece."""
        length = b"%d" % len(content)
        await self.begin(status, (b"content-type", kind), (b"content-length", length))
        await self.send(content, more=False)

    async def cut(self) -> None:
        """Close the connection after what was sent, and wait until it is closed."""
        self.close()
        await self.gone.wait()

    def close(self) -> None:
        """Close the connection after what was sent."""
        self._scope["extensions"][CUT]["close"]()
