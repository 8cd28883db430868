"""A run leaves one row for each offered request, under a label that says which policy it was."""

from msgspec.structs import replace

from headrace.model.deployment import TenantSpec
from headrace.model.slo import Outcome
from headrace.sim.experiment import describe, simulate, with_fifo_wait, without_control
from headrace.sim.faults import Crash, Leavers
from headrace.sim.scenario import rows_of
from headrace.trace.row import trace_hash
from headrace.units import NS_PER_S
from tests.sim.scenes import burst, deployment, run, scenario, source


def test_a_policy_is_described_in_a_few_words() -> None:
    one = scenario()
    assert describe(one) == "tenant_first, gates on"
    assert describe(without_control(one)) == "fifo, gates off"
    assert describe(with_fifo_wait(one)) == "tenant_first, gates on, fifo wait"


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
