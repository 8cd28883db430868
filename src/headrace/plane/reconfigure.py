"""What becomes of live work when the configuration changes under it?

Requests end under the revision they began with (ADM-6): nothing admitted is judged anew. What was
taken away ends here: replicas of a pool that is gone are lost with all they hold, and a request that
still waits for something gone fails with the reason it would be refused for. The rest is listed
anew, since orders, weights and windows may differ.
"""

from collections.abc import Callable

from headrace.model.decision import Reason
from headrace.model.effect import Fail
from headrace.model.event import ConfigChanged
from headrace.model.ids import ModelName
from headrace.model.slo import Outcome
from headrace.plane import degrade, dispatch, streams
from headrace.plane.machine import Machine, Resolved
from headrace.plane.state import Live, ModelState, Phase
from headrace.policy.catalog import decode
from headrace.policy.fairness.backlog import Backlog, waiting_key
from headrace.policy.ordering.orders import Place
from headrace.units import InstantNs


def change(m: Machine, event: ConfigChanged, now: InstantNs) -> None:
    """Decide by a new configuration from here on."""
    fresh, state = Resolved(decode(event.config)), m.state
    if m.configured:
        _retire(m, fresh, now)
    before = m.settings.prices if m.configured else {}
    for model, known in state.models.items():
        known.backlog = Backlog()
        state.ledger.shares[model].forget_listings()
    m.configure(fresh)
    degrade.keep(m)
    for model, price in fresh.prices.items():
        if before.get(model) != price:  # nor do the counters of a model that is back hold this unit
            state.ledger.rebase(model, price)
            state.accounts.recost(model)
    state.config, state.source, state.revision = event.config, event.source, event.revision
    for model, known in state.models.items():
        _relist(m, model, known, now)
        m.shares(model).keep(_kept(m, model))
        dispatch.run(m, model, known, now)


def _retire(m: Machine, fresh: Resolved, now: InstantNs) -> None:
    """End, under the old configuration, what the new one has no place for."""
    for model, known in m.state.models.items():
        spec = fresh.models.get(model)
        kept = fresh.pools_of.get(model, []) if spec is not None and spec.name == model else []
        pools = {facts.spec.name for facts in kept}
        for replica in list(known.fleet.replicas.values()):
            if replica.pool not in pools:
                streams.lose(m, known, replica.name, now)
    for live in list(m.state.live.values()):
        reason = _homeless(fresh, live) if live.phase is Phase.QUEUED else None
        if reason is not None:
            dispatch.leave(m, live, m.state.models[live.model], now)
            m.out.append(Fail(request=live.request.id, decision=live.decision, reason=reason))
            m.conclude(live, now, Outcome.ERROR, reason=reason)


def _homeless(fresh: Resolved, live: Live) -> Reason | None:
    """Return why a waiting request cannot go on waiting, or None."""
    if live.request.tenant not in fresh.tenants:
        return Reason.TENANT_UNKNOWN
    spec = fresh.models.get(live.model)
    if spec is None or spec.name != live.model:
        return Reason.MODEL_UNKNOWN
    if live.slo_class not in fresh.classes or fresh.pool_for(live.model, live.slo_class) is None:
        return Reason.CLASS_NOT_ALLOWED
    return None


def _kept(m: Machine, model: ModelName) -> Callable[[str], bool]:
    """Return which nodes of a model's share tree stay: those declared, and those yet to be settled with.

    Else one that comes back meanwhile would be given back what it is not charged with any more.
    """
    flights = [one for one in m.state.ledger.flights.values() if one.model == model]
    owing = {step.key for flight in flights for step in flight.way}
    return lambda key: key in owing or m.settings.declares(key)


def _key(m: Machine, live: Live) -> int:
    """Return a waiting request's place within its queue under the present order."""
    request = live.request
    place = Place(
        request.id, live.deadline, live.latest_start, request.input_tokens, live.demand.work_p50_ns
    )
    return waiting_key(m.settings.order, place, live.entry.arrived_at, m.starve_ns(live.slo_class))


def _relist(m: Machine, model: ModelName, known: ModelState, now: InstantNs) -> None:
    """Queue what waits by the present order and shares, and rank the replicas anew."""
    settings, loads = m.settings, m.state.ledger.loads
    known.stuck.clear()
    for live in m.state.live.values():
        if live.model == model and live.phase is Phase.QUEUED:
            tenant = settings.tenants[live.request.tenant]
            live.way = settings.way(tenant, live.slo_class, live.request.user)
            live.key, live.late = _key(m, live), False
            dispatch.enqueue(m, known, live, again=True)
    for queue in list(known.backlog.queues):
        dispatch.relist(m, model, known, queue, now)
    for replica in known.fleet.replicas.values():
        known.fleet.rerank(replica, loads[replica.incarnation], settings.pools[replica.pool])
