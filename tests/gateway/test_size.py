"""Which bodies have too many parts: exactly those, whatever stands in their strings."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.asked import size
from headrace.gateway.asked.size import is_bounded

TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(alphabet='"\\{[,:]}a\n\u20ac', max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text('"\\{[a', max_size=3), inner)
    ),
    max_leaves=30,
)


def parts(tree: Any) -> int:
    """Count strings, objects and lists by walking the tree."""
    match tree:
        case str():
            return 1
        case list():
            return 1 + sum(map(parts, tree))
        case dict():
            return 1 + len(tree) + sum(map(parts, tree.values()))
        case _:
            return 0


@given(tree=TREES, spaced=st.booleans(), plain=st.booleans())
def test_parts_are_counted_as_a_reader_would(tree: Any, *, spaced: bool, plain: bool) -> None:
    content = json.dumps(tree, indent=1 if spaced else None, ensure_ascii=plain).encode()
    with pytest.MonkeyPatch.context() as patch:
        for limit in range(max(0, parts(tree) - 2), parts(tree) + 2):
            patch.setattr(size, "PARTS_MAX", limit)
            assert is_bounded(content) is (parts(tree) <= limit or len(content) <= limit)


@pytest.mark.parametrize("content", [b'"', b'\\"', b'"\\', b"{" * 9, b'"{"["', b"", b"\xff"])
def test_what_is_no_json_is_counted_too(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "PARTS_MAX", 1)
    assert is_bounded(content) in (True, False)


def test_text_and_numbers_may_be_as_long_as_a_body() -> None:
    text = "x[i] = {'a': [\"b\"]}\n" * 200_000
    for body in ({"content": text}, {"ids": list(range(500_000))}):
        assert is_bounded(json.dumps(body).encode())
