"""The driver in virtual time: order of a stream, exits in every phase, the one timer."""

import logging

import pytest
from msgspec.structs import replace

from headrace.gateway.driver import TICK_NS
from headrace.gateway.errors import Fault
from headrace.gateway.stream import Done, Left, Stream
from headrace.model.decision import Reason
from headrace.model.effect import Fail
from headrace.model.event import (
    CallerLeft,
    ConfigChanged,
    Ended,
    FirstToken,
    ProgressTick,
    ReplicaDown,
    ReplicaDraining,
    ReplicaForgot,
    ReplicaReported,
    ReplicaUp,
    RequestArrived,
    TimerDue,
)
from headrace.model.ids import AttemptId, DecisionId, Incarnation, ModelName, ReplicaName
from headrace.model.slo import Outcome
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, InstantNs, Tokens
from tests.gateway.scenes import (
    MODEL,
    Gateway,
    ObedientEngine,
    ask,
    assert_books_closed,
    reach,
    request,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def obedient(*, fails: bool = False) -> tuple[Gateway, ObedientEngine]:
    gateway = Gateway(lambda clock: [ObedientEngine(clock, fails=fails)])
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    engine.events = lambda: len(gateway.pages.records())
    return gateway, engine


def kinds(gateway: Gateway) -> list[type]:
    return [type(event) for _, event in gateway.pages.records()]


async def test_a_stream_comes_in_order_and_ends_with_the_engines_usage() -> None:
    gateway, engine = obedient()
    stream = gateway.driver.offer(request(1), ask())
    assert stream.decision is not None
    assert stream.queue_ns == 0
    assert len(engine.calls) == 1

    engine.say("one two")
    engine.say(" three")
    chunk = await stream.chunk()
    assert (chunk.data, chunk.end) == (b"one two three", None)
    engine.say(" four")
    engine.end()
    chunk = await stream.chunk()
    assert chunk.data == b" four"
    assert isinstance(chunk.end, Done)
    (row,) = gateway.driver.recent
    assert row.usage is not None
    assert row.usage.output_tokens == 4
    assert kinds(gateway) == [
        ConfigChanged,
        ReplicaUp,
        ReplicaReported,
        RequestArrived,
        FirstToken,
        Ended,
    ]
    assert [row.request for row in gateway.driver.recent] == [1]
    assert gateway.driver.outcomes == {Outcome.SUCCESS: 1}
    gateway.finish()


async def test_a_caller_that_leaves_the_queue_was_never_sent() -> None:
    gateway, engine = obedient()
    first = gateway.driver.offer(request(1, tokens=20_000), ask())
    second = gateway.driver.offer(request(2), ask())
    assert (first.attempt, second.attempt) == (1, None), "the window is full"
    gateway.driver.leave(second.request.id)
    assert isinstance((await second.chunk()).end, Left)
    assert not engine.aborted
    assert gateway.driver.live == 1
    engine.say("x")
    engine.end()
    assert len(engine.calls) == 1
    gateway.finish()


@pytest.mark.parametrize("words", ["", "some words"], ids=["before the first byte", "mid-stream"])
async def test_a_caller_that_leaves_later_has_its_engine_stopped(words: str) -> None:
    gateway, engine = obedient()
    stream = gateway.driver.offer(request(1), ask())
    if words:
        engine.say(words)
    gateway.driver.leave(stream.request.id)
    assert engine.aborted == [1]
    assert isinstance((await stream.chunk()).end, Left)
    assert_books_closed(gateway.driver.plane)

    engine.say("late")  # told all the same, and heard by nobody
    engine.end()
    gateway.driver.leave(stream.request.id)
    assert kinds(gateway)[-1] is CallerLeft
    assert gateway.driver.outcomes == {Outcome.CLIENT_CANCEL: 1}
    gateway.finish()


@pytest.mark.parametrize("ends", ["caller", "engine", "drain"])
async def test_a_stream_that_is_cut_short_keeps_what_it_had_shown(ends: str) -> None:
    gateway, engine = obedient()
    stream = gateway.driver.offer(request(1), ask())
    for when, words in ((30, "one two"), (530, "three")):
        await reach(gateway.clock, when)
        engine.say(words)
    if ends == "caller":
        gateway.driver.leave(stream.request.id)
    elif ends == "drain":
        gateway.driver.end_all()
    else:
        engine.end(outcome=Outcome.ERROR, tells=False)
    (row,) = gateway.driver.recent
    assert row.timing is not None
    assert row.timing.tokens == 3
    assert (row.timing.first_at, row.timing.last_at) == (30 * NS_PER_MS, 530 * NS_PER_MS)
    assert (row.timing.max_gap_ns, row.timing.gaps_over) == (500 * NS_PER_MS, 1)
    assert sum(row.timing.gap_counts) == 2
    assert kinds(gateway).count(FirstToken) == 1
    gateway.finish()


async def test_text_before_the_first_token_is_passed_on_and_counts_nothing() -> None:
    gateway, engine = obedient()
    stream = gateway.driver.offer(request(1), ask())
    engine.tell.produced(AttemptId(1), b" ")
    assert (await stream.chunk()).data == b" "
    assert FirstToken not in kinds(gateway)
    gateway.driver.leave(stream.request.id)
    (row,) = gateway.driver.recent
    assert row.timing is None
    gateway.finish()


async def test_an_engine_that_fails_at_once_is_heard_after_the_event_at_hand() -> None:
    gateway, engine = obedient(fails=True)
    stream = gateway.driver.offer(request(1), ask())
    end = (await stream.chunk()).end
    assert isinstance(end, Fault)
    assert (end.face.status, end.face.code) == (502, "upstream_error")
    assert kinds(gateway)[-2:] == [RequestArrived, Ended]
    assert engine.calls[0].dispatch.attempt == 1
    gateway.finish()


async def test_all_effects_of_an_event_come_before_the_next_event() -> None:
    gateway, engine = obedient()
    gateway.driver.offer(request(1, tokens=20_000), ask())
    for nth in (2, 3):
        assert gateway.driver.offer(request(nth), ask()).attempt is None
    engine.fails = True
    engine.say("x")  # opens the window for both; each fails as soon as it is sent
    events = kinds(gateway)
    assert events[-3:] == [FirstToken, Ended, Ended]
    assert engine.heard[1:] == [events.index(FirstToken) + 1] * 2
    engine.end()
    gateway.finish()


async def test_a_lost_replicas_streams_are_not_told_of_any_more() -> None:
    gateway, engine = obedient()
    stream = gateway.driver.offer(request(1), ask())
    await reach(gateway.clock, 30)
    engine.say("one")
    gateway.driver._post(ReplicaDown(replica=engine.name, incarnation=engine.incarnation))
    assert isinstance((await stream.chunk()).end, Fault)
    await reach(gateway.clock, 500)
    assert ProgressTick not in kinds(gateway)
    engine.say("late")
    gateway.finish()


async def test_the_timer_ends_what_expires_in_the_queue_and_then_rests() -> None:
    gateway, engine = obedient()
    gateway.driver.offer(request(1, tokens=20_000), ask())
    waiting = gateway.driver.offer(request(2), ask())
    assert waiting.attempt is None
    end = (await waiting.chunk()).end
    assert isinstance(end, Fault)
    assert (end.face.status, end.detail.reason) == (504, "expired")
    now, event = gateway.pages.records()[-1]
    assert isinstance(event, TimerDue)
    assert 0 < now <= 2 * NS_PER_S, "when it could not meet its bound any more, or sooner"
    timers = kinds(gateway).count(TimerDue)
    await reach(gateway.clock, 60_000)
    assert kinds(gateway).count(TimerDue) == timers, "nothing waits: nothing to wake for"
    engine.say("x")
    engine.end()
    gateway.finish()


async def test_progress_is_told_at_multiples_of_100_ms_while_streams_move() -> None:
    gateway, engine = obedient()
    gateway.driver.offer(request(1), ask())
    await reach(gateway.clock, 30)
    engine.say("a")
    await reach(gateway.clock, 130)
    engine.say(" b c")
    await reach(gateway.clock, 420)
    engine.say(" d")
    await reach(gateway.clock, 450)
    engine.end()
    await reach(gateway.clock, 900)
    ticks = [(now, e.moved) for now, e in gateway.pages.records() if isinstance(e, ProgressTick)]
    assert ticks == [(TICK_NS, ((1, 1),)), (2 * TICK_NS, ((1, 3),))]
    assert all(now % TICK_NS == 0 for now, _ in ticks)
    gateway.finish()


async def test_reports_are_asked_for_every_poll_period() -> None:
    gateway, engine = obedient()
    await reach(gateway.clock, 3_500)
    assert engine.polls == 4
    told = [now for now, e in gateway.pages.records() if isinstance(e, ReplicaReported)]
    assert told == [nth * NS_PER_S for nth in range(4)]
    gateway.finish()
    await reach(gateway.clock, 10_000)
    assert engine.polls == 4
    assert engine.closed


async def test_a_cleared_cache_is_told_to_the_plane_and_stands_in_the_journal() -> None:
    gateway, engine = obedient()
    gateway.driver.offer(replace(request(1), prefix=(7,), prefix_tokens=Tokens(64)), ask())
    replica = gateway.driver.plane.state.models[ModelName(MODEL)].fleet.replicas[engine.name]
    assert list(replica.prefixes) == [7]
    engine.end()
    await reach(gateway.clock, 1_500)
    engine.tell.forgot(engine)
    assert not replica.prefixes
    told = [(now, e) for now, e in gateway.pages.records() if isinstance(e, ReplicaForgot)]
    forgot = ReplicaForgot(replica=engine.name, incarnation=engine.incarnation)
    assert told == [(1_500 * NS_PER_MS, forgot)]
    gateway.finish()


async def test_stopping_ends_whoever_is_live_and_refuses_newcomers() -> None:
    gateway, engine = obedient()
    streaming = gateway.driver.offer(request(1, tokens=20_000), ask())
    queued = gateway.driver.offer(request(2), ask())
    engine.say("x")
    assert (await streaming.chunk()).data == b"x"
    gateway.driver.stop()
    assert_books_closed(gateway.driver.plane)
    newcomer = gateway.driver.offer(request(3), ask())
    for stream, told in (
        (streaming, ("fail", "shut_down", True)),
        (queued, ("fail", "shut_down", True)),
        (newcomer, ("reject", "shutting_down", False)),
    ):
        end = (await stream.chunk()).end
        assert isinstance(end, Fault)
        detail = end.detail
        assert (detail.outcome, detail.reason, detail.decision_id is not None) == told
        assert end.face.status == 503
    gateway.finish()


async def test_draining_lets_the_running_go_on() -> None:
    gateway, engine = obedient()
    running = gateway.driver.offer(request(1), ask())
    gateway.driver.refuse_newcomers()
    assert isinstance((await gateway.driver.offer(request(2), ask()).chunk()).end, Fault)
    engine.say("x")
    engine.end()
    assert isinstance((await running.chunk()).end, Done)
    gateway.finish()


async def test_a_broken_plane_is_never_asked_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, engine = obedient()
    stopped: list[bool] = []
    driver = gateway.driver
    driver._on_broken = lambda: stopped.append(True)
    running = driver.offer(request(1), ask())
    events = len(gateway.pages.records())

    def impossible(*_: object, **__: object) -> None:
        raise AssertionError("a state that cannot be")

    monkeypatch.setattr(driver, "_handle", impossible)
    with caplog.at_level(logging.CRITICAL):
        newcomer = driver.offer(request(2), ask())
    assert f"journal index {events}" in caplog.text
    assert "a state that cannot be" in caplog.text
    assert stopped == [True]
    assert isinstance(driver.broken, AssertionError)
    for stream in (running, newcomer, driver.offer(request(3), ask())):
        end = (await stream.chunk()).end
        assert isinstance(end, Fault)
        assert (end.face.status, end.face.code) == (500, "internal_error")
        driver.leave(stream.request.id)
    engine.say("x")
    engine.poll()
    await reach(gateway.clock, 5_000)
    driver.stop()
    assert stopped == [True]
    assert len(gateway.pages.records()) == events
    assert engine.closed


async def test_a_refusal_says_what_the_callers_limit_was() -> None:
    gateway, engine = obedient()
    gateway.driver.offer(request(1, "slow"), ask())
    engine.say("x")
    engine.end()
    end = (await gateway.driver.offer(request(2, "slow"), ask()).chunk()).end
    assert isinstance(end, Fault)
    detail = end.detail
    assert (detail.reason, detail.retryable, detail.policy_revision) == ("request_rate", True, 1)
    assert (detail.measured, detail.threshold, detail.margin) == (1, 0, -1)
    assert end.retry_after_ns == 60 * NS_PER_S
    await reach(gateway.clock, 60_000 + 1)
    assert not gateway.driver.offer(request(3, "slow"), ask()).ended
    gateway.finish()


async def test_a_true_length_reaches_the_engine_and_not_the_journal() -> None:
    gateway, engine = obedient()
    gateway.driver.offer(request(1), ask(replay_output=7_654_321))
    assert engine.calls[0].ask.replay_output == 7_654_321
    assert b"7654321" not in repr(gateway.pages.records()).encode()
    gateway.finish()


async def test_time_never_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, _ = obedient()
    await reach(gateway.clock, 50)
    gateway.driver.offer(request(1), ask())
    monkeypatch.setattr(gateway.clock, "now", lambda: InstantNs(0))
    gateway.driver.offer(request(2), ask())
    assert gateway.pages.records()[-1][0] == 50 * NS_PER_MS
    gateway.finish()


async def test_time_is_the_clocks() -> None:
    gateway, _ = obedient()
    await reach(gateway.clock, 12.5)
    gateway.driver.offer(request(1), ask())
    assert gateway.pages.records()[-1][0] == 12.5 * NS_PER_MS
    gateway.finish()


# Engines that come and go ------------------------------------------------------------------------


class Named(ObedientEngine):
    """An obedient engine of another name."""

    def __init__(self, gateway: Gateway, name: str, life: int) -> None:
        super().__init__(gateway.clock)
        self.name, self.incarnation = ReplicaName(name), Incarnation(life)


async def test_an_engine_that_is_added_serves_and_one_that_is_drained_finishes_first() -> None:
    gateway, old = obedient()
    driver = gateway.driver
    driver.offer(request(1), ask())
    new = Named(gateway, "p-1", 2)
    driver.add(new)
    assert driver.ready_replicas == 2
    empty: list[str] = []
    driver.drain(old.name, lambda: empty.append(old.name))
    assert driver.ready_replicas == 1
    driver.offer(request(2), ask())
    assert (len(old.calls), len(new.calls)) == (1, 1)
    old.say("word")
    await reach(gateway.clock, 50)
    assert not empty, "its stream runs"
    old.end()
    assert not empty, "never from within what the engine tells"
    await reach(gateway.clock, 100)
    assert empty == [old.name]
    old.tell.up(old)
    assert driver.ready_replicas == 1, "who is to go does not come back"
    driver.remove(old.name)
    assert old.closed
    new.say("word")
    new.end()
    assert driver.outcomes == {Outcome.SUCCESS: 2}
    assert kinds(gateway).count(ReplicaDraining) == kinds(gateway).count(ReplicaDown) == 1
    gateway.finish()


async def test_an_engine_without_work_is_drained_at_once_and_its_name_may_be_used_again() -> None:
    gateway, old = obedient()
    empty: list[str] = []
    gateway.driver.drain(old.name, lambda: empty.append(old.name))
    await reach(gateway.clock, 1)
    assert empty == [old.name]
    gateway.driver.remove(old.name)
    gateway.driver.add(again := Named(gateway, old.name, 2))
    gateway.driver.offer(request(1), ask())
    assert len(again.calls) == 1
    gateway.driver.remove(again.name)
    assert gateway.driver.outcomes == {Outcome.ERROR: 1}, "removed without draining"
    assert_books_closed(gateway.driver.plane)
    gateway.finish()


@pytest.mark.parametrize("computed_s", [None, 0, 1, 7])
async def test_an_evicted_request_is_told_the_wait_that_was_computed_and_no_less_than_a_second(
    computed_s: int | None,
) -> None:
    wait = None if computed_s is None else DurationNs(computed_s * NS_PER_S)
    stream = Stream(request(1, ttft_ms=5_000), ask(), InstantNs(0))
    out = Fail(
        request=stream.request.id,
        decision=DecisionId(1),
        reason=Reason.QUEUE_PRESSURE,
        retry_after_ns=wait,
    )
    stream.fail(out, InstantNs(2 * NS_PER_S))
    fault = (await stream.chunk()).end
    assert isinstance(fault, Fault)
    assert fault.retry_after_ns == max(1, computed_s or 0) * NS_PER_S
    assert fault.left_ns == 3 * NS_PER_S, "of the five seconds that it gave itself"
