"""Prompts are counted off the loop: bounded, once, and never waited for longer than allowed."""

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.config.schema import FileTokenizerSpec, TokenCountsSpec
from headrace.gateway.asked import Asked, read
from headrace.gateway.counting import Counting
from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.deployment import TenantSpec
from headrace.model.event import RequestArrived
from headrace.model.ids import ModelName
from headrace.model.request import Request
from headrace.ports.engine import Route
from headrace.ports.tokens import Count, UncountedError
from headrace.units import NS_PER_MS, Tokens
from tests.gateway.scenes import MODEL, Gateway, ObedientEngine, deployment, reach

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Obedient:
    """A tokenizer that counts when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, asyncio.Future[Count]]] = []
        self.closed = 0

    def payload(self, route: Route, body: bytes, prompt: bytes) -> bytes | None:  # noqa: ARG002
        return prompt if route is Route.CHAT else None

    async def count(self, payload: bytes) -> Count:
        answer: asyncio.Future[Count] = asyncio.get_running_loop().create_future()
        self.asked.append((payload, answer))
        return await answer

    def close(self) -> None:
        self.closed += 1

    def say(self, tokens: int, nth: int = -1) -> None:
        self.asked[nth][1].set_result(Count(Tokens(tokens), "obedient"))

    def fail(self, nth: int = -1) -> None:
        self.asked[nth][1].set_exception(UncountedError("no"))


def counting(counter: Obedient, **told: Any) -> Counting:
    spec = TokenCountsSpec(models=(FileTokenizerSpec(model=MODEL, file="f"),), **told)
    known = ModelName(MODEL), counter
    return Counting(spec, {MODEL: known, "alias": known})


def chat(content: object = "hello", model: str = MODEL) -> tuple[Asked, bytes]:
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"model": model, "messages": messages}).encode()
    return read(Route.CHAT, body), body


async def turns() -> None:
    """Let the loop go round: what can happen without time happens."""
    for _ in range(5):
        await asyncio.sleep(0)


def now_ms() -> float:
    return asyncio.get_running_loop().time() * 1_000


async def test_a_count_is_waited_for_and_remembered() -> None:
    counter = Obedient()
    made = counting(counter)
    asking = asyncio.create_task(made.count(*chat()))
    await turns()
    counter.say(7)
    assert await asking == Count(Tokens(7), "obedient")
    assert await made.count(*chat()) == Count(Tokens(7), "obedient")
    assert await made.count(*chat(model="alias")) == Count(Tokens(7), "obedient")
    assert len(counter.asked) == 1
    assert made.results == {(MODEL, "counted"): 1, (MODEL, "cached"): 2}


async def test_a_late_count_is_not_waited_for_but_kept() -> None:
    counter = Obedient()
    made = counting(counter, wait_ms=50)
    began = now_ms()
    assert await made.count(*chat()) is None
    assert now_ms() == pytest.approx(began + 50)
    counter.say(7)
    await turns()
    assert await made.count(*chat()) == Count(Tokens(7), "obedient")
    assert made.results == {(MODEL, "late"): 1, (MODEL, "cached"): 1}


async def test_so_many_are_counted_at_once_and_one_more_does_not_wait() -> None:
    counter = Obedient()
    made = counting(counter, at_once=2, wait_ms=50)
    began = now_ms()
    first = [asyncio.create_task(made.count(*chat(text))) for text in ("one", "two")]
    await turns()
    assert await made.count(*chat("three")) is None
    assert now_ms() == began
    assert await asyncio.gather(*first) == [None, None]
    assert await made.count(*chat("four")) is None, "those that nobody waits for still run"
    assert len(counter.asked) == 2
    counter.fail(0)
    await turns()
    asking = asyncio.create_task(made.count(*chat("five")))
    await turns()
    counter.say(5)
    assert await asking == Count(Tokens(5), "obedient")
    assert made.results == {(MODEL, "busy"): 2, (MODEL, "late"): 2, (MODEL, "counted"): 1}


async def test_equal_prompts_at_once_are_counted_once() -> None:
    counter = Obedient()
    made = counting(counter, at_once=1)
    asking = [asyncio.create_task(made.count(*chat())) for _ in range(3)]
    await turns()
    counter.say(7)
    assert await asyncio.gather(*asking) == [Count(Tokens(7), "obedient")] * 3
    assert len(counter.asked) == 1


async def test_a_caller_that_leaves_while_it_is_counted_takes_nobody_else_with_it() -> None:
    counter = Obedient()
    made = counting(counter)
    leaving, staying = (asyncio.create_task(made.count(*chat())) for _ in range(2))
    await turns()
    leaving.cancel()
    await turns()
    counter.say(7)
    assert await staying == Count(Tokens(7), "obedient")


async def test_a_failure_is_an_estimate_and_is_not_remembered() -> None:
    counter = Obedient()
    made = counting(counter)
    for _ in range(2):
        asking = asyncio.create_task(made.count(*chat()))
        await turns()
        counter.fail()
        assert await asking is None
    assert made.results == {(MODEL, "failed"): 2}


async def test_the_cache_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    counter = Obedient()
    made = counting(counter, cache=2)

    async def ask(text: str) -> bool:
        """Return whether it had to be counted."""
        before = len(counter.asked)
        asking = asyncio.create_task(made.count(*chat(text)))
        await turns()
        if len(counter.asked) > before:
            counter.say(1)
        await asking
        return len(counter.asked) > before

    assert [await ask(text) for text in "aba"] == [True, True, False]
    assert [await ask(text) for text in "caab"] == [True, False, False, True]


@pytest.mark.parametrize(
    ("asked", "result"),
    [
        (chat("x" * 200), "unfit"),
        (chat([PICTURE]), "unfit"),
        (chat(model="other"), None),
    ],
    ids=["long", "picture", "another model"],
)
async def test_what_cannot_be_counted_is_estimated_at_once(
    asked: tuple[Asked, bytes], result: str | None
) -> None:
    counter = Obedient()
    made = counting(counter, prompt_bytes=100)
    assert await made.count(*asked) is None
    assert not counter.asked
    assert made.results == ({} if result is None else {(MODEL, result): 1})


async def test_no_prompt_is_kept() -> None:
    counter = Obedient()
    made = counting(counter)
    asking = asyncio.create_task(made.count(*chat("the secret")))
    await turns()
    counter.say(7)
    await asking
    assert "secret" not in repr((made._cache, made._running))
    other = counting(counter)
    assert other._key(MODEL, b"p") != made._key(MODEL, b"p"), "keyed: nobody can try prompts"


async def test_closing_ends_what_runs_and_closes_each_tokenizer_once() -> None:
    counter = Obedient()
    made = counting(counter)
    assert await made.count(*chat()) is None
    made.close()
    await turns()
    assert counter.asked[0][1].cancelled()
    assert counter.closed == 1


def arrived(gateway: Gateway) -> list[Request]:
    """Return the requests as the plane was told of them."""
    events = (event for _, event in gateway.pages.records())
    return [event.request for event in events if isinstance(event, RequestArrived)]


async def test_the_plane_is_told_the_count_and_decisions_tell_who_counted() -> None:
    counter = Obedient()
    gateway = Gateway(counting=counting(counter))
    caller = gateway.ask(max_tokens=4)
    await turns()
    counter.say(70)
    assert (await caller.done()).status == 200
    (request,) = arrived(gateway)
    assert (request.input_tokens, request.input_margin) == (70, 0)
    assert request.input_revision == "obedient"
    assert request.text is not None, "it teaches what an estimate will go by"
    gateway.finish()


@pytest.mark.parametrize(
    ("limits", "code", "reason"),
    [
        ({"rpm_limit": 1}, "rate_limit_exceeded", "request_rate"),
        ({"tpm_limit": 2_500}, "rate_limit_exceeded", "token_rate"),
        ({"max_parallel_requests": 1}, "concurrency_limit_exceeded", "concurrency"),
        (
            {"budgets": (WindowSpec(unit=Unit.TOKENS, per=Per.HOUR, hard=2_500),)},
            "insufficient_quota",
            "quota_spent",
        ),
    ],
)
async def test_nothing_is_counted_of_a_request_that_a_limit_refuses(
    limits: dict[str, Any], code: str, reason: str
) -> None:
    """Rate and concurrency are looked at first (trap 8); the plane refuses it all the same."""
    counter = Obedient()
    tenants = (TenantSpec(name="free", **limits),)
    gateway = Gateway(
        lambda clock: [ObedientEngine(clock)],
        counting=counting(counter, wait_ms=5_000),
        config=deployment(tenants=tenants),
    )
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    gateway.ask(max_tokens=4)
    await turns()
    counter.say(2_496)
    await turns()
    long = [{"role": "user", "content": "y" * 9_000}]
    refused = await gateway.ask(messages=long, max_tokens=4).done()
    assert (refused.status, refused.error["code"]) == (429, code)
    assert refused.error["headrace"]["reason"] == reason
    assert refused.error["headrace"]["decision_id"] == 3, "a decision like any other"
    assert len(counter.asked) == 1, "nobody counted it"
    request = arrived(gateway)[-1]
    assert (request.input_revision, request.prefix) == ("bytes-4", ())
    assert now_ms() == 0, "nor waited for a count"
    await reach(gateway.clock, 3_600_000)
    engine.end()
    await turns()
    gateway.ask(messages=[{"role": "user", "content": "and again"}], max_tokens=4)
    await turns()
    assert len(counter.asked) == 2, "once the limit lets it in, it is counted again"
    gateway.finish()


@pytest.mark.parametrize(
    "limits",
    [
        {"rpm_limit": 1},
        {"rpm_limit": 1, "tpm_limit": 8_000},
        {
            "budgets": (
                WindowSpec(unit=Unit.REQUESTS, per=Per.DAY, hard=1),
                WindowSpec(unit=Unit.TOKENS, per=Per.DAY, hard=8_000),
            )
        },
    ],
)
async def test_nobody_is_refused_for_good_by_an_estimate(limits: dict[str, Any]) -> None:
    """Its prompt fits, though its bytes look too long: it may come again, and is told when."""
    counter = Obedient()
    config = deployment(tenants=(TenantSpec(name="free", **limits),))
    models = (
        replace(config.models[0], context_limit=8_192, output_limit=1_024),
        *config.models[1:],
    )
    gateway = Gateway(
        lambda clock: [ObedientEngine(clock)],
        counting=counting(counter, wait_ms=5_000),
        config=replace(config, models=models),
    )
    gateway.ask(max_tokens=4)
    await turns()
    counter.say(10)
    await turns()
    wordy = [{"role": "user", "content": "y" * 40_000}]
    again = gateway.ask(
        messages=wordy, max_tokens=4, headers={"x-llm-d-inference-fairness-id": "x"}
    )
    await turns()
    counter.say(5_000)
    refused = await again.done()
    assert refused.status == 429
    assert refused.error["headrace"]["retryable"] is True
    assert int(refused.headers["retry-after"]) >= 1
    assert arrived(gateway)[-1].input_tokens == 5_000
    assert gateway.app.ignored == {"fairness": 1}, "and heard once"
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    engine.end()
    gateway.finish()


async def test_what_costs_nothing_is_looked_at_though_the_budget_is_at_its_end() -> None:
    """A budget that is used up to the last cent refuses nobody who needs none of it."""
    counter = Obedient()
    budget = WindowSpec(unit=Unit.USD, per=Per.DAY, hard=1e-9)
    gateway = Gateway(
        lambda clock: [ObedientEngine(clock)],
        counting=counting(counter, wait_ms=5_000),
        config=deployment(tenants=(TenantSpec(name="free", budgets=(budget,)),)),
    )
    gateway.ask(max_tokens=4)
    await turns()
    counter.say(10)
    await turns()
    (request,) = arrived(gateway)
    assert (request.input_tokens, request.input_revision) == (10, "obedient")
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    assert len(engine.calls) == 1
    engine.end()
    gateway.finish()


async def test_without_a_count_in_time_the_request_goes_on_by_its_estimate() -> None:
    counter = Obedient()
    gateway = Gateway(counting=counting(counter, wait_ms=50))
    caller = gateway.ask(max_tokens=4)
    await reach(gateway.clock, 60)
    (request,) = arrived(gateway)
    assert request.input_revision == "bytes-4"
    assert (await caller.done()).status == 200
    (when, _) = next(one for one in gateway.pages.records() if isinstance(one[1], RequestArrived))
    assert when == 50 * NS_PER_MS
    assert gateway.app.token_counts == {(MODEL, "late"): 1}
    gateway.finish()


async def test_a_prompt_that_takes_forever_holds_nobody_elses_up() -> None:
    counter = Obedient()
    gateway = Gateway(counting=counting(counter, wait_ms=5_000, at_once=1))
    huge = gateway.ask(messages=[{"role": "user", "content": "x" * 100_000}], max_tokens=1)
    await turns()
    other = await gateway.ask(max_tokens=1).done()
    assert other.status == 200
    assert now_ms() < 5_000
    assert len(counter.asked) == 1
    await huge.done()
    whens = [when for when, event in gateway.pages.records() if isinstance(event, RequestArrived)]
    assert whens[-1] == 5_000 * NS_PER_MS
    gateway.finish()
