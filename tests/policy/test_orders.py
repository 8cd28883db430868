"""Orders give keys that time does not change, and each has its known fault but the one by tenant."""

from itertools import islice
from typing import Any

import msgspec
import pytest

from headrace.model.deployment import PoolSpec
from headrace.plane.state import Phase
from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.policy.contracts import Order
from headrace.policy.fairness.backlog import is_patient, waiting_key
from headrace.policy.fairness.line import LATE_NS
from headrace.policy.ordering.orders import (
    FAR,
    EarliestDeadline,
    Fifo,
    LeastSlack,
    Niyama,
    Ordering,
    Place,
    Score,
    ShortestFirst,
    TenantFirst,
    VtcOrder,
)
from headrace.replica.core import Replica
from headrace.replica.job import FirstTokenMade
from headrace.units import NS_PER_MS, NS_PER_S, InstantNs, WorkNs, ms, seconds
from tests.plane.scenes import Driver, config, patient
from tests.plane.scenes import small as small_h100
from tests.replica.scenes import engine, job, run_to, small

ALL: tuple[Ordering, ...] = (
    Fifo(),
    ShortestFirst(),
    EarliestDeadline(),
    LeastSlack(),
    Niyama(),
    VtcOrder(),
    TenantFirst(),
    Score(),
)
NAMES = ("fifo", "sjf", "edf", "least_slack", "niyama", "vtc", "tenant_first", "score")
PLACE = Place(7, InstantNs(9_000), InstantNs(8_500), 300, WorkNs(450))


@pytest.mark.parametrize(
    ("order", "key"),
    [
        (Fifo(), 7),
        (ShortestFirst(), 450),
        (EarliestDeadline(), 9_000),
        (LeastSlack(), 8_500),
        (Niyama(), 9_000 + 300 * 8 * NS_PER_MS),
        (Niyama(ms_per_token=0.0015), 9_000 + 300 * 1_500),
        (VtcOrder(), 7),
        (TenantFirst(), 9_000),
        (Score(), 8_500),
    ],
    ids=[*NAMES[:5], "niyama-other", *NAMES[5:]],
)
def test_a_key_is_what_its_order_says(order: Order, key: int) -> None:
    assert order.key(PLACE) == key


@pytest.mark.parametrize("order", ALL, ids=NAMES)
def test_every_order_is_named_in_the_configuration(order: Ordering) -> None:
    tag = msgspec.to_builtins(order)["kind"]
    assert tag == NAMES[ALL.index(order)]
    assert msgspec.convert({"kind": tag}, type=Ordering) == order


@pytest.mark.parametrize("order", ALL, ids=NAMES)
def test_an_order_that_goes_by_start_has_the_start_for_its_key(order: Order) -> None:
    """Only orders by share lend turns or weigh them."""
    assert order.by_start is (order.key(PLACE) == PLACE.latest_start)
    assert order.lend_after_ns is None or order.by_share
    assert order.by_share or not order.scores


def test_which_orders_know_tenants_and_which_set_the_hopeless_back() -> None:
    assert [name for name, one in zip(NAMES, ALL, strict=True) if one.by_share] == [
        "vtc",
        "tenant_first",
        "score",
    ]
    assert [name for name, one in zip(NAMES, ALL, strict=True) if one.relegates] == [
        "niyama",
        "tenant_first",
        "score",
    ]


def test_turns_are_lent_beyond_the_slack_that_is_told() -> None:
    assert TenantFirst().lend_after_ns == seconds(10)
    assert TenantFirst(lend_after_ms=1.5).lend_after_ns == 1_500_000
    assert TenantFirst(lend_after_ms=None).lend_after_ns is None


def test_work_without_a_deadline_lends_its_turn_for_a_year() -> None:
    assert seconds(365 * 24 * 3_600) == FAR


def test_a_bound_on_lending_makes_a_key_urgent_when_it_ends() -> None:
    arrived, bound = InstantNs(5 * NS_PER_S), seconds(60)
    far = Place(1, InstantNs(FAR), InstantNs(FAR), 1, WorkNs(1))
    lends = TenantFirst()
    assert waiting_key(lends, far, arrived, None) == FAR
    key = waiting_key(lends, far, arrived, bound)
    ends = arrived + bound
    assert is_patient(lends, key, InstantNs(ends - 1))
    assert not is_patient(lends, key, InstantNs(ends))
    assert waiting_key(lends, PLACE, arrived, bound) == PLACE.deadline, "it is urgent before"
    for order in (Fifo(), VtcOrder(), Score(), TenantFirst(lend_after_ms=None)):
        assert waiting_key(order, far, arrived, bound) == order.key(far)


# The terms of a score ------------------------------------------------------------------------


def test_a_score_is_the_sum_of_its_terms() -> None:
    score = Score(urgency=4, halving_ms=500, aging=0.5, service=2, interference=3)
    terms = score.terms(ms(500), seconds(3), ms(100), ms(10))
    assert (terms.urgency, terms.aging, terms.service, terms.interference) == pytest.approx(
        (2.0, 1.5, 0.2, 0.03)
    )
    assert terms.total == pytest.approx(2.0 + 1.5 - 0.2 - 0.03)


def test_urgency_is_whole_without_slack_and_fades_with_it() -> None:
    score = Score()
    found = [score.terms(ms(slack), 0, 0, 0).urgency for slack in (0, 1_000, 3_000, 9_000)]
    assert found == pytest.approx([2.0, 1.0, 0.5, 0.2])
    assert score.terms(-5, 0, 0, 0).urgency == 2.0, "past its latest start it is worth no more"


def test_what_is_weighed_with_nothing_does_not_count() -> None:
    score = Score(urgency=0, aging=0, service=0, interference=0)
    assert score.terms(1, 2, 3, 4).total == 0


# In an engine --------------------------------------------------------------------------------

LONG = 32_768


def busy_engine(order: Ordering) -> Replica:
    """Return an engine of one slot that serves a prompt of the hog's."""
    made = engine(small(4_096, budget=2_048, running=1), ChunkedPrefill(), ordering=order)
    made.submit(asked(1, 64, "z-hog"), InstantNs(0))
    return made


def asked(attempt: int, prompt: int, tenant: str) -> Any:
    return job(attempt, prompt, 1, tenant=tenant, deadline=9 * NS_PER_S + attempt)


def firsts(replica: Replica) -> list[int]:
    """Return who started, in order, until nobody waits."""
    found: list[int] = []
    while (due := replica.next_event()) is not None:
        happened = replica.advance(due)
        found += [one.attempt for one in happened if isinstance(one, FirstTokenMade)]
    return found[1:]


@pytest.mark.parametrize(
    ("order", "place"),
    [
        (Fifo(), 5),
        (EarliestDeadline(), 5),
        (ShortestFirst(), 0),
        (VtcOrder(), 0),
        (TenantFirst(), 0),
    ],
    ids=["fifo", "edf", "sjf", "vtc", "tenant_first"],
)
def test_one_line_blocks_a_short_request_behind_long_ones(order: Ordering, place: int) -> None:
    made = busy_engine(order)
    for nth in range(5):
        made.submit(asked(2 + nth, LONG, "z-hog"), InstantNs(0))
    made.submit(asked(9, 64, "other"), InstantNs(0))
    assert firsts(made).index(9) == place


@pytest.mark.parametrize(
    ("order", "place"),
    [(ShortestFirst(), 60), (Fifo(), 20), (VtcOrder(), 1), (TenantFirst(), 1)],
    ids=["sjf", "fifo", "vtc", "tenant_first"],
)
def test_the_shortest_first_starve_a_long_request(order: Ordering, place: int) -> None:
    """Short ones of another tenant's keep coming: of three in all, one starts at a time."""
    made = busy_engine(order)
    for nth in range(20):
        made.submit(asked(100 + nth, 64, "many"), InstantNs(0))
    made.submit(asked(9, LONG, "some"), InstantNs(0))
    found: list[int] = []
    coming = iter(range(200, 240))
    while (due := made.next_event()) is not None:
        started = [one for one in made.advance(due) if isinstance(one, FirstTokenMade)]
        found += [one.attempt for one in started]
        for nth in islice(coming, len(started)):
            made.submit(asked(nth, 64, "many"), due)
    assert found[1:].index(9) == place


def test_what_is_late_starts_in_the_end_whoever_else_keeps_coming() -> None:
    """It had its turn at the gateway; here it lets others pass for ten seconds."""
    made = busy_engine(TenantFirst())
    made.submit(job(2, 64, 1, tenant="late", deadline=0, relegated=True), InstantNs(0))
    coming, late_at = iter(range(100, 10_000)), None
    made.submit(asked(next(coming), 64, "many"), InstantNs(0))
    while late_at is None:
        due = made.next_event()
        assert due is not None
        started = [one for one in made.advance(due) if isinstance(one, FirstTokenMade)]
        late_at = next((due for one in started if one.attempt == 2), None)
        for nth in islice(coming, len(started)):
            made.submit(job(nth, 64, 1, tenant="many", deadline=due + 5 * NS_PER_S), due)
    assert LATE_NS < late_at < LATE_NS + 10**9 * 5 // 100


@pytest.mark.parametrize("running", [1, 2])
def test_jumps_do_not_pass_over_the_end_of_that(running: int) -> None:
    """Steps taken one by one and all at once give the same log, while turns change by time alone."""
    logs = []
    for jumps in (True, False):
        made = engine(
            small(4_096, budget=2_048, running=running),
            ChunkedPrefill(),
            jumps=jumps,
            ordering=TenantFirst(),
        )
        for nth, tenant in enumerate(("a", "b")[:running]):
            made.submit(job(1 + nth, 64, 2_200 - 300 * nth, tenant=tenant), InstantNs(0))
        late = [job(10 + nth, 64, 20, tenant=f"late-{nth}", relegated=True) for nth in range(3)]
        rest = [job(20 + nth, 64, 40, tenant="many", deadline=60 * NS_PER_S) for nth in range(9)]
        for one in (*late, *rest):
            made.submit(one, InstantNs(0))
        logs.append(run_to(made, 100 * NS_PER_S))
    assert logs[0] == logs[1]
    started = [one.attempt for _, one in logs[0] if isinstance(one, FirstTokenMade)][running:]
    assert started[0] in {10, 11, 12}, "by then they have let others pass for long enough"


# At the gateway ------------------------------------------------------------------------------


def sent_in(order: Ordering, requests: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the order in which a plane sends these, where one is served at a time."""
    pools = (PoolSpec(name="p", model="m", profile=small_h100(262_144, running=1)),)
    made = Driver(config(pools=pools, ordering=order, classes=(patient(),)))
    first = made.arrive("c", 1_000)
    for tenant, tokens in requests:
        made.arrive(tenant, tokens)
    assert sum(one.phase is Phase.QUEUED for one in made.plane.state.live.values()) == len(requests)
    made.serve(first)
    found = []
    for _ in requests:
        live = made.live(made.sent()[-1].request)
        found.append((str(live.request.tenant), int(live.request.input_tokens)))
        made.serve(live.request.id)
    return found


@pytest.mark.parametrize(
    ("order", "short", "long"),
    [
        (Fifo(), 2, 0),
        (EarliestDeadline(), 2, 0),
        (ShortestFirst(), 0, 12),
        (VtcOrder(), 1, 0),
        (TenantFirst(), 1, 0),
    ],
    ids=["fifo", "edf", "sjf", "vtc", "tenant_first"],
)
def test_a_plane_blocks_or_starves_under_the_same_orders(
    order: Ordering, short: int, long: int
) -> None:
    """Two long ones came first; then twelve short ones. Where do the first short and long stand?"""
    requests = [("a", LONG), ("a", LONG), *[("b", 100)] * 12]
    found = sent_in(order, requests)
    assert found.index(("b", 100)) == short
    assert found.index(("a", LONG)) == long
