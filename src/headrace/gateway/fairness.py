"""Who had what, and was it their share? Readings of the plane that take two looks, or a pass of all.

Shares only compare while tenants compete: who waits for nothing, or lends its turn, is owed nothing
(FAIR-3).
"""

from collections import deque
from collections.abc import Iterable
from threading import Lock

from msgspec import Struct

from headrace.model.ids import ModelName, TenantId
from headrace.model.paths import tenant_key, tenant_parent, to_tenant
from headrace.plane.accounts import Served
from headrace.plane.core import Plane
from headrace.policy.fairness.shares import Side
from headrace.policy.fairness.vtc import share
from headrace.units import NS_PER_S, DurationNs, InstantNs

Who = tuple[ModelName, TenantId]

WINDOW_NS = DurationNs(60 * NS_PER_S)
"""Over how long shares are compared. 60 s: what FAIR-3 speaks of."""
SPACING_NS = DurationNs(NS_PER_S)
"""Between two looks that are remembered, so that there are never more than one for each second."""


def in_flight(plane: Plane) -> dict[Who, Served]:
    """Return what attempts that go on have had, as the first token and the last tick told."""
    prices, found = plane.settings.prices, dict[Who, Served]()
    for flight in plane.state.ledger.flights.values():
        if flight.streaming:
            served = found.get(who := (flight.model, flight.tenant))
            if served is None:
                served = found[who] = Served()
            tokens = flight.served(None, flight.made)
            service = prices[flight.model].service(*tokens)
            served.add(tokens, service, share(service, to_tenant(flight.way)[-1].weight))
    return found


def counters(plane: Plane, tenants: Iterable[TenantId]) -> dict[Who, int]:
    """Return where the counters of these tenants stand, those of their classes together."""
    settings, found = plane.settings, dict[Who, int]()
    for tenant in tenants:
        spec = settings.tenants.get(tenant)
        if spec is None:
            continue
        keys = [tenant_key(settings.way(spec, name, None)) for name in settings.classes]
        for model, shares in plane.state.ledger.shares.items():
            values = [shares.counters[key] for key in keys if key in shares.counters]
            if values:
                found[model, tenant] = sum(values)
    return found


class Standing(Struct, frozen=True):
    """One tenant that competes for turns, at one instant."""

    among: str
    """Whose children it competes with, in the share tree."""
    weight: int
    weighted: int
    """Service had so far, by weight."""
    emptied: int
    """How often its queue was empty before."""


def competing(
    plane: Plane, live: dict[Who, Served], tenants: Iterable[TenantId]
) -> dict[Who, Standing]:
    """Return those of these tenants who have something waiting and do not lend their turns."""
    state, known = plane.state, set(tenants)
    found: dict[Who, Standing] = {}
    for model, one in state.models.items():
        served = state.accounts.served.get(model, {})
        several: set[Who] = set()
        for queue in one.backlog.queues.values():
            who = model, queue.tenant
            if queue.tenant not in known or queue.side is not Side.URGENT:
                continue
            over, going = served.get(queue.tenant, _NOTHING), live.get(who, _NOTHING)
            among, weight = tenant_parent(queue.way), to_tenant(queue.way)[-1].weight
            weighted = over.weighted + going.weighted
            standing = Standing(among, weight, weighted, over.emptied)
            if found.setdefault(who, standing).among != among:
                several.add(who)  # in several classes at once, its service is not told apart
        for who in several:
            del found[who]
    return found


_NOTHING = Served()


class Shares:
    """Remembers a minute of looks, as far as anybody looks, to tell shares by."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._looks: deque[tuple[InstantNs, dict[Who, Standing]]] = deque()

    def deviations(self, standing: dict[Who, Standing], now: InstantNs) -> dict[Who, float]:
        """Return share less fair share of each tenant that has competed for `WINDOW_NS`.

        Over the time since the last look that is as old; nothing of a model with fewer than two such
        tenants, or of which they had nothing.
        """
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now - WINDOW_NS:
            looks.popleft()
        old = looks[0] if looks and looks[0][0] <= now - WINDOW_NS else None
        if not looks or now - looks[-1][0] >= SPACING_NS:
            looks.append((now, standing))
        return {} if old is None else _deviations(old[1], standing)


def _deviations(before: dict[Who, Standing], now: dict[Who, Standing]) -> dict[Who, float]:
    had: dict[tuple[ModelName, str], dict[TenantId, tuple[int, int]]] = {}
    for (model, tenant), one in now.items():
        then = before.get((model, tenant))
        if then is not None and (then.emptied, then.among) == (one.emptied, one.among):
            gained = max(0, one.weighted - then.weighted) * one.weight
            had.setdefault((model, one.among), {})[tenant] = (gained, one.weight)
    found: dict[Who, float] = {}
    for (model, _), rows in had.items():
        total = sum(gained for gained, _ in rows.values())
        weights = sum(weight for _, weight in rows.values())
        if len(rows) > 1 and total:
            for tenant, (gained, weight) in rows.items():
                found[model, tenant] = gained / total - weight / weights
    return found


class Rising:
    """Counters that a correction may lower: what it takes back is held back from what follows.

    The engine's usage may be less than what was counted by estimate; Prometheus would take a counter
    that falls for one that started anew.
    """

    def __init__(self) -> None:
        """Start with nothing shown."""
        self._shown: dict[tuple[str, ...], int] = {}
        self._lock = Lock()

    def at_least(self, value: int, *series: str) -> int:
        """Return a counter's value, or what was shown of it before if that is more; any thread may."""
        with self._lock:
            shown = self._shown[series] = max(value, self._shown.get(series, 0))
            return shown
