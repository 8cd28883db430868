"""What an answer looks like on each path, byte by byte or event by event."""

import base64
import json
import struct
from math import sqrt
from typing import Any

import pytest

from headrace.adapters.engines.words import PATHS, writer
from headrace.adapters.engines.words.embeddings import DIMENSIONS, Vectors
from headrace.adapters.engines.words.errors import error, streamed
from headrace.adapters.engines.words.frame import Writer
from tests.adapters.engine_server.serving import KINDS, NAMED

CHAT, PLAIN, RESPONSES, MESSAGES, EMBEDDINGS = PATHS
STREAMED = (CHAT, PLAIN, RESPONSES, MESSAGES)
TEXTS = ("water", ' runs "down"', "\n%s ü")
"""What has to be escaped, or must not be taken for a format."""


def made(kind: str, name: str = "n-1", model: str = "m%d", **told: Any) -> Writer:
    return writer(kind, name, 7, model, 11, **told)


def streaming(one: Writer, finish: str = "stop", cached: int | None = 4) -> list[bytes]:
    """Return every event of an answer of three tokens."""
    *pieces, last = TEXTS
    events = one.opening()
    events += [one.piece(text, nth) for nth, text in enumerate(pieces, 1)]
    return events + one.closing(last, finish, 3, cached)


def named(events: list[bytes]) -> list[Any]:
    """Return what events with names tell; every one has its name in it."""
    told = []
    for event in events:
        frame = NAMED.fullmatch(event.removesuffix(b"\n\n"))
        assert frame
        told.append(json.loads(frame["data"]))
        assert told[-1]["type"] == frame["name"].decode()
    return told


def test_the_paths_are_those_that_the_engine_works_for() -> None:
    assert tuple(KINDS) == PATHS


CHUNK = (
    b'data: {"id":"n","object":"chat.completion.chunk","created":7,"model":"m","choices":'
    b'[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":%b}]%b}\n\n'
)
TEXT = (
    b'data: {"id":"n","object":"text_completion","created":7,"model":"m","choices":'
    b'[{"index":0,"text":%b,"logprobs":null,"finish_reason":%b}]%b}\n\n'
)
TAIL = b'data: {"id":"n","object":"%b","created":7,"model":"m","choices":[],"usage":{%b}}\n\n'
SO_FAR = b'"prompt_tokens":11,"total_tokens":%d,"completion_tokens":%d'
CACHED = SO_FAR % (13, 2) + b',"prompt_tokens_details":{"cached_tokens":4}'


@pytest.mark.parametrize("always", [False, True])
def test_a_chat_is_these_bytes(always: bool) -> None:
    one = made(CHAT, "n", "m", usage_at_end=True, usage_always=always)

    def usage(count: int) -> bytes:
        return b',"usage":{' + SO_FAR % (11 + count, count) + b"}" if always else b""

    assert one.opening() == [CHUNK % (b'"role":"assistant","content":""', b"null", usage(0))]
    assert one.piece('a "b"', 1) == CHUNK % (b'"content":"a \\"b\\""', b"null", usage(1))
    assert one.closing(" c", "length", 2, 4) == [
        CHUNK % (b'"content":" c"', b'"length","stop_reason":null', usage(2)),
        TAIL % (b"chat.completion.chunk", CACHED),
    ]
    assert one.whole("a", "stop", 2, None) == (
        b'{"id":"n","object":"chat.completion","created":7,"model":"m","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"a","refusal":null},"logprobs":null,'
        b'"finish_reason":"stop","stop_reason":null}],"usage":{' + SO_FAR % (13, 2) + b"}}"
    )


@pytest.mark.parametrize("always", [False, True])
def test_a_completion_is_these_bytes(always: bool) -> None:
    one = made(PLAIN, "n", "m", usage_at_end=True, usage_always=always)

    def usage(count: int) -> bytes:
        return b',"usage":{' + SO_FAR % (11 + count, count) + b"}" if always else b""

    assert one.opening() == []
    assert one.piece("a", 1) == TEXT % (b'"a"', b"null", usage(1))
    assert one.closing(" c", "length", 2, 4) == [
        TEXT % (b'" c"', b'"length","stop_reason":null', usage(2)),
        TAIL % (b"text_completion", CACHED),
    ]
    assert one.whole("a", "stop", 2, 4) == (
        b'{"id":"n","object":"text_completion","created":7,"model":"m","choices":[{"index":0,'
        b'"text":"a","logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":{'
        + CACHED
        + b"}}"
    )


def test_a_response_is_told_in_numbered_events() -> None:
    one = made(RESPONSES, "resp_1")
    events = named(streaming(one))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(11))
    assert [event["delta"] for event in events[4:7]] == list(TEXTS)
    said = "".join(TEXTS)
    assert events[7]["text"] == events[8]["part"]["text"] == said
    (item,) = events[10]["response"]["output"]
    assert events[9]["item"] == item
    assert [part["text"] for part in item["content"]] == [said]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]} == {"msg_1"}
    assert [event["response"]["status"] for event in (events[0], events[10])] == [
        "in_progress",
        "completed",
    ]
    assert events[10]["response"] == json.loads(one.whole(said, "stop", 3, 4))
    assert events[10]["response"]["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 14,
    }
    assert (one.early, one.end_mark) == (2, b"")


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("abort", "cancelled", None),
    ],
)
def test_a_response_tells_by_its_status_why_it_ends(
    finish: str, status: str, details: dict[str, str] | None
) -> None:
    last = named(streaming(made(RESPONSES), finish))[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["status"] == status
    assert last["response"]["incomplete_details"] == details


def test_a_message_is_told_in_events_of_its_block() -> None:
    one = made(MESSAGES)
    events = named(streaming(one))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [event["delta"]["text"] for event in events[2:5]] == list(TEXTS)
    assert events[0]["message"]["usage"] == {"input_tokens": 11, "output_tokens": 0}
    usage = {"input_tokens": 11, "output_tokens": 3, "cache_read_input_tokens": 4}
    assert events[6]["usage"] == usage
    whole = json.loads(one.whole("".join(TEXTS), "stop", 3, 4))
    assert whole["usage"] == usage
    begun = {**events[0]["message"], "content": whole["content"], "usage": usage}
    assert {**begun, **events[6]["delta"]} == whole
    assert (one.early, one.end_mark) == (0, b"")


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "end_turn"), ("length", "max_tokens"), ("abort", None)]
)
def test_a_message_tells_why_it_ends(finish: str, reason: str | None) -> None:
    one = made(MESSAGES)
    assert named(streaming(one, finish))[-2]["delta"]["stop_reason"] == reason
    assert json.loads(one.whole("a", finish, 1, None))["stop_reason"] == reason


@pytest.mark.parametrize("kind", PATHS)
def test_no_usage_is_told_where_it_may_not_be(kind: str) -> None:
    asked: dict[str, Any] = {"usage_at_end": True, "usage_always": True, "usage": False}
    told = [json.loads(made(kind, **asked).whole("a", "stop", 1, 0))]
    if kind in STREAMED:
        frames = [event.partition(b"data: ")[2] for event in streaming(made(kind, **asked))]
        told += [json.loads(frame) for frame in frames]
    for one in told:
        holder = one.get("response") or one.get("message") or one
        assert holder.get("usage") is None


def vectors(**told: Any) -> list[Any]:
    answer = json.loads(made(EMBEDDINGS, vectors=Vectors(**told)).whole("", "length", 1, 0))
    assert answer["object"] == "list"
    assert answer["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
    assert {row["object"] for row in answer["data"]} == {"embedding"}
    return [row["embedding"] for row in answer["data"]]


def test_embeddings_are_unit_vectors_that_follow_from_the_input() -> None:
    one, other, again = vectors(inputs=(b"one", b"other", b"one"))
    assert one == again
    assert len(one) == len(other) == DIMENSIONS
    for vector in (one, other):
        assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-6)
    assert abs(sum(x * y for x, y in zip(one, other, strict=True))) < 0.2
    assert vectors(inputs=(b"one",)) == [one]


def test_a_short_embedding_is_the_beginning_of_a_long_one() -> None:
    (long,), (short,) = (vectors(inputs=(b"x",), dimensions=size) for size in (64, 16))
    length = sqrt(sum(x * x for x in long[:16]))
    assert short == pytest.approx([x / length for x in long[:16]], rel=1e-6)


def test_an_embedding_in_base64_has_the_same_numbers() -> None:
    (plain,) = vectors(inputs=(b"x",), dimensions=33)
    (coded,) = vectors(inputs=(b"x",), dimensions=33, base64=True)
    assert list(struct.unpack("<33f", base64.b64decode(coded))) == plain


def test_an_embedding_is_not_streamed() -> None:
    one = made(EMBEDDINGS)
    for asked in (one.opening, lambda: one.piece("", 1), lambda: one.closing("", "stop", 1, 0)):
        with pytest.raises(NotImplementedError):
            asked()


@pytest.mark.parametrize("kind", STREAMED)
def test_a_name_may_hold_anything(kind: str) -> None:
    strange = 'a%s"\\ü\n'
    events = streaming(made(kind, strange, strange))
    assert all(json.loads(event.partition(b"data: ")[2]) for event in events)
    assert json.loads(made(kind, strange, strange).whole("a", "stop", 1, 0))["model"] == strange


@pytest.mark.parametrize("kind", PATHS)
def test_errors_have_the_shape_of_their_path(kind: str) -> None:
    told = json.loads(error(kind, 404, "no such model", "model"))
    fault = told["error"]
    assert (fault["type"], fault["message"]) == ("NotFoundError", "no such model")
    if kind == MESSAGES:
        assert told["type"] == "error"
    else:
        assert (fault["code"], fault["param"]) == (404, "model")


def test_an_error_in_a_stream_is_an_event_of_its_path() -> None:
    for kind in (CHAT, PLAIN):
        assert streamed(kind, 503, "full") == (
            b'data: {"error":{"message":"full","type":"ServiceUnavailableError","param":null,'
            b'"code":503}}\n\ndata: [DONE]\n\n'
        )
    assert streamed(RESPONSES, 503, "full") == (
        b'event: error\ndata: {"type":"error","sequence_number":0,"code":"503","message":"full",'
        b'"param":null}\n\n'
    )
    assert streamed(MESSAGES, 503, "full") == (
        b'event: error\ndata: {"type":"error","error":{"type":"ServiceUnavailableError",'
        b'"message":"full"}}\n\n'
    )
