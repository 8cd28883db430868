"""Which request goes first, within a tenant and between tenants?

Orders return sort keys that do not change with time, so that queues stay sorted while they wait.
They know deadlines and predicted work, no replicas, and drop nothing: expiry belongs to the plane.
"""

from typing import Annotated, Protocol

from msgspec import Meta, Struct

from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, InstantNs


class Order(Protocol):
    """Which waiting request is next?"""

    @property
    def relegates(self) -> bool:
        """Whether a request past its latest start yields to its tenant's others."""
        ...

    @property
    def lend_after_ns(self) -> DurationNs | None:
        """A tenant whose best request can wait longer lends its turn; None: never."""
        ...

    def key(self, latest_start: InstantNs, request: int) -> int:
        """Return a request's place within its tenant: smaller goes first."""
        ...

    def turn(self, counter: int, head: int) -> int:
        """Return a tenant's place among tenants, from its counter and its first request's key."""
        ...


class Fifo(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="fifo"
):
    """Serve in order of arrival; the baseline the others must beat."""

    @property
    def relegates(self) -> bool:
        """Never."""
        return False

    @property
    def lend_after_ns(self) -> DurationNs | None:
        """Never."""
        return None

    def key(self, latest_start: InstantNs, request: int) -> int:  # noqa: ARG002 - order of arrival
        """Return the order of arrival."""
        return request

    def turn(self, counter: int, head: int) -> int:  # noqa: ARG002 - whoever came first
        """Return the first request's place: tenants do not matter."""
        return head


class TenantFirst(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="tenant_first",
):
    """Feasible, then the tenant furthest under its share, then least slack (FAIR-5).

    Requests that can no longer make it are relegated within their own tenant, so that nobody else
    pays for them. *Turn lending*: a tenant whose best request can wait long, or is hopeless, yields
    its turn to urgent feasible work; its counter stays.
    """

    lend_after_ms: Annotated[float, Meta(gt=0, le=86_400_000)] = 10_000.0
    """Slack beyond which a tenant lends its turn. 10,000: several interactive bounds long."""

    @property
    def relegates(self) -> bool:
        """Always."""
        return True

    @property
    def lend_after_ns(self) -> DurationNs | None:
        """Return the slack beyond which a turn is lent."""
        return DurationNs(round(self.lend_after_ms * NS_PER_MS))

    def key(self, latest_start: InstantNs, request: int) -> int:  # noqa: ARG002 - ties by id
        """Return deadline - remaining work: slack, but for the passing of time."""
        return latest_start

    def turn(self, counter: int, head: int) -> int:  # noqa: ARG002 - the counter alone
        """Return the tenant's virtual counter."""
        return counter


Ordering = Fifo | TenantFirst

FAR = DurationNs(365 * 24 * 3_600 * NS_PER_S)
"""The deadline of work that has none: one year, so that keys stay comparable."""
