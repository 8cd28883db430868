"""After dispatch: each exit frees what was held, once; late and repeated messages change nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.model.decision import Reason
from headrace.model.deployment import ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Cancel, Concluded, Dispatch, Fail
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName, TenantId
from headrace.model.meter import StreamTiming
from headrace.model.slo import Outcome
from headrace.plane.quotas import Bucket
from headrace.plane.state import Phase
from headrace.plane.streams import GONE
from headrace.units import MICRO, InstantNs
from tests.plane import invariants
from tests.plane.scenes import H100, MODEL, MS, Driver, S, config, small, usage

POOL = PoolName("p")
LIMITED = config(tenants=(TenantSpec(name="a", tpm_limit=100_000), TenantSpec(name="b")))


def sent(made: Driver, **more: Any) -> tuple[int, AttemptId]:
    """Offer a request that is sent at once; return it and its attempt."""
    request = made.arrive(**more)
    attempt = made.live(request).attempt
    assert attempt is not None
    return request, attempt


def level(made: Driver) -> int:
    bucket = made.plane.state.ledger.quotas[TenantId("a")].tokens
    assert isinstance(bucket, Bucket)
    return bucket.level


def frozen_but_for_counts(made: Driver) -> bytes:
    """Return the state without the count of ignored events."""
    ignored, made.plane.state.ignored = made.plane.state.ignored, {}
    content = made.plane.freeze()
    made.plane.state.ignored = ignored
    return content


# The life of an attempt ----------------------------------------------------------------------


def test_a_first_token_turns_prefill_into_a_stream() -> None:
    made = Driver()
    request, attempt = sent(made)
    made.first(attempt)
    load = made.plane.state.ledger.loads[Incarnation(1)]
    assert made.live(request).phase is Phase.STREAMING
    assert (load.pending_prefill_ns, load.decodes, load.context_tokens) == (0, 1, 1_001)


def test_an_end_settles_concludes_and_lets_the_next_one_in() -> None:
    made = Driver(config(pools=(PoolSpec(name="p", model="m", profile=small(8_192, running=1)),)))
    request, attempt = sent(made)
    waiting = made.arrive()
    assert made.live(waiting).phase is Phase.QUEUED
    made.first(attempt)
    effects = made.end(attempt, usage=usage(1_000, 9), timing=made.timing(9))
    kinds = [type(effect) for effect in effects]
    assert kinds[0] is Concluded
    assert kinds[-1] is Dispatch
    row = made.rows()[0]
    assert (row.request, row.outcome, row.reason) == (request, Outcome.SUCCESS, None)
    assert row.met
    assert row.work_ns == small(8_192, running=1).work_ns(1_000, 0, 9)
    assert made.live(waiting).phase is Phase.DISPATCHED


def test_an_error_tells_the_caller_and_is_a_miss() -> None:
    made = Driver()
    request, attempt = sent(made)
    effects = made.end(attempt, Outcome.ERROR)
    assert [type(effect) for effect in effects] == [Fail, Concluded]
    row = made.rows()[0]
    assert (row.request, row.reason, row.met) == (request, Reason.UPSTREAM_ERROR, False)


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.CLIENT_CANCEL])
def test_other_ends_need_no_word_to_the_caller(outcome: Outcome) -> None:
    made = Driver()
    _, attempt = sent(made)
    assert [type(effect) for effect in made.end(attempt, outcome)] == [Concluded]


def test_a_tick_replaces_predictions_by_tokens_made() -> None:
    made = Driver()
    _, attempt = sent(made)
    made.first(attempt)
    before = made.counter("a")
    made.tick((attempt, 200))
    assert made.counter("a") == before
    made.tick((attempt, 250))
    assert made.counter("a") > before


# Who pays ------------------------------------------------------------------------------------


Exit = Callable[[Driver, int, AttemptId], object]
EXITS: dict[str, Exit] = {
    "left": lambda made, request, _: made.leave(request),
    "shut down": lambda made, request, _: made.shut_down(request),
    "lost": lambda made, _, __: made.down("r0", 1),
    "restarted": lambda made, _, __: made.restart(),
    "ended": lambda made, _, attempt: made.end(attempt, Outcome.ERROR),
}


@pytest.mark.parametrize("exit_", EXITS.values(), ids=EXITS)
def test_what_made_no_token_costs_nothing(exit_: Exit) -> None:
    made = Driver(LIMITED)
    request, attempt = sent(made)
    exit_(made, request, attempt)
    assert level(made) == 100_000
    assert made.counter("a") == 0
    invariants.over(made.plane)


@pytest.mark.parametrize("exit_", EXITS.values(), ids=EXITS)
def test_tokens_that_the_caller_got_are_paid_for_on_every_exit(exit_: Exit) -> None:
    """Else one streams for nothing, by leaving before the end each time."""
    made = Driver(LIMITED)
    request, attempt = sent(made)
    made.first(attempt)
    made.tick((attempt, 300))
    exit_(made, request, attempt)
    assert level(made) == 100_000 - 1_300
    rates = made.plane._machine.settings.prices[MODEL]
    assert made.counter("a") == rates.service(1_000, 0, 300)
    invariants.over(made.plane)


def test_a_stream_whose_first_token_was_not_told_apart_is_paid_for() -> None:
    made = Driver(LIMITED)
    _, attempt = sent(made)
    made.end(attempt, Outcome.ERROR, timing=made.timing(40))
    assert level(made) == 100_000 - 1_040
    assert made.known.rates[POOL].fresh_ns > 0, "its work was done all the same"
    row = made.rows()[0]
    assert row.indicators is not None
    assert row.indicators.tokens == 40


@pytest.mark.parametrize(
    ("phase", "kinds"),
    [("queued", [Concluded]), ("sent", [Cancel, Concluded]), ("streaming", [Cancel, Concluded])],
)
def test_a_caller_may_leave_in_any_phase(phase: str, kinds: list[type]) -> None:
    made = Driver(replicas=0 if phase == "queued" else 1)
    if phase == "queued":
        made.up("r0")
        busy, behind = made.arrive(tokens=9_000), made.arrive(tokens=9_000)
        request = made.arrive(tokens=9_000)
        assert made.live(request).phase is Phase.QUEUED
    else:
        request = busy = made.arrive()
    if phase == "streaming":
        made.first(made.live(request).attempt)
    effects = made.leave(request)
    assert [type(effect) for effect in effects] == kinds
    if phase != "queued":
        cancel = effects[0]
        assert isinstance(cancel, Cancel)
        assert (cancel.replica, cancel.incarnation) == ("r0", 1)
    assert made.rows()[-1].outcome is Outcome.CLIENT_CANCEL
    if busy != request:
        made.leave(behind)
        made.leave(busy)
    invariants.over(made.plane)


@pytest.mark.parametrize("phase", ["queued", "sent", "streaming"])
def test_who_is_ended_at_the_shutdown_failed_and_did_not_leave(phase: str) -> None:
    made = Driver(replicas=1)
    request = busy = behind = made.arrive(tokens=9_000)
    if phase == "queued":
        behind = made.arrive(tokens=9_000)
        request = made.arrive(tokens=9_000)
        assert made.live(request).phase is Phase.QUEUED
    elif phase == "streaming":
        made.first(made.live(request).attempt)
    decision = made.live(request).decision
    effects = made.shut_down(request)
    kinds = [type(effect) for effect in effects]
    assert kinds == ([] if phase == "queued" else [Cancel]) + [Fail, Concluded]
    fail = effects[-2]
    assert isinstance(fail, Fail)
    assert (fail.decision, fail.reason) == (decision, Reason.SHUT_DOWN)
    row = made.rows()[-1]
    assert (row.outcome, row.reason) == (Outcome.ERROR, Reason.SHUT_DOWN)
    assert [type(effect) for effect in made.shut_down(request)] == [], "twice is once"
    if busy != request:
        made.leave(behind)
        made.leave(busy)
    invariants.over(made.plane)


CUTS: dict[str, Callable[[Driver, int, AttemptId, StreamTiming], object]] = {
    "left": lambda made, request, _, shown: made.leave(request, shown),
    "shut down": lambda made, request, _, shown: made.shut_down(request, shown),
    "lost": lambda made, _, attempt, shown: made.down("r0", 1, (attempt, shown)),
}


@pytest.mark.parametrize("told", [True, False], ids=["told its first token", "not told"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_stream_that_is_cut_short_keeps_what_it_had_shown(cut: Any, told: bool) -> None:
    """A slow one does not look better for being left, nor does it stream for nothing."""
    made = Driver(LIMITED)
    request, attempt = sent(made)
    if told:
        made.first(attempt)
    made.wait(3 * S)
    cut(made, request, attempt, made.timing(40))
    row = made.rows()[0]
    assert row.indicators is not None
    assert (row.indicators.tokens, row.indicators.ttft_ns) == (40, 3 * S)
    assert row.missed
    assert level(made) == 100_000 - 1_040
    invariants.over(made.plane)


def test_who_leaves_an_answer_in_one_piece_pays_for_the_prompt_that_was_worked_on() -> None:
    made = Driver(LIMITED)
    request, attempt = sent(made)
    made.first(attempt)  # taken to have come: nothing of the answer is seen before its end
    made.leave(request)
    assert level(made) == 100_000 - 1_001


def test_a_replica_that_is_lost_cuts_each_stream_where_it_was() -> None:
    made = Driver()
    (one, first), (two, second), _ = (sent(made, tokens=100) for _ in range(3))
    made.down(
        "r0", 1, (first, made.timing(5)), (second, made.timing(9)), (AttemptId(99), made.timing(7))
    )
    rows = {row.request: row for row in made.rows()}
    assert len(rows) == 3
    shown = {n: row.indicators.tokens for n, row in rows.items() if row.indicators is not None}
    assert shown == {one: 5, two: 9}


def test_who_leaves_the_queue_has_seen_nothing_whatever_is_told() -> None:
    made = Driver(config(pools=(PoolSpec(name="p", model="m", profile=small(8_192, running=1)),)))
    sent(made)
    waits = made.arrive()
    made.leave(waits, made.timing(9))
    row = made.rows()[0]
    assert row.indicators is None or row.indicators.tokens == 0


# Late, twice, unknown ------------------------------------------------------------------------


def test_messages_of_attempts_that_are_over_change_nothing() -> None:
    made = Driver()
    request, attempt = sent(made)
    made.first(attempt)
    made.end(attempt, usage=usage(1_000, 5), timing=made.timing(5))
    before = frozen_but_for_counts(made)
    assert made.first(attempt) == []
    assert made.end(attempt, usage=usage(1_000, 5), timing=made.timing(5)) == []
    assert made.leave(request) == []
    assert frozen_but_for_counts(made) == before
    assert made.plane.state.ignored == {"first_token": 1, "ended": 1, "left": 1}


def test_a_tick_counts_what_it_does_not_know_and_uses_the_rest() -> None:
    made = Driver()
    _, one = sent(made)
    _, two = sent(made)
    made.first(two)
    made.tick((one, 5), (two, 5), (99, 5))
    flights = made.plane.state.ledger.flights
    assert (flights[one].made, flights[two].made) == (0, 5)
    assert made.plane.state.ignored == {"tick": 2}


def test_a_second_first_token_is_ignored() -> None:
    made = Driver()
    _, attempt = sent(made)
    made.first(attempt)
    made.tick((attempt, 7))
    made.first(attempt)
    assert made.plane.state.ledger.flights[attempt].made == 7


# Replicas come and go ------------------------------------------------------------------------


def test_a_lost_replica_takes_its_attempts_with_it_and_no_others() -> None:
    made = Driver(replicas=2)
    first, _ = sent(made)
    second, _ = sent(made)
    assert set(made.places()) == {"r0", "r1"}
    gone = made.live(first).replica
    made.down(str(gone), 1 if gone == "r0" else 2)
    assert [(f.request, f.reason) for f in made.failed()] == [(first, Reason.REPLICA_LOST)]
    assert second in made.plane.state.live


def test_the_farewell_of_an_old_life_means_nothing() -> None:
    made = Driver(replicas=0)
    made.up("r0", incarnation=1)
    made.up("r0", incarnation=2)
    made.down("r0", 1)
    assert made.known.fleet.replicas[ReplicaName("r0")].incarnation == 2
    assert made.plane.state.ignored == {"down": 1}
    made.down("stranger", 1)
    assert made.plane.state.ignored == {"down": 2}


def test_a_later_life_replaces_the_earlier_and_ends_what_it_held() -> None:
    made = Driver(replicas=0)
    made.up("r0", incarnation=1)
    request, _ = sent(made)
    made.up("r0", incarnation=2)
    assert [(f.request, f.reason) for f in made.failed()] == [(request, Reason.REPLICA_LOST)]
    assert list(made.plane.state.ledger.loads) == [2]


@pytest.mark.parametrize("life", [1, 2])
def test_a_late_announcement_revives_nobody(life: int) -> None:
    made = Driver(replicas=0)
    made.up("r0", incarnation=2)
    made.down("r0", 2)
    made.up("r0", incarnation=life)
    assert not made.known.fleet.replicas
    assert made.plane.state.ignored == {"up": 1}
    made.up("r0", incarnation=3)
    assert made.known.fleet.replicas


def test_an_announcement_that_lives_already_or_knows_no_pool_is_ignored() -> None:
    made = Driver(replicas=0)
    made.up("r0", incarnation=5)
    made.up("r0", incarnation=5)
    made.up("r0", incarnation=4)
    made.up("r1", incarnation=5)
    made.up("r2", pool="nowhere")
    assert list(made.known.fleet.replicas) == ["r0"]
    assert made.plane.state.ignored == {"up": 4}


def test_farewells_are_remembered_within_bounds() -> None:
    made = Driver(replicas=0)
    for nth in range(GONE + 5):
        made.down(f"n{nth}", made.up(f"n{nth}"))
    gone = made.plane.state.gone
    assert len(gone) == GONE
    assert "n4" not in gone
    assert "n5" in gone


def test_a_name_that_moves_to_another_model_leaves_the_first() -> None:
    settings = config(
        models=(ModelSpec(name="m"), ModelSpec(name="n")),
        pools=(
            PoolSpec(name="p", model="m", profile=H100),
            PoolSpec(name="q", model="n", profile=H100),
        ),
    )
    made = Driver(settings)
    request, _ = sent(made)
    made.up("r0", "q")
    assert [f.request for f in made.failed()] == [request]
    assert not made.known.fleet.replicas
    made.arrive(model="n")
    assert made.places()[-1] == "r0"
    made.up("r0", "p", incarnation=1)
    assert not made.known.fleet.replicas, "an old life of that name"


# Reports -------------------------------------------------------------------------------------


def test_the_newest_report_is_kept_and_older_ones_are_not() -> None:
    made = Driver()
    made.now = InstantNs(S)
    made.report("r0", 1, running=3)
    made.report("r0", 1, running=9)
    made.report("r0", 1, running=9, observed_at=InstantNs(S - 1))
    made.report("r0", 2, running=9, observed_at=InstantNs(S))
    made.report("nobody", 1)
    snapshot = made.known.fleet.replicas[ReplicaName("r0")].snapshot
    assert snapshot is not None
    assert snapshot.running == 3
    assert made.plane.state.ignored == {"report": 4}


def test_a_report_from_the_future_does_not_outlast_those_that_follow() -> None:
    made = Driver()
    made.report("r0", 1, running=9, observed_at=InstantNs(10**15))
    made.now = InstantNs(S)
    made.report("r0", 1, running=3)
    snapshot = made.known.fleet.replicas[ReplicaName("r0")].snapshot
    assert snapshot is not None
    assert snapshot.running == 3
    made.arrive()
    ages = [view.age_ns for view in made.entries()[0].evidence.replicas]
    assert ages == [0]


# Restart -------------------------------------------------------------------------------------


def test_after_a_restart_no_stream_lives_and_books_and_lessons_do() -> None:
    made = Driver(LIMITED)
    for _ in range(3):
        made.serve(made.arrive(), output=30)
    counter, windows = made.counter("a"), dict(made.plane.state.outputs.windows)
    sent(made)
    made.arrive(tokens=9_000)
    made.arrive(tokens=9_000)
    rows = len(made.rows())
    effects = made.restart()
    assert {effect.reason for effect in effects if isinstance(effect, Concluded)} == {
        Reason.RESTARTED
    }
    assert len(made.rows()) == rows + 3
    assert not made.known.fleet.replicas
    assert made.counter("a") == counter
    assert made.plane.state.outputs.windows == windows
    invariants.over(made.plane)
    made.up("r0", incarnation=1)
    assert made.known.fleet.replicas, "a replica that outlived the gateway is announced again"


def test_attempts_of_different_epochs_are_never_mistaken() -> None:
    made = Driver()
    _, before = sent(made)
    made.restart()
    made.up("r0")
    _, after = sent(made)
    assert after > before
    assert after >> 40 == 1
    assert made.first(before) == []


def test_a_restart_that_was_told_already_is_a_bug() -> None:
    made = Driver()
    made.restart()
    made.epochs = iter([1, 0])  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(AssertionError, match="epochs count the restarts"):
            made.restart()


# The rate ------------------------------------------------------------------------------------


def test_the_rate_starts_as_declared_and_follows_what_drains_while_work_waits() -> None:
    made = Driver(config(pools=(PoolSpec(name="p", model="m", profile=H100, work_rate=0.5),)))
    rate = made.known.rates[POOL]
    assert rate.micro() == MICRO // 2
    rate.tick(InstantNs(0), 2, waiting=True)
    for nth in range(1, 200):
        rate.fresh_ns += 100 * MS
        rate.tick(InstantNs(nth * 100 * MS), 2, waiting=True)
    assert rate.micro() == pytest.approx(MICRO // 2, rel=0.02)
    for nth in range(200, 600):
        rate.fresh_ns += 180 * MS
        rate.tick(InstantNs(nth * 100 * MS), 2, waiting=True)
    assert rate.micro() == pytest.approx(MICRO * 9 // 10, rel=0.02)


@pytest.mark.parametrize(
    ("before", "after", "span"),
    [(False, True, 100 * MS), (True, False, 100 * MS), (True, True, 2 * S), (True, True, 1)],
)
def test_idle_spans_and_pauses_teach_nothing(before: bool, after: bool, span: int) -> None:
    rate = Driver().known.rates[POOL]
    rate.tick(InstantNs(S), 1, waiting=before)
    rate.fresh_ns = 10 * S
    rate.tick(InstantNs(S + span), 1, waiting=after)
    assert rate.micro() == 700_000
    assert rate.fresh_ns == 0


def test_a_rate_is_never_nothing() -> None:
    rate = Driver().known.rates[POOL]
    rate.done_ns = 0
    assert rate.micro() == MICRO // 100
    rate.time_ns = 0
    assert rate.micro() == MICRO


# A replica that is to go -----------------------------------------------------------------------


def test_a_draining_replica_finishes_what_it_has_and_takes_nothing_new() -> None:
    made = Driver(replicas=2)
    first = made.arrive()
    gone = made.live(first).replica
    life = 1 if gone == "r0" else 2
    assert not made.drain(str(gone), life)
    for _ in range(4):
        assert made.live(made.arrive(tokens=100)).replica != gone
    assert made.known.fleet.ready == {POOL: 1}
    made.serve(first)
    assert made.plane.state.ledger.loads[Incarnation(life)].attempts == 0
    made.down(str(gone), life)
    invariants.hold(made.plane, made.now)


def test_the_last_replica_that_drains_leaves_work_waiting_for_the_next() -> None:
    made = Driver()
    made.drain("r0", 1)
    assert not made.known.fleet.ready
    waits = made.arrive(slo_class="batch")
    if waits in made.plane.state.live:
        assert made.live(waits).phase is Phase.QUEUED
    made.up("r1")
    after = made.arrive()
    assert made.live(after).replica == "r1"


def test_a_draining_replica_that_is_lost_ends_what_it_had() -> None:
    made = Driver(replicas=1)
    request, _ = sent(made)
    made.drain("r0", 1)
    assert any(isinstance(one, Fail) and one.request == request for one in made.down("r0", 1))
    invariants.over(made.plane)


def test_draining_is_forgotten_with_the_incarnation() -> None:
    made = Driver()
    made.drain("r0", 1)
    made.up("r0")
    assert made.known.fleet.ready == {POOL: 1}
    before = frozen_but_for_counts(made)
    for life in (1, 7):
        made.drain("r0", life)
    made.drain("nobody", 1)
    assert frozen_but_for_counts(made) == before
    assert made.plane.state.ignored["draining"] == 3
