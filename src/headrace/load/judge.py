"""What did an answer come to, held against what its class promises?

The same row as the plane makes of a request, made of what its caller saw, so that live replays are
told in the figures of every other run. Where a server says nothing of why it refused, 429 counts as a
limit of the caller's and everything else as an upstream's error; the report's client part has the
statuses themselves.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from headrace.load.caller import Answer, Failure
from headrace.model.decision import Reason
from headrace.model.effect import Concluded, Entry
from headrace.model.engine import Usage
from headrace.model.ids import ClassName, ModelName, ReplicaName, RequestId, TenantId
from headrace.model.meter import StreamTiming
from headrace.model.profile import Profile
from headrace.model.slo import Bounds, Moments, Outcome, indicators, misses
from headrace.report.run import Offered
from headrace.trace.row import TraceRow
from headrace.units import DurationNs, InstantNs, Tokens, WorkNs

SERVER = ReplicaName("server")
"""What stands for whichever replica it was: callers see one server."""
_OK, _DEFERRED, _LIMITED = 200, 202, 429
_KNOWN = frozenset(Reason)


class Terms(Struct, frozen=True, kw_only=True):
    """What a row is judged by."""

    slo_class: ClassName
    bounds: Bounds
    profile: Profile


class Sent(Struct, frozen=True, kw_only=True):
    """One request as the log of a replay has it; times in ms, from the start where not spans."""

    id: int
    """Its place in the trace, from 1."""
    tenant: TenantId
    slo_class: ClassName
    scheduled_ms: float
    sent_ms: float
    late_ms: float
    input_tokens: Tokens
    """As the trace has it."""
    output_tokens: Tokens | None
    """As the server counted it; None if it did not say."""
    status: int
    code: str | None
    reason: str | None
    failure: Failure | None
    """Why it is not whole, where no server said so."""
    finished: bool
    """The stream came to its own end."""
    met: bool
    ttft_ms: float | None
    gap_ms_max: float | None
    tpot_ms: float | None
    e2e_ms: float


def offered(request: RequestId, row: TraceRow, terms: Terms) -> Offered:
    """Return a row as part of the offered population."""
    assert row.tenant is not None, "a live trace names its tenants"
    return Offered(
        request=request,
        at=row.at,
        tenant=row.tenant,
        slo_class=terms.slo_class,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        work_ns=terms.profile.work_ns(row.input_tokens, 0, row.output_tokens),
    )


def concluded(
    request: RequestId, row: TraceRow, answer: Answer, terms: Terms, model: ModelName
) -> Concluded:
    """Return what became of a row, by what its caller saw."""
    base = offered(request, row, terms)
    admitted, reason, outcome = _fate(answer)
    timing = _timing(answer)
    usage, seen = _usage(answer, row), None
    if admitted:
        dispatched = answer.sent_at + (answer.queue_ns or 0)
        moments = Moments(
            arrived_at=answer.sent_at,
            decided_at=answer.sent_at,
            dispatched_at=InstantNs(min(dispatched, timing.first_at or dispatched)),
            ended_at=answer.ended_at,
            first_decode_ns=DurationNs(0),
        )
        seen = indicators(moments, timing)
    return Concluded(
        request=request,
        tenant=base.tenant,
        slo_class=base.slo_class,
        model=model,
        entry=Entry(
            arrived_at=answer.sent_at,
            input_tokens=row.input_tokens,
            predicted_output=Tokens(0),
            work_ns=base.work_ns,
        ),
        admitted=admitted,
        reason=reason,
        outcome=outcome,
        bounds=terms.bounds,
        replica=SERVER if seen is not None else None,
        usage=usage,
        indicators=seen,
        timing=timing if admitted else None,
        missed=() if seen is None else misses(seen, terms.bounds),
        work_ns=WorkNs(0)
        if usage is None
        else terms.profile.work_ns(usage.input_tokens, 0, usage.output_tokens),
        ended_at=answer.ended_at,
        deferred=answer.status == _DEFERRED,
    )


def _fate(answer: Answer) -> tuple[bool, Reason | None, Outcome | None]:
    """Return whether it was admitted, why it ended early, and how."""
    reason = Reason(answer.reason) if answer.reason in _KNOWN else None
    if answer.status == _OK or answer.entered:
        return True, reason, _outcome(answer)
    if answer.failure is Failure.STOPPED and not answer.status:
        return False, None, None  # we left before a decision was told
    if answer.status == _DEFERRED:
        return False, None, None  # put aside: nobody here waits for what becomes of it
    if reason is None:
        limited = answer.status == _LIMITED
        reason = Reason.REQUEST_RATE if limited else Reason.UPSTREAM_ERROR
    return False, reason, None


def _outcome(answer: Answer) -> Outcome:
    if answer.failure is Failure.STOPPED:
        return Outcome.CLIENT_CANCEL
    if answer.failure is Failure.TIMEOUT or answer.reason in (Reason.EXPIRED, Reason.WAITED_OUT):
        return Outcome.TIMEOUT
    whole = answer.status == _OK and answer.complete and answer.failure is None
    return Outcome.SUCCESS if whole else Outcome.ERROR


def _timing(answer: Answer) -> StreamTiming:
    """Return the stream in tokens."""
    return answer.timing.counted(answer.output_tokens or 0)


def _usage(answer: Answer, row: TraceRow) -> Usage | None:
    if answer.output_tokens is None:
        return None
    given = row.input_tokens if answer.input_tokens is None else answer.input_tokens
    return Usage(
        input_tokens=given,
        cached_tokens=answer.cached_tokens or Tokens(0),
        output_tokens=answer.output_tokens,
    )


def logged(row: TraceRow, answer: Answer, end: Concluded) -> Sent:
    """Return a request's line of the log."""
    seen = end.indicators
    tpot = None if seen is None else seen.tpot_ns()
    return Sent(
        id=end.request,
        tenant=end.tenant,
        slo_class=end.slo_class,
        scheduled_ms=_ms(row.at),
        sent_ms=_ms(answer.sent_at),
        late_ms=_ms(max(0, answer.sent_at - row.at)),
        input_tokens=row.input_tokens,
        output_tokens=answer.output_tokens,
        status=answer.status,
        code=answer.code,
        reason=answer.reason,
        failure=answer.failure,
        finished=answer.complete,
        met=end.met,
        ttft_ms=None if seen is None else _ms(seen.ttft_ns),
        gap_ms_max=None if seen is None or seen.tokens == 1 else _ms(seen.max_stall_ns),
        tpot_ms=None if tpot is None else _ms(tpot),
        e2e_ms=_ms(answer.ended_at - answer.sent_at),
    )


def _ms(ns: float) -> float:
    return round(ns / 1_000_000, 3)


def answer_name(answer: Answer) -> str:
    """Return what came back in a few words, for counting."""
    if not answer.status:
        return answer.failure or "nothing"
    name = str(answer.status) if answer.code is None else f"{answer.status} {answer.code}"
    return name if answer.failure is None else f"{name}, {answer.failure}"


Judge = Callable[[TraceRow], Terms]
"""Says what a row is judged by."""
Answered = Sequence[tuple[int, Answer]]
"""(index of the row, what came back)."""
