"""What a replica carries: through the plane without control, by class, bounded, and the same every time."""

import re

import pytest
from msgspec.structs import replace

from headrace.config.profiles import load_profile
from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.deployment import ClassSpec, LaneSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.policy.catalog import PlaneConfig
from headrace.report.capacity import Measured
from headrace.sim.capacity import CapacityError, Question, alone, bare, measure
from headrace.sim.faults import Leavers
from headrace.sim.scenario import Assignment, Scenario
from headrace.sim.traffic import named, of_lengths, of_rows, own
from headrace.trace.mix import Fixed, Mix, Poisson, TenantSource
from headrace.trace.row import TraceRow
from headrace.units import InstantNs, Tokens

SLOW = load_profile("h100-70b-tp4")
CHAT, BATCH = ClassName("interactive"), ClassName("batch")
A = TenantId("a")
SHORT = Question(warm_s=1.0, span_s=6.0, precision=0.1)
LONG, BRIEF = Fixed(6_000, 30), Fixed(2_000, 30)


def scenario(*sources: TenantSource, **settings: object) -> Scenario:
    deployment = PlaneConfig(
        models=(ModelSpec(name="m", aliases=("n",)), ModelSpec(name="other")),
        pools=(
            PoolSpec(name="p", model="m", profile=SLOW, replicas=7),
            PoolSpec(name="q", model="other", profile=SLOW),
        ),
        tenants=(TenantSpec(name="a"), TenantSpec(name="b", classes=("batch",))),
        **settings,  # type: ignore[arg-type]
    )
    chosen = sources or (source(),)
    return Scenario(name="s", deployment=deployment, mix=Mix(sources=chosen, rows=1))


def source(tenant: str = "a", **settings: object) -> TenantSource:
    told = {"arrivals": Poisson(1.0), "lengths": BRIEF, **settings}
    return TenantSource(tenant=TenantId(tenant), **told)  # type: ignore[arg-type]


def found(one: Scenario, question: Question = SHORT) -> Measured:
    pool = one.deployment.pools[0]
    return measure(one, pool, own(one, pool, ()), question, now_s=5)


def test_equal_seeds_give_equal_records_and_points_by_rate() -> None:
    notes: list[str] = []
    one = scenario()
    pool = one.deployment.pools[0]
    first = measure(one, pool, own(one, pool, ()), SHORT, now_s=5, note=notes.append)
    assert first == found(one)
    assert notes[0].startswith("s at ")
    rates = [point.rate for point in first.points]
    assert rates == sorted(rates)
    knee = first.envelope.request_rate
    assert all(point.holds == (point.rate <= knee * 1.000_001) for point in first.points)
    assert first.envelope.measured_at_s == 5


def test_longer_requests_are_fewer_and_about_as_much_work() -> None:
    brief, long = found(scenario()), found(scenario(source(lengths=LONG)))
    assert long.envelope.request_rate < 0.6 * brief.envelope.request_rate
    assert long.envelope.work_rate > 0.5 * brief.envelope.work_rate
    assert long.envelope.fingerprint.mix_digest != brief.envelope.fingerprint.mix_digest


def test_replicas_together_are_told_by_one() -> None:
    one, three = found(scenario()), found(scenario(), replace(SHORT, replicas=3))
    assert three.replicas == 3
    assert three.envelope.work_rate == pytest.approx(one.envelope.work_rate, rel=0.3)


def test_more_attainment_is_less_capacity_and_classes_may_have_their_own() -> None:
    strict = found(scenario(), replace(SHORT, attainment=1.0)).envelope
    loose = found(scenario(), replace(SHORT, attainment=0.5)).envelope
    assert strict.work_rate < loose.work_rate
    own_target = found(scenario(), replace(SHORT, attainment=None)).envelope
    assert own_target.attainment == {"interactive": 0.99}


def test_a_class_that_bears_hours_is_not_measured_to_carry_what_piles_up() -> None:
    patient = found(scenario(source(slo_class=BATCH))).envelope
    urgent = found(scenario()).envelope
    assert urgent.work_rate <= patient.work_rate < 2 * urgent.work_rate


def test_what_would_be_in_the_way_of_the_offered_is_taken_off() -> None:
    budget = WindowSpec(unit=Unit.REQUESTS, per=Per.DAY, hard=1)
    one = scenario(lanes=(LaneSpec(name="ops"),))
    limited = TenantSpec(
        name="a", models=("m",), tpm_limit=1, rpm_limit=1, max_parallel_requests=1,
        max_parallel_sessions=1, budgets=(budget,), degrade=1,
    )  # fmt: skip
    deployment = replace(one.deployment, tenants=(limited,))
    changed = replace(one, deployment=deployment, faults=(Leavers(share=0.5, within_s=1.0),))
    found_ = bare(changed, deployment.pools[0], 2)
    assert found_.deployment.tenants == (TenantSpec(name="a"),)
    assert [(one.name, one.replicas) for one in found_.deployment.pools] == [("p", 2)]
    assert [one.name for one in found_.deployment.models] == ["m"]
    assert not any(spec.expire for spec in found_.deployment.classes)
    assert found_.faults == ()


def test_a_pool_is_offered_its_own_model_and_classes_only() -> None:
    mine = source(slo_class=CHAT, model=ModelName("n"))
    theirs = source("b", model=ModelName("other"))
    default = source("b", name="first of its tenant")
    one = scenario(mine, theirs, default)
    p, q = one.deployment.pools
    rows = own(one, p, ()).sample(200)
    assert {(row.tenant, row.slo_class) for row in rows} == {("a", CHAT), ("b", BATCH)}
    only = replace(p, classes=("batch",))
    assert {row.slo_class for row in own(one, only, ()).sample(200)} == {BATCH}
    assert {row.tenant for row in own(one, q, ()).sample(200)} == {"b"}
    with pytest.raises(CapacityError, match="nothing is offered"):
        measure(scenario(mine), q, own(scenario(mine), q, ()), SHORT, now_s=0)


def test_named_lengths_are_asked_for_by_the_scenarios_own_callers() -> None:
    one = scenario(source(slo_class=CHAT), source("b", slo_class=BATCH))
    rows = named("long", LONG, one, one.deployment.pools[0]).sample(200)
    assert {row.slo_class for row in rows} == {CHAT, BATCH}
    assert {row.input_tokens for row in rows} == {6_000}
    tracing = replace(one, mix=Mix(sources=(source("z"),), rows=1), assign=Assignment())
    first = named("long", LONG, tracing, one.deployment.pools[1]).sample(10)
    assert {(row.tenant, row.slo_class) for row in first} == {("a", CHAT)}


def rows(given: int, made: int, count: int = 10) -> list[TraceRow]:
    return [
        TraceRow(
            at=InstantNs(nth), input_tokens=Tokens(given), output_tokens=Tokens(made),
            tenant=A, slo_class=CHAT,
        )
        for nth in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "some", "told"),
    [
        (ClassSpec(name=CHAT), rows(1_000, 10), None),
        (ClassSpec(name=CHAT, ttft_ms=20.0), rows(4_000, 10), "to the first token, of 20"),
        (ClassSpec(name=CHAT, itl_ms=10.0), rows(100, 10), r"14\.\d ms a token, of 10"),
        (ClassSpec(name=CHAT, itl_ms=10.0), rows(100, 1), None),
        (ClassSpec(name=CHAT, ttft_ms=None), rows(427_000, 10), "more than its KV pool"),
        (ClassSpec(name=CHAT, ttft_ms=20.0), [*rows(4_000, 1, 1), *rows(9, 1, 99)], None),
        (ClassSpec(name=CHAT), [], None),
    ],
)
def test_what_no_rate_could_hold_is_told_by_the_bound_that_most_miss(
    spec: ClassSpec, some: list[TraceRow], told: str | None
) -> None:
    why = alone(SLOW, spec, some, 0.9)
    if told is None:
        assert why is None
    else:
        assert why is not None
        assert re.search(told, why)


def test_a_trace_is_known_by_its_requests_and_one_of_nothing_offers_nothing() -> None:
    traffic = of_rows("t", [*rows(1_000, 10), *rows(2_000, 20)])
    assert {row.input_tokens for row in traffic.sample(100)} == {1_000, 2_000}
    assert traffic.digest != of_rows("t", rows(1_000, 10)).digest
    assert of_rows("t", []).sample(10) == []
    assert of_lengths("x", LONG, A, CHAT).sample(50)[0].slo_class == CHAT
