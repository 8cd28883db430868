"""What an engine is able to do, found by asking it: one check for each feature of the table.

Each returns whether the engine has the feature, and fails only where it has it and does it wrongly. So
what is declared to be lacking is looked for as well.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx2

from headrace.adapters.engines.exposition import Load
from headrace.adapters.engines.kinds import KINDS, Feature
from tests.conformance.engines.engine import PATIENCE_S, Client

Check = Callable[[Client], Awaitable[bool]]
OK, REFUSED = 200, (400, 404, 413, 422)
_PAUSE_S = 0.05
_SAID = [{"role": "user", "content": "hello"}]
_GENERATING: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": _SAID, "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
    "/v1/messages": {"messages": _SAID, "max_tokens": 1},
}
_IDLE_S = 4.0
"""As long as the gateway's pool keeps an unused connection."""

UNCHECKED: dict[Feature, str] = {
    Feature.KV_EVENTS: "they are published elsewhere than at the engine's own address",
}
"""Features that no request shows, with the reason."""


async def until_load(client: Client, holds: Callable[[Load], bool]) -> Load:
    """Return the load once it is as wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds(load := await client.load()):  # noqa: ASYNC110 - an engine tells nobody
            await asyncio.sleep(_PAUSE_S)
    return load


async def fill(client: Client, stack: AsyncExitStack) -> list[AsyncExitStack]:
    """Have every slot busy with an answer that goes on; return what ends each of them."""
    ends = []
    for _ in range(client.engine.slots):
        one = await stack.enter_async_context(AsyncExitStack())
        events = await one.enter_async_context(client.endless())
        await events.first()
        ends.append(one)
    return ends


async def load(client: Client) -> bool:
    if not (await client.page()).strip():
        return False
    async with AsyncExitStack() as stack:
        ends = await fill(client, stack)
        told = await until_load(client, lambda load: load.running == client.engine.slots)
        assert told.waiting == 0
        more = asyncio.create_task(client.complete(max_tokens=1))
        await until_load(client, lambda load: load.waiting == 1)
        for end in ends:
            await end.aclose()
        assert (await more).status_code == OK
    told = await until_load(client, lambda load: load.running == load.waiting == 0)
    assert not told.missing
    return True


async def kv_use(client: Client) -> bool:
    async with client.endless(prompt="word " * 200) as events:
        await events.first()
        told = await client.load()
        if told.kv_blocks_total is None:
            return bool(b"kv_cache_usage" in await client.page())
        told = await until_load(client, lambda load: bool(load.kv_blocks_used))
        assert told.kv_blocks_used is not None
        assert told.kv_blocks_total is not None
        assert told.kv_blocks_used <= told.kv_blocks_total
    await until_load(client, lambda load: not load.running)
    return True


async def cached_tokens(client: Client) -> bool:
    prompt = "The same beginning of a text. " * 60
    cached = []
    for _ in range(2):
        usage = (await client.complete(prompt=prompt, max_tokens=1)).json()["usage"]
        details = usage.get("prompt_tokens_details") or {}
        cached.append(details.get("cached_tokens") or 0)
        assert cached[-1] < usage["prompt_tokens"]
    return cached[1] > cached[0]


async def usage_apart(client: Client) -> bool:
    async with client.stream(stream_options={"include_usage": True}, max_tokens=2) as events:
        *before, last = await events.rest()
    assert last["usage"]["completion_tokens"]
    assert not any(event.get("usage") for event in before)
    return not last["choices"]


async def continuous_usage(client: Client) -> bool:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client.stream(stream_options=options, max_tokens=8, ignore_eos=True) as events:
        told = await events.rest()
    counts = [event["usage"]["completion_tokens"] for event in told if event.get("usage")]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    # However many tokens an engine that was held up puts into one chunk.
    texts = [event for event in told if event["choices"] and event["choices"][0]["text"]]
    return all(event.get("usage") for event in texts)


async def abort_by_id(client: Client) -> bool:
    abort = client.engine.traits.abort
    kinds = {one.abort.path: one.abort for one in KINDS.values() if one.abort is not None}
    for nth, way in enumerate([abort] if abort else kinds.values()):
        tag = f"conformance-{nth}"
        name = f"cmpl-{tag}-0"
        async with client.endless(tag=tag) as events:
            await events.first()
            reply = await client.post(way.path, {way.field: [name] if way.listed else name})
            if reply.status_code != OK:
                continue
            last = (await events.rest())[-1]
            assert last["choices"][0]["finish_reason"] == "abort"
            return True
    return False


async def priority(client: Client) -> bool:
    """The one that came second, with the better priority, is begun first."""
    first, second = (5, -5)
    how = client.engine.traits.priority
    if how is not None and not how.lower_first:
        first, second = second, first
    order: list[int] = []

    async def ask(number: int) -> int:
        async with client.stream(priority=number, max_tokens=4, ignore_eos=True) as events:
            if events.response.status_code != OK:
                return events.response.status_code
            await events.first()
            order.append(number)
            await events.rest()
        return OK

    async with AsyncExitStack() as stack:
        ends = await fill(client, stack)
        asked = []
        for waiting, number in enumerate((first, second), start=1):
            asked.append(asyncio.create_task(ask(number)))
            await until_load(client, lambda load, wanted=waiting: load.waiting == wanted)  # type: ignore[misc]
        await ends[0].aclose()
        statuses = await asyncio.gather(*asked)
    return statuses == [OK, OK] and order == [second, first]


async def metadata(client: Client) -> bool:
    """It reads the field on every route that generates: what the field cannot hold is refused."""
    found = set()
    for path, fields in _GENERATING.items():
        asked = {"model": client.engine.model, **fields}
        good = await client.post(path, asked | {"vllm_xargs": {"headrace_left_ms": 1, "who": "me"}})
        if good.status_code in REFUSED:  # it has no such route
            continue
        assert good.status_code == OK, path
        bad = await client.post(path, asked | {"vllm_xargs": {"headrace_way": {"no": "object"}}})
        found.add(bad.status_code in REFUSED)
    assert len(found) == 1, "on some routes"
    return found.pop()


async def choices(client: Client) -> bool:
    reply = await client.complete(n=2, max_tokens=4, ignore_eos=True)
    return reply.status_code == OK and len(reply.json()["choices"]) == 2


async def choices_usage(client: Client) -> bool:
    reply = await client.complete(n=2, max_tokens=4, ignore_eos=True)
    return reply.status_code == OK and reply.json()["usage"]["completion_tokens"] == 8


async def model_check(client: Client) -> bool:
    return is_refused(await client.complete(model="no-such-model", max_tokens=1))


async def context_check(client: Client) -> bool:
    return is_refused(await client.complete(prompt="word " * 4 * client.engine.context))


async def output_check(client: Client) -> bool:
    async with client.stream(max_tokens=4 * client.engine.context) as events:
        if events.response.status_code in REFUSED:
            return True
        await events.first()
        return False


async def queue_bound(client: Client) -> bool:
    """Full: 503, to a stream as its status, or as an event after the head was sent."""
    bound = client.engine.queue_bound
    async with AsyncExitStack() as stack:
        await fill(client, stack)
        more = (bound or 4 * client.engine.slots) - client.engine.slots
        asked = [asyncio.create_task(client.complete(max_tokens=1)) for _ in range(more)]
        await until_load(client, lambda load: load.waiting == more)
        if bound is not None:
            whole = await client.complete(max_tokens=1)
            assert whole.status_code == 503
            async with client.stream(max_tokens=1) as events:
                if events.response.status_code == OK:
                    told = await events.next()
                    assert told is not None
                    assert told["error"]["code"] == 503
                else:
                    assert events.response.status_code == 503
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    await until_load(client, lambda load: load.running == load.waiting == 0)
    return bound is not None


async def exact_length(client: Client) -> bool:
    reply = await client.complete(prompt="Say: hi.", max_tokens=40, ignore_eos=True)
    usage, choice = reply.json()["usage"], reply.json()["choices"][0]
    return (usage["completion_tokens"], choice["finish_reason"]) == (40, "length")


async def tokenize(client: Client) -> bool:
    told = client.engine.traits.tokenize
    ways = [told] if told else [one.tokenize for one in KINDS.values() if one.tokenize is not None]
    for way in ways:
        counts = []
        for text in ("one", "one two three four five six"):
            reply = await client.post(way.path, {"model": client.engine.model, way.text: text})
            if reply.status_code != OK:
                break
            found = reply.json()
            counts.append(found[way.count] if way.count else len(found["tokens"]))
        else:
            assert 0 < counts[0] < counts[1]
            return True
    return False


async def keep_alive(client: Client) -> bool:
    url = httpx2.URL(client.engine.base)
    head = f"GET {{}} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\n\r\n"
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        for nth in range(2):
            writer.write(head.format("/v1/models").encode())
            await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            length = next(
                int(line.split(b":")[1])
                for line in answer.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            )
            await reader.readexactly(length)
            if not nth:
                await asyncio.sleep(_IDLE_S)
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    finally:
        writer.close()
    return True


CHECKS: dict[Feature, Check] = {
    Feature.LOAD: load,
    Feature.KV_USE: kv_use,
    Feature.CACHED_TOKENS: cached_tokens,
    Feature.USAGE_APART: usage_apart,
    Feature.CONTINUOUS_USAGE: continuous_usage,
    Feature.ABORT_BY_ID: abort_by_id,
    Feature.PRIORITY: priority,
    Feature.METADATA: metadata,
    Feature.CHOICES: choices,
    Feature.CHOICES_USAGE: choices_usage,
    Feature.MODEL_CHECK: model_check,
    Feature.CONTEXT_CHECK: context_check,
    Feature.OUTPUT_CHECK: output_check,
    Feature.QUEUE_BOUND: queue_bound,
    Feature.EXACT_LENGTH: exact_length,
    Feature.TOKENIZE: tokenize,
    Feature.KEEP_ALIVE: keep_alive,
}


def is_refused(reply: httpx2.Response) -> bool:
    """Return whether the request is blamed, with an error that can be read."""
    if reply.status_code not in REFUSED:
        assert reply.status_code == OK
        return False
    assert told_error(reply)
    return True


def told_error(reply: httpx2.Response) -> Any:
    """Return the message of an error."""
    return json.loads(reply.content)["error"]["message"]
