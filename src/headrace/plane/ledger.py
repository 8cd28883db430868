"""The single owner of every in-flight count.

Only this file writes in-flight tokens, KV reservations, quota reservations and virtual counters. A
hold (quota) belongs to a request, a flight (KV, prefill, service) to an attempt; each ends exactly
once, on whatever path. Loads belong to an incarnation of a replica, not to its name (trap 16).
Amounts are reserved by estimate and settled by the engine's usage.
"""

from msgspec import Struct, field

from headrace.model.budget import NOTHING, Take, Unit
from headrace.model.deployment import TenantSpec
from headrace.model.engine import Usage
from headrace.model.ids import (
    AttemptId,
    Incarnation,
    ModelName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.paths import Path
from headrace.plane.busy import Busy
from headrace.plane.quotas import Hold, Quota, refilled, rolled
from headrace.policy.fairness.costs import Price
from headrace.policy.fairness.shares import Rules, Shares
from headrace.policy.routing.seconds import is_long
from headrace.units import (
    SUM_MAX,
    Blocks,
    DurationNs,
    InstantNs,
    Tokens,
    blocks_for,
)


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
    moved: bool = False
    """Another replica began it."""
    stayed: int = 0
    """How often it was to go to another replica and did not."""

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


class Berth(Struct, gc=False):
    """What is booked for an attempt on the replica that it is being moved to, beside its flight on the old one."""

    replica: ReplicaName
    incarnation: Incarnation
    blocks: int


class Load(Busy):
    """What we have dispatched to one incarnation and not seen end, and what is on its way to it."""

    pending_prefill_ns: DurationNs = DurationNs(0)
    prefills: dict[AttemptId, DurationNs] = field(default_factory=dict)
    """The prefills that sum is made of, in the order in which they were sent."""
    front_ns: DurationNs = DurationNs(0)
    """The first of them; 0 without any."""
    front_at: InstantNs = InstantNs(0)
    """Since when it has been at the engine's front."""
    decodes: int = 0
    context_tokens: Tokens = Tokens(0)
    blocks: Blocks = Blocks(0)
    gaps: dict[DurationNs, int] = field(default_factory=dict)
    """Streams and pending attempts by gap bound."""
    tightest: DurationNs | None = None
    """The least of them."""
    means: dict[DurationNs, int] = field(default_factory=dict)
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

    def board(self, flight: Flight, blocks: int, now: InstantNs) -> None:
        """Count one more attempt, that holds so many blocks, with its bounds on gaps and their mean."""
        gap, mean = flight.gap_ns, flight.mean_ns
        self.enter(now)
        self.blocks = Blocks(self.blocks + blocks)
        self.gaps[gap] = self.gaps.get(gap, 0) + 1
        if self.tightest is None or gap < self.tightest:
            self.tightest = gap
        if mean:
            self.means[mean] = self.means.get(mean, 0) + 1
            self.tightest_mean = min(self.means)

    def alight(self, flight: Flight, blocks: int, now: InstantNs) -> None:
        """Count one attempt less, with its blocks and bounds."""
        gap, mean = flight.gap_ns, flight.mean_ns
        self.leave(now)
        self.blocks = Blocks(self.blocks - blocks)
        self.gaps[gap] -= 1
        if not self.gaps[gap]:
            del self.gaps[gap]
            self.tightest = min(self.gaps, default=None)
        if mean:
            self.means[mean] -= 1
            if not self.means[mean]:
                del self.means[mean]
                self.tightest_mean = min(self.means, default=None)

    def decode(self, flight: Flight, sign: int) -> None:
        """Count one stream more or less, with its context."""
        self.decodes += sign
        held = flight.input_tokens + flight.made
        self.context_tokens = Tokens(self.context_tokens + sign * held)


class Ledger(Struct):
    """All books."""

    holds: dict[RequestId, Hold] = {}
    flights: dict[AttemptId, Flight] = {}
    loads: dict[Incarnation, Load] = {}
    berths: dict[AttemptId, Berth] = {}
    """Of attempts that are being moved."""
    quotas: dict[TenantId, Quota] = {}
    shares: dict[ModelName, Shares] = {}
    """Virtual counters."""

    def quota(self, spec: TenantSpec, now: InstantNs) -> Quota:
        """Return a tenant's buckets, refilled to `now`; a new limit starts with a full one."""
        quota = self.quotas.get(TenantId(spec.name))
        if quota is None:
            quota = self.quotas[TenantId(spec.name)] = Quota(at=now)
        passed = now - quota.at
        quota.tokens = refilled(quota.tokens, spec.tpm_limit, passed)
        quota.requests = refilled(quota.requests, spec.rpm_limit, passed)
        quota.at = now
        if spec.budgets or quota.windows:
            quota.windows = rolled(quota.windows, spec, now)
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

    def close_load(self, incarnation: Incarnation, now: InstantNs) -> None:
        """End a replica's books; every flight on it was closed before. What was to come there stays away."""
        coming = [one for one, berth in self.berths.items() if berth.incarnation == incarnation]
        for attempt in coming:
            self.give_up(attempt, now)
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
        load.board(flight, flight.blocks, flight.sent_at)
        self.flights[attempt] = flight
        self._charge(flight, price, flight.predicted)

    def first_token(self, attempt: AttemptId, now: InstantNs) -> Flight:
        """Move an attempt from prefill to decode."""
        flight = self.flights[attempt]
        assert not flight.streaming, f"{attempt=} streams already"
        load = self.loads[flight.incarnation]
        load.end_prefill(attempt, now)
        load.tokens_made += 1
        flight.streaming, flight.made = True, 1
        load.decode(flight, 1)
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
        if attempt in self.berths:
            self.give_up(attempt, now)
        flight = self.flights.pop(attempt)
        load = self.loads[flight.incarnation]
        load.alight(flight, flight.blocks, now)
        if flight.streaming:
            load.decode(flight, -1)
        else:
            load.end_prefill(attempt, now)
        made = max(flight.made, seen)
        load.tokens_made = min(SUM_MAX, load.tokens_made + made - flight.made)
        service = price.service(*flight.served(usage, made)) if usage is not None or made else 0
        self._recharge(flight, service)
        return made

    def set_aside(
        self,
        attempt: AttemptId,
        replica: ReplicaName,
        incarnation: Incarnation,
        now: InstantNs,
    ) -> None:
        """Book a stream's place on the replica that it is to be moved to; it keeps the one that it has."""
        flight = self.flights[attempt]
        assert flight.streaming, f"{attempt=} holds nothing yet that could be moved"
        assert attempt not in self.berths, f"{attempt=} is being moved"
        self.berths[attempt] = Berth(replica, incarnation, flight.blocks)
        self.loads[incarnation].board(flight, flight.blocks, now)

    def give_up(self, attempt: AttemptId, now: InstantNs) -> Berth:
        """Free a place that was set aside; whoever it was for stays where it is."""
        berth = self.berths.pop(attempt)
        self.loads[berth.incarnation].alight(self.flights[attempt], berth.blocks, now)
        return berth

    def move(self, attempt: AttemptId, now: InstantNs) -> None:
        """Let a stream take the place that was set aside for it, and free the one that it had."""
        berth, flight = self.give_up(attempt, now), self.flights[attempt]
        for life, sign in ((flight.incarnation, -1), (berth.incarnation, 1)):
            load = self.loads[life]
            load.decode(flight, sign)
            (load.board if sign > 0 else load.alight)(flight, flight.blocks, now)
        flight.incarnation, flight.moved = berth.incarnation, True

    def _charge(self, flight: Flight, price: Price, output: int) -> None:
        cached = flight.cached_tokens
        service = price.service(flight.input_tokens - cached, cached, output)
        self._recharge(flight, service)
        flight.predicted = output

    def _recharge(self, flight: Flight, service: int) -> None:
        self.shares[flight.model].charge(flight.way, flight.charged, service)
        flight.charged = service
