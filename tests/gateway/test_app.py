"""The HTTP surface in virtual time: shapes of answers and errors, and callers that leave."""

import pytest

from headrace.config.schema import ServerSpec
from headrace.model.deployment import TenantSpec
from headrace.model.event import ReplicaDown
from headrace.model.ids import Incarnation, ReplicaName
from headrace.model.slo import Outcome
from tests.gateway.scenes import (
    KEYS,
    MODEL,
    Caller,
    Gateway,
    ObedientEngine,
    assert_books_closed,
    deployment,
    reach,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def obedient() -> tuple[Gateway, ObedientEngine]:
    gateway = Gateway(lambda clock: [ObedientEngine(clock)])
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    return gateway, engine


async def test_an_answer_in_one_piece() -> None:
    gateway = Gateway()
    caller = await gateway.ask(max_tokens=5).done()
    assert caller.status == 200
    answer = caller.json
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"].split()) == 5
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert caller.headers["content-length"] == str(len(caller.content))
    assert caller.headers["x-headrace-decision-id"] == "1"
    assert caller.headers["x-headrace-queue-ms"] == "0.000"
    assert caller.headers["x-request-id"].startswith("req-")
    gateway.finish()


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream(*, usage: bool) -> None:
    gateway = Gateway()
    caller = await gateway.ask(
        stream=True, max_completion_tokens=40, stream_options={"include_usage": usage}
    ).done()
    assert caller.status == 200
    assert caller.headers["content-type"].startswith("text/event-stream")
    *chunks, done = caller.events
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    if usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 40
        assert all(chunk.get("usage") is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert len("".join(delta.get("content", "") for delta in deltas).split()) == 40
    assert len(deltas) > 5, "tokens come as they are made, not all at the end"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    gateway.finish()


async def test_nothing_is_sent_before_the_first_token() -> None:
    gateway, engine = obedient()
    caller = gateway.ask(stream=True)
    await reach(gateway.clock, 1_500)
    assert caller.status is None
    engine.say("x")
    await caller.moved()
    assert caller.headers["content-type"].startswith("text/event-stream")
    engine.end()
    assert (await caller.done()).status == 200
    gateway.finish()


@pytest.mark.parametrize(
    ("asked", "status", "code", "param"),
    [
        ({"body": b"{"}, 400, "invalid_value", None),
        ({"body": b'{"model":"m","messages":[]}'}, 400, "invalid_value", "messages"),
        ({"body": {"model": "m"}}, 400, "invalid_value", "messages"),
        ({"max_tokens": "5"}, 400, "invalid_value", "max_tokens"),
        ({"body": b'{"model":"m","messages":[{"role":"\\ud800"}]}'}, 400, "invalid_value", None),
        ({"headers": {"x-slo-ttft-ms": "soon"}}, 400, "invalid_value", "x-llm-d-slo-ttft-ms"),
        ({"max_tokens": 200_000}, 400, "invalid_value", "max_tokens"),
        ({"n": 2}, 400, "unsupported_parameter", "n"),
        ({"key": None}, 401, "invalid_api_key", None),
        ({"key": "sk-unknown"}, 401, "invalid_api_key", None),
        ({"key": KEYS["narrow"]}, 403, "model_not_allowed", "model"),
        ({"model": "nope"}, 404, "model_not_found", "model"),
        ({"path": "/v1/audio/speech"}, 404, "not_found", None),
        ({"method": "GET"}, 405, "method_not_allowed", None),
        ({"headers": {"x-llm-d-inference-ttl": "5"}}, 400, "invalid_value", "x-llm-d-inference-ttl"),
        ({"headers": {"content-length": "99999999"}}, 413, "request_too_large", None),
        ({"body": b" " * 9_000_000}, 413, "request_too_large", None),
        ({"key": KEYS["narrow"], "model": "other", "max_tokens": 200}, 429, "insufficient_quota", None),
        ({"headers": {"x-slo-ttft-ms": "1"}}, 400, "invalid_value", "x-slo-ttft-ms"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_and_not_to_be_repeated(
    asked: dict[str, object], status: int, code: str, param: str | None
) -> None:
    gateway = Gateway()
    caller = await gateway.ask(**asked).done()
    assert caller.status == status
    error = caller.error
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"]
    assert error["message"]
    assert error["headrace"]["retryable"] is False
    assert caller.headers["x-should-retry"] == "false"
    assert "retry-after" not in caller.headers
    if status == 405:
        assert caller.headers["allow"] == "POST"
    gateway.finish()


NESTED = 20_000


@pytest.mark.parametrize(
    "field",
    ["x", "tools", "messages", "stream_options", "metadata"],
    ids=lambda name: f"in {name}",
)
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"y":', "}")], ids=["lists", "objects"])
async def test_a_body_nested_without_end_is_refused(field: str, left: str, right: str) -> None:
    gateway = Gateway()
    deep = left * NESTED + "1" + right * NESTED
    whole = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}],"{field}":{deep}}}'
    for body in (whole, whole.replace('"content":"hi"', f'"content":"hi","y":{deep}')):
        caller = await gateway.ask(body=body.encode()).done()
        assert (caller.status, caller.error["code"]) == (400, "invalid_value")
    gateway.finish()


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"])
@pytest.mark.parametrize(
    ("told", "class_ms", "status"),
    [("1", 2_000.0, 400), ("1", 2.0, 400), ("60000", 1.0, 503), (None, 1.0, 503)],
    ids=["own", "own, tighter than a class that is impossible too", "wider", "none"],
)
async def test_a_bound_that_nothing_can_meet_is_the_fault_of_whose_it_is(
    header: str, told: str | None, class_ms: float, status: int
) -> None:
    gateway = Gateway(config=deployment(ttft_ms=class_ms))
    caller = await gateway.ask(headers={} if told is None else {header: told}).done()
    assert caller.status == status
    detail = caller.error["headrace"]
    assert (detail["reason"], detail["retryable"]) == ("deadline_impossible", False)
    assert "measured" not in detail
    assert ("x-llm-d-request-dropped-reason" in caller.headers) is (status == 503)
    gateway.finish()


async def test_the_callers_own_limits_are_429_with_numbers_and_an_honest_wait() -> None:
    gateway = Gateway()
    await gateway.ask(key=KEYS["slow"], max_tokens=1).done()
    caller = await gateway.ask(key=KEYS["slow"], max_tokens=1).done()
    assert caller.status == 429
    assert caller.error["type"] == "rate_limit_error"
    assert caller.error["code"] == "rate_limit_exceeded"
    detail = caller.error["headrace"]
    assert (detail["gate"], detail["outcome"], detail["reason"]) == (
        "budget",
        "reject",
        "request_rate",
    )
    assert (detail["measured"], detail["threshold"], detail["margin"]) == (1, 0, -1)
    assert detail["decision_id"] == int(caller.headers["x-headrace-decision-id"])
    # A minute less what passed, stretched by a quarter: the tests' draw is the largest.
    assert 74 <= int(caller.headers["retry-after"]) <= 75
    assert 73_000 < int(caller.headers["retry-after-ms"]) <= 75_000
    assert caller.headers["x-should-retry"] == "false", "SDKs would not wait that long"
    gateway.finish()


async def test_concurrency_is_429_until_one_is_over() -> None:
    gateway, engine = obedient()
    first = gateway.ask(key=KEYS["single"])
    second = await gateway.ask(key=KEYS["single"]).done()
    assert (second.status, second.error["code"]) == (429, "concurrency_limit_exceeded")
    assert int(second.headers["retry-after"]) >= 1
    engine.say("x")
    engine.end()
    await first.done()
    third = gateway.ask(key=KEYS["single"])
    await reach(gateway.clock, 1)
    engine.end()
    assert (await third.done()).status == 200
    gateway.finish()


async def test_no_ready_replica_is_503() -> None:
    gateway = Gateway(lambda _: [], config=deployment(replicas=0))
    caller = await gateway.ask().done()
    assert (caller.status, caller.error["code"]) == (503, "no_ready_replica")
    detail = caller.error["headrace"]
    assert (detail["gate"], detail["retryable"]) == ("deadline", True)
    assert "measured" not in detail, "our own gates keep their numbers to themselves"
    assert int(caller.headers["retry-after"]) >= 1
    assert caller.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    gateway.finish()


async def test_a_deadline_that_passes_in_the_queue_is_504() -> None:
    gateway, engine = obedient()
    blocking = gateway.ask(messages=[{"role": "user", "content": "x" * 72_000}])
    late = await gateway.ask(stream=True).done()
    assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    assert late.error["headrace"]["outcome"] == "fail"
    assert late.headers["x-should-retry"] == "false"
    assert late.headers["content-type"] == "application/json"
    engine.end()
    await blocking.done()
    gateway.finish()


async def test_an_engine_that_fails_before_a_byte_is_502() -> None:
    gateway, engine = obedient()
    caller = gateway.ask(stream=True)
    await reach(gateway.clock, 1)
    engine.end(outcome=Outcome.ERROR)
    await caller.done()
    assert (caller.status, caller.error["code"]) == (502, "upstream_error")
    assert int(caller.headers["retry-after"]) >= 1
    gateway.finish()


async def test_a_failure_mid_stream_is_an_event_and_never_a_clean_end() -> None:
    gateway, engine = obedient()
    caller = gateway.ask(stream=True)
    await reach(gateway.clock, 1)
    engine.say('data: {"choices": []}\n\n')
    await caller.moved()
    gateway.driver._post(ReplicaDown(replica=ReplicaName("p-0"), incarnation=Incarnation(1)))
    await caller.done()
    *chunks, error, done = caller.events
    assert chunks == [{"choices": []}]
    assert error["error"]["code"] == "upstream_error"
    assert error["error"]["headrace"]["reason"] == "replica_lost"
    assert done == "[DONE]"
    engine.say("late")
    gateway.finish()


async def test_a_failure_before_the_first_byte_went_out_still_has_its_status() -> None:
    gateway, engine = obedient()
    caller = gateway.ask(stream=True)
    await reach(gateway.clock, 1)
    engine.say("one two")
    gateway.driver._post(ReplicaDown(replica=ReplicaName("p-0"), incarnation=Incarnation(1)))
    await caller.done()
    assert (caller.status, caller.error["code"]) == (502, "upstream_error")
    gateway.finish()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "sent", "mid-stream"])
async def test_a_caller_that_leaves_frees_everything(phase: str, *, stream: bool) -> None:
    gateway, engine = obedient()
    if phase == "queued":
        blocking = gateway.ask(messages=[{"role": "user", "content": "x" * 72_000}])
        await reach(gateway.clock, 1)
    caller = gateway.ask(stream=stream)
    await reach(gateway.clock, 2)
    if phase == "mid-stream":
        engine.say("one")
    caller.leave()
    await caller.done()
    if phase == "queued":
        assert not engine.aborted
        blocking.leave()
        await blocking.done()
    assert engine.aborted == [1]
    assert_books_closed(gateway.driver.plane)
    gateway.finish()


async def test_a_handler_that_is_cancelled_frees_everything() -> None:
    gateway, engine = obedient()
    caller = gateway.ask()
    await reach(gateway.clock, 1)
    caller.task.cancel()
    await reach(gateway.clock, 2)
    assert caller.task.cancelled()
    assert engine.aborted == [1]
    gateway.finish()


async def test_a_caller_that_leaves_before_its_body_was_read_is_nobody() -> None:
    gateway = Gateway()
    caller = gateway.ask()
    caller._incoming.get_nowait()
    caller.leave()
    await caller.done()
    assert caller.status is None
    assert not gateway.driver.recent
    gateway.finish()


async def test_models_are_those_that_the_key_may_use() -> None:
    gateway = Gateway()
    every = await Caller(gateway.app, path="/v1/models", method="GET").done()
    assert [model["id"] for model in every.json["data"]] == ["m", "other"]
    assert every.json["data"][0]["object"] == "model"
    narrow = await Caller(gateway.app, path="/v1/models", method="GET", key=KEYS["narrow"]).done()
    assert [model["id"] for model in narrow.json["data"]] == ["other"]
    stranger = await Caller(gateway.app, path="/v1/models", method="GET", key=None).done()
    assert stranger.status == 401
    health = await Caller(gateway.app, path="/health", method="GET", key=None).done()
    assert (health.status, health.json) == (200, {"status": "ok"})
    gateway.finish()


@pytest.mark.parametrize(
    ("told", "kept"), [("my-id_7", True), ("has space", False), ("x" * 200, False)]
)
async def test_a_plain_request_id_is_echoed(told: str, *, kept: bool) -> None:
    gateway = Gateway()
    caller = await gateway.ask(headers={"x-request-id": told}, max_tokens=1).done()
    assert (caller.headers["x-request-id"] == told) is kept
    gateway.finish()


@pytest.mark.parametrize("trusted", [True, False])
async def test_replay_headers_are_believed_only_from_a_trusted_bench(*, trusted: bool) -> None:
    gateway = Gateway(server=ServerSpec(trusted_replay=trusted))
    told = {"x-headrace-replay-output": "3", "x-headrace-replay-input": "1000"}
    caller = await gateway.ask(headers=told).done()
    usage = caller.json["usage"]
    assert (usage["prompt_tokens"] == 1_000) is trusted
    assert (usage["completion_tokens"] == 3) is trusted
    if trusted:
        assert caller.json["choices"][0]["finish_reason"] == "stop"
    gateway.finish()


async def test_a_prompt_seen_before_is_found_in_the_prefix_cache() -> None:
    gateway = Gateway()
    said = [{"role": "user", "content": "word " * 2_000}]
    first = await gateway.ask(messages=said, max_tokens=4).done()
    assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = await gateway.ask(
        messages=[*said, {"role": "user", "content": "and now?"}], max_tokens=4
    ).done()
    assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= 2_048
    salted = await gateway.ask(messages=said, max_tokens=4, cache_salt="mine").done()
    assert salted.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    gateway.finish()


async def test_a_tighter_first_token_bound_of_the_caller_is_kept() -> None:
    gateway = Gateway()
    await gateway.ask(headers={"x-slo-ttft-ms": "900"}, max_tokens=1).done()
    await gateway.ask(
        headers={"x-slo-ttft-ms": "900", "x-llm-d-slo-ttft-ms": "700"}, max_tokens=1
    ).done()
    await gateway.ask(headers={"x-slo-ttft-ms": "9000"}, max_tokens=1).done()
    bounds = [row.bounds.ttft_ns for row in gateway.driver.recent]
    assert bounds == [900_000_000, 700_000_000, 2_000_000_000]
    gateway.finish()


async def test_beyond_its_open_requests_the_gateway_refuses_at_once() -> None:
    gateway = Gateway(
        lambda clock: [ObedientEngine(clock)],
        server=ServerSpec(concurrency=1),
        config=deployment(tenants=(TenantSpec(name="free"),)),
    )
    first = gateway.ask()
    await reach(gateway.clock, 1)
    second = await gateway.ask().done()
    assert (second.status, second.error["headrace"]["reason"]) == (503, "open_requests")
    first.leave()
    await first.done()
    gateway.finish()
