"""What the gateway reads out of a prompt: text, length, and how it begins."""

import json

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.prefix import CHUNK_BYTES, CHUNKS_MAX, identities
from headrace.gateway.prompt import canonical, decode, estimate


def chat(*contents: object, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_equal_prompts_are_equal_however_they_are_spelled() -> None:
    plain = canonical(decode(chat("grüße")))
    escaped = canonical(
        decode(b'{"messages": [ {"content":"gr\\u00fc\\u00dfe","role":"user"} ], "model":"m"}')
    )
    parts = canonical(
        decode(chat([{"type": "text", "text": "gr"}, {"type": "text", "text": "üße"}]))
    )
    assert plain == escaped == parts


def test_what_is_not_text_counts_nothing() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:" + "x" * 5_000}}
    with_image = canonical(decode(chat([{"type": "text", "text": "hi"}, image])))
    assert with_image == canonical(decode(chat("hi")))


def test_a_longer_conversation_begins_like_the_shorter() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    short = canonical(decode(chat("one", "two", tools=tools)))
    assert canonical(decode(chat("one", "two", "three", tools=tools))).startswith(short)
    assert canonical(decode(chat("one", "two"))) != short


def test_four_bytes_are_a_token_rounded_up() -> None:
    assert estimate(b"") == (0, 0)
    assert estimate(b"x" * 401) == (101, 25)


@given(
    common=st.integers(0, 3 * CHUNK_BYTES),
    one=st.integers(0, 2 * CHUNK_BYTES),
    other=st.integers(0, 2 * CHUNK_BYTES),
)
def test_prompts_share_the_ids_of_the_chunks_they_share(common: int, one: int, other: int) -> None:
    left = identities(b"s", b"m", b"c" * common + b"1" * one)
    right = identities(b"s", b"m", b"c" * common + b"2" * other)
    assert len(left) == (common + one) // CHUNK_BYTES
    shared = min(common // CHUNK_BYTES, len(left), len(right))
    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


def test_ids_depend_on_secret_scope_and_what_stood_before() -> None:
    prompt = b"p" * CHUNK_BYTES
    known = identities(b"s", b"m", prompt)
    assert known != identities(b"t", b"m", prompt)
    assert known != identities(b"s", b"n", prompt)
    assert known[0] != identities(b"s", b"m", prompt * 2)[1]
    assert all(0 <= one < 1 << 63 for one in known)


def test_a_prompt_has_at_most_512_ids() -> None:
    assert len(identities(b"s", b"m", b"p" * CHUNK_BYTES * (CHUNKS_MAX + 3))) == CHUNKS_MAX
