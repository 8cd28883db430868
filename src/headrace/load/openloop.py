"""Offer a trace to a live gateway: every request at its time, whatever came of the others."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from headrace.load.caller import Answer, ask
from headrace.model.ids import TenantId
from headrace.trace.row import TraceRow
from headrace.units import DurationNs, to_seconds

PATIENCE_S = 600.0
"""How long a caller waits for the end of its answer."""


class Target(Struct, frozen=True, kw_only=True):
    """Where to send, as whom."""

    host: str
    port: int
    model: str
    keys: Mapping[TenantId, str]
    """API keys by tenant."""
    gap_bound_ns: DurationNs
    patience_s: float = PATIENCE_S


async def offer(
    rows: Sequence[TraceRow],
    target: Target,
    answered: Callable[[int, Answer], None] | None = None,
) -> list[Answer]:
    """Send every row at its time and return the answers in the rows' order.

    Lengths travel in the trusted replay headers, so no prompt is made up; the gateway must trust
    them. `answered(index, answer)` is told as answers come.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    answers: list[Answer | None] = [None] * len(rows)

    async def one(index: int, row: TraceRow) -> None:
        await _until(began + to_seconds(row.at))
        answer = await ask(
            target.host,
            target.port,
            _body(target.model, row),
            _headers(row, target),
            gap_bound_ns=target.gap_bound_ns,
            patience_s=target.patience_s,
        )
        answers[index] = answer
        if answered is not None:
            answered(index, answer)

    async with asyncio.TaskGroup() as group:
        for index, row in enumerate(rows):
            group.create_task(one(index, row))
    return [answer for answer in answers if answer is not None]


async def _until(when: float) -> None:
    """Wait for an instant of the loop's clock."""
    loop = asyncio.get_running_loop()
    if when > loop.time():
        future = loop.create_future()
        loop.call_at(when, future.set_result, None)
        await future


def _body(model: str, row: TraceRow) -> bytes:
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "replayed"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if row.max_tokens is not None:
        asked["max_tokens"] = row.max_tokens
    return msgspec.json.encode(asked)


def _headers(row: TraceRow, target: Target) -> dict[str, str]:
    assert row.tenant is not None, "a live trace names its tenants"
    headers = {
        "Authorization": f"Bearer {target.keys[row.tenant]}",
        "x-headrace-replay-input": str(row.input_tokens),
        "x-headrace-replay-output": str(row.output_tokens),
    }
    if row.slo_class is not None:
        headers["x-llm-d-inference-objective"] = row.slo_class
    return headers
