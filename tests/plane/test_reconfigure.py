"""A configuration may change under live work: it goes on, or ends with its reason."""

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.deployment import (
    ClassSpec,
    LaneSpec,
    ModelSpec,
    OrganisationSpec,
    PoolSpec,
    TenantSpec,
)
from headrace.model.effect import Effect
from headrace.model.ids import PoolName, TenantId
from headrace.model.paths import ROOT, SEPARATOR
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.plane.state import Phase
from headrace.policy.catalog import PlaneConfig, Window
from headrace.policy.fairness.costs import Cost, MoneyCost, Price, WorkCost, price
from headrace.policy.fairness.shares import Side
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.ordering.orders import Fifo, TenantFirst
from headrace.units import MICRO, InstantNs
from tests.plane import invariants
from tests.plane.scenes import COSTS, H100, MODEL, Driver, S, config, patient, small, usage

ONE = (PoolSpec(name="p", model="m", profile=small(65_536, running=1)),)
CHAT = ClassSpec(name="chat", ttft_ms=20_000.0)


def settings(**changes: Any) -> PlaneConfig:
    given: dict[str, Any] = {"pools": ONE, "classes": (CHAT, patient())}
    return config(**(given | changes))


def change(made: Driver, **changes: Any) -> list[Effect]:
    effects = made.configure(settings(**changes), revision=2)
    invariants.hold(made.plane, made.now)
    content = made.plane.freeze()
    assert Plane.thaw(content).freeze() == content
    return effects


def busy(**changes: Any) -> Driver:
    """Return a plane with one request on its way and three waiting."""
    made = Driver(settings(**changes))
    made.now = InstantNs(100 * S)
    for tenant, tokens in (("a", 300), ("b", 900), ("a", 600), ("c", 300)):
        made.arrive(tenant, tokens)
    assert [live.phase for live in made.plane.state.live.values()] == [
        Phase.DISPATCHED, Phase.QUEUED, Phase.QUEUED, Phase.QUEUED,
    ]  # fmt: skip
    return made


def served(made: Driver) -> list[int]:
    """Serve all, and return the order in which they were sent."""
    while made.plane.state.live:
        made.serve(made.sent()[-1].request)
    return [effect.request for effect in made.sent()]


def test_the_same_configuration_again_changes_nothing_that_matters() -> None:
    one, two = busy(), busy()
    assert change(one) == []
    assert served(one) == served(two)


@pytest.mark.parametrize("back_to", [TenantFirst(), TenantFirst(lend_after_ms=100.0)])
def test_another_order_lists_what_waits_anew_and_expires_nothing(back_to: TenantFirst) -> None:
    """Keys of one order mean nothing to another: arrival numbers are no instants."""
    made = busy(ordering=Fifo())
    assert change(made, ordering=back_to) == []
    assert [live.late for live in made.plane.state.live.values()] == [False] * 4
    assert served(made)[0] == 1
    made = busy()
    assert change(made, ordering=Fifo()) == []
    assert served(made) == [1, 2, 3, 4]


def test_what_was_relegated_is_judged_anew() -> None:
    keeps = replace(CHAT, expire=False)
    made = busy(classes=(keeps,))
    made.wait(30 * S)
    assert [live.late for live in made.plane.state.live.values()] == [False, True, True, True]
    change(made, classes=(keeps,), ordering=Fifo())
    assert not any(live.late for live in made.plane.state.live.values())
    change(made, classes=(keeps,))
    assert [live.late for live in made.plane.state.live.values()] == [False, True, True, True]
    change(made)
    assert {f.reason for f in made.failed()} == {Reason.EXPIRED}, "the class now expires"


def test_a_wider_window_lets_what_waits_go_at_once() -> None:
    pools = (PoolSpec(name="p", model="m", profile=H100),)
    made = Driver(settings(pools=pools))
    for tenant in "aba":
        made.arrive(tenant, 5_000)
    assert len(made.sent()) == 2, "one is computed, one waits in the engine"
    change(made, pools=pools, window=Window(prefill_ms=1_000.0))
    assert len(made.sent()) == 3


def test_a_larger_engine_lets_what_waits_go_at_once() -> None:
    made = busy()
    change(made, pools=(PoolSpec(name="p", model="m", profile=small(65_536, running=9)),))
    assert len(made.sent()) > 1


def test_new_weights_count_from_now_on() -> None:
    made = busy()
    change(
        made, tenants=(TenantSpec(name="a", weight=7), TenantSpec(name="b"), TenantSpec(name="c"))
    )
    queues = made.known.backlog.queues.values()
    weights = {queue.tenant: queue.way[-1].weight for queue in queues}
    assert weights == {"a": 7, "b": 1, "c": 1}
    made.wait(11 * S)
    (listed,) = (
        siblings
        for key, siblings in made.plane.state.ledger.shares[MODEL].sides[Side.URGENT].items()
        if key.endswith("chat")
    )
    assert listed.weight == 9, "now that they compete"


@pytest.mark.parametrize(
    ("changes", "gone", "reason"),
    [
        ({"tenants": (TenantSpec(name="a"), TenantSpec(name="c"))}, [2], Reason.TENANT_UNKNOWN),
        ({"classes": (patient(),)}, [2, 3, 4], Reason.CLASS_NOT_ALLOWED),
        (
            {"pools": (PoolSpec(name="p", model="m", profile=H100, classes=("patient",)),)},
            [2, 3, 4],
            Reason.CLASS_NOT_ALLOWED,
        ),
    ],
)
def test_who_waits_for_something_gone_fails_with_its_reason(
    changes: dict[str, Any], gone: list[int], reason: Reason
) -> None:
    made = busy()
    change(made, **changes)
    assert [(f.request, f.reason) for f in made.failed()] == [(nth, reason) for nth in gone]
    rows = {row.request: row for row in made.rows()}
    assert all(rows[nth].outcome is Outcome.ERROR for nth in gone if nth in rows)  # type: ignore[index]
    assert 1 in made.plane.state.live, "what was sent ends under the revision it began with"
    made.end(made.live(1).attempt, usage=usage(300, 7), timing=made.timing(7))
    row = next(row for row in made.rows() if row.request == 1)
    assert row.outcome is Outcome.SUCCESS
    assert row.work_ns > 0
    for request in list(made.plane.state.live):
        made.leave(request)
    invariants.over(made.plane)


def test_a_pool_that_is_gone_takes_its_replicas_with_it() -> None:
    made = busy()
    change(made, pools=(PoolSpec(name="other", model="m", profile=H100),))
    assert [(f.request, f.reason) for f in made.failed()] == [(1, Reason.REPLICA_LOST)]
    assert not made.known.fleet.replicas
    assert not made.plane.state.ledger.loads
    made.up("r0", "other")
    assert len(made.sent()) > 1, "the rest waits for the pool that came instead"


@pytest.mark.parametrize(
    "models",
    [(ModelSpec(name="n"),), (ModelSpec(name="n", aliases=("m",)),)],
    ids=["gone", "now an alias"],
)
def test_a_model_that_is_gone_ends_all_its_work(models: tuple[ModelSpec, ...]) -> None:
    made = busy()
    change(made, models=models, pools=(PoolSpec(name="p", model="n", profile=H100),))
    reasons = [(f.request, f.reason) for f in made.failed()]
    assert reasons == [(1, Reason.REPLICA_LOST), *((n, Reason.MODEL_UNKNOWN) for n in (2, 3, 4))]
    invariants.over(made.plane)
    made.restart()
    change(made)
    made.up("r9")
    assert made.arrive("a") in made.plane.state.live


def test_an_event_of_a_model_that_is_gone_is_ignored() -> None:
    made = busy()
    attempt = made.live(1).attempt
    change(
        made, models=(ModelSpec(name="n"),), pools=(PoolSpec(name="p", model="n", profile=H100),)
    )
    made.first(attempt)
    made.end(attempt)
    made.report("r0", 1)
    made.down("r0", 1)
    assert made.plane.state.ignored == {"first_token": 1, "ended": 1, "report": 1, "down": 1}


def test_requests_keep_the_revision_and_the_bounds_they_began_with() -> None:
    made = busy()
    bounds = made.live(2).bounds
    change(made, classes=(replace(CHAT, ttft_ms=1.0), patient()))
    assert made.live(2).bounds == bounds
    assert not made.failed()
    served(made)
    assert {record.policy_revision for record in made.routes()} == {1}
    made.arrive("a")
    assert made.entries()[-1].policy_revision == 2


def test_a_new_limit_binds_the_next_request() -> None:
    made = busy()
    tenants = (
        TenantSpec(name="a", max_parallel_requests=2),
        TenantSpec(name="b"),
        TenantSpec(name="c"),
    )
    change(made, tenants=tenants)
    made.arrive("a")
    assert [r.rejection.reason for r in made.refused()] == [Reason.CONCURRENCY]
    assert made.plane.state.ledger.quotas[TenantId("a")].parallel == 2


def test_a_pool_whose_model_does_not_exist_gets_no_replica() -> None:
    made = Driver(settings(pools=(*ONE, PoolSpec(name="lost", model="nowhere", profile=H100))))
    made.up("r5", "lost")
    assert made.plane.state.ignored == {"up": 1}


def test_a_class_with_no_pool_left_still_values_what_it_served() -> None:
    made = busy()
    only = (PoolSpec(name="p", model="m", profile=small(65_536, running=1), classes=("patient",)),)
    change(made, pools=only)
    made.end(made.live(1).attempt, usage=usage(300, 7), timing=made.timing(7))
    assert made.rows()[-1].work_ns == small(65_536, running=1).work_ns(300, 0, 7)


def test_another_cost_of_service_restarts_the_counters_with_what_is_in_flight() -> None:
    made = busy()
    for request in (1, 2):
        made.serve(request, output=900)
    before = {tenant: made.counter(tenant) for tenant in "abc"}
    flight = next(iter(made.plane.state.ledger.flights.values()))
    change(made, fairness=Vtc(cost=WorkCost()))
    charged = small(65_536, running=1).work_ns(flight.input_tokens, 0, flight.predicted)
    after = {tenant: made.counter(tenant) for tenant in "abc"}
    assert after == dict.fromkeys("abc", 0) | {flight.tenant: charged // flight.way[-1].weight}
    assert min(before.values()) > 0
    served(made)
    invariants.hold(made.plane, made.now)
    change(made)
    invariants.over(made.plane)
    assert {made.counter(tenant) for tenant in "abc"} == {0}


EVERY = [pytest.param(cost, id=name) for name, cost in COSTS.items()]


def under(cost: Cost) -> Driver:
    """Return a plane with two answers under way, one past its forecast, and one not begun."""
    made = Driver(config(fairness=Vtc(cost=cost)))
    for tenant, tokens in (("a", 300), ("b", 900), ("c", 600), ("a", 500)):
        made.arrive(tenant, tokens)
    for request in (1, 2, 4):
        made.first(made.live(request).attempt)
    made.tick((made.live(1).attempt, 700), (made.live(2).attempt, 5))
    made.end(made.live(4).attempt, usage=usage(500, 40), timing=made.timing(40))
    return made


@pytest.mark.parametrize("new", EVERY)
@pytest.mark.parametrize("old", EVERY)
def test_work_under_way_is_charged_anew_in_the_new_unit_and_settled_in_it(
    old: Cost, new: Cost
) -> None:
    made = under(old)
    kept = {tenant: made.counter(tenant) for tenant in "abc"}
    made.configure(config(fairness=Vtc(cost=new)), revision=2)
    invariants.hold(made.plane, made.now)
    if new == old:
        assert {tenant: made.counter(tenant) for tenant in "abc"} == kept
        return
    price = new_price(new)
    forecast = made.live(3).demand.output_p50
    assert made.counter("a") == price.service(300, 0, 700), "what ended counts no more"
    assert made.counter("b") == price.service(900, 0, max(5, forecast))
    assert made.counter("c") == price.service(600, 0, forecast)
    made.end(made.live(1).attempt, usage=usage(310, 800, 32), timing=made.timing(800))
    made.leave(2, made.timing(9))
    made.leave(3)
    assert made.counter("a") == price.service(278, 32, 800)
    assert made.counter("b") == price.service(900, 0, 9)
    assert made.counter("c") == 0, "no token, nothing owed"
    invariants.over(made.plane)


def new_price(cost: Cost) -> Price:
    return price(cost, "m", H100)


def test_a_new_price_list_is_a_new_revision_even_at_the_same_prices() -> None:
    listed = COSTS["money"]
    assert isinstance(listed, MoneyCost)
    made = under(listed)
    made.configure(config(fairness=Vtc(cost=replace(listed, as_of="2025-02"))), revision=2)
    assert made.counter("a") == new_price(listed).service(300, 0, 700)
    made.arrive("a", 100)
    told = [made.entries()[0].evidence.cost, made.entries()[-1].evidence.cost]
    sent = [made.routes()[0].evidence.cost, made.routes()[-1].evidence.cost]
    assert told == sent
    assert told[0] != told[1]
    assert all(one.startswith("money-1-") for one in told)


def test_another_profile_is_another_unit() -> None:
    made = under(WorkCost())
    slow = (PoolSpec(name="p", model="m", profile=H100.paced(2.0)),)
    made.configure(config(fairness=Vtc(cost=WorkCost()), pools=slow), revision=2)
    assert made.counter("a") == H100.paced(2.0).work_ns(300, 0, 700)


def test_a_model_that_was_away_while_the_cost_changed_comes_back_with_new_counters() -> None:
    made = busy()
    made.serve(1)
    assert made.counter("a") > 0
    other = {
        "models": (ModelSpec(name="n"),),
        "pools": (PoolSpec(name="q", model="n", profile=H100),),
    }
    change(made, **other)
    change(made, **other, fairness=Vtc(cost=WorkCost()))
    change(made, fairness=Vtc(cost=WorkCost()))
    assert {made.counter(tenant) for tenant in "abc"} == {0}


def test_the_same_cost_again_leaves_the_counters_alone() -> None:
    made = busy()
    made.serve(1)
    before = made.counter("a")
    change(made, ordering=TenantFirst(lend_after_ms=100.0))
    assert made.counter("a") == before > 0


def test_rates_are_kept_for_pools_that_stay_and_forgotten_for_those_that_go() -> None:
    made = busy()
    made.known.rates[PoolName("p")].done_ns = 1
    both = (*ONE, PoolSpec(name="more", model="m", profile=H100, work_rate=0.25))
    change(made, pools=both)
    rates = {pool: rate.micro() for pool, rate in made.known.rates.items()}
    assert rates == {"p": MICRO // 100, "more": MICRO // 4}
    change(made, pools=both[1:])
    assert list(made.known.rates) == ["more"]
    made.tick()
    change(
        made, models=(ModelSpec(name="n"),), pools=(PoolSpec(name="p", model="n", profile=H100),)
    )
    made.tick()
    assert made.known.rates == {}


def nodes(made: Driver) -> set[str]:
    """Return the keys of all nodes that a plane remembers anything of."""
    shares = made.plane.state.ledger.shares[MODEL]
    marks = (shares.counters, shares.served, shares.lows, shares.highs, shares.idle_users)
    return {key for one in marks for key in one} - {ROOT}


@pytest.mark.parametrize("by_user", [False, True])
@pytest.mark.parametrize("lane", ["ops", None])
@pytest.mark.parametrize("organisation", ["acme", None])
def test_who_has_another_place_in_the_tree_leaves_nothing_at_the_old_one(
    organisation: str | None, lane: str | None, by_user: bool
) -> None:
    lanes = (LaneSpec(name="ops", minimum=0.1, maximum=0.9),)
    organisations = (OrganisationSpec(name="acme"),)
    home = TenantSpec(
        name="a", by_user=by_user, organisation=organisation, minimum=0.2, classes=("chat",)
    )
    there = {
        "lanes": lanes,
        "organisations": organisations,
        "tenants": (home,),
        "classes": (replace(CHAT, lane=lane),),
    }
    elsewhere = {
        **there,
        "tenants": (replace(home, by_user=not by_user, organisation=None),),
        "classes": (replace(CHAT, lane=None),),
    }
    made, fresh = Driver(settings(**there)), Driver(settings(**elsewhere))
    for one in (made, fresh):
        one.serve(one.arrive("a", user="u"))
    change(made, **elsewhere)
    made.serve(made.arrive("a", user="u"))
    names = {key.split(SEPARATOR)[-1] for key in nodes(made) - nodes(fresh)}
    assert names <= {"0ops", "2acme"}, "they are declared still"


def test_what_is_under_way_for_somebody_gone_is_settled_where_it_was_charged() -> None:
    """Else whoever comes back meanwhile is given back what it was not charged with any more."""
    two = (TenantSpec(name="a"), TenantSpec(name="b", minimum=0.5, maximum=0.6))
    made = Driver(settings(tenants=two))
    sent = made.arrive("b", 2_000)
    charged = made.counter("b")
    assert charged > 0
    change(made, tenants=two[:1])
    change(made, tenants=two)
    assert made.counter("b") == charged
    made.end(made.live(sent).attempt, Outcome.ERROR)
    assert made.counter("b") == 0
    assert set(made.plane.state.ledger.shares[MODEL].served.values()) == {0}
    change(made, tenants=two[:1])
    assert not any(key.endswith("b") for key in nodes(made)), "nothing is owed any more"
