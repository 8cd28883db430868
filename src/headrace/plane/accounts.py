"""The denominators: what was offered, taken, refused and met, by tenant and class (SLO-5).

Beside them what each tenant had of each model, by which shares are compared (FAIR-3). Counts only. Attainment and goodput are made from them where they are shown, never stored.
"""

from msgspec import Struct

from headrace.model.decision import Reason
from headrace.model.effect import Concluded, Entry
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.slo import Outcome
from headrace.units import SUM_MAX, InstantNs


class Tally(Struct):
    """The counts of one (tenant, class)."""

    offered: int = 0
    input_tokens: int = 0
    predicted_output: int = 0
    offered_work_ns: int = 0
    deferred: int = 0
    """Of the offered, those put aside to be answered later."""
    admitted: int = 0
    """Those that were deferred are among them once they were sent to a replica."""
    taken_up: int = 0
    """Of the admitted, those that were deferred; one that an engine failed at is taken up again."""
    rejected: dict[Reason, int] = {}
    left_before: int = 0
    degraded: dict[int, int] = {}
    """Of the admitted, those in a lesser form, by level."""
    outcomes: dict[Outcome, int] = {}
    """How admitted requests ended; what is missing from `admitted` is still live."""
    ended_early: dict[Reason, int] = {}
    met: int = 0
    met_work_ns: int = 0
    met_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 0
    """Attempts sent to a replica: more than one for a request that was tried again."""
    lent: int = 0
    """Of them, those whose turn a tenant further under its share lent."""
    relegated: int = 0
    """Requests that waited past their latest start, and went behind their tenant's others."""


class Served(Struct):
    """What one tenant had of one model, by attempts that are over; as served, never as predicted."""

    uncached: int = 0
    """Input tokens computed."""
    cached: int = 0
    """Input tokens found in a prefix cache."""
    output: int = 0
    service: int = 0
    """In the unit of the cost function."""
    weighted: int = 0
    """The same by weight: what the tenant's counter was charged, lifts apart."""
    turn_at: InstantNs = InstantNs(0)
    """When it last had a turn."""
    emptied: int = 0
    """How often its last waiting request left the queue."""

    def add(self, tokens: tuple[int, int, int], service: int, weighted: int) -> None:
        """Count (uncached, cached, output) tokens and the service that they were."""
        self.uncached += tokens[0]
        self.cached += tokens[1]
        self.output += tokens[2]
        self.service = min(SUM_MAX, self.service + service)
        self.weighted = min(SUM_MAX, self.weighted + weighted)


class Accounts(Struct):
    """All counts; bounded by the configuration's tenants, classes and models."""

    tallies: dict[TenantId, dict[ClassName, Tally]] = {}
    served: dict[ModelName, dict[TenantId, Served]] = {}

    def tally(self, tenant: TenantId, slo_class: ClassName) -> Tally:
        """Return the counts of a (tenant, class), made on first use."""
        by_class = self.tallies.get(tenant)
        if by_class is None:
            by_class = self.tallies[tenant] = {}
        tally = by_class.get(slo_class)
        if tally is None:
            tally = by_class[slo_class] = Tally()
        return tally

    def had(self, model: ModelName, tenant: TenantId) -> Served:
        """Return what a tenant had of a model, made on first use."""
        by_tenant = self.served.get(model)
        if by_tenant is None:
            by_tenant = self.served[model] = {}
        served = by_tenant.get(tenant)
        if served is None:
            served = by_tenant[tenant] = Served()
        return served

    def recost(self, model: ModelName) -> None:
        """Count a model's service anew, in another unit; tokens stay what they are."""
        for served in self.served.get(model, {}).values():
            served.service = served.weighted = 0

    def offer(self, tally: Tally, entry: Entry) -> None:
        """Count one offered request."""
        tally.offered += 1
        tally.input_tokens += entry.input_tokens
        tally.predicted_output += entry.predicted_output
        tally.offered_work_ns = min(SUM_MAX, tally.offered_work_ns + entry.work_ns)

    def admit(self, tally: Tally, level: int, *, deferred: bool, sent: bool) -> None:
        """Count one that is let in at a level, or is `sent` to a replica after that: each at one of both."""
        if deferred is sent:
            tally.admitted += 1
            tally.taken_up += deferred
            if level:
                tally.degraded[level] = tally.degraded.get(level, 0) + 1

    def conclude(self, tally: Tally, row: Concluded) -> None:
        """Count how one offered request ended; one that was deferred and not sent goes back, and has not."""
        if not row.admitted:
            if row.deferred:
                return
            if row.reason is None:
                tally.left_before += 1
            else:
                tally.rejected[row.reason] = tally.rejected.get(row.reason, 0) + 1
            return
        assert row.outcome is not None
        tally.outcomes[row.outcome] = tally.outcomes.get(row.outcome, 0) + 1
        if row.reason is not None:
            tally.ended_early[row.reason] = tally.ended_early.get(row.reason, 0) + 1
        tokens = row.usage.output_tokens if row.usage is not None else 0
        tally.output_tokens += tokens
        if row.met:
            tally.met += 1
            tally.met_work_ns = min(SUM_MAX, tally.met_work_ns + row.work_ns)
            tally.met_tokens += tokens
