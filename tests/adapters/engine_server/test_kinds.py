"""Every path that the engine works for: the same answer in events and whole, the same faults."""

import asyncio
import json
from typing import Any

import pytest

from headrace.adapters.engines.server.faults import draws_error
from tests.adapters.engine_server.serving import KINDS, Reply, asking, serving

pytestmark = [pytest.mark.asyncio, pytest.mark.service]
CHAT, PLAIN, RESPONSES, MESSAGES, EMBEDDINGS = KINDS
STREAMED = (CHAT, PLAIN, RESPONSES, MESSAGES)
NEW = (RESPONSES, MESSAGES, EMBEDDINGS)
OPENING = {CHAT: 1, PLAIN: 0, RESPONSES: 4, MESSAGES: 2}
"""Events before the first token."""
CLOSING = {CHAT: 2, PLAIN: 2, RESPONSES: 4, MESSAGES: 3}
"""Events after the last one, usage and end mark included."""
OPTIONS: dict[str, Any] = {"stream_options": {"include_usage": True}}


def body(path: str, **fields: Any) -> dict[str, Any]:
    """Return a request for a stream; chats and completions have to ask for their usage."""
    options = OPTIONS if path in (CHAT, PLAIN) else {}
    return asking(path, stream=True, **options, **fields)


def streamed(path: str, reply: Reply) -> tuple[str, Any]:
    """Return the text of a stream and its usage."""
    if path == RESPONSES:
        events = reply.named
        text = "".join(event["delta"] for event in events if "delta" in event)
        return text, events[-1]["response"]["usage"]
    if path == MESSAGES:
        events = reply.named
        text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
        return text, events[-2]["usage"]
    *events, last = reply.events
    choices = [event["choices"][0] for event in events]
    if path == CHAT:
        return "".join(choice["delta"]["content"] for choice in choices), last["usage"]
    return "".join(choice["text"] for choice in choices), last["usage"]


def whole(path: str, reply: Reply) -> tuple[str, Any]:
    """Return the text of an answer in one piece and its usage."""
    told = reply.json
    match path:
        case "/v1/responses":
            text = told["output"][0]["content"][0]["text"]
        case "/v1/messages":
            text = told["content"][0]["text"]
        case "/v1/chat/completions":
            text = told["choices"][0]["message"]["content"]
        case _:
            text = told["choices"][0]["text"]
    return text, told["usage"]


@pytest.mark.parametrize("path", STREAMED)
async def test_an_answer_is_the_same_whole_and_in_events(path: str) -> None:
    async with serving(emulator={"seed": 5}) as served:
        reply = await served.post(path, body(path, most=40))
        assert reply.headers["content-type"].startswith("text/event-stream")
        text, usage = streamed(path, reply)
    async with serving(emulator={"seed": 5}) as served:
        assert whole(path, await served.post(path, asking(path, most=40))) == (text, usage)
    assert len(text.split()) == 40
    made = usage.get("output_tokens", usage.get("completion_tokens"))
    asked = usage.get("input_tokens", usage.get("prompt_tokens"))
    assert (made, asked) == (40, 3 if path == PLAIN else 5)


@pytest.mark.parametrize("path", KINDS)
async def test_a_prompt_seen_before_is_found_in_the_cache_whoever_asks(path: str) -> None:
    long = "x" * 4_000
    fields = {CHAT: "messages", MESSAGES: "messages", PLAIN: "prompt"}
    said = [{"role": "user", "content": long}]
    prompt = said if path in (CHAT, MESSAGES) else long
    async with serving() as served:
        for expected in (0, 1):
            asked = asking(path, most=1) | {fields.get(path, "input"): prompt}
            told = (await served.post(path, asked)).json["usage"]
            cached = await served.metric("prefix_cache_hits_total")
            assert bool(cached) == bool(expected)
            if path == RESPONSES:
                assert told["input_tokens_details"]["cached_tokens"] == cached
            elif path == MESSAGES:
                assert told["cache_read_input_tokens"] == cached
            elif path != EMBEDDINGS:
                assert told["prompt_tokens_details"]["cached_tokens"] == cached


async def test_embeddings_take_a_prefill_and_a_token() -> None:
    async with serving() as served:
        asked = asking(EMBEDDINGS, dimensions=8, stream=True)
        told = (
            await served.post(EMBEDDINGS, {**asked, "input": ["one", "another one", "one"]})
        ).json
        one, other, again = (row["embedding"] for row in told["data"])
        assert one == again != other
        assert told["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        assert await served.metric("generation_tokens_total") == 1
        assert await served.metric("prompt_tokens_total") == 5


async def test_an_input_is_the_same_however_it_is_given() -> None:
    async with serving() as served:
        ids = (await served.post("/tokenize", {"prompt": "four"})).json["tokens"]
        replies = [
            (await served.post(EMBEDDINGS, asking(EMBEDDINGS, input=given))).json
            for given in ("four", ["four"], ids, [ids])
        ]
        assert all(reply["data"] == replies[0]["data"] for reply in replies)
        assert {reply["usage"]["prompt_tokens"] for reply in replies} == {1}


@pytest.mark.parametrize(
    ("path", "fields", "prompt"),
    [
        (RESPONSES, {"input": "x", "instructions": "be"}, "<|system|>be<|user|>x"),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "out"},
                ],
                "tools": [{"name": "f"}],
            },
            '[{"name": "f"}]<|user|>x<|function_call|>{}<|function_call_output|>out',
        ),
        (
            MESSAGES,
            {
                "system": [{"type": "text", "text": "be"}],
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": [{"type": "tool_use", "input": {"a": 1}}]},
                    {"role": "user", "content": [{"type": "tool_result", "content": "out"}]},
                ],
            },
            '<|system|>be<|user|>x<|assistant|>{"a": 1}<|user|>out',
        ),
    ],
)
async def test_everything_that_is_said_counts(
    path: str, fields: dict[str, Any], prompt: str
) -> None:
    async with serving() as served:
        usage = (await served.post(path, asking(path, most=1) | fields)).json["usage"]
        assert usage["input_tokens"] == -(-len(prompt) // 4)


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (RESPONSES, {"input": []}, 400, "input"),
        (RESPONSES, {"max_output_tokens": 0}, 400, "max_output_tokens"),
        (RESPONSES, {"max_output_tokens": 4_095}, 400, "input_tokens"),
        (RESPONSES, {"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        (RESPONSES, {"model": "other"}, 404, "model"),
        (MESSAGES, {"max_tokens": None}, 400, None),
        (MESSAGES, {"max_tokens": 4_095}, 400, None),
        (MESSAGES, {"messages": []}, 400, None),
        (MESSAGES, {"model": "other"}, 404, None),
        (EMBEDDINGS, {"input": []}, 400, "input"),
        (EMBEDDINGS, {"input": [1, "one"]}, 400, "input"),
        (EMBEDDINGS, {"input": ["one", 1]}, 400, "input"),
        (EMBEDDINGS, {"input": "x" * 20_000}, 400, "input_tokens"),
        (EMBEDDINGS, {"dimensions": 0}, 400, "dimensions"),
        (EMBEDDINGS, {"encoding_format": "bytes"}, 400, "encoding_format"),
        (EMBEDDINGS, {"model": "other"}, 404, "model"),
    ],
)
async def test_what_cannot_be_served_is_refused_on_every_path(
    path: str, fields: dict[str, Any], status: int, param: str | None
) -> None:
    async with serving(max_model_len=4_096) as served:
        reply = await served.post(path, asking(path, most=1) | fields)
        assert reply.status == status
        fault = reply.json["error"]
        assert fault["message"]
        assert fault["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]
        if path == MESSAGES:
            assert reply.json["type"] == "error"
        else:
            assert (fault["code"], fault["param"]) == (status, param)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_full_engine_says_so_in_the_words_of_the_path(path: str) -> None:
    async with serving(speed=1, max_num_queued_reqs=1) as served:
        talk = await served.talk("POST", path, body(path, most=100_000))
        await talk.until(b"delta")
        assert (await served.post(path, asking(path, most=1))).status == 503
        stream = await served.post(path, body(path, most=1))
        assert stream.status == 200
        (event,) = stream.named
        assert event["type"] == "error"
        assert b"[DONE]" not in stream.body
        talk.leave()


@pytest.mark.parametrize(
    ("path", "name"), [(RESPONSES, "resp_a"), (MESSAGES, "chatcmpl-a"), (EMBEDDINGS, "embd-a")]
)
async def test_an_answer_has_the_id_of_its_request(path: str, name: str) -> None:
    async with serving() as served:
        reply = await served.post(path, asking(path, most=1), **{"X-Request-Id": "a"})
        assert reply.headers["x-request-id"] == "a"
        assert reply.json["id"] == name


@pytest.mark.parametrize(
    ("path", "name", "end"),
    [
        (RESPONSES, "resp_a", b'"status":"cancelled"'),
        (MESSAGES, "chatcmpl-a", b'"stop_reason":null,"stop_sequence":null},"usage"'),
    ],
)
async def test_an_answer_is_aborted_by_its_id(path: str, name: str, end: bytes) -> None:
    async with serving(speed=1) as served:
        asked = body(path, most=100_000)
        talk = await served.talk("POST", path, asked, {"X-Request-Id": "a"})
        await talk.until(b"delta")
        await served.post("/abort_requests", {"request_ids": [name]})
        reply = await talk.rest()
        assert reply.complete
        assert end in reply.body
        assert not served.server.attempts.count


async def test_a_response_is_created_before_anything_is_made() -> None:
    async with serving(speed=1) as served:
        long = {"input": "x" * 400_000}
        talk = await served.talk("POST", RESPONSES, body(RESPONSES, most=1) | long)
        await talk.until(b"response.in_progress")
        assert b"output_item" not in talk.reply.body
        assert not await served.metric("generation_tokens_total")
        talk.leave()


# What goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STREAMED)
async def test_every_stream_is_cut_in_the_midst_of_any_event(path: str) -> None:
    count = OPENING[path] + 3 + CLOSING[path]
    async with serving() as served:
        for nth in range(1, count + 1):
            await served.post("/faults", {"die_mid_frame": nth})
            reply = await served.post(path, body(path, most=3))
            assert (reply.status, reply.complete) == (200, False)
            assert reply.body.count(b"\n\n") == nth - 1
            assert not reply.body.endswith(b"\n\n")
        await served.post("/faults", {"die_after": count})
        reply = await served.post(path, body(path, most=3))
        assert not reply.complete
        assert reply.body.count(b"\n\n") == count
        await served.post("/faults", {"die_after": count + 1})
        assert (await served.post(path, body(path, most=3))).complete


@pytest.mark.parametrize("path", STREAMED)
async def test_garbage_comes_among_the_events_of_every_stream(path: str) -> None:
    async with serving(faults={"garbage": OPENING[path] + 2}) as served:
        events = (await served.post(path, body(path, most=3))).body.split(b"\n\n")
        broken = []
        for nth, event in enumerate(events[:-1]):
            data = event.partition(b"data: ")[2]
            try:
                assert data == b"[DONE]" or json.loads(data)
            except ValueError:
                broken.append(nth)
        assert broken == [OPENING[path] + 1]


@pytest.mark.parametrize("path", STREAMED)
async def test_every_stream_goes_silent_after_so_many_tokens(path: str) -> None:
    async with serving(faults={"stall_after": 2}) as served:
        talk = await served.talk("POST", path, body(path, most=9))
        await talk.until(b"delta" if path in (CHAT, RESPONSES, MESSAGES) else b"text")
        reading = asyncio.ensure_future(talk.rest())
        for _ in range(3):
            assert (await served.get("/load")).json == {"server_load": 1}
        assert not reading.done()
        for end in (b'finish_reason":"', b"message_delta", b"output_text.done"):
            assert end not in talk.reply.body
        reading.cancel()


@pytest.mark.parametrize("path", NEW)
async def test_chance_stalls_and_broken_pieces_hit_every_path(path: str) -> None:
    async with serving(faults={"error_rate": 0.5}, emulator={"seed": 3}) as served:
        replies = [await served.post(path, asking(path, most=1)) for _ in range(12)]
        failed = [reply.status == 500 for reply in replies]
        assert failed == [draws_error(3, nth, 0.5) for nth in range(12)]
        fault = replies[failed.index(True)].json["error"]
        assert fault["type"] == "InternalServerError"

        await served.post("/faults", {"die_mid_frame": 1})
        reply = await served.post(path, asking(path, most=1))
        assert (reply.status, reply.complete) == (200, False)
        assert reply.body
        await served.post("/faults", {"garbage": 1})
        reply = await served.post(path, asking(path, most=1))
        assert reply.complete
        with pytest.raises(json.JSONDecodeError):
            _ = reply.json

        await served.post("/faults", {"stall": 1})
        talk = await served.talk("POST", path, asking(path, most=1))
        while (await served.get("/faults")).json["stall"]:
            pass
        assert (await served.post(path, asking(path, most=1))).status == 200
        assert not talk.reply.status
        talk.leave()


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_stream_without_an_end_mark_has_none_to_lose(path: str) -> None:
    async with serving(faults={"no_done": True, "drop_usage": True}) as served:
        events = (await served.post(path, body(path, most=3))).named
        assert events[-1]["type"] in {"response.completed", "message_stop"}
        assert 'output_tokens":' not in json.dumps(events)
