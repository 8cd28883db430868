"""What happens when a request arrives: decide, book, queue, or refuse."""

from headrace.model.decision import Degrade, LetIn, Reason, Reject
from headrace.model.effect import Concluded, Decided, Entry, Fail, Refuse
from headrace.model.evidence import EntryRecord
from headrace.model.ids import ClassName, ModelName, RequestId
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.plane.asked import Asked, rate_micro
from headrace.plane.degrade import decide
from headrace.plane.dispatch import at_once, enqueue, leave, relist
from headrace.plane.machine import Machine
from headrace.plane.scaler import offered
from headrace.plane.state import Live, ModelState
from headrace.plane.stranger import strange
from headrace.policy.fairness.forecast import stake
from headrace.units import DurationNs, InstantNs, WorkNs, time_for


def arrive(m: Machine, request: Request, now: InstantNs) -> ModelName | None:
    """Decide on a request, and send, queue or refuse it (ADM-1..6).

    Returns the model whose backlog it changed, or None.
    """
    settings = m.settings
    assert request.id not in m.state.live, f"{request.id} arrived twice"
    tenant = settings.tenants.get(request.tenant)
    spec = settings.models.get(request.model)
    slo_class = settings.class_of(request.slo_class, tenant)
    facts = settings.pool_for(ModelName(spec.name), slo_class) if spec is not None else None
    if tenant is None or spec is None or slo_class not in settings.classes or facts is None:
        strange(m, request, slo_class, now)
        return None
    if request.text is not None:
        fit = settings.config.input_prediction.fit
        request = fit(m.state.inputs, ModelName(spec.name), request)
    asked = Asked(m, request, slo_class, facts)
    found = decide(m, asked, now)
    form, decision = found.asked, found.decision
    record = EntryRecord(
        request_id=request.id,
        decision_id=m.next_decision(),
        at=now,
        tenant=request.tenant,
        tenant_class=slo_class,
        policy_revision=m.state.revision,
        evidence=found.evidence,
        decision=decision,
        ladder=found.ladder,
    )
    m.out.append(Decided(record))
    found.learnt_on(asked).learn(decision, now)
    entry = Entry(
        arrived_at=now,
        input_tokens=request.input_tokens,
        predicted_output=asked.demand.output_p50,
        work_ns=asked.demand.work_p50_ns,
    )
    tally = m.state.accounts.tally(request.tenant, slo_class)
    if not request.deferred:
        m.state.accounts.offer(tally, entry)
        offered(m, asked, now)
    if isinstance(decision, Reject):
        row = _refused(request, asked, entry, decision, now)
        m.out += (
            Refuse(request=request.id, decision=record.decision_id, rejection=decision),
            row,
        )
        m.state.accounts.conclude(tally, row)
        m.count_over(row, repeat=request.repeat)
        return None
    level = decision.lesser.level if isinstance(decision, Degrade) else 0
    m.state.accounts.admit(tally, level, deferred=request.deferred, sent=False)
    live = _admitted(m, form, record, entry, now)
    if at_once(m, form.known, live, now):
        return None
    _enqueue(m, form, live, now)
    return form.model


def _admitted(
    m: Machine,
    asked: Asked,
    record: EntryRecord,
    entry: Entry,
    now: InstantNs,
) -> Live:
    """Reserve quota for a request that was let in, and keep its books from here on."""
    decided = record.decision
    assert isinstance(decided, LetIn), "it was let in"
    request, bounds, known = asked.request, asked.bounds, asked.known
    m.state.ledger.hold(
        request.id,
        asked.tenant,
        asked.take,
        now,
        branches=asked.branches,
        session=asked.session,
        charged=decided.charged,
        ends_at=asked.end(decided.wait_ns, now),
    )
    order, deadline = m.settings.order, asked.deadline(now)
    live = m.state.live[request.id] = Live(
        request=request,
        model=asked.model,
        slo_class=asked.slo_class,
        demand=asked.fitted(record.evidence.blocks_largest),
        bounds=bounds,
        entry=entry,
        decision=record.decision_id,
        revision=m.state.revision,
        deadline=deadline,
        latest_start=asked.latest_start(now),
        key=asked.key(order, now),
        way=asked.way,
        first_ns=asked.first_ns,
        output_cap=asked.output_cap,
        lesser=asked.lesser,
    )
    lend = order.lend_after_ns
    if lend is not None and deadline - now <= lend:
        known.pace.forget(now)
        known.pace.add(asked.slo_class, asked.demand.work_p50_ns)
    return live


def _enqueue(m: Machine, asked: Asked, live: Live, now: InstantNs) -> None:
    """Queue a request and make room if its class is full."""
    enqueue(m, asked.known, live)
    relist(m, asked.model, asked.known, live.way[-1].key, now)
    if asked.known.backlog.queued.get(asked.slo_class, 0) > asked.class_spec.queue:
        _push_out(m, asked.model, asked.known, asked.slo_class, now)


def _push_out(
    m: Machine, model: ModelName, known: ModelState, slo_class: ClassName, now: InstantNs
) -> None:
    """End the last request of the queue furthest over its share, never simply the newcomer."""
    queue = known.backlog.furthest_over(m.settings.order, m.shares(model), slo_class)
    last = queue.late.last() or queue.ready.last()
    assert last is not None
    live = m.state.live[RequestId(last[1])]
    leave(m, live, known, now)
    left = WorkNs(queue.ready.total + queue.late.total)
    m.out.append(
        Fail(
            request=live.request.id,
            decision=live.decision,
            reason=Reason.QUEUE_PRESSURE,
            retry_after_ns=_drained_after(m, known, live, left),
        )
    )
    m.conclude(live, now, Outcome.ERROR, reason=Reason.QUEUE_PRESSURE)


def _drained_after(m: Machine, known: ModelState, live: Live, left: WorkNs) -> DurationNs | None:
    """Return when what waits on the same path will have drained at its due share; None: nothing is ready."""
    rate = rate_micro(known, m.settings.serving(live.model, live.slo_class))
    if not rate:
        return None
    rivals = m.settings.rivals(live.model, live.slo_class)
    weights, own = stake(m.shares(live.model), live.way, rivals)
    everything = sum(known.backlog.work.get(name, 0) for name in rivals)
    return time_for(min(everything, left * weights // own), rate)


def _refused(
    request: Request, asked: Asked, entry: Entry, decision: Reject, now: InstantNs
) -> Concluded:
    return Concluded(
        request=request.id,
        tenant=request.tenant,
        slo_class=asked.slo_class,
        model=asked.model,
        entry=entry,
        admitted=False,
        reason=decision.reason,
        outcome=None,
        bounds=asked.bounds,
        ended_at=now,
        deferred=request.deferred,
    )
