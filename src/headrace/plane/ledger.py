"""The single owner of every in-flight count.

Only this file writes in-flight tokens, KV reservations, quota reservations and virtual counters. A
hold (quota) belongs to a request, a flight (KV, prefill, service) to an attempt; each ends exactly
once, on whatever path. Loads belong to an incarnation of a replica, not to its name (trap 16).
Amounts are reserved by estimate and settled by the engine's usage.
"""

from copy import copy
from itertools import islice

from msgspec import Struct

from headrace.model.budget import NOTHING, Per, Take, Unit
from headrace.model.deployment import TenantSpec
from headrace.model.engine import Usage
from headrace.model.evidence import WindowFacts
from headrace.model.ids import AttemptId, Incarnation, ModelName, RequestId, TenantId
from headrace.model.paths import Path
from headrace.policy.fairness.costs import Price
from headrace.policy.fairness.shares import Rules, Shares
from headrace.policy.routing.seconds import is_long
from headrace.units import (
    NS_PER_S,
    SUM_MAX,
    Blocks,
    DurationNs,
    InstantNs,
    Tokens,
    blocks_for,
    ceil_div,
)

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


class Flight(Struct, gc=False):
    """One attempt on one replica: what was booked for it."""

    request: RequestId
    tenant: TenantId
    model: ModelName
    incarnation: Incarnation
    input_tokens: int
    cached_tokens: int
    predicted: int
    """Output tokens charged so far; ticks raise it to the tokens made."""
    blocks: int
    prefill_ns: int
    charged: int
    """The service that its path in the share tree was charged with."""
    way: Path
    gap_ns: DurationNs
    mean_ns: DurationNs = DurationNs(0)
    """Bound on the mean time per token, where it is tighter; else 0."""
    sent_at: InstantNs = InstantNs(0)
    made: int = 0
    streaming: bool = False

    def served(self, usage: Usage | None, made: int) -> tuple[int, int, int]:
        """Return the tokens served, uncached, cached and output: by usage, else by those made.

        Without a token and without usage nothing was served.
        """
        if usage is not None:  # its input may differ from what we were told
            cached = min(usage.cached_tokens, usage.input_tokens)
            return usage.input_tokens - cached, cached, usage.output_tokens
        if not made:
            return 0, 0, 0
        return self.input_tokens - self.cached_tokens, self.cached_tokens, made


class Load(Struct):
    """What we have dispatched to one incarnation and not seen end."""

    pending_prefill_ns: DurationNs = DurationNs(0)
    prefills: dict[AttemptId, DurationNs] = {}
    """The prefills that sum is made of, in the order in which they were sent."""
    front_ns: DurationNs = DurationNs(0)
    """The first of them; 0 without any."""
    front_at: InstantNs = InstantNs(0)
    """Since when it has been at the engine's front."""
    decodes: int = 0
    context_tokens: Tokens = Tokens(0)
    blocks: Blocks = Blocks(0)
    attempts: int = 0
    gaps: dict[DurationNs, int] = {}
    """Streams and pending attempts by gap bound."""
    tightest: DurationNs | None = None
    """The least of them."""
    means: dict[DurationNs, int] = {}
    """Of these, those that are promised a tighter mean time per token, by its bound."""
    tightest_mean: DurationNs | None = None
    tokens_made: int = 0

    def behind_ns(self, window: DurationNs) -> DurationNs:
        """Return the prefill that a window holds: what waits in the engine, behind the prompt at its front.

        A long front is no place to wait behind: it counts as well.
        """
        front = self.front_ns
        return DurationNs(self.pending_prefill_ns - (0 if is_long(front, window) else front))

    def prefill_left_ns(self, now: InstantNs) -> DurationNs:
        """Return the time for the prefill in front of a newcomer, what the first one has had taken off.

        One that is overdue has not begun: its engine has no blocks free for it, or stands still. How long
        for nobody can tell; what is late by so much is expected to take as long again. A forecast:
        windows open by what was seen, never by what time must have brought.
        """
        front = self.front_ns
        if not front:
            return self.pending_prefill_ns
        return DurationNs(self.pending_prefill_ns - front + abs(now - self.front_at - front))

    def end_prefill(self, attempt: AttemptId, now: InstantNs) -> None:
        """Take out a prefill that is over."""
        first = next(iter(self.prefills)) == attempt
        self.pending_prefill_ns = DurationNs(self.pending_prefill_ns - self.prefills.pop(attempt))
        if first:
            self.front_at = now
            self.front_ns = next(iter(self.prefills.values()), DurationNs(0))

    def start_prefill(self, attempt: AttemptId, flight: Flight) -> None:
        """Add a prefill behind the others."""
        if not self.prefills:
            self.front_at, self.front_ns = flight.sent_at, DurationNs(flight.prefill_ns)
        self.prefills[attempt] = DurationNs(flight.prefill_ns)
        self.pending_prefill_ns = DurationNs(self.pending_prefill_ns + flight.prefill_ns)

    def board(self, gap: DurationNs, mean: DurationNs) -> None:
        """Count one more attempt with a bound on gaps and, unless it is 0, one on their mean."""
        self.gaps[gap] = self.gaps.get(gap, 0) + 1
        if self.tightest is None or gap < self.tightest:
            self.tightest = gap
        if mean:
            self.means[mean] = self.means.get(mean, 0) + 1
            self.tightest_mean = min(self.means)

    def alight(self, gap: DurationNs, mean: DurationNs) -> None:
        """Count one attempt less with these bounds."""
        self.gaps[gap] -= 1
        if not self.gaps[gap]:
            del self.gaps[gap]
            self.tightest = min(self.gaps, default=None)
        if mean:
            self.means[mean] -= 1
            if not self.means[mean]:
                del self.means[mean]
                self.tightest_mean = min(self.means, default=None)


class Ledger(Struct):
    """All books."""

    holds: dict[RequestId, Hold] = {}
    flights: dict[AttemptId, Flight] = {}
    loads: dict[Incarnation, Load] = {}
    quotas: dict[TenantId, Quota] = {}
    shares: dict[ModelName, Shares] = {}
    """Virtual counters."""

    def quota(self, spec: TenantSpec, now: InstantNs) -> Quota:
        """Return a tenant's buckets, refilled to `now`; a new limit starts with a full one."""
        quota = self.quotas.get(TenantId(spec.name))
        if quota is None:
            quota = self.quotas[TenantId(spec.name)] = Quota(at=now)
        passed = now - quota.at
        quota.tokens = _refilled(quota.tokens, spec.tpm_limit, passed)
        quota.requests = _refilled(quota.requests, spec.rpm_limit, passed)
        quota.at = now
        if spec.budgets or quota.windows:
            quota.windows = _rolled(quota.windows, spec, now)
        return quota

    def hold(  # noqa: PLR0913 - what a request takes of its tenant's limits
        self,
        request: RequestId,
        spec: TenantSpec,
        take: Take,
        now: InstantNs,
        *,
        branches: int = 1,
        session: str | None = None,
        charged: bool = True,
        ends_at: InstantNs | None = None,
    ) -> None:
        """Reserve for an admitted request, in the very step that admitted it (trap 3).

        One that is not `charged` was let in beyond its tenant's limits: it takes nothing of them, so
        that they say of the next one what they would have said. `ends_at`: when it is expected to end,
        where anybody asks.
        """
        assert request not in self.holds, f"{request} holds quota already"
        quota = self.quota(spec, now)
        if not charged:
            self.holds[request] = Hold(TenantId(spec.name), NOTHING, branches=0, charged=False)
            return
        held = self.holds[request] = Hold(TenantId(spec.name), take, branches, session)
        if quota.tokens is not None:
            quota.tokens.level -= take.tokens
        if quota.requests is not None:
            quota.requests.level -= 1
        quota.book(held, 1)
        if ends_at is not None:
            quota.ends[request] = ends_at
        for window in quota.windows:
            if window.unit is Unit.REQUESTS:
                window.used += 1

    def settle(self, request: RequestId, used: Take, now: InstantNs) -> None:
        """End a hold: what was reserved goes back, and what was `used` is charged."""
        held = self.holds.pop(request)
        if not held.charged:
            return
        quota = self.quotas[held.tenant]
        quota.ends.pop(request, None)
        if quota.tokens is not None:
            quota.tokens.level += held.take.tokens - used.tokens
        quota.book(held, -1)
        for window in quota.windows:
            if window.unit is not Unit.REQUESTS:
                window.roll(now)
                window.used = min(SUM_MAX, window.used + used.of(window.unit))

    def open_load(self, incarnation: Incarnation) -> None:
        """Start the books of a replica's new life."""
        assert incarnation not in self.loads, f"{incarnation=} lives already"
        self.loads[incarnation] = Load()

    def close_load(self, incarnation: Incarnation) -> None:
        """End a replica's books; every flight on it was closed before."""
        load = self.loads.pop(incarnation)
        assert not load.attempts, f"{incarnation=} still holds {load.attempts} attempts"

    def share_out(self, model: ModelName, rules: Rules) -> Shares:
        """Return a model's share tree, under these rules from here on."""
        shares = self.shares.get(model)
        if shares is None:
            shares = self.shares[model] = Shares()
        shares.rules = rules
        return shares

    def come(self, model: ModelName, way: Path) -> None:
        """Lift a queue that is backlogged for this one moment, in which its request may go."""
        self.shares[model].come(way)

    def gone(self, model: ModelName, way: Path) -> None:
        """Note that it went, and nothing waits there any more."""
        self.shares[model].gone(way)

    def rebase(self, model: ModelName, price: Price) -> None:
        """Start a model's counters anew under another cost: they hold what is in flight, no more.

        Flights keep their tokens and are charged again in the new unit, so that their settling adds
        up; what was served before counts for nobody and against nobody.
        """
        shares = self.shares.get(model)
        if shares is None:
            return
        shares.rebase()
        for flight in self.flights.values():
            if flight.model == model:
                flight.charged = 0
                self._charge(flight, price, flight.predicted)

    def book(self, attempt: AttemptId, flight: Flight, price: Price) -> None:
        """Book an attempt: KV, prefill and the service of input plus predicted output."""
        assert attempt not in self.flights, f"{attempt=} is booked already"
        load = self.loads[flight.incarnation]
        load.start_prefill(attempt, flight)
        load.blocks = Blocks(load.blocks + flight.blocks)
        load.attempts += 1
        load.board(flight.gap_ns, flight.mean_ns)
        self.flights[attempt] = flight
        self._charge(flight, price, flight.predicted)

    def first_token(self, attempt: AttemptId, now: InstantNs) -> Flight:
        """Move an attempt from prefill to decode."""
        flight = self.flights[attempt]
        assert not flight.streaming, f"{attempt=} streams already"
        load = self.loads[flight.incarnation]
        load.end_prefill(attempt, now)
        load.decodes, load.tokens_made = load.decodes + 1, load.tokens_made + 1
        flight.streaming, flight.made = True, 1
        load.context_tokens = Tokens(load.context_tokens + flight.input_tokens + 1)
        return flight

    def progress(self, flight: Flight, made: int, price: Price) -> int:
        """Replace prediction by tokens made; returns how many are new."""
        fresh = made - flight.made
        if fresh <= 0:
            return 0  # an old tick after a newer one
        flight.made = made
        load = self.loads[flight.incarnation]
        load.context_tokens = Tokens(load.context_tokens + fresh)
        load.tokens_made += fresh
        if made > flight.predicted:
            self._charge(flight, price, made)
            blocks = blocks_for(flight.input_tokens + made)
            if blocks > flight.blocks:  # growth beyond the reserve draws on the preemption reserve
                load.blocks = Blocks(load.blocks + blocks - flight.blocks)
                flight.blocks = blocks
        return fresh

    def close(
        self,
        attempt: AttemptId,
        price: Price,
        now: InstantNs,
        usage: Usage | None = None,
        seen: int = 0,
    ) -> int:
        """End a flight: free KV, settle service on usage, else on the tokens seen; return those.

        `seen` are tokens that the driver saw and no tick told. Without a token and without usage
        nothing was served: the charge is refunded.
        """
        flight = self.flights.pop(attempt)
        load = self.loads[flight.incarnation]
        load.blocks = Blocks(load.blocks - flight.blocks)
        load.attempts -= 1
        load.alight(flight.gap_ns, flight.mean_ns)
        if flight.streaming:
            load.decodes -= 1
            held = flight.input_tokens + flight.made
            load.context_tokens = Tokens(load.context_tokens - held)
        else:
            load.end_prefill(attempt, now)
        made = max(flight.made, seen)
        load.tokens_made = min(SUM_MAX, load.tokens_made + made - flight.made)
        service = price.service(*flight.served(usage, made)) if usage is not None or made else 0
        self._recharge(flight, service)
        return made

    def _charge(self, flight: Flight, price: Price, output: int) -> None:
        cached = flight.cached_tokens
        service = price.service(flight.input_tokens - cached, cached, output)
        self._recharge(flight, service)
        flight.predicted = output

    def _recharge(self, flight: Flight, service: int) -> None:
        self.shares[flight.model].charge(flight.way, flight.charged, service)
        flight.charged = service


def _refilled(bucket: Bucket | None, limit: int | None, passed: int) -> Bucket | None:
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


def _rolled(windows: list[Window], spec: TenantSpec, now: InstantNs) -> list[Window]:
    """Return the windows of a tenant's budgets at this instant; a new one begins now."""
    known = {(one.unit, one.per): one for one in windows}
    found = []
    for budget in spec.budgets:
        window = known.get((budget.unit, budget.per)) or Window(budget.unit, budget.per, now)
        window.roll(now)
        found.append(window)
    return found
