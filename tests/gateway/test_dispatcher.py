"""Deferred jobs beside live traffic: what is taken up, given back, tried again, and ended once."""

from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.config.schema import ServerSpec
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.meter import NO_STREAM
from headrace.model.slo import Outcome
from headrace.policy.fairness.leftover import Leftover, Pace
from headrace.ports.engine import Ending as Told
from headrace.ports.engine import Refusal
from headrace.ports.job import State
from headrace.ports.jobs import SWEEP_MAX, StoreBusyError, StoreFullError
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.gateway.deferring import Deferring, config
from tests.gateway.scenes import KEYS, MODEL, ObedientEngine

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
MANY = Leftover(at_once=64, burst=64)


def obedient(**fields: Any) -> tuple[Deferring, ObedientEngine]:
    gateway = Deferring(lambda clock: [ObedientEngine(clock)], **fields)
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    return gateway, engine


async def states(gateway: Deferring) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in await gateway.store.counts():
        found[one.state] = found.get(one.state, 0) + one.jobs
    return found


async def test_many_jobs_all_end_once_and_more_and_more_of_them_at_a_time() -> None:
    gateway = Deferring(leftover=MANY)
    for _ in range(60):
        await gateway.deferred(max_tokens=20)
    most = 0
    for nth in range(1, 400):
        await gateway.until(nth * 100)
        most = max(most, sum(gateway.dispatcher.running().values()))
        if not gateway.dispatcher.running() and nth > 20:
            break
    assert await states(gateway) == {"done": 60}
    assert len(gateway.driver.recent) == 60
    assert gateway.dispatcher.returned == 0
    assert 4 < most <= 64
    await gateway.end()


async def test_nothing_is_taken_up_while_somebody_waits() -> None:
    gateway, engine = obedient()
    gateway.aside = True
    for _ in range(3):
        await gateway.deferred()
    blocked = [gateway.ask(headers={"x-headrace-replay-input": "1"}) for _ in range(300)]
    await gateway.until(50)
    assert gateway.driver.plane.state.models[ModelName(MODEL)].backlog.size > 0
    calls = len(engine.calls)
    gateway.aside = False
    await gateway.until(1_000)
    assert len(engine.calls) == calls
    assert not gateway.dispatcher.running()
    for caller in blocked:
        caller.leave()
        await caller.done()
    await gateway.until(2_000)
    assert gateway.dispatcher.running()
    await gateway.end()


async def test_jobs_that_wait_for_a_replica_go_back_when_somebody_comes() -> None:
    gateway, engine = obedient(
        leftover=Leftover(at_once=400, burst=400), server=ServerSpec(trusted_replay=True)
    )
    gateway.aside = True
    for _ in range(12):
        await gateway.deferred({"x-headrace-replay-input": "4000"})
    gateway.dispatcher._paces[ModelName(MODEL)] = Pace(300)
    gateway.aside = False
    await gateway.until(200)
    # No prompt makes a first token, so that the window stays closed: the others wait here.
    backlog = gateway.driver.plane.state.models[ModelName(MODEL)].backlog
    sent, stuck = len(engine.calls), backlog.size
    assert 0 < sent < 12
    assert sent + stuck == 12

    live = gateway.ask(headers={"x-headrace-replay-input": "4000"})
    await gateway.until(350)  # one dispatch window later
    assert gateway.dispatcher.returned == stuck
    assert gateway.dispatcher.running() == {MODEL: sent}, "what is on an engine goes on"
    assert gateway.dispatcher.limits() == {MODEL: sent // 2}, "half of what runs"
    assert backlog.size == 1
    assert len(engine.calls) == sent
    assert await states(gateway) == {"claimed": sent, "queued": stuck}
    for call in engine.calls[:sent]:
        engine.end(call.dispatch.attempt)
    await gateway.until(351)
    assert engine.calls[sent].dispatch.slo_class == "interactive", "the next one sent"
    tally = gateway.driver.plane.state.accounts.tallies[TenantId("free")][ClassName("batch")]
    assert (tally.offered, tally.deferred, tally.admitted) == (12, 12, sent), "each once"
    assert tally.outcomes == {"success": sent}, "what went back has not ended"
    live.leave()
    await live.done()
    await gateway.end()


async def test_an_engine_that_fails_is_tried_again_so_many_times() -> None:
    gateway, engine = obedient(tries=3)
    place = await gateway.deferred()
    for nth in range(1, 4):
        await gateway.until(nth * 200)
        assert len(engine.calls) == nth
        engine.end(outcome=Outcome.ERROR)
    failed = await gateway.look(place, wait=10)
    assert (failed.status, failed.error["code"]) == (502, "upstream_error")
    assert failed.headers["x-should-retry"] == "false"
    assert "retry-after" not in failed.headers
    assert failed.error["headrace"]["retryable"] is False
    assert await states(gateway) == {"failed": 1}
    await gateway.end()


async def test_a_failure_that_passes_is_no_end() -> None:
    gateway, engine = obedient()
    place = await gateway.deferred()
    await gateway.until(200)
    engine.end(outcome=Outcome.ERROR)
    await gateway.until(400)
    engine.say("at last")
    engine.end()
    done = await gateway.look(place, wait=5)
    assert (done.status, done.content) == (200, b"at last")
    assert done.headers["x-headrace-attempts"] == "2"
    await gateway.end()


async def test_an_engines_own_refusal_is_passed_on() -> None:
    gateway, engine = obedient()
    place = await gateway.deferred()
    await gateway.until(200)
    attempt = engine.calls[-1].dispatch.attempt
    refusal = Refusal(status=422, body=b'{"error":{"message":"no"}}')
    engine.tell.ended(
        attempt, Told(outcome=Outcome.ERROR, usage=None, timing=NO_STREAM, refusal=refusal)
    )
    told = await gateway.look(place, wait=5)
    assert (told.status, told.content) == (422, refusal.body)
    assert told.headers["x-should-retry"] == "false"
    await gateway.end()


async def test_an_answer_longer_than_is_kept_has_failed() -> None:
    gateway, engine = obedient(result_mib=1)
    place = await gateway.deferred()
    await gateway.until(200)
    for _ in range(20):
        engine.say("x" * 65_536)
    told = await gateway.look(place, wait=5)
    assert told.status == 502
    assert "longer" in told.error["message"]
    assert engine.aborted, "nobody makes the rest of it"
    await gateway.end()


async def test_a_tenant_at_its_own_limit_keeps_nobody_else_waiting() -> None:
    gateway = Deferring()
    for _ in range(3):
        await gateway.deferred(key=KEYS["slow"], max_tokens=2)
    places = [await gateway.deferred(max_tokens=2) for _ in range(3)]
    for place in places:
        assert (await gateway.look(place, wait=10)).status == 200
    found = {(str(t.tenant), t.state): t.jobs for t in await gateway.store.counts()}
    assert found["slow", State.DONE] == 1
    assert found["slow", State.QUEUED] == 2
    refused = gateway.driver.outcomes["request_rate"]
    assert refused <= 3, "it is not asked again and again"
    await gateway.until(200_000)
    assert await states(gateway) == {"done": 6}
    await gateway.end()


async def test_a_process_that_ends_gives_back_what_it_had() -> None:
    store = NaiveBatches()
    first, engine = obedient(store=store)
    place = await first.deferred()
    await first.until(200)
    assert engine.calls
    await first.end()
    assert await states(first) == {"queued": 1}
    assert engine.aborted == [engine.calls[0].dispatch.attempt]
    second = Deferring(store=store, owner="two")
    assert (await second.look(place, wait=10)).status == 200
    assert await states(second) == {"done": 1}
    await second.end()


async def test_who_lost_its_lease_says_nothing_any_more() -> None:
    store = NaiveBatches()
    gateway, engine = obedient(store=store, lease_s=5.0)
    place = await gateway.deferred()
    await gateway.until(200)
    (entry,) = store.naive.entries.values()
    entry.owner, entry.attempts, entry.until = "another", 2, gateway.wall() + 10**12
    await gateway.until(6_000)
    assert engine.aborted
    assert not gateway.dispatcher.running()
    assert (await gateway.look(place)).json["status"] == "running"
    assert not gateway.dispatcher.ended
    await gateway.end()


async def test_a_cancel_elsewhere_is_heard_with_the_next_renewal() -> None:
    store = NaiveBatches()
    gateway, engine = obedient(store=store, lease_s=5.0)
    place = await gateway.deferred()
    await gateway.until(200)
    for entry in store.naive.entries.values():
        entry.cancel = True
    assert (await gateway.look(place, wait=10)).status == 410
    assert engine.aborted
    await gateway.end()


async def test_leases_are_held_for_as_long_as_it_takes() -> None:
    gateway, engine = obedient(lease_s=5.0)
    place = await gateway.deferred()
    await gateway.until(60_000)
    engine.say("slow")
    engine.end()
    assert (await gateway.look(place, wait=5)).status == 200
    assert len(engine.calls) == 1
    await gateway.end()


async def test_an_end_is_kept_until_the_store_can_take_it() -> None:
    class Troubled(NaiveBatches):
        left = 5

        async def finish(self, endings: Any, now: Any) -> Any:
            if self.left:
                self.left -= 1
                raise StoreBusyError("locked")
            return await super().finish(endings, now)

    gateway = Deferring(store=Troubled())
    place = await gateway.deferred(max_tokens=2)
    assert (await gateway.look(place, wait=30)).status == 200
    assert len(gateway.driver.recent) == 1
    await gateway.end()


async def test_a_store_in_trouble_is_asked_again() -> None:
    class Troubled(NaiveBatches):
        left = 5

        async def claim(self, ask: Any, order: Any, now: Any) -> Any:
            if self.left:
                self.left -= 1
                raise StoreBusyError("locked")
            return await super().claim(ask, order, now)

    gateway = Deferring(store=Troubled())
    place = await gateway.deferred(max_tokens=2)
    assert (await gateway.look(place, wait=30)).status == 200
    await gateway.end()


@pytest.mark.parametrize("failing", ["sweep", "purge", "renew", "counts"])
async def test_one_thing_that_the_store_cannot_do_keeps_no_other_from_its_turn(
    failing: str,
) -> None:
    asked: Counter[str] = Counter()

    class Full(NaiveBatches):
        async def sweep(self, now: Any) -> Any:
            return await self._noted("sweep", super().sweep(now))

        async def purge(self, now: Any) -> Any:
            return await self._noted("purge", super().purge(now))

        async def renew(self, leases: Any, until: Any) -> Any:
            return await self._noted("renew", super().renew(leases, until))

        async def counts(self) -> Any:
            return await self._noted("counts", super().counts())

        async def _noted(self, name: str, found: Awaitable[Any]) -> Any:
            asked[name] += 1
            answer = await found
            if name == failing:
                raise StoreFullError("full")
            return answer

    gateway, engine = obedient(store=Full(), lease_s=6)
    await gateway.deferred()
    await gateway.until(130_000)
    assert len(engine.calls) == 1
    assert asked["sweep"] > 100
    assert asked["purge"] == 3
    assert asked["renew"] > 30
    assert asked["counts"] == (0 if failing == "sweep" else asked["sweep"])
    await gateway.end()


async def test_however_many_are_past_their_time_are_forgotten_at_once() -> None:
    class Old(NaiveBatches):
        left = 5 * SWEEP_MAX + 7

        async def purge(self, now: Any) -> int:
            assert now > 0
            gone = min(self.left, SWEEP_MAX)
            self.left -= gone
            return gone

    store = Old()
    gateway = Deferring(store=store)
    await gateway.until(1_000)
    assert store.left == 0
    await gateway.end()


async def test_what_an_answer_took_is_what_its_tenant_is_charged() -> None:
    store = NaiveBatches()
    gateway = Deferring(store=store)
    place = await gateway.deferred(max_tokens=3)
    assert (await gateway.look(place, wait=10)).status == 200
    (row,) = gateway.driver.recent
    (entry,) = store.naive.entries.values()
    usage, price = row.usage, gateway.driver.plane.settings.prices[row.model]
    assert usage is not None
    spent = price.service(usage.input_tokens, 0, usage.output_tokens)
    assert sum(store.naive.owed.values()) == spent - entry.spec.service
    await gateway.end()


async def test_jobs_of_what_is_no_longer_configured_wait() -> None:
    store = NaiveBatches()
    first = Deferring(store=store, running=False)
    await first.deferred()
    await first.end()
    second = Deferring(store=store, plane=config(replicas=1))
    entry = next(iter(store.naive.entries.values()))
    entry.spec = replace(entry.spec, tenant=TenantId("gone"))
    await second.until(3_000)
    assert await states(second) == {"queued": 1}
    assert not second.driver.recent
    await second.end()


async def test_live_answers_that_come_too_late_make_jobs_fewer() -> None:
    gateway, engine = obedient(leftover=Leftover(at_once=8))
    gateway.dispatcher._paces[ModelName(MODEL)] = Pace(8)
    for _ in range(4):
        await gateway.deferred()
    await gateway.until(100)
    live = gateway.ask(stream=True)
    await gateway.until(200)
    assert gateway.dispatcher.limits() == {MODEL: 8}
    attempt = engine.calls[-1].dispatch.attempt
    assert engine.calls[-1].dispatch.slo_class == "interactive"
    await gateway.until(1_950)  # of a bound of 2,000
    engine.say("late", attempt)
    await gateway.until(1_960)
    engine.say("but there", attempt)
    engine.end(attempt)
    assert (await live.done()).status == 200
    await gateway.until(2_050)
    assert gateway.dispatcher.limits() == {MODEL: 2}, "half of those under way"
    await gateway.end()


async def test_a_bug_of_its_own_ends_the_process_as_any_other() -> None:
    class Wrong(NaiveBatches):
        async def claim(self, ask: Any, order: Any, now: Any) -> Any:
            raise ValueError(ask, order, now)

    gateway = Deferring(store=Wrong())
    await gateway.deferred()
    await gateway.until(200)
    assert isinstance(gateway.driver.broken, ValueError)
    await gateway.dispatcher.close()


async def test_how_long_until_there_is_room_is_told_by_how_fast_jobs_end() -> None:
    gateway, engine = obedient()
    assert gateway.dispatcher.drain_ns() == 60_000_000_000, "nobody knows"
    for nth in range(4):
        await gateway.deferred()
        await gateway.until(5_000 * (nth + 1))
        engine.say("done")
        engine.end()
    await gateway.until(20_100)
    assert 4_900_000_000 <= gateway.dispatcher.drain_ns() <= 5_100_000_000
    await gateway.until(90_000)
    assert gateway.dispatcher.drain_ns() == 60_000_000_000, "that was long ago"
    await gateway.end()
