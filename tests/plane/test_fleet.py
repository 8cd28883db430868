"""Which replicas are there, how are they ranked, and who holds which prefix?"""

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.model.deployment import PoolSpec
from headrace.model.engine import Snapshot
from headrace.model.ids import (
    ClassName,
    Incarnation,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.request import Request
from headrace.plane.fleet import (
    HOLDERS,
    Candidate,
    Fleet,
    PrefixIndex,
    Replica,
    pool_facts,
    serves,
    view,
    was_reset,
)
from headrace.plane.ledger import Load
from headrace.policy.predict.demand import demand
from headrace.units import Blocks, DurationNs, InstantNs, Tokens
from tests.plane.scenes import H100, MS, config, small

FACTS = pool_facts(PoolSpec(name="p", model="m", profile=H100), 150.0, 0.05)
NOW = InstantNs(10**12)


def fleet(count: int) -> Fleet:
    made = Fleet()
    for nth in range(count):
        made.join(ReplicaName(f"r{nth}"), Incarnation(nth), PoolName("p"))
    return made


def asked(tokens: int = 1_000, prefix: tuple[int, ...] = (), chunk: int = 0) -> Request:
    return Request(
        id=RequestId(1),
        tenant=TenantId("a"),
        model=ModelName("m"),
        input_tokens=Tokens(tokens),
        prefix=prefix,
        prefix_tokens=Tokens(chunk),
    )


def candidate(request: Request, matches: tuple[tuple[int, int], ...] = ()) -> Candidate:
    settings_ = config()
    wanted = demand(request, settings_.models[0], settings_.pools[0], (200, 480))
    return Candidate(request, wanted, matches)


# Replicas and their ranking --------------------------------------------------------------------


def test_a_pool_keeps_a_reserve_and_a_window_of_two_steps_at_least() -> None:
    total = 430_000 // 16
    assert FACTS.blocks_total == total - total * 5 // 100
    assert FACTS.prefix_capacity == 430_000
    assert FACTS.window_ns == 150 * MS
    short = pool_facts(PoolSpec(name="p", model="m", profile=H100), 1.0, 0.0)
    step = H100.full_step_ns(256, 256 * 1_024)
    assert short.window_ns == 2 * step
    assert short.blocks_total == total


def test_the_least_loaded_come_first() -> None:
    made = fleet(3)
    for name, pending in (("r0", 50 * MS), ("r1", 10 * MS), ("r2", 30 * MS)):
        load = Load(pending_prefill_ns=DurationNs(pending), attempts=1)
        made.rerank(made.replicas[ReplicaName(name)], load, FACTS)
    assert [one.name for one in made.cheapest()] == ["r1", "r2", "r0"]


def test_running_streams_weigh_in_the_ranking() -> None:
    made = fleet(2)
    busy = Load(decodes=100, context_tokens=Tokens(100_000), attempts=100)
    made.rerank(made.replicas[ReplicaName("r0")], busy, FACTS)
    assert [one.name for one in made.cheapest()] == ["r1", "r0"]


def test_equals_go_to_who_was_used_longest_ago() -> None:
    made = fleet(3)
    for used, name in enumerate(("r1", "r0", "r2"), 1):
        one = made.replicas[ReplicaName(name)]
        one.last_used = used
        made.rerank(one, Load(), FACTS)
    assert [one.name for one in made.cheapest()] == ["r1", "r0", "r2"]


def test_a_rank_stays_inside_sixty_four_bits() -> None:
    made = fleet(1)
    one = made.replicas[ReplicaName("r0")]
    one.last_used = 2**32 + 5
    made.rerank(one, Load(pending_prefill_ns=DurationNs(10**18)), FACTS)
    assert 0 < one.rank < 2**62
    assert one.rank % 2**32 == 5


def test_a_name_is_there_once_and_its_slot_is_used_again() -> None:
    made = fleet(3)
    with pytest.raises(AssertionError, match="is in the fleet"):
        made.join(ReplicaName("r1"), Incarnation(9), PoolName("p"))
    assert made.leave(ReplicaName("r1")).slot == 1
    assert made.slots == ["r0", None, "r2"]
    assert made.join(ReplicaName("new"), Incarnation(10), PoolName("q")).slot == 1
    assert made.ready == {"p": 2, "q": 1}
    made.leave(ReplicaName("new"))
    assert made.ready == {"p": 2}


def test_whatever_may_open_a_replica_changes_the_version() -> None:
    made = fleet(1)
    before = made.version
    made.leave(ReplicaName("r0"))
    assert made.version > before


@pytest.mark.parametrize(
    ("classes", "expected"), [((), True), (("chat",), True), (("batch",), False)]
)
def test_a_pool_serves_its_classes_or_all(classes: tuple[str, ...], expected: bool) -> None:
    facts = pool_facts(PoolSpec(name="p", model="m", profile=H100, classes=classes), 150.0, 0.05)
    assert serves(facts, ClassName("chat")) is expected


# Prefixes ------------------------------------------------------------------------------------


def test_holders_nest_outwards_and_the_longest_match_is_first() -> None:
    made = fleet(3)
    index = PrefixIndex(made.replicas.values())
    for name, chain in (("r0", (1, 2, 3)), ("r1", (1, 2)), ("r2", (1, 9))):
        index.remember(made.replicas[ReplicaName(name)], chain, 100, 10**6)
    assert index.match((1, 2, 3, 4)) == [(3, 0b001), (2, 0b011), (1, 0b111)]
    assert index.match((1, 2)) == [(2, 0b011), (1, 0b111)]
    assert index.match((7, 2)) == []
    assert index.match(()) == []


def test_a_chain_is_forgotten_from_its_end() -> None:
    made = fleet(1)
    index = PrefixIndex(made.replicas.values())
    one = made.replicas[ReplicaName("r0")]
    index.remember(one, (1, 2, 3), 100, 400)
    index.remember(one, (1, 8, 9), 100, 400)  # one chunk too many: the end of the older chain goes
    assert index.match((1, 2, 3)) == [(2, 1)]
    index.remember(one, (1, 8, 9, 10), 100, 400)
    assert index.match((1, 2, 3)) == [(1, 1)]
    assert one.prefix_tokens == 400


def test_what_is_used_again_stays() -> None:
    made = fleet(1)
    index = PrefixIndex(made.replicas.values())
    one = made.replicas[ReplicaName("r0")]
    for chain in ((1,), (2,), (1,), (3,)):
        index.remember(one, chain, 100, 200)
    assert index.match((1,)) == [(1, 1)]
    assert index.match((2,)) == []


def test_a_chain_longer_than_the_pool_keeps_its_beginning() -> None:
    made = fleet(1)
    index = PrefixIndex(made.replicas.values())
    one = made.replicas[ReplicaName("r0")]
    index.remember(one, tuple(range(10)), 100, 350)
    assert index.match(tuple(range(10))) == [(3, 1)]


def test_who_leaves_holds_nothing_and_its_slot_inherits_nothing() -> None:
    made = fleet(2)
    index = PrefixIndex(made.replicas.values())
    for name in ("r0", "r1"):
        index.remember(made.replicas[ReplicaName(name)], (1, 2), 100, 10**6)
    index.forget(made.leave(ReplicaName("r0")))
    made.join(ReplicaName("next"), Incarnation(9), PoolName("p"))
    assert index.match((1, 2)) == [(2, 0b10)]
    index.forget(made.leave(ReplicaName("r1")))
    assert index.match((1, 2)) == []
    assert index._holders == {}


def test_other_holders_are_the_longest_first_few_in_number_and_none_twice() -> None:
    made = fleet(10)
    index = PrefixIndex(made.replicas.values())
    for nth in range(9):
        chain = (1, 2) if nth >= 7 else (1,)
        index.remember(made.replicas[ReplicaName(f"r{nth}")], chain, 100, 10**6)
    matches = tuple(index.match((1, 2)))
    assert [one.name for one in made.holders(matches, 0)] == ["r7", "r8", "r0", "r1"]
    assert HOLDERS == 4
    seen = 1 << 7 | 1 << 0
    assert [one.name for one in made.holders(matches, seen)] == ["r8", "r1", "r2", "r3"]
    made.leave(ReplicaName("r8"))
    assert [one.name for one in made.holders(((1, 1 << 8),), 0)] == [], "an empty slot is nobody"


class Prefixes(RuleBasedStateMachine):
    """The index says what the replicas hold, and equals one built from them."""

    CHAINS = ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 5), (1, 5, 6), (7, 8, 9), (7,))

    @initialize()
    def begin(self) -> None:
        self.fleet = Fleet()
        self.index = PrefixIndex(())
        self.life = 0

    @rule(name=st.sampled_from("abcde"))
    def join(self, name: str) -> None:
        self.life += 1
        if ReplicaName(name) not in self.fleet.replicas:
            self.fleet.join(ReplicaName(name), Incarnation(self.life), PoolName("p"))

    @precondition(lambda self: self.fleet.replicas)
    @rule(nth=st.integers(0, 9))
    def leave(self, nth: int) -> None:
        self.index.forget(self.fleet.leave(self.one(nth).name))

    def one(self, nth: int) -> Replica:
        return list(self.fleet.replicas.values())[nth % len(self.fleet.replicas)]

    @precondition(lambda self: self.fleet.replicas)
    @rule(nth=st.integers(0, 9), chain=st.sampled_from(CHAINS), tokens=st.sampled_from((64, 128)))
    def remember(self, nth: int, chain: tuple[int, ...], tokens: int) -> None:
        self.index.remember(self.one(nth), chain, tokens, 500)

    @precondition(lambda self: self.fleet.replicas)
    @rule(nth=st.integers(0, 9))
    def reset(self, nth: int) -> None:
        self.index.forget(self.one(nth))

    @invariant()
    def bits_are_the_holders(self) -> None:
        for one in self.fleet.replicas.values():
            assert one.prefix_tokens == sum(one.prefixes.values()) <= 500
        holders = self.index._holders
        assert all(holders.values())
        for chunk, bits in holders.items():
            names = {n for n, slot in enumerate(self.fleet.slots) if bits >> n & 1 and slot}
            held = {r.slot for r in self.fleet.replicas.values() if chunk in r.prefixes}
            assert names == held == {n for n in range(bits.bit_length()) if bits >> n & 1}

    @invariant()
    def chains_have_no_holes(self) -> None:
        for one in self.fleet.replicas.values():
            for chain in self.CHAINS:
                known = [chunk in one.prefixes for chunk in chain]
                assert known == sorted(known, reverse=True)

    @invariant()
    def matches_are_read_off_the_replicas(self) -> None:
        for chain in self.CHAINS:
            depth = {
                one.slot: sum(chunk in one.prefixes for chunk in chain)
                for one in self.fleet.replicas.values()
            }
            expected = [
                (level, sum(1 << slot for slot, reached in depth.items() if reached >= level))
                for level in sorted({d for d in depth.values() if d}, reverse=True)
            ]
            assert self.index.match(chain) == expected

    @invariant()
    def it_can_be_built_anew(self) -> None:
        content = msgspec.msgpack.encode(self.fleet)
        back = msgspec.msgpack.decode(content, type=Fleet)
        assert PrefixIndex(back.replicas.values())._holders == self.index._holders


TestPrefixes = Prefixes.TestCase
TestPrefixes.settings = settings(max_examples=80, stateful_step_count=30)


# Views ---------------------------------------------------------------------------------------


def test_a_view_says_what_was_dispatched_and_what_was_last_told() -> None:
    made = fleet(1)
    one = made.replicas[ReplicaName("r0")]
    load = Load(
        pending_prefill_ns=DurationNs(5 * MS),
        decodes=10,
        context_tokens=Tokens(20_000),
        blocks=Blocks(1_500),
        attempts=12,
        gaps={DurationNs(80 * MS): 12},
        tightest=DurationNs(80 * MS),
    )
    seen = view(one, load, FACTS, candidate(asked()), NOW)
    assert seen.age_ns is None, "it never reported: unknown, not zero"
    assert (seen.pending_prefill_ns, seen.decodes, seen.context_tokens) == (5 * MS, 10, 20_000)
    assert (seen.blocks_reserved, seen.blocks_total) == (1_500, FACTS.blocks_total)
    assert seen.slots == 256 - 12
    assert seen.tightest_gap_ns == 80 * MS
    assert seen.prefill_ns == H100.prefill_ns(1_000, 0, 10, 20_000, 512)
    assert seen.step_ns == H100.step_ps(11, 20_000 + 1_000 + 200, 512 - 11, 0) // 1_000
    costs = H100.costs
    assert seen.decode_extra_ns == (costs.decode_c * 10 + costs.decode_d * 20_000) // 1_000
    one.snapshot = Snapshot(
        replica=one.name, incarnation=one.incarnation, observed_at=InstantNs(NOW - 7 * MS)
    )
    assert view(one, load, FACTS, candidate(asked()), NOW).age_ns == 7 * MS


def test_a_cached_prefix_saves_its_prefill_but_never_the_last_token() -> None:
    made = fleet(2)
    wanted = candidate(asked(1_000, (1, 2), 600), matches=((2, 0b01), (1, 0b11)))
    whole, part = (
        view(made.replicas[ReplicaName(name)], Load(), FACTS, wanted, NOW) for name in ("r0", "r1")
    )
    assert whole.cached_tokens == 999, "one token is always computed"
    assert part.cached_tokens == 600
    assert part.prefill_ns == H100.prefill_ns(400, 600, 0, 0, 512)
    alone = H100.prefill_ns(1_000, 0, 0, 0, 512)
    assert part.prefix_credit_ns == alone - part.prefill_ns > 0
    assert wanted.prefill_alone_ns(H100) == alone
    none = view(made.replicas[ReplicaName("r0")], Load(), FACTS, candidate(asked()), NOW)
    assert (none.cached_tokens, none.prefix_credit_ns) == (0, 0)


def test_beside_others_a_prompt_takes_no_less_than_alone() -> None:
    """What lets a decision leave out a replica without a closer look."""
    for profile in (H100, small(8_192, running=4)):
        for tokens in (1, 100, 511, 512, 513, 5_000):
            alone = profile.prefill_ns(tokens, 0, 0, 0, profile.token_budget)
            for decodes in (1, 7, 200, 511, 512, 600):
                beside = profile.prefill_ns(tokens, 0, decodes, decodes * 50, profile.token_budget)
                assert beside >= alone


def snapshot(**counts: Any) -> Snapshot:
    return Snapshot(
        replica=ReplicaName("r0"), incarnation=Incarnation(1), observed_at=NOW, **counts
    )


@pytest.mark.parametrize(
    ("before", "after", "reset"),
    [
        ({}, {}, False),
        ({"preemptions": 3}, {"preemptions": 3}, False),
        ({"preemptions": 3}, {"preemptions": 2}, True),
        ({"preemptions": 3}, {"preemptions": None}, False),
        ({"prefix_tokens_queried": 10}, {"prefix_tokens_queried": 0}, True),
        ({"prefix_tokens_hit": 10, "preemptions": 1}, {"prefix_tokens_hit": 9}, True),
    ],
)
def test_counts_that_fell_mean_an_engine_that_restarted_in_place(
    before: dict[str, int | None], after: dict[str, int | None], reset: bool
) -> None:
    assert was_reset(snapshot(**before), snapshot(**after)) is reset
