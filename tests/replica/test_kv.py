"""The pool conserves blocks, finds what it was given, and forgets the least recently used."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.replica.kv import Extent, Ids, KvPool

CHUNK = 4  # blocks


def pool(blocks: int = 100) -> KvPool:
    """Return a pool with chunks of four blocks."""
    made = KvPool(blocks)
    made.chunk_by(CHUNK * 16)
    return made


def put(kv: KvPool, ids: Ids, blocks: int) -> Extent:
    """Compute a prefix as a request that found nothing would; it stays locked."""
    kv.take(blocks)
    return kv.share(kv.lock(kv.match(ids, 0)), ids, blocks)


def test_a_prefix_is_found_up_to_where_ids_differ() -> None:
    kv = pool()
    put(kv, (1, 2, 3), 12)
    assert kv.match((1, 2, 3), 12).blocks == 12
    assert kv.match((1, 2, 9, 3), 16).blocks == 8
    assert kv.match((9, 2, 3), 12).blocks == 0
    assert kv.match((1, 2, 3), 11).blocks == 11
    assert kv.match((1, 2), 8).blocks == 8
    kv.check(0)


def test_equal_prefix_computed_twice_is_kept_once() -> None:
    kv = pool()
    one = put(kv, (1, 2), 8)
    kv.take(8)
    two = kv.share(kv.lock(kv.match((1, 2), 0)), (1, 2), 8)
    assert one is two
    assert kv.free == 92
    kv.unlock(one)
    assert kv.evictable == 0
    kv.unlock(two)
    assert kv.evictable == 8
    kv.check(0)


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    kv = pool(16)
    old, new = put(kv, (1, 2), 8), put(kv, (5, 6), 8)
    kv.unlock(old)
    kv.unlock(new)
    kv.take(3)
    assert kv.match((1, 2), 8).blocks == 5
    assert kv.match((5, 6), 8).blocks == 8
    kv.unlock(kv.lock(kv.match((1,), 4)))
    kv.take(2)
    # The first chunk was used again since: what went is the rest of the old prefix and of the new.
    assert kv.match((1, 2), 8).blocks == 4
    assert kv.match((5, 6), 8).blocks == 7
    kv.check(5)


def test_what_is_locked_stays_and_its_parent_with_it() -> None:
    kv = pool(20)
    base = put(kv, (1,), 4)
    kv.take(4)
    longer = kv.share(kv.lock(kv.match((1, 2), 4)), (1, 2), 8)
    kv.unlock(base)
    kv.unlock(put(kv, (7, 8), 8))
    assert kv.evictable == 8
    kv.take(12)
    assert kv.match((1, 2), 8).blocks == 8
    assert kv.match((7,), 4).blocks == 0
    kv.unlock(longer)
    kv.check(12)


def test_a_growing_session_stays_one_extent() -> None:
    kv = pool()
    ids: Ids = ()
    for turn in range(10):
        before, ids = len(ids) * CHUNK, (*ids, turn)
        held = kv.lock(kv.match(ids, before))
        kv.take(CHUNK)
        kv.unlock(kv.share(held, ids, before + CHUNK))
    assert len(kv.root.children) == 1
    assert not kv.root.children[0].children
    assert kv.match(ids, 40).blocks == 40
    kv.check(0)


def test_notes_of_eviction_do_not_pile_up() -> None:
    kv = pool()
    kv.unlock(put(kv, (1,), 4))
    for _ in range(1_000):
        kv.unlock(kv.lock(kv.match((1,), 4)))
    assert len(kv._leaves) < 100
    kv.take(100)
    kv.check(100)


def test_a_pool_has_one_chunk_size() -> None:
    with pytest.raises(AssertionError, match="one chunk size"):
        pool().chunk_by(32)


class PoolLife(RuleBasedStateMachine):
    """Requests that match, compute, share and leave, against a record of what they hold."""

    def __init__(self) -> None:
        """Start with a pool that a few requests fill."""
        super().__init__()
        self.kv = pool(40)
        # extent, ids, blocks of the prefix locked, all blocks held
        self.held: list[tuple[Extent, Ids, int, int]] = []

    @rule(
        ids=st.lists(st.integers(0, 2), min_size=1, max_size=5), cut=st.integers(0, 3),
        extra=st.integers(0, 6),
    )  # fmt: skip
    def start(self, ids: list[int], cut: int, extra: int) -> None:
        """A request takes what the cache has and blocks for the rest."""
        # Chained ids: a chunk's says all that came before it.
        chain = tuple(hash(tuple(ids[: nth + 1])) for nth in range(len(ids)))
        found = self.kv.match(chain, len(chain) * CHUNK - cut)
        need = len(chain) * CHUNK - found.blocks + extra
        if need > self.kv.free + self.kv.evictable - found.idle:
            return
        extent = self.kv.lock(found)
        assert extent.end == found.blocks
        self.kv.take(need)
        self.held.append((extent, chain, found.blocks, found.blocks + need))

    @precondition(lambda self: self.held)
    @rule(nth=st.integers(0, 99), short=st.integers(0, 5))
    def publish(self, nth: int, short: int) -> None:
        """A request shares what it has computed; the cache has it then."""
        nth %= len(self.held)
        extent, ids, locked, blocks = self.held[nth]
        full = len(ids) * CHUNK - short
        if full > locked:
            extent = self.kv.share(extent, ids, full)
            assert extent.end == full
            assert self.kv.match(ids, full).blocks == full
            self.held[nth] = (extent, ids, full, blocks)

    @precondition(lambda self: self.held)
    @rule(nth=st.integers(0, 99))
    def leave(self, nth: int) -> None:
        """A request frees its own blocks; its prefix stays."""
        extent, ids, locked, blocks = self.held.pop(nth % len(self.held))
        self.kv.free += blocks - locked
        self.kv.unlock(extent)
        assert self.kv.match(ids, locked).blocks == locked

    @invariant()
    def conserved(self) -> None:
        """Blocks add up, and what a request locked is still there and ends where it did."""
        self.kv.check(sum(blocks - locked for _, _, locked, blocks in self.held))
        for extent, ids, locked, _ in self.held:
            assert extent.end == locked
            assert not locked or self.kv.match(ids, locked).idle == 0
            assert self.kv.match(ids, locked).blocks == locked


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
