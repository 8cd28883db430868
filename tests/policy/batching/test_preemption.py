"""Who gives way, and by what: costs, offers, classes and shares."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.profiles import load_profile
from headrace.model.engine import Preemption
from headrace.model.ids import AttemptId, TenantId
from headrace.policy.batching.knobs import Entry
from headrace.policy.batching.preemption import (
    Held,
    Offers,
    choose,
    gives_way,
    giving_way,
    marked,
    tied,
    yields,
)
from headrace.units import Blocks, DurationNs, InstantNs, Tokens, blocks_for

PROFILE = load_profile("h100-8b-tp1")
KEEP, SWAP, RECOMPUTE = Preemption
ALL = Offers(mechanisms=tuple(Preemption), host_gb_per_s=8.0)


def held(tokens: int, shared: int = 0) -> Held:
    return Held(computed=Tokens(tokens), shared=Tokens(shared), blocks=Blocks(blocks_for(tokens)))


def entry(
    attempt: int,
    tenant: str = "t",
    counter: int = 0,
    gap: int = 50,
    *,
    relegated: bool = False,
    among: str = "",
) -> Entry:
    return Entry(
        attempt=AttemptId(attempt),
        tenant=TenantId(tenant),
        arrived_at=InstantNs(attempt),
        deadline=InstantNs(0),
        relegated=relegated,
        counter=counter,
        among=among,
        weight=1,
        prompt_tokens=Tokens(10),
        computed=Tokens(10),
        made=Tokens(1),
        gap_ns=DurationNs(gap),
    )


def test_short_contexts_are_computed_again_and_long_ones_swapped() -> None:
    assert choose(held(1_000), ALL, PROFILE, host_free=10_000).mechanism is RECOMPUTE
    assert choose(held(60_000), ALL, PROFILE, host_free=10_000).mechanism is SWAP


def test_every_term_of_a_choice_is_kept() -> None:
    choice = choose(held(1_600), ALL, PROFILE, host_free=100)
    # 1,600 tokens of 131,072 bytes at 8 bytes a ns, and the profile's own prefill work.
    assert choice.out_ns == choice.in_ns == 1_600 * 131_072 // 8
    assert int(choice.recompute_ns) == PROFILE.work_ns(1_600, 0, 0)
    assert choice.keep_ns is None
    assert choice.frees == 100
    assert choice.cost_ns == min(choice.recompute_ns, choice.out_ns + choice.in_ns)
    assert choice.per_block_ns == choice.cost_ns // 100


def test_keeping_is_for_a_slot_alone_and_costs_nothing() -> None:
    for_slot = choose(held(500), ALL, PROFILE, host_free=100, for_slot=True)
    assert (for_slot.mechanism, for_slot.cost_ns) == (KEEP, 0)
    assert choose(held(500), ALL, PROFILE, host_free=100).keep_ns is None


def test_full_host_offers_no_swap() -> None:
    assert choose(held(60_000), ALL, PROFILE, host_free=3_749).mechanism is RECOMPUTE
    assert choose(held(60_000), ALL, PROFILE, host_free=3_750).mechanism is SWAP


def test_what_the_engine_lacks_is_not_offered() -> None:
    for tokens in (10, 60_000):
        choice = choose(held(tokens), Offers(), PROFILE, host_free=10_000, for_slot=True)
        assert choice.mechanism is RECOMPUTE
        assert choice.keep_ns is choice.out_ns is None


def test_shared_blocks_cost_no_recompute_and_free_nothing() -> None:
    alone, shared = (choose(held(60_000, n), ALL, PROFILE, host_free=10_000) for n in (0, 59_200))
    assert int(shared.recompute_ns) == PROFILE.work_ns(800, 59_200, 0) < alone.recompute_ns
    assert shared.mechanism is RECOMPUTE
    assert (alone.frees, shared.frees) == (3_750, 50)


def test_without_costs_the_first_that_is_possible_is_taken() -> None:
    always = Offers(mechanisms=(SWAP, RECOMPUTE), by_cost=False)
    assert choose(held(20), always, PROFILE, host_free=2).mechanism is SWAP
    assert choose(held(20), always, PROFILE, host_free=1).mechanism is RECOMPUTE


@pytest.mark.parametrize(
    ("mechanisms", "complaint"),
    [(["swap"], "must have recompute"), (["recompute", "recompute"], "twice"), ([], "length")],
)
def test_engine_that_could_be_stuck_is_refused(mechanisms: list[str], complaint: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=complaint):
        msgspec.convert({"mechanisms": mechanisms}, Offers)


def first(*entries: Entry) -> list[int]:
    return [entries[nth].attempt for nth in tied(entries, gives_way)]


def test_relegated_then_the_loosest_class_gives_way() -> None:
    assert first(entry(1), entry(2, gap=900), entry(3, relegated=True)) == [3]
    assert first(entry(1), entry(2, gap=900), entry(3, gap=900)) == [2, 3]


def test_tenant_below_its_share_gives_way_last() -> None:
    poor = entry(1, "poor", 3, gap=900, relegated=True)
    assert first(poor, entry(2, "rich", 4), entry(3, "rich", 4)) == [2, 3]
    assert first(poor, entry(2, "rich", 3)) == [1], "not strictly below"
    assert first(poor, entry(2, "poor", 9)) == [1], "nobody to compare with"


def test_counters_of_different_nodes_do_not_compare() -> None:
    one, other = entry(1, "a", 3, among="x"), entry(2, "b", 4, among="y")
    assert first(one, other) == [1, 2]
    # The least of each node goes last, however far the nodes themselves have come.
    rich, poor = entry(3, "rich", 900, among="y"), entry(4, "poor", 899, gap=900, among="y")
    assert first(rich, poor) == [3]
    assert first(one, rich, poor) == [1, 3]
    # A tenant below its share in one class may be above it in another.
    here, there = entry(5, "a", 8, among="y"), entry(6, "c", 1, among="x")
    assert first(one, there, here, other) == [1, 5]


NODES = st.dictionaries(
    st.sampled_from("xy"),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 5), min_size=1),
    min_size=1,
)


@st.composite
def running(draw: st.DrawFn) -> list[Entry]:
    """Return running requests of tenants with one counter for each node they stand under."""
    nodes = draw(NODES)
    queues = [(node, tenant, at) for node, of in nodes.items() for tenant, at in of.items()]
    drawn = st.tuples(st.sampled_from(queues), st.sampled_from([20, 50]), st.booleans())
    return [
        entry(nth, tenant, counter, gap, relegated=relegated, among=node)
        for nth, ((node, tenant, counter), gap, relegated) in enumerate(
            draw(st.lists(drawn, min_size=1, max_size=12))
        )
    ]


ENTRIES = running()


@given(ENTRIES)
def test_no_victim_is_below_share_while_another_would_do(entries: list[Entry]) -> None:
    after = marked(entries)
    below = {(each.among, each.tenant) for each in after if each.below_share}
    everybody = {(each.among, each.tenant) for each in entries}
    victims = {(entries[nth].among, entries[nth].tenant) for nth in tied(entries, gives_way)}
    for node in {each.among for each in entries}:
        assert len([one for one in below if one[0] == node]) < 2
    assert below < everybody
    assert not below & victims


@given(ENTRIES, st.data())
def test_slots_never_change_hands_in_turns(entries: list[Entry], data: st.DataObject) -> None:
    after = marked(entries)
    one, other = data.draw(st.sampled_from(after)), data.draw(st.sampled_from(entries))
    assert not (yields(one, other) and yields(other, one))
    if yields(one, other):
        assert not one.below_share
        assert (one.relegated, one.gap_ns) > (other.relegated, other.gap_ns)


@given(ENTRIES, st.integers(1, 12), st.data())
def test_who_gives_way_after_whom_is_asked_one_by_one(
    entries: list[Entry], most: int, data: st.DataObject
) -> None:
    pauses = data.draw(st.permutations(range(len(entries))))
    keys = [gives_way(entry) for entry in marked(entries)]
    found = giving_way(entries, gives_way, lambda nth: (pauses[nth],), most)
    ranked = sorted(
        range(len(entries)), key=lambda nth: (tuple(-part for part in keys[nth]), pauses[nth])
    )
    assert found == ranked[: len(found)]
    assert len(found) >= min(most, len(entries))
    assert found[0] in tied(entries, gives_way)


def test_pauses_are_asked_for_only_where_keys_tie_and_no_further_than_needed() -> None:
    asked: list[int] = []

    def pause(nth: int) -> tuple[int]:
        asked.append(nth)
        return (-nth,)

    entries = [entry(0), entry(1, gap=900), entry(2), entry(3, relegated=True), entry(4)]
    assert giving_way(entries, gives_way, pause, 2) == [3, 1]
    assert not asked
    assert giving_way(entries, gives_way, pause, 3) == [3, 1, 4, 2, 0]
    assert sorted(asked) == [0, 2, 4]
