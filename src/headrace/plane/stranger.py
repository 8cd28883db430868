"""What happens when a request names a tenant, model or class that is not configured?

The contract gate alone decides, over evidence in which nothing else says anything; nothing is booked.
"""

from headrace.model.decision import Reject
from headrace.model.demand import Demand
from headrace.model.effect import Concluded, Decided, Entry, Refuse
from headrace.model.evidence import (
    BudgetFacts,
    ContractFacts,
    EntryEvidence,
    EntryRecord,
    WaitFacts,
)
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.request import Request
from headrace.model.slo import Bounds
from headrace.plane.machine import Machine
from headrace.units import Blocks, Bytes, DurationNs, InstantNs, Tokens, WorkNs

OTHER = "other"
"""The label of tenants and classes that the configuration does not know (trap 56)."""


def strange(m: Machine, request: Request, slo_class: ClassName, now: InstantNs) -> None:
    """Refuse a request whose tenant, model or class is not configured: the contract gate alone."""
    settings = m.settings
    tenant = settings.tenants.get(request.tenant)
    known = slo_class in settings.classes
    evidence = bare_evidence(
        request,
        contract_facts(m, request, slo_class),
    )
    decision = settings.config.admission.decide(evidence)
    assert isinstance(decision, Reject), "a strange request cannot pass the contract gate"
    record = EntryRecord(
        request_id=request.id,
        decision_id=m.next_decision(),
        at=now,
        tenant=request.tenant,
        tenant_class=slo_class,
        policy_revision=m.state.revision,
        evidence=evidence,
        decision=decision,
    )
    entry = Entry(
        arrived_at=now,
        input_tokens=request.input_tokens,
        predicted_output=Tokens(0),
        work_ns=WorkNs(0),
    )
    tally = m.state.accounts.tally(
        request.tenant if tenant is not None else TenantId(OTHER),
        slo_class if known else ClassName(OTHER),
    )
    if not request.deferred:
        m.state.accounts.offer(tally, entry)
    row = Concluded(
        request=request.id,
        tenant=request.tenant,
        slo_class=slo_class,
        model=ModelName(request.model),
        entry=entry,
        admitted=False,
        reason=decision.reason,
        outcome=None,
        bounds=_NO_BOUNDS,
        ended_at=now,
        deferred=request.deferred,
    )
    m.out += (
        Decided(record),
        Refuse(request=request.id, decision=record.decision_id, rejection=decision),
        row,
    )
    m.state.accounts.conclude(tally, row)


_NO_BOUNDS = Bounds(ttft_ns=None, gap_ns=DurationNs(0), tpot_ns=DurationNs(0))


def contract_facts(m: Machine, request: Request, slo_class: ClassName) -> ContractFacts:
    """Return what the contract gate finds amiss."""
    settings = m.settings
    tenant, spec = settings.tenants.get(request.tenant), settings.models.get(request.model)
    allowed = known = True
    if spec is not None:
        allowed = tenant is None or tenant.may_ask(spec, request.model)
        known = settings.pool_for(ModelName(spec.name), slo_class) is not None
    return ContractFacts(
        tenant_known=tenant is not None,
        model_known=spec is not None,
        model_allowed=allowed,
        class_allowed=known and slo_class in settings.classes,
        context_limit=Tokens(spec.context_limit if spec is not None else 0),
        output_limit=Tokens(spec.output_limit if spec is not None else 0),
        fan_out_limit=1,
        served=False,
    )


def bare_evidence(request: Request, contract: ContractFacts) -> EntryEvidence:
    """Return evidence in which only the contract facts say anything."""
    nothing = DurationNs(0)
    return EntryEvidence(
        demand=Demand(
            input_tokens=request.input_tokens,
            cached_tokens=Tokens(0),
            output_p50=Tokens(0),
            output_p90=Tokens(0),
            prefill_ns=nothing,
            work_p50_ns=WorkNs(0),
            work_p90_ns=WorkNs(0),
            kv_blocks=Blocks(0),
            kv_bytes=Bytes(0),
            kv_byte_seconds=0,
            residency_ns=nothing,
            input_revision=request.input_revision,
        ),
        max_output=request.max_output,
        fan_out=request.fan_out,
        contract=contract,
        budget=unlimited(request.input_tokens),
        wait=WaitFacts(
            backlog_ns=WorkNs(0),
            own_ahead_ns=WorkNs(0),
            debt_ns=WorkNs(0),
            weights=1,
            own_weight=1,
            rate_micro=0,
        ),
        ttft_ns=None,
        gap_ns=nothing,
        route_ns=nothing,
        first_ns=nothing,
        input_margin_ns=nothing,
        tenant_counter=0,
        least_counter=0,
        cost="",
        own_queued=0,
        own_queue_bound=0,
        ready=0,
        blocks_largest=Blocks(0),
        replicas=(),
        rest_bound_ns=None,
    )


def unlimited(need: Tokens) -> BudgetFacts:
    """Return the balances of a tenant without limits."""
    return BudgetFacts(
        tokens_needed=need,
        tokens_left=None,
        tokens_limit=None,
        tokens_wait_ns=DurationNs(0),
        requests_left=None,
        requests_wait_ns=DurationNs(0),
        parallel_left=None,
    )
