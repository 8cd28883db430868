"""Both tokenizers against what they stand for: an engine's own usage, and a file's own count."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.adapters.engines.remote import Patience, RemoteEngine
from headrace.adapters.tokens.engine import EngineTokenizer
from headrace.adapters.tokens.local import LocalTokenizer
from headrace.adapters.upstream.client import Upstream
from headrace.gateway.asked import read
from headrace.gateway.clock import LoopClock
from headrace.model.engine import EngineKind
from headrace.model.ids import PoolName, ReplicaName
from headrace.ports.engine import Route
from headrace.ports.tokens import Count, TokenCounter, UncountedError
from headrace.units import NS_PER_S, REQUEST_TOKENS_MAX, DurationNs, Tokens
from tests.adapters.engine_server.serving import MODEL, serving
from tests.adapters.upstream.scenes import Peer, Scene

pytestmark = [pytest.mark.asyncio]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "grüße " * 20}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def remote(
    base: str, clock: LoopClock, *, kind: EngineKind | None = EngineKind.VLLM, up: bool = True
) -> RemoteEngine:
    wait = DurationNs(NS_PER_S)
    engine = RemoteEngine(
        ReplicaName("r"),
        PoolName("p"),
        Upstream(base, clock),
        clock,
        model=MODEL,
        patience=Patience(first_byte_ns=wait, gap_ns=wait),
        kind=kind,
    )
    engine.is_up = up
    return engine


def tokenizer(*engines: RemoteEngine) -> EngineTokenizer:
    return EngineTokenizer(lambda: engines, LoopClock(asyncio.get_running_loop()))


def payload(counter: TokenCounter, route: Route, **fields: Any) -> bytes | None:
    body = json.dumps({"model": "whatever", **fields}).encode()
    return counter.payload(route, body, read(route, body).prompt)


@pytest.mark.service
@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (Route.CHAT, {"messages": MESSAGES}),
        (Route.CHAT, {"messages": MESSAGES, "tools": TOOLS}),
        (Route.CHAT, {"messages": MESSAGES, "tools": None, "add_generation_prompt": None}),
        (Route.COMPLETIONS, {"prompt": "hello there"}),
        (Route.COMPLETIONS, {"prompt": ["hello there"]}),
    ],
)
async def test_an_engine_counts_what_its_usage_will_tell(
    route: Route, fields: dict[str, Any]
) -> None:
    async with serving() as served:
        engine = remote(served.base, LoopClock(asyncio.get_running_loop()))
        counter = tokenizer(engine)
        asked = payload(counter, route, **fields)
        assert asked is not None
        found = await counter.count(asked)
        given = {name: value for name, value in fields.items() if value is not None}
        answer = await served.post(route, {"model": MODEL, "max_tokens": 1, **given})
        assert found == Count(Tokens(answer.json["usage"]["prompt_tokens"]), "engine")
        engine.close()


def told(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


async def answered(answer: bytes, kind: EngineKind = EngineKind.VLLM) -> tuple[Count, bytes]:
    """Return the count that an engine's answer comes to, and what it was asked."""
    scene = Scene()
    server = await scene.server(lambda peer: peer.say(answer))
    engine = remote(f"http://127.0.0.1:{server.port}", LoopClock(scene.loop), kind=kind)
    counter = tokenizer(engine)
    asked = payload(counter, Route.COMPLETIONS, prompt="hello")
    assert asked is not None
    try:
        return await counter.count(asked), server.peer.requests[-1].partition(b"\r\n\r\n")[2]
    finally:
        scene.pools.append(engine.upstream.pool)
        await scene.assert_nothing_left()


async def test_llama_cpp_tells_tokens_and_no_count() -> None:
    found, asked = await answered(told(200, b'{"tokens":[1,2,3]}'), EngineKind.LLAMACPP)
    assert found.tokens == 3
    assert json.loads(asked) == {
        "model": MODEL, "content": "hello", "add_special": True, "parse_special": True
    }  # fmt: skip


@pytest.mark.parametrize("kind", [*EngineKind, None])
async def test_what_no_engine_there_counts_is_no_question(kind: EngineKind | None) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    engine = remote("http://127.0.0.1:9", clock, kind=kind)
    way = engine.traits.tokenize
    counter = tokenizer(engine)
    text = payload(counter, Route.COMPLETIONS, prompt="hello")
    assert (text is not None) is (way is not None)
    chat = payload(counter, Route.CHAT, messages=MESSAGES)
    assert (chat is not None) is (way is not None and way.chats), "it would apply no template"
    assert payload(tokenizer(), Route.COMPLETIONS, prompt="hello") is None
    engine.close()


async def test_of_several_kinds_each_is_asked_in_its_own_words_for_what_it_counts() -> None:
    scene, asked = Scene(), []

    def behave(name: EngineKind) -> Any:
        def say(peer: Peer) -> None:
            asked.append(name)
            plain = name is EngineKind.LLAMACPP
            peer.say(told(200, b'{"tokens":[1,2,3]}' if plain else b'{"count":3}'))

        return say

    engines = []
    for kind in (EngineKind.VLLM, EngineKind.LLAMACPP):
        server = await scene.server(behave(kind))
        clock = LoopClock(scene.loop)
        engines.append(remote(f"http://127.0.0.1:{server.port}", clock, kind=kind))
    counter = tokenizer(*engines)
    text = payload(counter, Route.COMPLETIONS, prompt="hello")
    chat = payload(counter, Route.CHAT, messages=MESSAGES)
    assert text is not None
    assert chat is not None
    assert {(await counter.count(text)).tokens for _ in range(2)} == {3}
    assert set(asked) == {EngineKind.VLLM, EngineKind.LLAMACPP}
    asked.clear()
    for _ in range(3):
        await counter.count(chat)
    assert asked == [EngineKind.VLLM] * 3
    scene.pools += [engine.upstream.pool for engine in engines]
    await scene.assert_nothing_left()


@pytest.mark.parametrize(
    "answer",
    [
        told(200, b'{"count":0,"tokens":[]}'),
        told(200, b'{"count":"many"}'),
        told(200, b'{"count":-1}'),
        told(200, b'{"count":%d}' % (REQUEST_TOKENS_MAX + 1)),
        told(200, b'{"count":99999999999999999999999}'),
        told(200, b'{"count":%s}' % (b"9" * 5_000)),
        told(200, b'{"tokens":%s}' % (b"[" * 5_000)),
        told(200, b"{}"),
        told(200, b"nonsense"),
        told(200, b'{"count":\xff}'),
        told(404, b'{"count":3}'),
        told(500, b""),
        b"no HTTP\r\n\r\n",
    ],
)
async def test_what_makes_no_sense_is_no_count(answer: bytes) -> None:
    with pytest.raises(UncountedError):
        await answered(answer)


@pytest.mark.looptime
async def test_an_engine_that_hangs_is_given_up_and_its_connection_closed() -> None:
    scene = Scene()
    seen: list[Peer] = []
    server = await scene.server(seen.append)
    engine = remote(f"http://127.0.0.1:{server.port}", LoopClock(scene.loop))
    counter = tokenizer(engine)
    with pytest.raises(UncountedError):
        await counter.count(b'{"prompt":"x"}')
    assert scene.loop.time() < 6
    assert len(seen) == 1
    scene.pools.append(engine.upstream.pool)
    await scene.assert_nothing_left()


async def test_whoever_waits_no_more_has_the_question_withdrawn() -> None:
    scene = Scene()
    server = await scene.server(lambda _: None)
    engine = remote(f"http://127.0.0.1:{server.port}", LoopClock(scene.loop))
    counter = tokenizer(engine)
    asking = asyncio.create_task(counter.count(b'{"prompt":"x"}'))
    await scene.until(lambda: bool(server.requests))
    asking.cancel()
    await scene.until(lambda: not server.open_peers)
    scene.pools.append(engine.upstream.pool)
    await scene.assert_nothing_left()


async def test_only_engines_that_are_up_are_asked_and_each_in_turn() -> None:
    scene, asked = Scene(), []

    def behave(name: str) -> Any:
        def say(peer: Peer) -> None:
            asked.append(name)
            peer.say(told(200, b'{"count":3}'))

        return say

    engines = []
    for name in "abc":
        server = await scene.server(behave(name))
        clock = LoopClock(scene.loop)
        engines.append(remote(f"http://127.0.0.1:{server.port}", clock, up=name != "b"))
    counter = tokenizer(*engines)
    for _ in range(4):
        await counter.count(b'{"prompt":"x"}')
    assert sorted(asked) == ["a", "a", "c", "c"]
    for engine in engines:
        engine.is_up = False
        scene.pools.append(engine.upstream.pool)
    with pytest.raises(UncountedError):
        await counter.count(b'{"prompt":"x"}')
    await scene.assert_nothing_left()


WORDS = {"[UNK]": 0, "hello": 1, "there": 2, "be": 3, "brief": 4, "user": 5}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a tokenizer of a token for each word and mark, which would cut off and pad."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=64)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def local(file: Path) -> Iterator[LocalTokenizer]:
    made = LocalTokenizer(file, ThreadPoolExecutor(1))
    yield made
    made.close()


async def test_a_file_counts_all_of_a_text_without_padding(local: LocalTokenizer) -> None:
    asked = payload(local, Route.COMPLETIONS, prompt="hello there hello there hello")
    assert asked is not None
    assert await local.count(asked) == Count(Tokens(5), "file")


async def test_a_file_does_not_know_the_template_and_says_so(local: LocalTokenizer) -> None:
    asked = payload(local, Route.CHAT, messages=[{"role": "user", "content": "hello"}] * 3)
    assert asked is not None
    found = await local.count(asked)
    assert found.tokens >= 3 * 2
    assert found.margin == 3 * 4


async def test_the_loop_turns_while_a_file_counts(local: LocalTokenizer) -> None:
    asked = payload(local, Route.COMPLETIONS, prompt="hello there " * 20_000)
    assert asked is not None
    counted = asyncio.ensure_future(local.count(asked))
    turns = 0
    while not counted.done():
        await asyncio.sleep(0)
        turns += 1
    assert counted.result().tokens == 40_000
    assert turns > 2


async def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}", encoding="utf-8")
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(ValueError, match="no tokenizer"):
            LocalTokenizer(path, threads)
        with pytest.raises(OSError, match="No such file"):
            LocalTokenizer(tmp_path / "none.json", threads)
