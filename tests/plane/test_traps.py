"""Traps that others fell into, each named after the sentence that avoids it."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from headrace.model.decision import Gate, Reason
from headrace.model.deployment import ClassSpec, PoolSpec, TenantSpec
from headrace.model.effect import Concluded, Effect, Fail
from headrace.model.ids import Incarnation, ReplicaName
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.plane.ledger import Load
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.ordering.orders import Fifo
from headrace.units import InstantNs
from tests.plane import invariants
from tests.plane.scenes import H100, MS, Driver, S, config, patient, small, usage

AUDIT = Gates(mode=GateMode.AUDIT)
ONE_AT_A_TIME = (PoolSpec(name="p", model="m", profile=small(65_536, running=1)),)


def endings(effects: list[Effect]) -> list[tuple[Any, ...]]:
    return [
        (type(effect).__name__, effect.reason, getattr(effect, "outcome", None))
        for effect in effects
        if isinstance(effect, Fail | Concluded)
    ]


# Admission and limits ------------------------------------------------------------------------


def test_a_wait_that_ended_has_the_same_code_and_reason_wherever_it_ended() -> None:
    settings = config(pools=ONE_AT_A_TIME, admission=AUDIT)
    on_arrival, on_timer, on_event = (Driver(settings) for _ in range(3))
    on_arrival.arrive(ttft_ns=1)
    on_timer.arrive(ttft_ns=60 * S)
    on_timer.arrive()
    on_timer.wait(5 * S)
    on_event.arrive(ttft_ns=60 * S)
    on_event.arrive()
    on_event.now = InstantNs(5 * S)
    on_event.arrive("b", ttft_ns=60 * S)
    found = [endings(made.seen) for made in (on_arrival, on_timer, on_event)]
    expired = [("Fail", Reason.EXPIRED, None), ("Concluded", Reason.EXPIRED, Outcome.TIMEOUT)]
    assert found == [expired] * 3


def test_an_empty_pool_and_a_full_pool_answer_differently_and_neither_is_a_quota_fault() -> None:
    empty = Driver(replicas=0)
    empty.arrive()
    full = Driver(config(pools=ONE_AT_A_TIME))
    for _ in range(400):
        full.arrive()
    nothing, queue = empty.refused()[0].rejection, full.refused()[0].rejection
    assert (nothing.reason, nothing.gate) == (Reason.NO_READY_REPLICA, Gate.DEADLINE)
    assert (queue.reason, queue.gate) == (Reason.DEADLINE_QUEUE, Gate.DEADLINE)


def test_the_estimate_is_reserved_at_admission_and_trued_up_later() -> None:
    """Five simultaneous calls cannot spend 663 tokens of a 100-token limit."""
    tenants = (TenantSpec(name="a", tpm_limit=100),)
    made = Driver(config(tenants=tenants), replicas=5)
    for _ in range(5):
        made.arrive("a", 30, max_output=20)
    assert len(made.sent()) == 2
    assert [r.rejection.reason for r in made.refused()] == [Reason.TOKEN_RATE] * 3
    made.serve(1, output=1)
    made.arrive("a", 30, max_output=1)
    assert len(made.refused()) == 4, "50 of 100 are still held, 31 were used: 19 are left"
    made.arrive("a", 18, max_output=1)
    assert len(made.refused()) == 4


def test_a_token_limit_charges_tokens_not_requests() -> None:
    made = Driver(config(tenants=(TenantSpec(name="a", tpm_limit=30),)), replicas=4)
    for _ in range(30):
        made.arrive("a", 9, max_output=1)
    assert len(made.sent()) == 3


def test_load_plus_this_request_is_compared() -> None:
    """A huge prompt does not go to a replica that is just under its limit."""
    made = Driver(
        config(classes=(patient(),), pools=(PoolSpec(name="p", model="m", profile=small(32_768)),))
    )
    first = made.arrive(tokens=16_000)
    made.first(made.live(first).attempt)
    huge = made.arrive(tokens=16_000)
    load = made.plane.state.ledger.loads[Incarnation(1)]
    view = made.plane.views_for(made.live(huge), made.now)[0]
    assert load.blocks < view.blocks_total
    assert made.live(huge).replica is None
    assert load.blocks + made.live(huge).demand.kv_blocks > view.blocks_total


def test_every_no_route_path_releases() -> None:
    """All replicas are over their limit and routing returns none: nothing stays reserved."""
    made = Driver(config(pools=ONE_AT_A_TIME))
    busy = made.arrive()
    waits = made.arrive()
    load = made.plane.state.ledger.loads[Incarnation(1)]
    booked = msgspec.msgpack.encode(load)
    assert made.live(waits).replica is None
    made.wait(1_500 * MS)
    assert msgspec.msgpack.encode(load) == booked
    made.wait(5 * S)
    assert waits not in made.plane.state.live
    assert msgspec.msgpack.encode(load) == booked
    made.serve(busy)
    invariants.over(made.plane)
    assert len(made.sent()) == 1
    made.arrive()
    assert len(made.sent()) == 2, "the idle pool refuses nobody"


def test_no_static_cap_refuses_what_measured_capacity_can_serve() -> None:
    made = Driver(config(classes=(ClassSpec(name="chat", ttft_ms=60_000.0),)), replicas=8)
    for nth in range(400):
        made.arrive("abc"[nth % 3], 200)
    assert not made.refused()


# In-flight ledger ----------------------------------------------------------------------------

ENDS: dict[str, Any] = {
    "success": lambda made, live: made.end(
        live.attempt, usage=usage(1_000, 5), timing=made.timing(5)
    ),
    "error": lambda made, live: made.end(live.attempt, Outcome.ERROR),
    "timeout": lambda made, live: made.end(live.attempt, Outcome.TIMEOUT),
    "cancel": lambda made, live: made.end(live.attempt, Outcome.CLIENT_CANCEL),
    "left": lambda made, live: made.leave(live.request.id),
    "lost": lambda made, _: made.down("r0", 1),
    "restart": lambda made, _: made.restart(),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("phase", ["sent", "first", "ticked"])
def test_release_comes_from_the_phase_the_request_was_in_on_every_exit(
    end: str, phase: str
) -> None:
    made = Driver(config(tenants=(TenantSpec(name="a", tpm_limit=10**6, max_parallel_requests=1),)))
    live = made.live(made.arrive())
    if phase != "sent":
        made.first(live.attempt)
    if phase == "ticked":
        made.tick((live.attempt, 999))
    ENDS[end](made, live)
    invariants.hold(made.plane, made.now)
    invariants.over(made.plane)


def test_release_consumes_ones_own_reservation_once() -> None:
    """No second message makes a count negative and its replica the winner of every pick."""
    made = Driver(replicas=2)
    live = made.live(made.arrive())
    other = made.live(made.arrive())
    ENDS["success"](made, live)
    for end in ("success", "error", "left"):
        ENDS[end](made, live)
    loads = made.plane.state.ledger.loads
    assert sorted(load.attempts for load in loads.values()) == [0, 1]
    assert other.request.id in made.plane.state.live


def test_counters_belong_to_an_incarnation_not_a_name() -> None:
    made = Driver(replicas=0)
    made.up("r0", incarnation=1)
    old = [made.live(made.arrive(tokens=100)) for _ in range(4)]
    for live in old:
        made.first(live.attempt)
    made.up("r0", incarnation=2)
    new = made.live(made.arrive())
    for live in old:
        ENDS["success"](made, live)
    load = made.plane.state.ledger.loads[Incarnation(2)]
    assert load.attempts == 1
    made.end(new.attempt, Outcome.ERROR)
    assert load == Load(front_at=load.front_at)


# Queues and fairness -------------------------------------------------------------------------


def test_the_queue_forms_on_capacity_not_on_health_so_that_priority_counts() -> None:
    made = Driver(
        config(pools=ONE_AT_A_TIME, classes=(ClassSpec(name="chat", ttft_ms=9_000.0), patient()))
    )
    busy = made.arrive("a", 100)
    low = made.arrive("b", 100, slo_class="patient")
    high = made.arrive("c", 100, slo_class="chat")
    assert [made.live(r).replica for r in (low, high)] == [None, None]
    made.serve(busy)
    assert made.sent()[-1].request == high


@pytest.mark.parametrize("ordering", [Fifo(), None])
def test_equals_go_in_order_of_arrival_and_survive_a_reload(ordering: Any) -> None:
    """A sequence number comes second, and what comes back from bytes is typed."""
    more = {} if ordering is None else {"ordering": ordering}
    made = Driver(config(pools=ONE_AT_A_TIME, classes=(patient(),), **more))
    order = [made.arrive("a", 100) for _ in range(12)]
    made.plane = Plane.thaw(made.plane.freeze())
    made.arrive("a", 100)
    for request in order:
        assert made.sent()[-1].request == request
        made.serve(request)


def test_own_dispatches_since_the_sample_count_and_engine_queues_stay_shallow() -> None:
    """The backlog does not sink into the engine, where fairness ends, between two reports."""
    made = Driver(config(classes=(patient(),)))
    made.report("r0", 1, running=0, waiting=0)
    for nth in range(100):
        made.arrive("abc"[nth % 3], 1_000)
    load = made.plane.state.ledger.loads[Incarnation(1)]
    assert load.pending_prefill_ns - load.front_ns <= 150 * MS
    assert load.attempts <= 1 + 150 * MS // H100.prefill_ns(1_000, 0, 0, 0, 512)
    assert made.known.backlog.size == 100 - load.attempts


@pytest.mark.parametrize(
    ("tokens", "output"), [(100, 4_000), (30_000, 10)], ids=["long outputs", "long prompts"]
)
def test_one_gate_in_work_seconds_passes_both_mixes(tokens: int, output: int) -> None:
    """What is let in is a bounded wait in time, whatever it is made of."""
    chat = ClassSpec(name="chat", ttft_ms=20_000.0, tenant_queue=10_000)
    made = Driver(config(classes=(chat,)))
    for _ in range(3_000):
        made.arrive("a", tokens, max_output=output)
    queued = [live for live in made.plane.state.live.values() if live.replica is None]
    work = sum(live.demand.work_p50_ns for live in queued)
    assert made.refused()
    assert {r.rejection.reason for r in made.refused()} == {Reason.DEADLINE_QUEUE}
    wait = work / 0.7
    assert 10 * S < wait < 20 * S
    few = len(queued) < 100
    assert few is (tokens == 30_000), "many short ones or few long ones: the same time"


# Routing -------------------------------------------------------------------------------------


def test_polled_load_and_own_dispatches_are_added() -> None:
    """Eight calls within one poll interval do not all reach one replica."""
    made = Driver(replicas=4)
    for nth in range(4):
        made.report(f"r{nth}", nth + 1, running=0, waiting=0, kv_blocks_used=0)
    for _ in range(8):
        made.arrive(tokens=1_000)
    assert Counter(made.places()) == {f"r{nth}": 2 for nth in range(4)}


def test_a_cache_miss_means_lowest_predicted_cost() -> None:
    """Not the replica with the smallest prefix tree, which may be the overloaded one."""
    made = Driver(replicas=2)
    long = made.arrive(tokens=4_000)
    loaded = made.live(long).replica
    made.first(made.live(long).attempt)
    for _ in range(3):
        made.arrive(tokens=300)
    other = ({"r0", "r1"} - {loaded}).pop()
    warm = made.known.fleet.replicas
    made.serve(made.arrive(tokens=2_000, prefix=tuple(range(10)), prefix_tokens=180))
    assert sum(bool(one.prefixes) for one in warm.values()) == 1
    made.arrive(tokens=2_000, prefix=(77, 78), prefix_tokens=900)
    view = {one.replica: one for one in made.routes()[-1].evidence.replicas}
    costs = {
        name: made.plane._machine.settings.config.routing.terms(one, 200, 200, 5 * S).total_ns
        for name, one in view.items()
    }
    assert made.places()[-1] == min(costs, key=lambda name: costs[name])
    assert other in view


def test_prefix_credit_is_capped_by_queue_wait() -> None:
    """One shared system prompt does not pin a burst to the first warm replica."""
    prefix: dict[str, Any] = {"prefix": (1,), "prefix_tokens": 600}
    made = Driver(replicas=4)
    made.serve(made.arrive(tokens=900, **prefix))
    for _ in range(12):
        made.arrive(tokens=900, **prefix)
    burst = Counter(made.places()[1:])
    assert len(burst) == 4
    assert max(burst.values()) <= 5
    held = [one.name for one in made.known.fleet.replicas.values() if one.prefixes]
    assert len(held) == 4, "and all are warm when the spike comes"


def test_a_restart_in_place_clears_what_the_index_believed() -> None:
    prefix: dict[str, Any] = {"prefix": (1, 2), "prefix_tokens": 500}
    made = Driver(replicas=2)
    made.serve(made.arrive(tokens=1_100, **prefix))
    warm = made.places()[0]
    made.now = InstantNs(S)
    life = 1 if warm == "r0" else 2
    made.report(warm, life, prefix_tokens_queried=1_100, prefix_tokens_hit=0)
    request = made.arrive(tokens=1_100, **prefix)
    assert made.routes()[-1].placement.cached_tokens == 1_000
    made.serve(request)
    made.now = InstantNs(2 * S)
    made.report(warm, life, prefix_tokens_queried=64, prefix_tokens_hit=0)
    made.arrive(tokens=1_100, **prefix)
    assert made.routes()[-1].placement.cached_tokens == 0


def test_a_cache_that_was_cleared_is_believed_empty_and_no_other() -> None:
    """What the engine says of its own cache counts at once; a past life's word counts for nothing."""
    prefix: dict[str, Any] = {"prefix": (1, 2), "prefix_tokens": 500}
    made = Driver(replicas=2)
    made.serve(made.arrive(tokens=1_100, **prefix))
    warm = made.places()[0]
    life = 1 if warm == "r0" else 2
    for name, other in ((warm, 3 - life), (warm, 99), ("r0" if warm == "r1" else "r1", 3 - life)):
        made.forget(name, other)
    assert made.plane.state.ignored["forgot"] == 2
    made.serve(made.arrive(tokens=1_100, **prefix))
    assert made.routes()[-1].placement.cached_tokens == 1_000
    made.forget(warm, life)
    made.arrive(tokens=1_100, **prefix)
    assert made.routes()[-1].placement.cached_tokens == 0


def test_what_is_sent_when_a_cache_is_cleared_settles_by_its_usage() -> None:
    made = Driver(replicas=1)
    prefix: dict[str, Any] = {"prefix": (1, 2), "prefix_tokens": 500}
    made.serve(made.arrive(tokens=1_100, **prefix))
    sent = made.arrive(tokens=1_100, **prefix)
    assert made.routes()[-1].placement.cached_tokens == 1_000
    made.forget("r0", 1)
    made.serve(sent)  # nothing was cached
    assert not made.plane.state.ledger.flights
    replica = made.known.fleet.replicas[ReplicaName("r0")]
    assert (replica.cached_expected, replica.cached_told) == (1_000, 0)
    sent = made.arrive(tokens=1_100, **prefix)
    made.end(made.live(sent).attempt, Outcome.ERROR)
    assert replica.cached_expected == 1_000, "without a usage nothing is compared"


def test_another_life_of_a_replica_holds_nothing() -> None:
    prefix: dict[str, Any] = {"prefix": (1, 2), "prefix_tokens": 500}
    made = Driver(replicas=1)
    made.serve(made.arrive(tokens=1_100, **prefix))
    made.up("r0")
    made.arrive(tokens=1_100, **prefix)
    assert made.routes()[-1].placement.cached_tokens == 0


def test_affinity_yields_to_slack_and_kv_headroom() -> None:
    """Hash-pinned traffic does not keep a full engine full while others idle."""
    prefix: dict[str, Any] = {"prefix": (1, 2, 3), "prefix_tokens": 200}
    made = Driver(config(pools=(PoolSpec(name="p", model="m", profile=small(16_384)),)), replicas=2)
    for _ in range(40):
        request = made.arrive(tokens=700, **prefix)
        if made.live(request).attempt is not None:
            made.first(made.live(request).attempt)
    counts = Counter(made.places())
    assert min(counts["r0"], counts["r1"]) * 2 >= max(counts.values()) - 2
    loads = made.plane.state.ledger.loads.values()
    total = made.routes()[0].evidence.replicas[0].blocks_total
    assert all(load.blocks <= total for load in loads)
