"""Load that does not wait: requests leave at their times, whatever became of the others."""

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from headrace.load.caller import Answer, Failure, Now, Place
from headrace.load.lag import LoopLag
from headrace.load.openloop import Ask, Target, encoded, headers, offer
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.meter import NO_STREAM
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_MS, NS_PER_S, InstantNs, Tokens, ms

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def row(at_ms: int, *, tenant: str = "t", slo_class: str | None = None) -> TraceRow:
    return TraceRow(
        at=InstantNs(at_ms * NS_PER_MS),
        input_tokens=Tokens(10),
        output_tokens=Tokens(3),
        max_tokens=Tokens(5),
        tenant=TenantId(tenant),
        slo_class=None if slo_class is None else ClassName(slo_class),
    )


def target(*, trusted: bool = False, connections: int = 100, keyed: bool = True) -> Target:
    return Target(
        place=Place(host="nowhere", port=1),
        model="m",
        keys={TenantId("t"): "key"} if keyed else {},
        gap_ns=lambda _: ms(80),
        trusted=trusted,
        connections=connections,
    )


def answer(sent_at: InstantNs, now: InstantNs, failure: Failure | None = None) -> Answer:
    return Answer(status=200, sent_at=sent_at, ended_at=now, timing=NO_STREAM, failure=failure)


def server(takes_ms: int) -> Ask:
    """Return a server that takes so long over everything."""

    async def ask(_row: TraceRow, _body: bytes, _fields: Mapping[str, str], now: Now) -> Answer:
        sent_at, failure = now(), None
        try:
            await asyncio.sleep(takes_ms / 1_000)
        except asyncio.CancelledError:
            failure = Failure.STOPPED
        return answer(sent_at, now(), failure)

    return ask


async def offered(rows: list[TraceRow], to: Target, ask: Ask) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    await asyncio.sleep(5)  # times count from the start of the replay
    await offer(rows, to, answers.__setitem__, ask_once=ask)
    return answers


async def test_requests_leave_at_their_times_whatever_the_answers_do() -> None:
    rows = [row(at) for at in (0, 100, 100, 250)]

    answers = await offered(rows, target(), server(60_000))

    for nth, one in enumerate(rows):
        assert abs(answers[nth].sent_at - one.at) < NS_PER_MS
        assert abs(answers[nth].ended_at - one.at - 60 * NS_PER_S) < NS_PER_MS


async def test_a_request_beyond_the_connections_is_told_and_not_waited_for() -> None:
    rows = [row(at) for at in (0, 1, 2, 1_500)]

    answers = await offered(rows, target(connections=2), server(1_000))

    assert [answers[nth].failure for nth in range(4)] == [None, None, Failure.LIMIT, None]
    assert abs(answers[2].ended_at - 2 * NS_PER_MS) < NS_PER_MS


async def test_what_is_stopped_tells_of_everything_that_was_sent() -> None:
    rows = [row(at) for at in (0, 100, 10_000)]
    answers: dict[int, Answer] = {}
    loop = asyncio.get_running_loop()
    offering = loop.create_task(offer(rows, target(), answers.__setitem__, ask_once=server(5_000)))

    loop.call_later(1, offering.cancel)
    with pytest.raises(asyncio.CancelledError):
        await offering

    assert {nth: one.failure for nth, one in answers.items()} == {
        0: Failure.STOPPED,
        1: Failure.STOPPED,
    }


async def test_true_lengths_are_told_to_those_who_trust_them_alone() -> None:
    plain = headers(row(0, slo_class="batch"), target())
    trusted = headers(row(0), target(trusted=True))

    assert plain == {"Authorization": "Bearer key", "x-llm-d-inference-objective": "batch"}
    assert trusted == {
        "Authorization": "Bearer key",
        "x-headrace-replay-input": "10",
        "x-headrace-replay-output": "3",
    }
    assert headers(row(0), target(keyed=False)) == {}


async def test_the_body_says_what_the_caller_of_the_trace_said() -> None:
    told = msgspec.json.decode(encoded(row(0), target(), 0))
    named = msgspec.structs.replace(row(0), model=ModelName("own"), max_tokens=None)

    assert told["model"] == "m"
    assert told["max_tokens"] == 5
    assert told["stream_options"] == {"include_usage": True}
    assert msgspec.json.decode(encoded(named, target(), 0)).keys().isdisjoint({"max_tokens"})
    assert msgspec.json.decode(encoded(named, target(), 0))["model"] == "own"


async def test_lag_is_how_late_the_loop_comes_and_a_stall_counts_in_full() -> None:
    shift = 0

    def now() -> InstantNs:
        return InstantNs(round(asyncio.get_running_loop().time() * NS_PER_S) + shift)

    lag = LoopLag(now)
    await asyncio.sleep(1.005)
    quiet = lag.p99_ns()
    shift += 500 * NS_PER_MS  # as if one callback had taken half a second
    await asyncio.sleep(0.01)
    lag.stop()

    assert quiet < NS_PER_MS
    assert lag.p99_ns() >= ms(450)
