"""What `/metrics` says: every figure against the plane's own, every label bounded."""

import asyncio
import json
import shutil
import subprocess

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from headrace.config.schema import AdminSpec
from headrace.gateway.families import FAMILIES
from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.decision import Reason
from headrace.model.deployment import TenantSpec
from headrace.model.engine import Snapshot, Usage
from headrace.model.event import ReplicaDown
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.price import PriceSpec
from headrace.model.slo import Outcome
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import PlaneConfig
from headrace.policy.fairness.costs import MoneyCost, revision
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.ordering.orders import TenantFirst
from headrace.ports.engine import Ending
from headrace.units import NS_PER_MS, NS_PER_S, REQUEST_TOKENS_MAX, Blocks, Tokens
from tests.gateway.managed import ADMIN_KEY, SPEC, Managed, value
from tests.gateway.scenes import KEYS, ObedientEngine, deployment, reach, sha256
from tests.support import require_service

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def obedient(config: PlaneConfig | None = None) -> tuple[Managed, ObedientEngine]:
    gateway = Managed(lambda clock: [ObedientEngine(clock)], config=config)
    (engine,) = gateway.engines
    return gateway, engine


async def test_the_denominators_are_the_planes_own() -> None:
    gateway = Managed()
    for _ in range(3):
        await gateway.ask(max_tokens=4).done()
    await gateway.ask(key=KEYS["slow"], max_tokens=4).done()
    assert (await gateway.ask(key=KEYS["slow"], max_tokens=4).done()).status == 429
    found = await gateway.scrape()
    who = {"tenant": "free", "class": "interactive"}
    tally = gateway.driver.plane.state.accounts.tallies[TenantId("free")][ClassName("interactive")]
    assert value(found, "headrace_offered_requests_total", **who) == 3
    assert value(found, "headrace_offered_input_tokens_total", **who) == tally.input_tokens
    assert value(found, "headrace_offered_work_seconds_total", **who) == pytest.approx(
        tally.offered_work_ns / NS_PER_S
    )
    assert value(found, "headrace_admitted_requests_total", **who) == 3
    assert value(found, "headrace_dispatched_attempts_total", **who) == 3
    assert value(found, "headrace_ended_requests_total", **who, outcome="success") == 3
    assert value(found, "headrace_met_requests_total", **who) == 3
    assert value(found, "headrace_met_output_tokens_total", **who) == 12
    assert value(found, "headrace_output_tokens_total", **who) == 12
    slow = {"tenant": "slow", "class": "interactive"}
    assert value(found, "headrace_offered_requests_total", **slow) == 2
    assert value(found, "headrace_rejected_requests_total", **slow, reason="request_rate") == 1
    assert value(found, "headrace_decisions_total", decision="admit") == 4
    assert value(found, "headrace_decisions_total", decision="reject") == 1
    assert value(found, "headrace_decisions_total", decision="route") == 4
    gateway.finish()


async def test_distributions_are_of_what_callers_saw() -> None:
    gateway, engine = obedient()
    caller = gateway.ask(stream=True)
    await reach(gateway.clock, 400)
    engine.say("one")
    for nth in range(4):
        await reach(gateway.clock, 430 + 30 * nth)
        engine.say(" more")
    await reach(gateway.clock, 720)
    engine.say(" late")
    engine.end()
    await caller.done()
    found = await gateway.scrape()
    mine = {"class": "interactive"}

    def under(name: str, edge: str) -> float | None:
        return value(found, f"headrace_{name}_bucket", **mine, le=edge)

    assert (under("ttft_seconds", "0.3"), under("ttft_seconds", "0.5")) == (0, 1)
    assert value(found, "headrace_ttft_seconds_sum", **mine) == pytest.approx(0.4)
    assert (under("itl_seconds", "0.025"), under("itl_seconds", "0.03")) == (0, 4)
    assert (under("itl_seconds", "0.15"), under("itl_seconds", "0.2")) == (4, 5)
    assert value(found, "headrace_itl_seconds_count", **mine) == 5
    assert value(found, "headrace_itl_seconds_sum", **mine) == pytest.approx(0.32)
    assert (under("max_stall_seconds", "0.15"), under("max_stall_seconds", "0.2")) == (0, 1)
    assert value(found, "headrace_e2e_seconds_sum", **mine) == pytest.approx(0.72)
    assert under("queue_seconds", "0.001") == 1
    gateway.finish()


async def test_slack_and_its_error_are_about_the_same_forecast() -> None:
    gateway, engine = obedient()
    caller = gateway.ask()
    await reach(gateway.clock, 1_500)
    (allowed,) = gateway.feed._allowed.values()
    engine.say("x")
    engine.end()
    await caller.done()
    error = gateway.feed.classes["interactive"].error
    assert error.sum == allowed - 1_500 * NS_PER_MS
    assert error.sum < -NS_PER_S, "it came far later than forecast"
    assert not gateway.feed._allowed
    found = await gateway.scrape()
    assert "headrace_slack_error_seconds_sum" not in found, "a sum that can fall is no counter"
    mine = {"class": "interactive"}
    assert value(found, "headrace_slack_error_seconds_bucket", **mine, le="-1.0") == 1
    assert value(found, "headrace_predicted_slack_seconds_bucket", **mine, le="1.0") == 0
    assert value(found, "headrace_predicted_slack_seconds_bucket", **mine, le="2.0") == 1
    gateway.finish()


async def test_the_queue_shows_length_age_work_and_the_most_urgent() -> None:
    gateway, engine = obedient()
    big = gateway.ask(messages=[{"role": "user", "content": "word " * 16_000}])
    await reach(gateway.clock, 1)
    gateway.ask()
    await reach(gateway.clock, 501)
    gateway.ask(key=KEYS["single"])
    await reach(gateway.clock, 502)
    found = await gateway.scrape()
    queue = {"model": "m", "class": "interactive"}
    assert value(found, "headrace_queued_requests", **queue) == 2
    assert value(found, "headrace_queue_age_seconds", **queue) == pytest.approx(0.501, abs=0.001)
    slack = value(found, "headrace_queue_earliest_slack_seconds", **queue)
    assert slack is not None
    assert 0 < slack < 2.0 - 0.501, "the prefill in front of it takes its part"
    work = value(found, "headrace_queued_work_seconds", **queue)
    assert work is not None
    assert work > 0
    assert value(found, "headrace_tenant_queued_requests", model="m", tenant="free") == 1
    assert value(found, "headrace_tenant_queued_requests", model="m", tenant="single") == 1
    assert value(found, "headrace_tenant_virtual_service", model="m", tenant="free") is not None
    idle = {"model": "m", "class": "batch"}
    assert value(found, "headrace_queued_requests", **idle) == 0
    assert value(found, "headrace_queue_age_seconds", **idle) is None
    assert value(found, "headrace_live_requests") == 3
    big.leave()
    gateway.driver.end_all()
    assert engine.aborted
    gateway.finish()


async def test_a_lost_replica_leaves_no_series_behind() -> None:
    gateway, engine = obedient()
    caller = gateway.ask()
    await reach(gateway.clock, 5)
    who = {"model": "m", "pool": "p", "replica": "p-0"}
    found = await gateway.scrape()
    assert value(found, "headrace_ready_replicas", model="m", pool="p") == 1
    assert value(found, "headrace_replica_kv_blocks_reserved", **who)
    pending = value(found, "headrace_replica_pending_prefill_seconds", **who)
    assert pending is not None
    assert pending > 0
    assert value(found, "headrace_replica_report_age_seconds", **who) == pytest.approx(0.005)
    assert value(found, "headrace_replica_running", **who) is None, "it does not tell"
    gateway.driver._post(ReplicaDown(replica=engine.name, incarnation=engine.incarnation))
    assert (await caller.done()).status == 502
    found = await gateway.scrape()
    assert value(found, "headrace_ready_replicas", model="m", pool="p") == 0
    assert not [name for name in found if name.startswith("headrace_replica_")]
    reason = {"reason": "replica_lost"}
    assert value(found, "headrace_ended_early_requests_total", tenant="free", **reason) == 1
    assert value(found, "headrace_ready") == 0
    gateway.finish()


async def test_what_a_replica_says_is_unknown_once_it_is_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Managed()
    await gateway.ask(max_tokens=4).done()
    await reach(gateway.clock, 1_500)
    who = {"replica": "p-0"}
    found = await gateway.scrape()
    assert value(found, "headrace_replica_running", **who) == 0
    assert value(found, "headrace_replica_prefix_queried_tokens_total", **who) is not None
    monkeypatch.setattr(gateway.engines[0], "poll", lambda: None)
    await reach(gateway.clock, 9_000)
    found = await gateway.scrape()
    assert value(found, "headrace_replica_running", **who) is None
    age = value(found, "headrace_replica_report_age_seconds", **who)
    assert age is not None
    assert age > 5
    assert value(found, "headrace_replica_decodes", **who) == 0, "our own books do not age"
    gateway.finish()


async def test_what_an_engine_should_tell_and_does_not_is_shown_until_it_does() -> None:
    gateway, engine = obedient()
    name = "headrace_replica_signals_missing"
    engine.missing = ("waiting", "kv_share")
    found = await gateway.scrape()
    for signal in engine.missing:
        assert value(found, name, pool="p", replica="p-0", signal=signal) == 1
    engine.missing = ()
    assert name not in await gateway.scrape()
    gateway.finish()


async def test_belief_in_a_cache_is_shown_beside_what_was_there() -> None:
    gateway = Managed()
    said = [{"role": "user", "content": "word " * 2_000}]
    expected, told = (f"headrace_replica_{one}_cached_tokens_total" for one in ("expected", "told"))
    await gateway.ask(messages=said, max_tokens=4).done()
    found = await gateway.scrape()
    (replica,) = gateway.engines
    who = {"pool": "p", "replica": replica.name}
    assert (value(found, expected, **who), value(found, told, **who)) == (0, 0)
    last = await gateway.ask(messages=said, max_tokens=4).done()
    found = await gateway.scrape()
    cached = last.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert value(found, told, **who) == cached > 0
    assert 0 < (value(found, expected, **who) or 0) < 2 * cached
    gateway.finish()


async def test_no_caller_can_mint_a_series() -> None:
    gateway = Managed()
    await gateway.ask(max_tokens=1).done()
    for nth in range(20):
        await gateway.ask(model=f"misspelt-{nth}").done()
        await gateway.ask(
            headers={"x-llm-d-inference-objective": f"gold-{nth}"}, max_tokens=1
        ).done()
        await gateway.ask(
            headers={"x-llm-d-inference-fairness-id": f"flow-{nth}"}, max_tokens=1
        ).done()
        await gateway.ask(key=f"sk-unknown-{nth}").done()
        await gateway.ask(path=f"/v1/nowhere-{nth}").done()
    content = (await gateway.look("/metrics")).content.decode()
    for planted in ("misspelt", "gold", "flow-", "unknown-", "nowhere"):
        assert planted not in content
    found = await gateway.scrape()
    assert {s.labels["tenant"] for s in found["headrace_offered_requests_total"]} == {"free"}
    assert value(found, "headrace_rejected_requests_total", reason="model_unknown") == 20
    assert value(found, "headrace_edge_refused_requests_total", reason="no_such_path") == 20
    assert value(found, "headrace_edge_refused_requests_total", reason="tenant_unknown") == 10
    assert value(found, "headrace_edge_refused_requests_total", reason="wrong_keys") == 10
    assert value(found, "headrace_ignored_headers_total", header="objective") == 20
    assert value(found, "headrace_ignored_headers_total", header="fairness") == 20
    gateway.finish()


async def test_tenants_beyond_the_bound_are_added_up_as_other() -> None:
    gateway = Managed(spec=replace(SPEC, tenant_series=1))
    await gateway.ask(max_tokens=2).done()
    await gateway.ask(key=KEYS["slow"], max_tokens=2).done()
    await gateway.ask(key=KEYS["slow"], max_tokens=2).done()
    await gateway.ask(key=KEYS["single"], max_tokens=2).done()
    found = await gateway.scrape()
    offered = {s.labels["tenant"]: s.value for s in found["headrace_offered_requests_total"]}
    assert offered == {"free": 1, "other": 3}
    other = {"tenant": "other", "class": "interactive"}
    assert value(found, "headrace_rejected_requests_total", **other, reason="request_rate") == 1
    assert value(found, "headrace_ended_requests_total", **other, outcome="success") == 2
    assert value(found, "headrace_tenant_virtual_service", model="m", tenant="other") is None
    gateway.finish()


async def test_the_revision_of_the_cost_is_a_label_of_what_it_counts() -> None:
    listed = MoneyCost(as_of="2025-01", price=PriceSpec(input=2.0, output=8.0))
    gateway = Managed(config=replace(deployment(), fairness=Vtc(cost=listed)))
    answer = (await gateway.ask(max_tokens=4).done()).json
    given, made = (answer["usage"][name] for name in ("prompt_tokens", "completion_tokens"))
    found = await gateway.scrape()
    cost = revision(listed)
    assert value(found, "headrace_policy_info", cost=cost) == 1
    spent = value(found, "headrace_tenant_virtual_service", model="m", tenant="free", cost=cost)
    assert spent == 2_000 * given + 8_000 * made, "billionths of a dollar, by the engine's count"
    gateway.finish()


async def test_what_an_audited_gate_would_have_refused_is_counted() -> None:
    config = replace(deployment(ttft_ms=20.0), admission=Gates(mode=GateMode.AUDIT))
    gateway = Managed(config=config)
    assert (await gateway.ask(max_tokens=1).done()).status == 200
    found = await gateway.scrape()
    why = {"class": "interactive", "gate": "deadline", "reason": Reason.DEADLINE_IMPOSSIBLE.value}
    assert value(found, "headrace_audited_refusals_total", **why) == 1
    assert value(found, "headrace_policy_info", mode="audit", wait="fair") == 1
    gateway.finish()


async def test_the_text_is_what_prometheus_reads_and_the_table_declares() -> None:
    gateway = Managed()
    await gateway.ask(max_tokens=4).done()
    caller = await gateway.look("/metrics")
    assert caller.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    told = list(text_string_to_metric_families(caller.content.decode()))
    names = [family.name for family in told]
    assert len(set(names)) == len(names)
    for family in told:
        name = family.name.removeprefix("headrace_")
        declared = FAMILIES[name]
        assert family.type == declared.kind.value
        assert family.documentation == declared.about
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(declared.labels)
    assert "vllm" not in caller.content.decode()
    gateway.finish()


async def test_metrics_hold_neither_keys_nor_prompts() -> None:
    gateway = Managed()
    secret = "correct-horse-battery"
    await gateway.ask(messages=[{"role": "user", "content": secret}], max_tokens=2).done()
    for path in ("/metrics", "/state", "/config", "/tenants", "/keys", "/policy"):
        content = (await gateway.look(path)).content.decode()
        for planted in (secret, ADMIN_KEY, *KEYS.values()):
            assert planted not in content
            assert sha256(planted) not in content
    gateway.finish()


async def test_a_large_answer_is_written_out_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Managed()
    monkeypatch.setattr("headrace.gateway.metrics.SMALL_BYTES", 0)
    monkeypatch.setattr("headrace.gateway.overview.SMALL_BYTES", 0)
    found = await gateway.scrape()
    assert value(found, "headrace_ready") == 1
    assert (await gateway.look("/state")).json["ready"] is True
    gateway.finish()


async def test_sinks_that_lose_something_say_so() -> None:
    gateway = Managed()
    gateway.lost = 3
    found = await gateway.scrape()
    assert value(found, "headrace_journal_dropped_frames_total") == 3
    assert value(found, "headrace_decision_log_dropped_lines_total") is None, "there is no log"
    gateway.finish()


@pytest.mark.service
async def test_promtool_finds_nothing_to_complain_of() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        require_service("promtool", "promtool is not installed")
    gateway = Managed()
    await gateway.ask(max_tokens=4).done()
    await gateway.ask(key=KEYS["narrow"], max_tokens=4).done()
    content = (await gateway.look("/metrics")).content
    checked = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=content, capture_output=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    gateway.finish()


@pytest.mark.parametrize("open_", [True, False])
async def test_the_state_is_what_top_needs(*, open_: bool) -> None:
    gateway = Managed(spec=AdminSpec(open=True) if open_ else SPEC)
    await gateway.ask(max_tokens=4).done()
    await reach(gateway.clock, 2_000)
    headers = {"host": "localhost:9090"}
    state = json.loads((await gateway.look("/state", headers=headers)).content)
    assert (state["revision"], state["mode"], state["ready"]) == (1, "enforce", True)
    (tenant,) = state["tenants"]
    assert (tenant["tenant"], tenant["offered"], tenant["met"]) == ("free", 1, 1)
    interactive = next(one for one in state["classes"] if one["slo_class"] == "interactive")
    assert interactive["rates"]["offered"] == 0.1
    assert interactive["ttft_p50_ms"] > 0
    batch = next(one for one in state["classes"] if one["slo_class"] == "batch")
    assert (batch["recent"], batch["ttft_p99_ms"]) == (0, None)
    (replica,) = state["replicas"]
    assert (replica["replica"], replica["decodes"]) == ("p-0", 0)
    gateway.finish()


async def test_the_most_that_engines_are_believed_breaks_no_metrics() -> None:
    gateway, engine = obedient()
    tokens = Tokens(REQUEST_TOKENS_MAX)
    usage = Usage(input_tokens=tokens, cached_tokens=tokens, output_tokens=tokens)
    for _ in range(3):
        caller = gateway.ask(max_tokens=4)
        await reach(gateway.clock, gateway.clock.now() / NS_PER_MS + 1)
        engine.say("word")
        timing = (
            engine._meters[engine.calls[-1].dispatch.attempt].timing().counted(REQUEST_TOKENS_MAX)
        )
        ending = Ending(outcome=Outcome.SUCCESS, usage=usage, timing=timing)
        engine.tell.ended(engine.calls[-1].dispatch.attempt, ending)
        assert (await caller.done()).status == 200
    most = 2**53
    engine.tell.reported(
        Snapshot(
            replica=engine.name,
            incarnation=engine.incarnation,
            observed_at=gateway.clock.now(),
            running=most,
            waiting=most,
            kv_blocks_used=Blocks(most),
            kv_blocks_total=Blocks(most),
            preemptions=most,
            prefix_tokens_queried=most,
            prefix_tokens_hit=most,
        )
    )
    found = await gateway.scrape()
    who = {"tenant": "free", "class": "interactive"}
    assert value(found, "headrace_output_tokens_total", **who) == 3 * REQUEST_TOKENS_MAX
    assert sum(one.value for one in found["headrace_replica_preemptions_total"]) == most
    assert (await gateway.look("/state")).status == 200
    gateway.finish()


async def test_service_follows_first_token_ticks_and_usage() -> None:
    gateway, engine = obedient()
    caller = gateway.ask(stream=True)
    who = {"model": "m", "tenant": "free"}
    await reach(gateway.clock, 150)
    assert value(await gateway.scrape(), "headrace_service_total", **who) == 0, "only sent so far"
    engine.say("one")
    await reach(gateway.clock, 160)
    found = await gateway.scrape()
    (flight,) = gateway.driver.plane.state.ledger.flights.values()
    price = gateway.driver.plane.settings.prices[ModelName("m")]
    given = value(found, "headrace_served_input_tokens_total", **who)
    assert given == flight.input_tokens
    assert value(found, "headrace_served_output_tokens_total", **who) == 1
    engine.say("two three four")
    await reach(gateway.clock, 350)
    found = await gateway.scrape()
    assert value(found, "headrace_served_output_tokens_total", **who) == 4
    service = price.service(flight.input_tokens, 0, 4)
    assert value(found, "headrace_service_total", **who) == service
    engine.end()
    await caller.done()
    found = await gateway.scrape()
    assert value(found, "headrace_service_total", **who) == service
    assert value(found, "headrace_served_cached_tokens_total", **who) == 0
    gateway.finish()


async def test_who_waits_long_is_seen_and_shares_once_two_have_waited_for_a_minute() -> None:
    spec = (TenantSpec(name="free"), TenantSpec(name="single"))
    config = deployment(ttft_ms=3_600_000.0, tenants=spec)
    config = replace(config, ordering=TenantFirst(lend_after_ms=86_400_000.0))
    gateway, engine = obedient(config)
    callers = [
        gateway.ask(
            key=KEYS[name],
            messages=[{"role": "user", "content": f"{nth} word " * 9_500}],
            stream=True,
        )
        for nth, name in enumerate(("free", "single") * 4)
    ]
    await reach(gateway.clock, 1_000)
    found = await gateway.scrape()
    free, single = ({"model": "m", "tenant": name} for name in ("free", "single"))
    name = "headrace_tenant_starvation_seconds"
    assert value(found, name, **free) == pytest.approx(1.0, abs=0.01)
    engine.say("x")  # its prefill is over: the next one is sent
    await reach(gateway.clock, 1_500)
    found = await gateway.scrape()
    assert value(found, name, **free) == pytest.approx(0.5, abs=0.01), "since its turn"
    assert value(found, name, **single) == pytest.approx(1.5, abs=0.01)
    assert value(found, "headrace_tenant_queue_emptied_total", **free) == 0
    assert "headrace_tenant_share_deviation" not in found
    for nth in range(3):
        engine.say("x")
        await reach(gateway.clock, 1_600 + nth)
    await reach(gateway.clock, 61_500)
    found = await gateway.scrape()
    strayed = [value(found, "headrace_tenant_share_deviation", **who) for who in (free, single)]
    assert strayed == pytest.approx([0.25, -0.25], abs=0.001), (
        "three prompts of four since the first look"
    )
    for caller in callers:
        caller.leave()
    gateway.driver.end_all()
    gateway.finish()


async def test_who_goes_beyond_a_soft_limit_is_counted_by_tenant_and_budget() -> None:
    soft = WindowSpec(unit=Unit.REQUESTS, per=Per.DAY, soft=1)
    tenants = (TenantSpec(name="free", budgets=(soft,)), TenantSpec(name="slow", budgets=(soft,)))
    gateway = Managed(config=deployment(tenants=tenants), spec=replace(SPEC, tenant_series=1))
    for key in ("free", "free", "free", "slow", "slow"):
        assert (await gateway.ask(key=KEYS[key], max_tokens=1).done()).status == 200
    found = await gateway.scrape()
    name = "headrace_soft_limit_requests_total"
    assert value(found, name, tenant="free", budget="requests/day") == 2
    assert value(found, name, tenant="other", budget="requests/day") == 1
    gateway.finish()
