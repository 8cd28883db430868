"""What of a prompt may be left out: what callers mark, what stays for all that, what engines are sent."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.adapters.engines.outgoing import edited
from headrace.gateway.asked import Asked, InvalidError, read, taken
from headrace.gateway.asked.marks import RANK_MAX
from headrace.model.ids import ModelName
from headrace.model.ladder import OPTIONAL_MAX, Effort, Lesser
from headrace.ports.engine import Ask, Place, Route
from tests.adapters.test_outgoing import dispatch

Json = dict[str, Any]

NAMES = {Route.CHAT: "messages", Route.RESPONSES: "input", Route.MESSAGES: "messages"}
ROUTES = tuple(NAMES)
LEAST: dict[Route, Json] = {
    Route.CHAT: {"model": "m", "max_tokens": 9},
    Route.RESPONSES: {"model": "m", "max_output_tokens": 9},
    Route.MESSAGES: {"model": "m", "max_tokens": 9},
}
QUESTION = {"role": "user", "content": "why?"}


def text(said: str, mark: object = None) -> Json:
    """Return a part that all three APIs take."""
    part = {"type": "text", "text": said}
    return part if mark is None else part | {"headrace": mark}


def told(route: Route, messages: list[Json], **others: object) -> bytes:
    return json.dumps({**LEAST[route], NAMES[route]: messages, **others}).encode()


def asked(route: Route, *messages: Json) -> Asked:
    return read(route, told(route, [*messages, QUESTION]))


def places(route: Route, *messages: Json) -> tuple[Place, ...]:
    return asked(route, *messages).options.places


def sent(route: Route, body: bytes, lesser: Lesser | None) -> Json:
    """Return what an engine gets of a body."""
    found, plain = taken(route, body)
    ask = Ask(
        route=route,
        body=plain,
        stream=False,
        usage_shown=False,
        optional=found.options.places,
    )
    heard: Json = json.loads(edited(ask, dispatch(lesser=lesser), "m"))
    return heard


def less(kept: int | None, effort: Effort | None = None, level: int = 2) -> Lesser:
    return Lesser(level=level, model=ModelName("m"), kept=kept, effort=effort)


@pytest.mark.parametrize("route", ROUTES)
def test_parts_and_whole_messages_may_be_left_out_by_rank(route: Route) -> None:
    found = asked(
        route,
        {"role": "user", "content": "long ago " * 100, "headrace": {"optional": 3}},
        {
            "role": "user",
            "content": [
                text("b" * 400, {"optional": 2}),
                text("kept"),
                text("a" * 800, {"optional": 1, "kind": "context"}),
                text("c" * 40, {"optional": 2}),
            ],
        },
    ).options
    assert found.places == ((1, 2), (1, 0), (1, 3), (0, None))
    assert found.tokens[:3] == (200, 100, 10)
    assert found.tokens[3] == pytest.approx(225, abs=3)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["citation", "acl", "safety", "Context", "", "what nobody knows"])
def test_evidence_is_never_optional(route: Route, kind: str) -> None:
    mark = {"optional": 1, "kind": kind}
    assert places(route, {"role": "user", "content": [text("x", mark)]}) == ()
    assert places(route, {"role": "user", "content": "x", "headrace": mark}) == ()
    marked = {
        "role": "user",
        "content": [text("x", {"kind": kind}), text("y")],
        "headrace": {"optional": 1},
    }
    assert places(route, marked) == (), "a message does not take its evidence along"


@pytest.mark.parametrize(
    ("route", "message"),
    [
        *((route, {"role": role}) for route in ROUTES for role in ("system", "developer", "robot")),
        (Route.CHAT, {"role": "tool", "tool_call_id": "1"}),
        (Route.CHAT, {"role": "function", "name": "f"}),
        (Route.CHAT, {"role": "assistant", "tool_calls": [{"id": "1"}]}),
        (Route.CHAT, {"role": "assistant", "function_call": {"name": "f"}}),
        (Route.RESPONSES, {"type": "function_call_output", "call_id": "1", "output": "x"}),
        (Route.RESPONSES, {"type": "item_reference", "role": "user"}),
    ],
)
def test_rules_and_tools_are_never_optional(route: Route, message: Json) -> None:
    mark = {"optional": 1}
    assert places(route, {**message, "content": [text("x", mark), text("y")]}) == ()
    assert places(route, {**message, "content": "x", "headrace": mark}) == ()


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        {"type": "tool_result", "tool_use_id": "1", "content": "x"},
        {"type": "thinking", "thinking": "x", "signature": "s"},
        {"type": "of tomorrow", "text": "x"},
        {"type": "document", "source": {"type": "text"}, "citations": {"enabled": True}},
        text("x") | {"citations": [{"document_index": 0}]},
        *(
            {"type": "document", "source": {"type": "content", "content": [text("x"), inner]}}
            for inner in (text("x", {"kind": "acl"}), text("x") | {"citations": [{"index": 0}]})
        ),
        {
            "type": "search_result",
            "content": [
                {"type": "document", "content": text("x", {"optional": 1, "kind": "citation"})}
            ],
        },
    ],
)
def test_blocks_that_others_refer_to_stay(block: Json) -> None:
    mark = {"optional": 1}
    marked = {"role": "user", "content": [block | {"headrace": mark}, text("y")]}
    assert places(Route.MESSAGES, marked) == ()
    whole = {"role": "user", "content": [block, text("y")], "headrace": mark}
    assert places(Route.MESSAGES, whole) == ()


@pytest.mark.parametrize("route", [Route.CHAT, Route.RESPONSES])
@pytest.mark.parametrize("field", ["annotations", "citations"])
def test_an_earlier_answer_that_cites_stays(route: Route, field: str) -> None:
    mark, cited = {"optional": 1}, {field: [{"type": "url_citation", "start_index": 0}]}
    parts = [text("x", mark) | cited, text("y")]
    assert places(route, {"role": "assistant", "content": parts}) == ()
    whole = {"role": "assistant", "content": [text("x") | cited], "headrace": mark}
    assert places(route, whole) == ()
    nothing = {"role": "assistant", "content": [text("x") | {field: []}], "headrace": mark}
    assert places(route, nothing) == ((0, None),)


def test_a_message_that_cites_stays() -> None:
    said = {"role": "assistant", "content": "x", "headrace": {"optional": 1}}
    cited = said | {"annotations": [{"type": "url_citation"}]}
    assert places(Route.CHAT, cited, said | {"annotations": None}) == ((1, None),)


def test_the_answer_behind_thoughts_stays_with_them() -> None:
    thoughts = {"type": "reasoning", "summary": []}
    said = {"role": "assistant", "content": "x", "headrace": {"optional": 1}}
    assert places(Route.RESPONSES, thoughts, said) == ()
    assert places(Route.RESPONSES, said) == ((0, None),)


@pytest.mark.parametrize("route", ROUTES)
def test_the_question_is_never_left_out_as_a_whole(route: Route) -> None:
    mark = {"optional": 1}
    for content in ("x", [text("x", mark)], [text("x", mark), text("y", mark)]):
        question = {"role": "user", "content": content, "headrace": mark}
        for after in ([], [{"role": "assistant", "content": "Because", "headrace": mark}]):
            assert read(route, told(route, [question, *after])).options.places == ()
    some = {"role": "user", "content": [text("x", mark), text("y")]}
    assert read(route, told(route, [some])).options.places == ((0, 0),)


def test_the_question_is_the_last_that_a_user_says_not_the_result_of_a_tool() -> None:
    mark = {"optional": 1}
    question = {"role": "user", "content": "x", "headrace": mark}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}
    body = told(Route.MESSAGES, [question, call, result])
    assert read(Route.MESSAGES, body).options.places == ()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("mark", "field"),
    [
        (7, "headrace"),
        ("optional", "headrace"),
        ([], "headrace"),
        ({"optional": 0}, "headrace.optional"),
        ({"optional": RANK_MAX + 1}, "headrace.optional"),
        ({"optional": "1"}, "headrace.optional"),
        ({"optional": True}, "headrace.optional"),
        ({"optional": 1, "kind": 3}, "headrace.kind"),
        ({"optional": 1, "kind": "x" * 65}, "headrace.kind"),
        ({"optoinal": 1}, "headrace"),
    ],
)
def test_a_mark_that_is_none_is_blamed(route: Route, mark: object, field: str) -> None:
    for message in (
        {"role": "user", "content": "x", "headrace": mark},
        {"role": "user", "content": [text("x", mark)]},
    ):
        with pytest.raises(InvalidError) as caught:
            asked(route, message)
        assert caught.value.param is not None
        assert caught.value.param.endswith(f".{field}")


@pytest.mark.parametrize("route", ROUTES)
def test_no_mark_is_no_option(route: Route) -> None:
    assert places(route, {"role": "user", "content": [text("x") | {"headrace": None}]}) == ()
    assert places(route, {"role": "user", "content": [text("x", {})]}) == ()


def test_parts_beyond_the_most_that_are_told_apart_count_as_one() -> None:
    parts = [text("x" * 40, {"optional": 1}) for _ in range(OPTIONAL_MAX + 10)]
    found = asked(Route.CHAT, {"role": "user", "content": parts}).options
    assert len(found.places) == OPTIONAL_MAX + 10
    assert found.tokens == (*(10,) * OPTIONAL_MAX, 100)


def test_options_begin_where_the_first_of_them_stands() -> None:
    found = asked(
        Route.CHAT,
        {"role": "system", "content": "s" * 1_000},
        {"role": "user", "content": [text("x", {"optional": 2}), text("y", {"optional": 1})]},
    )
    assert found.prompt[found.options.begin :].startswith(b"xy")


@pytest.mark.parametrize("route", ROUTES)
def test_a_mark_changes_no_prompt(route: Route) -> None:
    plain = {"role": "user", "content": [text("x" * 5_000), text("y")]}
    marked = copy.deepcopy(plain)
    marked["content"][0]["headrace"] = {"optional": 1}  # type: ignore[index]
    assert asked(route, plain).prompt == asked(route, marked).prompt


# What engines are sent ------------------------------------------------------------------------

MARKS = st.fixed_dictionaries(
    {},
    optional={
        "optional": st.integers(1, 9),
        "kind": st.sampled_from(["context", "citation", "acl", "safety", "other"]),
    },
)


def marks(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    """Return objects some of which are marked."""
    marked = st.tuples(inner, MARKS).map(lambda one: one[0] | {"headrace": one[1]})
    return st.one_of(inner, marked)


PARTS = marks(
    st.one_of(
        st.text(max_size=8).map(text),
        st.integers(0, 9).map(lambda nth: {"type": "image", "n": nth}),
        st.just({"type": "tool_result", "content": [text("x", {"optional": 1})]}),
        st.just({"type": "tool_use", "id": "1", "input": {"headrace": {"their": "own"}}}),
    )
)
TURNS = marks(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            "content": st.one_of(st.text(max_size=8), st.lists(PARTS, max_size=4)),
        }
    )
)


def unmarked(value: Any) -> Any:
    """Return a message, a part or a list of them without what is ours, read from the rules and not from code."""
    if isinstance(value, list):
        return [unmarked(one) for one in value]
    if isinstance(value, dict):
        return {
            name: unmarked(one) if name == "content" else one
            for name, one in value.items()
            if name != "headrace"
        }
    return value


def expected(messages: list[Json], gone: set[Place]) -> list[Json]:
    """Return what is left of messages."""
    left = []
    for nth, message in enumerate(messages):
        if (nth, None) in gone:
            continue
        kept = dict(message)
        if isinstance(kept["content"], list):
            parts = enumerate(kept["content"])
            kept["content"] = [part for index, part in parts if (nth, index) not in gone]
            if message["content"] and not kept["content"]:
                continue
        left.append(unmarked(kept))
    return left


def stays(part: Any) -> bool:
    """Return whether something has a mark that keeps it, or none."""
    mark = part.get("headrace") or {} if isinstance(part, dict) else {}
    return "optional" not in mark or mark.get("kind", "context") != "context"


@given(
    route=st.sampled_from(ROUTES),
    messages=st.lists(TURNS, min_size=1, max_size=5),
    kept=st.integers(0, 5),
    escaped=st.booleans(),
)
@settings(max_examples=300)
def test_what_is_not_optional_is_sent_in_order_and_nothing_of_ours(
    route: Route, messages: list[Json], kept: int, escaped: bool
) -> None:
    body = told(route, messages, headrace={"of": "ours"}, tools=[{"headrace": 1}])
    if escaped:
        body = body.replace(b'"headrace":', b'"he\\u0061drace":')
    options = read(route, body).options.places
    gone = set(options[kept:])
    assert sent(route, body, None)[NAMES[route]] == unmarked(messages)
    heard = sent(route, body, less(kept))
    assert heard == {
        **LEAST[route],
        NAMES[route]: expected(messages, gone),
        "tools": [{"headrace": 1}],
    }
    for nth, part in gone:
        message = messages[nth]
        assert message["role"] in ("user", "assistant")
        if part is None:
            assert not stays(message)
            assert all("headrace" not in one for one in message["content"] if one != "")
        else:
            assert not stays(message["content"][part])


def test_what_stays_is_sent_as_it_was_written() -> None:
    body = (
        b'{"model":"m","max_tokens":9,"x":1.50, "messages": [ {"role":"user","content":'
        b'[ {"type":"text", "text":"caf\\u00e9", "n": 1e2},{"type":"text","text":"b","headrace":'
        b'{"optional":1}} ]},{"role" : "user","content":"why?"}]}'
    )
    found, plain = taken(Route.CHAT, body)
    ask = Ask(
        route=Route.CHAT,
        body=plain,
        stream=False,
        usage_shown=False,
        optional=found.options.places,
    )
    assert edited(ask, dispatch(lesser=less(0)), "m") == (
        b'{"model":"m","max_tokens":9,"x":1.50,"messages":[{"role":"user","content":'
        b'[{"type":"text", "text":"caf\\u00e9", "n": 1e2}]},{"role" : "user","content":"why?"}]}'
    )


@pytest.mark.parametrize("said", ["my headrace", "\\u0061", "plain"])
def test_a_body_without_anything_of_ours_is_itself(said: str) -> None:
    body = b'{ "model":"m","messages":[{"role":"user","content":"%s"}]}' % said.encode()
    assert taken(Route.CHAT, body)[1] is body


def test_what_is_nested_too_deeply_is_refused() -> None:
    deep = b'{"type":"x","headrace":{},"content":[' * 5_000 + b"]}" * 5_000
    with pytest.raises(InvalidError):
        read(Route.CHAT, b'{"model":"m","messages":[{"role":"user","content":[' + deep + b"]}]}")


@pytest.mark.parametrize("route", [Route.CHAT, Route.RESPONSES, Route.MESSAGES])
def test_marks_are_looked_for_no_deeper_than_apis_nest(route: Route) -> None:
    """Each level is read anew: a large body of many would keep everybody waiting."""
    name = "input" if route is Route.RESPONSES else "messages"

    def body(depth: int) -> bytes:
        head, tail = '{"type":"x","headrace":{},"content":[' * depth, "]}" * depth
        deep = f'{{"role":"user","content":[{head}{{"type":"text","text":"t"}}{tail}]}}'
        return f'{{"model":"m","max_tokens":1,"{name}":[{deep}]}}'.encode()

    assert b"headrace" not in taken(route, body(4))[1]
    with pytest.raises(InvalidError, match="nested too deeply"):
        taken(route, body(40))


@pytest.mark.parametrize(
    ("route", "said", "heard"),
    [
        (Route.CHAT, {"reasoning_effort": "high"}, {"reasoning_effort": "low"}),
        (Route.CHAT, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (Route.CHAT, {"reasoning_effort": "minimal"}, {"reasoning_effort": "minimal"}),
        (Route.CHAT, {"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        (Route.CHAT, {"reasoning_effort": "of tomorrow"}, {"reasoning_effort": "of tomorrow"}),
        (Route.CHAT, {"reasoning_effort": None}, {"reasoning_effort": None}),
        (Route.CHAT, {"reasoning_effort": 3}, {"reasoning_effort": 3}),
        (Route.CHAT, {}, {}),
        (
            Route.RESPONSES,
            {"reasoning": {"summary": "auto", "effort": "xhigh"}},
            {"reasoning": {"summary": "auto", "effort": "low"}},
        ),
        (Route.RESPONSES, {"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "low"}}),
        (Route.RESPONSES, {"reasoning": None}, {"reasoning": None}),
        (Route.RESPONSES, {}, {}),
    ],
)
def test_effort_is_lowered_where_the_caller_told_one(route: Route, said: Json, heard: Json) -> None:
    body = told(route, [QUESTION], **said)
    fields = sent(route, body, less(None, Effort.LOW, level=1))
    assert fields == json.loads(told(route, [QUESTION], **heard))
    assert sent(route, body, None) == json.loads(body)
    assert sent(route, body, less(None, None, level=1)) == json.loads(body)


@pytest.mark.parametrize(
    ("budget", "limit", "heard"),
    [
        (2_000, 4_096, {"type": "enabled", "budget_tokens": 2_000}),
        (4_096, 4_096, {"type": "enabled", "budget_tokens": 2_048}),
        (9_000, 2_047, {"type": "disabled"}),
    ],
)
def test_thoughts_leave_room_for_an_answer(budget: int, limit: int, heard: Json) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}
    body = told(Route.MESSAGES, [QUESTION], max_tokens=16_000, thinking=thinking)
    ask = Ask(route=Route.MESSAGES, body=body, stream=False, usage_shown=False)
    out = json.loads(edited(ask, dispatch(limit, lesser=less(None, level=1)), "m"))
    assert (out["thinking"], out["max_tokens"]) == (heard, limit)


@pytest.mark.parametrize(
    ("said", "heard"), [(513, 512), (512, 512), (9, 9), (None, None), ("600", "600")]
)
def test_no_answer_is_to_be_longer_than_it_may_be(said: Any, heard: Any) -> None:
    body = told(Route.CHAT, [QUESTION], min_tokens=said)
    assert sent(Route.CHAT, body, less(None, level=1))["min_tokens"] == heard
    assert sent(Route.CHAT, body, None)["min_tokens"] == said


def test_a_smaller_model_answers_under_its_own_name() -> None:
    ask = Ask(
        route=Route.CHAT,
        body=told(Route.CHAT, [QUESTION]),
        stream=False,
        usage_shown=False,
        adapter="sql",
    )
    for level, name in ((1, "sql"), (2, "sql"), (3, "org/small")):
        out = edited(ask, dispatch(lesser=less(0, level=level)), "org/small")
        assert json.loads(out)["model"] == name
