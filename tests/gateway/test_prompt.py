"""What the gateway reads out of a prompt: its canonical form, its length, and how it begins."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.asked import Asked, read
from headrace.gateway.asked.prompt import Prompt, Weight
from headrace.gateway.prefix import CHUNK_BYTES, CHUNKS_MAX, identities
from headrace.model.features import Feature
from headrace.ports.engine import Route


def chat(*contents: object, **others: object) -> Asked:
    messages = [{"role": "user", "content": content} for content in contents]
    return read(Route.CHAT, json.dumps({"model": "m", "messages": messages, **others}).encode())


def picture(data: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_equal_prompts_are_equal_however_they_are_spelled() -> None:
    plain = chat("grüße").prompt
    spelled = b'{"messages": [ {"content":"gr\\u00fc\\u00dfe","role":"user"} ], "model":"m"}'
    parts = chat([{"type": "text", "text": "gr"}, {"type": "text", "text": "üße"}]).prompt
    assert plain == read(Route.CHAT, spelled).prompt == parts


def test_equal_tools_are_equal_however_they_are_spelled() -> None:
    plain = b'{"model":"m","tools":[{"name":"\xc3\xbc","n":1}],"messages":[{"role":"user"}]}'
    spelled = b'{"model":"m","messages":[{"role":"user"}],"tools":[ {"name": "\\u00fc", "n":1 }]}'
    assert read(Route.CHAT, plain) == read(Route.CHAT, spelled)
    assert read(Route.CHAT, plain).features == (Feature.TOOLS,)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (Route.CHAT, {"messages": [{"role": "system", "content": "s"},
                                   {"role": "user", "content": "u"}]}),
        (Route.RESPONSES, {"instructions": "s", "input": "u"}),
        (Route.RESPONSES, {"instructions": "s", "input": [{"role": "user", "content": "u"}]}),
        (Route.MESSAGES, {"system": [{"type": "text", "text": "s"}], "max_tokens": 1,
                          "messages": [{"role": "user", "content": "u"}]}),
    ],
)  # fmt: skip
def test_the_same_talk_begins_alike_on_every_route(route: Route, body: dict[str, object]) -> None:
    asked = read(route, json.dumps({"model": "m", **body}).encode())
    assert asked.prompt == b"\x1esystem\x1fs\x1euser\x1fu"


def test_a_longer_conversation_begins_like_the_shorter() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    short = chat("one", [picture("AAAA")], tools=tools).prompt
    assert chat("one", [picture("AAAA")], "three", tools=tools).prompt.startswith(short)
    assert chat("one", [picture("AAAA")]).prompt != short


def test_tools_and_the_systems_words_come_first_wherever_they_stand() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"u"}],"max_tokens":1,%b}'
    asked = read(Route.MESSAGES, body % b'"system":"s","tools":[{"name":"f"}]')
    assert asked.prompt == b'[{"name":"f"}]\x1esystem\x1fs\x1euser\x1fu'


def test_images_are_told_apart_by_their_data() -> None:
    one, same, other = (chat([picture(data)]) for data in ("AAAA", "AAAA", "AAAB"))
    assert one == same
    assert one.prompt != other.prompt
    assert one.input_tokens == other.input_tokens


def test_a_chunk_of_a_prompt_stands_for_equally_many_tokens_whatever_it_is_made_of() -> None:
    asked = chat([picture("AAAA")])
    assert abs(len(asked.prompt) / 4 - asked.input_tokens) <= 4


def test_tiny_parts_make_no_huge_prompt() -> None:
    content = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [picture("AAAA")] * 5_000}]}
    ).encode()
    asked = read(Route.CHAT, content)
    assert asked.input_tokens > 5_000 * 700
    assert len(asked.prompt) < 512 * 1_024 + len(content)


def test_four_bytes_are_a_token_rounded_up() -> None:
    prompt = Prompt()
    assert prompt.counted().tokens == 0
    prompt.text("x" * 401)
    counted = prompt.counted()
    assert (counted.tokens, counted.margin) == (101, 25)


def test_token_ids_count_themselves_exactly() -> None:
    prompt = Prompt()
    prompt.ids([1, 2, 100_000])
    counted = prompt.counted()
    assert (counted.tokens, counted.margin, len(counted.prompt)) == (3, 0, 12)


def test_what_is_not_text_counts_by_its_weight() -> None:
    prompt = Prompt()
    prompt.text("x" * 400)
    prompt.media("y" * 9_999, Weight(500, 70))
    counted = prompt.counted()
    assert (counted.tokens, counted.margin) == (600, 25 + 70)


@given(st.lists(st.text()), st.text())
def test_more_text_is_no_fewer_tokens(contents: list[str], more: str) -> None:
    short = chat("", *contents)
    long = chat("", *contents, more)
    assert long.input_tokens >= short.input_tokens
    assert long.input_margin >= short.input_margin
    assert long.prompt.startswith(short.prompt)


@given(st.text(), st.text())
def test_text_is_the_same_prompt_if_and_only_if_it_is_the_same(one: str, other: str) -> None:
    assert (chat(one).prompt == chat(other).prompt) == (one == other)


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
