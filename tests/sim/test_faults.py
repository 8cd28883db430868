"""Each fault does what its description says, and the plane sees no more of it than it would live."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.deployment import TenantSpec
from headrace.model.effect import Cancel, Dispatch, Effect
from headrace.model.event import (
    CallerLeft,
    Ended,
    FirstToken,
    ReplicaDown,
    ReplicaDraining,
    ReplicaReported,
    ReplicaUp,
    RequestArrived,
)
from headrace.model.ids import AttemptId, RequestId, TenantId
from headrace.model.meter import NO_STREAM
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.plane.journal import Checkpoint, Record, Verified, frames, verify
from headrace.plane.state import EPOCH_BITS
from headrace.report.groups import Latency
from headrace.report.summary import summarise
from headrace.sim.experiment import record, without_control
from headrace.sim.faults import Crash, Drain, Fault, Leavers, Repeaters, Reports, Restart, Slow
from headrace.sim.scenario import rows_of
from headrace.sim.world import World
from headrace.trace.mix import Fixed
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_S, InstantNs, seconds
from tests.sim.scenes import Ran, burst, deployment, run, scenario, source

LONG = Fixed(input=400, output=300)  # about two seconds on an idle replica


def at(when_s: float) -> InstantNs:
    """Return an instant of the run."""
    return InstantNs(seconds(when_s))


def one_replica() -> list[TraceRow]:
    """Return ten answers that are under way from the start."""
    return burst(10, made=600)


def crashed(fault: Crash, *, replicas: int = 1) -> Ran:
    """Return a run of ten long answers and one later request around a crash."""
    rows = [*one_replica(), *burst(1, at_s=4.0)]
    return run(scenario(config=deployment(replicas), faults=[fault]), 0, rows)


def test_a_crash_breaks_streams_at_once_and_is_noticed_later() -> None:
    ran = crashed(Crash(replica=0, at_s=1.0, noticed_after_s=0.5))
    assert {row.ended_at for row in ran.rows(reason=Reason.UPSTREAM_ERROR)} == {at(1.0)}
    assert len(ran.rows(reason=Reason.UPSTREAM_ERROR, outcome=Outcome.ERROR)) == 10
    (down,) = [r for r in ran.records() if isinstance(r.event, ReplicaDown)]
    assert down.now == at(1.5)
    assert ran.row(11).reason is Reason.NO_READY_REPLICA  # it stays away


def test_a_silent_crash_is_felt_when_it_is_noticed() -> None:
    ran = crashed(Crash(replica=0, at_s=1.0, noticed_after_s=0.5, streams_break=False))
    lost = ran.rows(reason=Reason.REPLICA_LOST, outcome=Outcome.ERROR)
    assert len(lost) == 10
    assert {row.ended_at for row in lost} == {at(1.5)}
    assert not ran.events(Ended)


def test_what_is_sent_to_a_replica_that_died_unnoticed_is_lost() -> None:
    fault = Crash(replica=0, at_s=1.0, noticed_after_s=5.0)
    rows = [*burst(2, made=10), *burst(2, at_s=3.0)]
    ran = run(scenario(config=deployment(1), faults=[fault]), 0, rows)
    assert [row.outcome for row in ran.rows()[:2]] == [Outcome.SUCCESS] * 2
    assert [row.reason for row in ran.rows()[2:]] == [Reason.REPLICA_LOST] * 2
    assert {row.ended_at for row in ran.rows()[2:]} == {at(6.0)}


def test_a_replica_comes_back_in_another_life() -> None:
    ran = crashed(Crash(replica=0, at_s=1.0, back_after_s=2.0))
    first, second = ran.events(ReplicaUp)
    assert first.replica == second.replica
    assert second.incarnation > first.incarnation
    assert ran.row(11).outcome is Outcome.SUCCESS
    (node,) = ran.world.nodes
    assert [life.output_tokens > 0 for life in node.past] == [True, True]
    assert node.past[1].output_tokens == 50  # the one after the crash alone
    assert node.up_ns == ran.world.now - at(2.0)


def test_a_replica_that_drains_ends_what_it_has_and_takes_nothing_new() -> None:
    rows = [*one_replica(), *burst(1, at_s=4.0)]
    fault = Drain(replica=0, at_s=1.0, time_s=120.0)
    ran = run(scenario(config=deployment(1), faults=[fault]), 0, rows)
    assert len(ran.rows(outcome=Outcome.SUCCESS)) == 10
    assert ran.row(11).reason is Reason.NO_READY_REPLICA
    (told,) = [r for r in ran.records() if isinstance(r.event, ReplicaDraining)]
    assert told.now == at(1.0)


def test_a_drain_ends_with_its_time_and_what_still_runs_with_it() -> None:
    rows = [*one_replica(), *burst(1, at_s=4.0)]
    fault = Drain(replica=0, at_s=1.0, time_s=0.5, back_after_s=0.5)
    ran = run(scenario(config=deployment(1), faults=[fault]), 0, rows)
    lost = ran.rows(reason=Reason.REPLICA_LOST, outcome=Outcome.ERROR)
    assert len(lost) == 10
    assert {row.ended_at for row in lost} == {at(1.5)}
    assert ran.row(11).outcome is Outcome.SUCCESS  # by its next life
    assert not ran.world.draining


def test_a_drain_of_what_is_down_changes_nothing() -> None:
    crash, drain = Crash(replica=0, at_s=1.0), Drain(replica=0, at_s=1.1)
    settings: tuple[list[Fault], ...] = ([crash], [crash, drain])
    one, two = (
        run(scenario(config=deployment(1), faults=faults), 0, one_replica()) for faults in settings
    )
    assert one.journal == two.journal


def test_a_life_may_begin_before_the_last_ones_end_is_known() -> None:
    fault = Crash(replica=0, at_s=1.0, noticed_after_s=2.0, streams_break=False, back_after_s=0.1)
    ran = crashed(fault)
    lost = ran.rows(reason=Reason.REPLICA_LOST)
    assert {row.ended_at for row in lost} == {at(1.1)}  # the new life says it
    assert ran.world.plane.state.ignored["down"] == 1
    assert ran.row(11).outcome is Outcome.SUCCESS


def test_a_crash_touches_no_other_replica() -> None:
    ran = crashed(Crash(replica=1, at_s=1.0), replicas=2)
    lost = ran.rows(outcome=Outcome.ERROR)
    assert {row.replica for row in lost} == {"pool-1"}
    others = [row for row in ran.rows() if row.replica == "pool-0"]
    assert len(others) >= 5
    assert {row.outcome for row in others} == {Outcome.SUCCESS}


def test_a_crash_of_what_is_down_changes_nothing() -> None:
    once = Crash(replica=0, at_s=1.0)
    rows = one_replica()
    one, two = (
        run(scenario(config=deployment(1), faults=faults), 0, rows)
        for faults in ([once], [once, replace(once, at_s=1.5)])
    )
    assert one.journal == two.journal


def test_a_slow_replica_is_slower_and_the_plane_is_not_told() -> None:
    rows = burst(8, made=200)
    quiet = scenario(config=deployment(2), noise_percent=0.0)
    ran = run(replace(quiet, faults=(Slow(replica=1, factor=3.0),)), 0, rows)
    tpot = {
        name: {row.indicators.tpot_ns() or 0 for row in ran.rows(replica=name) if row.indicators}
        for name in ("pool-0", "pool-1")
    }
    slow, fast = max(tpot["pool-1"]), max(tpot["pool-0"])
    assert slow == pytest.approx(3 * fast, rel=0.05)
    assert ran.records()[0] == run(quiet, 0, rows).records()[0]  # its configuration


def test_a_slow_replica_gets_less_to_do() -> None:
    even = run(scenario(source(rate=60.0), rows=400))
    ran = run(scenario(source(rate=60.0), rows=400, faults=[Slow(replica=1, factor=5.0)]))
    share = [len(one.rows(replica="pool-1")) / 400 for one in (even, ran)]
    assert share[0] == pytest.approx(0.5, abs=0.1)
    assert share[1] < share[0] - 0.1


def reports(ran: Ran) -> list[tuple[int, int, str]]:
    """Return (told at, observed at, replica) of each report."""
    return [
        (record.now, record.event.snapshot.observed_at, record.event.snapshot.replica)
        for record in ran.records()
        if isinstance(record.event, ReplicaReported)
    ]


def test_reports_come_at_their_period() -> None:
    told = reports(run(scenario(rows=100)))
    assert all(when == seen for when, seen, _ in told)
    mine = [when for when, _, replica in told if replica == "pool-0"]
    assert mine == [n * at(1.0) for n in range(len(mine))]
    assert len(mine) > 5


def test_lost_reports_do_not_come() -> None:
    whole, half, none = (
        len(reports(run(scenario(rows=300, faults=[Reports(lost=lost)]))))
        for lost in (0.0, 0.5, 1.0)
    )
    assert none == 0
    assert 0.3 * whole < half < 0.7 * whole


def test_repeated_reports_are_ignored() -> None:
    ran = run(scenario(rows=300, faults=[Reports(twice=1.0)]))
    seen = Counter(observed for _, observed, name in reports(ran) if name == "pool-0")
    assert set(seen.values()) == {2}
    assert ran.world.plane.state.ignored["report"] == len(reports(ran)) // 2


def test_late_reports_are_ignored_once_newer_ones_were_seen() -> None:
    ran = run(scenario(rows=300, faults=[Reports(delay_s=4.0)]))
    late = [when - seen for when, seen, _ in reports(ran)]
    assert max(late) > at(2.0)
    newest: dict[str, int] = {}
    stale = 0
    for _, seen, replica in reports(ran):
        stale += newest.get(replica, -1) >= seen
        newest[replica] = max(newest.get(replica, -1), seen)
    assert ran.world.plane.state.ignored["report"] == stale > 5


def test_a_dead_lifes_last_report_is_ignored() -> None:
    faults = (Reports(delay_s=3.0), Crash(replica=0, at_s=2.5, noticed_after_s=0.0))
    ran = run(scenario(rows=100, faults=faults))
    after = [name for when, _, name in reports(ran) if when > at(2.5)]
    assert "pool-0" in after
    assert "pool-0" not in {
        r for m in ran.world.plane.state.models.values() for r in m.fleet.replicas
    }


def test_callers_leave_in_every_phase() -> None:
    one = scenario(
        source("a", 400.0, lengths=LONG),
        config=deployment(1),
        rows=800,
        faults=[Leavers(share=0.5, within_s=3.0)],
    )
    attempts: dict[RequestId, AttemptId] = {}
    cancelled: set[AttemptId] = set()

    def watch(_: World, effects: Sequence[Effect]) -> None:
        attempts.update({e.request: e.attempt for e in effects if isinstance(e, Dispatch)})
        cancelled.update(e.attempt for e in effects if isinstance(e, Cancel))

    World(one, rows_of(one, 0), 0, after=watch).run()
    ran = run(one)
    started = {event.attempt for event in ran.events(FirstToken)}
    left = ran.rows(outcome=Outcome.CLIENT_CANCEL)
    queued = [row for row in left if row.request not in attempts]
    sent = [attempts[row.request] for row in left if row.request in attempts]
    assert len(queued) > 10
    assert len([attempt for attempt in sent if attempt not in started]) > 2
    assert len([attempt for attempt in sent if attempt in started]) > 10
    assert cancelled == set(sent)  # whoever was sent is stopped
    asked = {event.request for event in ran.events(CallerLeft)}
    assert asked >= {row.request for row in left}


def test_who_has_its_answer_does_not_leave_any_more() -> None:
    ran = run(scenario(rows=60, faults=[Leavers(share=1.0, within_s=30.0)]))
    over = {row.request for row in ran.rows(outcome=Outcome.SUCCESS)}
    assert len(over) > 30
    assert over.isdisjoint(event.request for event in ran.events(CallerLeft))


LIMITS = (TenantSpec(name="a", tpm_limit=100_000), TenantSpec(name="b"))


@pytest.fixture(scope="module")
def restarted() -> Ran:
    """Return a run whose driver dies at 6 s and comes back from what it was at 5 s."""
    config = deployment(1, tenants=LIMITS)
    sources = source("a", 15.0, lengths=LONG), source("b", 4.0)
    fault = Restart(at_s=6.0, checkpoint_age_s=1.0)
    return run(scenario(*sources, config=config, rows=250, faults=[fault]))


def life(ran: Ran, nth: int) -> tuple[Checkpoint, list[Record]]:
    """Return one life of the driver: what it began with, and its records."""
    head, *rest = frames(ran.segments[nth])
    assert isinstance(head, Checkpoint)
    return head, [record for record in rest if isinstance(record, Record)]


def test_a_restart_cuts_every_stream(restarted: Ran) -> None:
    cut = restarted.rows(reason=Reason.RESTARTED)
    assert {row.ended_at for row in cut} == {at(6.0)}
    assert {row.outcome for row in cut} == {Outcome.ERROR}
    assert len(cut) > 5
    _, after = life(restarted, 1)
    sent = {r.event.attempt for r in after if isinstance(r.event, FirstToken | Ended)}
    assert min(sent) > 1 << EPOCH_BITS  # nothing of the old life is heard of again


def test_what_came_after_the_checkpoint_falls_with_the_driver(restarted: Ran) -> None:
    arrived = [row for row in restarted.rows() if at(5.0) < row.entry.arrived_at < at(6.0)]
    fell = [row for row in arrived if row.reason is Reason.RESTARTED]
    assert fell
    assert {row.entry.work_ns for row in fell} == {0}  # nobody remembers what it would have been


def test_a_restart_keeps_budgets_counters_and_lessons(restarted: Ran) -> None:
    head, after = life(restarted, 1)
    assert head.resumed
    state = Plane.thaw(head.state).state
    assert state.now == pytest.approx(at(5.0), abs=at(0.2))
    bucket = state.ledger.quotas[TenantId("a")].tokens
    assert bucket is not None
    assert bucket.level < bucket.limit // 2
    counters = next(iter(state.ledger.shares.values())).counters
    assert len(counters) > 1
    assert min(counters.values()) > 0
    assert state.outputs.windows
    again = Plane.thaw(head.state)
    again.handle(after[0].event, now=after[0].now)
    assert next(iter(again.state.ledger.shares.values())).counters.keys() == counters.keys()
    assert again.state.outputs.windows == state.outputs.windows


def test_service_goes_on_after_a_restart(restarted: Ran) -> None:
    served = [row for row in restarted.rows(outcome=Outcome.SUCCESS) if row.ended_at > at(6.0)]
    assert len(served) > 20
    assert restarted.world.epoch == 1
    assert len(restarted.rows()) == 250


def test_what_ended_after_the_checkpoint_keeps_its_first_outcome(restarted: Ran) -> None:
    between = [
        row
        for row in restarted.rows(outcome=Outcome.SUCCESS)
        if at(5.0) < row.ended_at <= at(6.0) and row.entry.arrived_at < at(5.0)
    ]
    assert between  # the thawed plane ended these anew, as lost


def test_a_replica_that_is_up_is_announced_again_in_the_same_life(restarted: Ran) -> None:
    before, after = (
        [r.event for r in life(restarted, nth)[1] if isinstance(r.event, ReplicaUp)]
        for nth in (0, 1)
    )
    assert before == after


def apart(count: int = 12) -> list[TraceRow]:
    """Return long answers that never meet, so that none changes another."""
    return [row for nth in range(count) for row in burst(1, at_s=60.0 * nth, made=150)]


def figures(ran: Ran) -> Latency:
    """Return the latencies of a run."""
    return summarise(record(ran.world, [], "by hand")).total.latency


SLOW = (Slow(replica=0, factor=20.0),)  # gaps far above their bound


def lonely(*faults: Fault) -> Ran:
    """Return a run of answers that never meet, on one slow replica."""
    one = scenario(config=deployment(1), faults=(*SLOW, *faults), noise_percent=0.0)
    return run(one, 0, apart())


@pytest.mark.parametrize(
    "faults",
    [
        (Leavers(share=1.0, within_s=15.0),),
        tuple(Crash(replica=0, at_s=60.0 * n + 5, back_after_s=1.0) for n in range(12)),
        tuple(
            Crash(replica=0, at_s=60.0 * n + 5, streams_break=False, back_after_s=1.0)
            for n in range(12)
        ),
        tuple(
            Crash(replica=0, at_s=60.0 * n + 5, streams_break=False, noticed_after_s=3.0,
                  back_after_s=1.0)
            for n in range(12)
        ),
        (
            *(Crash(replica=0, at_s=60.0 * n + 5, streams_break=False, noticed_after_s=20.0,
                    back_after_s=30.0) for n in range(12)),
            Leavers(share=0.5, within_s=20.0),
        ),
    ],
    ids=["left", "broke", "silent", "relieved", "silent and left"],
)  # fmt: skip
def test_streams_cut_short_do_not_look_better(faults: tuple[Fault, ...]) -> None:
    whole, cut = lonely(), lonely(*faults)
    patient, told = figures(whole), figures(cut)
    assert {row.outcome for row in whole.rows()} == {Outcome.SUCCESS}
    started = 0
    for mine, its in zip(cut.rows(), whole.rows(), strict=True):
        shown, all_of_it = mine.timing or NO_STREAM, its.timing
        assert all_of_it is not None
        assert shown.first_at in (None, all_of_it.first_at)
        assert shown.tokens <= all_of_it.tokens
        if mine.outcome is not Outcome.SUCCESS and shown.tokens > 1:
            assert shown.gaps_over == shown.tokens - 1
        ended = mine.timing.last_at if mine.timing is not None else None
        assert ended is None or ended <= mine.ended_at
        started += shown.tokens > 0
    assert sum(row.outcome is not Outcome.SUCCESS for row in cut.rows()) >= 5
    assert started >= 8
    assert told.ttft is not None
    assert told.ttft.count == started
    assert told.gaps is not None
    assert patient.gaps is not None
    assert told.gaps.p99_le_ns >= patient.gaps.p99_le_ns
    assert told.gaps.p50_le_ns >= patient.gaps.p50_le_ns
    assert told.stall is not None
    assert patient.stall is not None
    assert told.stall.p50_ns >= 0.9 * patient.stall.p50_ns


def test_a_crash_shows_the_same_to_who_hears_of_it_sooner_or_later() -> None:
    crash = Crash(replica=0, at_s=1.0, noticed_after_s=0.5)
    loud, silent = crashed(crash), crashed(replace(crash, streams_break=False))
    for one, other in zip(loud.rows(), silent.rows(), strict=True):
        assert one.timing == other.timing
    assert sum((row.timing or NO_STREAM).tokens > 10 for row in loud.rows()) == 10


def test_who_is_cut_off_is_not_said_to_have_left() -> None:
    rows = [*burst(300, made=2_000)]
    one = scenario(config=deployment(1), drain_s=1.0)
    ran = run(without_control(one), 0, rows, check=False)
    sent, waiting = ran.rows(outcome=Outcome.TIMEOUT), ran.rows(outcome=Outcome.CLIENT_CANCEL)
    assert len(sent) + len(waiting) == 300
    assert {row.replica is None for row in sent} == {False}
    assert {row.replica is None for row in waiting} == {True}  # the plane knows no other end
    assert min((row.timing or NO_STREAM).tokens for row in sent) >= 0
    assert max((row.timing or NO_STREAM).tokens for row in sent) > 10
    left = record(ran.world, [], "by hand")
    assert left.cut_off == 300
    assert not ran.world.plane.state.live
    assert isinstance(verify(ran.segments), Verified)


def test_what_cannot_end_in_time_is_cut_off() -> None:
    ran = run(scenario(config=deployment(1), drain_s=1.0), 0, burst(5, made=2_000), check=False)
    assert len(ran.world.cut_off) == 5
    assert {row.outcome for row in ran.rows()} == {Outcome.TIMEOUT}  # nobody left
    assert {row.ended_at for row in ran.rows()} == {ran.world.now}


def test_a_world_without_requests_ends_at_once() -> None:
    ran = run(scenario(), 0, [])
    assert ran.rows() == []
    assert len(ran.events(ReplicaUp)) == 2
    assert ran.world.now == 0


def test_who_is_refused_comes_again_and_has_one_row() -> None:
    rows = burst(1_000)
    one = scenario(config=deployment(1))
    plain = run(one, 0, rows)
    again = run(replace(one, faults=(Repeaters(times=2),)), 0, rows)
    assert len(again.rows()) == len(plain.rows()) == 1_000
    assert len(again.rows(admitted=True)) > len(plain.rows(admitted=True)) > 0
    arrivals = Counter(event.request.id for event in again.events(RequestArrived))
    assert set(arrivals.values()) == {1, 2, 3}
    refused = {row.request for row in again.rows(admitted=False)}
    assert {arrivals[request] for request in refused} == {3}, "each asked as often as it would"
    assert isinstance(verify(again.segments), Verified)


def test_nobody_comes_again_in_vain_nor_before_it_was_told_to() -> None:
    caller = Repeaters(times=3)
    rng = Random(1)
    waits = [caller.delay_ns(nth, None, rng) / NS_PER_S for nth in (1, 2, 3, 9)]
    for wait, least in zip(waits, (0.5, 1, 2, 8), strict=True):
        assert least <= wait <= 1.25 * least
    assert caller.delay_ns(1, seconds(7), rng) >= seconds(7)
    never = [*burst(1, given=10_000_000)]
    ran = run(scenario(faults=(caller,)), 0, never)
    assert len(ran.events(RequestArrived)) == 1, "its prompt fits no model"


def test_who_would_come_again_after_the_end_was_refused() -> None:
    one = scenario(config=deployment(1), drain_s=0.1, faults=(Repeaters(times=2),))
    ran = run(one, 0, burst(300), check=False)
    assert len(ran.rows()) == 300
    assert len(ran.rows(admitted=False)) > 0
