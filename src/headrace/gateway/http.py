"""Bytes of one HTTP request in, of its answer out, over ASGI."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from headrace.gateway.errors import Headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class CallerGoneError(Exception):
    """The caller left before its request was read."""


class TooLargeError(Exception):
    """The body is over the limit."""


def header(scope: Scope, *names: bytes) -> bytes | None:
    """Return the value of the leftmost of the names that is there."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in names:
            found.setdefault(name, value)
    return next((found[name] for name in names if name in found), None)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body, refusing one over the limit as soon as that is known."""
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise TooLargeError
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGoneError
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise TooLargeError
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole answer in JSON."""
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def begin_events(send: Send, headers: Headers) -> None:
    """Send the head of a stream of events."""
    fields = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        *headers,
    ]
    await send({"type": "http.response.start", "status": 200, "headers": fields})


async def send_events(send: Send, events: bytes, *, more: bool) -> None:
    """Send events; waits while the caller's side is slow."""
    await send({"type": "http.response.body", "body": events, "more_body": more})


@contextmanager
def watching(receive: Receive, left: Callable[[], None]) -> Iterator[None]:
    """Call `left` if the caller goes away inside; the body must have been read.

    A caller that closes its sending side counts as gone.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left()

    task = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        task.cancel()
