"""What headers ask of the queue and of the engine: bounds on the wait, sessions, and nothing else."""

import asyncio
import string
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec.structs import replace

from headrace.gateway.wishes import Wishes, wishes
from headrace.model.deployment import ClassSpec
from headrace.model.ids import TenantId
from headrace.model.slo import Outcome
from headrace.ports.engine import Route
from headrace.units import NS_PER_S, DurationNs
from tests.adapters.upstream.scenes import EVENTS, LAST, Scene, chunk
from tests.gateway.exits import Mode
from tests.gateway.scenes import KEYS, Caller, Gateway, ObedientEngine, deployment, reach
from tests.gateway.test_engine_exits import World

TENANT = TenantId("free")
TTL = "x-llm-d-inference-ttl"
LONG = [{"role": "user", "content": "x" * 72_000}]


def session(*headers: tuple[bytes, bytes], tenant: TenantId = TENANT) -> bytes | None:
    return wishes(headers, tenant).session


def test_the_leftmost_name_of_a_session_counts() -> None:
    wanted = session((b"x-session-id", b"one"))
    assert wanted is not None
    assert session((b"session_id", b"two"), (b"x-session-id", b"one")) == wanted
    assert session((b"x-session-id", b""), (b"session-id", b"one")) == wanted
    assert session((b"x-session-id", b"one"), (b"x-session-id", b"two")) == wanted
    for name in (b"x-session-token", b"x-dynamo-session-id", b"x-claude-code-session-id",
                 b"x-session-affinity", b"session-id", b"session_id"):  # fmt: skip
        assert session((name, b"one")) == wanted
    assert wishes([(b"x-request-id", b"one")], TENANT) == Wishes()


def test_a_session_is_short_and_plain_whatever_it_was_and_its_tenants_own() -> None:
    found = {session((b"x-session-id", value)) for value in (b"one", b"x" * 72_000, b"\xff\r\n: y")}
    found.add(session((b"x-session-id", b"one"), tenant=TenantId("slow")))
    assert len(found) == 4
    for one in found:
        assert one is not None
        assert len(one) == 32
        assert set(one.decode()) <= set(string.hexdigits)


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_request_waits_no_longer_than_its_header_lets_it() -> None:
    """Whatever its class: `batch` has no bound of its own."""
    plain = deployment(ttft_ms=60_000)
    batch = ClassSpec(name="batch", ttft_ms=None, expire=False)
    config = replace(plain, classes=(plain.classes[0], batch))
    gateway = Gateway(lambda clock: [ObedientEngine(clock)], config=config)
    first = gateway.ask(messages=LONG)
    await reach(gateway.clock, 1)
    waits = [
        gateway.ask(headers={TTL: "1m0.5s"}),
        gateway.ask(headers={TTL: "250ms"}),
        gateway.ask(headers={TTL: "2s", "x-llm-d-inference-objective": "batch"}, stream=True),
    ]
    await reach(gateway.clock, 250)
    assert not [one for one in waits if one.task.done()]
    await reach(gateway.clock, 252)
    assert [one.status for one in waits] == [None, 504, None]
    await reach(gateway.clock, 2_002)
    assert [one.status for one in waits] == [None, 504, 504]
    for one in waits[1:]:
        assert one.error["code"] == "deadline_exceeded"
        assert one.error["headrace"]["reason"] == "waited_out"
        assert one.headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
        assert one.headers["x-should-retry"] == "false"
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    for nth, caller in enumerate((first, waits[0])):
        attempt = engine.calls[nth].dispatch.attempt
        engine.say("one", attempt)
        engine.end(attempt)
        assert (await caller.done()).status == 200
    assert [row.outcome for row in gateway.driver.recent] == [
        *(Outcome.TIMEOUT, Outcome.TIMEOUT),
        *(Outcome.SUCCESS, Outcome.SUCCESS),
    ]
    gateway.finish()


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_wait_that_is_longer_than_the_classs_own_bound_changes_nothing() -> None:
    gateway = Gateway(lambda clock: [ObedientEngine(clock)])
    first = gateway.ask(messages=LONG)
    await reach(gateway.clock, 1)
    second = gateway.ask(headers={TTL: "999h"})
    await reach(gateway.clock, 2_100)
    assert second.error["headrace"]["reason"] == "expired"
    assert gateway.driver.plane.next_timer() is None
    first.leave()
    await first.done()
    gateway.finish()


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await made.assert_nothing_left()


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_of_a_callers_headers_an_engine_sees_its_session_alone(scene: Scene) -> None:
    world = World(scene, Route.CHAT, Mode.EVENTS)
    await world.start()
    told = {
        "x-claude-code-session-id": "agent-7",
        TTL: "5s",
        "x-slo-ttft-ms": "1500",
        "x-llm-d-inference-objective": "interactive",
        "x-llm-d-inference-fairness-id": "vip",
        "x-gateway-model-name-rewrite": "other",
        "x-request-id": "mine",
        "cookie": "a=b",
    }
    caller = Caller(world.gateway.app, headers=told, stream=True)
    await scene.until(lambda: world.peer is not None)
    assert world.peer is not None
    head, _, _ = world.peer.requests[-1].partition(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
    assert fields.pop(b"x-session-id") == session((b"session-id", b"agent-7"))
    assert fields.pop(b"x-request-id").startswith(b"headrace-")
    hidden = [value.encode() for value in told.values()] + [KEYS["free"].encode()]
    assert not [one for one in hidden if one in head.lower()]
    assert not [name for name in fields if name.startswith((b"x-", b"auth", b"cookie"))]
    world.say(EVENTS + chunk(world.words.word + world.words.end) + LAST, b"")
    assert (await caller.done()).status == 200
    await asyncio.sleep(0)
    world.gateway.finish()


def test_a_bound_on_the_wait_is_exact() -> None:
    assert wishes([(b"x-llm-d-inference-ttl", b" 1m30s ")], TENANT).ttl_ns == 90 * NS_PER_S
    assert isinstance(wishes([(b"x-llm-d-inference-ttl", b"1ns")], TENANT).ttl_ns, int)
    assert wishes([(b"x-llm-d-inference-ttl", b"1ns")], TENANT).ttl_ns == DurationNs(1)
