"""What happens when a request arrives: gather evidence, decide, book, queue."""

from headrace.model.decision import Reason, Reject
from headrace.model.demand import Demand
from headrace.model.deployment import ModelSpec, TenantSpec
from headrace.model.effect import Concluded, Decided, Entry, Fail, Refuse
from headrace.model.evidence import (
    BudgetFacts,
    ContractFacts,
    EntryEvidence,
    EntryRecord,
    ReplicaView,
    WaitFacts,
)
from headrace.model.ids import (
    ClassName,
    DecisionId,
    ModelName,
    RequestId,
)
from headrace.model.request import Request
from headrace.model.slo import Bounds, Outcome
from headrace.plane.dispatch import at_once, leave, relist
from headrace.plane.fleet import Candidate, PoolFacts, view
from headrace.plane.machine import Machine
from headrace.plane.state import Live, ModelState
from headrace.plane.stranger import strange, unlimited
from headrace.policy.admission.gates import nearest
from headrace.policy.ordering.orders import FAR
from headrace.policy.predict.demand import demand, output_limit
from headrace.units import (
    Blocks,
    DurationNs,
    InstantNs,
    Tokens,
    WorkNs,
    later,
)


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
    asked = _Asked(m, request, tenant, spec, slo_class, facts)
    evidence = asked.evidence(m, now)
    decision = settings.config.admission.decide(evidence)
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
    m.out.append(Decided(record))
    entry = Entry(
        arrived_at=now,
        input_tokens=request.input_tokens,
        predicted_output=asked.demand.output_p50,
        work_ns=asked.demand.work_p50_ns,
    )
    tally = m.state.accounts.tally(request.tenant, slo_class)
    m.state.accounts.offer(tally, entry)
    if isinstance(decision, Reject):
        row = _refused(request, asked, entry, decision, now)
        m.out += (
            Refuse(request=request.id, decision=record.decision_id, rejection=decision),
            row,
        )
        m.state.accounts.conclude(tally, row)
        return None
    tally.admitted += 1
    live = _admitted(m, asked, evidence, entry, record.decision_id, now)
    if at_once(m, asked.known, live, now):
        return None
    _enqueue(m, asked, live, now)
    return asked.model


class _Asked:
    """A request with everything the configuration and the predictors say of it."""

    def __init__(
        self,
        m: Machine,
        request: Request,
        tenant: TenantSpec,
        spec: ModelSpec,
        slo_class: ClassName,
        facts: PoolFacts,
    ) -> None:
        settings = m.settings
        self.request, self.tenant, self.spec = request, tenant, spec
        self.slo_class, self.facts = slo_class, facts
        self.model = ModelName(spec.name)
        self.class_spec = settings.classes[slo_class]
        prediction = settings.config.prediction
        groups = prediction.groups_of(request.tenant, slo_class, self.model, request.input_tokens)
        forecast = prediction.predict(m.state.outputs, groups)
        self.demand = demand(request, spec, facts.spec, forecast)
        self.bounds = settings.bounds[slo_class]
        if request.ttft_ns is not None or request.gap_ns is not None:
            self.bounds = self.class_spec.bounds(request.ttft_ns, request.gap_ns)
        profile = facts.spec.profile
        self.first_ns = profile.decode_step_ns(1, request.input_tokens)
        self.ttft_ns = _first_token_bound(self.bounds, self.demand, facts)
        self.weight = tenant.weight
        self.in_engine_ns: int = self.demand.prefill_ns
        """From dispatch to first token as the engines stand; fixes the latest start. No more prefill
        is before it by then than its dispatch window lets in."""
        self.known = m.state.models[self.model]

    def evidence(self, m: Machine, now: InstantNs) -> EntryEvidence:
        """Freeze what admission may look at."""
        settings, request, known = m.settings, self.request, self.known
        ready, largest, views, rest = _survey(m, self, now)
        front = nearest(views)
        if front is not None:
            before = min(front.pending_prefill_ns, max(0, front.window_ns - front.prefill_ns))
            self.in_engine_ns = before + front.prefill_ns
        waiting = known.backlog.tenants.get(request.tenant)
        queue = waiting.classes.get(self.slo_class) if waiting is not None else None
        own_queued = queue.ready.size + queue.late.size if queue is not None else 0
        profile, margin = self.facts.spec.profile, request.input_margin
        short = profile.prefill_ns(margin, 0, 0, 0, profile.token_budget) if margin else _NOTHING
        least = known.backlog.least()
        counter = m.state.ledger.counter(self.model, request.tenant)
        floor = counter if least is None else m.state.ledger.counter(self.model, least)
        return EntryEvidence(
            demand=self.demand,
            max_output=request.max_output,
            fan_out=request.fan_out,
            contract=self._contract(),
            budget=self._budget(m, now),
            wait=self._wait(m, counter, now),
            ttft_ns=self.ttft_ns,
            gap_ns=self.bounds.gap_ns,
            route_ns=settings.route_ns,
            first_ns=self.first_ns,
            input_margin_ns=short,
            tenant_counter=counter,
            least_counter=floor,
            cost=settings.prices[self.model].revision,
            own_queued=own_queued,
            own_queue_bound=self.class_spec.tenant_queue,
            ready=ready,
            blocks_largest=largest,
            replicas=views,
            rest_bound_ns=rest,
        )

    def latest_start(self, now: InstantNs) -> InstantNs:
        """Return when the request must be sent to meet its first-token bound."""
        bound = FAR if self.ttft_ns is None else self.ttft_ns
        return later(now, bound - self.in_engine_ns - self.first_ns)

    def _contract(self) -> ContractFacts:
        tenant, spec = self.tenant, self.spec
        return ContractFacts(
            tenant_known=True,
            model_known=True,
            model_allowed=not tenant.models or spec.name in tenant.models,
            class_allowed=not tenant.classes or self.slo_class in tenant.classes,
            context_limit=Tokens(spec.context_limit),
            output_limit=Tokens(spec.output_limit),
            fan_out_limit=spec.fan_out_limit,
        )

    def _budget(self, m: Machine, now: InstantNs) -> BudgetFacts:
        tenant, need = self.tenant, self.reserved_tokens()
        limits = (tenant.tpm_limit, tenant.rpm_limit, tenant.max_parallel_requests)
        if limits == (None, None, None):
            return unlimited(need)
        quota = m.state.ledger.quota(tenant, now)
        tokens, requests, most = quota.tokens, quota.requests, tenant.max_parallel_requests
        return BudgetFacts(
            tokens_needed=need,
            tokens_left=None if tokens is None else tokens.level,
            tokens_limit=tenant.tpm_limit,
            tokens_wait_ns=_NOTHING if tokens is None else tokens.wait_ns(need),
            requests_left=None if requests is None else requests.level,
            requests_wait_ns=_NOTHING if requests is None else requests.wait_ns(1),
            parallel_left=None if most is None else most - quota.parallel,
        )

    def reserved_tokens(self) -> Tokens:
        """Return what quota is reserved: input plus the output the caller allows, else p90."""
        request, output = self.request, self.demand.output_p90
        if request.max_output is not None:
            output = output_limit(request, self.spec, self.facts.spec)
        return Tokens((request.input_tokens + output) * max(1, request.fan_out))

    def _wait(self, m: Machine, counter: int, now: InstantNs) -> WaitFacts:
        """Return the work ahead of a tenant whose counter stands at `counter`."""
        known, rate = self.known, 0
        for pool in m.settings.serving(self.model, self.slo_class):
            rate += known.rates[pool].micro() * known.fleet.ready.get(pool, 0)
        if not known.backlog.size:
            return WaitFacts(
                backlog_ns=WorkNs(0),
                own_ahead_ns=WorkNs(0),
                debt_ns=WorkNs(0),
                weights=self.weight,
                own_weight=self.weight,
                rate_micro=rate,
            )
        return self._wait_behind(m, counter, rate, now)

    def _wait_behind(self, m: Machine, counter: int, rate: int, now: InstantNs) -> WaitFacts:
        """Return the work ahead where others wait already; `rate` is that of the ready replicas."""
        settings, backlog = m.settings, self.known.backlog
        key = settings.order.key(self.latest_start(now), self.request.id)
        mine = backlog.tenants.get(self.request.tenant)
        price, turn = settings.prices[self.model], settings.order.turn(counter, key)
        total = ahead = debt = 0
        weights = self.weight
        for name in settings.rivals(self.model, self.slo_class):
            total += backlog.work.get(name, 0)
            class_weight = settings.classes[name].weight
            if turn == counter:  # else turns go by something else than counters
                debt += backlog.before(name, counter, price, class_weight)
            weights += backlog.weights.get(name, 0)
            queue = mine.classes.get(name) if mine is not None else None
            if queue is not None:
                ahead += queue.ready.ahead(key, self.request.id)
                weights -= self.weight if queue.urgent else 0
        return WaitFacts(
            backlog_ns=WorkNs(total),
            own_ahead_ns=WorkNs(ahead),
            debt_ns=WorkNs(debt),
            weights=weights,
            own_weight=self.weight,
            rate_micro=rate,
        )


_NOTHING = DurationNs(0)


def _first_token_bound(bounds: Bounds, wanted: Demand, facts: PoolFacts) -> DurationNs | None:
    """Return the first-token bound; a completion bound leaves what decoding does not need."""
    if bounds.e2e_ns is None:
        return bounds.ttft_ns
    left = max(0, bounds.e2e_ns - wanted.output_p50 * facts.spec.profile.reference_step_ns)
    return DurationNs(left if bounds.ttft_ns is None else min(bounds.ttft_ns, left))


def _survey(
    m: Machine, asked: _Asked, now: InstantNs
) -> tuple[int, Blocks, tuple[ReplicaView, ...], int | None]:
    """Return ready replicas, their largest pool, views of the best candidates and a bound on the rest."""
    settings, fleet, loads = m.settings, asked.known.fleet, m.state.ledger.loads
    serving = settings.serving(asked.model, asked.slo_class)
    wanted = Candidate.of(m.prefixes[asked.model], asked.request, asked.demand)
    limit = settings.config.routing.candidates
    views: list[ReplicaView] = []
    seen = 0
    rest: int | None = None
    for replica in fleet.cheapest():
        facts = serving.get(replica.pool)
        if facts is None:
            continue
        if len(views) == limit:
            rest = (replica.rank >> 32) * 1_000
            break
        seen |= 1 << replica.slot
        views.append(view(replica, loads[replica.incarnation], facts, wanted, now))
    for replica in fleet.holders(wanted.matches, seen):
        facts = serving.get(replica.pool)
        if facts is not None:
            views.append(view(replica, loads[replica.incarnation], facts, wanted, now))
    m.surveyed = asked.request.id, {one.replica: one for one in views}
    ready = largest = unready = 0
    for pool, facts in serving.items():
        there, total = fleet.ready.get(pool, 0), facts.blocks_total
        ready += there
        if there:
            largest = max(largest, total)
        unready = max(unready, total)
    return ready, Blocks(largest or unready), tuple(views), rest


def _admitted(
    m: Machine,
    asked: _Asked,
    evidence: EntryEvidence,
    entry: Entry,
    decision: DecisionId,
    now: InstantNs,
) -> Live:
    """Reserve quota for a request that was let in, and keep its books from here on."""
    request, bounds, known = asked.request, asked.bounds, asked.known
    m.state.ledger.hold(request.id, asked.tenant, evidence.budget.tokens_needed, now)
    latest = asked.latest_start(now)
    bound = FAR if asked.ttft_ns is None else asked.ttft_ns
    live = m.state.live[request.id] = Live(
        request=request,
        model=asked.model,
        slo_class=asked.slo_class,
        demand=asked.demand,
        bounds=bounds,
        entry=entry,
        decision=decision,
        revision=m.state.revision,
        deadline=later(now, bound),
        latest_start=latest,
        key=m.settings.order.key(latest, request.id),
        first_ns=asked.first_ns,
    )
    lend = m.settings.order.lend_after_ns
    if lend is not None and bound <= lend:
        known.pace.forget(now)
        known.pace.add(asked.slo_class, asked.demand.work_p50_ns)
    return live


def _enqueue(m: Machine, asked: _Asked, live: Live, now: InstantNs) -> None:
    """Queue a request and make room if its class is full."""
    tenant, backlog = live.request.tenant, asked.known.backlog
    least = backlog.least()
    place = (live.key, int(live.request.id))
    work, until = asked.demand.work_p50_ns, live.wait_until
    idle = backlog.add(tenant, asked.weight, asked.slo_class, place, work, until)
    if idle:
        m.state.ledger.lift(asked.model, tenant, least)
    relist(m, asked.model, asked.known, tenant, now)
    if backlog.queued.get(asked.slo_class, 0) > asked.class_spec.queue:
        _push_out(m, asked.known, asked.slo_class, now)


def _push_out(m: Machine, known: ModelState, slo_class: ClassName, now: InstantNs) -> None:
    """End the last request of the tenant furthest over its share, never simply the newcomer."""
    tenant = known.backlog.furthest_over(slo_class)
    assert tenant is not None, "a full class has somebody waiting"
    queue = known.backlog.tenants[tenant].classes[slo_class]
    last = queue.late.last() or queue.ready.last()
    assert last is not None
    live = m.state.live[RequestId(last[1])]
    leave(m, live, known, now)
    m.out.append(
        Fail(request=live.request.id, decision=live.decision, reason=Reason.QUEUE_PRESSURE)
    )
    m.conclude(live, now, Outcome.ERROR, reason=Reason.QUEUE_PRESSURE)


def _refused(
    request: Request, asked: _Asked, entry: Entry, decision: Reject, now: InstantNs
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
    )
