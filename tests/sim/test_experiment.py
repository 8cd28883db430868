"""A run leaves one row for each offered request, under a label that says which policy it was."""

from collections.abc import Callable
from itertools import permutations

import pytest
from msgspec.structs import replace

from headrace.config.profiles import load_profile
from headrace.model.decision import Reason
from headrace.model.deployment import ModelSpec, PoolSpec, TenantSpec
from headrace.model.event import ReplicaReported
from headrace.model.ids import ClassName, ModelName
from headrace.model.slo import Outcome
from headrace.policy.catalog import PlaneConfig
from headrace.policy.fairness.costs import WorkCost
from headrace.policy.fairness.vtc import Vtc
from headrace.sim.experiment import describe, simulate, with_fifo_wait, without_control
from headrace.sim.faults import Crash, Leavers
from headrace.sim.scenario import Scenario, rows_of
from headrace.trace.row import TraceRow, trace_hash
from headrace.units import NS_PER_S, Tokens
from tests.sim.scenes import burst, deployment, profile, run, scenario, source


def test_a_policy_is_described_in_a_few_words() -> None:
    one = scenario()
    assert describe(one) == "tenant_first, gates on"
    assert describe(without_control(one)) == "fifo, gates off"
    assert describe(with_fifo_wait(one)) == "tenant_first, gates on, fifo wait"
    by_work = replace(one, deployment=replace(one.deployment, fairness=Vtc(cost=WorkCost())))
    assert describe(by_work) == "tenant_first, gates on, work-1"
    assert describe(without_control(by_work)) == "fifo, gates off"


def test_policies_share_one_trace() -> None:
    one = scenario(source(rate=300.0), rows=300)
    runs = [simulate(policy(one), 3) for policy in (lambda s: s, without_control, with_fifo_wait)]
    assert {run.trace_hash for run in runs} == {trace_hash(rows_of(one, 3))}
    assert len({tuple(map(repr, run.offered)) for run in runs}) == 1
    assert simulate(one, 4).trace_hash != runs[0].trace_hash


def test_every_offered_request_has_its_row() -> None:
    faults = (Crash(replica=0, at_s=1.0), Leavers(share=0.3, within_s=1.0))
    one = scenario(
        source(rate=100.0), source("b", 30.0, slo_class="batch"), rows=400, faults=faults
    )
    left = simulate(one, 0)
    assert [one.request for one in left.offered] == list(range(1, 401))
    assert sorted(row.request for row in left.rows) == list(range(1, 401))
    ends = [row.ended_at for row in left.rows]
    assert ends == sorted(ends)
    assert left.end_ns == ends[-1]
    assert left.span_ns == left.offered[-1].at - left.offered[0].at


def test_engines_account_for_what_was_served() -> None:
    left = simulate(scenario(rows=100), 0)
    assert {row.outcome for row in left.rows} == {Outcome.SUCCESS}
    used = [row.usage for row in left.rows if row.usage is not None]
    assert sum(one.output_tokens for one in left.replicas) == sum(u.output_tokens for u in used)
    computed = sum(usage.input_tokens - usage.cached_tokens for usage in used)
    assert sum(one.prefill_tokens for one in left.replicas) == computed
    for replica in left.replicas:
        assert 0 < replica.busy_ns <= replica.up_ns
        assert replica.up_ns == int(left.end_ns)


def test_service_and_queues_are_sampled_once_a_second() -> None:
    left = simulate(scenario(source(rate=400.0), rows=800), 0)
    assert left.samples[0].at == 0
    seconds = [sample.at // NS_PER_S for sample in left.samples]
    assert seconds == sorted(set(seconds))
    assert max(sum(sample.waiting.values()) for sample in left.samples) > 0
    served = [sum(sample.work_ns.values()) for sample in left.samples]
    assert served == sorted(served)


def test_weights_and_objectives_travel_with_the_run() -> None:
    config = deployment(tenants=(TenantSpec(name="a", weight=3), TenantSpec(name="b")))
    assert simulate(scenario(config=config, rows=10), 0).weights == {"a": 3}


TWO = (ModelSpec(name="m", aliases=("main",)), ModelSpec(name="big"))


def two_models(*order: int) -> PlaneConfig:
    """Return two models, one with a pool a class, their pools declared in some order."""
    slower = load_profile("a100-70b-tp4")
    pools = (
        PoolSpec(name="small", model="m", profile=profile()),
        PoolSpec(name="big-chat", model="big", profile=slower, classes=("chat",)),
        PoolSpec(
            name="big-batch",
            model="big",
            profile=load_profile("a100-8b-tp1"),
            classes=("batch",),
        ),
    )
    chosen = tuple(pools[at] for at in order)
    return replace(deployment(), models=TWO, pools=chosen)


def test_work_is_priced_by_the_pool_that_would_serve_it() -> None:
    names = (None, "m", "main", "big")
    rows = [
        replace(burst(1)[0], model=None if name is None else ModelName(name), slo_class=kind)
        for name in names
        for kind in (ClassName("chat"), ClassName("batch"))
    ]
    first, *others = (
        [one.work_ns for one in simulate(scenario(config=two_models(*order)), 0, rows).offered]
        for order in permutations(range(3))
    )
    assert all(work == first for work in others)
    mine = profile().work_ns(200, 0, 50)
    assert first[:6] == [mine] * 6  # by its default, its name and its alias
    assert len({mine, first[6], first[7]}) == 3  # of the other model, each class on its own pool


def test_work_that_nobody_serves_has_a_price_too() -> None:
    rows = [replace(burst(1)[0], model=ModelName("nobody's"))]
    (one,) = simulate(scenario(config=two_models(1, 0, 2)), 0, rows).offered
    assert one.work_ns > 0


@pytest.mark.parametrize("declared", [None, 6_000])
@pytest.mark.parametrize("policy", [lambda one: one, without_control])
def test_an_answer_ends_where_the_pool_does(
    policy: Callable[[Scenario], Scenario], declared: int | None
) -> None:
    tiny = replace(profile(), kv_capacity_tokens=2_048, reference_batch=1)
    base = deployment(1)
    config = replace(base, pools=(replace(base.pools[0], profile=tiny),))
    patient = tuple(replace(one, ttft_ms=None, expire=False) for one in config.classes)
    limit = None if declared is None else Tokens(declared)
    rows = [replace(row, max_tokens=limit) for row in burst(3, given=100, made=5_000)]
    ran = run(policy(scenario(config=replace(config, classes=patient))), 0, rows)
    for row in ran.rows():
        if row.usage is not None:
            assert row.usage.input_tokens + row.usage.output_tokens <= 2_048 + 1
        else:
            assert not row.admitted
    assert declared is not None or all(row.usage for row in ran.rows())


def test_without_control_nobody_is_refused_for_a_full_queue() -> None:
    config = deployment(1)
    tight = tuple(replace(one, tenant_queue=3, queue=4) for one in config.classes)
    one = scenario(config=replace(config, classes=tight))
    rows = burst(600)
    for policy, full in ((lambda s: s, True), (without_control, False)):
        reasons = {row.reason for row in simulate(policy(one), 0, rows).rows}
        assert (Reason.TENANT_QUEUE_FULL in reasons) is full


def far_apart(gap_s: float) -> list[TraceRow]:
    """Return three requests with nothing between them."""
    return [row for nth in range(3) for row in burst(1, at_s=nth * gap_s)]


def test_nobody_is_polled_while_nothing_happens() -> None:
    ran = run(scenario(), 0, far_apart(100_000_000.3))
    told = [record.now for record in ran.records() if isinstance(record.event, ReplicaReported)]
    assert len(told) < 20
    assert {at % NS_PER_S for at in told} == {0}  # as if they had never stopped
    for row in ran.rows():
        latest = max(at for at in told if at <= row.entry.arrived_at)
        assert row.entry.arrived_at - latest < NS_PER_S


def test_what_is_polled_in_between_changes_nothing() -> None:
    rows = far_apart(7.3)
    ran = run(scenario(), 0, rows)
    assert [row.ended_at - row.entry.arrived_at for row in ran.rows()] == pytest.approx(
        [ran.row(1).ended_at] * 3, rel=0.1
    )


def test_a_pause_is_sampled_as_one() -> None:
    rows = [*burst(600, at_s=0.99), *burst(600, at_s=500.0)]
    left = simulate(scenario(config=deployment(1)), 0, rows)
    waiting = [sum(sample.waiting.values()) for sample in left.samples]
    first = next(nth for nth, number in enumerate(waiting) if number)
    paused = next(nth for nth in range(first, len(waiting)) if not waiting[nth])
    assert left.samples[paused].at < 60 * NS_PER_S  # not only when the next one came
    assert sum(left.samples[paused].work_ns.values()) > 0


def test_load_brings_the_same_requests_sooner() -> None:
    one = scenario()
    usual, sooner = rows_of(one, 0), rows_of(replace(one, load=2.0), 0)
    assert [row.input_tokens for row in usual] == [row.input_tokens for row in sooner]
    assert [row.at // 2 for row in usual] == [row.at for row in sooner]


def test_a_default_class_is_the_first_declared() -> None:
    bare = [replace(row, tenant=None, slo_class=None) for row in burst(3)]
    ran = run(scenario(), 0, bare)
    assert {(row.tenant, row.slo_class) for row in ran.rows()} == {("a", "chat")}
    assert {one.slo_class for one in simulate(scenario(), 0, bare).offered} == {"chat"}
