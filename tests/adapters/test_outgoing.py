"""What an engine is asked for: the caller's words, but for what the plane or the engine must have."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from headrace.adapters.engines.outgoing import edited
from headrace.model.effect import Dispatch
from headrace.model.ids import (
    AttemptId,
    ClassName,
    DecisionId,
    Incarnation,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.ladder import Lesser
from headrace.model.paths import Level, Link, path
from headrace.ports.engine import Ask, Route
from headrace.units import DurationNs, InstantNs, Tokens

LIMITS = {
    Route.CHAT: "max_tokens",
    Route.COMPLETIONS: "max_tokens",
    Route.RESPONSES: "max_output_tokens",
    Route.MESSAGES: "max_tokens",
}
EXACT = (Route.CHAT, Route.COMPLETIONS)


def dispatch(output_limit: int = 512, lesser: Lesser | None = None) -> Dispatch:
    """Return a dispatch with a limit, perhaps of a lesser form."""
    return Dispatch(
        request=RequestId(1),
        attempt=AttemptId(1),
        decision=DecisionId(1),
        replica=ReplicaName("r"),
        incarnation=Incarnation(1),
        output_limit=Tokens(output_limit),
        tenant=TenantId("t"),
        slo_class=ClassName("c"),
        deadline=InstantNs(0),
        relegated=False,
        way=path(Link(Level.CLASS, "c", 4), Link(Level.TENANT, "t")),
        counters=(7, 9),
        gap_ns=DurationNs(0),
        lesser=lesser,
    )


def ask(route: Route, body: bytes, *, stream: bool = False, replay: int | None = None) -> Ask:
    """Return what is asked."""
    return Ask(
        route=route,
        body=body,
        stream=stream,
        usage_shown=False,
        replay_output=None if replay is None else Tokens(replay),
    )


def sent(
    route: Route,
    said: dict[str, Any],
    *,
    model: str = "m",
    stream: bool = False,
    replay: int | None = None,
) -> dict[str, Any]:
    """Return what is sent of what was said."""
    body = msgspec.json.encode({"model": "m"} | said)
    out = edited(ask(route, body, stream=stream, replay=replay), dispatch(), model)
    fields: dict[str, Any] = json.loads(out)
    assert fields.pop("model") == model
    return fields


@pytest.mark.parametrize("route", Route)
def test_what_is_as_it_shall_be_is_sent_as_it_was_written(route: Route) -> None:
    body = b' { "model" : "m", "max_tokens": 9,\n"max_output_tokens":512, "x":1.50, "x": 2 }'
    assert edited(ask(route, body), dispatch(), "m") is body


@pytest.mark.parametrize("route", Route)
def test_the_engine_hears_its_own_name_of_the_model(route: Route) -> None:
    body = b'{"a": 1.50, "model": "m", "max_tokens":9,"max_output_tokens":9, "z":[ 1e2 ]}'
    out = edited(ask(route, body), dispatch(), 'org/"m"')
    assert out == (
        b'{"a":1.50,"model":"org/\\"m\\"","max_tokens":9,"max_output_tokens":9,"z":[ 1e2 ]}'
    )
    assert json.loads(edited(ask(route, b"{}"), dispatch(), "m"))["model"] == "m"
    adapted = replace(ask(route, b'{"model":"sql"}'), adapter="sql")
    assert json.loads(edited(adapted, dispatch(), "org/m"))["model"] == "sql"


@pytest.mark.parametrize("route", LIMITS)
@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (1, 1), (512, 512), (0, 0), (9.0, 9.0), (513, 512), (1e9, 512), (10**30, 512), (None, 512),
        (-1, 512), ("9", 512), (True, 512), ([9], 512),
    ],
)  # fmt: skip
def test_the_smaller_limit_holds(route: Route, said: Any, heard: float) -> None:
    name = LIMITS[route]
    assert sent(route, {name: said}) == {name: heard}
    assert sent(route, {}) == {name: 512}


def test_a_number_beyond_all_numbers_is_no_limit() -> None:
    out = edited(ask(Route.CHAT, b'{"model":"m","max_tokens":1e999}'), dispatch(), "m")
    assert out == b'{"model":"m","max_tokens":512}'


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ({"max_completion_tokens": 9}, {"max_completion_tokens": 9}),
        ({"max_completion_tokens": 999}, {"max_completion_tokens": 512}),
        ({"max_completion_tokens": None}, {"max_completion_tokens": None, "max_tokens": 512}),
        ({"max_completion_tokens": 999, "max_tokens": None},
         {"max_completion_tokens": 512, "max_tokens": None}),
        ({"max_completion_tokens": 999, "max_tokens": 9},
         {"max_completion_tokens": 512, "max_tokens": 9}),
    ],
)  # fmt: skip
def test_a_chat_has_two_words_for_it(said: dict[str, Any], heard: dict[str, Any]) -> None:
    assert sent(Route.CHAT, said) == heard


def test_embeddings_have_no_limit() -> None:
    assert sent(Route.EMBEDDINGS, {"input": "a"}, replay=5) == {"input": "a"}


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ({}, {"include_usage": True}),
        ({"stream_options": None}, {"include_usage": True}),
        ({"stream_options": {}}, {"include_usage": True}),
        ({"stream_options": {"include_usage": True}}, {"include_usage": True}),
        (
            {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
            {"include_usage": True, "continuous_usage_stats": True},
        ),
        ({"stream_options": 3}, 3),
        ({"stream_options": []}, []),
    ],
)
def test_a_stream_is_asked_for_its_usage(route: Route, said: dict[str, Any], heard: Any) -> None:
    limit = {LIMITS[route]: 9} if route in LIMITS else {}
    out = sent(route, {"stream": True} | limit | said, stream=True)
    if route in EXACT:
        assert out == {"stream": True, "stream_options": heard} | limit
    else:
        assert out == {"stream": True} | limit | said
    assert sent(route, limit | said) == limit, "never without a stream: engines refuse it"


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize(
    "said", [{}, {"include_usage": True}, {"continuous_usage_stats": False, "other": 1}]
)
def test_a_stream_is_asked_for_its_usage_in_each_frame_of_an_engine_that_knows_it(
    route: Route, said: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"model": "m", "stream": True, "stream_options": said}
    given = ask(route, json.dumps(body).encode(), stream=True)
    out = json.loads(edited(given, dispatch(), "m", continuous=True))
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert out["stream_options"] == (said | both if route in EXACT else said)


@pytest.mark.parametrize("route", LIMITS)
@pytest.mark.parametrize(("replay", "length"), [(7, 7), (0, 1), (900, 512)])
@pytest.mark.parametrize("said", [None, 3, 999])
def test_a_replay_makes_as_many_tokens_as_it_did(
    route: Route, replay: int, length: int, said: int | None
) -> None:
    name = LIMITS[route]
    exact = {"ignore_eos": True, "min_tokens": length} if route in EXACT else {}
    assert sent(route, {name: said}, replay=replay) == {name: length} | exact


def test_a_replay_of_a_chat_says_it_in_the_callers_words() -> None:
    said = {"max_completion_tokens": 9, "ignore_eos": False, "min_tokens": 1}
    heard = {"max_completion_tokens": 7, "ignore_eos": True, "min_tokens": 7}
    assert sent(Route.CHAT, said, replay=7) == heard
    body = msgspec.json.encode({"model": "m"} | heard)
    assert edited(ask(Route.CHAT, body, replay=7), dispatch(), "m") is body


EDITED = {
    "model", "max_tokens", "max_completion_tokens", "max_output_tokens", "stream_options",
    "ignore_eos", "min_tokens",
}  # fmt: skip
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
).map(lambda value: json.dumps(value, indent=1))
keys = st.sampled_from(sorted(EDITED)) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=8
)


@given(
    fields=st.dictionaries(keys, values, max_size=8),
    route=st.sampled_from(Route),
    stream=st.booleans(),
    replay=st.none() | st.integers(min_value=0, max_value=900),
)
def test_all_else_is_sent_byte_for_byte_and_in_order(
    fields: dict[str, str], route: Route, stream: bool, replay: int | None
) -> None:
    body = "{" + ", ".join(f"{json.dumps(k)} :\t{v} " for k, v in fields.items()) + "}"
    out = edited(ask(route, body.encode(), stream=stream, replay=replay), dispatch(), "m")
    decoded = msgspec.json.decode(out, type=dict[str, Raw])
    others = [key for key in decoded if key not in EDITED]
    assert others == [key for key in fields if key not in EDITED]
    for key in others:
        assert bytes(decoded[key]).strip() == fields[key].encode()
    kept = [key for key in fields if key in decoded]
    assert list(decoded)[: len(kept)] == kept, "what is added comes last"
    again = ask(route, out, stream=stream, replay=replay)
    assert edited(again, dispatch(), "m") is out, "nothing is left to be edited"
