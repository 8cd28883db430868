"""Messages and responses: what is content, what tells usage, what ends a stream, however it is cut."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.upstream.dialects import LAST_MAX, scanner_for
from headrace.adapters.upstream.sse import FRAME_MAX, Scanner
from headrace.model.engine import Usage
from headrace.ports.engine import Route
from headrace.units import Tokens


class Seen(NamedTuple):
    """All that can be seen of a stream, after its end too."""

    out: bytes
    frames: int
    events: int
    comments: int
    done: bool
    usage: Usage | None
    fault: bytes | None
    whole: bool
    cut: bool


def scan(route: Route, *parts: bytes, hide: bool = False, framed: bool = True) -> Seen:
    """Feed the parts, and the end."""
    scanner = scanner_for(route, hide_usage=hide)
    out = b"".join(scanner.feed(part) for part in parts)
    out += scanner.finish(framed=framed)
    counts = (scanner.frames, scanner.events, scanner.comments, scanner.done)
    return Seen(out, *counts, scanner.usage, scanner.fault, scanner.whole, scanner.cut)


def single(body: bytes) -> list[bytes]:
    """Cut into bytes."""
    return [body[at : at + 1] for at in range(len(body))]


def event(name: str, rest: str = "") -> bytes:
    """Return a frame as engines write it."""
    return f'event: {name}\ndata: {{"type":"{name}"{rest}}}\n\n'.encode()


def usage(given: int, cached: int, made: int) -> Usage:
    """Return a usage."""
    return Usage(
        input_tokens=Tokens(given), cached_tokens=Tokens(cached), output_tokens=Tokens(made)
    )


# Messages ---------------------------------------------------------------------------------------

START = event(
    "message_start",
    ',"message":{"id":"msg_1","content":[],"usage":{"input_tokens":7,"cache_read_input_tokens":40,'
    '"cache_creation_input_tokens":2,"output_tokens":1}}',
)
VLLM_START = event(
    "message_start",
    ',"message":{"id":"msg_1","content":[],"usage":{"input_tokens":49,"output_tokens":0}}',
)
VLLM_DELTA = event(
    "message_delta",
    ',"delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":49,"output_tokens":3,'
    '"cache_read_input_tokens":40}',
)
OPEN = event("content_block_start", ',"index":0,"content_block":{"type":"text","text":""}')
TEXT = event("content_block_delta", ',"index":0,"delta":{"type":"text_delta","text":"wörd 🌊"}')
SHUT = event("content_block_stop", ',"index":0')
DELTA = event("message_delta", ',"delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":3}')
STOP = event("message_stop")
PING = event("ping")
FAULT = event("error", ',"error":{"type":"overloaded_error","message":"busy"}')
MESSAGE = START + OPEN + PING + TEXT + TEXT + SHUT + DELTA + STOP


def test_a_message_is_read_and_nothing_of_it_changed() -> None:
    seen = scan(Route.MESSAGES, MESSAGE, hide=True)
    assert seen == Seen(MESSAGE, 2, 7, 1, True, usage(49, 40, 3), None, True, False)


def test_the_usage_of_a_message_is_not_known_before_it_tells_its_output() -> None:
    assert scan(Route.MESSAGES, START + TEXT).usage is None
    assert scan(Route.MESSAGES, VLLM_START + TEXT + VLLM_DELTA).usage == usage(49, 40, 3)
    assert scan(Route.MESSAGES, DELTA + STOP).usage is None
    late = event("message_delta", ',"usage":{"input_tokens":9,"output_tokens":5}')
    assert scan(Route.MESSAGES, START + DELTA + late).usage == usage(51, 40, 5)
    empty = START.replace(b'"input_tokens":7', b'"input_tokens":0')
    assert scan(Route.MESSAGES, empty + late).usage == usage(51, 40, 5)


@pytest.mark.parametrize("told", ['"usage":{"output_tokens":-1}', '"usage":3', '"usage":null'])
def test_usage_of_a_message_that_makes_no_sense_is_not_believed(told: str) -> None:
    seen = scan(Route.MESSAGES, START + DELTA + event("message_delta", "," + told))
    assert seen.usage == usage(49, 40, 3)


# Responses --------------------------------------------------------------------------------------

USED = (
    ',"response":{"id":"resp_1","output":[{"content":[{"text":"a"}]}],"usage":{"input_tokens":49,'
    '"input_tokens_details":{"cached_tokens":40},"output_tokens":3,"total_tokens":52}}'
)
CREATED = event("response.created", ',"response":{"id":"resp_1","error":null,"usage":null}')
RUNNING = event("response.in_progress", ',"response":{"error":null}')
ADDED = event("response.output_item.added", ',"item":{"type":"message"}')
WORD = event("response.output_text.delta", ',"delta":"wörd 🌊"')
CALL = event("response.function_call_arguments.delta", ',"delta":"{"')
THOUGHT = event("response.reasoning_summary_text.delta", ',"delta":"hm"')
WRITTEN = event("response.output_text.done", ',"text":"a"')
COMPLETED = event("response.completed", USED)
INCOMPLETE = event("response.incomplete", USED)
FAILED = event("response.failed", USED.replace("{", '{"error":{"code":"server_error"},', 1))
RESPONSE = CREATED + RUNNING + ADDED + WORD + CALL + THOUGHT + WRITTEN + COMPLETED


@pytest.mark.parametrize("last", [COMPLETED, INCOMPLETE])
def test_a_response_is_read_and_nothing_of_it_changed(last: bytes) -> None:
    body = RESPONSE.replace(COMPLETED, last)
    seen = scan(Route.RESPONSES, body, hide=True)
    assert seen == Seen(body, 3, 8, 0, True, usage(49, 40, 3), None, True, False)


def test_a_response_that_failed_is_withheld_but_not_what_it_used() -> None:
    seen = scan(Route.RESPONSES, CREATED + WORD + FAILED + COMPLETED)
    assert (seen.out, seen.usage, seen.done) == (CREATED + WORD, usage(49, 40, 3), False)
    assert seen.fault is not None
    assert b"server_error" in seen.fault


def test_a_last_event_may_repeat_a_long_answer() -> None:
    text = "a" * (FRAME_MAX * 3)
    last = event("response.completed", USED.replace('"text":"a"', f'"text":"{text}"'))
    for parts in ([WORD + last], [WORD, last[:99], last[99:90_000], last[90_000:]]):
        seen = scan(Route.RESPONSES, *parts)
        assert (seen.out, seen.done, seen.usage) == (WORD + last, True, usage(49, 40, 3))


def test_a_last_event_too_long_to_be_held_still_ends_the_stream() -> None:
    text = "a" * (LAST_MAX + 1)
    for name in ("response.completed", "response.failed"):
        last = event(name, USED.replace('"text":"a"', f'"text":"{text}"'))
        for form in (last, last.partition(b"\n")[2]):
            for parts in ([WORD + form], [WORD, form[:99], form[99:-1], form[-1:]]):
                seen = scan(Route.RESPONSES, *parts)
                assert (seen.usage, seen.frames, seen.events) == (None, 1, 2)
                if name == "response.completed":
                    assert (seen.out == WORD + form, seen.done, seen.cut) == (True, True, False)
                else:
                    assert (seen.out, seen.done, seen.whole) == (WORD, False, True)
                    assert seen.fault == form[:FRAME_MAX]


def test_a_long_last_event_without_its_end_ends_nothing() -> None:
    last = event("response.completed", f',"x":"{"a" * LAST_MAX}"')
    seen = scan(Route.RESPONSES, WORD, last[:-1])
    assert (seen.done, seen.cut, seen.whole) == (False, True, False)


def test_other_frames_too_large_to_be_held_are_told_apart_by_their_beginning() -> None:
    long = f',"response":{{"instructions":"{"a" * FRAME_MAX}"}}'
    parts = [event(name, long) for name in ("response.created", "response.output_text.delta")]
    comment = b": " + b"a" * FRAME_MAX + b"\n\n"
    for cut in ([b"".join([*parts, comment])], [*parts[0].partition(b"a" * 99), parts[1], comment]):
        seen = scan(Route.RESPONSES, *cut, COMPLETED)
        assert (seen.frames, seen.events, seen.comments, seen.done) == (1, 3, 1, True)


# Both -------------------------------------------------------------------------------------------

BOTH = [
    (Route.MESSAGES, MESSAGE, FAULT, TEXT, STOP),
    (Route.RESPONSES, RESPONSE, FAILED, WORD, COMPLETED),
]


@pytest.mark.parametrize(("route", "body", "_fault", "_content", "_last"), BOTH)
@pytest.mark.parametrize("framed", [True, False])
def test_without_its_end_mark_a_stream_was_cut(
    route: Route, body: bytes, _fault: bytes, _content: bytes, _last: bytes, framed: bool
) -> None:
    assert not scan(route, body, framed=framed).cut
    assert not scan(route, body[:-2], framed=framed).cut, "all of it but the empty line"
    for less in range(3, len(body)):
        half = body[:-less]
        seen = scan(route, half, framed=framed)
        assert (seen.cut, seen.done, seen.whole, seen.fault) == (True, False, True, None)
        assert seen.out == half[: half.rfind(b"\n\n") + 2 if b"\n\n" in half else 0]
        assert seen.frames == scan(route, seen.out, framed=framed).frames


@pytest.mark.parametrize(("route", "_body", "fault", "content", "last"), BOTH)
def test_half_an_error_is_a_cut_and_half_of_what_follows_the_end_is_nothing(
    route: Route, _body: bytes, fault: bytes, content: bytes, last: bytes
) -> None:
    seen = scan(route, content + fault[:-9])
    assert (seen.out, seen.cut, seen.fault) == (content, True, None)
    seen = scan(route, last + b"data: [DO")
    assert (seen.out, seen.cut, seen.whole) == (last + b"data: [DO", False, False)


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("route", [Route.CHAT, Route.COMPLETIONS])
def test_a_chat_may_go_without_where_its_body_ends(route: Route, framed: bool) -> None:
    word = b'data: {"choices":[{}]}\n\n'
    assert scan(route, word + b"data: [DONE]", framed=framed).done
    seen = scan(route, word + word[:-2], framed=framed)
    assert (seen.cut, seen.done) == (not framed, False)
    assert (seen.out, seen.frames) == ((word + word[:-2], 2) if framed else (word, 1))
    assert seen.whole == seen.cut


@pytest.mark.parametrize(("route", "_body", "fault", "content", "last"), BOTH)
def test_an_error_is_withheld_with_all_that_follows(
    route: Route, _body: bytes, fault: bytes, content: bytes, last: bytes
) -> None:
    unnamed = fault.partition(b"\n")[2]
    for frame in (fault, unnamed, b"event: error\ndata: oh\n\n", b'data: {"error":{"code":1}}\n\n'):
        seen = scan(route, content + frame + content + last, last)
        assert (seen.out, seen.frames, seen.events, seen.done) == (content, 1, 2, False)
        assert seen.fault is not None
        assert seen.fault in frame
        assert not seen.cut


@pytest.mark.parametrize(("route", "body", "_fault", "_content", "_last"), BOTH)
def test_the_type_names_an_event_that_has_no_other_name(
    route: Route, body: bytes, _fault: bytes, _content: bytes, _last: bytes
) -> None:
    whole = scan(route, body)
    bare = b"".join(
        line for line in body.splitlines(keepends=True) if not line.startswith(b"event:")
    )
    assert scan(route, bare) == whole._replace(out=bare)
    default = bare.replace(b"data:", b"event: message\ndata:")
    assert scan(route, default) == whole._replace(out=default)


@pytest.mark.parametrize(("route", "_body", "_fault", "_content", "last"), BOTH)
@pytest.mark.parametrize(
    "frame",
    [
        b"event: new\ndata: {}\n\n",
        b"data: [DONE]\n\n",
        b"data: {}\n\n",
        b'data: {"type":5,"error":null}\n\n',
        b'data: {"type":"\\ud800"}\n\n',
        b'data: "\xff"\n\n',
        b'data: {"error"\n\n',
    ],
)
def test_what_is_not_known_passes_as_it_is(
    route: Route, _body: bytes, _fault: bytes, _content: bytes, last: bytes, frame: bytes
) -> None:
    seen = scan(route, frame + last)
    assert (seen.out, seen.frames, seen.events, seen.fault) == (frame + last, 0, 2, None)
    assert not scan(route, frame).done


@pytest.mark.parametrize("frame", [event("keepalive"), b": here\n\n", b"event: x\n\n"])
def test_what_keeps_a_connection_open_is_no_event(frame: bytes) -> None:
    seen = scan(Route.RESPONSES, frame)
    assert (seen.events, seen.comments) == (0, 1)


@pytest.mark.parametrize("form", [bytes, lambda body: body.replace(b"\n", b"\r\n")])
@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        (Route.MESSAGES, MESSAGE),
        (Route.MESSAGES, START + TEXT + TEXT[:-30]),
        (Route.MESSAGES, START + TEXT + FAULT + TEXT),
        (Route.RESPONSES, b"\n" + RESPONSE),
        (Route.RESPONSES, CREATED + THOUGHT + FAILED),
        (Route.CHAT, b'data: {"choices":[{}]}\n\ndata: {"choices"'),
    ],
)
def test_every_cut_gives_the_same(
    route: Route, body: bytes, framed: bool, form: Callable[[bytes], bytes]
) -> None:
    body = form(body)
    whole = scan(route, body, framed=framed)
    assert scan(route, *single(body), framed=framed) == whole
    for at in range(1, len(body)):
        assert scan(route, body[:at], body[at:], framed=framed) == whole


large = st.tuples(
    st.sampled_from([b"content_block_delta", b"response.created", b"response.completed", b"x"]),
    st.sampled_from([FRAME_MAX - 60, FRAME_MAX + 99]),
    st.integers(min_value=0, max_value=60),
).map(lambda it: b"event: %s\ndata: " % it[0] + b"x" * (it[1] + it[2]) + b"\n\n")
frames = st.sampled_from(
    [START, OPEN, TEXT, SHUT, DELTA, STOP, PING, FAULT, CREATED, WORD, CALL, THOUGHT, COMPLETED]
    + [frame.replace(b"\n", b"\r\n") for frame in (START, TEXT, STOP, WORD, COMPLETED)]
    + [b"\n", b"\r\n", b"data: half", b"event: half", b"data: a\ndata: b\n\n", b": x\n\n", b"\r"]
    + [b'data: {"type":"content_block_delta"}\n\n', b"data: [DONE]\n\n"]
)


@given(
    route=st.sampled_from([Route.MESSAGES, Route.RESPONSES]),
    pieces=st.lists(frames | large, max_size=12),
    cuts=st.lists(st.integers(min_value=0, max_value=400_000), max_size=30),
    framed=st.booleans(),
)
def test_no_cut_of_any_stream_shows(
    route: Route, pieces: list[bytes], cuts: list[int], framed: bool
) -> None:
    body = b"".join(pieces)
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    parts = [body[a:b] for a, b in pairwise(places)]
    whole = scan(route, body, framed=framed)
    assert scan(route, *parts, framed=framed) == whole
    if len(body) < 2_000:
        assert scan(route, *single(body), framed=framed) == whole
    assert body.startswith(whole.out)
    if whole.fault is None and not whole.cut:
        assert whole.out == body


@given(body=st.lists(frames, max_size=12).map(b"".join), route=st.sampled_from(Route))
def test_the_fast_path_is_only_faster(body: bytes, route: Route) -> None:
    scanner = scanner_for(route)
    slow = type("Slow", (type(scanner),), {"_single": _no_bytes, "_several": _no})()
    outs = [it.feed(body) + it.finish(framed=True) for it in (scanner, slow)]
    assert outs[0] == outs[1]
    for name in ("events", "marks", "comments", "done", "cut", "usage", "fault", "whole"):
        assert getattr(scanner, name) == getattr(slow, name)


def _no_bytes(_: Scanner, __: bytes) -> bytes:
    return b""


def _no(_: Scanner, __: bytes) -> bool:
    return False
