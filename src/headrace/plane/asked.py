"""What does a request come to, and what may admission look at when it decides on it?

A request with all that the configuration, the predictors and the books say of it: gathered once, frozen as
`EntryEvidence`. Decides nothing and books nothing.
"""

from collections.abc import Iterable

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from headrace.model.decision import Decision, LetIn, Reject
from headrace.model.demand import Demand
from headrace.model.deployment import TenantSpec
from headrace.model.evidence import (
    ArrivalFacts,
    BudgetFacts,
    ContractFacts,
    EntryEvidence,
    LengthFacts,
    ReplicaView,
    WaitFacts,
)
from headrace.model.features import Feature
from headrace.model.ids import ClassName, ModelName, PoolName
from headrace.model.ladder import Lesser
from headrace.model.paths import ROOT, tenant_key
from headrace.model.request import Request
from headrace.model.slo import Bounds
from headrace.plane.fleet import Candidate, PoolFacts, view
from headrace.plane.ledger import Quota, window_facts
from headrace.plane.lengths import Lengths
from headrace.plane.machine import Machine
from headrace.plane.scale_facts import expected
from headrace.plane.state import ModelState
from headrace.plane.stranger import bare_evidence, unlimited
from headrace.policy.admission.balances import over_limits
from headrace.policy.admission.gates import OF_THE_MOMENT, Length, nearest
from headrace.policy.fairness.backlog import waiting_key
from headrace.policy.fairness.forecast import debt, stake
from headrace.policy.ordering.orders import FAR, Order, Place
from headrace.policy.predict.demand import demand, take
from headrace.units import (
    Blocks,
    DurationNs,
    InstantNs,
    Tokens,
    WorkNs,
    later,
)

LENGTHS_MAX = 4_096
"""Tenants of a class whose lengths are counted; beyond, the one longest without a request is forgotten."""


class Asked:
    """A request with everything the configuration and the predictors say of it."""

    def __init__(
        self,
        m: Machine,
        request: Request,
        slo_class: ClassName,
        facts: PoolFacts,
        lesser: Lesser | None = None,
    ) -> None:
        settings = m.settings
        self.lesser = lesser
        """In what form it is, if not as asked."""
        self.request = request
        self.tenant = tenant = settings.tenants[request.tenant]
        self.spec = spec = settings.models[request.model]
        self.slo_class, self.facts = slo_class, facts
        self.model = ModelName(spec.name)
        self.class_spec = settings.classes[slo_class]
        prediction = settings.config.prediction
        groups = prediction.groups_of(request.tenant, slo_class, self.model, request.input_tokens)
        forecast = prediction.predict(m.state.outputs, groups)
        ceiling = settings.config.output_budget
        self.output_cap = ceiling.cap(self.model, slo_class, request.max_output)
        self.demand = demand(request, spec, facts.spec, forecast, self.output_cap)
        self.branches = max(1, request.fan_out)
        self.take = take(request, spec, facts.spec, self.demand, self.output_cap)
        limited_sessions = tenant.max_parallel_sessions is not None
        self.session = (request.session or NO_SESSION) if limited_sessions else None
        self.bounds = settings.bounds[slo_class]
        if request.ttft_ns is not None or request.gap_ns is not None:
            self.bounds = self.class_spec.bounds(request.ttft_ns, request.gap_ns)
        profile = facts.spec.profile
        self.first_ns = profile.decode_step_ns(1, request.input_tokens)
        self.ttft_ns = _first_token_bound(self.bounds, self.demand, facts)
        self.starve_ns = m.starve_ns(slo_class)
        self.way = settings.way(tenant, slo_class, request.user)
        self.in_engine_ns: int = self.demand.prefill_ns
        """From dispatch to first token as the engines stand; fixes the latest start. No more prefill
        is before it by then than its dispatch window lets in."""
        self.known = m.state.models[self.model]
        self._by_length = settings.config.admission.length is Length.FAIR

    def evidence(self, m: Machine, now: InstantNs) -> EntryEvidence:
        """Freeze what admission may look at.

        Who is over its tenant's limits is refused whatever the queue and the replicas are like: nobody
        looks at those for it, and refusing it stays cheap (trap 8).
        """
        settings, request, known = m.settings, self.request, self.known
        contract, budget = self._contract(), self._budget(m, now)
        if over_limits(budget) is not None and settings.refuses_over_limits:
            bare = bare_evidence(request, contract)
            return replace(
                bare,
                demand=self.demand,
                budget=budget,
                ttft_ns=self.ttft_ns,
                gap_ns=self.bounds.gap_ns,
                route_ns=settings.route_ns,
                first_ns=self.first_ns,
            )
        ready, largest, views, rest = survey(m, self, now)
        front = nearest(views)
        if front is not None:
            behind = min(front.behind_ns, max(0, front.window_ns - front.prefill_ns))
            first = max(0, front.prefill_left_ns - front.behind_ns)
            self.in_engine_ns = min(first, front.window_ns) + behind + front.prefill_ns
            if front.believed_tokens:
                self.demand = replace(self.demand, cached_tokens=front.believed_tokens)
        profile, margin = self.facts.spec.profile, request.input_margin
        short = profile.prefill_ns(margin, 0, 0, 0, profile.token_budget) if margin else NOTHING_NS
        shares, way = m.shares(self.model), self.way
        counter = shares.counter(way[-1].key)
        least = shares.least(way[-2].key if len(way) > 1 else ROOT)
        return EntryEvidence(
            demand=self.demand,
            max_output=request.max_output,
            fan_out=request.fan_out,
            contract=contract,
            budget=budget,
            wait=self._wait(m, now),
            ttft_ns=self.ttft_ns,
            gap_ns=self.bounds.gap_ns,
            route_ns=settings.route_ns,
            first_ns=self.first_ns,
            input_margin_ns=short,
            tenant_counter=counter,
            least_counter=counter if least is None else least,
            cost=settings.prices[self.model].revision,
            own_queued=known.backlog.tenants.get(tenant_key(way), 0),
            own_queue_bound=self.class_spec.tenant_queue,
            ready=ready,
            blocks_largest=largest,
            replicas=views,
            rest_bound_ns=rest,
            lengths=self._lengths(front, now) if self._by_length else None,
            arrival=self._arrival(m, ready, now),
            mean_ns=self.bounds.mean_ns,
        )

    def _arrival(self, m: Machine, ready: int, now: InstantNs) -> ArrivalFacts | UnsetType:
        """Return which group is expected, where anybody waits for one."""
        if ready and not self.known.backlog.size:
            return UNSET
        return expected(m, self.model, self.slo_class, now, next_one=not ready) or UNSET

    def _lengths(self, front: ReplicaView | None, now: InstantNs) -> LengthFacts | None:
        """Return what was let in of this tenant's, if any of them was refused."""
        seen = self.known.lengths.get(tenant_key(self.way))
        if seen is None or front is None:
            return None
        seen.forget(now)
        if seen.whole.admitted == seen.whole.offered:
            return None
        profile, tokens = self.facts.spec.profile, seen.long_tokens()
        decodes, context, budget = front.decodes, front.context_tokens, profile.token_budget
        return LengthFacts(
            offered=seen.whole.offered,
            admitted=seen.whole.admitted,
            long_offered=seen.long.offered,
            long_admitted=seen.long.admitted,
            is_long=seen.is_long(self.request.input_tokens),
            long_prefill_ns=profile.prefill_ns(tokens, 0, decodes, context, budget),
            long_alone_ns=profile.prefill_ns(tokens, 0, 0, 0, budget),
        )

    def learn(self, decision: Decision, now: InstantNs) -> None:
        """Count the request by its length, if it was for the deadline gate alone to refuse it."""
        if not self._by_length:
            return
        if isinstance(decision, Reject) and decision.reason not in OF_THE_MOMENT:
            return
        lengths, key = self.known.lengths, tenant_key(self.way)
        seen = lengths.pop(key, None) or Lengths(at=now)
        lengths[key] = seen
        if len(lengths) > LENGTHS_MAX:
            del lengths[next(iter(lengths))]
        seen.forget(now)
        seen.add(self.request.input_tokens, admitted=isinstance(decision, LetIn))

    def end(self, wait: DurationNs, now: InstantNs) -> InstantNs | None:
        """Return when it is expected to end, `wait` in the queue included; None: nobody asks."""
        if self.tenant.max_parallel_requests is None and self.session is None:
            return None
        steps = self.demand.output_p50 * self.facts.spec.profile.reference_step_ns
        return later(now, DurationNs(wait + self.in_engine_ns + self.first_ns + steps))

    def latest_start(self, now: InstantNs) -> InstantNs:
        """Return when the request must be sent to meet its first-token bound."""
        bound = FAR if self.ttft_ns is None else self.ttft_ns
        return later(now, bound - self.in_engine_ns - self.first_ns)

    def deadline(self, now: InstantNs) -> InstantNs:
        """Return when its first token is due."""
        return later(now, FAR if self.ttft_ns is None else self.ttft_ns)

    def key(self, order: Order, now: InstantNs) -> int:
        """Return its place within its queue."""
        place = Place(
            self.request.id,
            self.deadline(now),
            self.latest_start(now),
            self.request.input_tokens,
            self.demand.work_p50_ns,
        )
        return waiting_key(order, place, now, self.starve_ns)

    def _contract(self) -> ContractFacts:
        tenant, spec = self.tenant, self.spec
        return ContractFacts(
            tenant_known=True,
            model_known=True,
            model_allowed=tenant.may_ask(spec, self.request.model),
            class_allowed=tenant.may_use(self.class_spec),
            context_limit=Tokens(spec.context_limit),
            output_limit=Tokens(spec.output_limit),
            fan_out_limit=spec.fan_out_limit,
            lacking=self._lacking(),
        )

    def _lacking(self) -> Feature | None:
        can = self.spec.features
        return next((one for one in self.request.features if one not in can), None)

    def _budget(self, m: Machine, now: InstantNs) -> BudgetFacts:
        tenant, need = self.tenant, self.take.tokens
        if not limited(tenant):
            return unlimited(need)
        quota = m.state.ledger.quota(tenant, now)
        tokens, requests, most = quota.tokens, quota.requests, tenant.max_parallel_requests
        sessions_left = self._sessions_left(quota)
        missing = 0 if most is None else quota.parallel + self.branches - most
        if sessions_left is not None:
            missing = max(missing, 1 - sessions_left)
        return BudgetFacts(
            tokens_needed=need,
            tokens_left=None if tokens is None else tokens.level,
            tokens_limit=tenant.tpm_limit,
            tokens_wait_ns=NOTHING_NS if tokens is None else tokens.wait_ns(need),
            requests_left=None if requests is None else requests.level,
            requests_wait_ns=NOTHING_NS if requests is None else requests.wait_ns(1),
            parallel_left=None if most is None else most - quota.parallel,
            parallel_limit=most,
            branches=self.branches,
            sessions_left=sessions_left,
            ends_wait_ns=quota.ends_wait_ns(missing, now) if missing > 0 else NOTHING_NS,
            windows=window_facts(tenant, quota, self.take, now),
        )

    def _sessions_left(self, quota: Quota) -> int | None:
        """Return how many sessions more may have requests; None: no limit, or it is one of those."""
        most = self.tenant.max_parallel_sessions
        if most is None or self.session in quota.sessions:
            return None
        return most - len(quota.sessions)

    def fitted(self, largest: Blocks) -> Demand:
        """Return the demand, no larger than a pool: what no pool holds gets all of the largest.

        Only a memory gate that refuses nobody lets such a request in.
        """
        if self.demand.kv_blocks <= largest:
            return self.demand
        return replace(self.demand, kv_blocks=largest)

    def _wait(self, m: Machine, now: InstantNs) -> WaitFacts:
        """Return the work ahead of the queue that it would join."""
        known = self.known
        rate = rate_micro(known, m.settings.serving(self.model, self.slo_class))
        if not known.backlog.size:
            return WaitFacts(
                backlog_ns=WorkNs(0),
                own_ahead_ns=WorkNs(0),
                debt_ns=WorkNs(0),
                weights=1,
                own_weight=1,
                rate_micro=rate,
            )
        return self._wait_behind(m, rate, now)

    def _wait_behind(self, m: Machine, rate: int, now: InstantNs) -> WaitFacts:
        """Return the work ahead where others wait already; `rate` is that of the ready replicas."""
        settings, backlog = m.settings, self.known.backlog
        rivals = settings.rivals(self.model, self.slo_class)
        total = 0
        for name in rivals:
            total += backlog.work.get(name, 0)
        mine, ahead = backlog.queues.get(self.way[-1].key), 0
        if mine is not None:
            ahead = mine.ready.ahead(self.key(settings.order, now), self.request.id)
        owed, shares = 0, m.shares(self.model)
        weights, own = stake(shares, self.way, rivals)
        if settings.order.by_share:
            owed = debt(shares, self.way, settings.prices[self.model], rivals, now)
        return WaitFacts(
            backlog_ns=WorkNs(total),
            own_ahead_ns=WorkNs(ahead),
            debt_ns=WorkNs(owed),
            weights=weights,
            own_weight=own,
            rate_micro=rate,
        )


def rate_micro(known: ModelState, pools: Iterable[PoolName]) -> int:
    """Return what the ready replicas of some pools do: work-seconds per second, in millionths."""
    rate = 0
    for pool in pools:
        rate += known.rates[pool].micro() * known.fleet.ready.get(pool, 0)
    return rate


NOTHING_NS = DurationNs(0)
NO_SESSION = ""
"""The session of all requests that tell none."""


def limited(tenant: TenantSpec) -> bool:
    """Return whether a tenant has any limit of its own but its queue."""
    numbers = (tenant.tpm_limit, tenant.rpm_limit, tenant.max_parallel_requests)
    return bool(tenant.budgets) or (*numbers, tenant.max_parallel_sessions) != _NO_LIMITS


_NO_LIMITS = (None, None, None, None)


def _first_token_bound(bounds: Bounds, wanted: Demand, facts: PoolFacts) -> DurationNs | None:
    """Return the first-token bound; a completion bound leaves what decoding does not need."""
    if bounds.e2e_ns is None:
        return bounds.ttft_ns
    left = max(0, bounds.e2e_ns - wanted.output_p50 * facts.spec.profile.reference_step_ns)
    return DurationNs(left if bounds.ttft_ns is None else min(bounds.ttft_ns, left))


def survey(
    m: Machine, asked: Asked, now: InstantNs
) -> tuple[int, Blocks, tuple[ReplicaView, ...], int | None]:
    """Return ready replicas, their largest pool, views of the best candidates and a bound on the rest."""
    settings, fleet, loads = m.settings, asked.known.fleet, m.state.ledger.loads
    serving = settings.serving(asked.model, asked.slo_class)
    wanted = Candidate.of(m.prefixes[asked.model], asked.request, asked.demand, asked.bounds)
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
