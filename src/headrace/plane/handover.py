"""A request is put aside, to be answered later: offered now, and not again when its turn comes (SLO-4)."""

from headrace.model.effect import Entry
from headrace.model.ids import ClassName, TenantId
from headrace.model.request import Request
from headrace.plane.machine import Machine
from headrace.plane.quote import quote
from headrace.plane.stranger import OTHER
from headrace.units import InstantNs


def put_aside(m: Machine, request: Request, now: InstantNs) -> None:
    """Count a request among the offered that is decided on later; who is unknown by then has no row of its own."""
    settings, found = m.settings, quote(m, request)
    tenant, slo_class = request.tenant, found.slo_class
    tally = m.state.accounts.tally(
        tenant if tenant in settings.tenants else TenantId(OTHER),
        slo_class if slo_class in settings.classes else ClassName(OTHER),
    )
    entry = Entry(
        arrived_at=now,
        input_tokens=request.input_tokens,
        predicted_output=found.output_p50,
        work_ns=found.work_ns,
    )
    m.state.accounts.offer(tally, entry)
    tally.deferred += 1
