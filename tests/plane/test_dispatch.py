"""Work that waits is sent as soon as a replica is open for it: no wake-up is lost."""

from typing import Any

import pytest

from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec, PoolSpec, TenantSpec
from headrace.model.ids import TenantId
from headrace.model.paths import Level
from headrace.model.slo import Outcome
from headrace.plane.state import Phase
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import Window
from headrace.policy.ordering.orders import Fifo, Ordering, TenantFirst
from headrace.units import InstantNs, later
from tests.plane import invariants
from tests.plane.scenes import H100, MODEL, MS, Driver, S, config, patient, small

AUDIT = Gates(mode=GateMode.AUDIT)
ONE_AT_A_TIME = (PoolSpec(name="p", model="m", profile=small(65_536, running=1)),)


def waiting(made: Driver) -> list[int]:
    return [i for i, live in made.plane.state.live.items() if live.phase is Phase.QUEUED]


def test_what_waits_goes_when_the_one_before_it_shows_its_first_token() -> None:
    made = Driver(config(classes=(patient(),)))
    first, second = made.arrive(tokens=9_000), made.arrive(tokens=9_000)
    assert waiting(made) == [second]
    made.first(made.live(first).attempt)
    assert waiting(made) == []


@pytest.mark.parametrize("how", ["end", "leave", "down", "up"])
def test_what_waits_goes_when_room_is_made(how: str) -> None:
    made = Driver(config(pools=ONE_AT_A_TIME, classes=(patient(),)), replicas=0)
    life = made.up("r0")
    first, second = made.arrive(), made.arrive()
    assert waiting(made) == [second]
    if how == "end":
        made.end(made.live(first).attempt, Outcome.ERROR)
    elif how == "leave":
        made.leave(first)
    else:
        if how == "down":
            made.down("r0", life)
        made.up("r1")
    assert waiting(made) == []


def test_when_the_next_one_leaves_the_queue_the_one_behind_it_is_tried() -> None:
    made = Driver(config(classes=(patient(),)))
    busy = made.arrive("a", 4_000)
    large = made.arrive("b", 60_000)
    small_ = made.arrive("c", 100)
    made.first(made.live(busy).attempt)
    made.arrive("a", 1_000)
    assert waiting(made)
    made.leave(large)
    invariants.hold(made.plane, made.now)
    assert small_ not in waiting(made)


def test_when_the_next_one_expires_the_one_behind_it_is_tried() -> None:
    settings = config(
        pools=(PoolSpec(name="p", model="m", profile=small(8_192)),),
        classes=(ClassSpec(name="chat", ttft_ms=2_000.0), patient()),
        admission=AUDIT,
    )
    made = Driver(settings)
    made.arrive("a", 6_000, slo_class="patient")
    made.arrive("b", 7_000, slo_class="chat")
    behind = made.arrive("c", 100, slo_class="patient")
    invariants.hold(made.plane, made.now)
    made.wait(5 * S)
    assert [f.reason for f in made.failed()] == [Reason.EXPIRED]
    invariants.hold(made.plane, made.now)
    assert behind in made.plane.state.live


@pytest.mark.parametrize("order", [Fifo(), TenantFirst()], ids=["fifo", "tenant first"])
def test_a_wait_ends_when_the_caller_said(order: Ordering) -> None:
    """Whatever the class: one that never expires, and one whose own bound is later."""
    classes = (patient(), ClassSpec(name="chat", ttft_ms=60_000.0))
    made = Driver(config(pools=ONE_AT_A_TIME, classes=classes, ordering=order))
    running = made.arrive(ttl_ns=1)
    ids = [
        made.arrive("b", slo_class=slo_class, ttl_ns=ttl)
        for slo_class, ttl in (("patient", 2 * S), ("chat", 3 * S), ("chat", None))
    ]
    invariants.hold(made.plane, made.now)
    made.wait(2 * S - 1)
    assert not made.failed()
    made.wait(1)
    assert [(f.request, f.reason) for f in made.failed()] == [(ids[0], Reason.WAITED_OUT)]
    made.configure(config(pools=ONE_AT_A_TIME, classes=classes, ordering=order), revision=2)
    invariants.hold(made.plane, made.now)
    made.wait(1 * S)
    assert [(f.request, f.reason) for f in made.failed()[1:]] == [(ids[1], Reason.WAITED_OUT)]
    assert {row.outcome for row in made.rows()} == {Outcome.TIMEOUT}
    made.serve(running)
    assert waiting(made) == [], "who runs has no such bound, and who has none waits on"
    made.serve(ids[2])
    invariants.over(made.plane)


def test_a_caller_cannot_wait_longer_than_its_class_lets_it() -> None:
    classes = (ClassSpec(name="chat", ttft_ms=1_000.0),)
    made = Driver(config(pools=ONE_AT_A_TIME, classes=classes, admission=AUDIT))
    made.arrive()
    made.arrive(ttl_ns=60 * S)
    made.wait(2 * S)
    assert [f.reason for f in made.failed()] == [Reason.EXPIRED]
    assert made.plane.next_timer() is None


def test_a_wait_that_ends_lets_the_one_behind_it_try() -> None:
    settings = config(
        pools=(PoolSpec(name="p", model="m", profile=small(16_384)),), classes=(patient(),)
    )
    made = Driver(settings)
    made.first(made.live(made.arrive("a", 9_000)).attempt)
    made.arrive("b", 9_000, ttl_ns=1 * S)
    behind = made.arrive("b", 100)
    assert behind in waiting(made)
    made.wait(1 * S)
    assert waiting(made) == []


def test_a_tick_that_changes_whose_turn_it_is_lets_the_next_one_try() -> None:
    """The first in turn does not fit; its tenant's stream outgrows its forecast; the next fits."""
    made = Driver(
        config(pools=(PoolSpec(name="p", model="m", profile=small(16_384)),), classes=(patient(),))
    )
    stream = made.arrive("a", 2_000)
    made.first(made.live(stream).attempt)
    other = made.arrive("b", 6_000)
    made.first(made.live(other).attempt)
    large = made.arrive("a", 12_000)
    little = made.arrive("b", 300)
    assert waiting(made) == [large, little]
    made.tick((made.live(stream).attempt, 2_500))
    invariants.hold(made.plane, made.now)
    assert waiting(made) == [large]


def test_a_newcomer_that_ends_at_once_may_still_free_the_way_for_others() -> None:
    """On its arrival its tenant's overdue head is seen, which stood before another's request."""
    made = Driver(config(classes=(ClassSpec(name="chat"), patient()), admission=AUDIT))
    made.arrive("c", 4_000, slo_class="patient")
    made.arrive("c", 3_000, slo_class="chat")
    large = made.arrive("a", 9_000, slo_class="chat")
    behind = made.arrive("b", 300, slo_class="patient")
    assert waiting(made) == [large, behind]
    made.now = InstantNs(5 * S)
    newcomer = made.arrive("a", 9_000, slo_class="chat", ttft_ns=1)
    assert {f.request for f in made.failed()} == {large, newcomer}
    assert waiting(made) == []


def own_pools() -> Driver:
    settings = config(
        pools=(
            PoolSpec(name="chat", model="m", profile=small(8_192, running=1), classes=("chat",)),
            PoolSpec(name="batch", model="m", profile=small(8_192, running=1), classes=("batch",)),
        ),
        classes=(patient(name="chat"), patient(name="batch")),
        tenants=tuple(TenantSpec(name=f"t{nth:03}") for nth in range(200)),
    )
    made = Driver(settings, replicas=0)
    made.up("c0", "chat")
    made.up("b0", "batch")
    return made


def test_a_class_that_waits_does_not_keep_another_from_its_own_idle_pool() -> None:
    made = own_pools()
    made.arrive("t000", 100, slo_class="chat")
    stuck = made.arrive("t001", 100, slo_class="chat")
    free = made.arrive("t002", 100, slo_class="batch")
    assert waiting(made) == [stuck]
    assert made.live(free).replica == "b0"


def test_nor_do_any_number_of_tenants_that_wait() -> None:
    made = own_pools()
    for nth in range(150):
        made.arrive(f"t{nth:03}", 100, slo_class="chat")
    free = made.arrive("t199", 100, slo_class="batch")
    assert made.live(free).replica == "b0"


def test_each_class_remembers_for_itself_that_nothing_opened() -> None:
    made = own_pools()
    for slo_class in ("chat", "batch", "chat", "batch"):
        made.arrive("t000", 100, slo_class=slo_class)
    stuck = dict(made.known.stuck)
    made.arrive("t001", 100, slo_class="batch")
    assert set(stuck) == {"chat", "batch"}
    assert waiting(made) == [3, 4, 5]
    invariants.hold(made.plane, made.now)


def test_what_shares_a_prefix_follows_it_at_once() -> None:
    """What shares the prefix of a prompt on its way needs little prefill behind it."""
    prefix: dict[str, Any] = {"prefix": tuple(range(4)), "prefix_tokens": 1_000}
    made = Driver(config(classes=(patient(),)))
    made.arrive("a", 4_100, **prefix)
    made.arrive("c", 4_100)
    stranger = made.arrive("c", 4_100)
    assert waiting(made) == [stranger]
    made.leave(stranger)
    follower = made.arrive("b", 4_100, **prefix)
    assert waiting(made) == []
    assert made.routes()[-1].placement.cached_tokens == 4_000
    assert made.live(follower).replica == "r0"


def test_a_closed_replica_is_passed_over_without_a_view_only_if_it_is_closed() -> None:
    made = Driver(config(classes=(patient(),), window=Window(prefill_ms=300.0)), replicas=30)
    for nth in range(120):
        made.arrive("abc"[nth % 3], 500 + 531 * (nth % 17), prefix=(nth % 5,), prefix_tokens=480)
        invariants.hold(made.plane, made.now)
        if nth % 4 == 3:
            flights = [a for a, f in made.plane.state.ledger.flights.items() if not f.streaming]
            made.first(flights[nth % len(flights)])
            invariants.hold(made.plane, made.now)


def test_a_timer_that_is_due_relists_and_the_next_one_lies_ahead() -> None:
    made = Driver(config(pools=ONE_AT_A_TIME))
    for tenant in "aabb":
        made.arrive(tenant, 1_000)
    while (when := made.plane.next_timer()) is not None:
        assert when > made.now
        made.now = when
        made.plane.handle_timer(now=when)
    assert len(made.plane.state.live) == 1


def test_an_early_timer_is_harmless() -> None:
    made = Driver(config(pools=ONE_AT_A_TIME))
    made.arrive()
    made.arrive()
    before = made.plane.freeze()
    assert made.plane.handle_timer(now=made.now) == []
    assert made.plane.freeze() == before


def test_an_event_after_the_deadline_sees_it_expired_even_if_no_timer_fired() -> None:
    made = Driver(config(pools=ONE_AT_A_TIME))
    first = made.arrive()
    late = made.arrive()
    made.now = InstantNs(10 * S)
    made.end(made.live(first).attempt, Outcome.ERROR)
    assert [(f.request, f.reason) for f in made.failed()][-1] == (late, Reason.EXPIRED)
    assert not made.plane.state.live


def test_a_class_that_does_not_expire_is_relegated_and_served_last() -> None:
    keeps = ClassSpec(name="keeps", ttft_ms=1_000.0, expire=False)
    made = Driver(config(pools=ONE_AT_A_TIME, classes=(keeps,)))
    first = made.arrive("a", 100)
    late = made.arrive("a", 100)
    made.first(made.live(first).attempt)
    made.wait(3 * S)
    fresh = made.arrive("a", 100)
    assert made.live(late).late
    made.end(made.live(first).attempt)
    assert waiting(made) == [late]
    made.serve(fresh)
    assert made.sent()[-1].request == late
    assert made.sent()[-1].relegated


def test_a_lent_turn_is_written_down() -> None:
    made = Driver(config(pools=ONE_AT_A_TIME))
    first = made.arrive("a", 100)
    made.arrive("b", 100, slo_class="batch")
    made.arrive("a", 100)
    made.first(made.live(first).attempt)
    made.tick((made.live(first).attempt, 1_000))
    made.end(made.live(first).attempt)
    route = made.routes()[-1]
    assert (route.tenant, route.evidence.lent) == ("a", True)
    chat, tenant = route.evidence.turn
    assert (chat.level, chat.name) == (Level.CLASS, "interactive")
    batch = made.plane.state.ledger.shares[MODEL].counter(made.way("b", "batch")[0].key)
    assert batch < chat.counter
    assert chat.least == chat.counter, "only it competes"
    assert tenant.least == tenant.counter < made.counter("a")
    assert not route.evidence.patient


def test_the_counter_that_travels_is_the_one_before_the_charge() -> None:
    made = Driver(config(pools=ONE_AT_A_TIME, classes=(patient(),)))
    first, *_ = (made.arrive(tenant) for tenant in "aab")
    assert len(made.sent()) == 1
    made.serve(first)
    stood = {tenant: made.counter(tenant) for tenant in "ab"}
    made.serve(made.sent()[-1].request)
    last = made.sent()[-1]
    assert [step.level for step in last.way] == [Level.CLASS, Level.TENANT]
    assert last.tenant == "b"
    assert last.counters == (0, 0), "nobody waited any more"
    second = made.sent()[-2]
    assert 0 < second.counters[1] < stood[second.tenant]


def test_no_counter_travels_where_nobody_else_waits() -> None:
    """All that a tenant sends goes at once: each time it was lifted, as if it had been idle."""
    made = Driver(replicas=2)
    for tenant in "abab":
        made.arrive(tenant)
    assert [one.counters for one in made.sent()] == [(0, 0)] * len(made.sent())
    assert len(made.sent()) > 1


def test_a_full_pool_holds_back_and_never_overbooks() -> None:
    made = Driver(
        config(pools=(PoolSpec(name="p", model="m", profile=small(4_096)),), classes=(patient(),))
    )
    for _ in range(6):
        live = made.live(made.arrive(tokens=600))
        if live.attempt is not None:
            made.first(live.attempt)
        load = made.plane.state.ledger.loads[live_incarnation(made)]
        total = made.routes()[0].evidence.replicas[0].blocks_total
        assert load.blocks <= total
    assert waiting(made)


def live_incarnation(made: Driver) -> Any:
    return next(iter(made.plane.state.ledger.loads))


def test_ties_are_spread_evenly_among_the_tied() -> None:
    made = Driver(replicas=8)
    for _ in range(24):
        made.serve(made.arrive(tokens=100))
    places = made.places()
    assert {name: places.count(name) for name in set(places)} == {f"r{n}": 3 for n in range(8)}


def test_first_come_first_served_serves_in_order_of_arrival() -> None:
    made = Driver(config(pools=ONE_AT_A_TIME, ordering=Fifo(), classes=(patient(),)))
    order = [made.arrive(tenant, 100 + 10 * nth) for nth, tenant in enumerate("aabacb")]
    for request in order:
        assert made.sent()[-1].request == request
        made.serve(request)


def test_work_is_shared_by_weight_while_both_wait() -> None:
    tenants = (TenantSpec(name="a", weight=3), TenantSpec(name="b"))
    made = Driver(config(pools=ONE_AT_A_TIME, classes=(patient(),), tenants=tenants))
    for _ in range(100):
        made.arrive("a", 500)
        made.arrive("b", 500)
    for _ in range(80):
        made.serve(made.sent()[-1].request, output=50)
    served = [row.tenant for row in made.rows()]
    assert served.count(TenantId("a")) == pytest.approx(60, abs=2)


def test_a_long_prompt_waits_for_an_idle_engine_and_then_goes() -> None:
    made = Driver(config(classes=(patient(),)))
    little = made.arrive(tokens=100)
    large = made.arrive(tokens=60_000)
    assert H100.prefill_ns(60_000, 0, 0, 0, 512) > 150 * MS
    assert waiting(made) == [large]
    made.first(made.live(little).attempt)
    assert waiting(made) == [], "nothing is being prefilled there, and the step holds every gap"


def two_sizes() -> Driver:
    pools = (
        PoolSpec(name="little", model="m", profile=small(8_192, running=1)),
        PoolSpec(name="large", model="m", profile=small(65_536, running=1)),
    )
    made = Driver(config(pools=pools, classes=(patient(),)), replicas=0)
    made.up("little", "little")
    return made


def test_a_request_that_only_a_lost_replica_could_hold_blocks_nobody() -> None:
    made = two_sizes()
    life = made.up("large", "large")
    held = made.arrive("a", 20_000)
    assert made.live(held).replica == "large"
    lost = made.arrive("b", 20_000)
    other = made.arrive("c", 100)
    behind = made.arrive("c", 100)
    assert waiting(made) == [lost, other, behind]
    made.down("large", life)
    assert [(f.request, f.reason) for f in made.failed()] == [
        (held, Reason.REPLICA_LOST),
        (lost, Reason.NO_READY_REPLICA),
    ]
    assert made.live(other).replica == "little"
    row = next(row for row in made.rows() if row.request == lost)
    assert (row.outcome, row.reason) == (Outcome.ERROR, Reason.NO_READY_REPLICA)
    made.serve(other)
    made.serve(behind)
    invariants.over(made.plane)


def test_while_no_replica_at_all_is_ready_nothing_is_hopeless() -> None:
    made = two_sizes()
    made.up("large", "large")
    made.arrive("a", 20_000)
    waits = made.arrive("b", 20_000)
    made.down("little", 1)
    made.down("large", 2)
    assert waiting(made) == [waits]
    made.up("large", "large")
    assert made.live(waits).replica == "large"


LONG = 60_000
"""Tokens whose prefill takes many dispatch windows."""


def shut(made: Driver) -> list[str]:
    """Return the replicas that a long prompt keeps from other first tokens."""
    loads = made.plane.state.ledger.loads
    return [
        one.name
        for one in made.known.fleet.replicas.values()
        if loads[one.incarnation].pending_prefill_ns > 150 * MS
    ]


@pytest.mark.parametrize("replicas", [1, 4, 8])
def test_where_nothing_is_urgent_long_prompts_that_can_wait_may_shut_every_replica(
    replicas: int,
) -> None:
    made = Driver(config(classes=(ClassSpec(name="chat"), patient())), replicas=replicas)
    for nth in range(replicas + 3):
        made.arrive("abc"[nth % 3], LONG, slo_class="patient")
    assert len(shut(made)) == replicas
    invariants.hold(made.plane, made.now)


@pytest.mark.parametrize(("chats", "most"), [(60, 3), (400, 2), (900, 1)])
def test_long_prompts_that_can_wait_leave_open_what_urgent_work_has_needed(
    chats: int, most: int
) -> None:
    made = Driver(config(classes=(ClassSpec(name="chat"), patient())), replicas=4)
    for _ in range(chats):
        asked = made.arrive("a", 300, slo_class="chat")
        if asked in made.plane.state.live:
            made.first(made.live(asked).attempt)
            made.end(made.live(asked).attempt)
    for nth in range(7):
        made.arrive("abc"[nth % 3], LONG, slo_class="patient")
    assert len(shut(made)) == most
    urgent = made.arrive("a", 300, slo_class="chat")
    assert urgent not in waiting(made), "a replica is open to it"
    invariants.hold(made.plane, made.now)


def pressed() -> Driver:
    """Return a plane whose urgent work of late holds back some of four long prompts."""
    made = Driver(config(classes=(ClassSpec(name="chat"), patient())), replicas=4)
    for _ in range(400):
        asked = made.arrive("a", 300, slo_class="chat")
        made.first(made.live(asked).attempt)
        made.end(made.live(asked).attempt)
    for nth in range(4):
        made.arrive("abc"[nth % 3], LONG, slo_class="patient")
    return made


def test_what_was_held_back_goes_once_urgent_work_no_longer_comes() -> None:
    made = pressed()
    assert len(shut(made)) == 2
    made.wait(60 * S)
    assert len(shut(made)) == 4
    invariants.hold(made.plane, made.now)


def test_a_refused_newcomer_changes_nothing_for_what_is_held_back() -> None:
    """Urgent work is only forgotten where turns are handed out, or a wake-up would be lost."""
    made = pressed()
    made.now = later(made.now, 60 * S)  # no timer is let fire
    refused = made.arrive("a", 0, slo_class="chat")
    assert refused not in made.plane.state.live
    invariants.hold(made.plane, made.now)


def test_after_a_restart_nothing_is_waited_for() -> None:
    made = pressed()
    assert made.plane.next_timer() is not None
    made.restart()
    assert made.plane.next_timer() is None


def test_long_prompts_that_cannot_wait_are_not_held_back() -> None:
    made = Driver(config(classes=(ClassSpec(name="soon", ttft_ms=9_000.0),)), replicas=4)
    for nth in range(4):
        made.arrive("abc"[nth % 3], LONG)
    assert len(shut(made)) == 4


def test_short_prompts_that_can_wait_are_not_held_back() -> None:
    made = Driver(config(classes=(patient(),)), replicas=4)
    made.arrive("a", LONG)
    for _ in range(3):
        made.arrive("b", 1_000)
    assert set(made.places()) == {f"r{nth}" for nth in range(4)}


def test_windows_open_by_what_was_seen_and_never_by_time_alone() -> None:
    """The prefill that is left falls with time, but only in forecasts: no timer need fire."""
    made = Driver(config(classes=(patient(starve_ms=None),)))
    busy = made.arrive("a", 5_000)
    made.arrive("a", 5_000)
    held = made.arrive("b", 5_000)
    attempt = made.live(busy).attempt
    [before] = made.plane.views_for(made.live(held), made.now)
    timer = made.plane.next_timer()
    assert timer is not None
    assert timer > 3_600 * S
    made.wait(50 * MS)
    [after] = made.plane.views_for(made.live(held), made.now)
    assert before.prefill_left_ns == before.pending_prefill_ns == after.pending_prefill_ns
    assert after.prefill_left_ns == before.prefill_left_ns - 50 * MS
    made.wait(60 * S)
    [later] = made.plane.views_for(made.live(held), made.now)
    assert later.prefill_left_ns > 50 * S, "what is overdue by so much has not begun"
    assert waiting(made) == [held]
    invariants.hold(made.plane, made.now)
    made.first(attempt)
    assert waiting(made) == []


def test_a_tighter_bound_of_a_callers_own_holds_nobody_else_back() -> None:
    """Else one stream that asks for 8 ms has everybody else refused while it runs."""
    made = Driver(config())
    pushy = made.arrive("a", 100, gap_ns=8 * MS)
    made.first(made.live(pushy).attempt)
    for tenant in "bcb":
        made.arrive(tenant, 2_000)
    assert not made.refused()
    assert waiting(made) == []
    invariants.hold(made.plane, made.now)
