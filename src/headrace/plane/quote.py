"""What does the configuration say of a request that is not to be decided on yet?

Its class, what it will cost its tenant, and whether it may be asked for at all. Reads, and changes
nothing: no event, no decision.
"""

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.budget import NOTHING, Take
from headrace.model.decision import Verdict
from headrace.model.evidence import ContractFacts
from headrace.model.ids import ClassName, ModelName
from headrace.model.request import Request
from headrace.plane.machine import Machine
from headrace.plane.stranger import bare_evidence, contract_facts
from headrace.policy.admission.gates import contract
from headrace.policy.predict.demand import demand, take
from headrace.units import Service, Tokens, WorkNs


class Quote(Struct, frozen=True, kw_only=True):
    """What is known of a request beforehand."""

    slo_class: ClassName
    model: ModelName
    """Canonical."""
    service: Service
    """Predicted, in the unit of the model's counters; 0 where the contract gate would refuse it."""
    output_p50: Tokens = Tokens(0)
    """Predicted output; 0 as well."""
    work_ns: WorkNs = WorkNs(0)
    """Predicted work, p50; 0 as well."""
    take: Take = NOTHING
    """What would be reserved of its tenant's limits; nothing as well."""
    verdict: Verdict
    """Of the contract gate, the only one whose word will be the same later on."""


def quote(m: Machine, request: Request) -> Quote:
    """Return what is known of a request beforehand."""
    settings = m.settings
    tenant, spec = settings.tenants.get(request.tenant), settings.models.get(request.model)
    slo_class = settings.class_of(request.slo_class, tenant)
    facts: ContractFacts = contract_facts(m, request, slo_class)
    if spec is not None:
        facts = replace(facts, fan_out_limit=spec.fan_out_limit)
    model = ModelName(request.model if spec is None else spec.name)
    if spec is not None and request.text is not None:
        request = settings.config.input_prediction.fit(m.state.inputs, model, request)
    verdict = contract(bare_evidence(request, facts))
    service, output, work, takes = Service(0), Tokens(0), WorkNs(0), NOTHING
    pool = settings.pool_for(model, slo_class)
    if verdict.reason is None and spec is not None and pool is not None:
        prediction = settings.config.prediction
        groups = prediction.groups_of(request.tenant, slo_class, model, request.input_tokens)
        forecast = prediction.predict(m.state.outputs, groups)
        cap = settings.config.output_budget.cap(model, slo_class, request.max_output)
        need = demand(request, spec, pool.spec, forecast, cap)
        service = settings.prices[model].service(need.input_tokens, 0, need.output_p50)
        output, work = need.output_p50, need.work_p50_ns
        takes = take(request, spec, pool.spec, need, cap)
    return Quote(
        slo_class=slo_class,
        model=model,
        service=service,
        output_p50=output,
        work_ns=work,
        take=takes,
        verdict=verdict,
    )
