"""Who waits, in what order, and whose turn is it next?

One `Backlog` for each model: bounded queues per (tenant, class), tenants ranked by their turn, and
the instants at which that ranking changes by time alone (work becomes urgent, or hopeless). Holds
no counters (the ledger's), chooses no replica, and refuses nothing: it only says who is hopeless.
"""

from collections.abc import Iterable
from itertools import islice

from msgspec import Struct, field

from headrace.model.ids import ClassName, RequestId, TenantId
from headrace.plane.ranked import Ranked
from headrace.policy.contracts import Order
from headrace.policy.fairness.costs import Price
from headrace.units import InstantNs

TIED = 64
"""Tenants with equal turns that are compared when one must make room."""


LOOKED_AT = 8
"""Tenants under a newcomer's counter whose queues are looked at one by one."""


class ClassQueue(Struct):
    """One tenant's waiting requests of one class, weighted by predicted work."""

    ready: Ranked[int] = field(default_factory=Ranked)
    """Those that can still make it, by the order's key."""
    late: Ranked[int] = field(default_factory=Ranked)
    """Relegated: past their latest start, behind everything else of their tenant."""
    turn: int | None = None
    """Its rank among its class's queues as listed; None: not listed yet."""
    urgent: bool = False
    """Listed among the urgent, else among those that lend their turn."""

    def work(self) -> int:
        """Return the predicted work that waits here."""
        return self.ready.total + self.late.total


class TenantQueue(Struct):
    """All that one tenant has waiting for one model; exists only while something waits."""

    weight: int
    classes: dict[ClassName, ClassQueue] = {}
    count: int = 0
    change_at: int | None = None
    """When its listing must be looked at again."""

    def head(self, blocked: frozenset[ClassName]) -> tuple[int, int, ClassName] | None:
        """Return (key, request, class) of the first ready request of classes not blocked."""
        best: tuple[int, int, ClassName] | None = None
        for name, queue in self.classes.items():
            first = queue.ready.first()
            if first is None or name in blocked:
                continue
            if best is None or first < best[:2]:
                best = (*first, name)
        return best

    def late_head(self, blocked: frozenset[ClassName]) -> tuple[int, int, ClassName] | None:
        """Return (key, request, class) of the first relegated request of classes not blocked."""
        best: tuple[int, int, ClassName] | None = None
        for name, queue in self.classes.items():
            first = queue.late.first()
            if first is None or name in blocked:
                continue
            if best is None or first < best[:2]:
                best = (*first, name)
        return best


class Turn(Struct, frozen=True, gc=False):
    """Whose turn it is and which of its requests goes."""

    tenant: TenantId
    request: RequestId
    slo_class: ClassName
    relegated: bool
    lent: bool
    """A tenant further under its share could wait and let this one pass."""
    patient: bool
    """It can wait itself, or is hopeless: nobody competes for this turn."""


class Backlog(Struct):
    """Everything that waits for one model."""

    tenants: dict[TenantId, TenantQueue] = {}
    urgent: dict[ClassName, Ranked[str]] = {}
    """By class, the tenants with feasible work in it that cannot wait, by turn."""
    lending: dict[ClassName, Ranked[str]] = {}
    """By class, those that can wait or are hopeless, by turn: they go when nobody is urgent."""
    changes: Ranked[str] = field(default_factory=Ranked)
    """Tenants by the instant their listing changes."""
    bounded: Ranked[int] = field(default_factory=Ranked)
    """Requests whose callers bound the wait, by when that ends it."""
    queued: dict[ClassName, int] = {}
    work: dict[ClassName, int] = {}
    """Predicted work that waits, by class."""
    weights: dict[ClassName, int] = {}
    """By class, the weights of the tenants that compete for turns: a lender does not."""
    size: int = 0
    work_ns: int = 0

    def add(
        self,
        tenant: TenantId,
        weight: int,
        slo_class: ClassName,
        place: tuple[int, int],
        work: int,
        until: InstantNs | None = None,
    ) -> bool:
        """Queue a request at `place` = (key, request id); returns whether its tenant was idle.

        `until`: when its caller's own bound on the wait ends. The caller must `refresh` the tenant
        before the next turn.
        """
        if until is not None:
            self.bounded.add(until, place[1])
        mine = self.tenants.get(tenant)
        idle = mine is None
        if mine is None:
            mine = self.tenants[tenant] = TenantQueue(weight=weight)
        queue = mine.classes.get(slo_class)
        if queue is None:
            queue = mine.classes[slo_class] = ClassQueue()
        queue.ready.add(*place, work)
        mine.count += 1
        self.size += 1
        self.work_ns += work
        self.queued[slo_class] = self.queued.get(slo_class, 0) + 1
        self.work[slo_class] = self.work.get(slo_class, 0) + work
        return idle

    def take(
        self,
        tenant: TenantId,
        slo_class: ClassName,
        place: tuple[int, int],
        *,
        late: bool,
        until: InstantNs | None = None,
    ) -> bool:
        """Take a request out, queued with this `until`; returns whether its tenant has none left.

        The caller must `refresh` the tenant before the next turn, unless nothing is left.
        """
        if until is not None:
            self.bounded.remove(until, place[1])
        mine = self.tenants[tenant]
        queue = mine.classes[slo_class]
        work = (queue.late if late else queue.ready).remove(*place)
        mine.count -= 1
        self.size -= 1
        self.work_ns -= work
        self.queued[slo_class] -= 1
        self.work[slo_class] -= work
        if not queue.ready.size and not queue.late.size:
            self._unlist(tenant, mine, slo_class, queue)
            del mine.classes[slo_class]
        if mine.count:
            return False
        if mine.change_at is not None:
            self.changes.remove(mine.change_at, tenant)
        del self.tenants[tenant]
        return True

    def relegate(self, order: Order, tenant: TenantId, now: InstantNs) -> list[RequestId]:
        """Move what can no longer make it behind its tenant's other work; return what was moved."""
        if not order.relegates:
            return []
        moved: list[RequestId] = []
        for queue in self.tenants[tenant].classes.values():
            while (first := queue.ready.first()) is not None and first[0] < now:
                queue.late.add(*first, queue.ready.remove(*first))
                moved.append(RequestId(first[1]))
        return moved

    def refresh(self, order: Order, tenant: TenantId, counter: int, now: InstantNs) -> None:
        """List a waiting tenant anew by its turn; call after any change of queue or counter."""
        mine, lend = self.tenants[tenant], order.lend_after_ns
        change: int | None = None
        for slo_class, queue in mine.classes.items():
            head = queue.ready.first()
            first = head[0] if head is not None else 0
            urgent = head is not None and not is_patient(order, first, now)
            if head is not None and order.relegates:
                at = first + 1 if urgent or lend is None else first - lend
                change = at if change is None or at < change else change
            turn = order.turn(counter, first)
            if turn != queue.turn or urgent is not queue.urgent:
                self._unlist(tenant, mine, slo_class, queue)
                self._listing(slo_class, urgent=urgent).add(turn, tenant)
                queue.turn, queue.urgent = turn, urgent
                if urgent:
                    self.weights[slo_class] = self.weights.get(slo_class, 0) + mine.weight
        if change != mine.change_at:
            if mine.change_at is not None:
                self.changes.remove(mine.change_at, tenant)
            if change is not None:
                self.changes.add(change, tenant)
            mine.change_at = change

    def due(self, now: InstantNs) -> TenantId | None:
        """Return a tenant whose listing is out of date at `now`, or None."""
        first = self.changes.first()
        return TenantId(first[1]) if first is not None and first[0] <= now else None

    def overdue(self, now: InstantNs) -> RequestId | None:
        """Return a request that has waited for as long as its caller lets it, or None."""
        first = self.bounded.first()
        return RequestId(first[1]) if first is not None and first[0] <= now else None

    def next_change(self) -> InstantNs | None:
        """Return when time alone changes a listing, or ends a wait, next."""
        first, bound = self.changes.first(), self.bounded.first()
        if first is None or (bound is not None and bound[0] < first[0]):
            return None if bound is None else InstantNs(bound[0])
        return InstantNs(first[0])

    def next_turn(self, blocked: frozenset[ClassName]) -> Turn | None:
        """Return whose turn it is among classes not blocked, or None if nobody waits in them."""
        urgent, lending = _first(self.urgent, blocked), _first(self.lending, blocked)
        listed = lending if urgent is None else urgent
        if listed is None:
            return None
        mine = self.tenants[TenantId(listed[1])]
        ready = mine.head(blocked)
        head = mine.late_head(blocked) if ready is None else ready
        assert head is not None, f"{listed[1]} is listed with nothing waiting"
        lent = urgent is not None and lending is not None and lending[0] < urgent[0]
        patient = urgent is None
        return Turn(TenantId(listed[1]), RequestId(head[1]), head[2], ready is None, lent, patient)

    def least(self) -> TenantId | None:
        """Return the tenant with the smallest turn among those that compete, else that lend.

        A lender's counter stands still while others are served; whoever comes back from idle must
        not be lifted only that far, or its idle time would have earned credit (FAIR-1).
        """
        first = _first(self.urgent, NONE) or _first(self.lending, NONE)
        return None if first is None else TenantId(first[1])

    def before(self, slo_class: ClassName, counter: int, price: Price, class_weight: int) -> int:
        """Return the work of a class that goes before a tenant whose counter stands at `counter`.

        Each competing tenant below it gets what lifts it there, but no more than it has waiting.
        Beyond `LOOKED_AT` tenants the rest is taken together.
        """
        ranked = self.urgent.get(slo_class)
        left, total = self.weights.get(slo_class, 0), 0
        for looked, (turn, name) in enumerate(ranked or ()):
            if turn >= counter:
                break
            mine = self.tenants[TenantId(name)]
            if looked == LOOKED_AT:
                rest = price.work_ns((counter - turn) * left * class_weight)
                return min(self.work[slo_class], total + rest)
            left -= mine.weight
            lift = price.work_ns((counter - turn) * mine.weight * class_weight)
            total += min(mine.classes[slo_class].work(), lift)
        return total

    def furthest_over(self, slo_class: ClassName) -> TenantId | None:
        """Return the tenant with the largest turn that has something waiting in a class.

        Of equals, as tenants lifted to the same counter are, the one with most work waiting for
        its weight: it is furthest over as soon as that is served. `TIED` of them are compared.
        """
        best: tuple[int, int, str] | None = None
        for listing in (self.urgent, self.lending):
            ranked: Iterable[tuple[int, str]] = ()
            if slo_class in listing:
                ranked = islice(listing[slo_class].backwards(), TIED)
            for turn, name in ranked:
                if best is not None and turn < best[0]:
                    break
                mine = self.tenants[TenantId(name)]
                place = (turn, mine.classes[slo_class].work() // mine.weight, name)
                if best is None or place > best:
                    best = place
        return TenantId(best[2]) if best is not None else None

    def _unlist(
        self, tenant: TenantId, mine: TenantQueue, slo_class: ClassName, queue: ClassQueue
    ) -> None:
        if queue.turn is not None:
            self._listing(slo_class, urgent=queue.urgent).remove(queue.turn, tenant)
            if queue.urgent:
                self.weights[slo_class] -= mine.weight
            queue.turn = None

    def _listing(self, slo_class: ClassName, *, urgent: bool) -> Ranked[str]:
        listing = self.urgent if urgent else self.lending
        ranked = listing.get(slo_class)
        if ranked is None:
            ranked = listing[slo_class] = Ranked()
        return ranked


def is_patient(order: Order, key: int, now: InstantNs) -> bool:
    """Return whether a request with this key can wait so long that its tenant lends its turn."""
    lend = order.lend_after_ns
    return lend is not None and key - now > lend


def _first(
    listing: dict[ClassName, Ranked[str]], blocked: frozenset[ClassName]
) -> tuple[int, str] | None:
    """Return the smallest (turn, tenant) of the classes not blocked."""
    best: tuple[int, str] | None = None
    for name, ranked in listing.items():
        first = ranked.first()
        if first is not None and name not in blocked and (best is None or first < best):
            best = first
    return best


NONE: frozenset[ClassName] = frozenset()
"""No class is blocked."""
