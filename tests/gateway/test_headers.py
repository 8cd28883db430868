"""Which headers tell callers, SDKs and routers before us what to do: one table, over the gateway."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import Struct

from headrace.config.schema import ServerSpec
from headrace.gateway.clock import LoopClock
from headrace.model.deployment import ClassSpec, TenantSpec
from headrace.model.meter import NO_STREAM
from headrace.model.slo import Outcome
from headrace.policy.catalog import PlaneConfig
from headrace.ports.engine import Ending, Refusal
from headrace.units import NS_PER_MS, InstantNs
from tests.gateway.scenes import KEYS, Caller, Gateway, ObedientEngine, deployment, reach

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

LONG = [{"role": "user", "content": "x" * 72_000}]
TENANTS = (
    TenantSpec(name="free", rpm_limit=100, tpm_limit=1_000_000),
    TenantSpec(name="slow", rpm_limit=1, tpm_limit=1_000_000),
    TenantSpec(name="single", max_parallel_requests=1, rpm_limit=100, tpm_limit=1_000_000),
    TenantSpec(name="narrow", models=("other",), rpm_limit=100, tpm_limit=100),
)
RATES = {
    f"x-ratelimit-{what}-{unit}"
    for what in ("limit", "remaining", "reset")
    for unit in ("requests", "tokens")
}


class World:
    """A gateway with limits, and an engine that obeys."""

    def __init__(self) -> None:
        small = deployment(tenants=TENANTS)
        config = PlaneConfig(
            models=small.models,
            pools=small.pools,
            classes=(ClassSpec(name="interactive", queue=1),),
            tenants=small.tenants,
        )
        self.gateway = Gateway(
            lambda clock: [ObedientEngine(clock)],
            config=config,
            server=ServerSpec(header_timeout_s=3, concurrency=3),
        )
        (engine,) = self.gateway.engines
        assert isinstance(engine, ObedientEngine)
        self.engine = engine
        self.others: list[Caller] = []

    def ask(self, **fields: Any) -> Caller:
        return self.gateway.ask(**{"headers": {"x-request-id": "mine"}, **fields})

    async def also(self, **fields: Any) -> None:
        """Have another request open."""
        self.others.append(self.gateway.ask(**fields))
        await self.tick()

    async def tick(self) -> None:
        await reach(self.gateway.clock, asyncio.get_running_loop().time() * 1_000 + 1)

    async def finish(self) -> None:
        for other in self.others:
            other.leave()
        await asyncio.gather(*(other.task for other in self.others))
        self.gateway.finish()


async def succeeds(world: World) -> Caller:
    caller = world.ask()
    await world.tick()
    world.engine.say("x")
    world.engine.end()
    return caller


async def streams(world: World) -> Caller:
    caller = world.ask(stream=True)
    await world.tick()
    world.engine.say("data: 1\n\n")
    world.engine.end()
    return caller


async def passes_through(world: World) -> Caller:
    caller = world.ask()
    await world.tick()
    refusal = Refusal(status=422, body=b'{"error":{"code":"theirs"}}')
    world.engine.tell.ended(
        world.engine.calls[-1].dispatch.attempt,
        Ending(outcome=Outcome.ERROR, usage=None, timing=NO_STREAM, refusal=refusal),
    )
    return caller


async def fails(world: World) -> Caller:
    caller = world.ask()
    await world.tick()
    world.engine.end(outcome=Outcome.ERROR)
    return caller


async def loses_replica(world: World) -> Caller:
    caller = world.ask()
    await world.tick()
    world.gateway.driver.down(world.engine)
    return caller


async def has_none(world: World) -> Caller:
    world.gateway.driver.down(world.engine)
    return world.ask()


async def expires(world: World) -> Caller:
    await world.also(messages=LONG)
    return world.ask()


async def is_pushed_out(world: World) -> Caller:
    await world.also(messages=LONG, key=KEYS["slow"])
    await world.also()
    return world.ask()


async def drains(world: World) -> Caller:
    world.gateway.driver.refuse_newcomers()
    return world.ask()


async def is_ended(world: World) -> Caller:
    caller = world.ask()
    await world.tick()
    world.gateway.driver.end_all()
    return caller


async def is_too_fast(world: World) -> Caller:
    await world.also(key=KEYS["slow"])
    return world.ask(key=KEYS["slow"])


async def is_second(world: World) -> Caller:
    await world.also(key=KEYS["single"])
    return world.ask(key=KEYS["single"])


async def is_one_too_many(world: World) -> Caller:
    for _ in range(3):
        await world.also(key=KEYS["single"] if not world.others else KEYS["free"])
    return world.ask()


async def drips(world: World) -> Caller:
    caller = world.ask()
    caller._incoming.get_nowait()
    return caller


def asks(**fields: Any) -> Callable[[World], Awaitable[Caller]]:
    async def ask(world: World) -> Caller:
        return world.ask(**fields)

    return ask


class Told(Struct, frozen=True, kw_only=True):
    """What a caller is told."""

    status: int
    retry: bool | None = None
    """True: when to repeat; False: not to; None: nothing is said."""
    dropped: str | None = None
    rates: bool = True
    decided: bool = True


TABLE: dict[str, tuple[Callable[[World], Awaitable[Caller]], Told]] = {
    "success": (succeeds, Told(status=200)),
    "stream": (streams, Told(status=200)),
    "engine's 422": (passes_through, Told(status=422, retry=False)),
    "engine failed": (fails, Told(status=502, retry=True)),
    "replica lost": (loses_replica, Told(status=502, retry=True, dropped="evicted")),
    "no replica": (has_none, Told(status=503, retry=True, dropped="rejected-no-endpoints")),
    "expired": (expires, Told(status=504, retry=False, dropped="rejected-ttl-expired")),
    "pushed out": (
        is_pushed_out,
        Told(status=503, retry=True, dropped="evicted-queue-pressure"),
    ),
    "draining": (
        drains,
        Told(status=503, retry=True, dropped="rejected-shutting-down", decided=False),
    ),
    "ended by a drain": (
        is_ended,
        Told(status=503, retry=True, dropped="evicted", decided=True),
    ),
    "too many a minute": (is_too_fast, Told(status=429, retry=True)),
    "too many at once": (is_second, Told(status=429, retry=True)),
    "larger than its limit": (
        asks(key=KEYS["narrow"], model="other", max_tokens=200),
        Told(status=429, retry=False),
    ),
    "open requests": (
        is_one_too_many,
        Told(status=503, retry=True, dropped="rejected-saturated", decided=False),
    ),
    "unknown key": (
        asks(key="sk-nobody"),
        Told(status=401, retry=False, rates=False, decided=False),
    ),
    "model not allowed": (asks(key=KEYS["narrow"]), Told(status=403, retry=False)),
    "no such model": (asks(model="nope"), Told(status=404, retry=False)),
    "malformed": (asks(body=b"{"), Told(status=400, retry=False, decided=False)),
    "too long": (asks(max_tokens=900_000), Told(status=400, retry=False)),
    "too large": (
        asks(body=b" " * 9_000_000),
        Told(status=413, retry=False, decided=False),
    ),
    "too slow": (drips, Told(status=408, retry=True, decided=False)),
    "no such path": (
        asks(path="/v1/nothing"),
        Told(status=404, retry=False, rates=False, decided=False),
    ),
}


@pytest.mark.parametrize("name", TABLE)
async def test_headers_say_whether_and_when_to_repeat_and_whose_fault_it_is(name: str) -> None:
    act, told = TABLE[name]
    world = World()
    caller = await act(world)
    await asyncio.wait({caller.task}, timeout=100)
    found = caller.headers
    assert caller.status == told.status
    assert found["x-request-id"] == "mine"
    assert found.get("x-llm-d-request-dropped-reason") == told.dropped
    assert ({one for one in found if one.startswith("x-ratelimit-")} == RATES) is told.rates
    assert ("x-headrace-decision-id" in found) is told.decided
    waits = [int(found[one]) for one in ("retry-after", "retry-after-ms") if one in found]
    heeded = told.retry is not False and max(waits, default=0) <= 60_000
    assert found.get("x-should-retry") == (None if heeded else "false")
    assert bool(waits) is (told.retry is True)
    if waits:
        seconds, millis = waits
        assert seconds >= 1
        assert (seconds - 1) * 1_000 < millis <= seconds * 1_000
    await world.finish()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_tells_how_long_it_took_and_by_which_model(*, stream: bool) -> None:
    world = World()
    caller = world.ask(stream=stream)
    await reach(world.gateway.clock, 250)
    world.engine.say("one")
    if not stream:
        await reach(world.gateway.clock, 750)
    world.engine.end()
    await caller.done()
    assert caller.headers["openai-processing-ms"] == ("250" if stream else "750")
    assert caller.headers["x-headrace-attempts"] == "1"
    assert caller.headers["x-headrace-degrade-level"] == "0"
    assert caller.headers["x-headrace-model-revision"] == "1"
    world.gateway.finish()


class Stepping(LoopClock):
    """A clock that goes on by 3 ms whenever it is read."""

    steps = 0

    def now(self) -> InstantNs:
        self.steps += 1
        return InstantNs(super().now() + self.steps * 3 * NS_PER_MS)


@pytest.mark.parametrize("model", ["m", "nope"], ids=["sent", "refused"])
async def test_an_answer_tells_what_the_gateway_itself_took_of_it(model: str) -> None:
    """From the body's last byte until it is decided, and sent; two looks at the clock, no more."""
    world = World()
    world.gateway.app._clock = clock = Stepping(asyncio.get_running_loop())
    caller = world.ask(model=model)
    await world.tick()
    if model == "m":
        world.engine.say("one")
        world.engine.say("two")
        world.engine.end()
    await caller.done()
    assert caller.headers["x-headrace-overhead-ms"] == "3.000"
    assert clock.steps == 2
    world.gateway.finish()


@pytest.mark.parametrize(
    ("asked", "status", "kind"),
    [
        ({"path": "/v1/messages", "method": "GET"}, 405, "invalid_request_error"),
        ({"path": "/v1/messages/count_tokens"}, 404, "not_found_error"),
        ({"path": "/v1/messages", "key": "sk-nobody"}, 401, "authentication_error"),
        ({"path": "/v1/messages", "body": b"{"}, 400, "invalid_request_error"),
        ({"path": "/v1/messages", "body": b" " * 9_000_000}, 413, "request_too_large"),
    ],
)  # fmt: skip
async def test_refusals_of_messages_are_told_in_anthropics_words(
    asked: dict[str, Any], status: int, kind: str
) -> None:
    gateway = Gateway()
    caller = await gateway.ask(**asked).done()
    assert caller.status == status
    assert (caller.json["type"], caller.error["type"]) == ("error", kind)
    assert caller.headers.get("allow") == ("POST" if status == 405 else None)
    gateway.finish()


async def test_other_paths_are_not_anthropics() -> None:
    gateway = Gateway()
    for path in ("/v1/messagesx", "/v1/chat/completions", "/", "/v1/models"):
        caller = await gateway.ask(path=path, method="PUT").done()
        assert "type" not in caller.json, path
        assert caller.error["type"] == "invalid_request_error"
    gateway.finish()
