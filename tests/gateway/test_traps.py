"""Traps that others fell into, over the whole gateway; each named after the sentence that avoids it."""

import asyncio
from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway import asked, prefix
from headrace.gateway.asked import Asked, chat, size
from headrace.gateway.reading import waiting
from headrace.model.decision import Reject
from headrace.model.deployment import PoolSpec, TenantSpec
from headrace.model.evidence import EntryRecord
from headrace.model.ids import ClassName, ModelName
from headrace.model.slo import Outcome
from headrace.policy.catalog import PlaneConfig
from headrace.ports.engine import Route
from headrace.units import NS_PER_MS, NS_PER_S, ceil_div
from tests.adapters.upstream.scenes import EVENTS, LAST, PING, Scene, chunk
from tests.gateway.exits import Mode, SlowCaller, turns
from tests.gateway.scenes import (
    KEYS,
    MODEL,
    PROFILE,
    Caller,
    Gateway,
    ObedientEngine,
    deployment,
    reach,
)
from tests.gateway.test_engine_exits import GAP_S, WORDS, World

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

LONG = [{"role": "user", "content": "x" * 66_000}]


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await made.assert_nothing_left()


def obedient(config: PlaneConfig | None = None) -> tuple[Gateway, ObedientEngine]:
    gateway = Gateway(lambda clock: [ObedientEngine(clock)], config=config)
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    return gateway, engine


# Admission and limits ------------------------------------------------------------------------


async def test_the_estimate_is_reserved_atomically_at_admission_and_trued_up_later() -> None:
    """Five simultaneous calls cannot spend a limit five times over (trap 3)."""
    tenants = (TenantSpec(name="free", tpm_limit=250),)
    gateway, engine = obedient(deployment(tenants=tenants))
    callers = [gateway.ask(max_tokens=100) for _ in range(5)]
    await reach(gateway.clock, 1)
    refused = [one for one in callers if one.task.done()]
    assert len(refused) == 3
    assert {(one.status, one.error["headrace"]["reason"]) for one in refused} == {
        (429, "token_rate")
    }
    for call in list(engine.calls):
        engine.say("one", call.dispatch.attempt)
        engine.end(call.dispatch.attempt)
    await asyncio.wait({one.task for one in callers})
    again = gateway.ask(max_tokens=100)
    await reach(gateway.clock, 2)
    assert again.status is None, "what was not used came back"
    engine.say("one")
    engine.end()
    assert (await again.done()).status == 200
    gateway.finish()


async def test_an_empty_pool_and_a_full_pool_answer_differently() -> None:
    """And neither is a quota fault (trap 2)."""
    empty = Gateway(lambda _: [], config=deployment(replicas=0))
    nobody = await empty.ask().done()
    empty.finish()
    gateway, _ = obedient()
    callers = [gateway.ask(messages=LONG) for _ in range(60)]
    await reach(gateway.clock, 1)
    full = next(one for one in callers if one.task.done())
    told = [
        (one.status, one.error["code"], one.headers["x-llm-d-request-dropped-reason"])
        for one in (nobody, full)
    ]
    assert told == [
        (503, "no_ready_replica", "rejected-no-endpoints"),
        (503, "server_is_overloaded", "rejected-saturated"),
    ]
    for one in callers:
        one.leave()
    await asyncio.wait({one.task for one in callers})
    gateway.finish()


async def test_a_burst_is_refused_at_once() -> None:
    """Cheap bounds come first: no refusal waits for anything (trap 8)."""
    gateway, _ = obedient()
    callers = [gateway.ask(messages=LONG) for _ in range(100)]
    await turns(200)
    assert gateway.clock.now() == 0
    refused = [one for one in callers if one.task.done()]
    assert len(refused) > 20
    assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
    for one in callers:
        one.leave()
    await asyncio.wait({one.task for one in callers})
    gateway.finish()


class FailingCaller(Caller):
    """A caller whose handler is struck by a bug when it first sends."""

    async def _send(self, message: dict[str, Any]) -> None:
        raise RuntimeError(message["type"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("waits", [False, True], ids=["sent", "queued"])
async def test_capacity_is_released_with_a_reason_when_its_owner_dies(
    *, stream: bool, waits: bool
) -> None:
    """However the handler of an admitted request ends, its lease does (trap 18)."""
    gateway, engine = obedient()
    ahead = [gateway.ask(messages=LONG)] if waits else []
    await reach(gateway.clock, 1)
    owner = FailingCaller(gateway.app, stream=stream)
    await reach(gateway.clock, 2)
    if waits:
        owner.task.cancel()
    else:
        engine.say("one")
        engine.end(outcome=Outcome.ERROR)
    await asyncio.wait({owner.task})
    assert owner.task.cancelled() or isinstance(owner.task.exception(), RuntimeError)
    (row,) = gateway.driver.recent
    expected = Outcome.CLIENT_CANCEL if waits else Outcome.ERROR
    assert (row.outcome, row.admitted) == (expected, True)
    assert gateway.driver.live == len(ahead)
    for one in ahead:
        one.leave()
    await asyncio.gather(*(one.task for one in ahead))
    gateway.finish()


async def test_a_handler_that_dies_within_its_stream_has_the_engine_stop() -> None:
    gateway, engine = obedient()
    owner = FailingCaller(gateway.app, stream=True)
    await reach(gateway.clock, 1)
    engine.say("one")
    await asyncio.wait({owner.task})
    assert isinstance(owner.task.exception(), RuntimeError)
    assert engine.aborted == [1]
    assert [row.outcome for row in gateway.driver.recent] == [Outcome.CLIENT_CANCEL]
    gateway.finish()


async def test_the_wait_that_is_told_is_the_predicted_one_and_never_shortened() -> None:
    """Not by the caller's own deadline, not by the draw that spreads it, never under 1 s (trap 13)."""
    tenants = (TenantSpec(name="free"), TenantSpec(name="slow", rpm_limit=2))
    gateway, _ = obedient(deployment(tenants=tenants))
    gateway.app._below = lambda _: 0
    hurry = {"x-llm-d-inference-ttl": "100ms", "x-llm-d-slo-ttft-ms": "1900"}
    told = []
    callers = [gateway.ask(messages=LONG, key=KEYS["slow"], headers=hurry) for _ in range(2)]
    await reach(gateway.clock, 10_000)
    for _ in range(2):
        limited = await gateway.ask(key=KEYS["slow"], headers=hurry).done()
        told.append((limited.headers["retry-after"], limited.headers["retry-after-ms"]))
        assert limited.headers["x-should-retry"] == "false", (
            "its own 100 ms are over by then (ADM-4)"
        )
        await reach(gateway.clock, 12_500)
    assert told == [("20", "20000"), ("18", "17500")], "when the bucket has refilled, rounded up"

    loaded, _ = obedient()
    loaded.app._below = lambda _: 0
    decided: list[EntryRecord] = []
    loaded.driver._decided = lambda one: (
        decided.append(one) if isinstance(one, EntryRecord) else None
    )
    crowd = [loaded.ask(messages=LONG, headers=hurry) for _ in range(60)]
    await turns(200)
    refused = [one for one in crowd if one.task.done()]
    waits = [one.decision.retry_after_ns for one in decided if isinstance(one.decision, Reject)]
    assert len(waits) == len(refused) > 5
    for one, wait in zip(refused, waits, strict=True):
        assert wait is not None
        assert int(one.headers["retry-after-ms"]) == max(1_000, ceil_div(wait, NS_PER_MS))
        assert int(one.headers["retry-after"]) == max(1, ceil_div(wait, NS_PER_S))
        assert one.headers["x-should-retry"] == "false"
    for one in (*callers, *crowd):
        one.leave()
    await asyncio.wait({one.task for one in (*callers, *crowd)})
    gateway.finish()
    loaded.finish()


# Huge bodies ---------------------------------------------------------------------------------

WORDS_OF_A_MILLION_TOKENS = "word" * 1_000_000
MANY = 8 * 1_024 * 1_024 - 300
TINY: dict[Route, tuple[str, str, tuple[str, ...]]] = {
    Route.CHAT: (
        '{"model":"m","messages":[{"role":"u","content":[',
        "]}]}",
        ('"a"', "{}", '{"text":"a"}', "[]"),
    ),
    Route.COMPLETIONS: ('{"model":"m","prompt":[', "]}", ('"a"', "[1]")),
    Route.RESPONSES: ('{"model":"m","input":[', "]}", ("{}", '{"content":[{}]}')),
    Route.MESSAGES: (
        '{"model":"m","max_tokens":1,"messages":[{"role":"u","content":[',
        "]}]}",
        ("{}", '"a"', '{"content":[{}]}'),
    ),
    Route.EMBEDDINGS: ('{"model":"m","input":[', "]}", ('"a"', "[1]")),
}
"""How a body of tiny parts begins and ends, and what the parts may be."""


async def test_a_prompt_of_a_million_tokens_is_read_once_and_hashed_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No tokenizer: one reading of the JSON, one length, and the first 512 chunks (trap 43)."""
    read, hashed = [], []

    def reads(content: bytes) -> Any:
        read.append(len(content))
        return decode(content)

    def hashes(content: bytes, **more: Any) -> Any:
        hashed.append(len(content))
        return blake2b(content, **more)

    decode = chat._DECODE
    monkeypatch.setattr(chat, "_DECODE", reads)
    monkeypatch.setattr(prefix, "blake2b", hashes)
    gateway, engine = obedient()
    message = {"role": "user", "content": WORDS_OF_A_MILLION_TOKENS}
    caller = await gateway.ask(messages=[message]).done()
    assert (caller.status, caller.error["code"]) == (400, "context_length_exceeded")
    assert caller.error["headrace"]["measured"] == pytest.approx(1_000_000, rel=0.01)
    assert len(read) == 1
    assert len(hashed) <= prefix.CHUNKS_MAX + 1
    assert sum(hashed) < 2 * prefix.CHUNKS_MAX * prefix.CHUNK_BYTES
    assert not engine.calls
    gateway.finish()


@pytest.mark.parametrize("route", Route)
async def test_a_body_of_tiny_parts_is_refused_before_it_is_read(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read in one piece is bounded by parts, not by bytes alone (trap 43)."""

    def never(_: bytes) -> Asked:
        raise AssertionError("read")

    monkeypatch.setitem(asked._READERS, route, never)
    gateway = Gateway(lambda _: [])
    head, tail, parts = TINY[route]
    for part in parts:
        body = (head + ",".join([part] * (MANY // (len(part) + 1))) + tail).encode()
        caller = await gateway.ask(path=route, body=body).done()
        assert (caller.status, caller.error["code"]) == (400, "invalid_value"), part
        assert str(size.PARTS_MAX) in caller.error["message"]
    assert gateway.app.refusals == {"malformed": len(parts)}
    gateway.finish()


async def test_load_raises_what_is_seen_of_it() -> None:
    """Saturation is read off the state that admission uses (trap 19)."""
    gateway, _ = obedient(config=deployment(ttft_ms=9_000.0))
    key = ModelName(MODEL), ClassName("interactive")
    assert waiting(gateway.driver.plane).classes[key].count == 0
    callers = [gateway.ask(messages=LONG) for _ in range(3)]
    await reach(gateway.clock, 1)
    seen = waiting(gateway.driver.plane).classes[key]
    assert (seen.count, seen.work_ns > 0) == (2, True)
    for one in callers:
        one.leave()
    await asyncio.wait({one.task for one in callers})
    assert waiting(gateway.driver.plane).classes[key].count == 0
    gateway.finish()


async def test_usage_settles_what_was_reserved(scene: Scene) -> None:
    """The engine's count, not the estimate, is what a limit has lost (traps 3 and 5)."""
    world = World(scene, Route.CHAT, Mode.WHOLE)
    limited = (TenantSpec(name="free", tpm_limit=60_000),)
    await world.start(tenants=limited)
    caller = Caller(world.gateway.app, max_tokens=1_000)
    await scene.until(lambda: world.peer is not None)
    quota = world.gateway.driver.plane.state.ledger.quotas
    (mine,) = quota.values()
    assert mine.reserved > 1_000
    world.say(world.head + world.words.whole, b"")
    assert (await caller.done()).status == 200
    assert (mine.reserved, mine.parallel) == (0, 0)
    assert mine.tokens is not None
    assert mine.tokens.level == 60_000 - 7 - 2
    world.gateway.finish()


# Streams and cancellation --------------------------------------------------------------------


async def test_pings_do_not_hide_a_silent_engine(scene: Scene) -> None:
    """First-byte and gap timers; pings do not count (trap 36)."""
    world = World(scene, Route.CHAT, Mode.EVENTS)
    await world.start()
    caller = SlowCaller(world.gateway, Route.CHAT, Mode.EVENTS)
    await scene.until(lambda: world.peer is not None)
    world.say(EVENTS, b"")
    world.frame(world.words.word)
    peer, began = world.peer, scene.loop.time()
    assert peer is not None
    while peer.is_open:
        peer.say(chunk(PING))
        await asyncio.sleep(1)
    await caller.done()
    assert scene.loop.time() - began == pytest.approx(GAP_S, abs=1.5)
    assert (caller.status, caller.told) == (200, "upstream_error")
    world.gateway.finish()


@pytest.mark.parametrize("route", [route for route in Route if route is not Route.EMBEDDINGS])
async def test_a_frame_split_into_bytes_comes_whole_with_its_usage(
    scene: Scene, route: Route
) -> None:
    """Bytes are buffered; no character is lost (trap 37)."""
    world = World(scene, route, Mode.EVENTS)
    await world.start()
    caller = SlowCaller(world.gateway, route, Mode.EVENTS)
    await scene.until(lambda: world.peer is not None)
    word = WORDS[route].word.replace(b"word", "wörd 🌊".encode())
    raw = EVENTS + chunk(word + word + WORDS[route].end) + LAST
    for at in range(len(raw)):
        world.say(raw[at : at + 1], b"")
        await turns(2)
    await caller.done()
    assert caller.content == word + word + WORDS[route].shown
    (row,) = world.gateway.driver.recent
    assert row.outcome is Outcome.SUCCESS
    assert row.usage is not None or route is Route.MESSAGES
    world.gateway.finish()


async def test_who_leaves_before_the_first_token_lets_the_next_one_in_at_once() -> None:
    """Every leg is cancelled, and the next does not wait for it (trap 39)."""
    gateway, engine = obedient()
    first = gateway.ask(messages=LONG, stream=True)
    second = gateway.ask(stream=True)
    await reach(gateway.clock, 1)
    assert len(engine.calls) == 1
    first.leave()
    await turns()
    assert (engine.aborted, len(engine.calls)) == ([1], 2)
    engine.say("x")
    engine.end()
    assert (await second.done()).status == 200
    await first.done()
    gateway.finish()


async def test_a_predicted_first_token_lets_the_next_one_in(scene: Scene) -> None:
    """An engine that tells of no first token before the whole does not keep its window shut."""
    world = World(scene, Route.CHAT, Mode.WHOLE)
    await world.start()
    callers = [Caller(world.gateway.app, messages=LONG), Caller(world.gateway.app)]
    await scene.until(lambda: world.peer is not None)
    first, began = world.peer, scene.loop.time()
    await scene.until(lambda: world.peer is not first)
    assert 0.1 < scene.loop.time() - began < 2
    assert first is not None
    for peer in (first, world.peer):
        assert peer is not None
        peer.say(world.head + world.words.whole)
    assert [(await one.done()).status for one in callers] == [200, 200]
    world.gateway.finish()


async def test_an_engine_that_is_gone_takes_nobody_from_the_queue_along(scene: Scene) -> None:
    """Who waits is not sent to where the one before found nobody."""
    world = World(scene, Route.CHAT, Mode.EVENTS)
    await world.start()
    await turns(20)
    world.engine.upstream.pool.drop_idle()
    world.server.stop_listening()
    lost = Caller(world.gateway.app, messages=LONG, stream=True)
    waits = Caller(world.gateway.app, stream=True)
    await lost.done()
    assert (lost.status, lost.error["headrace"]["reason"]) == (502, "replica_lost")
    assert waits.status is None
    await world.server.listen(world.server.port)
    await scene.until(lambda: world.peer is not None)
    world.say(EVENTS + chunk(world.words.word + world.words.end) + LAST, b"")
    assert (await waits.done()).status == 200
    assert world.engine.incarnation == 2
    world.gateway.finish()


async def test_no_static_cap_refuses_what_a_replica_can_serve() -> None:
    """What measured capacity serves is refused to nobody (trap 11)."""
    plain = deployment()
    config = PlaneConfig(
        models=plain.models,
        pools=(PoolSpec(name="p", model=MODEL, profile=PROFILE),),
        classes=plain.classes,
        tenants=plain.tenants,
    )
    gateway = Gateway(config=config)
    callers = [gateway.ask(max_tokens=3) for _ in range(64)]
    await asyncio.wait({one.task for one in callers})
    assert {one.status for one in callers} == {200}
    gateway.finish()
