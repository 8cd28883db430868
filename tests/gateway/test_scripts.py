"""A prompt's bytes are told apart by script, at a bounded price, and only where all of it is text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.asked import read
from headrace.gateway.asked.scripts import scripts
from headrace.model.request import TextBytes
from headrace.ports.engine import Route

SAMPLED = 64 * 1_024
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def script_of(letter: str) -> str:
    """Return what a letter counts as, by its code point rather than its bytes."""
    point = ord(letter)
    if point < 0x80:
        return "ascii"
    if point < 0x800:
        return "two"
    return "cjk" if 0x3000 <= point < 0xE000 or 0xF000 <= point < 0x10000 else "other"


def counted(text: str) -> dict[str, int]:
    found = dict.fromkeys(("ascii", "two", "cjk", "other"), 0)
    for letter in text:
        found[script_of(letter)] += len(letter.encode())
    return found


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("plain words", "ascii"),
        ("привет", "two"),
        ("שלום", "two"),
        ("漢字かなカナ", "cjk"),
        ("한국어", "cjk"),
        ("\uff0c\u3002", "cjk"),
        ("नमस्ते", "other"),
        ("“…”", "other"),
        ("🙂", "other"),
    ],
)
def test_each_script_is_told(text: str, script: str) -> None:
    assert scripts(text.encode()) == TextBytes(**{script: len(text.encode())})


@given(st.text())
def test_every_byte_is_of_the_script_of_its_letter(text: str) -> None:
    assert scripts(text.encode()) == TextBytes(**counted(text))


@given(st.text(min_size=1, max_size=60), st.integers(SAMPLED, 4 * SAMPLED))
def test_a_long_text_is_told_by_samples_and_no_byte_is_lost(text: str, size: int) -> None:
    long = (text.encode() * (size // len(text.encode()) + 1))[:size]
    found, exact = scripts(long), counted(long.decode(errors="ignore"))
    assert found.total == size
    for name, count in exact.items():
        assert abs(getattr(found, name) - count) < size // 50
        assert getattr(found, name) >= 0


@pytest.mark.parametrize(
    ("route", "body", "size"),
    [
        (Route.CHAT, {"messages": [{"role": "user", "content": "hé"}]}, 9),
        (Route.CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}, None),
        (Route.COMPLETIONS, {"prompt": "hello"}, 5),
        (Route.COMPLETIONS, {"prompt": ["hello", "there"]}, None),
        (Route.COMPLETIONS, {"prompt": [1, 2, 3]}, None),
        (Route.COMPLETIONS, {"prompt": ""}, None),
        (Route.RESPONSES, {"input": "hello"}, 11),
        (Route.RESPONSES, {"input": "hello", "previous_response_id": "r"}, None),
        (Route.MESSAGES, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}, 11),
        (Route.EMBEDDINGS, {"input": ["hello", "there"]}, 11),
        (Route.EMBEDDINGS, {"input": [[1, 2], [3]]}, None),
    ],
)
def test_only_what_is_text_and_nothing_else_is_told(
    route: Route, body: dict[str, Any], size: int | None
) -> None:
    text = read(route, json.dumps({"model": "m", **body}).encode()).text
    assert (None if text is None else text.total) == size
