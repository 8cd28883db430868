"""At the door: what admission was shown, what was reserved, and who had to make room."""

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.decision import Admit, Reason, Reject
from headrace.model.deployment import ClassSpec, LaneSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Concluded, Decided, Dispatch, Fail
from headrace.model.ids import AttemptId, ClassName, PoolName, TenantId
from headrace.model.slo import Outcome
from headrace.plane.accounts import Accounts, Tally
from headrace.plane.quotas import Bucket
from headrace.policy.admission.gates import GateMode, Gates, Mode, Modes
from headrace.policy.ordering.orders import Fifo
from headrace.units import MICRO, InstantNs, Tokens, WorkNs, time_for
from tests.plane.scenes import H100, MS, Driver, S, config, patient, small, usage

AUDIT = Gates(mode=GateMode.AUDIT)


def test_an_admitted_request_is_decided_sent_and_booked_in_one_step() -> None:
    made = Driver()
    request = made.arrive("a", 1_000)
    kinds = [type(effect) for effect in made.seen]
    assert kinds == [Decided, Decided, Dispatch]
    live, sent = made.live(request), made.sent()[0]
    assert (sent.request, sent.attempt, sent.replica) == (request, live.attempt, "r0")
    assert sent.deadline == live.deadline == 2 * S
    assert sent.output_limit == 16_384
    assert sent.decision == live.decision == made.entries()[0].decision_id
    assert isinstance(made.entries()[0].decision, Admit)


def test_the_route_record_holds_what_the_decision_was_made_of() -> None:
    made = Driver(replicas=3)
    request = made.arrive()
    record = made.routes()[0]
    live = made.live(request)
    assert record.demand == live.demand
    assert len(record.evidence.replicas) == 3
    assert record.placement.replica == made.sent()[0].replica
    assert record.slack_ns == 2 * S - live.demand.prefill_ns - live.first_ns


def test_a_refused_request_leaves_nothing_behind() -> None:
    made = Driver()
    before = made.plane.state.ledger
    request = made.arrive(tokens=131_072)
    refused, row = made.refused()[0], made.rows()[0]
    assert isinstance(refused.rejection, Reject)
    assert refused.rejection.reason is Reason.CONTEXT_TOO_LONG
    assert (row.request, row.admitted, row.outcome) == (request, False, None)
    assert row.reason is Reason.CONTEXT_TOO_LONG
    assert not made.plane.state.live
    assert not before.holds


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"tenant": "nobody"}, Reason.TENANT_UNKNOWN),
        ({"model": "gpt"}, Reason.MODEL_UNKNOWN),
        ({"slo_class": "platinum"}, Reason.CLASS_NOT_ALLOWED),
        ({"tenant": "c"}, Reason.MODEL_NOT_ALLOWED),
        ({"tenant": "c", "slo_class": "platinum"}, Reason.MODEL_NOT_ALLOWED),
        ({"tenant": "c", "model": "n", "slo_class": "platinum"}, Reason.CLASS_NOT_ALLOWED),
        ({"tenant": "c", "model": "gpt"}, Reason.MODEL_UNKNOWN),
        ({"tenant": "b", "slo_class": "interactive"}, Reason.CLASS_NOT_ALLOWED),
        ({"model": "n", "slo_class": "interactive"}, Reason.CLASS_NOT_ALLOWED),
        ({"tokens": 0}, Reason.INPUT_EMPTY),
        ({"fan_out": 2}, Reason.FAN_OUT_UNSUPPORTED),
        ({"fan_out": 0}, Reason.FAN_OUT_UNSUPPORTED),
        ({"max_output": 10**12}, Reason.OUTPUT_TOO_LONG),
    ],
)
def test_contract_faults_conclude_at_once(asked: dict[str, Any], reason: Reason) -> None:
    settings = config(
        models=(ModelSpec(name="m"), ModelSpec(name="n")),
        pools=(
            PoolSpec(name="p", model="m", profile=H100),
            PoolSpec(name="q", model="n", profile=H100, classes=("batch",)),
        ),
        tenants=(
            TenantSpec(name="a"),
            TenantSpec(name="b", classes=("batch",), tpm_limit=1),
            TenantSpec(name="c", models=("n",)),
        ),
    )
    made = Driver(settings)
    made.arrive(**asked)
    assert [row.reason for row in made.rows()] == [reason]
    assert [refused.rejection.reason for refused in made.refused()] == [reason]
    tallies = made.plane.state.accounts.tallies
    assert set(tallies) <= {"a", "b", "c", "other"}
    assert {name for by_class in tallies.values() for name in by_class} <= {
        "interactive", "batch", "other",
    }  # fmt: skip


def test_an_alias_is_the_model_it_stands_for() -> None:
    made = Driver()
    request = made.arrive(model="alias")
    assert made.live(request).model == "m"


@pytest.mark.parametrize(
    ("tenant", "asked", "expected"),
    [("a", None, "interactive"), ("b", None, "batch"), ("b", "interactive", "interactive")],
)
def test_the_class_is_the_one_asked_for_else_the_tenants_first(
    tenant: str, asked: str | None, expected: str
) -> None:
    tenants = (TenantSpec(name="a"), TenantSpec(name="b", classes=("batch", "interactive")))
    made = Driver(config(tenants=tenants))
    more: dict[str, Any] = {} if asked is None else {"slo_class": asked}
    request = made.arrive(tenant, **more)
    assert made.live(request).slo_class == expected


LANED = (ClassSpec(name="safety", lane="admin"), ClassSpec(name="chat"))


@pytest.mark.parametrize(
    ("named", "asked", "expected"),
    [
        ((), None, "chat"),
        ((), "chat", "chat"),
        ((), "safety", None),
        (("chat",), "safety", None),
        (("safety",), None, "safety"),
        (("safety",), "chat", None),
        (("chat", "safety"), "safety", "safety"),
    ],
)
def test_a_class_of_a_lane_is_for_tenants_that_name_it(
    named: tuple[str, ...], asked: str | None, expected: str | None
) -> None:
    tenants = (TenantSpec(name="a", classes=named),)
    made = Driver(config(tenants=tenants, lanes=(LaneSpec(name="admin"),), classes=LANED))
    more: dict[str, Any] = {} if asked is None else {"slo_class": asked}
    request = made.arrive("a", **more)
    if expected is None:
        assert made.rows()[0].reason is Reason.CLASS_NOT_ALLOWED
    else:
        assert made.live(request).slo_class == expected


def test_a_caller_may_tighten_its_bounds_and_never_widen_them() -> None:
    made = Driver(replicas=3)
    tight = made.arrive(ttft_ns=S, gap_ns=50 * MS)
    wide = made.arrive(ttft_ns=60 * S, gap_ns=9 * S)
    plain = made.arrive()
    assert (made.live(tight).bounds.ttft_ns, made.live(tight).bounds.gap_ns) == (S, 50 * MS)
    assert made.live(wide).bounds == made.live(plain).bounds


# Quota ---------------------------------------------------------------------------------------


def limited(**limits: Any) -> Driver:
    tenants = (TenantSpec(name="a", **limits), TenantSpec(name="b"))
    return Driver(config(tenants=tenants), replicas=4)


def test_quota_is_reserved_by_estimate_and_settled_by_usage() -> None:
    made = limited(tpm_limit=10_000)
    request = made.arrive("a", 1_000)
    quota = made.plane.state.ledger.quotas[TenantId("a")]
    assert quota.tokens == Bucket(limit=10_000, level=10_000 - 1_480)
    made.serve(request, output=20)
    assert quota.tokens == Bucket(limit=10_000, level=10_000 - 1_020)


@pytest.mark.parametrize(("asked", "reserved"), [(None, 1_480), (50, 1_050), (16_384, 17_384)])
def test_what_the_caller_allows_is_reserved_else_p90(asked: int | None, reserved: int) -> None:
    made = limited(tpm_limit=100_000)
    made.arrive("a", 1_000, max_output=asked)
    assert made.entries()[0].evidence.budget.tokens_needed == reserved


def test_an_absurd_output_limit_reserves_no_absurd_amount() -> None:
    made = limited(tpm_limit=1)
    made.arrive("a", 1_000, max_output=10**18)
    facts = made.entries()[0].evidence.budget
    assert facts.tokens_needed == 1_000 + 16_384
    assert facts.tokens_wait_ns < 2**63


def test_concurrency_counts_queued_and_running_and_is_given_back() -> None:
    made = limited(max_parallel_requests=2)
    first = made.arrive("a")
    made.arrive("a")
    made.arrive("a")
    assert [r.rejection.reason for r in made.refused()] == [Reason.CONCURRENCY]
    made.serve(first)
    made.arrive("a")
    assert len(made.refused()) == 1


def test_a_repeat_after_the_wait_that_was_told_is_taken() -> None:
    for limits in ({"rpm_limit": 2}, {"tpm_limit": 3_000}, {"rpm_limit": 2, "tpm_limit": 3_000}):
        made = limited(**limits)
        for _ in range(2):
            made.arrive("a", 1_000)
        made.arrive("a", 1_000)
        again = made.refused()[0].rejection.retry_after_ns
        assert again is not None
        made.wait(again - 1)
        made.arrive("a", 1_000)
        assert len(made.refused()) == 2, "not a moment earlier"
        made.wait(1)
        made.arrive("a", 1_000)
        assert len(made.refused()) == 2


# Evidence ------------------------------------------------------------------------------------


def test_what_waits_with_an_earlier_key_is_the_work_ahead() -> None:
    settings = config(
        pools=(PoolSpec(name="p", model="m", profile=small(8_192, running=1)),),
        classes=(
            ClassSpec(name="chat", ttft_ms=6_000.0),
            ClassSpec(name="slow", ttft_ms=9_000.0),
        ),
        admission=AUDIT,
    )
    made = Driver(settings)
    made.arrive("a", 100)
    early = made.arrive("a", 1_000)
    late = made.arrive("a", 2_000, slo_class="slow")
    made.arrive("b", 3_000)
    made.now = InstantNs(made.now + 1)
    made.arrive("a", 100, slo_class="chat")
    work = {r: made.live(r).demand.work_p50_ns for r in (early, late)}
    facts = made.entries()[-1].evidence.wait
    assert facts.own_ahead_ns == work[early]
    assert facts.backlog_ns == sum(
        made.live(r).demand.work_p50_ns for r in (early, late, made.entries()[3].request_id)
    )
    assert (facts.weights, facts.own_weight) == (4, 1), "two classes, and two tenants in its own"
    assert facts.rate_micro == 700_000


def test_a_tenant_that_does_not_wait_yet_adds_its_own_weight() -> None:
    tenants = (TenantSpec(name="a"), TenantSpec(name="b", weight=5))
    pools = (PoolSpec(name="p", model="m", profile=small(8_192, running=1)),)
    made = Driver(config(tenants=tenants, pools=pools))
    for _ in range(2):
        made.arrive("a", 100)
    made.arrive("b", 100)
    facts = made.entries()[-1].evidence.wait
    assert (facts.weights, facts.own_weight, facts.own_ahead_ns) == (6, 5, 0)


def test_only_replicas_that_serve_the_class_are_ready_for_it() -> None:
    pools = (
        PoolSpec(name="small", model="m", profile=small(4_096)),
        PoolSpec(name="large", model="m", profile=H100, classes=("batch",)),
    )
    made = Driver(config(pools=pools), replicas=0)
    made.up("s0", "small")
    for name in ("l0", "l1"):
        made.up(name, "large")
    made.arrive(slo_class="interactive", tokens=100)
    made.arrive(slo_class="batch", tokens=100)
    chat, batch = (record.evidence for record in made.entries())
    assert (chat.ready, batch.ready) == (1, 3)
    assert {view.replica for view in chat.replicas} == {"s0"}
    assert chat.blocks_largest < batch.blocks_largest


def test_the_largest_pool_is_the_largest_that_is_ready() -> None:
    """Else a request is taken that no ready replica could ever hold, and blocks its class."""
    pools = (
        PoolSpec(name="small", model="m", profile=small(4_096)),
        PoolSpec(name="large", model="m", profile=H100),
    )
    made = Driver(config(pools=pools), replicas=0)
    made.up("s0", "small")
    made.arrive(tokens=20_000)
    assert [r.rejection.reason for r in made.refused()] == [Reason.KV_TOO_LARGE]
    made.up("l0", "large")
    made.arrive(tokens=20_000)
    assert made.places() == ["l0"]


def test_what_fits_nowhere_gets_a_whole_pool_where_the_memory_gate_only_records() -> None:
    """Else it would wait for ever for blocks that no replica has."""
    gates = Gates(mode=GateMode.AUDIT, modes=Modes(memory=Mode.AUDIT))
    made = Driver(
        config(pools=(PoolSpec(name="p", model="m", profile=small(4_096)),), admission=gates)
    )
    made.arrive(tokens=100, max_output=1)
    large = made.arrive(tokens=20_000)
    assert made.entries()[-1].decision.verdicts[2].reason is Reason.KV_TOO_LARGE
    assert len(made.places()) == 1, "it waits until the pool is empty"
    assert made.live(large).demand.kv_blocks == made.entries()[-1].evidence.blocks_largest
    made.serve(1)
    assert len(made.places()) == 2


def test_a_class_without_a_pool_is_refused_though_the_contract_gate_only_records() -> None:
    gates = Gates(modes=Modes(contract=Mode.AUDIT))
    pools = (PoolSpec(name="p", model="m", profile=H100, classes=("batch",)),)
    made = Driver(config(pools=pools, admission=gates))
    made.arrive(slo_class="interactive")
    made.arrive(model="nobody's")
    made.arrive("stranger")
    reasons = [one.rejection.reason for one in made.refused()]
    assert reasons == [Reason.CLASS_NOT_ALLOWED, Reason.MODEL_UNKNOWN, Reason.TENANT_UNKNOWN]


def test_eight_candidates_a_few_holders_and_a_bound_on_the_rest_are_shown() -> None:
    made = Driver(config(admission=AUDIT), replicas=20)
    for nth in range(20):
        made.arrive(tokens=600 + nth, prefix=(nth,), prefix_tokens=512)
    made.arrive(tokens=600, prefix=(19,), prefix_tokens=512)
    evidence = made.entries()[-1].evidence
    names = [view.replica for view in evidence.replicas]
    assert len(names) == len(set(names)) == 9
    assert evidence.rest_bound_ns is not None
    holder = made.places()[19]
    assert {view.replica for view in evidence.replicas if view.cached_tokens} == {holder}
    assert Driver(replicas=8).arrive() == 1


OWN_POOLS = (
    PoolSpec(name="chat", model="m", profile=small(65_536, running=1), classes=("interactive",)),
    PoolSpec(name="batch", model="m", profile=small(65_536, running=1), classes=("batch",)),
)


def test_a_class_with_its_own_idle_pool_does_not_wait_for_anothers_backlog() -> None:
    made = Driver(config(pools=OWN_POOLS), replicas=0)
    made.up("c0", "chat")
    made.up("b0", "batch")
    for _ in range(200):
        made.arrive("a", 4_000, slo_class="batch")
    made.arrive("a", 100, slo_class="interactive")
    facts = made.entries()[-1].evidence.wait
    assert made.known.backlog.work_ns > 60 * S
    assert (facts.backlog_ns, facts.own_ahead_ns, facts.debt_ns, facts.weights) == (0, 0, 0, 1)
    assert not made.refused()
    assert made.places()[-1] == "c0"


def test_a_class_waits_for_whatever_shares_a_pool_with_it() -> None:
    """And is drained at the rate of all the pools that serve it."""
    pools = (*OWN_POOLS, PoolSpec(name="any", model="m", profile=H100, work_rate=0.5))
    made = Driver(config(pools=pools, admission=AUDIT), replicas=0)
    made.up("c0", "chat")
    made.up("b0", "batch")
    made.up("b1", "batch")
    for _ in range(4):
        made.arrive("a", 4_000, slo_class="batch")
    made.up("x0", "any")
    made.arrive("a", 4_000, slo_class="batch")
    made.arrive("b", 100, slo_class="interactive")
    facts = made.entries()[-1].evidence.wait
    assert facts.backlog_ns == made.known.backlog.work[ClassName("batch")] > 0
    assert facts.rate_micro == 700_000 + 500_000


def test_an_idle_pool_of_another_class_does_not_dilute_the_measured_rate() -> None:
    made = Driver(config(pools=OWN_POOLS, admission=AUDIT), replicas=0)
    for name, pool in (("c0", "chat"), ("c1", "chat"), ("b0", "batch"), ("b1", "batch")):
        made.up(name, pool)
    for _ in range(4):
        made.arrive("a", 1_000, ttft_ns=None)
    work = made.live(1).demand.work_p50_ns
    for _ in range(200):
        made.arrive("a", 1_000, max_output=200)
        made.serve(made.sent()[-1].request, output=200)
        made.now = InstantNs(made.now + S)
        made.tick()
    assert made.known.backlog.size
    rates = {str(pool): rate.micro() for pool, rate in made.known.rates.items()}
    assert rates["batch"] == 700_000, "it measured nothing"
    assert rates["chat"] == pytest.approx(work * MICRO / (2 * S), rel=0.05)
    made.arrive("b", 100)
    assert made.entries()[-1].evidence.wait.rate_micro == 2 * rates["chat"]


def test_where_turns_do_not_go_by_counters_nobody_owes_any() -> None:
    pools = (PoolSpec(name="p", model="m", profile=small(65_536, running=1)),)
    made = Driver(config(pools=pools, admission=AUDIT, ordering=Fifo()))
    for tenant in "abcabc":
        made.arrive(tenant, 1_000)
    assert {entry.evidence.wait.debt_ns for entry in made.entries()} == {0}


def test_lenders_do_not_lengthen_a_competitors_wait() -> None:
    tenants = (
        TenantSpec(name="a"),
        TenantSpec(name="b", weight=5),
        TenantSpec(name="c", weight=90),
    )
    pools = (PoolSpec(name="p", model="m", profile=small(65_536, running=1)),)
    made = Driver(config(tenants=tenants, pools=pools, admission=AUDIT))
    made.arrive("c", 100)
    for _ in range(50):
        made.arrive("c", 4_000, slo_class="batch")
    for _ in range(2):
        made.arrive("a", 100)
    made.arrive("b", 100)
    made.arrive("b", 100, slo_class="batch")
    made.arrive("a", 100)
    facts = made.entries()[-1].evidence.wait
    work = made.live(made.entries()[-1].request_id).demand.work_p50_ns
    assert facts.weights == 6, "itself and whoever has urgent work"
    assert facts.own_ahead_ns == 2 * work
    assert facts.debt_ns <= work
    assert facts.backlog_ns > 50 * work


def test_a_best_effort_caller_does_not_raise_its_class_by_asking_for_a_first_token_bound() -> None:
    classes = (patient(), ClassSpec(name="chat", ttft_ms=9_000.0))
    pools = (PoolSpec(name="p", model="m", profile=small(65_536, running=1)),)
    made = Driver(config(classes=classes, pools=pools))
    busy = made.arrive("c", 100)
    pushy = made.arrive("a", 100, slo_class="patient", ttft_ns=S)
    made.now = InstantNs(S // 2)
    chat = made.arrive("b", 100, slo_class="chat")
    assert made.live(pushy).bounds.ttft_ns is None
    made.serve(busy)
    assert made.sent()[-1].request == chat
    made.wait(60 * S)
    assert pushy in made.plane.state.live


def test_a_long_prefill_ahead_does_not_make_a_newcomer_hopeless() -> None:
    """By the time it is sent, no more than the dispatch window lets in is before it."""
    made = Driver(config(classes=(ClassSpec(name="chat"), patient()), admission=AUDIT))
    busy = made.arrive("a", 60_000, slo_class="patient")
    pending = made.plane.state.ledger.flights[made.sent()[0].attempt].prefill_ns
    assert pending > 2 * S
    request = made.arrive("b", 300, slo_class="chat")
    assert not made.failed()
    live, window = made.live(request), 150 * MS
    assert live.latest_start == live.deadline - window - live.first_ns
    made.now = InstantNs(1_500 * MS)
    made.first(made.live(busy).attempt)
    assert made.live(request).replica == "r0"


def test_an_answer_is_cut_where_the_pool_it_was_sent_to_ends() -> None:
    made = Driver(config(pools=(PoolSpec(name="p", model="m", profile=small(8_192)),)))
    made.arrive(tokens=1_000, max_output=16_000)
    assert made.sent()[0].output_limit == 7_192
    pools = (
        PoolSpec(name="large", model="m", profile=H100),
        PoolSpec(name="p", model="m", profile=small(8_192)),
    )
    both = Driver(config(pools=pools))
    both.arrive(tokens=1_000, max_output=16_000)
    assert both.sent()[0].output_limit == 7_192, "whichever pool demand was predicted on"


class Served:
    """One request at a time, each for as long as its predicted work."""

    def __init__(self, made: Driver) -> None:
        self.made = made
        self.until = 0
        self.attempt: int | None = None

    def run(self, until: int) -> None:
        """Serve up to an instant."""
        made = self.made
        while True:
            if self.attempt is None:
                flights = made.plane.state.ledger.flights
                if not flights:
                    break
                self.attempt = next(iter(flights))
                live = made.live(flights[AttemptId(self.attempt)].request)
                self.until = made.now + live.demand.work_p50_ns
            if self.until > until:
                break
            made.wait(self.until - made.now)
            live = made.live(made.plane.state.ledger.flights[AttemptId(self.attempt)].request)
            self.attempt = None
            made.serve(live.request.id, output=live.demand.output_p50)
        made.wait(until - made.now)


def test_who_owes_turns_is_refused_at_the_door_not_left_to_expire() -> None:
    """A class of weight 1 beside one of weight 1000 with more waiting than the bound allows."""
    tenants = (TenantSpec(name="a", weight=1_000), TenantSpec(name="b"))
    pools = (PoolSpec(name="p", model="m", profile=small(65_536, running=1), work_rate=1.0),)
    classes = (ClassSpec(name="chat"), ClassSpec(name="slow", ttft_ms=9_000.0, weight=1_000))
    made = Driver(config(tenants=tenants, pools=pools, classes=classes))
    engine = Served(made)
    for nth in range(3_000):
        name, slo_class = (("a", "slow"), ("b", "chat"))[nth % 2]
        if name == "a" or nth > 1_000:  # its backlog grows first
            made.arrive(name, 2_000, slo_class=slo_class, max_output=2)
        engine.run((nth + 1) * 10 * MS)
    rows = made.rows()
    light = [row for row in rows if row.tenant == "b"]
    expired = [row for row in light if row.reason is Reason.EXPIRED]
    assert len([row for row in light if not row.admitted]) > 950
    assert len(expired) <= 1, "without the debt one in each two seconds"
    assert len([row for row in rows if row.tenant == "a" and row.met]) > 500


def test_a_competitor_owes_no_more_than_it_has_waiting() -> None:
    tenants = (TenantSpec(name="a", weight=1_000), TenantSpec(name="b"), TenantSpec(name="c"))
    pools = (PoolSpec(name="p", model="m", profile=small(65_536, running=1)),)
    made = Driver(config(tenants=tenants, pools=pools, admission=AUDIT))
    busy = made.arrive("b", 9_000)
    one = made.arrive("a", 300)
    made.first(made.live(busy).attempt)
    made.tick((made.live(busy).attempt, 4_000))
    made.arrive("b", 300)
    facts = made.entries()[-1].evidence.wait
    assert facts.debt_ns == made.live(one).demand.work_p50_ns == facts.backlog_ns


def test_who_comes_back_beside_a_lender_is_not_lifted_to_the_lenders_old_counter_alone() -> None:
    """Else its idle time would have earned it credit over whoever was served meanwhile."""
    classes = (ClassSpec(name="chat", ttft_ms=9_900.0, expire=False), patient())
    pools = (PoolSpec(name="p", model="m", profile=small(65_536, running=1)),)
    made = Driver(config(classes=classes, pools=pools, admission=AUDIT))
    made.arrive("a", 500, slo_class="chat")
    made.arrive("c", 500, slo_class="patient")
    lent = made.counter("c")
    for _ in range(60):
        made.arrive("a", 500, slo_class="chat")
        made.serve(made.sent()[-1].request, output=50)
    assert made.counter("c") == lent < made.counter("a") // 2, "it lends"
    for _ in range(40):
        made.arrive("a", 500, slo_class="chat")
        made.arrive("b", 500, slo_class="chat")
    before = len(made.rows())
    assert made.counter("b") == made.counter("a")
    for _ in range(40):
        made.serve(made.sent()[-1].request, output=50)
    served = [row.tenant for row in made.rows()[before:]]
    assert served.count(TenantId("b")) == pytest.approx(20, abs=2)


def test_an_inexact_count_widens_the_margin() -> None:
    made = Driver()
    made.arrive(input_margin=Tokens(300))
    made.arrive()
    wide, exact = (record.evidence for record in made.entries())
    assert wide.input_margin_ns == H100.prefill_ns(300, 0, 0, 0, 512)
    assert exact.input_margin_ns == 0


# Room ----------------------------------------------------------------------------------------


def crowded(**more: Any) -> Driver:
    settings = config(
        pools=(PoolSpec(name="p", model="m", profile=small(8_192, running=1)),),
        classes=(patient(queue=3, **more),),
    )
    return Driver(settings)


def test_a_full_class_pushes_out_the_last_of_whoever_is_furthest_over() -> None:
    made = crowded()
    made.arrive("a", 3_000)
    for _ in range(3):
        made.arrive("a", 200)
    newcomer = made.arrive("b", 200)
    failed = made.failed()
    assert [(f.request, f.reason) for f in failed] == [(4, Reason.QUEUE_PRESSURE)]
    assert newcomer in made.plane.state.live
    row = made.rows()[-1]
    assert (row.request, row.admitted, row.outcome) == (4, True, Outcome.ERROR)


def test_who_is_pushed_out_may_come_when_its_tenants_own_have_drained() -> None:
    made = crowded()
    made.arrive("a", 3_000)
    waiting = [made.arrive("a", 4_000) for _ in range(3)]
    made.arrive("b", 200)
    (out,) = made.failed()
    assert out.request == waiting[-1]
    work = sum(made.live(one).demand.work_p50_ns for one in waiting[:-1])
    least = time_for(WorkNs(work), made.known.rates[PoolName("p")].micro())
    assert out.retry_after_ns == least > 0


def test_the_newcomer_goes_if_its_own_tenant_is_furthest_over() -> None:
    made = crowded()
    made.arrive("a", 3_000)
    for tenant in ("b", "c", "a"):
        made.arrive(tenant, 200)
    newcomer = made.arrive("a", 200)
    assert [f.request for f in made.failed()] == [newcomer]
    assert newcomer not in made.plane.state.live


def test_a_tenants_own_bound_comes_first() -> None:
    made = crowded(tenant_queue=2)
    for _ in range(4):
        made.arrive("a", 200)
    assert [r.rejection.reason for r in made.refused()] == [Reason.TENANT_QUEUE_FULL]
    assert not made.failed()


def test_a_request_arrives_once() -> None:
    made = Driver()
    request = made.arrive()
    made.ids = iter([request])  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="arrived twice"):
        made.arrive()


def test_nothing_can_arrive_before_a_configuration() -> None:
    made = Driver()
    bare = type(made.plane)()
    made.plane = bare
    with pytest.raises(AssertionError, match="first event must be ConfigChanged"):
        made.arrive()


def test_what_is_hopeless_on_arrival_expires_like_what_became_so() -> None:
    made = Driver(config(admission=AUDIT))
    made.arrive(ttft_ns=1)
    assert [(type(e), getattr(e, "reason", None)) for e in made.seen[1:]] == [
        (Fail, Reason.EXPIRED),
        (Concluded, Reason.EXPIRED),
    ]
    assert made.rows()[0].outcome is Outcome.TIMEOUT


def test_first_come_first_served_ends_nothing_for_being_late() -> None:
    made = Driver(config(admission=AUDIT, ordering=Fifo()))
    request = made.arrive(ttft_ns=1)
    made.wait(100 * S)
    assert request in made.plane.state.live
    assert not made.failed()


def test_learnt_lengths_show_in_the_next_demand() -> None:
    made = Driver(replicas=4)
    for _ in range(16):
        request = made.arrive()
        made.serve(request, output=33)
    request = made.arrive()
    assert made.live(request).demand.output_p90 == 33


def test_a_failed_answer_teaches_nothing() -> None:
    made = Driver(replicas=4)
    for _ in range(20):
        live = made.live(made.arrive())
        made.end(live.attempt, Outcome.ERROR, usage=usage(1_000, 1), timing=made.timing(1))
    assert not made.plane.state.outputs.windows


def test_tallies_are_by_tenant_and_class() -> None:
    made = Driver(replicas=4)
    served = made.arrive("a", 1_000)
    made.serve(served, output=5)
    made.arrive("a", 10**6)
    made.arrive("b", 500, slo_class="batch")
    tallies = made.plane.state.accounts.tallies
    mine = tallies[TenantId("a")][ClassName("interactive")]
    assert (mine.offered, mine.admitted, mine.met) == (2, 1, 1)
    assert mine.rejected == {Reason.CONTEXT_TOO_LONG: 1}
    assert (mine.input_tokens, mine.output_tokens, mine.met_tokens) == (1_001_000, 5, 5)
    assert (mine.attempts, mine.outcomes) == (1, {Outcome.SUCCESS: 1})
    assert mine.met_work_ns == H100.work_ns(1_000, 0, 5)
    other = tallies[TenantId("b")][ClassName("batch")]
    assert (other.offered, other.admitted, other.outcomes) == (1, 1, {})


def test_who_left_before_a_decision_was_not_refused() -> None:
    made = Driver()
    made.arrive(tokens=0)
    row = replace(made.rows()[0], reason=None)
    tally = Tally(offered=1)
    Accounts().conclude(tally, row)
    assert (tally.left_before, tally.rejected) == (1, {})


@pytest.mark.parametrize("given", [10, 1_000, 20_000])
def test_nobody_is_let_in_behind_a_prompt_that_its_engine_does_not_begin(given: int) -> None:
    """Whatever its length: once it is overdue by as much as a newcomer has time, the wait is too long."""
    made = Driver()
    stuck = made.arrive("a", given)
    made.wait(10 * S)
    late = made.arrive("b")
    assert [one.request for one in made.refused()] == [late]
    assert made.refused()[0].rejection.reason is Reason.DEADLINE_QUEUE
    made.first(made.live(stuck).attempt)
    made.arrive("b")
    assert len(made.refused()) == 1


def test_an_engine_that_stands_still_is_not_the_nearest() -> None:
    made = Driver(replicas=2)
    stuck = made.arrive("a", 100)
    made.wait(10 * S)
    made.arrive("b")
    assert not made.refused()
    assert made.sent()[-1].replica != made.live(stuck).replica
