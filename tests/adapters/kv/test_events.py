"""What engines publish is read whatever its version, and what is none is named without quoting it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.engines.kv.events import Cleared, MalformedError, Removed, Stored, read
from tests.adapters.kv.scenes import CLEARED, batch, removed, stored

NAME = b"\x07" * 32


def test_every_kind_is_read_in_order() -> None:
    told = read(batch(stored([NAME], [1, 2, 3, 4], parent=9), removed(NAME, 5), CLEARED))
    first, second, third = told.events
    assert isinstance(first, Stored)
    assert (first.block_hashes, first.parent_block_hash) == ((NAME,), 9)
    assert (first.token_ids, first.block_size) == ((1, 2, 3, 4), 4)
    assert isinstance(second, Removed)
    assert second.block_hashes == (NAME, 5)
    assert isinstance(third, Cleared)
    assert told.unknown == 0


def test_rows_of_older_versions_are_read_as_well() -> None:
    told = read(
        batch(
            ["BlockStored", [2**64 - 1], None, [1, 2], 2, 3],
            ["BlockStored", [1], 2, [1, 2], 2, None, "GPU", "name", [["name"]], 1, "mamba", 0, {}],
            ["BlockRemoved", [1], "CPU"],
            ["AllBlocksCleared"],
        )
    )
    plain, full, gone, cleared = told.events
    assert isinstance(plain, Stored)
    assert (plain.block_hashes, plain.lora_id, plain.medium) == ((2**64 - 1,), 3, None)
    assert isinstance(full, Stored)
    assert (full.lora_name, full.group_idx, full.kv_cache_spec_kind) == ("name", 1, "mamba")
    assert isinstance(gone, Removed)
    assert gone.medium == "CPU"
    assert isinstance(cleared, Cleared)


def test_what_later_versions_add_is_passed_over() -> None:
    later = stored([1], [1, 2, 3, 4], locality="LOCAL", colour={"deep": [1]})
    told = read(batch(later, {"type": "BlockMoved", "to": 3}, ["BlockBent", 1], CLEARED))
    assert [type(one) for one in told.events] == [Stored, Cleared]
    assert told.unknown == 2
    more = msgspec.msgpack.encode([1, [], 0, "new"])
    assert read(more).events == ()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1, [3]]),
        msgspec.msgpack.encode([1, [{"kind": "BlockStored"}]]),
        msgspec.msgpack.encode([1, [[]]]),
        batch(stored([1], []) | {"token_ids": ["secret"]}),
        batch(stored([1], [-1])),
        batch(stored([1], [1], block_size=0)),
        batch(removed(b"x" * 65)),
        batch(removed("name")),
        b"\x92\x01" + b"\x91" * 100_000,
    ],
)
def test_what_is_no_batch_is_said_to_be_none(payload: bytes) -> None:
    with pytest.raises(MalformedError) as caught:
        read(payload)
    assert str(caught.value) == "no batch of events"
    assert caught.value.__cause__ is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_malformed(payload: bytes) -> None:
    try:
        read(payload)
    except MalformedError:
        return


def test_tokens_are_not_shown() -> None:
    told: Any = read(batch(stored([1], [76543] * 4), ["BlockStored", [1], None, [76543] * 2, 2]))
    assert "76543" not in repr(told)
