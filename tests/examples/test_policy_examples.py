"""EX-3, EX-13 and EX-14 of the specification: what policies come to, through simulated runs."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from headrace.cli import main
from headrace.config.profiles import load_profile
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Concluded, Effect
from headrace.model.ids import ClassName, TenantId
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import PlaneConfig
from headrace.policy.fairness.costs import Cost, TokenCost, WorkCost, price
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.ordering.orders import Fifo, Ordering, TenantFirst
from headrace.report.compare import Comparison, Verdict, compare
from headrace.report.summary import Summary, summarise
from headrace.report.tables import render_comparison
from headrace.sim.experiment import simulate
from headrace.sim.scenario import Scenario, rows_of
from headrace.sim.world import World
from headrace.trace.mix import Even, Fixed, Mix, TenantSource
from headrace.units import NS_PER_S, InstantNs, Tokens

Output = pytest.CaptureFixture[str]


# EX-3 --------------------------------------------------------------------------------------------


def rated(rps: float) -> Scenario:
    """Return short requests of which one in five asks for a first token within 1 ms."""
    deployment = PlaneConfig(
        models=(ModelSpec(name="m"),),
        pools=(PoolSpec(name="pool", model="m", profile=load_profile("h100-8b-tp1"), replicas=4),),
        tenants=(TenantSpec(name="t"),),
        classes=(ClassSpec(name="fine"), ClassSpec(name="hopeless", ttft_ms=1.0, expire=False)),
        admission=Gates(mode=GateMode.AUDIT),
    )
    sources = [
        TenantSource(
            tenant=TenantId("t"),
            slo_class=ClassName(name),
            arrivals=Even(rps * share),
            lengths=Fixed(input=100, output=10),
        )
        for name, share in (("fine", 0.8), ("hopeless", 0.2))
    ]
    mix = Mix(sources=tuple(sources[: 1 if rps < 50 else 2]), duration_s=20.0)
    return Scenario(name="rated", deployment=deployment, mix=mix)


def test_ex3_goodput_and_attainment_are_two_numbers_and_both_are_shown() -> None:
    slow = summarise(simulate(rated(12.5), 0)).total
    assert slow.request_goodput == pytest.approx(10, rel=0.01)
    assert slow.attained_admitted == 1.0

    lenient = rated(100.0)
    fast = simulate(lenient, 0)
    total = summarise(fast).total
    assert total.request_goodput == pytest.approx(80, rel=0.01)
    assert total.attained_admitted == pytest.approx(0.8, abs=0.001)

    strict = replace(lenient, deployment=replace(lenient.deployment, admission=Gates()))
    found = compare(fast, simulate(strict, 0))
    shown = {one.name: (one.base, one.other) for one in found.changes}
    assert shown["request goodput"] == pytest.approx((80, 80), rel=0.01)
    assert shown["attainment over admitted"] == pytest.approx((0.8, 1.0), abs=0.001)
    assert found.verdict is Verdict.EQUAL
    text = render_comparison(found)
    assert "attainment over admitted" in text
    assert "request goodput" in text


# EX-13 -------------------------------------------------------------------------------------------

REFUSER = """
name: refuser
deployment:
  models: [{name: m}]
  pools: [{name: pool, model: m, profile: h100-8b-tp1}]
  tenants: [{name: t%s}]
mix:
  duration_s: 30
  sources:
    - tenant: t
      slo_class: interactive
      arrivals: {kind: poisson, rate: 10}
      lengths: {kind: fixed, input: 500, output: 100}
"""


def test_ex13_a_policy_that_refuses_nine_in_ten_attains_everything_and_is_worse(
    tmp_path: Path, capsys: Output
) -> None:
    told = []
    for name, limit in (("all", ""), ("few", ", max_parallel_requests: 1")):
        file, report = tmp_path / f"{name}.yaml", tmp_path / f"{name}.json"
        file.write_text(REFUSER % limit)
        assert main(["simulate", str(file), "--json", str(report)]) == 0
        told.append(msgspec.json.decode(report.read_bytes(), type=Summary).total)
    everything, few = told
    assert few.rejected / few.offered == pytest.approx(0.87, abs=0.05)
    assert few.attained_admitted == everything.attained_admitted == 1.0
    assert few.request_goodput is not None
    assert everything.request_goodput is not None
    assert few.request_goodput < 0.2 * everything.request_goodput
    assert few.attained_offered is not None
    assert few.attained_offered < 0.2

    capsys.readouterr()
    reports = [str(tmp_path / f"{name}.json") for name in ("all", "few")]
    assert main(["compare", *reports]) == 0
    assert "worse" in capsys.readouterr().out
    assert main(["compare", *reports, "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Comparison)
    assert found.verdict is Verdict.WORSE


# EX-14 -------------------------------------------------------------------------------------------


class Served(Struct, frozen=True):
    """What each tenant was served up to an instant, tokens under way included."""

    at: InstantNs
    both_wait: bool
    service: dict[str, int]
    """Weighted tokens, what fairness counts."""
    work: dict[str, int]
    """GPU time."""


def equal_rates(
    order: Ordering,
    *,
    rps: float,
    duration_s: float,
    rpm: int | None,
    cost: Cost | None = None,
) -> Scenario:
    """Return short chat beside 32K in and 4K out, at equal request rates, without deadlines."""
    patient = ClassSpec(
        name="any", ttft_ms=None, itl_ms=2_000.0, expire=False, tenant_queue=20_000, queue=40_000
    )
    deployment = PlaneConfig(
        models=(ModelSpec(name="m"),),
        pools=(PoolSpec(name="pool", model="m", profile=load_profile("a100-70b-tp4")),),
        tenants=tuple(TenantSpec(name=name, rpm_limit=rpm) for name in ("chat", "long")),
        classes=(patient,),
        ordering=order,
        fairness=Vtc(cost=cost or TokenCost()),
    )
    sources = tuple(
        TenantSource(tenant=TenantId(name), arrivals=Even(rps), lengths=lengths)
        for name, lengths in (("chat", Fixed(100, 100)), ("long", Fixed(32_768, 4_096)))
    )
    mix = Mix(sources=sources, duration_s=duration_s)
    return Scenario(name="ex14", deployment=deployment, mix=mix, drain_s=0.0)


def followed(one: Scenario) -> list[Served]:
    """Run a scenario and return what was served, once a second."""
    profile = one.deployment.pools[0].profile
    tokens = price(TokenCost(), "m", profile)
    ended = Served(InstantNs(0), False, {"chat": 0, "long": 0}, {"chat": 0, "long": 0})
    out: list[Served] = []

    def add(to: Served, tenant: str, given: Tokens, made: Tokens) -> None:
        to.service[tenant] += tokens.service(given, 0, made)
        to.work[tenant] += profile.work_ns(given, Tokens(0), made)

    def watch(world: World, effects: Sequence[Effect]) -> None:
        for row in effects:
            if isinstance(row, Concluded) and row.usage is not None:
                add(ended, row.tenant, row.usage.input_tokens, row.usage.output_tokens)
        if out and world.now < out[-1].at + NS_PER_S:
            return
        state = world.plane.state
        waiting = [name for known in state.models.values() for name in known.backlog.tenants]
        now = Served(world.now, len(waiting) == 2, dict(ended.service), dict(ended.work))
        for flight in state.ledger.flights.values():
            if flight.streaming:
                add(now, flight.tenant, Tokens(flight.input_tokens), Tokens(flight.made))
        out.append(now)

    World(one, rows_of(one, 0), 0, after=watch).run()
    return out


def share(later: dict[str, int], earlier: dict[str, int], tenant: str) -> float:
    """Return a tenant's part of what was served between two instants."""
    grown = {name: value - earlier.get(name, 0) for name, value in later.items()}
    return grown[tenant] / sum(grown.values())


def test_ex14_an_equal_request_rate_gives_long_requests_nearly_all_the_work() -> None:
    limited = equal_rates(Fifo(), rps=1.0, duration_s=400.0, rpm=3)
    last = followed(limited)[-1]
    assert share(last.work, {}, "long") > 0.95


def test_ex14_work_shares_are_even_while_both_are_backlogged() -> None:
    one = equal_rates(TenantFirst(), rps=10.0, duration_s=400.0, rpm=None, cost=WorkCost())
    both = [sample for sample in followed(one) if sample.both_wait]
    assert both[-1].at - both[0].at > 390 * NS_PER_S
    # The first long answers are charged by a guess of their length, so the start is left out.
    assert share(both[-1].work, both[100].work, "chat") == pytest.approx(0.5, rel=0.1)

    first_come = followed(replace(one, deployment=replace(one.deployment, ordering=Fifo())))
    assert share(first_come[-1].work, {}, "chat") < 0.05


def test_ex14_service_shares_are_even_where_tokens_are_counted() -> None:
    one = equal_rates(TenantFirst(), rps=10.0, duration_s=400.0, rpm=None)
    both = [sample for sample in followed(one) if sample.both_wait]
    assert both[-1].at - both[0].at > 390 * NS_PER_S
    # The first long answers are charged by a guess of their length, so the start is left out.
    first, last = both[100], both[-1]
    assert share(last.service, first.service, "chat") == pytest.approx(0.5, abs=0.05)
    # Weighted tokens leave out what a long context costs, so in GPU time the long tenant has more.
    assert share(last.work, first.work, "chat") > 0.25
