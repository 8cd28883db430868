"""Which label does a tenant or class get? Its own if the configuration gives it one, else `other`.

Callers choose names of tenants, classes and models only within these bounds, so none of them can
mint a series (trap 56).
"""

from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.plane.accounts import Accounts, Served, Tally
from headrace.policy.catalog import PlaneConfig

OTHER = "other"
SMALL_BYTES = 4_096
"""Kept accounts that are read sooner than a thread is found."""
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(Accounts).decode


def kept(accounts: Accounts) -> bytes:
    """Return the accounts at one instant, to be read by any thread while the plane goes on.

    A fraction of a microsecond a tally, where adding them up takes several.
    """
    return _ENCODE(accounts)


def opened(content: bytes) -> Accounts:
    """Return the accounts that were `kept`."""
    return _DECODE(content)


class Labels:
    """The labels of one configuration."""

    def __init__(self, config: PlaneConfig, tenants_max: int) -> None:
        """Give the first `tenants_max` tenants a label each, and every class."""
        self._tenants = {one.name: None for one in islice(config.tenants, tenants_max)}
        self._classes = frozenset(one.name for one in config.classes)

    def tenant(self, name: TenantId) -> str:
        """Return a tenant's label."""
        return name if name in self._tenants else OTHER

    def slo_class(self, name: ClassName) -> str:
        """Return a class's label."""
        return name if name in self._classes else OTHER

    def tenants(self) -> Iterator[TenantId]:
        """Yield the tenants with a label of their own."""
        return map(TenantId, self._tenants)

    def tallies(self, accounts: Accounts) -> dict[tuple[str, str], Tally]:
        """Return counts by (tenant, class) label; those without an own label added up."""
        found: dict[tuple[str, str], Tally] = {}
        for tenant, by_class in accounts.tallies.items():
            for slo_class, tally in by_class.items():
                place = (self.tenant(tenant), self.slo_class(slo_class))
                found[place] = _sum(found[place], tally) if place in found else tally
        return found

    def served(
        self, accounts: Accounts, live: Mapping[tuple[ModelName, TenantId], Served]
    ) -> dict[tuple[str, str], Served]:
        """Return what was served by (model, tenant) label, with what those still `live` had."""
        found: dict[tuple[str, str], Served] = {}
        over = (
            ((model, tenant), served)
            for model, by_tenant in accounts.served.items()
            for tenant, served in by_tenant.items()
        )
        for (model, tenant), served in (*over, *live.items()):
            total = found.setdefault((model, self.tenant(tenant)), Served())
            tokens = (served.uncached, served.cached, served.output)
            total.add(tokens, served.service, served.weighted)
            total.emptied += served.emptied
        return found


def _sum(one: Tally, other: Tally) -> Tally:
    """Return a new tally with the counts of both."""
    total = Tally()
    for name in Tally.__struct_fields__:
        mine, more = getattr(one, name), getattr(other, name)
        if isinstance(mine, dict):
            keys = dict.fromkeys((*mine, *more))
            setattr(total, name, {key: mine.get(key, 0) + more.get(key, 0) for key in keys})
        else:
            setattr(total, name, mine + more)
    return total
