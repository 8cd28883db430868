"""Did each tenant get its share of the work that was served?

Shares only compare while tenants are backlogged: who waits for nothing is owed nothing (FAIR-3).
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from headrace.model.effect import Concluded
from headrace.model.ids import TenantId
from headrace.report.run import Offered, ServiceSample
from headrace.report.stats import ratio, rounded
from headrace.units import NS_PER_S, DurationNs, InstantNs

WINDOW_NS = DurationNs(60 * NS_PER_S)
"""Over how long shares are compared. 60 s: what FAIR-3 speaks of."""
SOME = 2
"""Tenants that must be backlogged for a share to mean anything."""


class TenantShare(Struct, frozen=True, kw_only=True):
    """One tenant's part of what was offered and of what was served."""

    tenant: TenantId
    weight: int
    offered_work_ns: int
    served_work_ns: int
    """By the engines' usage, whether or not the objectives were met."""
    offered_share: float | None
    served_share: float | None


class Fairness(Struct, frozen=True, kw_only=True):
    """Served work by tenant, and how far shares strayed while at least two were backlogged."""

    tenants: tuple[TenantShare, ...]
    window_ns: DurationNs
    windows: int
    """Windows in which at least two tenants waited at every sample; 0: nothing to compare."""
    deviation_max: float | None
    """Largest |share - fair share| in such a window, among the tenants that waited throughout;
    the fair share is weight / sum of their weights."""
    worst_tenant: TenantId | None
    worst_at: InstantNs | None
    """End of the window in which it happened."""


def fairness(
    offered: Iterable[Offered],
    rows: Iterable[Concluded],
    samples: Sequence[ServiceSample],
    weights: Mapping[TenantId, int],
    window_ns: DurationNs = WINDOW_NS,
) -> Fairness:
    """Return shares over the whole run and the largest deviation over any window."""
    windows, worst = _deviations(samples, weights, window_ns)
    return Fairness(
        tenants=_shares(offered, rows, weights),
        window_ns=window_ns,
        windows=windows,
        deviation_max=None if worst is None else rounded(worst[0]),
        worst_tenant=None if worst is None else worst[1],
        worst_at=None if worst is None else worst[2],
    )


def _shares(
    offered: Iterable[Offered], rows: Iterable[Concluded], weights: Mapping[TenantId, int]
) -> tuple[TenantShare, ...]:
    asked: dict[TenantId, int] = {}
    for one in offered:
        asked[one.tenant] = asked.get(one.tenant, 0) + one.work_ns
    served = dict.fromkeys(asked, 0)
    for row in rows:
        served[row.tenant] = served.get(row.tenant, 0) + row.work_ns
    all_asked, all_served = sum(asked.values()), sum(served.values())
    return tuple(
        TenantShare(
            tenant=tenant,
            weight=weights.get(tenant, 1),
            offered_work_ns=asked[tenant],
            served_work_ns=served[tenant],
            offered_share=ratio(asked[tenant], all_asked),
            served_share=ratio(served[tenant], all_served),
        )
        for tenant in sorted(asked)
    )


Worst = tuple[float, TenantId, InstantNs]


def _deviations(
    samples: Sequence[ServiceSample], weights: Mapping[TenantId, int], window_ns: DurationNs
) -> tuple[int, Worst | None]:
    """Return how many windows compare, and the largest deviation in any of them.

    A window ends at a sample and begins at the last one that is at least `window_ns` earlier.
    """
    since: dict[TenantId, int] = {}  # from which sample on each tenant has waited without a break
    windows, first = 0, 0
    worst: Worst | None = None
    for last, sample in enumerate(samples):
        since = {
            tenant: since.get(tenant, last)
            for tenant, waiting in sorted(sample.waiting.items())
            if waiting > 0
        }
        while first < last and samples[first + 1].at <= sample.at - window_ns:
            first += 1
        if sample.at - samples[first].at < window_ns:
            continue
        backlogged = [tenant for tenant, index in since.items() if index <= first]
        found = _strayed(samples[first], sample, backlogged, weights)
        if found is None:
            continue
        windows += 1
        if worst is None or found[0] > worst[0]:
            worst = (*found, sample.at)
    return windows, worst


def _strayed(
    begin: ServiceSample,
    end: ServiceSample,
    backlogged: Sequence[TenantId],
    weights: Mapping[TenantId, int],
) -> tuple[float, TenantId] | None:
    """Return who strayed furthest between two samples, or None if shares mean nothing."""
    if len(backlogged) < SOME:
        return None
    served = {t: end.work_ns.get(t, 0) - begin.work_ns.get(t, 0) for t in backlogged}
    total, weight = sum(served.values()), sum(weights.get(t, 1) for t in backlogged)
    if total <= 0:
        return None
    strayed = [(abs(served[t] / total - weights.get(t, 1) / weight), t) for t in sorted(backlogged)]
    return max(strayed, key=lambda item: item[0])
