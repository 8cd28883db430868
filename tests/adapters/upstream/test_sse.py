"""Frames: whole ones go on, usage is hidden or not, however the bytes are cut."""

import json
import re
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.upstream.dialects import Completions, Continuous, scanner_for
from headrace.adapters.upstream.sse import FRAME_MAX, Scanner
from headrace.adapters.upstream.usage import EachUsage
from headrace.model.engine import Usage
from headrace.ports.engine import Route
from headrace.units import Tokens

WORD = b'data: {"choices":[{"delta":{"content":"w\xc3\xb6rd \xf0\x9f\x8c\x8a"}}]}\n\n'
NULL = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n'
NULL_FIRST = b'data: {"usage": null, "choices":[{"delta":{"content":"a"}}]}\n\n'
RUNNING = b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
ERROR = b'data: {"error":{"message":"out of memory","code":500}}\n\n'
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
TOLD = Usage(input_tokens=Tokens(7), cached_tokens=Tokens(4), output_tokens=Tokens(2))


class Seen(NamedTuple):
    """All that can be seen of a stream."""

    out: bytes
    frames: int
    events: int
    comments: int
    done: bool
    usage: Usage | None
    fault: bytes | None
    whole: bool
    end: bytes


def scan(*parts: bytes, hide: bool = False) -> Seen:
    """Feed the parts."""
    scanner = scanner_for(Route.CHAT, hide_usage=hide)
    out = b"".join(scanner.feed(part) for part in parts)
    counts = (scanner.frames, scanner.events, scanner.comments, scanner.done)
    told = (scanner.usage, scanner.fault, scanner.whole)
    return Seen(out, *counts, *told, scanner.finish(framed=True))


def single(body: bytes) -> list[bytes]:
    """Cut into bytes."""
    return [body[at : at + 1] for at in range(len(body))]


def test_content_comments_and_marks_are_told_apart() -> None:
    seen = scan(WORD + PING + WORD, b"event: message\ndata: {}\n\n" + DONE)
    assert (seen.frames, seen.events, seen.comments, seen.done) == (3, 4, 1, True)
    assert seen.out == WORD + PING + WORD + b"event: message\ndata: {}\n\n" + DONE


@pytest.mark.parametrize(
    "choice",
    [
        '"delta":{"role":"assistant","content":""}',  # vLLM
        '"delta": {"role": "assistant", "content": null}',  # llama.cpp
        '"delta":{"role":"assistant","content":"","refusal":null,"tool_calls":[]}',  # OpenAI
        '"delta":{"role":"assistant"}',
        '"delta":{},"finish_reason":"stop"',
        '"delta":{"role":null,"content":null,"tool_calls":null},"finish_reason":"stop"',  # SGLang
    ],
)
def test_who_speaks_and_why_it_ended_are_no_tokens(choice: str) -> None:
    frame = f'data: {{"choices":[{{"index":0,{choice}}}]}}\n\n'.encode()
    for parts in ([frame + WORD + frame], [frame, WORD, frame]):
        seen = scan(*parts)
        assert (seen.out, seen.frames, seen.events) == (frame + WORD + frame, 1, 3)
    assert scan(frame).frames == 0


@pytest.mark.parametrize(
    "choice",
    [
        '"delta":{"role":"assistant","content":"x"}',
        '"delta":{"role":null,"content":"x"}',
        '"delta":{"content":"role"}',
        '"delta":{"content":""},"finish_reason":"length"',  # bytes of a character, not yet whole
        '"delta":{"role":"assistant","content":null,"tool_calls":[{"index":0}]}',
        '"delta":{"reasoning_content":"hm"}',
        '"text":""',
    ],
)
def test_whatever_else_a_choice_says_is_a_token(choice: str) -> None:
    frame = f'data: {{"choices":[{{"index":0,{choice}}}]}}\n\n'.encode()
    assert scan(frame + frame).frames == 2
    assert scan(*single(frame)).frames == 1


def test_a_tail_is_held_until_its_frame_is_whole() -> None:
    scanner = scanner_for(Route.CHAT)
    assert scanner.feed(WORD + b"data: {") == WORD
    assert scanner.feed(b"}") == b""
    assert scanner.feed(b"\n") == b""
    assert scanner.frames == 1
    assert scanner.feed(b"\n" + PING[:3]) == b"data: {}\n\n"
    assert (scanner.frames, scanner.whole) == (2, True)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\n\n"])
def test_either_line_end_ends_a_frame(end: bytes) -> None:
    body = (WORD + USAGE + DONE).replace(b"\n\n", end)
    assert scan(body).out == body
    seen = scan(body, hide=True)
    assert seen.out == (WORD + DONE).replace(b"\n\n", end)
    assert (seen.frames, seen.usage, seen.done) == (1, TOLD, True)


def test_usage_is_found_and_shown_to_whom_it_was_promised() -> None:
    seen = scan(WORD + NULL + RUNNING + USAGE + DONE)
    assert seen.out == WORD + NULL + RUNNING + USAGE + DONE
    assert (seen.usage, seen.frames, seen.events) == (TOLD, 3, 5)


def test_hidden_usage_leaves_no_trace() -> None:
    seen = scan(WORD + NULL + NULL_FIRST + RUNNING + USAGE + DONE, hide=True)
    assert (
        seen.out
        == WORD
        + (
            b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
            b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
            b'data: {"choices":[{"index":0}]}\n\n'
        )
        + DONE
    )
    assert (seen.usage, seen.frames, seen.events) == (TOLD, 4, 6)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("hide", [True, False])
def test_the_end_mark_in_the_same_read_changes_nothing(together: bool, hide: bool) -> None:
    parts = [USAGE + DONE] if together else [USAGE, DONE]
    seen = scan(WORD, *parts, hide=hide)
    assert seen.out == WORD + (b"" if hide else USAGE) + DONE
    assert (seen.usage, seen.done) == (TOLD, True)


@pytest.mark.parametrize(
    "frame",
    [
        b'data: {"choices":[{"delta":{"content":"usage"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\"usage\\": 1, \\"error\\": 2"}}]}\n\n',
        b'data: {"choices":[{"usage":{"prompt_tokens":1}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"[DONE]"}}],"error":null}\n\n',
        b'data: "usage"\n\n',
        b'data: {"usage"\n\n',
        b'data: {"usage":1,"\xff":0}\n\n',
        b'data: {"usage":' + b"[" * 5_000 + b"\n\n",
    ],
)
def test_words_that_look_like_keys_pass_as_they_are(frame: bytes) -> None:
    for hide in (True, False):
        seen = scan(frame, hide=hide)
        assert (seen.out, seen.usage, seen.fault) == (frame, None, None)
        assert (seen.frames, seen.done) == (1, False)


@pytest.mark.parametrize("usage", [b"3", b'{"prompt_tokens":-1}', b'{"prompt_tokens":"7"}', b"{}"])
def test_usage_that_makes_no_sense_is_hidden_and_not_believed(usage: bytes) -> None:
    frame = b'data: {"choices":[{}],"usage":%s}\n\n' % usage
    seen = scan(RUNNING + frame, hide=True)
    assert seen.usage == Usage(
        input_tokens=Tokens(7),
        cached_tokens=Tokens(0),
        output_tokens=Tokens(1),
        tells_cached=False,
    )
    assert b"usage" not in seen.out


def test_other_lines_of_a_frame_outlive_its_usage() -> None:
    frame = b'id: 5\r\ndata: {"choices":[{}],\r\ndata: "usage":null}\r\n\r\n'
    assert scan(frame, hide=True).out == b'id: 5\r\ndata: {"choices":[{}]}\r\n\r\n'


@pytest.mark.parametrize("frame", [ERROR, b'event: error\ndata: {"message":"no"}\n\n'])
def test_an_error_event_is_withheld_with_all_that_follows(frame: bytes) -> None:
    seen = scan(WORD + frame + WORD + DONE, WORD, b"data: half")
    assert (seen.out, seen.end, seen.frames, seen.done) == (WORD, b"", 1, False)
    assert seen.fault is not None
    assert seen.fault in frame


def test_a_last_frame_may_miss_its_end_mark() -> None:
    seen = scan(WORD + DONE.rstrip())
    assert (seen.out, seen.end) == (WORD, DONE.rstrip())
    scanner = scanner_for(Route.CHAT, hide_usage=True)
    assert scanner.feed(USAGE.rstrip()) == b""
    assert scanner.finish(framed=True) == b""
    assert scanner.usage == TOLD


def test_a_frame_too_large_to_hold_goes_on_in_pieces() -> None:
    scanner = scanner_for(Route.CHAT, hide_usage=True)
    text = b"x" * FRAME_MAX
    assert scanner.feed(b"data: {}\n\ndata: " + text) == b"data: {}\n\ndata: " + text
    assert (scanner.whole, scanner.frames) == (False, 2)
    assert scanner.feed(b'"usage":null\n') == b'"usage":null'
    assert scanner.feed(b"more\n\r") == b"\nmore"
    assert not scanner.whole
    assert scanner.feed(b"\n" + WORD + b"data") == b"\n\r\n" + WORD
    assert (scanner.whole, scanner.frames) == (True, 3)


def test_memory_is_bounded_however_large_a_frame_is() -> None:
    scanner = scanner_for(Route.CHAT)
    for _ in range(1_000):
        scanner.feed(b"x" * 1_000)
        assert len(scanner._tail) <= FRAME_MAX
    assert scanner.comments + scanner.events == 1


STREAM = b"\n" + ROLE + WORD + PING + NULL + b"\n\r\n" + RUNNING + END + USAGE + b"\n\n" + DONE


@pytest.mark.parametrize("hide", [True, False])
@pytest.mark.parametrize("body", [STREAM, STREAM.replace(b"\n", b"\r\n"), WORD + ERROR + DONE])
def test_every_cut_gives_the_same(body: bytes, hide: bool) -> None:
    whole = scan(body, hide=hide)
    assert scan(*single(body), hide=hide) == whole
    for at in range(1, len(body)):
        assert scan(body[:at], body[at:], hide=hide) == whole


large = st.sampled_from([FRAME_MAX - 8, FRAME_MAX - 7, FRAME_MAX - 6, FRAME_MAX + 99]).map(
    lambda size: b"data: " + b"x" * size + b"\n\n"
)
frames = st.sampled_from(
    [
        ROLE,
        WORD,
        NULL,
        NULL_FIRST,
        RUNNING,
        END,
        USAGE,
        DONE,
        PING,
        ERROR,
        b"\n",
        b"\r\n",
        b"data: half",
    ]
    + [frame.replace(b"\n", b"\r\n") for frame in (WORD, NULL, RUNNING, USAGE, DONE, PING)]
    + [b"id: 1\ndata: {}\n\n", b"data: a\ndata: b\n\n", b"event: x\n\n", b"retry: 5\n", b"\r"]
)


@given(
    pieces=st.lists(frames | large, max_size=12),
    cuts=st.lists(st.integers(min_value=0, max_value=400_000), max_size=30),
    hide=st.booleans(),
)
def test_no_cut_of_any_stream_shows(pieces: list[bytes], cuts: list[int], hide: bool) -> None:
    body = b"".join(pieces)
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    parts = [body[a:b] for a, b in pairwise(places)]
    seen, whole = scan(*parts, hide=hide), scan(body, hide=hide)
    assert seen == whole
    if len(body) < 2_000:
        assert scan(*single(body), hide=hide) == whole
    if not hide and seen.fault is None:
        assert seen.out + seen.end in (body, body[: len(seen.out + seen.end)])
        assert seen.out + seen.end == body or re.fullmatch(rb"[\r\n]*", body[len(seen.out) :])


@given(body=st.lists(frames | large, max_size=12).map(b"".join), hide=st.booleans())
def test_the_fast_path_is_only_faster(body: bytes, hide: bool) -> None:
    slow = type("Slow", (Completions,), {"_single": _no_bytes, "_several": _no})(hide_usage=hide)
    scanner = Completions(hide_usage=hide)
    assert scanner.feed(body) == slow.feed(body)
    for name in ("events", "marks", "comments", "done", "usage", "fault", "whole"):
        assert getattr(scanner, name) == getattr(slow, name)


EACH = (
    b'{"index":0,"delta":{"content":"w"}}],"usage":{"prompt_tokens":7,"completion_tokens":%d}}\n\n'
)
BARE = b'data: {"choices":[]}\n\n'
told_in_each = st.one_of(
    st.integers(0, 9).map(lambda made: b'data: {"id":"x","choices":[' + EACH % made),
    st.just(b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":7}, "x":{"y":{}}}\n\n'),
    st.just(b'data: {"choices":[{"index":0}],"usage":null}\n\n'),
    st.just(b'data: {"choices":[{"index":0}],"x":{"a":1,"usage":{"prompt_tokens":1}}}\n\n'),
    st.just(b'data: {"choices":[{"index":0,"text":",\\"usage\\":{}}"}]}\n\n'),
    st.just(b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":-1}}\n\n'),
    st.just(USAGE),
    st.just(WORD),
    st.just(PING),
    st.just(DONE),
)


@given(
    body=st.lists(told_in_each, max_size=12).map(b"".join),
    hide=st.booleans(),
    cuts=st.lists(st.integers(0, 2_000), max_size=6),
)
def test_usage_in_each_frame_is_read_alike_however_it_comes(
    body: bytes, hide: bool, cuts: list[int]
) -> None:
    slow = type("Slow", (Continuous,), {"_single": _no_bytes, "_several": _no})(hide_usage=hide)
    expected = slow.feed(body)
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for parts in ([body], single(body), [body[a:b] for a, b in pairwise(places)]):
        scanner = scanner_for(Route.CHAT, hide_usage=hide, each_usage=EachUsage.WE)
        heard = [parsed(scanner.feed(part)) for part in parts]
        assert [one for some in heard for one in some] == parsed(expected)
        for name in ("events", "marks", "comments", "done", "usage"):
            assert getattr(scanner, name) == getattr(slow, name)


def parsed(out: bytes) -> list[object]:
    """Return what frames say, however it is written."""
    found = [frame.removeprefix(b"data: ") for frame in out.split(b"\n\n")]
    return [json.loads(one) if one.startswith(b"{") else one for one in found if one]


@pytest.mark.parametrize("hide", [True, False])
def test_of_usage_in_each_frame_the_last_alone_is_the_callers(*, hide: bool) -> None:
    stream = [b'data: {"choices":[' + EACH % made for made in (0, 1, 2)] + [USAGE, DONE]
    scanner = scanner_for(Route.CHAT, hide_usage=hide, each_usage=EachUsage.WE)
    made = []
    out = []
    for frame in stream:
        out.append(scanner.feed(frame))
        assert scanner.usage is not None
        made.append(scanner.usage.output_tokens)
    assert made == [0, 1, 2, 2, 2]
    bare = b'data: {"choices":[{"index":0,"delta":{"content":"w"}}]}\n\n'
    assert out == [bare] * 3 + [b"" if hide else USAGE, DONE]
    assert scanner.frames == 3


def _no_bytes(_: Scanner, __: bytes) -> bytes:
    return b""


def _no(_: Scanner, __: bytes) -> bool:
    return False
