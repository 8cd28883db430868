"""How far is an engine that was just started? Asked over HTTP, one stage after the other.

Health and a list of models prove nothing: an engine may list its model minutes before it can run it.
Ready is one that made a token that we asked for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
from msgspec import Struct

from headrace.adapters.upstream.client import Upstream, origin_of
from headrace.adapters.upstream.exchange import Exchange, Result, Timeouts
from headrace.adapters.upstream.response import Headers
from headrace.ports.actuator import Stage
from headrace.ports.clock import Clock
from headrace.ports.engine import Route
from headrace.units import later, seconds

AGAIN_S = 0.05
"""Between two looks at a stage that is not reached yet."""
_LOOK_S = 2.0
"""What health and a list of models may take; a token may take as long as the start does."""
_OK, _BROKEN = 200, 500
_PROMPT = "Hello"


class _Model(Struct):
    id: str = ""


class _Models(Struct):
    data: list[_Model] = []


async def pause(clock: Clock, wait_s: float) -> None:
    """Return once `wait_s` seconds have passed."""
    over = asyncio.Event()  # set twice, or when nobody waits any more, it bears
    timer = clock.call_at(later(clock.now(), seconds(wait_s)), over.set)
    try:
        await over.wait()
    finally:
        timer.cancel()


async def climb(url: str, model: str, clock: Clock, reached: Callable[[Stage], None]) -> None:
    """Follow an engine until it is ready, telling each stage; without end, if it never is."""
    upstream = Upstream(url, clock)
    engine = _Engine(url, upstream, model, clock)
    looks: tuple[tuple[Stage, Callable[[], Awaitable[bool]]], ...] = (
        (Stage.LISTENING, engine.listens),
        (Stage.HEALTHY, engine.is_well),
        (Stage.LOADED, engine.has_model),
        (Stage.READY, engine.makes_a_token),
    )
    try:
        for stage, look in looks:
            while not await look():
                await pause(clock, AGAIN_S)
            reached(stage)
    finally:
        upstream.close()


class _Engine:
    """One engine, and what it can be asked."""

    def __init__(self, url: str, upstream: Upstream, model: str, clock: Clock) -> None:
        self._origin = origin_of(url)
        self._upstream, self._model, self._clock = upstream, model, clock

    async def listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(self._origin.host, self._origin.port)
        except OSError:
            return False
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True

    async def is_well(self) -> bool:
        """Return whether it answers `/health`, or has none: not all serve it."""
        return 0 < (await self._get("/health")).status < _BROKEN

    async def has_model(self) -> bool:
        """Return whether it lists its model, or has no list."""
        answer = await self._get("/v1/models")
        if answer.status != _OK:
            return 0 < answer.status < _BROKEN
        try:
            listed = msgspec.json.decode(answer.body, type=_Models)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return False
        return any(one.id == self._model for one in listed.data)

    async def makes_a_token(self) -> bool:
        """Return whether it completes a prompt by one token, and counts it."""
        asked = {"model": self._model, "prompt": _PROMPT, "max_tokens": 1}
        answer = _Answer()
        body = msgspec.json.encode(asked)
        answer.exchange = self._upstream.ask(Route.COMPLETIONS, body, answer)
        await answer.over()
        usage = None if answer.result is None else answer.result.usage
        return answer.status == _OK and usage is not None and usage.output_tokens > 0

    async def _get(self, path: str) -> "_Answer":
        answer = _Answer()
        waits = Timeouts(deadline=later(self._clock.now(), seconds(_LOOK_S)))
        answer.exchange = self._upstream.get(path, answer, waits)
        await answer.over()
        return answer


class _Answer:
    """One exchange, waited for."""

    exchange: Exchange

    def __init__(self) -> None:
        self.status, self.body = 0, b""
        self.result: Result | None = None
        self._over = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:  # noqa: ARG002 - the status says all
        self.status = status

    def on_frames(self, data: bytes, frames: int) -> None:  # noqa: ARG002 - it is no stream
        self.body += data

    def on_end(self, result: Result) -> None:
        self.result = result
        if result.error is not None:
            self.status = 0
        self._over.set()

    async def over(self) -> None:
        try:
            await self._over.wait()
        finally:
            if self.result is None:
                self.exchange.abort()
            del self.exchange  # they know each other, and no longer
