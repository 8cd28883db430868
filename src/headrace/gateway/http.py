"""Bytes of one HTTP request in, of its answer out, over ASGI."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace.gateway.errors import Headers
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


ARRIVED = "headrace.arrived"
"""In a scope's extensions: `all` tells whether the whole body is there already, as it mostly is."""


async def read_body(
    scope: Scope, receive: Receive, limit: int, patience_s: float | None = None
) -> bytes:
    """Return the body, refusing one over the limit as soon as that is known.

    `patience_s`: seconds that the body, and each whole MiB of it, may take.
    """
    arrived = scope.get("extensions", {}).get(ARRIVED)
    pieces: list[bytes] = []
    if arrived is not None and arrived["all"]():  # nothing to wait for: no clock, no task
        while await _piece(receive, pieces):
            pass
        if sum(map(len, pieces)) > limit:
            raise TooLargeError
        return b"".join(pieces)
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise TooLargeError
    size = 0
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with asyncio.timeout(patience_s) as deadline:
            while await _piece(receive, pieces):
                size += len(pieces[-1])
                if size > limit:
                    raise TooLargeError
                if patience_s is not None:
                    deadline.reschedule(begun + patience_s * (1 + size // MIB))
    except TimeoutError:
        raise TooSlowError from None
    if size + len(pieces[-1]) > limit:
        raise TooLargeError
    return b"".join(pieces)


async def _piece(receive: Receive, pieces: list[bytes]) -> bool:
    """Add the next piece of a body; return whether more follow."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise CallerGoneError
    pieces.append(message.get("body", b""))
    return bool(message.get("more_body", False))


async def answer(scope: Scope, send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole answer in JSON."""
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    past = scope.get("extensions", {}).get(WRITE)
    if past is not None and past["answer"](status, fields, body):
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


CUT = "headrace.cut"
"""In a scope's extensions: how to close the connection under an answer that cannot be completed."""


async def cut(scope: Scope, receive: Receive) -> None:
    """Close the connection, so that its caller sees an answer without an end; wait until it is."""
    scope["extensions"][CUT]["close"]()
    while (await receive())["type"] != "http.disconnect":
        pass


LEFT = "headrace.left"
"""In a scope's extensions: whom to `call` when the caller goes away, and whether it is `gone`. A server
that tells spares each request a task that waits for it."""


WRITE = "headrace.write"
"""In a scope's extensions, past ASGI: how to `write` a piece of a body that has begun, and how to
`answer` (status, headers, body) a whole. False: not now, or not this one."""


def writer(scope: Scope) -> Callable[[bytes], bool] | None:
    """Return what writes pieces of an answer at once, if its server gives it."""
    given: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(WRITE, {}).get("write")
    return given


def gone(scope: Scope) -> None:
    """Tell whoever watches a request that its caller is gone; a server calls this at once."""
    line = scope["extensions"][LEFT]
    line["gone"] = True
    left = line.pop("call", None)
    if left is not None:
        left()


class watching:  # noqa: N801 - used as a verb; a generator for each stream takes more memory
    """Call `left` if the caller goes away inside; the body must have been read.

    A caller that closes its sending side counts as gone.
    """

    __slots__ = ("_left", "_line", "_receive", "_task")

    def __init__(self, scope: Scope, receive: Receive, left: Callable[[], None]) -> None:
        """Watch nobody yet."""
        self._line = scope.get("extensions", {}).get(LEFT)
        self._receive, self._left = receive, left
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        """Watch."""
        if self._line is None:
            watch = _watch(self._receive, self._left)
            self._task = asyncio.get_running_loop().create_task(watch)
        elif self._line.get("gone"):
            self._left()
        else:
            self._line["call"] = self._left

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()
        elif self._line is not None:
            self._line.pop("call", None)


async def _watch(receive: Receive, left: Callable[[], None]) -> None:
    """Know nobody who knows the task that this is: it would be garbage that needs collecting."""
    while (await receive())["type"] != "http.disconnect":
        pass
    left()
