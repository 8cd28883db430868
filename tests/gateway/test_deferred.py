"""Deferred requests as their callers see them, in virtual time."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.config.schema import ServerSpec
from headrace.gateway.feed import Feed
from headrace.gateway.jobs.desk import JOBS
from headrace.model.ids import ClassName, TenantId
from headrace.ports.job import Job, State
from headrace.ports.jobs import Limits, StoreBusyError
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.gateway.deferring import ASK, Deferring, config
from tests.gateway.scenes import KEYS, MODEL, ObedientEngine

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def obedient(**fields: Any) -> tuple[Deferring, ObedientEngine]:
    gateway = Deferring(lambda clock: [ObedientEngine(clock)], **fields)
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    return gateway, engine


async def stored(gateway: Deferring, place: str) -> Job:
    (job,) = [one for one in await gateway.store.page("free") if one.spec.id in place]  # type: ignore[arg-type]
    return job


async def test_an_answer_comes_later_as_it_would_have_come_at_once() -> None:
    gateway = Deferring()
    at_once = await gateway.ask(max_tokens=5).done()
    caller = await gateway.defer(max_tokens=5).done()
    assert caller.status == 202
    assert caller.headers["preference-applied"] == "respond-async"
    assert caller.headers["content-type"] == "application/json"
    told, place = caller.json, caller.headers["location"]
    assert place == JOBS + told["id"]
    assert (told["object"], told["status"]) == ("headrace.job", "queued")
    assert (told["model"], told["slo_class"]) == (MODEL, "batch")
    assert told["begin_by"] - told["created_at"] == 86_400

    pending = await gateway.look(place)
    assert (pending.status, pending.headers["location"]) == (202, place)
    done = await gateway.look(place, wait=30)
    assert done.status == 200
    assert done.json["usage"] == at_once.json["usage"]
    assert set(done.json) == set(at_once.json)
    for name in ("x-headrace-decision-id", "x-headrace-attempts", "openai-processing-ms"):
        assert name in done.headers
    again = await gateway.look(place)
    assert (again.content, again.status) == (done.content, 200)
    assert again.headers["x-request-id"] != done.headers["x-request-id"]
    tally = gateway.driver.plane.state.accounts.tallies[TenantId("free")][ClassName("batch")]
    assert (tally.offered, tally.deferred, tally.admitted, tally.taken_up) == (1, 1, 1, 1)
    assert (tally.outcomes, tally.met) == ({"success": 1}, 1)
    assert [row.deferred for row in gateway.driver.recent] == [False, True]
    rows = [(row.slo_class, row.met) for row in gateway.driver.recent]
    assert rows == [("interactive", True), ("batch", True)], "decided and counted as any other"
    await gateway.end()


async def test_classes_say_who_is_deferred() -> None:
    gateway = Deferring()
    objective = "x-llm-d-inference-objective"
    for slo_class, prefer, status in (
        ("interactive", "respond-async", 200),
        ("batch", "", 200),
        ("batch", "respond-async", 202),
        ("nightly", "", 202),
    ):
        headers = {objective: slo_class, "prefer": prefer}
        caller = await gateway.ask(headers=headers, max_tokens=2).done()
        assert caller.status == status, (slo_class, prefer)
        assert ("preference-applied" in caller.headers) == (status == 202 and bool(prefer))
    await gateway.end()


async def test_who_waits_a_little_has_the_answer_itself_if_it_is_there_by_then() -> None:
    gateway, engine = obedient()
    caller = gateway.defer({"prefer": "respond-async, wait=20"})
    await gateway.until(200)
    engine.say("all of it")
    engine.end()
    assert ((await caller.done()).status, caller.content) == (200, b"all of it")
    late = await gateway.defer({"prefer": "respond-async, wait=2"}).done()
    assert late.status == 202
    assert gateway.clock.now() >= 2_000_000_000
    await gateway.end()


async def test_a_wait_has_a_bound() -> None:
    gateway, _ = obedient(wait_s=3.0)
    place = await gateway.deferred()
    before = gateway.clock.now()
    assert (await gateway.look(place, wait=1_000)).status == 202
    assert 3_000_000_000 <= gateway.clock.now() - before < 4_000_000_000
    await gateway.end()


async def test_a_caller_that_leaves_waits_no_more() -> None:
    gateway, engine = obedient()
    place = await gateway.deferred()
    caller = gateway.ask(path=place, method="GET", headers={"prefer": "wait=50"})
    await gateway.until(100)
    caller.leave()
    await caller.done()
    assert caller.status is None
    assert gateway.clock.now() < 1_000_000_000
    assert len(engine.calls) == 1, "the job goes on"
    assert not engine.aborted
    await gateway.end()


@pytest.mark.parametrize(
    ("fields", "headers", "status", "code", "param"),
    [
        ({"stream": True}, {}, 400, "invalid_value", "stream"),
        ({"model": "nobody"}, {}, 404, "model_not_found", "model"),
        ({"n": 2}, {}, 400, "unsupported_parameter", "n"),
        ({"max_tokens": 99_999}, {}, 400, "invalid_value", "max_tokens"),
        ({}, {"idempotency-key": "k" * 256}, 400, "invalid_value", "idempotency-key"),
    ],
)
async def test_what_can_never_be_served_is_refused_at_once(
    fields: dict[str, Any], headers: dict[str, str], status: int, code: str, param: str
) -> None:
    gateway = Deferring()
    caller = await gateway.defer(headers, **fields).done()
    assert (caller.status, caller.error["code"], caller.error["param"]) == (status, code, param)
    assert caller.headers["x-should-retry"] == "false"
    assert await gateway.store.counts() == []
    await gateway.end()


async def test_a_model_that_the_key_may_not_use_is_refused_at_once() -> None:
    gateway = Deferring()
    caller = await gateway.defer(key=KEYS["narrow"]).done()
    assert (caller.status, caller.error["code"]) == (403, "model_not_allowed")
    await gateway.end()


async def test_a_body_over_the_limit_is_refused_as_any_other() -> None:
    gateway = Deferring(server=ServerSpec(body_limit_bytes=1_024))
    caller = await gateway.defer(user="x" * 2_000).done()
    assert (caller.status, caller.error["code"]) == (413, "request_too_large")
    await gateway.end()


async def test_nobody_sees_or_cancels_anothers_job() -> None:
    gateway = Deferring()
    place = await gateway.deferred()
    for method in ("GET", "DELETE"):
        for wrong, key in ((place, KEYS["slow"]), (JOBS + "x", KEYS["free"]), (JOBS, KEYS["free"])):
            caller = await gateway.ask(path=wrong, method=method, key=key).done()
            assert (caller.status, caller.error["code"]) == (404, "job_not_found")
    nobody = await gateway.ask(path=place, method="GET", key="sk-wrong").done()
    assert nobody.status == 401
    posted = await gateway.ask(path=place).done()
    assert (posted.status, posted.headers["allow"]) == (405, "GET, DELETE")
    assert (await gateway.look(place, wait=30)).status == 200
    await gateway.end()


async def test_a_key_finds_the_job_that_came_first() -> None:
    gateway, engine = obedient()
    key = {"idempotency-key": "mine"}
    place = await gateway.deferred(key)
    assert await gateway.deferred(key) == place
    other = await gateway.defer(key, max_tokens=9).done()
    assert (other.status, other.error["code"]) == (422, "idempotency_mismatch")
    assert other.error["param"] == "idempotency-key"
    elsewhere = await gateway.deferred(key, key=KEYS["single"])
    assert elsewhere != place
    await gateway.until(300)
    assert len(engine.calls) == 2
    await gateway.end()


async def test_who_has_too_many_jobs_is_told_when_to_come_again() -> None:
    gateway = Deferring(store=NaiveBatches(Limits(tenant_jobs=1)), running=False)
    await gateway.deferred()
    caller = await gateway.defer().done()
    assert (caller.status, caller.error["code"]) == (429, "slow_down")
    assert caller.error["headrace"]["reason"] == "jobs_of_tenant"
    assert int(caller.headers["retry-after"]) >= 60, "nothing has ended yet"
    assert gateway.app.refusals["jobs_of_tenant"] == 1
    await gateway.end()


async def test_trouble_of_the_store_is_a_refusal() -> None:
    class Busy(NaiveBatches):
        async def put(self, jobs: Any) -> Any:
            raise StoreBusyError(f"{len(jobs)} locked out")

    gateway = Deferring(store=Busy())
    caller = await gateway.defer().done()
    assert (caller.status, caller.error["code"]) == (503, "server_is_overloaded")
    assert caller.error["headrace"]["reason"] == "jobs_trouble"
    assert "locked out" not in caller.content.decode()
    assert "retry-after" in caller.headers
    await gateway.end()


async def test_a_job_that_waits_is_cancelled_for_good() -> None:
    gateway = Deferring(running=False)
    place = await gateway.deferred()
    caller = await gateway.ask(path=place, method="DELETE").done()
    assert (caller.status, caller.json["status"]) == (200, "cancelled")
    gone = await gateway.look(place)
    assert (gone.status, gone.error["code"]) == (410, "job_cancelled")
    assert gone.headers["x-should-retry"] == "false"
    again = await gateway.ask(path=place, method="DELETE").done()
    assert (again.status, again.json["status"]) == (200, "cancelled")
    assert not gateway.app.refusals, "to tell of an end is no refusal"
    gateway.dispatcher.start()
    await gateway.until(3_000)
    assert not gateway.driver.recent, "nobody works on it"
    await gateway.end()


async def test_a_job_under_way_is_stopped() -> None:
    gateway, engine = obedient()
    place = await gateway.deferred()
    await gateway.until(100)
    assert (await gateway.look(place)).json["status"] == "running"
    waiter = gateway.ask(path=place, method="GET", headers={"prefer": "wait=30"})
    caller = await gateway.ask(path=place, method="DELETE").done()
    assert (caller.status, caller.json["status"]) == (202, "cancelling")
    assert (await waiter.done()).status == 410
    assert [call.dispatch.attempt for call in engine.calls] == engine.aborted
    assert (await stored(gateway, place)).state is State.CANCELLED
    assert gateway.dispatcher.ended == {State.CANCELLED: 1}
    await gateway.end()


async def test_a_job_that_is_not_begun_in_time_never_is() -> None:
    gateway, engine = obedient()
    gateway.aside = True
    place = await gateway.deferred({"x-llm-d-inference-ttl": "2s"})
    told = await gateway.look(place)
    assert told.json["begin_by"] - told.json["created_at"] == 2
    late = await gateway.look(place, wait=10)
    assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    assert late.headers["x-should-retry"] == "false"
    gateway.aside = False
    await gateway.until(10_000)
    assert not engine.calls
    await gateway.end()


async def test_what_is_kept_of_a_job_is_gone_after_its_time() -> None:
    gateway = Deferring(keep_s=1.0)
    place = await gateway.deferred(max_tokens=2)
    assert (await gateway.look(place, wait=30)).status == 200
    await gateway.until(130_000)
    assert (await gateway.look(place)).status == 404
    await gateway.end()


async def test_routes_of_other_apis_are_deferred_in_their_words() -> None:
    gateway = Deferring()
    asked = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    caller = await gateway.ask(path="/v1/messages", headers=ASK, body=asked).done()
    assert caller.status == 202
    done = await gateway.look(caller.headers["location"], wait=30)
    assert (done.status, done.json["type"]) == (200, "message")
    gone = await gateway.ask(
        path="/v1/messages", headers=ASK, body={**asked, "stream": True}
    ).done()
    assert (gone.status, gone.json["type"]) == (400, "error")
    await gateway.end()


async def test_without_a_store_the_path_is_nobodys() -> None:
    gateway = Deferring()
    gateway.app.desk = None
    caller = await gateway.defer(max_tokens=2).done()
    assert caller.status == 200, "a preference need not be heeded"
    assert (await gateway.look(JOBS + "x")).error["code"] == "not_found"
    await gateway.end()


async def test_nothing_is_taken_in_while_the_process_ends() -> None:
    gateway = Deferring()
    place = await gateway.deferred()
    gateway.driver.refuse_newcomers()
    assert (await gateway.defer().done()).status == 503
    before = gateway.clock.now()
    assert (await gateway.look(place, wait=50)).status == 202, "nobody is kept waiting"
    assert gateway.clock.now() == before
    await gateway.end()


async def test_a_users_name_is_not_kept() -> None:
    gateway = Deferring(running=False)
    await gateway.deferred({"x-headrace-user": "alice", "x-session-id": "s-1"})
    (job,) = await gateway.store.page("free")  # type: ignore[arg-type]
    assert "alice" not in json.dumps(job.spec.headers)
    assert "s-1" not in json.dumps(job.spec.headers)
    await gateway.end()


async def test_the_callers_priority_orders_its_jobs() -> None:
    gateway, engine = obedient()
    gateway.aside = True
    for priority in (3, -(10**9), 0):
        await gateway.deferred(priority=priority, max_tokens=priority % 7 + 1)
    gateway.aside = False
    await gateway.until(500)
    caps = [call.request.max_output for call in engine.calls]
    assert caps == [priority % 7 + 1 for priority in (-(10**9), 0, 3)]
    await gateway.end()


async def test_a_job_that_goes_back_leaves_nothing_with_those_who_count() -> None:
    plane = config()
    bounded = replace(plane.classes[1], ttft_ms=600_000.0)
    plane = replace(plane, classes=(plane.classes[0], bounded, plane.classes[2]))
    gateway, engine = obedient(plane=plane, server=ServerSpec(trusted_replay=True))
    feed = Feed(plane)
    gateway.driver._decided, gateway.driver._concluded = feed.decided, feed.concluded
    for _ in range(4):
        await gateway.deferred({"x-headrace-replay-input": "4000"})
    await gateway.until(500)
    live = gateway.ask(headers={"x-headrace-replay-input": "4000"})
    await gateway.until(1_000)
    assert gateway.dispatcher.returned
    live.leave()
    await live.done()
    for call in engine.calls:
        engine.end(call.dispatch.attempt)
    gateway.aside = True
    await gateway.until(2_000)
    for request in gateway.driver.plane.state.live:
        assert request in feed._allowed
    assert len(feed._allowed) == len(gateway.driver.plane.state.live)
    await gateway.end()
