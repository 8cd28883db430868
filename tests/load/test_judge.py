"""What callers saw becomes the row that every figure is made of."""

import pytest
from msgspec.structs import replace

from headrace.config.profiles import load_profile
from headrace.load.caller import Answer, Failure
from headrace.load.judge import Terms, answer_name, concluded, logged
from headrace.load.replay import Replay, Setting
from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec
from headrace.model.effect import Concluded
from headrace.model.ids import ClassName, ModelName, RequestId, TenantId
from headrace.model.meter import NO_STREAM, Meter
from headrace.model.slo import Indicator, Outcome
from headrace.report.groups import EntryResult
from headrace.report.live import report_of
from headrace.trace.row import TraceRow
from headrace.units import InstantNs, Tokens, ms

TERMS = Terms(
    slo_class=ClassName("interactive"),
    bounds=ClassSpec(name="interactive", ttft_ms=2_000, itl_ms=80).bounds(None, None),
    profile=load_profile("h100-8b-tp1"),
)
ROW = TraceRow(
    at=InstantNs(ms(1_000)),
    input_tokens=Tokens(100),
    output_tokens=Tokens(40),
    tenant=TenantId("t"),
)


def streamed(chunks: int = 10, tokens: int | None = 40, first_ms: float = 100) -> Answer:
    """Return a whole answer: chunks 100 ms apart, sent 3 ms late."""
    meter = Meter(bound_ns=ms(80))
    for nth in range(chunks):
        meter.note(InstantNs(ms(1_003 + first_ms + 100 * nth)))
    return Answer(
        status=200,
        sent_at=InstantNs(ms(1_003)),
        ended_at=InstantNs(ms(5_000)),
        timing=meter.timing(),
        queue_ns=ms(20),
        input_tokens=Tokens(101),
        output_tokens=None if tokens is None else Tokens(tokens),
        complete=True,
    )


def refused(status: int, reason: str | None = None, *, entered: bool = False) -> Answer:
    return Answer(
        status=status,
        code="code" if status else None,
        reason=reason,
        entered=entered,
        failure=None if status else Failure.CONNECT,
        sent_at=InstantNs(ms(1_003)),
        ended_at=InstantNs(ms(1_005)),
        timing=NO_STREAM,
    )


def judged(answer: Answer) -> Concluded:
    return concluded(RequestId(1), ROW, answer, TERMS, ModelName("m"))


def test_tokens_of_one_chunk_came_together() -> None:
    row = judged(streamed())

    assert row.met
    assert row.indicators is not None
    assert row.timing is not None
    assert (row.indicators.tokens, sum(row.timing.gap_counts)) == (40, 39)
    assert row.indicators.ttft_ns == ms(100)
    assert row.indicators.queue_ns == ms(20)
    assert row.timing.gaps_over == 9


def test_without_usage_chunks_are_what_there_is() -> None:
    row = judged(streamed(tokens=None))

    assert row.missed == (Indicator.TPOT,)
    assert row.usage is None
    assert row.work_ns == 0


def test_a_late_first_token_is_missed() -> None:
    assert judged(streamed(first_ms=2_001)).missed == (Indicator.TTFT,)


@pytest.mark.parametrize(
    ("answer", "admitted", "reason", "outcome"),
    [
        (refused(503, "deadline_queue"), False, Reason.DEADLINE_QUEUE, None),
        (refused(429), False, Reason.REQUEST_RATE, None),
        (refused(503, "shutting_down"), False, Reason.UPSTREAM_ERROR, None),
        (refused(0), False, Reason.UPSTREAM_ERROR, None),
        (refused(504, "expired", entered=True), True, Reason.EXPIRED, Outcome.TIMEOUT),
        (refused(502, "replica_lost", entered=True), True, Reason.REPLICA_LOST, Outcome.ERROR),
        (replace(streamed(), complete=False), True, None, Outcome.ERROR),
        (replace(streamed(), failure=Failure.BROKEN), True, None, Outcome.ERROR),
        (replace(streamed(), failure=Failure.TIMEOUT), True, None, Outcome.TIMEOUT),
        (replace(streamed(), failure=Failure.STOPPED), True, None, Outcome.CLIENT_CANCEL),
        (replace(refused(0), failure=Failure.STOPPED), False, None, None),
        (replace(refused(202), code=None), False, None, None),
    ],
)
def test_every_end_has_its_place(
    answer: Answer, admitted: bool, reason: Reason | None, outcome: Outcome | None
) -> None:
    row = judged(answer)

    assert (row.admitted, row.reason, row.outcome) == (admitted, reason, outcome)
    assert not row.met


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (streamed(), "200"),
        (refused(503), "503 code"),
        (refused(0), "connect"),
        (replace(streamed(), failure=Failure.TIMEOUT), "200, timeout"),
    ],
)
def test_answers_are_counted_by_what_came_back(answer: Answer, name: str) -> None:
    assert answer_name(answer) == name


def test_the_log_has_what_the_caller_saw() -> None:
    answer = streamed()
    line = logged(ROW, answer, judged(answer))

    assert (line.id, line.scheduled_ms, line.sent_ms, line.late_ms) == (1, 1_000, 1_003, 3)
    assert (line.ttft_ms, line.gap_ms_max, line.finished, line.met) == (100, 100, True, True)


def test_what_was_put_aside_is_offered_deferred_and_not_refused() -> None:
    replayed = Replay([ROW, ROW, ROW], lambda _: TERMS, "m")
    replayed.answered(0, streamed())
    replayed.answered(1, replace(refused(202), code=None))
    replayed.answered(2, refused(503, "deadline_queue"))
    made = Setting(
        label="live", scenario="s", seed=0, url="u", trusted=False, speed=1.0, profile="p"
    )
    total = report_of(replayed.run(made), replayed.client(made, ms(1))).total
    assert {result.value: n for result, n in total.entry.items() if n} == {
        "admitted": 1,
        "deferred": 1,
        "rejected": 1,
    }
    assert (total.offered, total.admitted, total.waiting, total.rejected) == (3, 1, 1, 1)
    assert (total.attained_admitted, total.attained_offered) == (1.0, 0.333333)


def test_a_replay_that_was_stopped_reports_what_it_offered() -> None:
    replayed = Replay([ROW, ROW, ROW, ROW], lambda _: TERMS, "m")
    replayed.answered(1, refused(503, "deadline_queue"))
    replayed.answered(0, streamed())
    replayed.answered(2, replace(refused(0), failure=Failure.LIMIT))
    made = Setting(
        label="live", scenario="s", seed=0, url="u", trusted=False, speed=1.0, profile="p"
    )
    report = report_of(replayed.run(made), replayed.client(made, ms(1)))

    assert report.client is not None
    assert (report.client.trace_rows, report.total.offered, report.client.sent) == (4, 3, 2)
    assert report.client.stopped
    assert report.client.answers == {"200": 1, "503 code": 1, "limit": 1}
    assert report.client.lateness is not None
    assert report.client.lateness.max_ns == ms(3)
    assert report.total.entry[EntryResult.REJECTED] == 2
    assert report.total.met == 1
    assert report.total.work_attained == pytest.approx(1 / 3, abs=1e-5)
