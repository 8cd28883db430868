"""Who waits, in what order, and whose turn is it next?

One `Backlog` for each model: bounded queues per (tenant, class), tenants ranked by their turn, and
the instants at which that ranking changes by time alone (work becomes urgent, or hopeless). Holds
no counters (the ledger's), chooses no replica, and refuses nothing: it only says who is hopeless.
"""

from msgspec import Struct, field

from headrace.model.ids import ClassName, RequestId, TenantId
from headrace.plane.ranked import Ranked
from headrace.policy.contracts import Order
from headrace.units import InstantNs

SCAN = 64
"""Tenants looked at for one turn while some classes have no open replica."""


class ClassQueue(Struct):
    """One tenant's waiting requests of one class, weighted by predicted work."""

    ready: Ranked[int] = field(default_factory=Ranked)
    """Those that can still make it, by the order's key."""
    late: Ranked[int] = field(default_factory=Ranked)
    """Relegated: past their latest start, behind everything else of their tenant."""

    def work(self) -> int:
        """Return the predicted work that waits here."""
        return self.ready.total + self.late.total


class TenantQueue(Struct):
    """All that one tenant has waiting for one model; exists only while something waits."""

    weight: int
    classes: dict[ClassName, ClassQueue] = {}
    count: int = 0
    turn: int | None = None
    """Its rank among tenants as listed; None: not listed yet."""
    urgent: bool = False
    """Listed among the urgent, else among those that lend their turn."""
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


class Backlog(Struct):
    """Everything that waits for one model."""

    tenants: dict[TenantId, TenantQueue] = {}
    urgent: Ranked[str] = field(default_factory=Ranked)
    """Tenants with feasible work that cannot wait, by turn."""
    lending: Ranked[str] = field(default_factory=Ranked)
    """Tenants that can wait or are hopeless, by turn: they go when nobody is urgent."""
    changes: Ranked[str] = field(default_factory=Ranked)
    """Tenants by the instant their listing changes."""
    queued: dict[ClassName, int] = {}
    size: int = 0
    work_ns: int = 0
    weights: int = 0
    """Sum of the weights of waiting tenants."""

    def add(
        self, tenant: TenantId, weight: int, slo_class: ClassName, place: tuple[int, int], work: int
    ) -> bool:
        """Queue a request at `place` = (key, request id); returns whether its tenant was idle.

        The caller must `refresh` the tenant before the next turn.
        """
        mine = self.tenants.get(tenant)
        idle = mine is None
        if mine is None:
            mine = self.tenants[tenant] = TenantQueue(weight=weight)
            self.weights += weight
        queue = mine.classes.get(slo_class)
        if queue is None:
            queue = mine.classes[slo_class] = ClassQueue()
        queue.ready.add(*place, work)
        mine.count += 1
        self.size += 1
        self.work_ns += work
        self.queued[slo_class] = self.queued.get(slo_class, 0) + 1
        return idle

    def take(
        self, tenant: TenantId, slo_class: ClassName, place: tuple[int, int], *, late: bool
    ) -> bool:
        """Take a request out; returns whether its tenant has nothing left waiting.

        The caller must `refresh` the tenant before the next turn, unless nothing is left.
        """
        mine = self.tenants[tenant]
        queue = mine.classes[slo_class]
        work = (queue.late if late else queue.ready).remove(*place)
        mine.count -= 1
        self.size -= 1
        self.work_ns -= work
        self.queued[slo_class] -= 1
        if not queue.ready.size and not queue.late.size:
            del mine.classes[slo_class]
        if mine.count:
            return False
        self._unlist(tenant, mine)
        self.weights -= mine.weight
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
        mine = self.tenants[tenant]
        head = mine.head(_NONE)
        lend = order.lend_after_ns
        first = head[0] if head is not None else 0
        urgent = head is not None and (lend is None or first - now <= lend)
        change: int | None = None
        if head is not None and order.relegates:
            change = first + 1 if urgent or lend is None else first - lend
        turn = order.turn(counter, first)
        if turn != mine.turn or urgent is not mine.urgent:
            if mine.turn is not None:
                (self.urgent if mine.urgent else self.lending).remove(mine.turn, tenant)
            (self.urgent if urgent else self.lending).add(turn, tenant)
            mine.turn, mine.urgent = turn, urgent
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

    def next_change(self) -> InstantNs | None:
        """Return when time alone changes a listing next."""
        first = self.changes.first()
        return InstantNs(first[0]) if first is not None else None

    def next_turn(self, blocked: frozenset[ClassName]) -> Turn | None:
        """Return whose turn it is among classes not blocked, or None if nobody may go."""
        looked = 0
        for ranked in (self.urgent, self.lending):
            for turn, name in ranked:
                tenant = TenantId(name)
                mine = self.tenants[tenant]
                head = mine.head(blocked)
                relegated = head is None
                head = head or mine.late_head(blocked)
                if head is not None:
                    first = self.lending.first()
                    lent = ranked is self.urgent and first is not None and first[0] < turn
                    return Turn(tenant, RequestId(head[1]), head[2], relegated, lent)
                looked += 1
                if looked >= SCAN:
                    return None
        return None

    def least(self) -> TenantId | None:
        """Return the waiting tenant with the smallest turn, lending or not."""
        firsts = [pair for pair in (self.urgent.first(), self.lending.first()) if pair is not None]
        return TenantId(min(firsts)[1]) if firsts else None

    def furthest_over(self, slo_class: ClassName) -> TenantId | None:
        """Return the tenant with the largest turn that has something waiting in a class."""
        best: tuple[int, str] | None = None
        for ranked in (self.urgent, self.lending):
            for pair in ranked.backwards():
                if best is not None and pair <= best:
                    break
                if slo_class in self.tenants[TenantId(pair[1])].classes:
                    best = pair
                    break
        return TenantId(best[1]) if best is not None else None

    def _unlist(self, tenant: TenantId, mine: TenantQueue) -> None:
        if mine.turn is not None:
            (self.urgent if mine.urgent else self.lending).remove(mine.turn, tenant)
        if mine.change_at is not None:
            self.changes.remove(mine.change_at, tenant)


_NONE: frozenset[ClassName] = frozenset()
