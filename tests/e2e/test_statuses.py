"""What two SDKs that we did not write make of each status: one table, over real HTTP.

What an SDK waits before it tries again is taken from itself, and the gateway's clock goes on by that much
instead: so a wait that is told is also shown to be long enough.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message
from msgspec import Struct
from openai.types.chat import ChatCompletion

from headrace.config.schema import EmulatorSpec, JobsSpec, KeySpec, ServerSpec, Settings
from headrace.gateway.auth import key_hash
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from headrace.model.deployment import ClassSpec, Defer, ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import ClassName, ModelName, RequestId, TenantId
from headrace.model.request import Request
from headrace.policy.catalog import PlaneConfig
from headrace.units import NS_PER_S, InstantNs, Tokens
from tests.gateway.scenes import PROFILE, ask, assert_books_closed, emulated

pytestmark = [pytest.mark.asyncio, pytest.mark.service]

RETRIES = 3
LONG = 18_000
"""Tokens whose prefill closes a replica to others, and lets these still keep two seconds."""
OBJECTIVE = "x-llm-d-inference-objective"
TENANTS = (
    TenantSpec(name="free"),
    TenantSpec(name="rate", rpm_limit=4),
    TenantSpec(name="slow", rpm_limit=1),
    TenantSpec(name="quota", tpm_limit=100),
    TenantSpec(name="single", max_parallel_requests=1),
    TenantSpec(name="narrow", models=("plain",)),
)
CLASSES = (
    ClassSpec(name="interactive", ttft_ms=1_500),
    ClassSpec(name="impossible", ttft_ms=1),
    ClassSpec(name="batch", ttft_ms=None, expire=False, defer=Defer.ASKED),
)


def settings(folder: Path) -> Settings:
    models = (ModelSpec(name="m"), ModelSpec(name="plain", features=()))
    return Settings(
        deployment=PlaneConfig(
            models=models,
            pools=(
                PoolSpec(name="p", model="m", profile=PROFILE),
                PoolSpec(name="q", model="plain", profile=PROFILE),
            ),
            classes=CLASSES,
            tenants=TENANTS,
        ),
        keys=tuple(
            KeySpec(name=one.name, tenant=one.name, hash=key_hash(f"sk-{one.name}"))
            for one in TENANTS
        ),
        server=ServerSpec(port=0, drain_s=0, trusted_replay=True, body_limit_bytes=64 * 1_024),
        emulator=EmulatorSpec(noise_percent=0),
        jobs=JobsSpec(file=str(folder / "jobs.db")),
    )


class World:
    """A gateway, what reached it, and what an SDK waited."""

    def __init__(self, gateway: Gateway, clock: LoopClock, place: str) -> None:
        self.gateway, self.clock, self.place = gateway, clock, place
        self.attempts: list[str] = []
        self.waits: list[float] = []
        self.asked_to_wait: list[float] = []
        self.mend: Callable[[World], None] = nothing
        self.others: list[RequestId] = []

    @property
    def engine(self) -> Any:
        return next(one for one in self.gateway.driver.engines if one.pool == "p")

    def also(self, tenant: str = "free", tokens: int = 100, slo_class: str = "batch") -> None:
        """Have another request open."""
        driver = self.gateway.driver
        other = Request(
            id=driver.mint(),
            tenant=TenantId(tenant),
            model=ModelName("m"),
            input_tokens=Tokens(tokens),
            slo_class=ClassName(slo_class),
        )
        self.others.append(other.id)
        driver.offer(other, ask(replay_output=200))

    def leave(self) -> None:
        """Have all others go."""
        for other in self.others:
            self.gateway.driver.leave(other)

    def between(self, wait_s: float) -> None:
        """Let the wait of an SDK pass, and the world change meanwhile."""
        self.waits.append(wait_s)
        self.clock.go_on_from(InstantNs(self.clock.now() + round(wait_s * NS_PER_S)))
        self.mend(self)

    def watched(self, sdk: Any) -> Any:
        """Return an SDK whose waits pass at once, and are known."""
        ordered = sdk._calculate_retry_timeout

        def timeout(left: int, options: Any, headers: Any = None) -> float:
            self.asked_to_wait.append(int(headers["retry-after-ms"]) / 1_000)
            self.between(ordered(left, options, headers))
            return 0.0

        sdk._calculate_retry_timeout = timeout
        return sdk


def nothing(_: World) -> None:
    """Leave the world as it is."""


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[World]:
    given = settings(folder)
    clock = LoopClock(asyncio.get_running_loop())
    gateway = Gateway(given, clock)
    sock = listen(given.server.host, given.server.port)
    host, port = sock.getsockname()
    world = World(gateway, clock, f"http://{host}:{port}")
    route = gateway.app._route

    async def counted(exchange: Any) -> None:
        world.attempts.append(exchange.scope["path"])
        await route(exchange)

    gateway.app._route = counted  # type: ignore[method-assign]
    begun = asyncio.Event()
    running = asyncio.create_task(gateway.serve(sock, accepting=begun.set))
    await begun.wait()
    try:
        yield world
    finally:
        world.leave()
        gateway.stop()
        assert await running
        assert_books_closed(gateway.driver.plane)


class Openai:
    """Chat by one SDK."""

    errors: Any = openai
    answer = ChatCompletion
    path = "/v1/chat/completions"

    def made(self, place: str, key: str) -> Any:
        return openai.AsyncOpenAI(api_key=key, base_url=f"{place}/v1", max_retries=RETRIES)

    def creating(self, sdk: Any) -> Any:
        return sdk.chat.completions


class Anthropic:
    """Messages by the other."""

    errors: Any = anthropic
    answer = Message
    path = "/v1/messages"

    def made(self, place: str, key: str) -> Any:
        return anthropic.AsyncAnthropic(api_key=key, base_url=place, max_retries=RETRIES)

    def creating(self, sdk: Any) -> Any:
        return sdk.messages


SDKS: dict[str, Openai | Anthropic] = {"openai": Openai(), "anthropic": Anthropic()}


class Row(Struct, frozen=True, kw_only=True):
    """One way to be refused, and what becomes of it."""

    status: int
    code: str
    error: str
    """The exception that it is where nothing else helps."""
    other: str = ""
    """The same in the second SDK, if it has another name there."""
    key: str = "free"
    model: str = "m"
    headers: tuple[tuple[str, str], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()
    words: int = 1
    before: Callable[[World], None] = nothing
    mend: Callable[[World], None] = nothing
    attempts: int = 1
    """That reach the gateway."""
    served: bool = False
    """Whether the last one is answered."""


def is_stuck(world: World) -> None:
    """Have a replica never begin what it is given: whoever waits for it waits in vain."""
    world.engine.submit = world.engine.abort = lambda _: None
    world.also(tokens=LONG)


def is_stuck_beside_its_own(world: World) -> None:
    is_stuck(world)
    world.also("single")


def asks_often(world: World) -> None:
    for _ in range(4):
        world.also("rate")


def has_no_replica(world: World) -> None:
    world.gateway.driver.down(world.engine)


def gets_another(world: World) -> None:
    world.gateway.driver.add(emulated(world.clock, 50))


def gets_another_late(world: World) -> None:
    if len(world.waits) == RETRIES:
        gets_another(world)


TOO_MANY, OVERLOADED = "RateLimitError", "InternalServerError"
ROWS = {
    "too long for the model": Row(
        status=400,
        code="context_length_exceeded",
        error="BadRequestError",
        headers=(("x-headrace-replay-input", "200000"),),
    ),
    "not valid": Row(
        status=400,
        code="invalid_value",
        error="BadRequestError",
        fields=(("max_tokens", -1),),
    ),
    "an answer too long": Row(
        status=400,
        code="invalid_value",
        error="BadRequestError",
        fields=(("max_tokens", 20_000),),
    ),
    "a header not valid": Row(
        status=400,
        code="invalid_value",
        error="BadRequestError",
        headers=(("x-slo-ttft-ms", "soon"),),
    ),
    "not what the model does": Row(
        status=400,
        code="unsupported_parameter",
        error="BadRequestError",
        model="plain",
        fields=(("tools", [{"type": "function", "name": "f", "function": {"name": "f"}}]),),
    ),
    "no such key": Row(
        status=401, code="invalid_api_key", error="AuthenticationError", key="unknown"
    ),
    "not this model": Row(
        status=403, code="model_not_allowed", error="PermissionDeniedError", key="narrow"
    ),
    "no such model": Row(
        status=404, code="model_not_found", error="NotFoundError", model="unknown"
    ),
    "too large": Row(
        status=413,
        code="request_too_large",
        error="APIStatusError",
        other="ContentTooLargeError",
        words=40_000,
    ),
    "over its rate": Row(
        status=429,
        code="rate_limit_exceeded",
        error=TOO_MANY,
        key="rate",
        before=asks_often,
        mend=World.leave,  # time goes on for the gateway alone: to it their prompts would be long overdue
        attempts=2,
        served=True,
    ),
    "over its rate, for longer than SDKs wait": Row(
        status=429,
        code="rate_limit_exceeded",
        error=TOO_MANY,
        key="slow",
        before=lambda world: world.also("slow"),
    ),
    "one too many at once": Row(
        status=429,
        code="concurrency_limit_exceeded",
        error=TOO_MANY,
        key="single",
        before=lambda world: world.also("single"),
        mend=World.leave,
        attempts=2,
        served=True,
    ),
    "one too many at once, for good": Row(
        status=429,
        code="concurrency_limit_exceeded",
        error=TOO_MANY,
        key="single",
        before=is_stuck_beside_its_own,
        attempts=1 + RETRIES,
    ),
    "more than its whole quota": Row(
        status=429,
        code="insufficient_quota",
        error=TOO_MANY,
        key="quota",
        fields=(("max_tokens", 500),),
    ),
    "no replica for now": Row(
        status=503,
        code="no_ready_replica",
        error=OVERLOADED,
        other="ServiceUnavailableError",
        before=has_no_replica,
        mend=gets_another,
        attempts=2,
        served=True,
    ),
    "no replica for long": Row(
        status=503,
        code="no_ready_replica",
        error=OVERLOADED,
        other="ServiceUnavailableError",
        before=has_no_replica,
        mend=gets_another_late,
        attempts=1 + RETRIES,
        served=True,
    ),
    "no replica at all": Row(
        status=503,
        code="no_ready_replica",
        error=OVERLOADED,
        other="ServiceUnavailableError",
        before=has_no_replica,
        attempts=1 + RETRIES,
    ),
    "too much ahead for now": Row(
        status=503,
        code="server_is_overloaded",
        error=OVERLOADED,
        other="ServiceUnavailableError",
        before=lambda world: world.also(tokens=5 * LONG),
        mend=World.leave,
        attempts=2,
        served=True,
    ),
    "never in time": Row(
        status=503,
        code="server_is_overloaded",
        error=OVERLOADED,
        other="ServiceUnavailableError",
        headers=((OBJECTIVE, "impossible"),),
    ),
    "its deadline passed in the queue": Row(
        status=504,
        code="deadline_exceeded",
        error=OVERLOADED,
        other="GatewayTimeoutError",
        before=is_stuck,
    ),
    "it waited for as long as it may": Row(
        status=504,
        code="deadline_exceeded",
        error=OVERLOADED,
        other="GatewayTimeoutError",
        headers=((OBJECTIVE, "batch"), ("x-llm-d-inference-ttl", "1ms")),
        before=is_stuck,
    ),
}


@pytest.mark.parametrize("name", list(SDKS))
@pytest.mark.parametrize("what", list(ROWS))
async def test_an_sdk_repeats_what_may_succeed_when_told_and_nothing_else(
    what: str, name: str, tmp_path: Path
) -> None:
    row, face = ROWS[what], SDKS[name]
    async with serving(tmp_path) as world, face.made(world.place, f"sk-{row.key}") as sdk:
        row.before(world)
        world.mend = row.mend
        messages = [{"role": "user", "content": "a " * row.words}]
        fields = {"max_tokens": 4, **dict(row.fields)}
        creating = face.creating(world.watched(sdk)).create(
            model=row.model, messages=messages, extra_headers=dict(row.headers), **fields
        )
        if row.served:
            answer = await creating
            usage = answer.usage.model_dump()
            assert usage.get("completion_tokens", usage.get("output_tokens")) == 4
        else:
            kind = getattr(face.errors, (name == "anthropic" and row.other) or row.error)
            with pytest.raises(kind) as refused:
                await creating
            assert refused.value.status_code == row.status
            body = refused.value.body
            assert body.get("error", body)["code"] == row.code
            may = refused.value.response.headers.get("x-should-retry") != "false"
            assert may is (row.attempts > 1)
        assert world.attempts == [face.path] * row.attempts
        assert world.waits == world.asked_to_wait, "as long as told, not its own back-off"
        assert len(world.waits) == row.attempts - 1
        if world.waits:
            assert min(world.waits) >= 1


@pytest.mark.parametrize("name", list(SDKS))
async def test_an_sdk_hands_over_looks_for_the_answer_and_repeats_nothing(
    name: str, tmp_path: Path
) -> None:
    face = SDKS[name]
    later = {OBJECTIVE: "batch", "prefer": "respond-async"}
    async with serving(tmp_path) as world, face.made(world.place, "sk-free") as sdk:
        world.watched(sdk)
        raw = await face.creating(sdk).with_raw_response.create(
            model="m",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=4,
            extra_headers=later,
        )
        assert (raw.status_code, raw.headers["preference-applied"]) == (202, "respond-async")
        where = raw.headers["location"]
        answer = await sdk.get(
            world.place + where,
            cast_to=face.answer,
            options={"headers": {"prefer": "wait=20"}},
        )
        usage = answer.usage.model_dump()
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 4

        is_stuck(world)
        raw = await face.creating(sdk).with_raw_response.create(
            model="m",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=4,
            extra_headers=later,
        )
        unwanted = world.place + raw.headers["location"]
        assert (await sdk.delete(unwanted, cast_to=dict[str, Any]))["object"] == "headrace.job"
        with pytest.raises(face.errors.APIStatusError) as gone:
            await sdk.get(unwanted, cast_to=face.answer, options={"headers": {"prefer": "wait=20"}})
        assert gone.value.status_code == 410
        assert world.waits == []
        assert len(world.attempts) == 5
