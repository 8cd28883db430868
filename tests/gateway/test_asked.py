"""Bodies of each route: what is asked for, and what is refused without repeating it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from headrace.gateway.asked import Asked, InvalidError, chat, messages, read, responses
from headrace.gateway.asked.completions import Completion
from headrace.gateway.asked.embeddings import Embedding
from headrace.model.features import Feature
from headrace.ports.engine import Route

TALK = [{"role": "user", "content": "hi"}]
LEAST: dict[Route, dict[str, Any]] = {
    Route.CHAT: {"model": "m", "messages": TALK},
    Route.COMPLETIONS: {"model": "m", "prompt": "hi"},
    Route.RESPONSES: {"model": "m", "input": "hi"},
    Route.MESSAGES: {"model": "m", "messages": TALK, "max_tokens": 5},
    Route.EMBEDDINGS: {"model": "m", "input": "hi"},
}
STRUCTS: dict[Route, type[msgspec.Struct]] = {
    Route.CHAT: chat.Chat,
    Route.COMPLETIONS: Completion,
    Route.RESPONSES: responses.Response,
    Route.MESSAGES: messages.Request,
    Route.EMBEDDINGS: Embedding,
}


def ask(route: Route, **others: object) -> Asked:
    return read(route, json.dumps({**LEAST[route], **others}).encode())


@pytest.mark.parametrize(
    ("route", "stream", "usage_shown", "cap"),
    [
        (Route.CHAT, True, False, None),
        (Route.COMPLETIONS, True, False, 16),
        (Route.RESPONSES, True, True, None),
        (Route.MESSAGES, True, True, 5),
        (Route.EMBEDDINGS, False, True, 1),
    ],
)
def test_the_least_body_of_each_route(
    route: Route, stream: bool, usage_shown: bool, cap: int | None
) -> None:
    asked = ask(route, stream=True, unknown={"x": [1, {"y": None}]})
    assert (asked.route, asked.model, asked.stream) == (route, "m", stream)
    assert (asked.usage_shown, asked.output_cap) == (usage_shown, cap)
    assert (asked.fan_out, asked.cache_salt) == (1, "")
    assert asked.features == ((Feature.STREAMING,) if stream else ())
    assert asked.input_tokens == asked.longest > 0
    assert not ask(route).stream


@pytest.mark.parametrize(
    ("route", "others", "field", "value"),
    [
        (Route.CHAT, {"max_tokens": 7}, "output_cap", 7),
        (Route.CHAT, {"max_tokens": 7, "max_completion_tokens": 6}, "output_cap", 6),
        (Route.CHAT, {"n": 3}, "fan_out", 3),
        (Route.CHAT, {"cache_salt": "s"}, "cache_salt", "s"),
        (Route.CHAT, {"stream_options": {"include_usage": True}}, "usage_shown", True),
        (Route.CHAT, {"stream_options": {"include_usage": None}}, "usage_shown", False),
        *(
            (route, {"stream_options": options}, "each_usage_shown", shown)
            for route in (Route.CHAT, Route.COMPLETIONS)
            for options, shown in (
                ({"include_usage": True, "continuous_usage_stats": True}, True),
                ({"include_usage": False, "continuous_usage_stats": True}, False),
                ({"include_usage": True, "continuous_usage_stats": None}, False),
                ({"include_usage": True}, False),
            )
        ),
        (Route.CHAT, {"tools": [{"name": "f"}]}, "features", (Feature.TOOLS,)),
        (Route.CHAT, {"tools": [ ]}, "features", ()),
        (Route.CHAT, {"response_format": {"type": "text"}}, "features", ()),
        (Route.CHAT, {"response_format": {"type": "json_object"}}, "features", (Feature.JSON,)),
        (Route.CHAT, {"response_format": {"type": "json_schema"}}, "features", (Feature.SCHEMA,)),
        (Route.CHAT, {"logprobs": True}, "features", (Feature.LOGPROBS,)),
        (Route.CHAT, {"logprobs": False, "stream": False}, "features", ()),
        (Route.CHAT, {"priority": -4}, "features", (Feature.PRIORITY,)),
        (Route.COMPLETIONS, {"logprobs": 0}, "features", (Feature.LOGPROBS,)),
        (Route.COMPLETIONS, {"n": 2, "best_of": 2}, "features", ()),
        (Route.COMPLETIONS, {"best_of": 2}, "features", (Feature.BEST_OF,)),
        (Route.RESPONSES, {"top_logprobs": 0}, "features", ()),
        (Route.RESPONSES, {"top_logprobs": 2}, "features", (Feature.LOGPROBS,)),
        (Route.EMBEDDINGS, {"priority": 0}, "features", (Feature.PRIORITY,)),
        (Route.COMPLETIONS, {"max_tokens": 7}, "output_cap", 7),
        (Route.COMPLETIONS, {"max_tokens": None}, "output_cap", None),
        (Route.COMPLETIONS, {"stream_options": {"include_usage": True}}, "usage_shown", True),
        (Route.COMPLETIONS, {"n": 2, "best_of": 5}, "fan_out", 5),
        (Route.COMPLETIONS, {"n": 2, "best_of": None}, "fan_out", 2),
        (Route.COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2}, "fan_out", 6),
        (Route.COMPLETIONS, {"prompt": [1, 2, 3]}, "fan_out", 1),
        (Route.COMPLETIONS, {"prompt": [1, 2, 3]}, "input_tokens", 3),
        (Route.COMPLETIONS, {"prompt": [1, 2, 3]}, "input_margin", 0),
        (Route.COMPLETIONS, {"prompt": [[1, 2, 3], [4]]}, "fan_out", 2),
        (Route.COMPLETIONS, {"prompt": [[1, 2, 3], [4]]}, "input_tokens", 2),
        (Route.COMPLETIONS, {"prompt": [[1, 2, 3], [4]]}, "longest", 3),
        (Route.COMPLETIONS, {"prompt": ""}, "input_tokens", 0),
        (Route.COMPLETIONS, {"suffix": "x" * 99, "echo": True}, "input_tokens", 1),
        (Route.RESPONSES, {"max_output_tokens": 7}, "output_cap", 7),
        (Route.RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "features", (Feature.SCHEMA,)),
        (Route.RESPONSES, {"text": {"verbosity": "low"}}, "features", ()),
        (Route.RESPONSES, {"tools": [{"type": "function"}]}, "features", (Feature.TOOLS,)),
        (Route.MESSAGES, {"tools": [{"name": "f"}]}, "features", (Feature.TOOLS,)),
        (Route.EMBEDDINGS, {"input": ["a", "b"], "dimensions": 5}, "fan_out", 1),
        (Route.EMBEDDINGS, {"input": [[1, 2], [3, 4, 5]]}, "input_tokens", 5),
        (Route.EMBEDDINGS, {"input": [[1, 2], [3, 4, 5]]}, "longest", 3),
        (Route.EMBEDDINGS, {"input": [7, 8], "encoding_format": "base64"}, "input_tokens", 2),
    ],
)  # fmt: skip
def test_fields_mean_what_their_api_says(
    route: Route, others: dict[str, object], field: str, value: object
) -> None:
    assert getattr(ask(route, **others), field) == value


@pytest.mark.parametrize(
    ("route", "others", "words"),
    [
        (Route.CHAT, {"messages": [{"role": "a", "content": None, "tool_calls": [{"f": "w1"}]},
                                   {"role": "a", "content": ["w2", {"refusal": "w3"}]}]},
         ["w1", "w2", "w3"]),
        (Route.RESPONSES, {"previous_response_id": "w1", "instructions": "w2", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "w3"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "w4"}]},
            {"type": "function_call", "name": "w5", "arguments": "w6", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "w7"},
            {"type": "function_call_output", "output": [{"type": "input_text", "text": "w8"}]},
            {"type": "computer_call_output", "output": {"type": "x", "text": "w9"}},
            {"type": "custom_tool_call", "input": "w10"}]},
         ["w2", "w1", *(f"w{n}" for n in range(3, 11))]),
        (Route.MESSAGES, {"system": "w1", "messages": [
            {"role": "user", "content": "w2"},
            {"role": "user", "content": [{"type": "text", "text": "w3"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "w4"},
                {"type": "tool_use", "id": "i", "name": "w5", "input": {"a": "w6"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "i", "content": "w7"},
                {"type": "tool_result", "content": [{"type": "text", "text": "w8"}]},
                {"type": "document", "title": "w9", "source": {"type": "text", "data": "w10"}},
                {"type": "document", "source": {
                    "type": "content", "content": [{"type": "text", "text": "w11"}]}},
                {"type": "search_result", "source": "w12", "content": [{"text": "w13"}]},
                {"type": "x", "content": {"type": "error", "text": "w14"}}]}]},
         [f"w{n}" for n in range(1, 15)]),
    ],
)  # fmt: skip
def test_all_words_are_in_the_prompt_in_their_order(
    route: Route, others: dict[str, object], words: list[str]
) -> None:
    text = ask(route, **others).prompt.decode()
    places = [text.index(word) for word in words]
    assert places == sorted(places)


@pytest.mark.parametrize("route", list(Route))
def test_null_is_as_good_as_nothing(route: Route) -> None:
    """Optional fields are nullable in OpenAI's schema, and some clients write them all."""
    names = [field.name for field in fields(STRUCTS[route]) if not field.required]
    nulls = ask(route, **dict.fromkeys([*names, "temperature"]))
    capless = route is Route.COMPLETIONS  # there an absent cap is 16
    assert nulls == (ask(route, max_tokens=None) if capless else ask(route))


def test_null_in_a_message_is_as_good_as_nothing() -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "text": None, "image_url": None}]
    full = {"role": "user", "content": parts, "tool_calls": None, "name": None}
    assert ask(Route.CHAT, messages=[full]).prompt == ask(Route.CHAT).prompt


@pytest.mark.parametrize(
    ("route", "others", "param"),
    [
        (Route.CHAT, {"messages": []}, "messages"),
        (Route.CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (Route.CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (Route.CHAT, {"model": ""}, "model"),
        (Route.CHAT, {"n": 0}, "n"),
        (Route.CHAT, {"n": 129}, "n"),
        (Route.CHAT, {"max_tokens": "5"}, "max_tokens"),
        (Route.CHAT, {"stream": "yes"}, "stream"),
        (Route.CHAT, {"priority": 1 << 40}, "priority"),
        (Route.COMPLETIONS, {"prompt": None}, "prompt"),
        (Route.COMPLETIONS, {"prompt": []}, "prompt"),
        (Route.COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (Route.COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (Route.COMPLETIONS, {"prompt": [-1]}, "prompt[0]"),
        (Route.COMPLETIONS, {"prompt": [[1 << 32]]}, "prompt[0][0]"),
        (Route.COMPLETIONS, {"prompt": ["a"] * 2_049}, "prompt"),
        (Route.RESPONSES, {"input": None}, "input"),
        (Route.RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (Route.MESSAGES, {"max_tokens": None}, "max_tokens"),
        (Route.EMBEDDINGS, {"input": [True]}, "input[0]"),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_blamed(
    route: Route, others: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidError) as caught:
        ask(route, **others)
    assert caught.value.param == param
    assert caught.value.message


@pytest.mark.parametrize("route", list(Route))
def test_a_missing_field_is_blamed_by_name(route: Route) -> None:
    for field in LEAST[route]:
        body = {name: value for name, value in LEAST[route].items() if name != field}
        with pytest.raises(InvalidError) as caught:
            read(route, json.dumps(body).encode())
        assert caught.value.param == field


@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"model":"\xff"}', "not JSON"),
        (b'{"model":"\\ud800"}', "not JSON"),
        (b"[]", "Expected `object`"),
        (b'{"x":' + b"[" * 40_000, "nested too deeply"),
    ],
)
def test_what_is_no_body_at_all_is_told_so(route: Route, content: bytes, message: str) -> None:
    with pytest.raises(InvalidError) as caught:
        read(route, content)
    assert message in caught.value.message
    assert caught.value.param is None


@pytest.mark.parametrize("content", [b'["\xff"]', b"1e999", b"9" * 5_000])
def test_tools_that_cannot_be_read_are_refused(content: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user"}],"tools":%b}' % content
    with pytest.raises(InvalidError):
        read(Route.CHAT, body)


def test_blocks_within_blocks_end_somewhere() -> None:
    deep = b'[{"content":' * 400 + b'"x"' + b"}]" * 400
    body = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":%b}]}'
    with pytest.raises(InvalidError, match="nested too deeply"):
        read(Route.MESSAGES, body % deep)


SECRET = "tell-nobody"


@pytest.mark.parametrize("mark", [{SECRET: 1}, {"optional": SECRET}, {"kind": SECRET * 9}])
def test_a_mark_at_fault_is_not_repeated(mark: object) -> None:
    with pytest.raises(InvalidError) as caught:
        ask(Route.CHAT, messages=[{"role": "user", "content": "x", "headrace": mark}])
    assert SECRET not in f"{caught.value.message} {caught.value.param}"


NAMES = sorted(
    {field.name for one in STRUCTS.values() for field in fields(one)}
    | {"role", "content", "type", "text", "image_url", "url", "detail", "source", "data", "file"}
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.just(SECRET),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*NAMES, "headrace", "optional", "kind", SECRET]) | st.text(max_size=3),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=400)
@given(route=st.sampled_from(list(Route)), others=st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_json_is_read_or_refused_and_never_repeated(
    route: Route, others: dict[str, object]
) -> None:
    try:
        asked = ask(route, **others)
    except InvalidError as error:
        told = f"{error.message} {error.param} {error}"
    else:
        told = ""
        assert asked.input_tokens >= 0
        assert asked.input_margin >= 0
        assert asked.fan_out >= 1
    assert SECRET not in told


@given(
    route=st.sampled_from(list(Route)),
    content=st.binary() | JSON.map(lambda x: json.dumps(x).encode()),
)
def test_any_bytes_are_read_or_refused(route: Route, content: bytes) -> None:
    with pytest.raises(InvalidError):
        read(route, content)


@given(st.sampled_from(list(Route)), st.data())
def test_spelling_does_not_matter(route: Route, data: st.DataObject) -> None:
    others = data.draw(st.fixed_dictionaries({"tools": JSON, "system": st.text()}))
    body = {**LEAST[route], **others}
    shuffled = dict(data.draw(st.permutations(list(body.items()))))
    compact = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    assert read(route, compact) == read(route, json.dumps(shuffled, indent=3).encode())
