"""What is measured of service: hand-made logs, and one engine watched from outside."""

import pytest

from benchmarks import alone
from benchmarks.service import Bounds, Drift, Lending, ServiceLog, served_between
from headrace.model.ids import AttemptId, TenantId
from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.replica.core import Replica
from headrace.replica.job import Job
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_S, InstantNs, Tokens, ms, seconds
from tests.replica.scenes import engine, small

A, B = TenantId("a"), TenantId("b")


def job(tenant: TenantId, prompt: int, output: int, *, deadline_s: float = 1e9) -> Job:
    """Return a job of a tenant."""
    at = InstantNs(seconds(deadline_s))
    return Job(
        attempt=AttemptId(1),
        prompt_tokens=Tokens(prompt),
        output_tokens=Tokens(output),
        gap_bound_ns=ms(20),
        tenant=tenant,
        deadline=at,
    )


def both(log: ServiceLog, *, a: int = 0, b: int = 0, at_s: float = 0.0) -> None:
    """Give each tenant tokens at one instant."""
    log.made(A, a)
    log.made(B, b)
    log.look(InstantNs(seconds(at_s)))


def waiting_log(weights: dict[TenantId, int] | None = None) -> ServiceLog:
    """Return a log in which both tenants wait, and stay so."""
    log = ServiceLog(weights or {A: 1, B: 1})
    for tenant in (A, B):
        log.arrived(job(tenant, 100, 50))
    log.look(InstantNs(0))
    return log


def test_a_drift_is_the_most_over_any_interval_not_since_the_start() -> None:
    drift = Drift()
    for difference in (0, 10, -5, 3):
        drift.look(True, difference)
    assert drift.most == 15


def test_a_stretch_in_which_one_does_not_wait_starts_anew() -> None:
    drift = Drift()
    drift.look(True, 0)
    drift.look(False, 0)
    drift.look(True, 1_000)
    drift.look(True, 1_004)
    assert (drift.most, drift.stretches) == (4, 2)


def test_service_is_the_prompt_at_once_and_each_output_token_twice() -> None:
    log = waiting_log()
    log.arrived(job(A, 100, 50))
    log.started(job(A, 100, 50))
    log.made(A, 7)
    log.look(InstantNs(1))
    assert log.served == {A: 114, B: 0}
    assert log.waiting == {A: 1, B: 1}
    assert log.difference() == 114
    assert log.largest == 200


def test_service_after_the_last_waiting_request_started_does_not_count() -> None:
    log = waiting_log()
    log.started(job(A, 100, 50))
    log.look(InstantNs(1))
    both(log, a=50, at_s=1)
    assert log.difference() == 0


def test_differences_go_by_weight() -> None:
    log = waiting_log({A: 1, B: 4})
    both(log, a=10, b=40, at_s=1)
    assert log.difference() == 0


def test_shares_compare_over_windows_in_which_both_wait() -> None:
    log = waiting_log()
    for second in range(1, 121):
        both(log, a=3 if second > 60 else 2, b=1 if second > 60 else 2, at_s=second)
    windows, deviation = log.shares()
    assert windows == 60
    assert deviation == pytest.approx(0.25)


def test_a_tenant_that_did_not_wait_for_a_moment_between_two_samples_breaks_the_window() -> None:
    log = waiting_log()
    for second in range(1, 121):
        if second in {50, 100}:
            log.started(job(A, 1, 1))
            log.look(InstantNs(seconds(second - 0.9)))
            log.arrived(job(A, 100, 50))
            log.look(InstantNs(seconds(second - 0.8)))
        both(log, a=9, b=1, at_s=second)
    assert log.shares() == (0, 0.0)


def test_service_between_two_instants_is_read_from_the_samples() -> None:
    log = waiting_log()
    for second in range(1, 11):
        both(log, a=1, b=2, at_s=second)
    assert served_between(log, 2 * NS_PER_S, 5 * NS_PER_S) == {A: 6, B: 12}


def test_how_far_apart_two_are_counts_from_the_start_waiting_or_not() -> None:
    log = ServiceLog({A: 1, B: 1})
    both(log, a=50, at_s=0)
    both(log, b=120, at_s=1)
    assert log.apart() == 140
    assert log.difference() == 0


def test_the_bound_is_twice_the_larger_of_a_prompt_and_what_a_batch_holds() -> None:
    assert Bounds(prompt_max=1_000, resident_max=10_000).twice_u == 40_000
    assert Bounds(prompt_max=30_000, resident_max=10_000).twice_u == 60_000


def test_a_tenant_that_can_wait_or_has_only_hopeless_work_lends_its_turn() -> None:
    lending = Lending(seconds(10), token_ns=NS_PER_S // 100)
    for one in (job(A, 100, 1, deadline_s=3), job(A, 200, 1, deadline_s=30)):
        lending.arrived(one)
    told = [lending.lends(A, InstantNs(seconds(at))) for at in (2, 2.5, 17.5, 18, 28, 28.5)]
    assert told == [False, True, True, False, False, True]
    lending.started(job(A, 200, 1, deadline_s=30))
    assert lending.lends(A, InstantNs(seconds(18)))


def test_while_a_tenant_lends_its_turn_it_does_not_count_as_waiting() -> None:
    log = ServiceLog({A: 1, B: 1}, Lending(seconds(10), token_ns=1))
    log.arrived(job(A, 100, 50, deadline_s=20))
    log.arrived(job(B, 100, 50, deadline_s=5))
    log.look(InstantNs(0))
    both(log, b=100, at_s=4)
    assert log.difference() == 0
    log.arrived(job(B, 100, 50, deadline_s=25))
    log.look(InstantNs(seconds(18)))
    both(log, b=50, at_s=19)
    assert log.difference() == 100


# One engine alone ------------------------------------------------------------------------------


def row(at_ms: float, tenant: TenantId, prompt: int, output: int) -> TraceRow:
    return TraceRow(
        at=InstantNs(ms(at_ms)),
        input_tokens=Tokens(prompt),
        output_tokens=Tokens(output),
        tenant=tenant,
    )


def tight(*, jumps: bool = True) -> Replica:
    """Return an engine with room for little, so that requests wait."""
    return engine(small(running=3), ChunkedPrefill(), jumps=jumps)


ROWS = [row(nth * 7, (A, B)[nth % 3 == 0], 20 + nth, 5 + nth % 4) for nth in range(30)]


def test_all_tokens_are_counted_for_whom_they_were_made() -> None:
    log = ServiceLog({A: 1, B: 1})
    outcome = alone.serve(tight(jumps=False), alone.arrivals(ROWS), log=log)
    for tenant in (A, B):
        mine = [one for one in ROWS if one.tenant == tenant]
        assert log.served[tenant] == sum(one.input_tokens + 2 * one.output_tokens for one in mine)
    assert log.waiting == {A: 0, B: 0}
    assert outcome.tokens == sum(one.input_tokens + one.output_tokens for one in ROWS)


def test_watching_an_engine_changes_nothing() -> None:
    watched = alone.serve(tight(jumps=False), alone.arrivals(ROWS), log=ServiceLog({A: 1, B: 1}))
    assert alone.serve(tight(), alone.arrivals(ROWS)).requests == watched.requests


def test_a_prompt_counts_when_its_first_chunk_is_planned() -> None:
    log = ServiceLog({A: 1, B: 1})
    rows = [row(0, A, 200, 2), row(0, B, 10, 2)]
    alone.serve(tight(jumps=False), alone.arrivals(rows), log=log, until=InstantNs(ms(7)))
    assert log.served == {A: 200, B: 0}
    assert log.waiting == {A: 0, B: 1}


def test_what_never_came_before_the_end_is_offered_all_the_same() -> None:
    outcome = alone.serve(tight(), alone.arrivals(ROWS), until=InstantNs(ms(50)))
    assert len(outcome.requests) == len(ROWS)
    assert outcome.requests[-1].first_at is None
    assert outcome.end == InstantNs(ms(50))
    assert outcome.attainment(A) < 1


def test_an_engine_that_always_has_work_is_always_busy() -> None:
    assert alone.serve(tight(), alone.arrivals(ROWS)).busy_share == pytest.approx(1.0, abs=1e-6)


def test_a_limit_counts_what_it_let_through_in_the_window_before() -> None:
    rows = [row(at, A, 1, 1) for at in (0, 10, 20, 1_011, 1_012, 1_013)] + [row(1_014, B, 1, 1)]
    found = alone.limited(rows, 2, seconds(1))
    assert [one.at // ms(1) for one in found.rows] == [0, 10, 1_011, 1_012, 1_014]
    assert found.rejected == 2
