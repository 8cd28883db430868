"""What whole answers tell of usage, on every route."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.upstream.usage import usage_of
from headrace.model.engine import Usage
from headrace.ports.engine import Route
from headrace.units import REQUEST_TOKENS_MAX, Tokens


def usage(given: int, cached: int | None, made: int) -> Usage:
    """Return a usage; None: nothing is said of the cache, which is not the same as none cached."""
    return Usage(
        input_tokens=Tokens(given),
        cached_tokens=Tokens(cached or 0),
        output_tokens=Tokens(made),
        tells_cached=cached is not None,
    )


OPENAI = b'{"prompt_tokens":49,"completion_tokens":3,"total_tokens":52%s}'
WRITTEN = b'"cache_creation_input_tokens":2,"cache_read_input_tokens":40,"output_tokens":3'
CACHED = OPENAI % b',"prompt_tokens_details":{"cached_tokens":40,"audio_tokens":0}'


@pytest.mark.parametrize(
    ("route", "told", "expected"),
    [
        (Route.CHAT, CACHED, usage(49, 40, 3)),
        (Route.CHAT, OPENAI % b"", usage(49, None, 3)),
        (Route.CHAT, OPENAI % b',"prompt_tokens_details":null', usage(49, None, 3)),
        (
            Route.CHAT,
            OPENAI % b',"prompt_tokens_details":{"cached_tokens":null}',
            usage(49, None, 3),
        ),
        (Route.CHAT, CACHED.replace(b":40", b":0"), usage(49, 0, 3)),
        (Route.COMPLETIONS, CACHED, usage(49, 40, 3)),
        (Route.EMBEDDINGS, b'{"prompt_tokens":49,"total_tokens":49}', usage(49, None, 0)),
        (Route.EMBEDDINGS, b'{"prompt_tokens":49,"completion_tokens":null}', usage(49, None, 0)),
        (
            Route.RESPONSES,
            b'{"input_tokens":49,"input_tokens_details":{"cached_tokens":40},"output_tokens":3}',
            usage(49, 40, 3),
        ),
        (Route.RESPONSES, b'{"input_tokens":49,"output_tokens":3}', usage(49, None, 3)),
        (
            Route.MESSAGES,
            b'{"input_tokens":7,%s}' % WRITTEN,
            usage(49, 40, 3),
        ),
        (
            Route.MESSAGES,
            b'{"input_tokens":7,"cache_read_input_tokens":null,"output_tokens":3}',
            usage(7, None, 3),
        ),
        (  # vLLM counts cached tokens in, and never tells what went into the cache
            Route.MESSAGES,
            b'{"input_tokens":49,"cache_read_input_tokens":40,"output_tokens":3}',
            usage(49, 40, 3),
        ),
        (
            Route.MESSAGES,
            b'{"input_tokens":9,%s}' % WRITTEN.replace(b":2,", b":0,"),
            usage(49, 40, 3),
        ),
        (  # more than there is cannot be among it
            Route.MESSAGES,
            b'{"input_tokens":7,"cache_read_input_tokens":40,"output_tokens":3}',
            usage(47, 40, 3),
        ),
        (Route.MESSAGES, b'{"input_tokens":7}', None),
    ],
)
def test_each_route_has_its_words(route: Route, told: bytes, expected: Usage | None) -> None:
    for body in (
        b'{"usage":%s}' % told,
        b'{"id":"x","choices":[{"usage":{"prompt_tokens":1}}],"data":[[1.5,-2e3]],"usage":%s }'
        % told,
    ):
        assert usage_of(route, body) == expected


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"ok", b"[]", b"{}", b'{"usage":null}', b'{"usage":3}', b'{"usage":{}}', b"\xff",
        b'{"usage":{"prompt_tokens":-1,"input_tokens":-1,"output_tokens":1}}',
        b'{"usage":{"prompt_tokens":"7","input_tokens":"7","output_tokens":1}}',
        b'{"usage":' + b"[" * 5_000, b'{"error":{"message":"no"}}',
    ],
)  # fmt: skip
def test_what_tells_no_usage_tells_none(route: Route, body: bytes) -> None:
    assert usage_of(route, body) is None


@given(route=st.sampled_from(Route), body=st.binary(max_size=60))
def test_no_answer_is_too_strange(route: Route, body: bytes) -> None:
    assert usage_of(route, body) is None
    usage_of(route, b'{"usage":' + body + b"}")


_WORDS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cached_tokens")
_MORE = ("cache_read_input_tokens", "cache_creation_input_tokens")
_NUMBERS = st.one_of(
    st.integers(),
    st.integers(0, 10),
    st.sampled_from([REQUEST_TOKENS_MAX, REQUEST_TOKENS_MAX + 1, 10**18, 2**63, 2**64, 10**23]),
    st.floats(),
)


@given(st.sampled_from(Route), st.dictionaries(st.sampled_from(_WORDS + _MORE), _NUMBERS))
def test_whatever_number_is_told_fits_or_is_no_usage(route: Route, told: dict[str, float]) -> None:
    details = {"cached_tokens": told.get("cached_tokens")}
    more = {"prompt_tokens_details": details, "input_tokens_details": details}
    found = usage_of(route, json.dumps({"usage": told | more}).encode())
    if found is not None:
        assert 0 <= found.output_tokens <= REQUEST_TOKENS_MAX
        assert 0 <= found.cached_tokens <= REQUEST_TOKENS_MAX
        assert 0 <= found.input_tokens <= 3 * REQUEST_TOKENS_MAX
