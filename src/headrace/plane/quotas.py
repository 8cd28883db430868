"""What one tenant has used of its limits, and what its live requests hold of them.

The shapes that the ledger keeps, and how time alone changes them. Only the ledger writes in them.
"""

from copy import copy
from itertools import islice

from msgspec import Struct

from headrace.model.budget import Per, Take, Unit
from headrace.model.deployment import TenantSpec
from headrace.model.evidence import WindowFacts
from headrace.model.ids import RequestId, TenantId
from headrace.units import NS_PER_S, SUM_MAX, DurationNs, InstantNs, ceil_div

_MINUTE = 60 * NS_PER_S
OLDEST = 64
"""Of a tenant's live requests, as many are asked when they end: a refusal must stay cheap."""


class Hold(Struct, gc=False):
    """One admitted request's reservation of its tenant's quota and budgets."""

    tenant: TenantId
    take: Take
    branches: int = 1
    """Answers that are made at once for it."""
    session: str | None = None
    charged: bool = True
    """False: it was let in though its tenant's limits were reached, and takes nothing of them."""


class Bucket(Struct, gc=False):
    """A level that refills by `limit` a minute, exactly: whole units and a rest in 1/60e9 of one.

    It may fall below zero when an answer outgrows its reserve: the debt delays what follows.
    """

    limit: int
    level: int
    rest: int = 0

    def refill(self, limit: int, passed: int) -> None:
        """Add what `passed` nanoseconds bring, up to a full bucket of `limit`."""
        more, self.rest = divmod(self.rest + passed * limit, _MINUTE)
        self.limit = limit
        self.level += more
        if self.level >= limit:
            self.level, self.rest = limit, 0

    def wait_ns(self, need: int) -> DurationNs:
        """Return how long until it holds `need`, if nothing else is taken."""
        short = (need - self.level) * _MINUTE - self.rest
        return DurationNs(ceil_div(short, self.limit) if short > 0 else 0)


class Window(Struct, gc=False):
    """What of one budget is used since its window began; what live requests hold comes on top."""

    unit: Unit
    per: Per
    began: InstantNs
    used: int = 0

    def roll(self, now: InstantNs) -> None:
        """Start anew if the window is over; the next begins where it ended."""
        passed = (now - self.began) // self.per.ns
        if passed > 0:
            self.began, self.used = InstantNs(self.began + passed * self.per.ns), 0

    def wait_ns(self, now: InstantNs) -> DurationNs:
        """Return how long until the next one begins."""
        return DurationNs(self.began + self.per.ns - now)


class Quota(Struct, gc=False):
    """One tenant's buckets; None where it has no such limit, so that nothing is counted there."""

    at: InstantNs
    tokens: Bucket | None = None
    requests: Bucket | None = None
    windows: list[Window] = []
    """In the order of its configured budgets."""
    parallel: int = 0
    """Answers being made for it, or waiting to be."""
    sessions: dict[str, int] = {}
    """Its sessions with live requests, and how many; empty where nobody limits them."""
    ends: dict[RequestId, InstantNs] = {}
    """When its live requests are expected to end, in the order in which they were let in; empty where
    nobody limits how many there are."""
    reserved: int = 0
    """Tokens held by live requests."""
    reserved_work_ns: int = 0
    reserved_micro_usd: int = 0

    def held(self, unit: Unit) -> int:
        """Return what live requests hold; a request is used up once it is let in."""
        match unit:
            case Unit.REQUESTS:
                return 0
            case Unit.TOKENS:
                return self.reserved
            case Unit.WORK:
                return self.reserved_work_ns
            case Unit.USD:
                return self.reserved_micro_usd

    def ends_wait_ns(self, count: int, now: InstantNs) -> DurationNs:
        """Return how long until so many of its live requests are expected to have ended.

        Looks at its oldest alone: those end first, as a rule.
        """
        ends = sorted(islice(self.ends.values(), OLDEST))
        return DurationNs(max(0, ends[min(count, len(ends)) - 1] - now) if ends else 0)

    def book(self, hold: Hold, sign: int) -> None:
        """Add what a request holds, or take it away."""
        self.parallel += sign * hold.branches
        self.reserved += sign * hold.take.tokens
        self.reserved_work_ns += sign * hold.take.work_ns
        self.reserved_micro_usd += sign * hold.take.micro_usd
        if hold.session is not None:
            count = self.sessions.get(hold.session, 0) + sign
            if count:
                self.sessions[hold.session] = count
            else:
                del self.sessions[hold.session]


def refilled(bucket: Bucket | None, limit: int | None, passed: int) -> Bucket | None:
    """Return a limit's bucket after `passed` nanoseconds; a new limit starts with a full one."""
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit=limit, level=limit)
    bucket.refill(limit, passed)
    return bucket


def window_facts(
    spec: TenantSpec, quota: Quota, take: Take, now: InstantNs
) -> tuple[WindowFacts, ...]:
    """Return a tenant's budgets at this instant, beside what a request would `take`; changes nothing."""
    if not spec.budgets:
        return ()
    known = {(one.unit, one.per): one for one in quota.windows}
    found = []
    for budget in spec.budgets:
        kept = known.get((budget.unit, budget.per))
        window = Window(budget.unit, budget.per, now) if kept is None else copy(kept)
        window.roll(now)
        facts = WindowFacts(
            unit=budget.unit,
            per=budget.per,
            need=take.of(budget.unit),
            taken=min(SUM_MAX, window.used + quota.held(budget.unit)),
            hard=budget.hard_amount(),
            soft=budget.soft_amount(),
            wait_ns=window.wait_ns(now),
        )
        found.append(facts)
    return tuple(found)


def rolled(windows: list[Window], spec: TenantSpec, now: InstantNs) -> list[Window]:
    """Return the windows of a tenant's budgets at this instant; a new one begins now."""
    known = {(one.unit, one.per): one for one in windows}
    found = []
    for budget in spec.budgets:
        window = known.get((budget.unit, budget.per)) or Window(budget.unit, budget.per, now)
        window.roll(now)
        found.append(window)
    return found
