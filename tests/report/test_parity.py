"""How far a simulated and a live run agree."""

import pytest

from headrace.report.parity import lag_verdict, parity, parity_tables
from headrace.report.run import RunRecord
from headrace.report.tables import render_all
from headrace.units import ms
from tests.report.making import lost, refused, run, served


def made(*, refuse: int = 0, expire: int = 0, queue_ms: float = 10) -> RunRecord:
    """Return a run of 200 requests of which the first so many were refused, the next ran out."""
    pairs = [
        refused(nth, at_s=nth / 20)
        if nth <= refuse
        else lost(nth, at_s=nth / 20)
        if nth <= refuse + expire
        else served(nth, at_s=nth / 20, queue_ms=queue_ms)
        for nth in range(1, 201)
    ]
    return run(pairs)


def off(simulated: RunRecord, live: RunRecord) -> list[str]:
    return [check.name for check in parity([(simulated, live)]).checks if not check.agrees]


def test_equal_runs_agree() -> None:
    found = parity([(made(refuse=5, expire=2), made(refuse=5, expire=2))])

    assert found.holds
    assert (found.requests, found.ended_alike, found.met_alike) == (200, 200, 200)
    assert not any(check.difference for check in found.checks)


@pytest.mark.parametrize(
    ("live", "name"),
    [
        (made(expire=5), "requests that end otherwise"),
        (made(refuse=7), "admitted share of a/interactive"),
        (made(expire=12), "work goodput, relative"),
        (made(queue_ms=26), "TTFT p50 of interactive, ms"),
    ],
)
def test_what_is_out_of_bounds_is_named(live: RunRecord, name: str) -> None:
    assert name in off(made(), live)


@pytest.mark.parametrize("live", [made(expire=4), made(refuse=4), made(queue_ms=25)])
def test_what_is_within_bounds_agrees(live: RunRecord) -> None:
    assert not off(made(), live)


def test_in_overload_single_requests_are_not_compared() -> None:
    one, two = made(refuse=60, expire=20), made(refuse=56, expire=24)

    assert not off(one, two)
    assert parity([(one, two)]).ended_alike == 196


def test_seeds_are_judged_together() -> None:
    more, fewer = made(refuse=50), made(refuse=58)

    assert off(more, fewer)
    assert parity([(more, fewer), (fewer, more)]).holds


def test_the_table_says_what_does_not_agree() -> None:
    text = render_all(parity_tables(parity([(made(), made(refuse=7))]), "title"))

    assert "admitted share of a/interactive  -0.0350   0.0300  NO" in text
    assert "200 requests: 96.5 % ended alike" in text


def test_lag_beyond_its_limit_is_neither_pass_nor_fail() -> None:
    assert lag_verdict(ms(20), ms(20)) is None
    assert "neither pass nor fail" in (lag_verdict(ms(21), ms(20)) or "")
