"""A shadow beside a driver: what it is told, what it compares, and that nothing else feels it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.gateway.decisions import DecisionLog
from headrace.gateway.differences import ADMIT, DifferenceLog
from headrace.gateway.errors import Fault
from headrace.gateway.server import REVISION
from headrace.gateway.shadow import Shadow
from headrace.gateway.stream import Done
from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec, TenantSpec
from headrace.model.event import RequestArrived
from headrace.model.slo import Outcome
from headrace.policy.catalog import canonical, passing
from headrace.report.decisions import Verified, verify_decisions
from tests.gateway.managed import Managed, value
from tests.gateway.scenes import Gateway, ObedientEngine, ask, deployment, emulated, reach, request

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def obedient(shadow: Shadow, **config: Any) -> tuple[Gateway, ObedientEngine]:
    gateway = Gateway(lambda clock: [ObedientEngine(clock)], shadow=shadow, **config)
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    return gateway, engine


async def flood(gateway: Gateway, count: int, *, every_ms: int, tokens: int = 8_000) -> None:
    for nth in range(1, count + 1):
        gateway.driver.offer(request(nth, tokens=tokens), ask(replay_output=20 + nth % 7))
        await reach(gateway.clock, nth * every_ms)


async def test_the_same_configuration_decides_the_same() -> None:
    config = deployment(replicas=2, ttft_ms=1_200.0)
    shadow = Shadow(config)
    gateway = Gateway(lambda c: [emulated(c, 0), emulated(c, 1)], config=config, shadow=shadow)
    await flood(gateway, 120, every_ms=40)
    await reach(gateway.clock, 30_000)
    gateway.finish()
    found = shadow.found
    assert found.requests == found.agreed == 120
    assert len(found.verdicts) > 1, "some were refused"
    assert found.places.total() == found.places[True, True, True] > 30
    assert found.real_wait_ns == found.shadow_wait_ns > 0
    assert found.wait_apart_ns == 0


async def test_a_stricter_configuration_is_told_by_reason_tenant_and_class(tmp_path: Path) -> None:
    log = DifferenceLog(tmp_path / "shadow.jsonl")
    shadow = Shadow(deployment(ttft_ms=60.0), differing=log.put)
    gateway, engine = obedient(shadow)
    gateway.driver.offer(request(1), ask())
    gateway.driver.offer(request(2, ttft_ms=150), ask())
    gateway.driver.offer(request(3, "single", tokens=6_000), ask())
    gateway.driver.offer(request(4, "stranger"), ask())
    assert shadow.verdict(request(1).id) == "reject:deadline_impossible"
    for call in list(engine.calls):
        engine.say("a b", call.dispatch.attempt)
        engine.end(call.dispatch.attempt)
    assert shadow.verdict(request(1).id) is None
    gateway.finish()
    log.close()
    refused = "deadline_impossible"
    assert shadow.found.verdicts == {
        (ADMIT, refused): 3,
        ("tenant_unknown", "tenant_unknown"): 1,
    }
    assert (shadow.found.agreed, shadow.found.only_real_admits) == (1, 3)
    assert shadow.found.only_shadow_admits == 0
    assert shadow.found.groups["single", "interactive", ADMIT, refused] == 1
    lines = [json.loads(line) for line in (tmp_path / "shadow.jsonl").read_text().splitlines()]
    assert [line["request_id"] for line in lines] == [1, 2, 3]
    assert lines[2] == {
        "request_id": 3,
        "at_ns": lines[2]["at_ns"],
        "tenant": "single",
        "tenant_class": "interactive",
        "real": {
            "decision_id": lines[2]["real"]["decision_id"],
            "decision": "admit",
            "replica": "p-0",
            "wait_ms": 0.0,
            "failed": "shut_down",
        },
        "shadow": {
            "decision_id": 3,
            "decision": refused,
            "replica": None,
            "wait_ms": None,
            "failed": None,
        },
    }


async def test_what_only_the_shadow_admits_ends_there_at_once() -> None:
    free = tuple(replace(one, rpm_limit=None) for one in deployment().tenants)
    shadow = Shadow(deployment(tenants=free))
    gateway, engine = obedient(shadow)
    for nth in (1, 2, 3):
        gateway.driver.offer(request(nth, "slow"), ask())
    assert shadow.found.only_shadow_admits == 2
    assert list(shadow.plane.state.live) == [1]
    engine.end()
    gateway.finish()
    assert shadow.found.verdicts == {(ADMIT, ADMIT): 1, ("request_rate", ADMIT): 2}
    assert shadow.found.places == {(True, True, True): 1, (False, True, False): 2}


async def test_what_the_shadow_lets_wait_leaves_when_it_is_really_over() -> None:
    patient = deployment(ttft_ms=9_000.0)
    shadow = Shadow(patient)
    gateway, engine = obedient(shadow, config=passing(patient))
    for nth in (1, 2, 3):
        gateway.driver.offer(request(nth, tokens=16_000), ask())
    assert len(engine.calls) == 3, "the real one holds nobody back"
    first, second, third = (call.dispatch.attempt for call in engine.calls)
    state = shadow.plane.state
    assert len(state.ledger.flights) == 1
    engine.end(second)
    assert list(state.live) == [1, 3]
    engine.say("a", first)
    assert len(state.ledger.flights) == 2
    engine.say("a", third)
    engine.end(first)
    engine.end(third)
    gateway.finish()
    assert shadow.found.places == {(True, True, True): 2, (True, False, False): 1}


async def test_a_token_made_before_the_shadow_sends_counts_when_it_does() -> None:
    shadow = Shadow(deployment(ttft_ms=9_000.0))
    config = passing(deployment(ttft_ms=9_000.0))
    gateway, engine = obedient(shadow, config=config)
    for nth in (1, 2):
        gateway.driver.offer(request(nth, tokens=20_000), ask())
    first, second = (call.dispatch.attempt for call in engine.calls)
    engine.say("a", second)  # the shadow has sent the first alone
    assert [flight.streaming for flight in shadow.plane.state.ledger.flights.values()] == [False]
    engine.say("a", first)
    assert [flight.streaming for flight in shadow.plane.state.ledger.flights.values()] == [True] * 2
    await reach(gateway.clock, 500)
    engine.say("b c", first)
    await reach(gateway.clock, 700)
    assert [flight.made for flight in shadow.plane.state.ledger.flights.values()] == [3, 1]
    engine.end(first)
    engine.end(second, Outcome.ERROR)
    gateway.finish()
    assert shadow.found.failures == {("upstream_error", "upstream_error"): 1}


async def test_a_shadow_has_timers_of_its_own() -> None:
    shadow = Shadow(deployment())
    gateway, engine = obedient(shadow, config=passing(deployment()))
    for nth in (1, 2):
        gateway.driver.offer(request(nth, tokens=16_000), ask())
    assert gateway.driver.plane.next_timer() is None
    due = shadow.next_timer()
    assert due is not None
    assert len(shadow.plane.state.live) == 2
    await reach(gateway.clock, due / 1_000_000 + 1)
    assert len(shadow.plane.state.live) == 1, "one expired, with no event but the passing of time"
    assert gateway.driver.live == 2
    for call in list(engine.calls):
        engine.end(call.dispatch.attempt)
    gateway.finish()
    assert shadow.found.failures == {("", "expired"): 1}


@pytest.mark.parametrize("breaks", ["handle", "next_timer"])
async def test_a_shadow_that_breaks_leaves_the_real_plane_alone(
    breaks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shadow = Shadow(deployment())
    gateway, engine = obedient(shadow)
    stream = gateway.driver.offer(request(1), ask())
    real: Callable[..., Any] = shadow.plane.handle

    def handle(event: Any, *, now: Any) -> Any:
        if isinstance(event, RequestArrived):
            raise AssertionError("a bug")  # noqa: TRY004 - as a plane does
        return real(event, now=now)

    def next_timer() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(shadow.plane, breaks, handle if breaks == "handle" else next_timer)
    with caplog.at_level(logging.ERROR):
        other = gateway.driver.offer(request(2), ask())
    assert shadow.broken is not None
    assert [record.getMessage()[:18] for record in caplog.records] == ["the shadow stopped"]
    assert gateway.driver.broken is None
    assert shadow.known == 0
    assert shadow.next_timer() is None
    for call, one in zip(list(engine.calls), (stream, other), strict=True):
        engine.say("a", call.dispatch.attempt)
        engine.end(call.dispatch.attempt)
        assert isinstance((await one.chunk()).end, Done)
    shadow.wake(gateway.clock.now())
    gateway.finish()
    assert shadow.found.requests == (1 if breaks == "handle" else 2)


async def test_a_sink_that_fails_stops_the_shadow_alone() -> None:
    def full(_: object) -> None:
        raise OSError("no space left")

    shadow = Shadow(deployment(), decided=full)
    gateway, engine = obedient(shadow)
    gateway.driver.offer(request(1), ask())
    assert isinstance(shadow.broken, OSError)
    engine.end()
    gateway.finish()


async def test_replicas_that_go_take_what_both_had_there() -> None:
    shadow = Shadow(deployment())
    gateway, engine = obedient(shadow)
    gateway.driver.offer(request(1), ask())
    engine.say("a")
    gateway.driver.down(engine)
    assert not shadow.plane.state.live
    engine.incarnation = type(engine.incarnation)(2)
    gateway.driver.up(engine)
    gateway.driver.offer(request(2), ask())
    engine.end()
    gateway.finish()
    assert shadow.found.failures == {("replica_lost", "replica_lost"): 1}
    assert shadow.found.places == {(True, True, True): 2}


async def test_a_change_of_the_real_configuration_is_not_the_shadows() -> None:
    shadow = Shadow(deployment())
    gateway, engine = obedient(shadow)
    gateway.driver.reconfigure(deployment(ttft_ms=10.0), 2)
    gateway.driver.offer(request(1), ask())
    assert shadow.found.only_shadow_admits == 1
    assert shadow.plane.state.revision == 1
    assert not engine.calls
    gateway.finish()


# Observing ---------------------------------------------------------------------------------------

STRICT = deployment(
    ttft_ms=300.0,
    tenants=(
        TenantSpec(name="free"),
        TenantSpec(name="slow", rpm_limit=1, tpm_limit=1_000, classes=("interactive",)),
        TenantSpec(name="single", max_parallel_requests=1),
        TenantSpec(name="narrow", models=("other",)),
    ),
)


async def test_all_may_pass_and_the_log_says_what_would_have_been(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    log.configured(REVISION, canonical(STRICT))
    shadow = Shadow(STRICT, revision=REVISION, decided=log.observed)
    gateway, engine = obedient(shadow, config=passing(STRICT))
    offered = [
        request(1, tokens=2_000),
        request(2, tokens=100_000),  # no engine makes a token of that in time
        request(3, "slow"),
        request(4, "slow"),
        request(5, "single"),
        request(6, "single"),
        *(request(nth, tokens=5_000) for nth in range(7, 30)),
    ]
    for one in offered:
        gateway.driver.offer(one, ask())
    assert [call.request.id for call in engine.calls] == [one.id for one in offered]
    found = shadow.found
    assert found.only_shadow_admits == 0
    expected = ("deadline_impossible", "request_rate", "concurrency", "deadline_queue")
    assert [reason for reason in expected if not found.verdicts[ADMIT, reason]] == []
    assert found.verdicts[ADMIT, "deadline_impossible"] == 1
    for call in list(engine.calls):
        engine.say("a b", call.dispatch.attempt)
        engine.end(call.dispatch.attempt)
    gateway.finish()
    log.close()
    assert gateway.driver.outcomes == {Outcome.SUCCESS: len(offered)}
    verified = verify_decisions(tmp_path / "decisions.jsonl")
    assert isinstance(verified, Verified)
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    decided = [line for line in lines if line.get("kind") in ("entry", "route")]
    assert len(decided) == verified.count
    assert all(line["observed"] is True for line in decided)
    would = [line for line in decided if line["admission"]["result"] == "reject"]
    assert len(would) == found.only_real_admits > 3


async def test_contracts_hold_while_observing() -> None:
    shadow = Shadow(STRICT)
    gateway, engine = obedient(shadow, config=passing(STRICT))
    faults = [
        gateway.driver.offer(one, ask())
        for one in (request(1, "stranger"), request(2, "narrow"), request(3, tokens=200_000))
    ]
    for stream in faults:
        assert isinstance((await stream.chunk()).end, Fault)
    gateway.driver.down(engine)
    nobody = gateway.driver.offer(request(4), ask())
    assert isinstance((await nobody.chunk()).end, Fault)
    assert not engine.calls
    gateway.finish()
    assert shadow.found.agreed == 4
    assert gateway.driver.outcomes[Reason.NO_READY_REPLICA] == 1


async def test_emulated_engines_are_flooded_while_observing() -> None:
    config = deployment(ttft_ms=400.0)
    shadow = Shadow(config)
    gateway = Gateway(config=passing(config), shadow=shadow)
    await flood(gateway, 60, every_ms=10, tokens=10_000)
    assert len(gateway.driver.plane.state.ledger.flights) > 30
    await reach(gateway.clock, 60_000)
    gateway.finish()
    assert gateway.driver.outcomes == {Outcome.SUCCESS: 60}
    assert shadow.found.only_real_admits > 20


async def test_what_waits_longest_passes_where_a_class_would_expire() -> None:
    config = replace(STRICT, classes=(ClassSpec(name="interactive", ttft_ms=1.0),))
    shadow = Shadow(config)
    gateway, engine = obedient(shadow, config=passing(replace(config, tenants=STRICT.tenants[:1])))
    gateway.driver.offer(request(1, tokens=50_000), ask())
    assert len(engine.calls) == 1
    gateway.finish()


async def test_answers_tell_what_would_have_been() -> None:
    shadow = Shadow(STRICT)
    gateway = Gateway(config=passing(STRICT), shadow=shadow)
    kept = await gateway.ask(max_tokens=1).done()
    late = await gateway.ask(max_tokens=1, headers={"x-slo-ttft-ms": "1"}).done()
    wrong = await gateway.ask(model="unknown").done()
    told = [caller.headers.get("x-headrace-observed") for caller in (kept, late, wrong)]
    assert told == ["admit", "reject:deadline_impossible", None]
    assert [caller.status for caller in (kept, late, wrong)] == [200, 200, 404]
    gateway.finish()


# The admin side ----------------------------------------------------------------------------------


async def test_metrics_count_both_verdicts() -> None:
    shadow = Shadow(deployment(ttft_ms=10.0))
    gateway = Managed(shadow=shadow)
    await gateway.ask(max_tokens=1).done()
    samples = await gateway.scrape()
    counted = "headrace_shadow_decisions_total"
    assert value(samples, counted, real="admit", shadow="deadline_impossible") == 1
    assert value(samples, "headrace_shadow_running") == 1
    shadow.saw(None, (), gateway.clock.now())  # type: ignore[arg-type]
    assert value(await gateway.scrape(), "headrace_shadow_running") == 0
    gateway.finish()


async def test_nothing_is_changed_while_observing() -> None:
    gateway = Managed(config=passing(STRICT), shadow=Shadow(STRICT), observing=True)
    refused = await gateway.order("/policy", {"admission": {"mode": "enforce"}})
    assert (refused.status, refused.error["code"]) == (409, "observing")
    gateway.finish()


# The report --------------------------------------------------------------------------------------


async def test_the_report_is_short_and_says_what_differs() -> None:
    shadow = Shadow(deployment(ttft_ms=60.0))
    gateway, engine = obedient(shadow)
    for nth in range(1, 4):
        gateway.driver.offer(request(nth), ask())
    for call in list(engine.calls):
        engine.end(call.dispatch.attempt)
    gateway.finish()
    assert list(shadow.found.lines()) == [
        "3 requests: 0 decided alike, 3 admitted by the real plane alone, 0 by the shadow alone",
        "  real   shadow               requests",
        "  admit  deadline_impossible         3",
        "sent by both: 0, to the same replica: 0; by the real plane alone: 3, by the shadow alone: 0",
        "decided differently, by tenant and class:",
        "  tenant  class        real   shadow               requests",
        "  free    interactive  admit  deadline_impossible         3",
    ]
