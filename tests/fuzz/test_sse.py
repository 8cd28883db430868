"""Whatever an engine streams, its caller gets whole events, and the books are closed."""

import itertools
import json
import re
from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from headrace.ports.engine import Route
from tests.fuzz.serving import LEAST, Front, Saying, explore, fronted, read_answer
from tests.gateway.scenes import KEYS, MODEL

pytestmark = [pytest.mark.service, pytest.mark.slow]

ASKS: dict[Route, dict[str, object]] = {
    Route.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Route.COMPLETIONS: {"prompt": "hi"},
    Route.RESPONSES: {"input": "hi"},
    Route.MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
EMPTY_LINE = re.compile(rb"\n\r?\n")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


class Stream(NamedTuple):
    """One stream as an engine sends it."""

    route: Route
    body: bytes
    cuts: tuple[int, ...]
    framing: str
    ending: str
    usage: bool


def _event(data: object, name: str = "") -> bytes:
    written = data if isinstance(data, bytes) else json.dumps(data).encode()
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: " + written + b"\n\n"


_CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "x"}
_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
KNOWN = [
    _event({**_CHUNK, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}),
    _event({**_CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    _event({**_CHUNK, "choices": [], "usage": _USAGE}),
    _event({**_CHUNK, "choices": [{"index": 0, "text": "a"}], "usage": _USAGE}),
    _event(b"[DONE]"),
    _event({"error": {"message": "broken", "type": "x", "code": 500}}),
    _event({"type": "message_start", "message": {"usage": {"input_tokens": 3}}}, "message_start"),
    _event({"type": "content_block_delta", "delta": {"text": "a"}}, "content_block_delta"),
    _event({"type": "message_delta", "usage": {"output_tokens": 2}}, "message_delta"),
    _event({"type": "message_stop"}, "message_stop"),
    _event({"type": "ping"}, "ping"),
    _event({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, "error"),
    _event({"type": "response.output_text.delta", "delta": "a"}, "response.output_text.delta"),
    _event({"type": "response.completed", "response": {"usage": {"output_tokens": 2}}}),
    _event({"type": "response.completed", "response": None}, "response.completed"),
    _event({"type": "response.failed", "response": {"error": {"code": "x"}}}, "response.failed"),
    _event({**_CHUNK, "choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": "x"}}),
    _event({**_CHUNK, "choices": [], "usage": {"prompt_tokens": 10**30, "completion_tokens": 1}}),
    _event({**_CHUNK, "choices": None, "usage": [[]]}),
    b": comment\n\n",
    b"\n",
    b"\r\n\r\n",
    b"data\n\n",
    b"data:\n\n",
    b"data: a\ndata: b\r\n\r\n",
    b"id: 1\nretry: 5\n\n",
    b"data: \xff\xfe\n\n",
    b"\xef\xbb\xbfdata: x\n\n",
    b"data: {" + b"x" * 70_000 + b"\n\n",
    b"data: {",
    b"data: [DONE]",
    b"data: [DONE]\r\r",
]
FRAMES = st.one_of(
    st.sampled_from(KNOWN),
    st.sampled_from(KNOWN).map(lambda one: one.replace(b"\n", b"\r\n")),
    st.binary(max_size=30),
    st.binary(max_size=30).map(lambda one: b"data: " + one + b"\n\n"),
    st.tuples(st.sampled_from(KNOWN), st.integers(0, 80)).map(lambda one: one[0][: one[1]]),
)
STREAMS = st.builds(
    Stream,
    route=st.sampled_from(list(ASKS)),
    body=st.lists(FRAMES, max_size=12).map(b"".join),
    cuts=st.lists(st.integers(0, 400), max_size=4).map(tuple),
    framing=st.sampled_from(["chunked", "chunked", "length", "close"]),
    ending=st.sampled_from(["whole", "whole", "whole", "cut", "junk"]),
    usage=st.booleans(),
)


def said(stream: Stream) -> Saying:
    """Return the writes of an engine."""
    edges = sorted({0, len(stream.body), *(one for one in stream.cuts if one < len(stream.body))})
    parts = [stream.body[a:b] for a, b in itertools.pairwise(edges)]
    closes = stream.ending != "whole" or stream.framing == "close"
    if stream.framing == "chunked":
        head, tail = HEAD + b"transfer-encoding: chunked\r\n\r\n", b"0\r\n\r\n"
        parts = [b"%x\r\n%s\r\n" % (len(one), one) for one in parts]
    elif stream.framing == "length":
        head, tail = HEAD + b"content-length: %d\r\n\r\n" % (len(stream.body) + closes), b""
    else:
        head, tail = HEAD + b"connection: close\r\n\r\n", b""
    if stream.ending == "junk":
        tail = b"zz\r\n"
    elif stream.ending == "cut":
        tail = b""
    return Saying((head, *parts, tail), closes)


async def ask(front: Front, stream: Stream) -> bytes:
    front.engine.says = said(stream)
    fields = {"model": MODEL, "stream": True, **ASKS[stream.route]}
    if stream.usage and stream.route in (Route.CHAT, Route.COMPLETIONS):
        fields["stream_options"] = {"include_usage": True}
    body = json.dumps(fields).encode()
    head = (
        f"POST {stream.route} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {KEYS['free']}\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    content = await front.exchange([head.encode() + body])
    await front.settled()
    return content


def check(content: bytes) -> None:
    """Check that an answer is whole frames, or broke off where its caller can see it."""
    answer = read_answer(content)
    if answer.status in (502, 503):  # the latter: the engine says that it is full
        assert answer.complete
        assert "error" in json.loads(answer.body)
        return
    assert answer.status == 200
    assert answer.kind.startswith("text/event-stream")
    if answer.complete and answer.body:
        *_, last = EMPTY_LINE.split(answer.body)
        assert not last.strip(b"\r\n"), answer.body[-300:]


def test_streams_of_any_bytes() -> None:
    with fronted() as front:
        tried = explore(STREAMS, lambda one: check(front.run(ask(front, one))))
        assert tried >= LEAST


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_a_stream_cut_within_a_frame_already_begun_is_cut_and_is_no_error_of_ours(
    framing: str,
) -> None:
    body = KNOWN[0] + b"data: {" + b"x" * 70_000
    stream = Stream(Route.CHAT, body, (300,), framing, "cut", usage=False)
    with fronted() as front:  # which fails at its end if an error was logged
        answer = read_answer(front.run(ask(front, stream)))
    assert (answer.status, answer.complete) == (200, False)
    assert answer.body.startswith(KNOWN[0])
