"""What a gateway tells with a request is what an engine orders it by."""

import asyncio
from typing import Any

import pytest

from headrace.model.ids import ClassName, TenantId
from headrace.model.paths import Level, Link, path
from headrace.model.told import Told
from headrace.units import NS_PER_S, DurationNs, ms
from tests.adapters.engine_server.serving import ENDLESS, KINDS, Served, asking, chat, serving

pytestmark = [pytest.mark.asyncio, pytest.mark.service]

ONE_SLOT = {"kind": "chunked_prefill", "running_limit": 1}
LATEST_FIRST = (40, 30, 20, 10)


def told(seconds: int) -> dict[str, str | int]:
    """Return metadata with a deadline so many seconds away."""
    return Told(
        tenant=TenantId("t"),
        slo_class=ClassName("c"),
        way=path(Link(Level.CLASS, "c"), Link(Level.TENANT, "t")),
        counters=(0, 0),
        left_ns=DurationNs(seconds * NS_PER_S),
        gap_ns=ms(80),
        relegated=False,
    ).scalars()


async def order(served: Served) -> list[int]:
    """Return in which order requests end that wait together for the one slot, sent the latest first."""
    talk = await served.talk("POST", "/v1/chat/completions", chat(stream=True, **ENDLESS))
    await talk.until(b"data: ")
    ended: list[int] = []

    async def ask(seconds: int) -> None:
        await served.chat(max_tokens=2, ignore_eos=True, vllm_xargs=told(seconds))
        ended.append(seconds)

    asked = []
    for nth, seconds in enumerate(LATEST_FIRST):
        asked.append(asyncio.create_task(ask(seconds)))
        while await served.metric("num_requests_waiting") <= nth:
            pass
    talk.leave()
    await asyncio.gather(*asked)
    return ended


async def test_the_earliest_deadline_starts_first_where_the_engine_goes_by_that() -> None:
    emulator = {"batching": ONE_SLOT, "ordering": {"kind": "tenant_first"}}
    async with serving(emulator=emulator, speed=1) as served:
        assert await order(served) == sorted(LATEST_FIRST)


async def test_whoever_came_first_starts_first_where_it_does_not() -> None:
    async with serving(emulator={"batching": ONE_SLOT}, speed=1) as served:
        assert await order(served) == list(LATEST_FIRST)


@pytest.mark.parametrize("route", KINDS)
async def test_what_cannot_be_read_harms_nobody(route: str) -> None:
    rubbish: dict[str, Any] = {"headrace_way": "[[9]]", "headrace_left_ms": "soon"}
    async with serving(emulator={"ordering": {"kind": "tenant_first"}}) as served:
        reply = await served.post(route, asking(route, most=2, vllm_xargs=rubbish))
        assert reply.status == 200
