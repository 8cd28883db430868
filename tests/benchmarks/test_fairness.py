"""The bounds of fair shares, on engines that others measured and workloads drawn at random."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import fairness, tenants
from benchmarks.alone import arrivals, serve
from benchmarks.engines import LARGE, SMALL
from benchmarks.service import ServiceLog, served_between
from headrace.trace.generate import generate
from headrace.trace.mix import Fixed, Mix, Poisson, TenantSource
from headrace.units import NS_PER_S, InstantNs

DURATION_S = 20.0
LENGTHS = Fixed(1_500, 200)


@pytest.mark.slow
@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_on_a_small_engine_no_two_waiting_tenants_drift_beyond_2u(rng: Random) -> None:
    log = fairness.watched(SMALL, "vtc", fairness.drawn_for_e1(rng, DURATION_S))
    assert log.difference() <= fairness.E1_BOUNDS.twice_u


@pytest.mark.slow
@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_on_a_large_engine_no_two_waiting_tenants_drift_beyond_2u(rng: Random) -> None:
    log = fairness.watched(LARGE, "vtc", fairness.drawn_for_e2(rng, DURATION_S))
    assert log.difference() <= fairness.E2_BOUNDS.twice_u


@pytest.mark.slow
@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_tenants_that_all_wait_from_the_start_drift_by_three_requests_at_most(rng: Random) -> None:
    workload = tenants.drawn_saturating(rng, LENGTHS, served_rps=8.0)
    log = fairness.watched(LARGE, "vtc", workload)
    assert all(drift.stretches == 1 for drift in log.drifts.values())
    assert log.difference() <= 3 * log.largest
    windows, off = log.shares()
    assert windows
    assert off <= 0.1


@pytest.mark.slow
@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_where_turns_are_lent_shares_hold_while_nobody_lends(rng: Random) -> None:
    workload = tenants.drawn_saturating(rng, LENGTHS, served_rps=8.0)
    log = fairness.watched_lending(LARGE, workload, rng)
    assert log.difference() <= fairness.E2_BOUNDS.twice_u
    assert log.shares()[1] <= 0.1


def test_hopeless_work_that_lent_its_turn_for_long_earns_no_credit() -> None:
    lengths = Fixed(4_000, 10)
    sources = [
        TenantSource(tenant=tenants.A, arrivals=Poisson(6), lengths=lengths, stop_s=10, name="one"),
        TenantSource(
            tenant=tenants.A, arrivals=Poisson(6), lengths=lengths, start_s=70, name="two"
        ),
        TenantSource(tenant=tenants.B, arrivals=Poisson(6), lengths=lengths),
    ]
    rows = generate(Mix(sources=tuple(sources), duration_s=100), 0)
    log = ServiceLog({tenants.A: 1, tenants.B: 1})
    engine = fairness.started(LARGE, fairness.OURS, fast_forward=False)
    serve(engine, arrivals(rows, ttft_s=2.0), log=log, until=rows[-1].at)
    before = served_between(log, 20 * NS_PER_S, 65 * NS_PER_S)
    after = served_between(log, 72 * NS_PER_S, 98 * NS_PER_S)
    assert before[tenants.A] < before[tenants.B] / 10, "it does lend"
    assert after[tenants.A] / (after[tenants.A] + after[tenants.B]) < 0.6


def test_first_come_first_served_drifts_far_beyond_the_bound() -> None:
    log = ServiceLog({tenants.A: 1, tenants.B: 1})
    engine = fairness.started(SMALL, "fifo", fast_forward=False)
    offered = arrivals(tenants.overload(0))
    serve(engine, offered, log=log, until=InstantNs(360 * NS_PER_S))
    assert log.difference() > 4 * fairness.E1_BOUNDS.twice_u


def test_every_order_serves_the_same_requests_in_the_end() -> None:
    rows = tenants.overload(0)[:200]
    for order in fairness.ORDERS:
        outcome = serve(fairness.started(SMALL, order), arrivals(rows))
        assert all(one.ended_at is not None for one in outcome.requests), order
        assert outcome.tokens == 200 * 512, order


@pytest.mark.data
def test_a_small_engine_serves_the_published_trace_as_fast_as_the_real_one(data_dir: Path) -> None:
    claims, _ = fairness.calibration(data_dir)
    assert len(claims) == 10
    assert [claim for claim in claims if not claim.holds] == []
