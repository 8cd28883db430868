"""The gateway before real llama.cpp servers: answers, cancels, a death in mid-stream, and a soak.

HEADRACE_SOAK_S: how long the soak lasts, in seconds.
"""

import asyncio
import gc
import os
import random
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import openai
import pytest
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
from headrace.model.slo import Outcome
from tests.gateway.scenes import KEYS, MODEL, assert_books_closed, deployment, keys
from tests.services import llamacpp
from tests.services.llamacpp import LlamaServer

pytestmark = [pytest.mark.asyncio, pytest.mark.service]
SOAK_S = float(os.environ.get("HEADRACE_SOAK_S", "5"))
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the sea."}]
LONG = {"ignore_eos": True}
_PAUSE_S = 0.02
_PATIENCE_S = 60.0
_FREED_S = _UNASKED_S = 1.0
_CALLERS = 4
_GROWN_MAX_KIB = 24 * 1_024
"""A soak's memory may grow by so much after its first third: rows of the last 1,000 requests are kept."""


class Fronted:
    """A gateway that serves, and what became of its requests."""

    def __init__(self, gateway: Gateway, base: str, rows: list[Concluded]) -> None:
        self.gateway, self.base, self.rows = gateway, base, rows

    def sdk(self) -> AsyncOpenAI:
        return AsyncOpenAI(api_key=KEYS["free"], base_url=f"{self.base}/v1", max_retries=0)


@asynccontextmanager
async def fronted(
    *servers: LlamaServer, counts: TokenCountsSpec | None = None
) -> AsyncIterator[Fronted]:
    """Serve before engines of which only the address is told, until all are found well."""
    rows: list[Concluded] = []
    settings = Settings(
        deployment=deployment(replicas=0, ttft_ms=600_000),
        keys=keys(),
        server=ServerSpec(port=0, drain_s=0),
        upstreams=tuple(
            UpstreamSpec(url=server.base, pool="p", model=llamacpp.MODEL) for server in servers
        ),
        token_counts=counts,
    )
    gateway = Gateway(settings, LoopClock(asyncio.get_running_loop()), rows.append)
    sock = listen("127.0.0.1", 0)
    host, port = sock.getsockname()
    running = asyncio.create_task(gateway.serve(sock))
    try:
        await until(lambda: gateway.driver.ready_replicas == len(servers))
        yield Fronted(gateway, f"http://{host}:{port}", rows)
    finally:
        gateway.stop()
        assert await running
        assert_books_closed(gateway.driver.plane)


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaServer]:
    """Yield a server that all tests share which leave it alive."""
    with llamacpp.serving() as started:
        yield started


async def until(holds: Callable[[], bool], within_s: float = _PATIENCE_S) -> float:
    """Return how many seconds passed until something held."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - what is waited for is in another process
            await asyncio.sleep(_PAUSE_S)
    return loop.time() - began


def busy(server: LlamaServer) -> int:
    """Return how many of a server's slots are at work."""
    return sum(slot["is_processing"] for slot in msgspec.json.decode(server.get("/slots")))


async def test_chats_are_answered_whole_and_in_events(server: LlamaServer) -> None:
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
        told = await sdk.completions.create(model=MODEL, prompt="One,", max_tokens=3, stream=True)
        assert [chunk.usage async for chunk in told][-1] is None, "though it comes with a choice"
        used = [row.usage and row.usage.output_tokens for row in front.rows]
        assert used == [6, 9, 3]
        assert all(row.outcome is Outcome.SUCCESS for row in front.rows)


async def test_it_counts_what_its_usage_will_tell(server: LlamaServer) -> None:
    counts = TokenCountsSpec(models=(EngineTokenizerSpec(model=MODEL),), wait_ms=10_000)
    async with fronted(server, counts=counts) as front, front.sdk() as sdk:
        for prompt in ("On", "grüße <|im_start|> " * 20, "一二三"):
            await sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        *texts, _ = front.rows
        for row in texts:
            assert row.usage is not None
            assert row.entry.input_tokens == row.usage.input_tokens
        assert front.gateway.app.token_counts == {(MODEL, "counted"): 3, (MODEL, "unfit"): 1}


async def test_its_load_is_reported(server: LlamaServer) -> None:
    async with fronted(server) as front, front.sdk() as sdk:
        plane = front.gateway.driver.plane
        stream = await sdk.completions.create(
            model=MODEL, prompt="On", max_tokens=2_000, stream=True, extra_body=LONG
        )
        await anext(aiter(stream))

        def running() -> bool:
            (replica,) = (r for m in plane.state.models.values() for r in m.fleet.replicas.values())
            return replica.snapshot is not None and replica.snapshot.running == 1

        await until(running)
        await stream.close()
        assert [
            engine.missing for engine in front.gateway.driver.engines if engine.pool == "p"
        ] == [()]


async def test_a_caller_that_leaves_frees_its_slot_within_a_second(server: LlamaServer) -> None:
    took = []
    async with fronted(server) as front, front.sdk() as sdk:
        for _ in range(3):  # the quickest counts: a busy machine is not the gateway's doing
            stream = await sdk.completions.create(
                model=MODEL, prompt="On and on", max_tokens=2_000, stream=True, extra_body=LONG
            )
            await anext(aiter(stream))
            assert busy(server) == 1
            await stream.close()
            took.append(await until(lambda: not busy(server)))
        assert min(took) <= _FREED_S, took
        await until(lambda: len(front.rows) == 3)
        assert {row.outcome for row in front.rows} == {Outcome.CLIENT_CANCEL}


async def test_a_server_that_dies_in_mid_stream_ends_it_with_an_error_and_is_not_asked_again() -> (
    None
):
    with llamacpp.serving() as one, llamacpp.serving() as other:
        async with fronted(one, other) as front, front.sdk() as sdk:
            stream = await sdk.completions.create(
                model=MODEL, prompt="On and on", max_tokens=2_000, stream=True, extra_body=LONG
            )
            events = aiter(stream)
            await anext(events)
            dead, alive = (one, other) if busy(one) else (other, one)
            dead.kill()
            with pytest.raises(openai.APIError) as failed:
                async for _ in events:
                    pass
            assert failed.value.code == "upstream_error"
            driver = front.gateway.driver
            assert await until(lambda: driver.ready_replicas == 1) <= _UNASKED_S
            for _ in range(4):
                await sdk.completions.create(model=MODEL, prompt="One", max_tokens=1)
            assert busy(alive) == 0
            outcomes = [row.outcome for row in front.rows]
            assert outcomes == [Outcome.ERROR, *[Outcome.SUCCESS] * 4]


async def one_of_many(sdk: AsyncOpenAI, rng: random.Random, seen: Counter[str]) -> None:
    """Ask for something, read it or leave it, as callers do."""
    what = rng.choice(("whole", "stream", "left", "wrong"))
    seen[what] += 1
    most, prompt = rng.randint(1, 24), "word " * rng.randint(1, 120)
    if what == "wrong":
        with pytest.raises(openai.BadRequestError):
            await sdk.completions.create(model=MODEL, prompt="word " * 9_000, max_tokens=1)
    elif what == "whole":
        await sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=most)
    else:
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=most, stream=True, extra_body=LONG
        )
        async for _ in stream:
            if what == "left" and rng.random() < 0.3:
                break
        await stream.close()


def open_files() -> int:
    """Return how many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def memory_kib() -> int:
    """Return the memory that this process has, as far as it is resident."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() // 1_024


async def test_a_soak_of_mixed_calls_leaks_nothing(server: LlamaServer) -> None:
    loop, seen = asyncio.get_running_loop(), Counter[str]()
    async with fronted(server) as front:
        files, began = open_files(), loop.time()

        async def caller(seed: int, until_s: float) -> None:
            rng = random.Random(seed)
            async with front.sdk() as sdk:
                while loop.time() < began + until_s:
                    await one_of_many(sdk, rng, seen)

        async def everybody(until_s: float) -> int:
            await asyncio.gather(*(caller(seed, until_s) for seed in range(_CALLERS)))
            gc.collect()
            return memory_kib()

        early = await everybody(SOAK_S / 3)
        late = await everybody(SOAK_S)
        await until(lambda: not front.gateway.driver.live and not busy(server))
        assert_books_closed(front.gateway.driver.plane)
        assert late - early <= _GROWN_MAX_KIB, f"{early} KiB, then {late} KiB"
        await until(lambda: open_files() <= files + 1)  # one connection looks after its health
        assert len(front.rows) >= seen.total() > 0
        outcomes = {row.outcome for row in front.rows}
        assert outcomes <= {Outcome.SUCCESS, Outcome.CLIENT_CANCEL, Outcome.ERROR, None}
