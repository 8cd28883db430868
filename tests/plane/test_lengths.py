"""Who is let in by length: what is counted, who the long ones are, and what the gate makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec, TenantSpec
from headrace.model.effect import Decided
from headrace.model.evidence import EntryRecord
from headrace.model.ids import ModelName
from headrace.plane import asked
from headrace.plane.core import Plane
from headrace.plane.lengths import Lengths, bucket_of
from headrace.policy.admission.gates import GateMode, Gates, Length
from headrace.policy.catalog import PlaneConfig
from headrace.units import MICRO, NS_PER_S, InstantNs
from tests.plane.scenes import Driver, S, config

SHORT, LONG = 500, 20_000
CHAT = ClassSpec(name="chat", ttft_ms=2_000.0)


def offered(length: Length) -> PlaneConfig:
    return config(classes=(CHAT,), admission=Gates(length=length, wait_margin=0.0))


def crowd(made: Driver, seconds: int = 60, tenant: str = "a") -> list[EntryRecord]:
    """Offer nine short prompts to one long one, far more than one replica serves."""
    before = len(made.seen)
    for nth in range(seconds * 40):
        made.arrive(tenant, LONG if nth % 10 == 7 else SHORT, max_output=5)
        made.wait(S // 40)
        finish(made)
    effects = made.seen[before:]
    return [
        one.record
        for one in effects
        if isinstance(one, Decided) and isinstance(one.record, EntryRecord)
    ]


def finish(made: Driver) -> None:
    """End what must have been computed by now."""
    for attempt, flight in list(made.plane.state.ledger.flights.items()):
        if flight.sent_at + flight.prefill_ns <= made.now:
            made.first(attempt)
            made.end(attempt)
            break


def test_a_length_is_told_apart_by_a_quarter_of_an_octave() -> None:
    assert [bucket_of(tokens) for tokens in (1, 4, 5, 6, 7, 8)] == [4, 12, 13, 14, 15, 16]
    assert bucket_of(16_384) == bucket_of(20_479) == bucket_of(20_480) - 1


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=60), st.integers(0, 3 * NS_PER_S))
def test_the_long_ones_are_a_tenth_or_the_least_that_is_no_less(
    tokens: list[int], later: int
) -> None:
    seen = Lengths()
    for one in tokens:
        seen.add(one, admitted=one % 2 == 0)
    seen.forget(InstantNs(NS_PER_S + later))
    assert seen.whole.offered == sum(count.offered for count in seen.buckets.values())
    above = sum(c.offered for b, c in seen.buckets.items() if b > seen.long_from)
    assert above * 10 < seen.whole.offered <= seen.long.offered * 10
    assert seen.is_long(max(tokens))
    assert 0 <= seen.long.admitted <= seen.long.offered
    long = [one for one in tokens if seen.is_long(one)]
    assert min(long) - 1 <= seen.long_tokens() <= max(long)


def test_what_was_offered_is_forgotten_in_the_end() -> None:
    seen = Lengths()
    for _ in range(1_000):
        seen.add(100, admitted=True)
    seen.forget(InstantNs(60 * NS_PER_S))
    assert 300 * MICRO < seen.whole.offered < 400 * MICRO
    seen.forget(InstantNs(5_000 * NS_PER_S))
    assert not seen.buckets
    assert seen.long_from == seen.whole.offered == 0


def test_each_decision_is_made_again_from_its_evidence() -> None:
    made = Driver(offered(Length.FAIR))
    gates = made.plane.settings.config.admission
    records = crowd(made, 20)
    assert any(one.evidence.lengths is not None for one in records)
    assert [gates.decide(one.evidence) for one in records] == [one.decision for one in records]


def test_a_thawed_plane_goes_on_counting() -> None:
    made = Driver(offered(Length.FAIR))
    crowd(made, 10)
    other = Plane.thaw(made.plane.freeze())
    assert other.state.models[ModelName("m")].lengths == made.known.lengths
    assert made.known.lengths


def test_one_tenants_long_prompts_cost_another_nothing() -> None:
    tenants = tuple(TenantSpec(name=name) for name in "ab")
    made = Driver(config(classes=(CHAT,), tenants=tenants))
    crowd(made, 20)
    made.arrive("b", SHORT)
    mine = [
        one.record
        for one in made.seen
        if isinstance(one, Decided)
        and isinstance(one.record, EntryRecord)
        and one.record.tenant == "b"
    ]
    assert mine[0].evidence.lengths is None


@pytest.mark.parametrize(
    "gates", [Gates(length=Length.GREEDY), Gates(mode=GateMode.AUDIT)], ids=["greedy", "audit"]
)
def test_nothing_follows_where_nobody_asks_or_nobody_is_refused(gates: Gates) -> None:
    made = Driver(config(classes=(CHAT,), admission=gates))
    assert {one.evidence.lengths for one in crowd(made, 5)} == {None}


def test_tenants_are_forgotten_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "LENGTHS_MAX", 2)
    names = ("a", "b", "c")
    made = Driver(config(classes=(CHAT,), tenants=tuple(TenantSpec(name=one) for one in names)))
    for name in ("a", "b", "a", "c"):
        made.arrive(name)
    kept = list(made.known.lengths)
    assert len(kept) == 2
    assert kept[0].endswith("a")
    assert kept[1].endswith("c")


def test_what_an_empty_engine_could_not_serve_in_time_counts_for_no_length() -> None:
    made = Driver(config(classes=(CHAT,)))
    made.arrive("a", 120_000)
    assert made.refused()[0].rejection.reason is Reason.DEADLINE_IMPOSSIBLE
    assert not made.known.lengths
