"""Bytes of one HTTP request in, of its answer out, over ASGI."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

from headrace.gateway.errors import Headers
from headrace.gateway.wire import WIRE, Wire
from headrace.units import MIB

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


HEAD_BYTES_MAX = 65_536
"""Longest head of a request: more than nginx (32 KiB) and Envoy (60 KiB) take."""


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


class TooSlowError(Exception):
    """The body takes too long to come."""


async def read_body(
    scope: Scope, receive: Receive, limit: int, patience_s: float | None = None
) -> bytes:
    """Return the body, refusing one over the limit as soon as that is known.

    `patience_s`: seconds that the body, and each whole MiB of it, may take.
    """
    wire: Wire | None = scope.get("extensions", {}).get(WIRE)
    found: list[bytes] = []
    if wire is not None and wire.has_all:  # nothing to wait for: no clock, no task
        while await _piece(receive, found):
            pass
        if sum(map(len, found)) > limit:
            raise TooLargeError
        return b"".join(found)
    return b"".join([data async for data in pieces(scope, receive, limit, patience_s)])


async def pieces(
    scope: Scope, receive: Receive, limit: int, patience_s: float | None
) -> AsyncGenerator[bytes]:
    """Yield a body as it comes, with the bounds of `read_body`; only waiting for its caller counts."""
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise TooLargeError
    size, more, waited = 0, True, 0.0
    loop = asyncio.get_running_loop()
    while more:
        found: list[bytes] = []
        begun = loop.time()
        patience = None if patience_s is None else patience_s * (1 + size // MIB) - waited
        try:
            async with asyncio.timeout(patience):
                more = await _piece(receive, found)
        except TimeoutError:
            raise TooSlowError from None
        waited += loop.time() - begun
        size += len(found[0])
        if size > limit:
            raise TooLargeError
        yield found[0]


async def _piece(receive: Receive, pieces: list[bytes]) -> bool:
    """Add the next piece of a body; return whether more follow."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise CallerGoneError
    pieces.append(message.get("body", b""))
    return bool(message.get("more_body", False))


async def answer(wire: Wire, send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole answer in JSON."""
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    if wire.answer(status, fields, body):
        return
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


async def cut(wire: Wire, receive: Receive) -> None:
    """Close the connection, so that its caller sees an answer without an end; wait until it is."""
    wire.cut()
    while (await receive())["type"] != "http.disconnect":
        pass


class watching:  # noqa: N801 - used as a verb; a generator for each stream takes more memory
    """Call `left` if the caller goes away inside; one that closes its sending side counts as gone."""

    __slots__ = ("_left", "_wire")

    def __init__(self, wire: Wire, left: Callable[[], None]) -> None:
        """Watch nobody yet."""
        self._wire, self._left = wire, left

    def __enter__(self) -> None:
        """Watch."""
        if self._wire.is_gone:
            self._left()
        else:
            self._wire.on_gone = self._left

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        self._wire.on_gone = None
