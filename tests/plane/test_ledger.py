"""Every reservation ends exactly once, in the unit it was opened in, and nothing goes negative."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.model.budget import Take
from headrace.model.deployment import TenantSpec
from headrace.model.engine import Usage
from headrace.model.ids import (
    AttemptId,
    Incarnation,
    ModelName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.paths import Level, Link, Path, path
from headrace.plane.ledger import Flight, Ledger
from headrace.plane.quotas import Bucket
from headrace.policy.fairness.costs import GpuTime, Linear, Price, price
from headrace.policy.fairness.shares import Rules
from headrace.policy.fairness.vtc import share
from headrace.units import DurationNs, InstantNs, Tokens, blocks_for
from tests.plane.scenes import COSTS, H100, S, usage

RATES = Price("test", Linear(uncached=1_000_000, cached=100_000, output=3_000_000))
PRICES = (RATES, *(price(cost, "m", H100) for cost in COSTS.values()))
MODEL, TENANT = ModelName("m"), TenantId("a")
MINUTE = 60 * S
NOW = InstantNs(0)
LIMITED = TenantSpec(name="a", tpm_limit=600, rpm_limit=6)


def at(seconds: float) -> InstantNs:
    return InstantNs(round(seconds * S))


def take(tokens: int) -> Take:
    return Take(tokens=Tokens(tokens))


def way(weight: int = 1, tenant: str = TENANT) -> Path:
    return path(Link(Level.CLASS, "chat", 4), Link(Level.TENANT, tenant, weight))


def flight(request: int = 1, *, gap_ms: int = 80, life: int = 1, **changes: Any) -> Flight:
    """Return 100 tokens in, 50 expected out, changed as told."""
    given_: dict[str, Any] = {
        "model": MODEL,
        "input_tokens": 100,
        "cached_tokens": 0,
        "predicted": 50,
        "weight": 1,
    } | changes
    given_["way"] = way(given_.pop("weight"))
    return Flight(
        request=RequestId(request),
        tenant=TENANT,
        incarnation=Incarnation(life),
        blocks=blocks_for(given_["input_tokens"] + given_["predicted"]),
        prefill_ns=7_000,
        charged=0,
        gap_ns=DurationNs(gap_ms * 1_000_000),
        **given_,
    )


def ledger() -> Ledger:
    books = Ledger()
    books.open_load(Incarnation(1))
    wait(books)
    return books


def wait(books: Ledger, tenant: str = TENANT, model: ModelName = MODEL) -> None:
    """Let a tenant have had something waiting for a moment."""
    books.share_out(model, Rules())
    books.come(model, way(tenant=tenant))
    books.gone(model, way(tenant=tenant))


def counter(books: Ledger, tenant: str = TENANT, model: ModelName = MODEL) -> int:
    return books.shares[model].counter(way(tenant=tenant)[-1].key)


# Quota ---------------------------------------------------------------------------------------


def test_a_bucket_refills_exactly_however_often_one_looks() -> None:
    often, once = Ledger(), Ledger()
    for books in (often, once):
        books.hold(RequestId(1), LIMITED, take(600), at(0))
    for nanosecond in range(1, 1_000):
        often.quota(LIMITED, InstantNs(nanosecond * 7_919))
    seen = [books.quota(LIMITED, InstantNs(S)).tokens for books in (often, once)]
    assert seen == [Bucket(limit=600, level=10), Bucket(limit=600, level=10)]


def test_a_bucket_holds_no_more_than_a_minute_of_its_limit() -> None:
    books = Ledger()
    assert books.quota(LIMITED, at(0)).tokens == Bucket(limit=600, level=600)
    assert books.quota(LIMITED, at(3_600)).tokens == Bucket(limit=600, level=600)


@given(st.integers(-5_000, 600), st.integers(0, 59_999_999_999), st.integers(1, 600))
def test_after_the_wait_it_says_a_bucket_holds_what_is_needed_and_not_before(
    level: int, rest: int, need: int
) -> None:
    bucket = Bucket(limit=600, level=level, rest=rest)
    wait = bucket.wait_ns(need)
    early = Bucket(limit=600, level=level, rest=rest)
    if wait:
        early.refill(600, wait - 1)
        assert early.level < need
    bucket.refill(600, wait)
    assert bucket.level >= need


def test_what_was_reserved_and_not_used_goes_back() -> None:
    books = Ledger()
    books.hold(RequestId(1), LIMITED, take(500), at(0))
    quota = books.quota(LIMITED, at(0))
    assert (quota.reserved, quota.parallel) == (500, 1)
    assert quota.tokens == Bucket(limit=600, level=100)
    assert quota.requests == Bucket(limit=6, level=5)
    books.settle(RequestId(1), take(120), NOW)
    assert (quota.reserved, quota.parallel) == (0, 0)
    assert quota.tokens == Bucket(limit=600, level=480)
    assert quota.requests == Bucket(limit=6, level=5), "the request was made"


def test_an_answer_beyond_its_reserve_leaves_a_debt() -> None:
    books = Ledger()
    books.hold(RequestId(1), LIMITED, take(600), at(0))
    books.settle(RequestId(1), take(1_800), NOW)
    quota = books.quota(LIMITED, at(60))
    assert quota.tokens == Bucket(limit=600, level=-600)
    assert quota.tokens.wait_ns(1) == 60 * S + S // 10


def test_a_refund_never_fills_a_bucket_beyond_its_limit() -> None:
    books = Ledger()
    books.hold(RequestId(1), LIMITED, take(600), at(0))
    books.quota(LIMITED, at(60))
    books.settle(RequestId(1), take(0), NOW)
    assert books.quota(LIMITED, at(60)).tokens == Bucket(limit=600, level=600)


def test_a_hold_ends_once() -> None:
    books = Ledger()
    books.hold(RequestId(1), LIMITED, take(1), at(0))
    with pytest.raises(AssertionError, match="holds quota already"):
        books.hold(RequestId(1), LIMITED, take(1), at(0))
    books.settle(RequestId(1), take(0), NOW)
    with pytest.raises(KeyError):
        books.settle(RequestId(1), take(0), NOW)


def test_a_tenant_without_limits_has_no_buckets_that_could_overflow() -> None:
    books, free = Ledger(), TenantSpec(name="a")
    for request in range(1_000):
        books.hold(RequestId(request), free, take(10**13), at(0))
        books.settle(RequestId(request), take(10**13), NOW)
    quota = books.quotas[TENANT]
    assert (quota.tokens, quota.requests) == (None, None)
    msgspec.msgpack.encode(books)


def test_the_largest_limit_stays_inside_sixty_four_bits() -> None:
    books, rich = Ledger(), TenantSpec(name="a", tpm_limit=10**15, rpm_limit=10**15)
    books.hold(RequestId(1), rich, take(10**7), at(0))
    books.quota(rich, at(0.000000123))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(books), type=Ledger) == books


def test_a_limit_that_is_new_starts_with_a_full_bucket() -> None:
    books = Ledger()
    books.hold(RequestId(1), TenantSpec(name="a"), take(5_000), at(0))
    assert books.quota(LIMITED, at(0)).tokens == Bucket(limit=600, level=600)
    assert books.quota(TenantSpec(name="a"), at(1)).tokens is None
    books.settle(RequestId(1), take(0), NOW)


# Attempts ------------------------------------------------------------------------------------


def test_input_and_predicted_output_are_charged_at_dispatch() -> None:
    books = ledger()
    books.book(AttemptId(1), flight(cached_tokens=40), RATES)
    assert counter(books) == 60 * 1_000_000 + 40 * 100_000 + 50 * 3_000_000


def test_service_is_charged_at_one_over_the_weight_rounded_down() -> None:
    books = ledger()
    books.book(AttemptId(1), flight(input_tokens=1, predicted=0, weight=3), RATES)
    assert counter(books) == 333_333


def test_tokens_made_replace_the_prediction_once_they_exceed_it() -> None:
    books = ledger()
    one = flight()
    books.book(AttemptId(1), one, RATES)
    booked = counter(books)
    books.first_token(AttemptId(1), NOW)
    assert books.progress(one, 50, RATES) == 49
    assert counter(books) == booked
    assert books.progress(one, 51, RATES) == 1
    assert counter(books) == booked + 3_000_000


def test_a_late_tick_takes_nothing_back() -> None:
    books = ledger()
    one = flight()
    books.book(AttemptId(1), one, RATES)
    books.first_token(AttemptId(1), NOW)
    books.progress(one, 60, RATES)
    before = msgspec.msgpack.encode(books)
    assert books.progress(one, 60, RATES) == 0
    assert books.progress(one, 12, RATES) == 0
    assert msgspec.msgpack.encode(books) == before


def test_growth_beyond_the_reserve_takes_blocks_as_it_comes() -> None:
    books = ledger()
    one = flight(predicted=60)
    books.book(AttemptId(1), one, RATES)
    load = books.loads[Incarnation(1)]
    books.first_token(AttemptId(1), NOW)
    assert load.blocks == 10
    books.progress(one, 60, RATES)
    assert load.blocks == 10
    books.progress(one, 61, RATES)
    assert load.blocks == one.blocks == 11
    books.progress(one, 1_000, RATES)
    assert load.blocks == 69
    books.close(AttemptId(1), RATES, NOW)
    assert load.blocks == 0


def test_usage_settles_the_service() -> None:
    books = ledger()
    books.book(AttemptId(1), flight(), RATES)
    books.first_token(AttemptId(1), NOW)
    assert books.close(AttemptId(1), RATES, NOW, usage(100, 7, cached=96)) == 1
    assert counter(books) == 4 * 1_000_000 + 96 * 100_000 + 7 * 3_000_000


def test_usage_counts_its_own_input_so_that_no_charge_is_negative() -> None:
    books = ledger()
    books.book(AttemptId(1), flight(), RATES)
    books.close(AttemptId(1), RATES, NOW, usage(900, 1, cached=800))
    assert counter(books) == 100 * 1_000_000 + 800 * 100_000 + 3_000_000
    books.book(AttemptId(2), flight(), RATES)
    before = counter(books) - 100 * 1_000_000 - 50 * 3_000_000
    books.close(AttemptId(2), RATES, NOW, usage(10, 0, cached=9_999))
    assert counter(books) == before + 10 * 100_000, "cached is at most the input"


def test_without_usage_the_tokens_seen_settle_it() -> None:
    books = ledger()
    books.book(AttemptId(1), flight(), RATES)
    books.first_token(AttemptId(1), NOW)
    books.progress(books.flights[AttemptId(1)], 20, RATES)
    assert books.close(AttemptId(1), RATES, NOW, None, 22) == 22
    assert counter(books) == 100 * 1_000_000 + 22 * 3_000_000


def test_a_stream_whose_first_token_was_not_told_apart_pays_all_the_same() -> None:
    books = ledger()
    books.book(AttemptId(1), flight(), RATES)
    assert books.close(AttemptId(1), RATES, NOW, None, 5) == 5
    assert counter(books) == 100 * 1_000_000 + 5 * 3_000_000


def test_what_made_no_token_is_refunded() -> None:
    books = ledger()
    books.book(AttemptId(1), flight(), RATES)
    assert books.close(AttemptId(1), RATES, NOW) == 0
    assert counter(books) == 0


def test_an_attempt_is_booked_once_starts_once_and_ends_once() -> None:
    books = ledger()
    books.book(AttemptId(1), flight(), RATES)
    with pytest.raises(AssertionError, match="booked already"):
        books.book(AttemptId(1), flight(), RATES)
    books.first_token(AttemptId(1), NOW)
    with pytest.raises(AssertionError, match="streams already"):
        books.first_token(AttemptId(1), NOW)
    books.close(AttemptId(1), RATES, NOW)
    with pytest.raises(KeyError):
        books.close(AttemptId(1), RATES, NOW)


def test_the_tightest_gap_is_that_of_whoever_is_still_on_board() -> None:
    books = ledger()
    load = books.loads[Incarnation(1)]
    assert load.tightest is None
    for attempt, gap in enumerate((80, 20, 20, 50), 1):
        books.book(AttemptId(attempt), flight(attempt, gap_ms=gap), RATES)
    seen = [load.tightest]
    for attempt in (2, 3, 4, 1):
        books.close(AttemptId(attempt), RATES, NOW)
        seen.append(load.tightest)
    assert seen == [20_000_000, 20_000_000, 50_000_000, 80_000_000, None]
    assert load.gaps == {}


def test_of_the_prefill_that_is_left_the_first_falls_with_time_and_no_other() -> None:
    books = ledger()
    load = books.loads[Incarnation(1)]
    assert load.prefill_left_ns(InstantNs(99)) == 0
    for attempt in (1, 2, 3):
        one = flight(attempt)
        one.sent_at = InstantNs(1_000 * attempt)
        books.book(AttemptId(attempt), one, RATES)
    seen = [load.prefill_left_ns(InstantNs(now)) for now in (1_000, 3_000, 8_000)]
    assert seen == [21_000, 19_000, 14_000]
    assert load.pending_prefill_ns == 21_000
    books.first_token(AttemptId(1), InstantNs(9_000))
    assert [load.prefill_left_ns(InstantNs(now)) for now in (9_000, 10_000)] == [14_000, 13_000]
    books.close(AttemptId(3), RATES, InstantNs(10_000))
    assert load.prefill_left_ns(InstantNs(10_000)) == 6_000, "the first one is where it was"
    books.close(AttemptId(2), RATES, InstantNs(11_000))
    assert (load.prefill_left_ns(InstantNs(12_000)), load.prefills) == (0, {})


def test_a_prefill_that_is_overdue_is_expected_to_take_as_long_again() -> None:
    """Its engine cannot begin it: to whoever comes next it is not nearly done, and ever less so."""
    books = ledger()
    load = books.loads[Incarnation(1)]
    for attempt in (1, 2):
        books.book(AttemptId(attempt), flight(attempt), RATES)
    seen = [load.prefill_left_ns(InstantNs(now)) for now in (7_000, 8_000, 14_000, 70_000)]
    assert seen == [7_000, 8_000, 14_000, 70_000]
    books.first_token(AttemptId(1), InstantNs(70_000))
    assert load.prefill_left_ns(InstantNs(70_000)) == 7_000, "the next one is not late yet"
    books.close(AttemptId(2), RATES, InstantNs(900_000))
    assert load.prefill_left_ns(InstantNs(900_000)) == 0, "nothing is in front"


def test_under_another_cost_counters_begin_anew_with_what_is_in_flight() -> None:
    books, work = ledger(), Price("test", GpuTime(H100))
    books.rebase(ModelName("unheard of"), work)
    books.book(AttemptId(1), flight(), RATES)
    books.first_token(AttemptId(1), NOW)
    books.close(AttemptId(1), RATES, NOW, usage(100, 900))
    books.book(AttemptId(2), flight(weight=3), RATES)
    books.first_token(AttemptId(2), NOW)
    books.progress(books.flights[AttemptId(2)], 80, RATES)
    other = ModelName("n")
    wait(books, model=other)
    books.book(AttemptId(3), flight(model=other), RATES)
    apart = counter(books, model=other)
    books.rebase(MODEL, work)
    assert counter(books, model=other) == apart > 0
    assert counter(books) == H100.work_ns(100, 0, 80) // 3
    books.close(AttemptId(2), work, NOW, usage(100, 8))
    assert counter(books) == H100.work_ns(100, 0, 8) // 3


def test_books_of_a_life_open_once_and_close_empty() -> None:
    books = ledger()
    with pytest.raises(AssertionError, match="lives already"):
        books.open_load(Incarnation(1))
    books.book(AttemptId(1), flight(), RATES)
    with pytest.raises(AssertionError, match="still holds 1 attempts"):
        books.close_load(Incarnation(1), NOW)


# Counters ------------------------------------------------------------------------------------


def test_into_an_empty_queue_one_is_lifted_to_where_the_last_one_out_stands_now() -> None:
    books = ledger()
    one = flight(predicted=10)
    books.book(AttemptId(1), one, RATES)
    books.first_token(AttemptId(1), NOW)
    books.progress(one, 1_000, RATES)
    wait(books, "b")
    assert counter(books, "b") == counter(books) > 3_000 * 1_000_000


class Books(RuleBasedStateMachine):
    """A ledger against plain sums over what is open."""

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger()
        for life in (1, 2):
            self.ledger.open_load(Incarnation(life))
        wait(self.ledger)
        self.now = 0
        self.ids = 0
        self.holds: dict[int, int] = {}
        self.open: dict[int, Flight] = {}
        self.settled = 0
        """Service of all that has ended."""
        self.price: Price = RATES

    @rule(tokens=st.integers(0, 400), passed=st.integers(0, MINUTE))
    def hold(self, tokens: int, passed: int) -> None:
        self.now += passed
        self.ids += 1
        self.ledger.hold(RequestId(self.ids), LIMITED, take(tokens), InstantNs(self.now))
        self.holds[self.ids] = tokens

    @precondition(lambda self: self.holds)
    @rule(nth=st.integers(0, 9), used=st.integers(0, 900))
    def settle(self, nth: int, used: int) -> None:
        request = sorted(self.holds)[nth % len(self.holds)]
        del self.holds[request]
        self.ledger.settle(RequestId(request), take(used), InstantNs(self.now))

    @rule(
        tokens=st.integers(1, 900),
        cached=st.integers(0, 900),
        predicted=st.integers(0, 100),
        weight=st.integers(1, 7),
        where=st.tuples(st.sampled_from((20, 80)), st.sampled_from((1, 2))),
    )
    def book(
        self, tokens: int, cached: int, predicted: int, weight: int, where: tuple[int, int]
    ) -> None:
        self.ids += 1
        self.open[self.ids] = made = flight(
            self.ids,
            sent_at=InstantNs(self.now),
            input_tokens=tokens,
            cached_tokens=min(cached, tokens - 1),
            predicted=predicted,
            weight=weight,
            gap_ms=where[0],
            life=where[1],
        )
        self.ledger.book(AttemptId(self.ids), made, self.price)

    def one(self, nth: int) -> int:
        return sorted(self.open)[nth % len(self.open)]

    @precondition(lambda self: self.open)
    @rule(nth=st.integers(0, 9))
    def first(self, nth: int) -> None:
        attempt = self.one(nth)
        if not self.open[attempt].streaming:
            self.ledger.first_token(AttemptId(attempt), InstantNs(self.now))

    @precondition(lambda self: self.open)
    @rule(nth=st.integers(0, 9), made=st.integers(0, 400))
    def progress(self, nth: int, made: int) -> None:
        one = self.open[self.one(nth)]
        if one.streaming:
            self.ledger.progress(one, made, self.price)

    @precondition(lambda self: self.open)
    @rule(
        nth=st.integers(0, 9),
        seen=st.integers(0, 50),
        counted=st.one_of(
            st.none(),
            st.builds(usage, st.integers(1, 900), st.integers(0, 99), st.integers(0, 999)),
        ),
    )
    def close(self, nth: int, seen: int, counted: Usage | None) -> None:
        attempt = self.one(nth)
        one = self.open.pop(attempt)
        made = self.ledger.close(AttemptId(attempt), self.price, InstantNs(self.now), counted, seen)
        assert made == max(one.made, seen)
        if counted is not None:
            cached = min(counted.cached_tokens, counted.input_tokens)
            uncached = counted.input_tokens - cached
            self.settled += (
                self.price.service(uncached, cached, counted.output_tokens) // one.way[-1].weight
            )
        elif made:
            uncached = one.input_tokens - one.cached_tokens
            self.settled += (
                self.price.service(uncached, one.cached_tokens, made) // one.way[-1].weight
            )

    @precondition(lambda self: self.open)
    @rule(nth=st.integers(0, 9))
    def set_aside(self, nth: int) -> None:
        attempt = AttemptId(self.one(nth))
        one = self.open[attempt]
        if one.streaming and attempt not in self.ledger.berths:
            other = Incarnation(3 - one.incarnation)
            self.ledger.set_aside(attempt, ReplicaName(f"r{other}"), other, InstantNs(self.now))

    @precondition(lambda self: self.ledger.berths)
    @rule(nth=st.integers(0, 9), moves=st.booleans())
    def arrive_or_stay(self, nth: int, moves: bool) -> None:
        berths = sorted(self.ledger.berths)
        attempt = berths[nth % len(berths)]
        before, berth = self.open[attempt].incarnation, self.ledger.berths[attempt]
        (self.ledger.move if moves else self.ledger.give_up)(attempt, InstantNs(self.now))
        assert self.open[attempt].incarnation == (berth.incarnation if moves else before)
        assert self.open[attempt].moved or not moves

    @rule(price=st.sampled_from(PRICES))
    def rebase(self, price: Price) -> None:
        self.price, self.settled = price, 0
        self.ledger.rebase(MODEL, price)

    @invariant()
    def quota_is_the_sum_of_holds(self) -> None:
        quota = self.ledger.quotas.get(TENANT)
        assert set(self.ledger.holds) == set(self.holds)
        if quota is not None:
            assert quota.parallel == len(self.holds)
            assert quota.reserved == sum(self.holds.values())

    @invariant()
    def counter_is_what_ended_plus_what_is_booked(self) -> None:
        booked = sum(share(one.charged, one.way[-1].weight) for one in self.open.values())
        assert counter(self.ledger) == self.settled + booked
        assert all(one.charged >= 0 for one in self.open.values())

    @invariant()
    def loads_are_sums_of_flights(self) -> None:
        for life, load in self.ledger.loads.items():
            mine = [one for one in self.open.values() if one.incarnation == life]
            streams = [one for one in mine if one.streaming]
            berths = {a: b for a, b in self.ledger.berths.items() if b.incarnation == life}
            coming = [self.open[attempt] for attempt in berths]
            assert load.attempts == len(mine) + len(coming)
            assert load.decodes == len(streams)
            held = sum(one.blocks for one in mine) + sum(one.blocks for one in berths.values())
            assert load.blocks == held
            assert load.context_tokens == sum(one.input_tokens + one.made for one in streams)
            assert load.pending_prefill_ns == 7_000 * (len(mine) - len(streams))
            assert sum(load.prefills.values()) == load.pending_prefill_ns
            assert load.front_ns == next(iter(load.prefills.values()), 0)
            left = load.prefill_left_ns(InstantNs(self.now))
            late = max(0, self.now - load.front_at - load.front_ns) if load.prefills else 0
            behind = load.pending_prefill_ns - load.front_ns
            assert behind + late <= left <= behind + max(late, load.front_ns)
            assert load.gaps == Counter(one.gap_ns for one in (*mine, *coming))
            assert load.tightest == min(load.gaps, default=None)

    @invariant()
    def it_survives_a_checkpoint(self) -> None:
        content = msgspec.msgpack.encode(self.ledger)
        assert msgspec.msgpack.encode(msgspec.msgpack.decode(content, type=Ledger)) == content


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=30)
