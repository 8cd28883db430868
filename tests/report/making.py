"""Runs made by hand: requests with a known fate, for tests of what reports say about them."""

from collections.abc import Sequence

from headrace.model.decision import Reason
from headrace.model.effect import Concluded, Entry
from headrace.model.engine import Usage
from headrace.model.ids import ClassName, ModelName, ReplicaName, RequestId, TenantId
from headrace.model.meter import Meter, StreamTiming
from headrace.model.slo import Bounds, Moments, Outcome, Slo, indicators, misses
from headrace.report.run import Offered, ReplicaTotals, RunRecord, ServiceSample
from headrace.units import NS_PER_S, DurationNs, InstantNs, Tokens, WorkNs, ms

BOUNDS = Bounds(ttft_ns=ms(2_000), gap_ns=ms(80), tpot_ns=ms(80))
Pair = tuple[Offered, Concluded]


def stream(first_at: InstantNs, gaps_ms: Sequence[float], bounds: Bounds = BOUNDS) -> StreamTiming:
    """Return the timing of a stream by its gaps."""
    meter = Meter(bound_ns=bounds.gap_ns)
    now = first_at
    meter.note(now)
    for gap in gaps_ms:
        now = InstantNs(now + ms(gap))
        meter.note(now)
    return meter.timing()


def served(  # noqa: PLR0913 - each names one thing a test is about
    number: int,
    *,
    at_s: float = 0.0,
    queue_ms: float = 10,
    prefill_ms: float = 90,
    gaps_ms: Sequence[float] = (20, 20, 20),
    tenant: str = "a",
    slo_class: str = "interactive",
    outcome: Outcome = Outcome.SUCCESS,
    reason: Reason | None = None,
    bounds: Bounds = BOUNDS,
    input_tokens: int = 100,
    work_ms: float = 10,
    cached: int = 0,
) -> Pair:
    """Return an admitted request that made `len(gaps_ms) + 1` tokens."""
    arrived = InstantNs(round(at_s * NS_PER_S))
    dispatched = InstantNs(arrived + ms(queue_ms))
    timing = stream(InstantNs(dispatched + ms(prefill_ms)), gaps_ms, bounds)
    assert timing.last_at is not None
    moments = Moments(
        arrived_at=arrived,
        decided_at=arrived,
        dispatched_at=dispatched,
        ended_at=InstantNs(timing.last_at + ms(1)),
        first_decode_ns=ms(15),
    )
    seen = indicators(moments, timing)
    assert seen is not None
    offered = offer(
        number,
        at_s,
        tenant=tenant,
        slo_class=slo_class,
        input_tokens=input_tokens,
        output_tokens=timing.tokens,
        work_ms=work_ms,
    )
    row = Concluded(
        request=RequestId(number),
        tenant=offered.tenant,
        slo_class=offered.slo_class,
        model=ModelName("llama"),
        entry=entry(offered),
        admitted=True,
        reason=reason,
        outcome=outcome,
        bounds=bounds,
        replica=ReplicaName("r0"),
        usage=Usage(
            input_tokens=Tokens(input_tokens),
            cached_tokens=Tokens(cached),
            output_tokens=timing.tokens,
        ),
        indicators=seen,
        timing=timing,
        missed=misses(seen, bounds),
        work_ns=offered.work_ns,
        ended_at=moments.ended_at,
    )
    return offered, row


def lost(  # noqa: PLR0913 - each names one thing a test is about
    number: int,
    *,
    at_s: float = 0.0,
    after_ms: float = 3_000,
    outcome: Outcome = Outcome.TIMEOUT,
    reason: Reason | None = Reason.EXPIRED,
    replica: str | None = None,
    tenant: str = "a",
    slo_class: str = "interactive",
    input_tokens: int = 100,
    work_ms: float = 10,
) -> Pair:
    """Return an admitted request that ended before its first token."""
    offered = offer(
        number,
        at_s,
        tenant=tenant,
        slo_class=slo_class,
        input_tokens=input_tokens,
        output_tokens=10,
        work_ms=work_ms,
    )
    row = Concluded(
        request=offered.request,
        tenant=offered.tenant,
        slo_class=offered.slo_class,
        model=ModelName("llama"),
        entry=entry(offered),
        admitted=True,
        reason=reason,
        outcome=outcome,
        bounds=BOUNDS,
        replica=None if replica is None else ReplicaName(replica),
        ended_at=InstantNs(offered.at + ms(after_ms)),
    )
    return offered, row


def refused(  # noqa: PLR0913 - each names one thing a test is about
    number: int,
    *,
    at_s: float = 0.0,
    reason: Reason | None = Reason.DEADLINE_QUEUE,
    tenant: str = "a",
    slo_class: str = "interactive",
    input_tokens: int = 100,
    work_ms: float = 10,
) -> Pair:
    """Return a request that was rejected; without a reason it left before a decision."""
    offered = offer(
        number,
        at_s,
        tenant=tenant,
        slo_class=slo_class,
        input_tokens=input_tokens,
        output_tokens=10,
        work_ms=work_ms,
    )
    row = Concluded(
        request=offered.request,
        tenant=offered.tenant,
        slo_class=offered.slo_class,
        model=ModelName("llama"),
        entry=entry(offered),
        admitted=False,
        reason=reason,
        outcome=None,
        bounds=BOUNDS,
        ended_at=offered.at,
    )
    return offered, row


def offer(  # noqa: PLR0913 - one record
    number: int,
    at_s: float,
    *,
    tenant: str,
    slo_class: str,
    input_tokens: int,
    output_tokens: int,
    work_ms: float,
) -> Offered:
    """Return an offered request."""
    return Offered(
        request=RequestId(number),
        at=InstantNs(round(at_s * NS_PER_S)),
        tenant=TenantId(tenant),
        slo_class=ClassName(slo_class),
        input_tokens=Tokens(input_tokens),
        output_tokens=Tokens(output_tokens),
        work_ns=WorkNs(ms(work_ms)),
    )


def entry(offered: Offered) -> Entry:
    """Return where a request stood when it entered."""
    return Entry(
        arrived_at=offered.at,
        input_tokens=offered.input_tokens,
        predicted_output=Tokens(7),
        work_ns=offered.work_ns,
    )


def run(  # noqa: PLR0913 - each names one thing a test is about
    pairs: Sequence[Pair],
    *,
    label: str = "tenant_first",
    span_s: float = 10.0,
    trace_hash: str = "cafe" * 16,
    seed: int = 1,
    slos: tuple[Slo, ...] = (),
    samples: Sequence[ServiceSample] = (),
    replicas: Sequence[ReplicaTotals] = (),
) -> RunRecord:
    """Return the record of a run."""
    rows = sorted((row for _, row in pairs), key=lambda row: (row.ended_at, row.request))
    return RunRecord(
        label=label,
        scenario="by hand",
        seed=seed,
        trace_hash=trace_hash,
        span_ns=DurationNs(round(span_s * NS_PER_S)),
        end_ns=max((row.ended_at for row in rows), default=InstantNs(0)),
        offered=[offered for offered, _ in pairs],
        rows=rows,
        slos=slos,
        samples=list(samples),
        replicas=list(replicas),
    )
