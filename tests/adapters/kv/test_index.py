"""The index of a cache agrees with the cache, and never credits what is gone."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.adapters.engines.kv.events import Removed, Stored, read
from headrace.adapters.engines.kv.index import BlockIndex
from tests.adapters.kv.scenes import SIZE, batch, removed, stored

KEY = b"k" * 32


def store(index: BlockIndex, *args: Any, **more: Any) -> int:
    (event,) = read(batch(stored(*args, **more))).events
    assert isinstance(event, Stored)
    return index.store(event)


def remove(index: BlockIndex, *names: Any, **more: Any) -> int:
    (event,) = read(batch(removed(*names, **more))).events
    assert isinstance(event, Removed)
    return index.remove(event)


def filled() -> tuple[BlockIndex, list[int]]:
    """Return an index that holds a prompt of three blocks, and that prompt with one more token."""
    index, tokens = BlockIndex(KEY), list(range(13))
    assert store(index, [b"a", b"b"], tokens[:8]) == 2
    assert store(index, [b"c"], tokens[8:12], parent=b"b") == 1
    return index, tokens


def test_leading_blocks_are_found_and_one_token_is_always_computed() -> None:
    index, tokens = filled()
    assert index.block_tokens == SIZE
    found = [index.cached_tokens(tokens[:length]) for length in range(14)]
    assert found == [0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12]
    assert index.cached_tokens([*tokens[:7], 99, *tokens[8:]]) == 4
    assert index.cached_tokens([99, *tokens[1:]]) == 0
    assert index.cached_tokens(tokens[4:]) == 0, "the same tokens behind others are another block"


def test_a_block_that_left_ends_what_is_found_though_later_ones_stay() -> None:
    index, tokens = filled()
    assert remove(index, b"b", b"unheard of") == 2
    assert index.cached_tokens(tokens) == 4
    assert store(index, [b"b"], tokens[4:8], parent=b"a") == 1
    assert index.cached_tokens(tokens) == 12
    index.clear()
    assert (len(index), index.cached_tokens(tokens)) == (0, 0)


def test_what_is_told_again_is_not_new_and_one_removal_takes_it() -> None:
    index, tokens = filled()
    assert store(index, [b"a", b"b", b"c"], tokens[:12]) == 0
    remove(index, b"c")
    assert index.cached_tokens(tokens) == 8


def test_behind_an_unknown_block_nothing_is_credited_until_its_beginning_is_told() -> None:
    index, tokens = BlockIndex(KEY), list(range(13))
    assert store(index, [b"c"], tokens[8:12], parent=b"b") == 1
    assert (len(index), index.cached_tokens(tokens)) == (1, 0)
    assert store(index, [b"a", b"b", b"c"], tokens[:12]) == 2
    assert index.cached_tokens(tokens) == 12


@pytest.mark.parametrize(
    ("adapter", "salt", "keys"),
    [
        (None, "s", [["s"], None, None]),
        ("lora", None, [["lora"]] * 3),
        ("lora", "s", [["lora", "s"], ["lora"], ["lora"]]),
    ],
)
def test_adapters_and_salts_are_apart(adapter: str | None, salt: str | None, keys: Any) -> None:
    index, tokens = BlockIndex(KEY), list(range(13))
    store(index, [1, 2, 3], tokens[:12], lora_name=adapter, extra_keys=keys)
    for other, others_salt in product((None, "lora", "s"), (None, "lora", "s")):
        hit = (other, others_salt) == (adapter, salt)
        assert index.cached_tokens(tokens, adapter=other, salt=others_salt) == 12 * hit


def test_an_adapter_of_an_older_engine_is_known_by_its_number() -> None:
    index, tokens = BlockIndex(KEY), list(range(5))
    store(index, [1], tokens[:4], lora_id=3, extra_keys=None)
    assert [index.cached_tokens(tokens, adapter=one) for one in (None, 2, 3)] == [0, 0, 4]


def test_a_picture_in_a_block_is_not_taken_for_its_tokens() -> None:
    index, tokens = BlockIndex(KEY), list(range(9))
    store(index, [1, 2], tokens[:8], extra_keys=[None, [["picture", 2]]])
    assert index.cached_tokens(tokens) == 4


@pytest.mark.parametrize(
    "more",
    [
        {"medium": "CPU"},
        {"group_idx": 1},
        {"kv_cache_spec_kind": "sliding_window"},
        {"block_size": 2},
    ],
)
def test_what_does_not_count_is_counted_apart(more: dict[str, Any]) -> None:
    index, tokens = filled()
    assert store(index, [7], list(range(50, 54)), **more) == 0
    assert (index.elsewhere, index.is_bound) == (1, "group_idx" in more)
    assert len(index) == 3
    if "medium" in more or "group_idx" in more:
        assert remove(index, b"a", **more) == 0
        assert index.cached_tokens(tokens) == 12


def test_tokens_that_do_not_fill_their_blocks_are_not_guessed_at() -> None:
    index = BlockIndex(KEY)
    assert store(index, [1, 2], range(6)) == 2
    assert index.cached_tokens(range(9)) == 0
    remove(index, 1, 2)
    assert len(index) == 0


def test_an_empty_cache_may_have_blocks_of_another_size() -> None:
    index, tokens = filled()
    index.clear()
    store(index, [1], tokens[:2], block_size=2)
    assert (index.block_tokens, index.cached_tokens(tokens)) == (2, 2)


def test_beyond_its_bound_newcomers_are_left_out_and_nothing_is_made_up() -> None:
    index, tokens = BlockIndex(KEY, capacity=2), list(range(17))
    assert store(index, [1, 2, 3], tokens[:12]) == 2
    assert store(index, [4], tokens[12:16], parent=3) == 0
    assert (len(index), index.left_out) == (2, 2)
    assert index.cached_tokens(tokens) == 8
    remove(index, 3, 2)
    assert store(index, [5], tokens[4:8], parent=1) == 1
    assert index.cached_tokens(tokens) == 8


Content = tuple[tuple[int, ...], str | None]
"""All tokens of a prompt up to the end of a block, and its salt."""


class Cache(RuleBasedStateMachine):
    """An engine's cache by its contents, copies counted, beside the index of its events."""

    copies = True

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(KEY)
        self.held: Counter[Content] = Counter()
        self.names: dict[Content, int] = {}

    def _tell(self, tokens: list[int], salt: str | None, start: int) -> None:
        ends = range(start + SIZE, len(tokens) + 1, SIZE)
        contents = [(tuple(tokens[:end]), salt) for end in ends]
        names = [self.names.setdefault(one, len(self.names)) for one in contents]
        before = (tuple(tokens[:start]), salt)
        keys = [[salt] if salt and end == SIZE else None for end in ends]
        parent = self.names[before] if start else None
        store(self.index, names, tokens[start:], parent=parent, extra_keys=keys)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        salt=st.sampled_from((None, "s")),
        again=st.booleans(),
    )
    def prompt(self, tokens: list[int], salt: str | None, again: bool) -> None:
        """Store what is missing of a prompt; or all of it once more, beside what is there."""
        given = [one for one in tokens for _ in range(SIZE)]
        start = 0
        while not (again and self.copies) and start < len(given):
            if not self.held[tuple(given[: start + SIZE]), salt]:
                break
            start += SIZE
        if start < len(given):
            for end in range(start + SIZE, len(given) + 1, SIZE):
                if (again and self.copies) or not self.held[tuple(given[:end]), salt]:
                    self.held[tuple(given[:end]), salt] += 1
            self._tell(given, salt, start)

    @rule(nth=st.integers(0, 30))
    def hit(self, nth: int) -> None:
        """Report that a cached prompt is used again: no block is added."""
        whole = [
            one
            for one, copies in self.held.items()
            if copies
            and all(self.held[one[0][:end], one[1]] for end in range(SIZE, len(one[0]), SIZE))
        ]
        if whole:
            tokens, salt = whole[nth % len(whole)]
            self._tell(list(tokens), salt, 0)

    @rule(nth=st.integers(0, 30))
    def evict(self, nth: int) -> None:
        there = list(self.held.elements())
        if there:
            gone = there[nth % len(there)]
            self.held[gone] -= 1
            assert remove(self.index, self.names[gone]) == 1

    @rule()
    def clear(self) -> None:
        self.held.clear()
        self.index.clear()

    @invariant()
    def nothing_is_credited_that_is_gone(self) -> None:
        for length, salt in product(range(1, 5), (None, "s")):
            for tokens in product((0, 1), repeat=length):
                given = [one for one in tokens for _ in range(SIZE)]
                really = 0
                while really < len(given) and self.held[tuple(given[: really + SIZE]), salt]:
                    really += SIZE
                found = self.index.cached_tokens([*given, 9], salt=salt)
                assert found <= really
                assert self.copies or found == really


class Unique(Cache):
    """A cache without copies, which the index knows to the block."""

    copies = False


Cache.TestCase.settings = Unique.TestCase.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None
)
TestCache = Cache.TestCase
TestUnique = Unique.TestCase
