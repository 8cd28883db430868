"""The gateway before a real vLLM: what it sends is understood, what comes back is, and what it frees is free.

Asserted are counts and order, by vLLM's own metrics: on a machine that it keeps busy no caller's clock
tells anything. Every wait has an end, and whatever was begun at vLLM is left there by a test that fails.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic
from msgspec.structs import replace
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from headrace.config.schema import ServerSpec, Settings, UpstreamSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Concluded
from headrace.model.engine import EngineKind, Scheduler
from headrace.model.slo import Outcome
from headrace.policy.catalog import PlaneConfig, Window
from headrace.units import BLOCK_TOKENS
from tests.gateway.scenes import KEYS, MODEL, PROFILE, assert_books_closed, keys
from tests.services import vllm
from tests.services.vllm import VllmServer

pytestmark = [pytest.mark.asyncio, pytest.mark.service, pytest.mark.vllm]
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the sea."}]
LONG = {"ignore_eos": True}
_PAUSE_S = 0.05
_PATIENCE_S = 120.0
"""For one answer, or for one thing to become so."""
_WHOLE_S = 300.0
"""For all that one test does before one vLLM."""
_RUNNING, _WAITING = "num_requests_running", "num_requests_waiting"
_KV, _REFUSED = "kv_cache_usage_perc", "admission_rejections_total"


class Fronted:
    """A gateway that serves, the vLLM behind it, and what became of its requests."""

    def __init__(self, gateway: Gateway, base: str, rows: list[Concluded], server: VllmServer):
        self.gateway, self.base, self.rows, self.server = gateway, base, rows, server

    def sdk(self, tenant: str = "free") -> AsyncOpenAI:
        return caller(self.base, KEYS[tenant])

    async def told(self, *names: str) -> list[float]:
        """Return sums of vLLM's metrics."""
        page = (await asyncio.to_thread(self.server.get, "/metrics")).decode()
        return [total(page, name) for name in names]

    async def until(self, name: str, value: float) -> None:
        """Wait until a metric of vLLM's has a value."""
        async with asyncio.timeout(_PATIENCE_S):
            while await self.told(name) != [value]:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(_PAUSE_S)


def total(page: str, name: str) -> float:
    """Return the sum of a metric's series on a page; it must be there."""
    found = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    assert found, f"vLLM tells no {name}"
    return sum(map(float, found))


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds here."""
    async with asyncio.timeout(_PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for is in another's hands
            await asyncio.sleep(_PAUSE_S)


def deployment(**changes: Any) -> PlaneConfig:
    """Return one pool with vLLM's slots, and two tenants, of which `slow` has the later deadlines."""
    profile = replace(PROFILE, max_running=vllm.SLOTS, reference_batch=vllm.SLOTS)
    whole = PlaneConfig(
        models=(ModelSpec(name=MODEL),),
        pools=(PoolSpec(name="p", model=MODEL, profile=profile, replicas=0),),
        classes=(
            ClassSpec(name="interactive", ttft_ms=300_000),
            ClassSpec(name="batch", ttft_ms=600_000),
        ),
        tenants=(
            TenantSpec(name="free"),
            TenantSpec(name="slow", classes=("batch",)),
            TenantSpec(name="single"),
            TenantSpec(name="narrow"),
        ),
    )
    return replace(whole, **changes)


@asynccontextmanager
async def fronted(
    server: VllmServer, *, idle: bool = True, **changes: Any
) -> AsyncIterator[Fronted]:
    """Serve before an idle vLLM of which only the address is told; leave it idle again, or gone."""
    rows: list[Concluded] = []
    settings = Settings(
        deployment=deployment(**changes),
        keys=keys(),
        server=ServerSpec(port=0, drain_s=0, trusted_replay=True),
        upstreams=(
            UpstreamSpec(url=server.base, pool="p", model=vllm.MODEL, scheduler=Scheduler.PRIORITY),
        ),
    )
    gateway = Gateway(settings, LoopClock(asyncio.get_running_loop()), rows.append)
    sock = listen("127.0.0.1", 0)
    host, port = sock.getsockname()
    running = asyncio.create_task(gateway.serve(sock))
    front = Fronted(gateway, f"http://{host}:{port}", rows, server)
    try:
        await until(lambda: bool(gateway.driver.ready_replicas))
        async with asyncio.timeout(_WHOLE_S):
            yield front
    finally:
        gateway.stop()
        async with asyncio.timeout(_PATIENCE_S):
            assert await running
        assert_books_closed(gateway.driver.plane)
        if idle:
            await front.until(_RUNNING, 0)


@asynccontextmanager
async def endless(sdk: AsyncOpenAI, model: str = MODEL) -> AsyncIterator[Any]:
    """Hold an answer that goes on, past its first token; it is left at the end."""
    stream = await sdk.completions.create(
        model=model, prompt="On", max_tokens=vllm.CONTEXT // 2, stream=True, extra_body=LONG
    )
    try:
        await anext(aiter(stream))
        yield stream
    finally:
        await stream.close()


def caller(base: str, key: str = "none") -> AsyncOpenAI:
    """Return one that asks once, and waits as long for a connection as for an answer."""
    return AsyncOpenAI(api_key=key, base_url=f"{base}/v1", max_retries=0, timeout=_PATIENCE_S)


def direct(server: VllmServer) -> AsyncOpenAI:
    """Return a caller of vLLM itself."""
    return caller(server.base)


@pytest.fixture(scope="module")
def server() -> VllmServer:
    """Return the server that all tests share."""
    return vllm.shared()


async def test_chats_are_answered_whole_and_in_events(server: VllmServer) -> None:
    async with fronted(server) as front, front.sdk() as sdk:
        whole = await sdk.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=6, extra_body=LONG
        )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        assert whole.choices[0].message.content
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=9, stream=True, extra_body=LONG
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert all(chunk.usage is None for chunk in chunks), "asked for, and kept from the caller"
        used = [row.usage and row.usage.output_tokens for row in front.rows]
        assert used == [6, 9]
        assert all(row.met for row in front.rows)


async def test_responses_and_messages_pass(server: VllmServer) -> None:
    async with fronted(server) as front, front.sdk() as sdk:
        answer = await sdk.responses.create(model=MODEL, input="The sea", max_output_tokens=6)
        assert answer.usage is not None
        async with (
            AsyncAnthropic(
                api_key=KEYS["free"], base_url=front.base, max_retries=0, timeout=_PATIENCE_S
            ) as claude,
            claude.messages.stream(
                model=MODEL, messages=[{"role": "user", "content": "The sea"}], max_tokens=6
            ) as stream,
        ):
            final = await stream.get_final_message()
        used = [row.usage and row.usage.output_tokens for row in front.rows]
        assert used == [answer.usage.output_tokens, final.usage.output_tokens]
        assert all(row.outcome is Outcome.SUCCESS for row in front.rows)


async def test_vllm_sleeps_where_it_waits_so_that_others_have_their_turn(
    server: VllmServer,
) -> None:
    tokens = 200
    async with direct(server) as sdk:
        before = server.sleeps()
        await sdk.completions.create(
            model=vllm.MODEL, prompt="On", max_tokens=tokens, extra_body=LONG
        )
    assert server.sleeps() - before >= tokens


async def test_what_vllm_refuses_is_passed_on_as_the_callers_fault(server: VllmServer) -> None:
    async with fronted(server) as front, front.sdk() as sdk:
        with pytest.raises(openai.BadRequestError) as failed:
            await sdk.completions.create(
                model=MODEL, prompt="x", max_tokens=1, extra_body={"temperature": -3}
            )
        assert "temperature" in failed.value.message
        (row,) = front.rows
        assert row.outcome is Outcome.ERROR


async def test_a_replayed_length_is_made_to_the_token(server: VllmServer) -> None:
    names = ("generation_tokens_total", "request_generation_tokens_sum")
    async with fronted(server) as front, front.sdk() as sdk:
        before = await front.told(*names)
        for length in (1, 17, 230):
            headers = {"x-headrace-replay-output": str(length)}
            stream = await sdk.chat.completions.create(
                model=MODEL, messages=HELLO, stream=True, extra_headers=headers
            )
            async for _ in stream:
                pass
        after = await front.told(*names)
        assert [now - then for now, then in zip(after, before, strict=True)] == [248, 248]
        assert [row.usage and row.usage.output_tokens for row in front.rows] == [1, 17, 230]


async def test_cached_tokens_are_told_and_charged_as_such(server: VllmServer) -> None:
    prompt = "A tenant's own long beginning. " * 40
    async with fronted(server) as front, front.sdk() as sdk:
        hits = await front.told("prefix_cache_hits_total")
        cached = []
        for _ in range(2):
            answer = await sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            cached.append(0 if details is None else details.cached_tokens or 0)
            assert cached[-1] < answer.usage.prompt_tokens
        assert cached[0] == 0 < cached[1]
        assert not cached[1] % vllm.BLOCK_TOKENS
        assert [row.usage and row.usage.cached_tokens for row in front.rows] == cached
        assert await front.told("prefix_cache_hits_total") == [hits[0] + cached[1]]


async def test_its_load_is_reported_in_blocks_of_ours(server: VllmServer) -> None:
    async with fronted(server) as front, front.sdk() as sdk:
        plane = front.gateway.driver.plane
        (replica,) = (r for m in plane.state.models.values() for r in m.fleet.replicas.values())

        def reported() -> bool:
            told = replica.snapshot
            return told is not None and told.running == 1 and bool(told.kv_blocks_used)

        async with endless(sdk):
            await until(reported)
        (engine,) = front.gateway.driver.engines
        assert engine.missing == ()
        assert replica.snapshot is not None
        tokens = vllm.BLOCKS * vllm.BLOCK_TOKENS
        assert replica.snapshot.kv_blocks_total == tokens // BLOCK_TOKENS
        assert engine.traits.health_path == "/health"  # type: ignore[attr-defined]
        assert engine._kind is EngineKind.VLLM  # type: ignore[attr-defined]


async def test_a_caller_that_leaves_frees_its_slot_and_its_memory(server: VllmServer) -> None:
    async with fronted(server) as front, front.sdk() as sdk:
        async with endless(sdk), endless(sdk):
            await front.until(_RUNNING, 2)
            (used,) = await front.told(_KV)
            assert used > 0
        await front.until(_RUNNING, 0)
        await front.until(_KV, 0)
        await until(lambda: len(front.rows) == 2)
        assert {row.outcome for row in front.rows} == {Outcome.CLIENT_CANCEL}


async def fill(stack: AsyncExitStack, front: Fronted) -> None:
    """Have vLLM hold as much as it takes, from others than the gateway."""
    own = await stack.enter_async_context(direct(front.server))
    for _ in range(vllm.SLOTS):
        await stack.enter_async_context(endless(own, vllm.MODEL))
    more = vllm.QUEUE_BOUND - vllm.SLOTS
    waiting = [
        asyncio.create_task(own.completions.create(model=vllm.MODEL, prompt="x", max_tokens=1))
        for _ in range(more)
    ]
    stack.push_async_callback(_gone, waiting)
    await front.until(_WAITING, more)


async def _gone(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_vllm_is_our_503_and_takes_more_when_it_has_room(
    server: VllmServer, stream: bool
) -> None:
    async with fronted(server) as front, front.sdk() as sdk:
        (before,) = await front.told(_REFUSED)
        async with AsyncExitStack() as stack:
            await fill(stack, front)
            for _ in range(2):
                with pytest.raises(openai.InternalServerError) as failed:
                    await sdk.chat.completions.create(
                        model=MODEL, messages=HELLO, max_tokens=1, stream=stream
                    )
                assert failed.value.status_code == 503
                assert failed.value.code == "server_is_overloaded"
                assert int(failed.value.response.headers["retry-after"]) >= 1
        assert await front.told(_REFUSED) == [before + 2]
        await front.until(_RUNNING, 0)
        answer = await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        assert answer.usage is not None
        outcomes = [row.outcome for row in front.rows]
        assert outcomes == [Outcome.ERROR, Outcome.ERROR, Outcome.SUCCESS]


async def test_a_burst_is_refused_by_events_which_are_503_as_well(server: VllmServer) -> None:
    """Streams that come at once pass vLLM's first look together; most of them are told in events."""
    many = 40
    async with fronted(server, window=Window(unbounded=True)) as front, front.sdk() as sdk:
        (before,) = await front.told(_REFUSED)

        async def ask() -> int:
            try:
                stream = await sdk.chat.completions.create(
                    model=MODEL, messages=HELLO, max_tokens=32, stream=True, extra_body=LONG
                )
                return len([chunk async for chunk in stream]) and 200
            except openai.InternalServerError as failed:
                return failed.status_code

        statuses = await asyncio.gather(*[ask() for _ in range(many)])
        (after,) = await front.told(_REFUSED)
        assert statuses.count(503) == after - before > 0
        assert statuses.count(200) == many - (after - before) >= vllm.QUEUE_BOUND


async def test_what_would_overfill_vllm_waits_here_and_none_is_refused(server: VllmServer) -> None:
    many = 3 * vllm.QUEUE_BOUND
    async with fronted(server) as front, front.sdk() as sdk:
        (before,) = await front.told(_REFUSED)
        answers = await asyncio.gather(
            *[
                sdk.completions.create(
                    model=MODEL, prompt=f"Number {nth}", max_tokens=32, extra_body=LONG
                )
                for nth in range(many)
            ]
        )
        assert [answer.usage and answer.usage.completion_tokens for answer in answers] == [
            32
        ] * many
        assert await front.told(_REFUSED) == [before]
        assert all(row.outcome is Outcome.SUCCESS for row in front.rows)


async def test_vllm_runs_what_waits_in_it_in_the_order_of_our_deadlines(server: VllmServer) -> None:
    order: list[str] = []
    async with fronted(server, window=Window(unbounded=True)) as front, AsyncExitStack() as stack:
        own = await stack.enter_async_context(direct(server))
        held = await stack.enter_async_context(AsyncExitStack())
        await held.enter_async_context(endless(own, vllm.MODEL))
        await stack.enter_async_context(endless(own, vllm.MODEL))

        async def ask(tenant: str) -> None:
            async with front.sdk(tenant) as sdk:
                stream = await sdk.completions.create(
                    model=MODEL, prompt=tenant, max_tokens=3, stream=True, extra_body=LONG
                )
                await anext(aiter(stream))
                order.append(tenant)
                async for _ in stream:
                    pass

        asked = []
        for waiting, tenant in enumerate(("slow", "free"), start=1):
            asked.append(asyncio.create_task(ask(tenant)))
            await front.until(_WAITING, waiting)
        await held.aclose()
        await asyncio.gather(*asked)
    assert order == ["free", "slow"], "which came later, with the earlier deadline"


async def test_a_vllm_that_dies_in_mid_stream_is_an_error_and_then_no_replica() -> None:
    server = await asyncio.to_thread(vllm.start, vllm.needed(), vllm.SHARED_FLAGS)
    try:
        async with fronted(server, idle=False) as front, front.sdk() as sdk:
            async with endless(sdk) as stream:
                await asyncio.to_thread(server.kill)
                with pytest.raises(openai.APIError):
                    async for _ in stream:
                        pass
            await until(lambda: not front.gateway.driver.ready_replicas)
            with pytest.raises(openai.InternalServerError) as failed:
                await sdk.completions.create(model=MODEL, prompt="x", max_tokens=1)
            assert failed.value.code == "no_ready_replica"
            assert front.rows[0].outcome is Outcome.ERROR
    finally:
        if not server.is_gone():
            server.stop()
    assert server.is_gone(), "its engine and its worker went with it"
