"""The emulated engine over HTTP, judged by a client we did not write and by its bytes."""

import asyncio
from typing import Any

import openai
import pytest

from headrace.adapters.engines.answer import drawn_length
from headrace.adapters.engines.server.attempts import Answer
from headrace.adapters.engines.server.engine import EngineServer, EngineSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import listen
from headrace.model.ids import RequestId
from tests.adapters.engine_server.serving import ENDLESS, MODEL, PROFILE, chat, serving

pytestmark = [pytest.mark.asyncio, pytest.mark.service]
HELLO: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]


async def test_a_chat_is_answered_whole_and_in_events() -> None:
    async with serving() as served, served.sdk() as sdk:
        whole = await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6)
        content = whole.choices[0].message.content
        assert content is not None
        assert len(content.split()) == 6
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        assert whole.usage.prompt_tokens == -(-len("<|user|>Hello there") // 4)

        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_completion_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "priority": 3, "vllm_xargs": {"deadline_ms": 5}},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert len(text.split()) == 30
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert all(one.usage is None for one in chunks[:-1])
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 30


async def test_a_completion_is_answered_whole_and_in_events() -> None:
    async with serving() as served, served.sdk() as sdk:
        whole = await sdk.completions.create(model=MODEL, prompt=["x" * 41], max_tokens=4)
        assert len(whole.choices[0].text.split()) == 4
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.total_tokens) == (11, 15)
        assert whole.id.startswith("cmpl-")

        stream = await sdk.completions.create(
            model=MODEL, prompt=[1, 2, 3], max_tokens=9, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert len("".join(one.choices[0].text for one in chunks).split()) == 9
        assert chunks[-1].choices[0].finish_reason == "length"


async def test_an_answer_stops_where_it_would_unless_told_otherwise() -> None:
    drawn = drawn_length(7, RequestId(1))
    for fields, tokens, finish in (
        ({}, drawn, "stop"),
        ({"max_tokens": drawn + 1}, drawn, "stop"),
        ({"max_tokens": drawn - 1}, drawn - 1, "length"),
        ({"max_tokens": drawn + 1, "ignore_eos": True}, drawn + 1, "length"),
    ):
        async with serving(emulator={"seed": 7}) as served:
            reply = (await served.chat(**fields)).json
            assert reply["usage"]["completion_tokens"] == tokens
            assert reply["choices"][0]["finish_reason"] == finish


async def test_usage_is_told_in_every_event_if_asked_for() -> None:
    async with serving() as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = (await served.chat(stream=True, stream_options=options, max_tokens=50)).events
        made = [event["usage"]["completion_tokens"] for event in events]
        assert made == sorted(made)
        assert (made[0], made[-1]) == (0, 50)

        events = (await served.chat(stream=True, max_tokens=2)).events
        assert all("usage" not in event for event in events)


async def test_the_smaller_routes_say_what_vllm_says() -> None:
    async with serving(max_model_len=4_096) as served:
        async with served.sdk() as sdk:
            assert [model.id async for model in sdk.models.list()] == [MODEL]
        (row,) = (await served.get("/v1/models")).json["data"]
        assert row["max_model_len"] == 4_096
        health = await served.get("/health")
        assert (health.status, health.body) == (200, b"")
        assert (await served.get("/load")).json == {"server_load": 0}
        assert (await served.get("/version")).json["version"].startswith("0.32.0+headrace")
        assert (await served.get("/nowhere")).status == 404
        assert (await served.get("/v1/completions")).status == 405


async def test_the_tokens_told_are_the_prompt_they_came_from() -> None:
    async with serving() as served:
        prompt = "Zwölf Boxkämpfer jagen Viktor" * 100
        told = (await served.post("/tokenize", {"model": MODEL, "prompt": prompt})).json
        assert told["count"] == len(told["tokens"]) == -(-len(prompt.encode()) // 4)
        assert told["max_model_len"] == 131_072

        asked = {"model": MODEL, "max_tokens": 1}
        first = (await served.post("/v1/completions", {**asked, "prompt": prompt})).json
        again = (await served.post("/v1/completions", {**asked, "prompt": told["tokens"]})).json
        assert first["usage"]["prompt_tokens"] == again["usage"]["prompt_tokens"] == told["count"]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (told["count"] - 1) // 16 * 16

        chatty = (await served.post("/tokenize", {"messages": HELLO})).json
        whole = (await served.chat(messages=HELLO, max_tokens=1)).json
        assert chatty["count"] == whole["usage"]["prompt_tokens"]


async def test_a_prompt_seen_before_is_found_in_the_cache() -> None:
    async def cached(**fields: Any) -> int:
        usage = (await served.chat(max_tokens=1, **fields)).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async with serving() as served:
        first = [{"role": "user", "content": "a" * 5_000}]
        then = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        tokens = -(-len("<|user|>" + "a" * 5_000) // 4)
        assert await cached(messages=first) == 0
        assert await cached(messages=first) == (tokens - 1) // 16 * 16
        assert await cached(messages=then) == tokens // 512 * 512
        assert await cached(messages=first, cache_salt="of another tenant") == 0
        hits = await served.metric("prefix_cache_hits_total")
        assert hits == (tokens - 1) // 16 * 16 + tokens // 512 * 512


async def test_a_replayed_prompt_is_as_long_as_it_is_said_to_be() -> None:
    async with serving() as served:
        for _ in range(2):  # the text of a stand-in is no prefix that could be found again
            reply = await served.post(
                "/v1/chat/completions", chat(max_tokens=1), **{"x-headrace-replay-input": "9000"}
            )
            usage = reply.json["usage"]
            assert usage["prompt_tokens"] == 9_000
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        for wrong in ("0", "-1", "many", "99999999999"):
            reply = await served.post(
                "/v1/chat/completions", chat(), **{"x-headrace-replay-input": wrong}
            )
            assert reply.status == 400


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"model": "other"}, 404, "NotFoundError", "model"),
        ({"n": 2}, 400, "BadRequestError", "n"),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"max_tokens": 4_095}, 400, "BadRequestError", "input_tokens"),
        ({"messages": []}, 400, "BadRequestError", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, 400, "BadRequestError", None),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options"),
    ],
)
async def test_what_cannot_be_served_is_refused_as_vllm_does(
    fields: dict[str, Any], status: int, kind: str, param: str | None
) -> None:
    async with serving(max_model_len=4_096) as served:
        reply = await served.chat(**fields)
        fault = reply.json["error"]
        assert (reply.status, fault["code"], fault["type"]) == (status, status, kind)
        assert fault["message"]
        assert param is None or fault["param"] == param
        async with served.sdk() as sdk:
            with pytest.raises(openai.APIStatusError) as refused:
                await sdk.chat.completions.create(**chat(**fields))
            assert refused.value.status_code == status


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b"{"),
        ("/v1/completions", b"\xff"),
        ("/v1/completions", {"prompt": ["one", "two"]}),
        ("/tokenize", {}),
        ("/abort_requests", {}),
        ("/faults", b"["),
        ("/faults", {"stal": 1}),
    ],
)
async def test_a_body_that_makes_no_sense_is_refused(path: str, body: Any) -> None:
    async with serving() as served:
        reply = await served.post(path, body)
        assert (reply.status, reply.json["error"]["code"]) == (400, 400)


async def test_too_many_requests_get_503_and_a_stream_gets_it_as_an_event() -> None:
    async with serving(speed=1, max_num_queued_reqs=1) as served, served.sdk() as sdk:
        talk = await served.talk("POST", "/v1/chat/completions", chat(stream=True, **ENDLESS))
        await talk.until(b"delta")

        whole = await served.chat(max_tokens=1)
        assert (whole.status, whole.json["error"]["code"]) == (503, 503)
        assert "retry-after" not in whole.headers

        stream = await served.chat(stream=True)
        assert stream.status == 200
        assert [event["error"]["code"] for event in stream.events] == [503]
        with pytest.raises(openai.APIError):
            async for _ in await sdk.chat.completions.create(**chat(stream=True)):
                pass
        assert await served.metric("admission_rejections_total") == 3
        talk.leave()


async def test_a_caller_that_leaves_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(speed=1) as served:
        attempts = served.server.attempts
        leave, left = attempts.leave, asyncio.Event()

        def noticed(answer: Answer) -> None:
            leave(answer)
            left.set()

        monkeypatch.setattr(attempts, "leave", noticed)
        for fields in ({"stream": True}, {"stream": False}):
            left.clear()
            body = chat(**fields, **ENDLESS)
            talk = await served.talk("POST", "/v1/chat/completions", body)
            while not await served.metric("num_requests_running"):
                pass
            assert await served.metric("kv_cache_usage_perc") > 0
            assert (await served.get("/load")).json == {"server_load": 1}
            talk.leave()
            await left.wait()
            assert not attempts.count
            while await served.metric("num_requests_running"):
                pass  # to the end of the step that it is in
            assert await served.metric("kv_cache_usage_perc") == 0
        assert await served.metric("request_success_total", finished_reason="abort") == 0


async def test_a_caller_that_leaves_while_it_waits_is_forgotten() -> None:
    async with serving(speed=1) as served:
        long = {"messages": [{"role": "user", "content": "x" * 400_000}], "max_tokens": 1}
        first = await served.talk("POST", "/v1/chat/completions", chat(**long))
        second = await served.talk("POST", "/v1/chat/completions", chat(**long))
        while await served.metric("num_requests_waiting") != 1:
            pass
        second.leave()
        while await served.metric("num_requests_waiting"):
            pass
        assert await served.metric("num_requests_running") == 1
        first.leave()


async def test_a_caller_that_leaves_before_it_has_asked_is_nobodys_request() -> None:
    async with serving() as served:
        unfinished = {"Content-Length": "1000"}
        talk = await served.talk("POST", "/v1/chat/completions", b"{", unfinished)
        while (await served.get("/load")).json != {"server_load": 1}:
            pass
        talk.leave()
        while (await served.get("/load")).json != {"server_load": 0}:
            pass
        assert await served.metric("prompt_tokens_total") == 0


async def test_an_abort_by_id_hits_that_request_alone() -> None:
    async with serving(speed=1) as served:

        async def talk(path: str, told: str, **fields: Any) -> Any:
            return await served.talk("POST", path, {**fields, **ENDLESS}, {"X-Request-Id": told})

        one = await talk("/v1/chat/completions", "a", **chat(stream=True))
        other = await talk("/v1/chat/completions", "a1", **chat(stream=True))
        plain = await talk("/v1/completions", "p", prompt="x", stream=False)
        await one.until(b"delta")
        await other.until(b"delta")

        named = {"request_ids": ["chatcmpl-a", "nobody"]}
        assert (await served.post("/abort_requests", named)).json == {"aborted": 2}
        reply = await one.rest()
        assert reply.headers["x-request-id"] == "a"
        assert reply.events[-1]["id"] == "chatcmpl-a"
        assert reply.events[-1]["choices"][0]["finish_reason"] == "abort"

        while served.server.attempts.count < 2:
            await served.get("/load")
        await served.post("/inference/v1/abort_requests", {"request_ids": ["cmpl-p-0"]})
        assert (await plain.rest()).json["choices"][0]["finish_reason"] == "abort"
        assert served.server.attempts.count == 1
        other.leave()


async def test_speed_divides_the_time_of_every_step() -> None:
    gaps = []
    for speed in (20, 200):
        async with serving(speed=speed) as served:
            await served.chat(ignore_eos=True, max_tokens=65)
            assert await served.metric("inter_token_latency_seconds_count") == 64
            gaps.append(await served.metric("inter_token_latency_seconds_sum"))
    # Gaps are those that the engine planned: no clock had a say in them.
    assert gaps[0] == pytest.approx(10 * gaps[1], rel=1e-3)
    assert gaps[0] == pytest.approx(64 * 6.07e-3 / 20, rel=0.05)


async def test_a_server_that_stops_lets_go_of_everybody() -> None:
    async with serving(speed=1) as served:
        body = chat(stream=True, **ENDLESS)
        talk = await served.talk("POST", "/v1/chat/completions", body)
        await talk.until(b"delta")
        served.server.stop()
        assert not (await talk.rest()).complete


async def test_a_bug_of_ours_ends_the_process_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = EngineSpec(profile=PROFILE)
    server = EngineServer(spec, LoopClock(asyncio.get_running_loop()))
    running = asyncio.create_task(server.serve(listen("127.0.0.1", 0)))
    server.fail(AssertionError("a state that cannot be"))
    assert await running is False
    assert "a state that cannot be" in caplog.text
