"""Whatever a body says: an answer or an error in its API's shape, and the engine gets what was asked."""

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from headrace.ports.engine import Route
from tests.fuzz.serving import LEAST, SERVED, Front, explore, fronted, read_answer, whole
from tests.gateway.scenes import KEYS, MODEL

pytestmark = [pytest.mark.service, pytest.mark.slow]

_LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
OURS = {"model", "priority", "stream_options", *_LIMITS}
"""Fields that the gateway may say otherwise to the engine."""
ALLOWED = frozenset({200, 400, 404, 413, 422})

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70_000),
    st.sampled_from([10**18, -(10**18), 2**63, 2**64, 10**40, 0.5, -0.0, 1e308]),
    st.text(max_size=12),
    st.sampled_from(
        [MODEL, "other", "user", "system", "text", "image_url", "data:image/png;base64,"]
    ),
)
JSONS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.sampled_from(["role", "content", "type", "text", "url", "image_url", "data"]),
                st.text(max_size=5),
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=8,
)
MESSAGE = {"role": "user", "content": "hi"}
GOOD: dict[Route, dict[str, Any]] = {
    Route.CHAT: {"model": MODEL, "messages": [MESSAGE]},
    Route.COMPLETIONS: {"model": MODEL, "prompt": "hi"},
    Route.RESPONSES: {"model": MODEL, "input": "hi"},
    Route.MESSAGES: {"model": MODEL, "messages": [MESSAGE], "max_tokens": 9},
    Route.EMBEDDINGS: {"model": MODEL, "input": "hi"},
}
PART = st.one_of(
    st.just({"type": "text", "text": "hi"}),
    st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}),
    st.just({"type": "input_audio", "input_audio": {"data": "////", "format": "wav"}}),
    st.fixed_dictionaries({"type": SCALARS, "text": JSONS}),
    JSONS,
)
ODD: dict[str, st.SearchStrategy[Any]] = {
    "model": st.one_of(st.sampled_from([MODEL, "other", "nope", ""]), JSONS),
    "messages": st.one_of(
        st.lists(st.fixed_dictionaries({"role": SCALARS, "content": st.lists(PART)}), max_size=3),
        st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": JSONS}), max_size=2),
        JSONS,
    ),
    "prompt": st.one_of(st.lists(st.integers(-1, 2**33)), st.lists(st.text(max_size=4)), JSONS),
    "input": st.one_of(st.lists(st.lists(st.integers())), st.lists(PART, max_size=2), JSONS),
    "stream": st.one_of(st.booleans(), JSONS),
    "stream_options": st.one_of(st.just({"include_usage": True}), JSONS),
}
NAMES = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "logprobs", "tools",
    "temperature", "stop", "user", "seed", "system", "instructions", "tool_choice", "echo", "suffix",
    "ignore_eos", "min_tokens", "cache_salt", "priority", "kv_transfer_params", "background", "store",
    "previous_response_id", "dimensions", "encoding_format", "response_format", "thinking", "metadata",
)  # fmt: skip


class Body(NamedTuple):
    """A body, and where it is sent."""

    route: Route
    content: bytes


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """Return a body that is nearly right, or not at all."""
    route = draw(st.sampled_from(list(GOOD)))
    fields = dict(GOOD[route])
    for name in draw(st.lists(st.sampled_from([*ODD, *NAMES]), max_size=3)):
        fields[name] = draw(ODD.get(name, JSONS))
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=1)):
        del fields[name]
    content = json.dumps(fields, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    kind = draw(st.sampled_from([*["as it is"] * 6, "bytes", "put", "cut", "twice", "deep", "bom"]))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    match kind:
        case "bytes":
            content = draw(st.binary(max_size=40))
        case "put":
            content = content[:at] + draw(st.binary(min_size=1, max_size=2)) + content[at + 1 :]
        case "cut":
            content = content[:at]
        case "twice":
            content = content[:-1] + b',"model":"m","prompt":"x","messages":[]}'
        case "deep":
            deep = draw(st.sampled_from([100, 5_000, 100_000]))
            content = content[:-1] + b',"metadata":' + b"[" * deep + b"]" * deep + b"}"
        case "bom":
            content = b"\xef\xbb\xbf" + content
        case _:
            pass
    return Body(route, content)


async def ask(front: Front, body: Body) -> None:
    """Ask, and hold what came back, and what the engine got, against what was asked."""
    before = len(front.engine.asked)
    head = (
        f"POST {body.route} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {KEYS['free']}\r\n"
        f"connection: close\r\ncontent-length: {len(body.content)}\r\n\r\n"
    )
    answer = read_answer(await front.exchange([head.encode() + body.content]))
    await front.settled()
    assert answer.complete
    is_elsewhere = answer.status == 503 and b'"no_ready_replica"' in answer.body
    assert answer.status in ALLOWED or is_elsewhere, (body, answer)
    asked = front.engine.asked[before:]
    assert len(asked) == (answer.status == 200)
    if answer.status != 200:
        told = json.loads(answer.body)
        assert told["error"]["message"], "an error says what is wrong"
        return
    ((path, got),) = asked
    sent = json.loads(body.content)
    assert path == body.route
    assert got["model"] == SERVED
    assert {k: v for k, v in got.items() if k not in OURS} == {
        k: v for k, v in sent.items() if k not in OURS
    }


def test_bodies_of_any_json() -> None:
    with fronted() as front:
        front.engine.says = whole(b"{}")
        tried = explore(bodies(), lambda one: front.run(ask(front, one)))
        assert tried >= LEAST
        assert front.engine.asked, "some must be valid"


@pytest.mark.parametrize("route", list(GOOD))
@pytest.mark.parametrize(
    "odd", [b'"\xab":1', b'"x":"\xab"', b'"x":{"\xab":1}', b'"x":"\xed\xa0\x80"']
)
def test_what_is_not_utf8_is_refused_wherever_it_stands(route: Route, odd: bytes) -> None:
    content = json.dumps(GOOD[route]).encode()[:-1] + b"," + odd + b"}"
    with fronted() as front:
        front.run(ask(front, Body(route, content)))
        assert not front.engine.asked
