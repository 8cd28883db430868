"""The gateway before an engine behind HTTP, judged by clients we did not write."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from headrace.config.schema import (
    EngineTokenizerSpec,
    ServerSpec,
    Settings,
    TokenCountsSpec,
    UpstreamSpec,
)
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from headrace.model.effect import Concluded
from headrace.model.engine import EngineKind
from headrace.model.ids import ReplicaName
from headrace.model.slo import Outcome
from tests.adapters.engine_server.serving import MODEL as SERVED
from tests.adapters.engine_server.serving import Served
from tests.adapters.engine_server.serving import serving as engine
from tests.gateway.scenes import KEYS, MODEL, assert_books_closed, deployment, keys

pytestmark = [pytest.mark.asyncio, pytest.mark.service]
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello there"}]


class Fronted:
    """A gateway that serves, and the engine behind it."""

    def __init__(self, gateway: Gateway, base: str, rows: list[Concluded], served: Served) -> None:
        self.gateway, self.base, self.rows, self.served = gateway, base, rows, served

    def sdk(self, tenant: str = "free") -> AsyncOpenAI:
        return AsyncOpenAI(api_key=KEYS[tenant], base_url=f"{self.base}/v1", max_retries=0)


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    while not holds():  # noqa: ASYNC110 - what is waited for is in another's hands
        await asyncio.sleep(0)


@asynccontextmanager
async def fronted(
    *,
    counts: TokenCountsSpec | None = None,
    continuous_usage: bool = False,
    **engine_settings: Any,
) -> AsyncIterator[Fronted]:
    """Serve an engine and a gateway before it, until its first probe found the engine well."""
    rows: list[Concluded] = []
    async with engine(**engine_settings) as served:
        settings = Settings(
            deployment=deployment(replicas=0),
            keys=keys(),
            server=ServerSpec(port=0, drain_s=0),
            upstreams=(
                UpstreamSpec(
                    url=served.base, pool="p", model=SERVED, continuous_usage=continuous_usage
                ),
            ),
            token_counts=counts,
        )
        gateway = Gateway(settings, LoopClock(asyncio.get_running_loop()), rows.append)
        sock = listen("127.0.0.1", 0)
        host, port = sock.getsockname()
        running = asyncio.create_task(gateway.serve(sock))
        try:
            await until(lambda: bool(gateway.driver.ready_replicas))
            yield Fronted(gateway, f"http://{host}:{port}", rows, served)
        finally:
            gateway.stop()
            assert await running
            assert_books_closed(gateway.driver.plane)


async def test_chats_are_answered_whole_and_in_events() -> None:
    async with fronted() as front, front.sdk() as sdk:
        whole = await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 9
        stream = await sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        assert all([chunk.usage is None async for chunk in stream])
        used = [row.usage.output_tokens for row in front.rows if row.usage is not None]
        assert used[:2] == [6, 9]
        assert used[2] > 0, "asked for on the caller's behalf, and kept from it"
        assert all(row.met for row in front.rows)


async def test_prompts_are_counted_by_the_engine_before_they_are_decided_on() -> None:
    counts = TokenCountsSpec(models=(EngineTokenizerSpec(model=MODEL),), wait_ms=10_000)
    async with fronted(counts=counts) as front, front.sdk() as sdk:
        for _ in range(2):
            await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6)
        await sdk.completions.create(model=MODEL, prompt="Hello there", max_tokens=6)
        for row in front.rows:
            assert row.usage is not None
            assert row.entry.input_tokens == row.usage.input_tokens
        results = front.gateway.app.token_counts
        assert results == {(MODEL, "counted"): 2, (MODEL, "cached"): 1}


@pytest.mark.parametrize("kind", [EngineKind.EMULATED, None])
async def test_an_engine_that_joined_counts_and_one_that_left_is_not_asked(
    kind: EngineKind | None,
) -> None:
    """One of unknown kind is asked for it first, whoever saw it serve."""
    counts = TokenCountsSpec(models=(EngineTokenizerSpec(model=MODEL),), wait_ms=10_000)
    async with fronted(counts=counts) as front, front.sdk() as sdk:
        driver = front.gateway.driver
        front.gateway.join(
            UpstreamSpec(url=front.served.base, pool="p", name="late", model=SERVED, kind=kind)
        )
        await until(lambda: driver.ready_replicas == 2)
        driver.remove(ReplicaName("p-0"))
        for nth in range(2):
            await sdk.completions.create(model=MODEL, prompt=f"Hello {nth}", max_tokens=1)
        assert [row.replica for row in front.rows] == ["late"] * 2
        assert front.gateway.app.token_counts == {(MODEL, "counted"): 2}


async def test_responses_and_embeddings_pass() -> None:
    async with fronted() as front, front.sdk() as sdk:
        answer = await sdk.responses.create(model=MODEL, input="Hello there", max_output_tokens=6)
        assert len(answer.output_text.split()) == 6
        async with sdk.responses.stream(model=MODEL, input="Hello there") as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.usage is not None
        vectors = await sdk.embeddings.create(model=MODEL, input="Hello there", dimensions=8)
        assert len(vectors.data[0].embedding) == 8
        told = [row.usage for row in front.rows]
        assert [one and one.output_tokens for one in told] == [6, final.usage.output_tokens, 0]


async def test_messages_stream_through() -> None:
    async with (
        fronted() as front,
        AsyncAnthropic(api_key=KEYS["free"], base_url=front.base, max_retries=0) as sdk,
    ):
        async with sdk.messages.stream(
            model=MODEL, messages=[{"role": "user", "content": "Hello there"}], max_tokens=10_000
        ) as stream:
            said = "".join([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        assert final.usage.output_tokens == len(said.split())
        (row,) = front.rows
        assert row.usage is not None
        assert row.usage.output_tokens == final.usage.output_tokens


async def test_a_caller_that_leaves_has_its_engine_stopped() -> None:
    async with fronted(speed=1.0) as front, front.sdk() as sdk:
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            stream=True,
            max_tokens=10_000,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: not front.served.server.attempts.count)
        (row,) = front.rows
        assert row.outcome is Outcome.CLIENT_CANCEL


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("told", [True, False])
async def test_who_leaves_pays_for_the_tokens_that_the_engine_tells(
    route: str, *, told: bool
) -> None:
    async with fronted(continuous_usage=told, speed=40.0) as front, front.sdk() as sdk:
        stream: Any
        more = {"ignore_eos": True}
        if route == "chat":
            stream = await sdk.chat.completions.create(
                model=MODEL, messages=HELLO, stream=True, max_tokens=10_000, extra_body=more
            )
        else:
            stream = await sdk.completions.create(
                model=MODEL, prompt="Hello", stream=True, max_tokens=10_000, extra_body=more
            )
        said, frames = "", 0
        async for chunk in stream:
            assert chunk.usage is None, "nobody here asked for it"
            frames += 1
            choice = chunk.choices[0]
            said += (choice.delta.content if route == "chat" else choice.text) or ""
            if len(said.split()) >= 3 * frames:
                break
        await stream.close()
        await until(lambda: bool(front.rows))
        (row,) = front.rows
        assert (row.outcome, row.usage) == (Outcome.CLIENT_CANCEL, None)
        assert row.timing is not None
        if told:
            assert row.timing.tokens >= len(said.split())


@pytest.mark.parametrize("each", [True, False])
async def test_usage_in_each_frame_is_kept_from_whom_did_not_ask_for_it(*, each: bool) -> None:
    async with fronted(continuous_usage=True) as front, front.sdk() as sdk:
        options: Any = {"include_usage": True, "continuous_usage_stats": each}
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=9, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        assert all((chunk.usage is not None) is each for chunk in chunks[:-1])
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 9
        (row,) = front.rows
        assert row.usage is not None
        assert row.timing is not None
        assert row.usage.output_tokens == row.timing.tokens == 9


async def test_errors_are_the_sdks_own_classes_and_retries_obey_us() -> None:
    async with fronted() as front, front.sdk() as sdk:
        with pytest.raises(openai.NotFoundError):
            await sdk.chat.completions.create(model="nope", messages=HELLO)
        with pytest.raises(openai.BadRequestError):
            await sdk.chat.completions.create(model=MODEL, messages=[], max_tokens=1)
        async with AsyncOpenAI(api_key="sk-wrong", base_url=f"{front.base}/v1") as wrong:
            with pytest.raises(openai.AuthenticationError):
                await wrong.chat.completions.create(model=MODEL, messages=HELLO)
        async with front.sdk("slow") as slow:
            await slow.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
            with pytest.raises(openai.RateLimitError) as limited:
                await slow.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
            assert float(limited.value.response.headers["retry-after"]) > 50
        before = front.gateway.app.refusals.total() + len(front.rows)
        async with AsyncOpenAI(
            api_key=KEYS["narrow"], base_url=f"{front.base}/v1", max_retries=2
        ) as patient:
            with pytest.raises(openai.PermissionDeniedError):
                await patient.chat.completions.create(model=MODEL, messages=HELLO)
        after = front.gateway.app.refusals.total() + len(front.rows)
        assert after == before + 1, "x-should-retry: false"


async def test_an_engine_that_is_gone_is_502_and_then_no_replica() -> None:
    async with fronted() as front, front.sdk() as sdk:
        front.served.server.stop()
        statuses: set[int] = set()
        while 503 not in statuses:
            try:
                await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
            except openai.InternalServerError as failed:
                statuses.add(failed.status_code)
        assert statuses <= {502, 503}
        assert not front.gateway.driver.ready_replicas
