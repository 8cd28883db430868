"""What the gateway reads out of a prompt: text, length, and how it begins."""

import json

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from headrace.gateway.prefix import CHUNK_BYTES, CHUNKS_MAX, identities
from headrace.gateway.prompt import Chat, canonical, decode, estimate


def chat(*contents: object, **others: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "m", "messages": messages, **others}).encode()


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


def test_null_is_as_good_as_nothing() -> None:
    """Optional fields are nullable in OpenAI's schema, and some clients write them all."""
    part = {"type": "text", "text": "hi"}
    message: dict[str, object] = {"role": "user", "content": [part]}
    plain = decode(json.dumps({"model": "m", "messages": [message]}).encode())
    other = {"type": "image_url", "text": None}
    message = {"role": "user", "content": [part, other], "tool_calls": None, "name": None}
    names = (*(field.name for field in fields(Chat) if not field.required), "temperature")
    nulls = decode(
        json.dumps({"model": "m", "messages": [message], **dict.fromkeys(names)}).encode()
    )
    assert canonical(nulls) == canonical(plain)
    assert bool(nulls.stream) is False
    assert (nulls.output_cap, nulls.n or 1, nulls.cache_salt or "") == (None, 1, "")
    assert not nulls.wants_usage
    options = decode(chat("hi", stream=True, stream_options={"include_usage": None}))
    assert options.stream
    assert not options.wants_usage


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
