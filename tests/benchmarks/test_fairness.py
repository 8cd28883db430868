"""The bounds of fair shares, on engines that others measured and workloads drawn at random."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import fairness, tenants
from benchmarks.alone import arrivals, serve
from benchmarks.engines import LARGE, SMALL
from benchmarks.service import ServiceLog
from headrace.trace.mix import Fixed
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
