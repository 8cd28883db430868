"""What runs on a group that drains is moved: no token is lost or made twice, whatever happens on the way."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec
from headrace.model.event import Migrated
from headrace.model.ids import AttemptId, PoolName
from headrace.model.scaling_spec import Scaling
from headrace.model.slo import Outcome
from headrace.plane.journal import Verified, verify
from headrace.plane.ledger import Ledger
from headrace.replica.moving import Migration
from headrace.report.summary import summarise
from headrace.report.tables import render_summary
from headrace.sim.books import Broken
from headrace.sim.experiment import simulate
from headrace.sim.faults import Crash, Fault, Leavers, Restart
from headrace.sim.moving import Moves
from headrace.sim.scenario import Scenario
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_MS, InstantNs, Tokens, seconds
from tests.sim.scaled import run, scaled, starts, steady
from tests.sim.scenes import Ran

POOL = PoolName("pool")
CLASSES = (
    ClassSpec(name="chat", ttft_ms=None, itl_ms=2_000.0, expire=False),
    ClassSpec(name="fast", itl_ms=2_000.0),
)
BRIEF = Scaling(
    max=5, times=starts(25), in_window_s=60.0, min_life_s=30.0, drain_s=5.0, forecast=None
)
"""A drain has five seconds."""
MADE = 15_000
"""Tokens of an answer: two minutes, of which the first is over when the drain begins."""


def world(how: Migration | None, settings: Scaling = BRIEF, **more: Any) -> Scenario:
    return replace(scaled(settings, replicas=2, classes=CLASSES, **more), migration=how)


def answers(count: int = 6, made: int = MADE) -> list[TraceRow]:
    rows = steady(((0.0, 2.0, count / 2),), given=500)
    return [replace(row, output_tokens=Tokens(made)) for row in rows]


def moves(ran: Ran) -> Moves:
    return ran.world.engines.moving.counts.get(POOL, Moves())


def drained(ran: Ran) -> int:
    return len(ran.rows(reason=Reason.DRAINED))


def test_what_a_drain_would_cut_off_is_moved_and_ends_whole() -> None:
    without, moved = run(world(None), rows=answers()), run(world(Migration()), rows=answers())
    assert (drained(without), moves(without)) == (3, Moves())
    assert (drained(moved), moves(moved)) == (0, Moves(begun=3, done=3))
    for row in moved.rows():
        assert row.usage is not None
        assert row.timing is not None
        assert (
            row.usage.output_tokens == row.timing.tokens == sum(row.timing.gap_counts) + 1 == MADE
        )
    paused = [r for r in moved.rows() if r.timing and r.timing.max_gap_ns > 25 * NS_PER_MS]
    assert len(paused) == 3
    assert all(r.timing and r.timing.max_gap_ns < 50 * NS_PER_MS for r in paused)
    assert {row.replica for row in moved.rows()} == {"pool-1"}


def test_a_group_whose_streams_are_moved_is_given_back_in_seconds() -> None:
    settings = replace(BRIEF, drain_s=600.0)
    held = [
        run(world(how, settings), rows=answers()).world.provider.gpu_ns[POOL]
        for how in (None, Migration())
    ]
    assert held[1] < held[0] - seconds(20)


def test_a_pool_that_does_not_want_it_and_streams_about_to_end_stay() -> None:
    assert moves(run(world(Migration(), replace(BRIEF, migrate=False)), rows=answers())) == Moves()
    assert moves(run(world(Migration()), rows=answers(made=8_000))) == Moves()


def test_where_nobody_has_room_a_stream_waits_for_its_end_as_before() -> None:
    one = world(Migration())
    (pool,) = one.deployment.pools
    tight = replace(pool.profile, max_running=3, reference_batch=3)
    full = replace(one, deployment=replace(one.deployment, pools=(replace(pool, profile=tight),)))
    ran = run(full, rows=answers())
    assert (drained(ran), moves(ran)) == (3, Moves())


def test_moves_are_the_same_step_by_step_and_replay() -> None:
    fast = run(world(Migration(gb_per_s=3.0)), rows=answers())
    slow = run(world(Migration(gb_per_s=3.0)), rows=answers(), fast_forward=False)
    assert moves(fast).done
    assert fast.journal == slow.journal
    assert isinstance(verify(fast.segments), Verified)


def faults(rng: Random, at_s: float) -> list[Fault]:
    """Draw what goes wrong within the seconds in which streams are being moved."""
    found: list[Fault] = [
        Crash(
            replica=replica,
            at_s=at_s + rng.uniform(0.0, 6.0),
            noticed_after_s=rng.choice((0.0, 0.3, 2.0)),
            streams_break=rng.random() < 0.5,
            back_after_s=rng.choice((None, 0.05, 2.0)),
        )
        for replica in range(2)
        if rng.random() < 0.4
    ]
    if rng.random() < 0.2:
        found.append(
            Restart(at_s=at_s + rng.uniform(0.0, 6.0), checkpoint_age_s=rng.choice((0.0, 3.0)))
        )
    return found


def drawn(seed: int) -> tuple[Scenario, list[TraceRow]]:
    """Draw a drain of streams that take seconds to copy or to hand over, and what goes on meanwhile."""
    rng = Random(seed)
    how = Migration(gb_per_s=rng.choice((0.2, 1.0, 25.0)), pause_ms=rng.choice((0.0, 25.0, 900.0)))
    settings = replace(BRIEF, drain_s=rng.choice((2.0, 5.0, 60.0)), tick_s=2.0)
    rows = [
        replace(row, output_tokens=Tokens(rng.choice((8_200, 9_000, MADE))))
        for row in answers(rng.choice((4, 8)))
    ]
    if rng.random() < 0.5:  # demand returns: the drain is called off
        at = rng.uniform(61.0, 65.0)
        rows += steady(((at, at + 4.0, 30.0),), "fast", given=4_000)
    one = world(how, settings, faults=faults(rng, 62.0))
    if rng.random() < 0.5:
        leavers = Leavers(share=0.5, within_s=75.0)
        one = replace(one, faults=(*one.faults, leavers))
    return one, sorted(rows, key=lambda row: row.at)


def test_whatever_happens_on_the_way_nothing_leaks_and_no_token_is_lost_or_doubled() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        one, rows = drawn(seed)
        ran = run(one, seed, rows)  # with every invariant checked after each step
        counts = moves(ran)
        seen.update(begun=counts.begun, done=counts.done, stayed=counts.stayed)
        seen["on the way"] += counts.begun - counts.done - counts.stayed
        for row in ran.rows(outcome=Outcome.SUCCESS):
            assert row.usage is not None
            assert row.timing is not None
            assert row.usage.output_tokens == rows[row.request - 1].output_tokens
            assert row.timing.tokens == sum(row.timing.gap_counts) + 1 == row.usage.output_tokens
        assert not ran.world.plane.state.ledger.berths
        if not seed % 8:
            assert ran.journal == run(one, seed, rows, fast_forward=False, check=False).journal
    assert min(seen.values()) > 10, f"{seen=}"


def test_the_report_counts_moves() -> None:
    record = simulate(world(Migration()), 0, answers())
    told = summarise(record).cost
    assert told is not None
    assert (told.pools[0].moves_begun, told.pools[0].moved) == (3, 3)
    assert "streams moved from groups that went" in render_summary(summarise(record))
    assert "streams moved" not in render_summary(summarise(simulate(world(None), 0, answers())))


# Planted bugs --------------------------------------------------------------------------------


def test_a_place_that_is_not_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Ledger, attempt: AttemptId, _now: InstantNs) -> Any:
        return self.berths.pop(attempt)

    monkeypatch.setattr(Ledger, "give_up", keep)
    with pytest.raises(Broken, match="INV-3"):
        run(world(Migration()), rows=answers())


def test_a_stream_that_is_booked_where_it_does_not_run_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ledger, "move", Ledger.give_up)
    with pytest.raises(Broken, match="INV-2"):
        run(world(Migration()), rows=answers())


def test_ends_of_moves_come_once_for_each_that_was_begun() -> None:
    ran = run(world(Migration()), rows=answers())
    ends = Counter((one.attempt, one.done) for one in ran.events(Migrated))
    assert sorted(ends.values()) == [1, 1, 1]
    assert InstantNs(0) < ran.world.now
