"""In what form would a request be served that came now? Told before its prompt is made (DEG-1).

Who retrieves what goes into a prompt can ask for no more than will be kept. Reads, and changes nothing.
"""

from msgspec import Struct

from headrace.model.decision import Verdict
from headrace.model.ids import ClassName, ModelName
from headrace.model.ladder import LEVEL_MAX, Effort
from headrace.model.request import Request
from headrace.plane.degrade import smaller
from headrace.plane.machine import Machine
from headrace.plane.quote import quote


class Outlook(Struct, frozen=True, kw_only=True):
    """What a request gets, as far as that is known of all of its class."""

    model: ModelName
    """What is asked for, canonical."""
    slo_class: ClassName
    verdict: Verdict
    """Of the contract gate: whether it may be asked for at all."""
    level: int = 0
    top_k: int | None = None
    """Optional parts that are kept; None: all."""
    output_part: float = 1.0
    """Share of the output that it allows."""
    effort: Effort | None = None
    """The most reasoning effort; None: as asked."""
    answers: ModelName
    """The model that answers, canonical."""


def outlook(m: Machine, request: Request) -> Outlook:
    """Return what a request would get now; of its prompt nothing need be known."""
    found = quote(m, request)
    model, slo_class = found.model, found.slo_class
    as_asked = Outlook(model=model, slo_class=slo_class, verdict=found.verdict, answers=model)
    known, tenant = m.state.models.get(model), m.settings.tenants.get(request.tenant)
    standing = None if known is None else known.standings.get(slo_class)
    if standing is None or tenant is None or found.verdict.reason is not None:
        return as_asked
    spec = m.settings.classes[slo_class].degrade
    level = min(standing.level, tenant.degrade, request.lowest)
    if spec is None or not level:
        return as_asked
    less = None
    if level == LEVEL_MAX:
        less = smaller(m, m.settings.models[model], tenant, slo_class, spec)
    if less is None:
        level = min(level, LEVEL_MAX - 1)
    return Outlook(
        model=model,
        slo_class=slo_class,
        verdict=found.verdict,
        level=level,
        top_k=spec.keep if level > 1 else None,
        output_part=spec.output_part,
        effort=spec.effort,
        answers=model if less is None else ModelName(less.name),
    )
