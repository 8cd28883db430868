"""What the plane may know of a row of a trace, and the row of one that fell with its driver."""

from collections.abc import Sequence

from headrace.model.decision import Reason
from headrace.model.effect import Concluded, Entry
from headrace.model.ids import ClassName, ModelName, RequestId, TenantId
from headrace.model.request import Request
from headrace.model.slo import Bounds, Outcome
from headrace.sim.engines import kept_chunks
from headrace.sim.scenario import Scenario
from headrace.trace.row import TraceRow
from headrace.units import DurationNs, InstantNs, Tokens, WorkNs

PREFIX_MAX = 512
"""Leading chunks whose identity a request carries at most."""


def request_of(
    scenario: Scenario, rows: Sequence[TraceRow], at: int, *, repeat: bool = False
) -> Request:
    """Return what the plane may know of a row; ids count from 1 in order of arrival."""
    row = rows[at]
    return Request(
        id=RequestId(at + 1),
        tenant=row.tenant or TenantId(scenario.deployment.tenants[0].name),
        model=row.model or ModelName(scenario.deployment.models[0].name),
        input_tokens=row.input_tokens,
        max_output=row.max_tokens,
        slo_class=row.slo_class,
        prefix=row.prefix[:PREFIX_MAX],
        prefix_tokens=Tokens(row.prefix_tokens),
        prefix_kept=kept_chunks(row),
        optional=row.optional,
        lowest=row.lowest,
        repeat=repeat,
    )


def forgotten(
    scenario: Scenario, rows: Sequence[TraceRow], request: RequestId, now: InstantNs
) -> Concluded:
    """Return the row of a request that came after the checkpoint and fell with the driver."""
    asked = request_of(scenario, rows, request - 1)
    return Concluded(
        request=request,
        tenant=asked.tenant,
        slo_class=asked.slo_class or ClassName(scenario.deployment.classes[0].name),
        model=asked.model,
        entry=Entry(
            arrived_at=rows[request - 1].at,
            input_tokens=asked.input_tokens,
            predicted_output=Tokens(0),
            work_ns=WorkNs(0),
        ),
        admitted=True,
        reason=Reason.RESTARTED,
        outcome=Outcome.ERROR,
        bounds=Bounds(ttft_ns=None, gap_ns=DurationNs(0), tpot_ns=DurationNs(0)),
        ended_at=now,
    )
