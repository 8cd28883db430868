"""Offer a trace to a live gateway: every request at its time, whatever came of the others.

Never waits for an answer before it sends the next request: load that slows down with its server
measures the server's kindness to itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from headrace.load.caller import Answer, Now, Place, ask, loop_time, unsent
from headrace.load.prompts import prompt
from headrace.model.ids import TenantId
from headrace.trace.row import TraceRow
from headrace.units import DurationNs, InstantNs, to_seconds

PATIENCE_S = 600.0
"""How long a caller waits for the end of its answer."""
CONNECTIONS = 10_000
"""Connections open at once, as many as a gateway takes by default."""

Ask = Callable[[TraceRow, bytes, Mapping[str, str], Now], Awaitable[Answer]]
"""Asks once: the row, its body, its headers and a clock that starts with the replay."""


class Target(Struct, frozen=True, kw_only=True):
    """Where to send, as whom, and how a row becomes a request."""

    place: Place
    model: str
    """Asked for where a row names none."""
    keys: Mapping[TenantId, str]
    """API keys by tenant; empty sends none."""
    gap_ns: Callable[[TraceRow], DurationNs]
    """The gap bound that a row's stream is counted by."""
    trusted: bool = False
    """Tell lengths in the replay headers, which the server must trust."""
    spoken: bool = True
    """Make up a prompt of the row's length; else the headers alone tell it."""
    salt: str = ""
    """Sets the prompts of one replay apart from another's, but for shared beginnings."""
    patience_s: float = PATIENCE_S
    connections: int = CONNECTIONS


async def offer(
    rows: Sequence[TraceRow],
    target: Target,
    answered: Callable[[int, Answer], None],
    *,
    clock: Now = loop_time,
    ask_once: Ask | None = None,
    speed: float = 1.0,
) -> None:
    """Send every row at its time and return when all are answered.

    `answered(index, answer)` is told as answers come, in times counted from the start. Cancelling
    stops the sending and the open answers, which are told as far as they came. `speed`: how many seconds
    of the clock pass in one of the loop's.
    """
    began = clock()

    def now() -> InstantNs:
        return InstantNs(clock() - began)

    once = _asking(target) if ask_once is None else ask_once
    unanswered = 0

    async def one(index: int, row: TraceRow) -> None:
        nonlocal unanswered
        body = encoded(row, target, index)
        answer = await once(row, body, headers(row, target), now)
        unanswered -= 1
        answered(index, answer)

    async with asyncio.TaskGroup() as group:
        for index, row in enumerate(rows):
            await _until(row.at, now, speed)
            if unanswered == target.connections:
                answered(index, unsent(now()))
                continue
            unanswered += 1
            group.create_task(one(index, row))


async def _until(when: InstantNs, now: Now, speed: float) -> None:
    left = when - now()
    if left > 0:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_later(to_seconds(left) / speed, _wake, future)
        await future


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():  # a replay that is stopped no longer waits
        future.set_result(None)


def _asking(target: Target) -> Ask:
    async def once(row: TraceRow, body: bytes, fields: Mapping[str, str], now: Now) -> Answer:
        return await ask(
            target.place,
            body,
            fields,
            gap_bound_ns=target.gap_ns(row),
            patience_s=target.patience_s,
            now=now,
        )

    return once


def encoded(row: TraceRow, target: Target, index: int) -> bytes:
    """Return the body of a row's request: streamed, ending with its usage."""
    text = prompt(row, f"{target.salt}/{index}") if target.spoken else "replayed"
    asked: dict[str, Any] = {
        "model": row.model or target.model,
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if row.max_tokens is not None:
        asked["max_tokens"] = row.max_tokens
    return msgspec.json.encode(asked)


def headers(row: TraceRow, target: Target) -> dict[str, str]:
    """Return who asks, for which class, and, of those who trust it, how long it all is."""
    told: dict[str, str] = {}
    if target.keys:
        assert row.tenant is not None, "a live trace names its tenants"
        told["Authorization"] = f"Bearer {target.keys[row.tenant]}"
    if target.trusted:
        told["x-headrace-replay-input"] = str(row.input_tokens)
        told["x-headrace-replay-output"] = str(row.output_tokens)
    if row.slo_class is not None:
        told["x-llm-d-inference-objective"] = row.slo_class
    return told
