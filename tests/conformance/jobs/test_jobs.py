"""Every store of jobs, operation by operation."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.adapters.jobs.sqlite import SqliteJobs
from headrace.model.ids import TenantId
from headrace.policy.fairness.claims import ClaimOrder
from headrace.ports.engine import Route
from headrace.ports.job import BatchId, JobId, Lease, State
from headrace.ports.jobs import (
    Cancel,
    Ending,
    Finished,
    JobStore,
    Limits,
    Put,
    Refused,
    Renewal,
    Result,
    Swept,
)
from headrace.units import Bytes, Service
from tests.conformance.jobs.naive import NaiveJobs
from tests.conformance.jobs.scenes import BATCH, DONE, ask, at, finish, ids, order, put, spec, state

ACME = TenantId("acme")
LIMITS = Limits(tenant_jobs=5, body_bytes=Bytes(100), result_bytes=Bytes(100), lost_max=2)
STORES: dict[str, Callable[[Path], JobStore]] = {
    "naive": lambda _folder: NaiveJobs(LIMITS),
    "sqlite": lambda folder: SqliteJobs(folder / "jobs.db", limits=LIMITS),
}

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture(params=list(STORES))
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[JobStore]:
    """Yield each store, empty."""
    made = STORES[request.param](tmp_path)
    yield made
    await made.close()


async def one_claimed(store: JobStore, **changed: Any) -> Lease:
    """Put a job and claim it at 0, to hold until 30."""
    await put(store, spec("a", **changed))
    (claim,) = await store.claim(ask(), order(), at(0))
    return claim.lease


async def test_a_job_passes_through_the_store_unchanged(store: JobStore) -> None:
    whole = spec("a", headers=(("x-slo", "é"),), priority=-3, key="k", custom_id="c", service=7)
    await put(store, whole, body=b"\0\xff")
    (claim,) = await store.claim(ask(owner="me"), order(), at(1))
    assert (claim.job.spec, claim.body) == (whole, b"\0\xff")
    assert claim.lease == Lease(whole.id, "me", 1)
    assert claim.job.lease_until_ns == at(30)
    told = Result(status=200, headers=(("content-type", "x"),), body=b"\xfe\0")
    assert (
        await finish(store, claim.lease, Ending(state=State.DONE, result=told), 2)
        is Finished.STORED
    )
    assert await store.result(ACME, whole.id) == told
    job = await store.get(ACME, whole.id)
    assert job is not None
    assert (job.state, job.owner, job.ended_ns) == (State.DONE, "me", at(2))


async def test_the_same_key_finds_the_first_job_in_whatever_state(store: JobStore) -> None:
    lease = await one_claimed(store, key="k")
    for expected in (State.CLAIMED, State.DONE):
        (found,) = await store.put([(spec("b", key="k"), b"asked")])
        assert isinstance(found, Put)
        assert (found.fresh, found.job.spec.id, found.job.state) == (False, "a", expected)
        await finish(store, lease, DONE, 1)
    assert await store.get(ACME, JobId("b")) is None


async def test_the_same_key_for_another_body_or_route_is_refused(store: JobStore) -> None:
    await put(store, spec("a", key="k"))
    found = await store.put(
        [
            (spec("b", key="k"), b"other"),
            (spec("b", key="k", route=Route.COMPLETIONS), b"asked"),
        ]
    )
    assert found == [Refused.KEY_MISMATCH, Refused.KEY_MISMATCH]


async def test_a_key_is_its_tenants_own_and_of_one_call_too(store: JobStore) -> None:
    found = await store.put([(spec(name, name, key="k"), b"asked") for name in ("x", "y")])
    assert [one.fresh for one in found if isinstance(one, Put)] == [True, True]
    twice = await store.put([(spec(name, key="k"), b"asked") for name in ("p", "q")])
    assert [one.fresh for one in twice if isinstance(one, Put)] == [True, False]


async def test_a_repeated_id_is_the_same_job_or_refused(store: JobStore) -> None:
    await put(store, spec("a"))
    same, other, theirs = await store.put(
        [(spec("a"), b"asked"), (spec("a"), b"other"), (spec("a", "else"), b"asked")]
    )
    assert isinstance(same, Put)
    assert not same.fresh
    assert (other, theirs) == (Refused.ID_TAKEN, Refused.ID_TAKEN)


async def test_bounds_are_by_tenant_and_free_again_once_jobs_end(store: JobStore) -> None:
    await put(store, *(spec(f"{n}") for n in range(5)))
    assert await store.put([(spec("6"), b"")]) == [Refused.TENANT_FULL]
    await put(store, spec("theirs", "else"))
    await store.cancel(ACME, [JobId("0")], at(0))
    await put(store, spec("6"))
    assert await store.put([(spec("big"), b"x" * 101)]) == [Refused.BODY_TOO_LARGE]


async def test_within_a_line_priority_then_deadline_then_sequence(store: JobStore) -> None:
    await put(store, spec("late", deadline=50), spec("soon", deadline=40), spec("too", deadline=40))
    await put(store, spec("first", priority=-1, deadline=90))
    assert ids(await store.claim(ask(3), order(), at(0))) == ["first", "soon", "too"]
    assert ids(await store.claim(ask(3), order(), at(0))) == ["late"]


async def test_models_have_lines_of_their_own(store: JobStore) -> None:
    await put(store, spec("a", model="x"), spec("b", model="y"))
    assert ids(await store.claim(ask(model="y"), order(), at(0))) == ["b"]
    assert ids(await store.claim(ask(model="y"), order(), at(0))) == []
    assert ids(await store.claim(ask(model="x"), order(), at(0))) == ["a"]


async def test_who_has_no_place_in_the_tree_waits(store: JobStore) -> None:
    await put(store, spec("a"), spec("b", "else"))
    known = order()
    partial = ClaimOrder(way=lambda line: None if line.tenant == "acme" else known.way(line))
    assert ids(await store.claim(ask(), partial, at(0))) == ["b"]
    assert ids(await store.claim(ask(), known, at(0))) == ["a"]


async def test_a_lease_that_is_renewed_holds_and_one_that_runs_out_is_lost(store: JobStore) -> None:
    lease = await one_claimed(store)
    assert await store.renew([lease], at(60)) == [Renewal.HELD]
    assert await store.claim(ask(), order(), at(59)) == []
    (again,) = await store.claim(ask(owner="two", until=90), order(), at(60))
    assert again.lease.attempt == 2
    assert again.job.lost == 1
    assert await store.renew([lease, again.lease], at(99)) == [Renewal.LOST, Renewal.HELD]
    assert await finish(store, lease, DONE, 61) is Finished.LOST
    assert await store.release([lease], at(61)) == [False]
    assert await store.result(ACME, JobId("a")) is None


async def test_one_owner_with_two_claims_of_a_job_has_the_last_one(store: JobStore) -> None:
    first = await one_claimed(store)
    (second,) = await store.claim(ask(), order(), at(30))
    assert (first.owner, await finish(store, first, DONE, 31)) == ("one", Finished.LOST)
    assert await finish(store, second.lease, DONE, 31) is Finished.STORED


async def test_a_lease_that_ran_out_unnoticed_is_still_held(store: JobStore) -> None:
    lease = await one_claimed(store)
    assert await finish(store, lease, DONE, 1_000) is Finished.STORED


async def test_an_end_is_stored_once(store: JobStore) -> None:
    lease = await one_claimed(store)
    other = Ending(state=State.FAILED, result=Result(status=500, body=b"other"))
    assert await finish(store, lease, DONE, 1) is Finished.STORED
    assert await finish(store, lease, other, 2) is Finished.REPEATED
    assert await state(store, "a") is State.DONE
    assert await store.result(ACME, JobId("a")) == DONE.result
    assert await store.renew([lease], at(9)) == [Renewal.LOST]
    assert await store.release([lease], at(2)) == [False]
    assert (await store.sweep(at(10**6))) == Swept()


async def test_many_ends_are_each_judged_by_themselves(store: JobStore) -> None:
    await put(store, spec("a"), spec("b"), spec("c"))
    first, second, third = [c.lease for c in await store.claim(ask(), order(), at(0))]
    big = Ending(state=State.DONE, result=Result(status=200, body=b"x" * 101))
    unknown = Lease(JobId("none"), "one", 1)
    told = await store.finish(
        [(first, DONE), (second, big), (unknown, DONE), (first, DONE), (third, DONE)], at(1)
    )
    stored, large, lost, again = (
        Finished.STORED,
        Finished.TOO_LARGE,
        Finished.LOST,
        Finished.REPEATED,
    )
    assert told == [stored, large, lost, again, stored]
    assert await state(store, "b") is State.CLAIMED


async def test_an_answer_that_is_too_large_is_not_stored(store: JobStore) -> None:
    lease = await one_claimed(store)
    big = Ending(state=State.DONE, result=Result(status=200, body=b"x" * 101))
    assert await finish(store, lease, big, 1) is Finished.TOO_LARGE
    assert await finish(store, lease, Ending(state=State.FAILED), 1) is Finished.STORED
    assert await store.result(ACME, JobId("a")) is None


async def test_what_is_given_back_is_handed_out_again_without_blame(store: JobStore) -> None:
    await put(store, spec("a"))
    for _ in range(5):
        (claim,) = await store.claim(ask(), order(), at(0))
        assert await store.release([claim.lease], at(1)) == [True]
    job = await store.get(ACME, JobId("a"))
    assert job is not None
    assert (job.state, job.lost, job.owner) == (State.QUEUED, 0, None)


async def test_a_job_that_loses_its_workers_fails(store: JobStore) -> None:
    await one_claimed(store)
    assert await store.sweep(at(30)) == Swept(requeued=1)
    await store.claim(ask(until=60), order(), at(31))
    assert await store.sweep(at(60)) == Swept(failed=1)
    assert await state(store, "a") is State.FAILED


async def test_cancel_ends_what_waits_and_asks_whoever_works(store: JobStore) -> None:
    lease = await one_claimed(store)
    await put(store, spec("b"))
    wish = [JobId(name) for name in ("a", "b", "c")]
    first = await store.cancel(ACME, wish, at(1))
    assert first == [Cancel.ASKED, Cancel.CANCELLED, Cancel.UNKNOWN]
    assert await store.renew([lease], at(60)) == [Renewal.STOP]
    assert await finish(store, lease, Ending(state=State.CANCELLED), 2) is Finished.STORED
    assert await store.cancel(ACME, wish, at(3)) == [Cancel.OVER, Cancel.OVER, Cancel.UNKNOWN]
    assert await store.claim(ask(), order(), at(3)) == []


async def test_a_worker_that_was_done_before_it_heard_is_believed(store: JobStore) -> None:
    lease = await one_claimed(store)
    await store.cancel(ACME, [JobId("a")], at(1))
    assert await finish(store, lease, DONE, 2) is Finished.STORED
    assert await state(store, "a") is State.DONE


@pytest.mark.parametrize("loss", ["lease", "release"])
async def test_a_cancelled_job_that_loses_its_worker_is_never_handed_out(
    store: JobStore, loss: str
) -> None:
    lease = await one_claimed(store)
    await store.cancel(ACME, [JobId("a")], at(1))
    if loss == "release":
        assert await store.release([lease], at(2)) == [True]
    assert await store.claim(ask(), order(), at(30)) == []
    assert await state(store, "a") is State.CANCELLED
    assert await finish(store, lease, DONE, 31) is Finished.LOST


async def test_what_is_past_its_deadline_is_never_handed_out(store: JobStore) -> None:
    await put(store, spec("a", deadline=10), spec("b", deadline=11))
    assert ids(await store.claim(ask(until=20), order(), at(10))) == ["b"]
    assert await state(store, "a") is State.EXPIRED
    assert await store.sweep(at(20)) == Swept(expired=1)
    assert await state(store, "b") is State.EXPIRED
    assert await store.claim(ask(), order(), at(0)) == []


async def test_an_answer_after_the_deadline_is_kept_if_its_lease_holds(store: JobStore) -> None:
    lease = await one_claimed(store, deadline=10)
    assert await store.sweep(at(11)) == Swept()
    assert await finish(store, lease, DONE, 12) is Finished.STORED


async def test_recovery_takes_back_at_once_what_the_dead_had(store: JobStore) -> None:
    await put(store, spec("a"), spec("b"), spec("c"))
    for owner in ("dead", "alive", "gone"):
        await store.claim(ask(1, owner=owner), order(), at(0))
    await store.cancel(ACME, [JobId("c")], at(0))
    assert await store.recover(at(1), frozenset({"alive"})) == Swept(requeued=1, cancelled=1)
    assert ids(await store.claim(ask(), order(), at(1))) == ["a"]


async def test_nobody_sees_or_cancels_the_job_of_another(store: JobStore) -> None:
    lease = await one_claimed(store, batch=BatchId("z"))
    await finish(store, lease, DONE, 1)
    job = JobId("a")
    for other in (TenantId("abel"), TenantId("else")):
        assert await store.get(other, job) is None
        assert await store.result(other, job) is None
        assert await store.cancel(other, [job], at(2)) == [Cancel.UNKNOWN]
        assert await store.page(other) == await store.page(other, batch=BatchId("z")) == []


async def test_pages_follow_one_another_by_sequence(store: JobStore) -> None:
    await put(store, *(spec(f"{n}", batch=BatchId("odd" if n % 2 else "even")) for n in range(5)))
    first = await store.page(ACME, limit=2)
    rest = await store.page(ACME, after=first[-1].seq)
    assert [job.spec.id for job in first + rest] == ["0", "1", "2", "3", "4"]
    assert [job.spec.id for job in await store.page(ACME, batch=BatchId("odd"))] == ["1", "3"]


async def test_counts_tell_where_jobs_are(store: JobStore) -> None:
    await put(store, spec("a"), spec("b"), spec("c", "else"), spec("d", model="x"))
    (claim,) = await store.claim(ask(1), order(), at(0))
    await finish(store, claim.lease, DONE, 1)
    told = [(t.tenant, t.model, t.state, t.jobs) for t in await store.counts()]
    assert told == [
        ("acme", "m", "done", 1),
        ("acme", "m", "queued", 1),
        ("acme", "x", "queued", 1),
        ("else", "m", "queued", 1),
    ]
    assert {tally.slo_class for tally in await store.counts()} == {BATCH}


async def test_a_job_is_kept_for_its_time_and_then_forgotten_with_its_key(store: JobStore) -> None:
    lease = await one_claimed(store, keep=60, key="k")
    await put(store, spec("waits"))
    await finish(store, lease, DONE, 1)
    assert await store.purge(at(60)) == 0
    assert await store.purge(at(61)) == 1
    assert await store.get(ACME, JobId("a")) is None
    assert await store.result(ACME, JobId("a")) is None
    assert await state(store, "waits") is State.QUEUED
    await put(store, spec("b", key="k"), body=b"another")
    assert await finish(store, lease, DONE, 62) is Finished.LOST


async def test_a_hog_does_not_hold_back_the_few_jobs_of_another(store: JobStore) -> None:
    await put(store, *(spec(f"h{n}", "hog") for n in range(5)))
    assert ids(await store.claim(ask(1), order(), at(0))) == ["h0"]
    await put(store, *(spec(f"f{n}", "few") for n in range(2)))
    told = [ids(await store.claim(ask(1), order(), at(0))) for _ in range(4)]
    assert {name for one in told for name in one} == {"h1", "h2", "f0", "f1"}
    assert told[0] != told[1]


async def test_what_was_not_worked_on_costs_nothing_and_what_took_more_costs_more(
    store: JobStore,
) -> None:
    await put(
        store, *(spec(f"a{n}", "a") for n in range(4)), *(spec(f"b{n}", "b") for n in range(4))
    )
    claims = await store.claim(ask(2), order(), at(0))
    assert sorted(ids(claims)) == ["a0", "b0"]
    mine, theirs = sorted(claims, key=lambda claim: claim.job.spec.id)
    await store.release([mine.lease], at(1))
    await finish(store, theirs.lease, Ending(state=State.DONE, spent=Service(25)), 1)
    assert ids(await store.claim(ask(4), order(), at(1))) == ["a0", "a1", "a2", "b1"]
