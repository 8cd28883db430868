"""Chaos against the live gateway over its emulated fleet, mostly in virtual time."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from headrace.cli import main
from headrace.cli.chaos_havoc import unfit
from headrace.cli.chaos_live import Counted, Live, LiveRan, Steady
from headrace.cli.live import named
from headrace.model.group import Domain
from headrace.sim.chaos import Chaos, load_chaos, shipped_names
from headrace.sim.chaos_run import Ran, run_chaos
from headrace.sim.expect import Step, StepsTaken, Verdict
from headrace.sim.faults import (
    Canary,
    ColdCache,
    Crash,
    DomainLoss,
    Drain,
    Fault,
    RankLoss,
    Reports,
    Restart,
    Slow,
    Starts,
)
from headrace.sim.scenario import rows_of
from headrace.units import ms
from tests.cli.in_memory import InMemory
from tests.gateway.scaled import TIMES

Test = TypeVar("Test", bound=Callable[..., Coroutine[Any, Any, None]])
Output = pytest.CaptureFixture[str]
FIXED = """\
name: fixed
about: One of two replicas crashes under its streams and comes back, and then the gateway does.
deployment:
  models: [{name: m}]
  pools: [{name: p, model: m, profile: a100-70b-tp4, replicas: 2}]
  tenants: [{name: a}]
mix:
  sources:
    - tenant: a
      slo_class: interactive
      arrivals: {kind: even, rate: 3}
      lengths: {kind: fixed, input: 200, output: 60}
  duration_s: 20
faults:
  - {kind: crash, replica: 0, at_s: 4, back_after_s: 2}
  - {kind: restart, at_s: 12}
expect:
  - {kind: streams_lost, at_least: 1, at_most: 40}
"""
SCENE = """\
name: small
about: Three groups in three zones, under load for a while and then under little.
deployment:
  models: [{name: m}]
  pools:
    - name: main
      model: m
      profile: a100-70b-tp4
      replicas: 3
      scaling:
        {min: 1, max: 5, tick_s: 5, in_window_s: 20, min_life_s: 10, cancel_window_s: 10, partial_s: 10,
        stale_s: 10, forecast: null, reserve_domain: zone, domains: [eu/a, eu/b, eu/c]}
  tenants: [{name: chat}]
  classes: [{name: interactive, ttft_ms: 5000, itl_ms: 150, expire: false}]
mix:
  duration_s: 80
  sources:
    - tenant: chat
      slo_class: interactive
      arrivals: {kind: even, rate: 1.7}
      lengths: &answers {kind: fixed, input: 3000, output: 150}
      name: busy
      stop_s: 30
    - tenant: chat
      slo_class: interactive
      arrivals: {kind: even, rate: 0.3}
      lengths: *answers
      start_s: 30
expect:
  - {kind: streams_lost, at_most: 0}
  - {kind: tokens_lost, at_most: 0}
  - {kind: leaked, at_most: 0}
  - {kind: groups_at_end, at_least: 1}
  - {kind: steps, step: drain, at_least: 1}
"""


def virtual(test: Test) -> Test:
    """Run a test in virtual time."""
    marked: Test = pytest.mark.asyncio(pytest.mark.looptime(test))
    return marked


@pytest.fixture
def small(tmp_path: Path) -> Chaos:
    path = tmp_path / "small.yaml"
    path.write_text(SCENE)
    chaos = load_chaos(str(path))
    (pool,) = chaos.deployment.pools
    assert pool.scaling is not None
    quick = replace(pool, scaling=replace(pool.scaling, times=TIMES))  # a start takes 5 s
    return replace(chaos, deployment=replace(chaos.deployment, pools=(quick,)))


def wrong(chaos: Chaos, *faults: Fault, least: int = 1) -> Chaos:
    (pool,) = chaos.deployment.pools
    assert pool.scaling is not None
    other = replace(pool, scaling=replace(pool.scaling, min=least))
    deployment = replace(chaos.deployment, pools=(other,))
    return replace(chaos, faults=faults, deployment=deployment)


async def lived(chaos: Chaos, folder: Path, front: InMemory | None = None) -> LiveRan:
    """Run a scenario in virtual time."""
    rows = named(chaos, rows_of(chaos, chaos.seed))
    clock = Steady(asyncio.get_running_loop())
    live = Live(chaos, chaos.seed, rows, clock, front or InMemory(), folder)
    return await live.run(1, speed=1, told=lambda _index, _answer: None)


def figures(ran: Ran) -> dict[str, float | None]:
    return {one.what: one.measured for one in ran.verdicts}


ZONE = DomainLoss(of=Domain.ZONE, at_s=20)


@virtual
@pytest.mark.parametrize(
    "fault",
    [
        Crash(replica=0, at_s=20, noticed_after_s=1, back_after_s=0),
        ZONE,
        RankLoss(at_s=20, held=True, back_after_s=10),
        Reports(lost=1.0, at_s=10),
        Slow(factor=3.0, at_s=10, until_s=30),
        Drain(replica=1, at_s=20, time_s=30),
        ColdCache(at_s=20, told=True),
        Canary(at_s=10, correct=False),
    ],
)
async def test_what_befalls_a_live_fleet_is_what_befalls_a_simulated_one(
    fault: Fault, small: Chaos, tmp_path: Path
) -> None:
    chaos = wrong(small, fault)
    live, simulated = (await lived(chaos, tmp_path)).ran, run_chaos(chaos, chaos.seed)
    assert live.broken is simulated.broken is None
    same = {what for what in figures(live) if "tokens" not in what}
    assert {what: figures(live)[what] for what in same} == {
        what: figures(simulated)[what] for what in same
    }
    assert [one.what for one in live.happened if "fault" in one.what]


@virtual
async def test_a_drain_under_load_loses_no_stream_and_no_token(
    small: Chaos, tmp_path: Path
) -> None:
    found = await lived(wrong(small), tmp_path)
    assert found.ran.holds
    told = figures(found.ran)
    assert told["groups: drain"] == 2
    assert (told["streams lost"], told["tokens lost"]) == (0, 0)
    assert (found.counted.whole, found.counted.tokens) == (66, 66 * 150)


@virtual
@pytest.mark.parametrize(
    ("starts", "asked", "ready"), [(Starts(refused=1.0), 4, 2), (Starts(slow=1.0), 1, 3)]
)
async def test_starts_go_wrong_as_they_were_drawn(
    starts: Starts, asked: int, ready: int, small: Chaos, tmp_path: Path
) -> None:
    crash = Crash(replica=0, at_s=5)
    chaos = wrong(small, starts, crash, least=3)
    steps = StepsTaken(step=Step.ASK, at_least=0)
    found = await lived(replace(chaos, expect=(*chaos.expect, steps)), tmp_path)
    told = figures(found.ran)
    asked_for = told["groups: ask"]
    assert asked_for is not None
    assert asked_for >= asked
    assert told["groups ready at the end"] == ready


@virtual
async def test_a_gateway_that_is_killed_comes_back_to_its_groups(
    small: Chaos, tmp_path: Path
) -> None:
    front = InMemory()
    found = await lived(wrong(small, Restart(at_s=26)), tmp_path, front)
    assert front.lives == 2
    assert found.ran.broken is None, "the journal of both lives replays"
    told = figures(found.ran)
    lost = told["streams lost"]
    assert lost is not None
    assert 0 < lost == found.counted.requests - found.counted.whole
    assert (told["groups ready at the end"], told["GPUs held for nothing at the end"]) == (1, 0)
    assert told["groups: drain"], "who was draining goes, and so does the next"


@virtual
async def test_a_token_that_is_lost_on_its_way_is_missed(small: Chaos, tmp_path: Path) -> None:
    front, seen = InMemory(), 0

    def drop(part: bytes) -> bytes:
        nonlocal seen
        seen += 1
        return b"" if seen == 40 else part

    front.drop = drop
    found = await lived(wrong(small), tmp_path, front)
    assert not found.ran.holds
    assert found.ran.broken is not None
    assert "1 answers have other tokens than they say" in found.ran.broken
    assert figures(found.ran)["streams lost"] == 1


# The command ---------------------------------------------------------------------------------


def test_what_happens_in_simulations_only_is_refused_in_words(capsys: Output) -> None:
    unfits = [name for name in shipped_names() if unfit(load_chaos(name)) is not None]
    assert unfits
    assert main(["chaos", unfits[0], "--live"]) == 2
    assert "happens in simulations only: run it without --live" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("holds", "lag_ms", "code"), [(True, 0, 0), (True, 500, 0), (False, 0, 1), (False, 500, 3)]
)
def test_the_exit_code_says_whether_it_holds_or_cannot_be_told(
    holds: bool, lag_ms: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    verdict = Verdict(what="streams lost", bound="<= 0", window="", measured=1, holds=holds)
    ran = Ran(scenario="drain", seed=0, broken=None, happened=(), verdicts=(verdict,))
    counted = Counted(requests=9, whole=8, tokens=70, loop_lag_p99_ns=ms(lag_ms))
    found = LiveRan(ran=ran, counted=counted)
    monkeypatch.setattr("headrace.cli.chaos.run_chaos_live", lambda *_, **__: found)
    assert main(["chaos", "drain", "--live"]) == code
    out = capsys.readouterr().out
    assert "live: 8 of 9 answers whole, 70 tokens counted" in out
    assert ("beyond 20 ms" in out) is bool(lag_ms)


@pytest.mark.service
def test_over_http_a_crash_breaks_streams_and_a_kill_is_survived(
    tmp_path: Path, capsys: Output
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FIXED)
    assert main(["chaos", str(path), "--live", "--speed", "4", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ran"]["broken"] is None
    assert found["counted"]["requests"] == 60
    assert 0 < found["counted"]["whole"] < 60
