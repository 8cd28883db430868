"""A real vLLM with our scheduler, asked as a gateway asks it, and what its step log says of that.

What is asked together waits together: as many endless requests as there are slots hold these until all
others are there, and are then aborted at once. So nobody's clock decides who is first.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from openai import AsyncOpenAI

from headrace.model.ids import ClassName, TenantId
from headrace.model.paths import Level, Link, path
from headrace.model.steplog import Arrived, Line, Note, Step
from headrace.model.told import Told
from headrace.units import DurationNs, ms
from tests.services import vllm
from tests.services.vllm import VllmServer
from tests.services.vllm_scene import OURS

SLOTS, BUDGET = 8, 2_048
CONTEXT, BLOCKS = 4_096, 256
"""Tokens of a request at most, and KV blocks: 8,192 tokens, so that a few long requests fill them."""
HOLDER = "holder"
"""Tenant of those that hold the slots."""
_PATIENCE_S = 120.0
_PAUSE_S = 0.05
_LINES = msgspec.json.Decoder(Line)
_IDS = iter(range(1_000_000_000))


class Sent(Struct, frozen=True, kw_only=True):
    """One request, and what is told of it. Its prompt begins as no other's."""

    tenant: str
    prompt: int = 32
    output: int = 8
    left_ms: int = 600_000
    gap_ms: int = 80
    relegated: bool = False
    weight: int = 1
    counter: int = 0
    slo_class: str = "chat"
    priority: int = 0

    @property
    def told(self) -> Told:
        """What a gateway would tell."""
        return Told(
            tenant=TenantId(self.tenant),
            slo_class=ClassName(self.slo_class),
            way=path(Link(Level.TENANT, self.tenant, self.weight)),
            counters=(self.counter,),
            left_ns=DurationNs(ms(self.left_ms)),
            gap_ns=DurationNs(ms(self.gap_ms)),
            relegated=self.relegated,
        )


HOLDS = Sent(tenant=HOLDER, prompt=1, output=CONTEXT - 1)


class Whole(Struct, frozen=True, kw_only=True):
    """An answer's usage."""

    name: str
    """Of the request, within the engine's own."""
    sent: Sent
    prompt_tokens: int
    output_tokens: int


class Played(Struct, frozen=True, kw_only=True):
    """What came of requests that were sent together."""

    ended: list[Whole]
    """In the order in which their callers had the whole answer."""
    steps: list[Step]
    """From before the first came until the last was gone."""

    @property
    def arrived(self) -> dict[int, Arrived]:
        """Requests by their number in the log, without those that held the slots."""
        every = (one for step in self.steps for one in step.arrived)
        return {one.n: one for one in every if one.tenant != HOLDER}

    @property
    def sent(self) -> list[Sent]:
        """What was sent, in the order in which it arrived."""
        by_name = {one.name: one.sent for one in self.ended}
        return [by_name[one.request.split("-")[1]] for one in self.arrived.values()]

    @property
    def started(self) -> list[Arrived]:
        """They in the order in which they were first scheduled."""
        arrived = self.arrived
        return [arrived[n] for step in self.steps for n in step.started if n in arrived]


class Engine:
    """One that runs, and its step log as far as it is read."""

    def __init__(self, server: VllmServer, log: Path) -> None:
        """Begin with nothing read."""
        self.server, self._log = server, log
        self._read = 0
        self._steps: list[Step] = []
        self.notes: list[Note] = []

    def steps(self) -> list[Step]:
        """Return all steps that its log has by now."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in map(_LINES.decode, whole.splitlines()):
            if isinstance(line, Step):
                self._steps.append(line)
            elif isinstance(line, Note):
                self.notes.append(line)
        return self._steps

    @asynccontextmanager
    async def caller(self) -> AsyncIterator[AsyncOpenAI]:
        """Yield one that asks once and waits long."""
        async with AsyncOpenAI(
            api_key="none", base_url=f"{self.server.base}/v1", max_retries=0, timeout=_PATIENCE_S
        ) as sdk:
            yield sdk

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something is so in its log."""
        async with asyncio.timeout(_PATIENCE_S):
            while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - in another process
                await asyncio.sleep(_PAUSE_S)

    async def together(self, asked: Sequence[Sent]) -> Played:
        """Return what came of requests that all waited before the first of them was started."""
        mark = len(self.steps())
        ended: list[Whole] = []
        async with self.caller() as sdk:
            async with holding(self, sdk, mark):
                calls = [asyncio.create_task(_kept(sdk, one, ended)) for one in asked]
                await self.until(lambda: _came(self.steps()[mark:]) == SLOTS + len(asked))
            await asyncio.gather(*calls)
        return Played(ended=ended, steps=await self.settled(mark))

    async def settled(self, mark: int) -> list[Step]:
        """Return the steps after the first so many, once all who came in them are gone."""
        await self.until(lambda: _left(self.steps()[mark:]) == 0)
        return self.steps()[mark:]


def _came(steps: Sequence[Step]) -> int:
    return sum(len(step.arrived) for step in steps)


def _left(steps: Sequence[Step]) -> int:
    return _came(steps) - sum(len(step.ended) for step in steps)


@asynccontextmanager
async def holding(
    engine: Engine, sdk: AsyncOpenAI, mark: int, sent: Sent = HOLDS, count: int = SLOTS
) -> AsyncIterator[None]:
    """Let requests run on and on, alone at first; at the end all of them are over at once."""
    names = [f"{next(_IDS)}" for _ in range(count)]
    calls = [asyncio.create_task(ask(sdk, sent, name)) for name in names]
    await engine.until(lambda: any(step.running == count for step in engine.steps()[mark:]))
    yield
    ids = {"request_ids": [f"cmpl-{name}-0" for name in names]}
    await asyncio.to_thread(engine.server.post, "/inference/v1/abort_requests", ids)
    await asyncio.gather(*calls, return_exceptions=True)


async def ask(sdk: AsyncOpenAI, sent: Sent, name: str | None = None) -> Whole:
    """Return what a request's answer counted, once it is whole."""
    name = name or f"{next(_IDS)}"
    draw = random.Random(name)
    answer = await sdk.completions.create(
        model=vllm.MODEL,
        prompt=[draw.randrange(3, 4_096) for _ in range(sent.prompt)],
        max_tokens=sent.output,
        extra_body={
            "ignore_eos": True,
            "priority": sent.priority,
            "request_id": name,
            "vllm_xargs": sent.told.scalars(),
        },
    )
    assert answer.usage is not None
    usage = answer.usage
    return Whole(
        name=name,
        sent=sent,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
    )


async def _kept(sdk: AsyncOpenAI, sent: Sent, ended: list[Whole]) -> None:
    ended.append(await ask(sdk, sent))


@contextmanager
def serving(
    home: Path, log: Path, settings: dict[str, Any], *flags: str, scheduler: str = OURS
) -> Iterator[Engine]:
    """Run one with settings of ours and a step log."""
    ours = {"headrace": {"step_log": str(log)} | settings}
    every = (
        *("--max-model-len", str(CONTEXT)),
        *("--max-num-seqs", str(SLOTS)),
        *("--max-num-batched-tokens", str(BUDGET)),
        *("--block-size", str(vllm.BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
        *("--scheduling-policy", "priority"),
        "--enable-scale-out",  # opens /inference/v1/abort_requests
        *("--scheduler-cls", scheduler),
        *("--additional-config", json.dumps(ours)),
        *flags,
    )
    with vllm.serving(home, every) as server:
        yield Engine(server, log)
