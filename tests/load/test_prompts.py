"""A made-up prompt is as long as the trace says, and begins like those that share its chunks."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.gateway.asked import Asked, read
from headrace.gateway.prefix import CHUNK_TOKENS, identities
from headrace.load.prompts import BYTES_PER_TOKEN, prompt
from headrace.ports.engine import Route
from headrace.trace.row import TraceRow
from headrace.units import InstantNs, Tokens


def row(tokens: int, prefix: tuple[int, ...] = (), chunk: int = 512) -> TraceRow:
    return TraceRow(
        at=InstantNs(0),
        input_tokens=Tokens(tokens),
        output_tokens=Tokens(1),
        prefix=prefix,
        prefix_tokens=chunk if prefix else 0,
    )


def seen(text: str) -> Asked:
    """Return a prompt as the gateway sees it."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return read(Route.CHAT, json.dumps(body).encode())


def chunks(text: str) -> tuple[int, ...]:
    return identities(b"secret", b"m", seen(text).prompt)


@given(st.integers(2, 20_000))
def test_the_gateway_counts_as_many_tokens_as_the_trace(tokens: int) -> None:
    assert seen(prompt(row(tokens), "0/1")).input_tokens == tokens


@pytest.mark.parametrize("chunk", [256, 512, 1_024])
def test_equal_leading_ids_are_equal_leading_chunks_and_no_more(chunk: int) -> None:
    one = chunks(prompt(row(5 * chunk, (7, 8, 9), chunk), "0/1"))
    two = chunks(prompt(row(5 * chunk, (7, 8, 4), chunk), "0/2"))

    shared = 2 * chunk // CHUNK_TOKENS
    assert one[:shared] == two[:shared]
    assert one[shared] != two[shared]


def test_what_is_behind_the_last_chunk_is_shared_with_nobody() -> None:
    one, two = (chunks(prompt(row(1_024, (7,)), salt)) for salt in ("0/1", "0/2"))

    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert prompt(row(1_024, (7,)), "0/1") == prompt(row(1_024, (7,)), "0/1")


def test_the_last_chunk_may_be_partial() -> None:
    text = prompt(row(700, (7, 8)), "0/1")

    assert estimate(seen(text))[0] == 700
    assert text == prompt(row(1_024, (7, 8)), "0/9")[: 700 * BYTES_PER_TOKEN - 6]


def test_the_shortest_prompt_is_not_empty() -> None:
    assert prompt(row(1), "0/1")
