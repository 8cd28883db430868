"""What a real vLLM publishes of its KV cache: what is looked up there is what its usage tells.

Prompts go to vLLM itself or through a gateway that listens to it. Nothing is measured in seconds.
"""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
from openai import AsyncOpenAI

from headrace.adapters.engines.kv.follower import Follower, Reset
from headrace.adapters.engines.kv.index import BlockIndex
from headrace.adapters.engines.kv.publishing import PublishingEngine
from headrace.adapters.engines.kv.subscriber import Source, Subscriber
from headrace.config.schema import KvEventsSpec, ServerSpec, Settings, UpstreamSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from headrace.model.engine import EngineKind
from headrace.model.ids import ModelName
from tests.e2e.test_vllm import deployment, until
from tests.gateway.scenes import KEYS, MODEL, keys
from tests.services import vllm
from tests.services.vllm import VllmServer, free_port

pytestmark = [pytest.mark.asyncio, pytest.mark.service, pytest.mark.vllm]
SIZE, BLOCKS = 32, 64
PORTS = free_port(), free_port()
TOPIC = "kv"


def flags(events: int, replay: int) -> tuple[str, ...]:
    """Return how vLLM is started that publishes at these ports."""
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": TOPIC,
    }
    return (
        *("--max-model-len", "1024", "--max-num-seqs", "2", "--max-num-batched-tokens", "1024"),
        *("--block-size", str(SIZE), "--num-gpu-blocks-override", str(BLOCKS)),
        *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(published)),
    )


def source(events: int, replay: int) -> Source:
    """Return where it is heard."""
    return Source(
        endpoint=f"tcp://127.0.0.1:{events}",
        replay_endpoint=f"tcp://127.0.0.1:{replay}",
        topic=TOPIC,
    )


_MARKS = count()
SEA = "Of the sea it is told that it was there before the land, and will be when the land is gone. "


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # opens /reset_prefix_cache
        with vllm.serving(vllm.needed(), flags(*PORTS)) as made:
            yield made


class Heard:
    """A vLLM, the gateway that listens to it, and a caller of vLLM itself."""

    def __init__(self, server: VllmServer, gateway: Gateway, base: str) -> None:
        self.server, self.gateway, self.base = server, gateway, base
        (engine,) = gateway.driver.engines
        assert isinstance(engine, PublishingEngine)
        self.engine = engine
        self.direct = AsyncOpenAI(api_key="-", base_url=f"{server.base}/v1", max_retries=0)

    async def post(self, path: str, body: Any = None) -> Any:
        def ask() -> Any:
            request = urllib.request.Request(
                self.server.base + path,
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.loads(reply.read() or b"null")

        return await asyncio.to_thread(ask)

    async def tokens(self, prompt: str) -> list[int]:
        """Return a prompt's tokens, as vLLM makes them."""
        told = await self.post("/tokenize", {"model": vllm.MODEL, "prompt": prompt})
        found: list[int] = told["tokens"]
        return found

    async def complete(self, prompt: str, salt: str | None = None) -> int:
        """Have a prompt served; return how much of it vLLM had cached, once its blocks are known."""
        answer = await self.direct.completions.create(
            model=vllm.MODEL,
            prompt=prompt,
            max_tokens=1,
            extra_body={} if salt is None else {"cache_salt": salt},
        )
        ids = await self.tokens(prompt)
        await until(lambda: self.looked_up([*ids, 0], salt) == len(ids) // SIZE * SIZE)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
        details = answer.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    def looked_up(self, ids: list[int], salt: str | None = None) -> int:
        return self.engine.cached_tokens(ids, salt=salt)

    async def agrees(self, prompt: str, salt: str | None = None) -> int:
        """Return how much of a prompt is cached, of which usage and index must tell the same."""
        expected = self.looked_up(await self.tokens(prompt), salt)
        assert await self.complete(prompt, salt) == expected
        return expected

    async def empty(self) -> None:
        """Have vLLM empty its cache, and wait until that is known: it says so with its next step.

        A short prompt that no other begins with makes that step, and is cached alone.
        """
        await self.post("/reset_prefix_cache")
        prompt = f"{next(_MARKS)} marks a new beginning. {SEA}"
        await self.complete(prompt)
        blocks = len(await self.tokens(prompt)) // SIZE
        await until(lambda: self.engine.blocks == blocks)


@asynccontextmanager
async def heard(server: VllmServer) -> AsyncIterator[Heard]:
    """Have a gateway listen to a vLLM whose cache is empty, as both know."""
    settings = Settings(
        deployment=deployment(),
        keys=keys(),
        server=ServerSpec(port=0, drain_s=0),
        upstreams=(
            UpstreamSpec(
                url=server.base,
                pool="p",
                model=vllm.MODEL,
                kind=EngineKind.VLLM,
                kv_events=KvEventsSpec(
                    endpoint=f"tcp://127.0.0.1:{PORTS[0]}",
                    replay_endpoint=f"tcp://127.0.0.1:{PORTS[1]}",
                    topic=TOPIC,
                ),
            ),
        ),
    )
    gateway = Gateway(settings, LoopClock(asyncio.get_running_loop()))
    sock = listen("127.0.0.1", 0)
    running = asyncio.create_task(gateway.serve(sock))
    try:
        await until(lambda: bool(gateway.driver.ready_replicas))
        host, port = sock.getsockname()
        made = Heard(server, gateway, f"http://{host}:{port}")
        async with made.direct:
            await made.empty()
            yield made
    finally:
        gateway.stop()
        assert await running


async def test_what_is_looked_up_is_what_usage_tells(server: VllmServer) -> None:
    async with heard(server) as one:
        stored, blocks = one.engine.heard.stored, one.engine.blocks
        assert await one.agrees(SEA * 5) == 0
        whole = await one.agrees(SEA * 5)
        assert whole > 0, "all but what is behind the last full block"
        assert 0 < await one.agrees(SEA * 2 + "Then something else. " * 10) < whole
        assert await one.agrees(SEA * 7) >= whole
        assert await one.agrees("No word of that. " * 20) == 0
        assert not one.engine.unread["malformed"]
        assert not one.engine.unread["elsewhere"]
        assert one.engine.blocks - blocks == one.engine.heard.stored - stored, "none told twice"


async def test_a_salt_is_a_cache_of_its_own(server: VllmServer) -> None:
    async with heard(server) as one:
        assert await one.agrees(SEA * 5) == 0
        assert await one.agrees(SEA * 5, "one") == 0
        assert await one.agrees(SEA * 5, "one") > 0
        assert await one.agrees(SEA * 5, "two") == 0


async def test_an_emptied_cache_is_believed_empty_by_the_plane_too(server: VllmServer) -> None:
    async with (
        heard(server) as one,
        AsyncOpenAI(api_key=KEYS["free"], base_url=f"{one.base}/v1", max_retries=0) as sdk,
    ):
        known = one.gateway.driver.plane.state.models[ModelName(MODEL)]
        replica = known.fleet.replicas[one.engine.name]
        prompt = SEA * 30
        await sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        ids = await one.tokens(prompt)
        await until(lambda: one.looked_up(ids) > 0)
        assert replica.prefixes
        cleared = one.engine.heard.resets.get(Reset.CLEARED, 0)
        await one.empty()
        assert one.engine.heard.resets[Reset.CLEARED] == cleared + 1
        assert not replica.prefixes
        assert await one.agrees(prompt) == 0


async def test_what_is_evicted_is_known_to_be_gone(server: VllmServer) -> None:
    async with heard(server) as one:
        before = one.engine.blocks - one.engine.heard.stored + one.engine.heard.removed
        prompts = [f"{nth} {SEA * 12}" for nth in range(16)]
        for prompt in prompts:
            await one.agrees(prompt)
        assert one.engine.heard.removed > 0
        assert one.engine.blocks <= BLOCKS
        assert one.engine.blocks == before + one.engine.heard.stored - one.engine.heard.removed
        found = [await one.agrees(prompt) for prompt in (prompts[-1], prompts[0])]
        assert found[0] > 0
        assert found[1] == 0


async def test_who_comes_later_is_told_what_was_before(server: VllmServer) -> None:
    async with heard(server) as one:
        await one.agrees(SEA * 5)
        ids = await one.tokens(SEA * 5)
        expected = one.looked_up(ids)
        later, index = Subscriber(source(*PORTS)), BlockIndex(b"k")
        later.start(Follower(index, lambda _: None, later.ask))
        try:
            for nth in count():  # until it is connected, and hears that there is something
                await one.complete(f"{nth} is a number. {SEA}")
                if index.block_tokens is not None:
                    break
            await until(lambda: index.cached_tokens(ids) == expected)
        finally:
            later.close()


async def test_another_life_at_the_same_place_is_known_for_one() -> None:
    home, ports = vllm.needed(), (free_port(), free_port())
    resets: list[Reset] = []
    listening, index = Subscriber(source(*ports)), BlockIndex(b"k")
    listening.start(Follower(index, resets.append, listening.ask))
    try:
        for life in range(2):
            server = await asyncio.to_thread(vllm.start, home, flags(*ports))
            try:
                blocks = await _served(server, partial(_known, index, resets, life))
                assert blocks > 0
            finally:
                await asyncio.to_thread(server.stop)
        assert resets in ([Reset.RESTARTED], [Reset.LOST])
        assert len(index) <= blocks, "of the first life nothing is left"
    finally:
        listening.close()


async def _served(server: VllmServer, is_known: Callable[[int], bool]) -> int:
    """Have prompts served until all but the last are known to be cached; return their blocks.

    What is published before we are connected again is not heard, nor known of before there is more.
    """
    blocks = 0
    async with AsyncOpenAI(api_key="-", base_url=f"{server.base}/v1") as sdk:
        for nth in range(10):
            before = blocks
            said = await sdk.completions.create(
                model=vllm.MODEL, prompt=f"{nth} {SEA * 2}", max_tokens=1
            )
            assert said.usage is not None
            blocks += said.usage.prompt_tokens // SIZE
            if before and is_known(before):
                break
            await asyncio.sleep(1)  # a connection is tried again within that
    return blocks


def _known(index: BlockIndex, resets: list[Reset], life: int, blocks: int) -> bool:
    return len(index) >= blocks and len(resets) == life
