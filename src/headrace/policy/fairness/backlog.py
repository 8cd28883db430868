"""Who waits, in what order, and whose turn is it next?

One `Backlog` for each model at a gateway, one in each engine: queues by the paths of the share tree,
and the instants at which turns change by time alone (work becomes urgent, hopeless, or has waited for
too long). It reads counters and lists who waits (`Shares`), charges nothing, chooses no replica, and
refuses nothing: it only says who is hopeless.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush, merge

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.model.decision import ScoreTerms
from headrace.model.ids import ClassName, RequestId, TenantId
from headrace.model.paths import ROOT, Level, Path, Term, class_key, tenant_key
from headrace.policy.fairness.ranked import Ranked
from headrace.policy.fairness.shares import Shares, Side
from headrace.policy.fairness.siblings import TIED
from headrace.policy.ordering.orders import Order, Place, Score
from headrace.units import DurationNs, InstantNs

IN_LINE = 16
"""Queues whose heads are told beforehand."""
NEVER = InstantNs(2**62)
"""Later than any instant."""


class Waiting(Struct, kw_only=True):
    """One request that waits."""

    request: int
    key: int
    """Its order's key."""
    arrived_at: InstantNs
    start: InstantNs
    """When it must be sent at the latest."""
    work: int
    prefill_ns: int = 0
    """What its prompt takes; for scores."""
    starve_at: InstantNs = NEVER
    """From when on it no longer lets others pass, hopeless or not (FAIR-4)."""
    until: InstantNs | None = None
    """When its caller's own bound on the wait ends it."""
    late: bool = False
    """Relegated: past its latest start."""


class Queue(Struct):
    """What waits on one path of the share tree."""

    way: Path
    tenant: TenantId
    slo_class: ClassName
    ready: Ranked[int] = field(default_factory=Ranked)
    """Those that can still make it, by the order's key."""
    starts: Ranked[int] = field(default_factory=Ranked)
    """The same by latest start; used only where that is not the key."""
    bounded: bool = False
    """Its requests, all or none, let others pass for so long only: keys may come before latest starts."""
    late: Ranked[int] = field(default_factory=Ranked)
    """Relegated ones, by how long they have waited."""
    side: Side | None = None
    """Where it is listed."""
    turn: int = 0
    """Its rank, where one line is kept for all."""
    starved: bool = False
    """The first of the late ones goes before those that can still make it."""
    boosted: bool = False
    since: int = 0
    change_at: int | None = None
    """When its listing must be looked at again."""

    @property
    def size(self) -> int:
        """Requests in it."""
        return self.ready.size + self.late.size

    @property
    def work(self) -> int:
        """Predicted work in it."""
        return self.ready.total + self.late.total

    def head(self) -> tuple[int, int, bool]:
        """Return (key, request, relegated) of the request that goes first."""
        first = None if self.starved else self.ready.first()
        if first is not None:
            return (*first, False)
        first = self.late.first()
        assert first is not None, "an empty queue"
        return (*first, True)


class Turn(Struct, frozen=True, gc=False):
    """Whose turn it is and which of its requests goes."""

    tenant: TenantId
    request: RequestId
    slo_class: ClassName
    relegated: bool
    """It is past its latest start and lets others pass; one that has starved does so no more."""
    lent: bool
    """A tenant further under its share could wait and let this one pass."""
    patient: bool
    """It can wait itself, or is hopeless: nobody competes for this turn."""
    queue: str
    """The queue it waits in."""
    score: ScoreTerms | None = None


class Backlog(Struct):
    """Everything that waits for one model."""

    queues: dict[str, Queue] = {}
    """By the key of their paths; only those in which something waits."""
    slots: dict[int, Waiting] = {}
    """By request."""
    inside: dict[int, str] = {}
    """By request, its queue."""
    lines: tuple[dict[ClassName, Ranked[str]], dict[ClassName, Ranked[str]]] = field(
        default_factory=lambda: ({}, {})
    )
    """Queues by side, class and first key: for orders that keep one line for everybody."""
    changes: Ranked[str] = field(default_factory=Ranked)
    """Queues by the instant their listing changes."""
    bounded: Ranked[int] = field(default_factory=Ranked)
    """Requests whose callers bound the wait, by when that ends it."""
    tenants: dict[str, int] = {}
    """Requests of a tenant in a class, by the key of their node."""
    classes: dict[ClassName, str] = {}
    """The node of each class that ever waited."""
    queued: dict[ClassName, int] = {}
    work: dict[ClassName, int] = {}
    """Predicted work that waits, by class."""
    size: int = 0
    work_ns: int = 0

    def add(  # noqa: PLR0913  where, what and under which rules
        self,
        order: Order,
        shares: Shares,
        way: Path,
        tenant: TenantId,
        slo_class: ClassName,
        waiting: Waiting,
        *,
        again: bool = False,
    ) -> None:
        """Queue a request; the caller must `refresh` its queue before the next turn.

        A path in which nothing waited is lifted (FAIR-1), unless it only waits `again`.
        """
        key = way[-1].key
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = Queue(way=way, tenant=tenant, slo_class=slo_class)
            self.classes.setdefault(slo_class, class_key(way))
            shares.join(way, again=again)
        request, work = waiting.request, waiting.work
        assert request not in self.slots, f"{request} waits already"
        self.slots[request], self.inside[request] = waiting, key
        queue.bounded = waiting.starve_at < NEVER
        self._insert(order, queue, waiting)
        if waiting.until is not None:
            self.bounded.add(waiting.until, request)
        shares.weigh(way, work)
        mine = tenant_key(way)
        self.tenants[mine] = self.tenants.get(mine, 0) + 1
        self.size += 1
        self.work_ns += work
        self.queued[slo_class] = self.queued.get(slo_class, 0) + 1
        self.work[slo_class] = self.work.get(slo_class, 0) + work

    def take(self, order: Order, shares: Shares, request: int) -> str | None:
        """Take a request out; returns its queue if something is left there.

        The caller must `refresh` that before the next turn.
        """
        waiting, key = self.slots.pop(request), self.inside.pop(request)
        queue = self.queues[key]
        slo_class, work = queue.slo_class, waiting.work
        self._remove(order, queue, waiting)
        if waiting.until is not None:
            self.bounded.remove(waiting.until, request)
        shares.weigh(queue.way, -work)
        mine = tenant_key(queue.way)
        if self.tenants[mine] == 1:
            del self.tenants[mine]
        else:
            self.tenants[mine] -= 1
        self.size -= 1
        self.work_ns -= work
        self.queued[slo_class] -= 1
        self.work[slo_class] -= work
        if queue.size:
            return key
        self._unlist(order, shares, queue)
        if queue.change_at is not None:
            self.changes.remove(queue.change_at, key)
        del self.queues[key]
        shares.leave(queue.way)
        return None

    def relegate(self, order: Order, key: str, now: InstantNs) -> list[RequestId]:
        """Move what can no longer make it behind its queue's other work; return what was moved."""
        if not order.relegates:
            return []
        queue, moved = self.queues[key], []
        starts = queue.ready if _key_is_start(order, queue) else queue.starts
        while (first := starts.first()) is not None and first[0] < now:
            waiting = self.slots[first[1]]
            self._remove(order, queue, waiting)
            waiting.late = True
            self._insert(order, queue, waiting)
            moved.append(RequestId(first[1]))
        return moved

    def refresh(self, order: Order, shares: Shares, key: str, now: InstantNs) -> None:
        """List a queue anew by its turn; call after any change of it."""
        queue = self.queues[key]
        lend = order.lend_after_ns
        change: int = NEVER
        head, late = queue.ready.first(), queue.late.first()
        urgent = boosted = False
        if head is not None:
            start, last = self.slots[head[1]].start, self._relegation(order, queue)
            soon = min(head[0], last - 1)  # a long prompt behind the head may have to go before it
            urgent = not is_patient(order, soon, now)
            if not urgent and lend is not None:
                change = min(change, soon - lend)
            change = min(change, last)
            rules = shares.rules
            if rules.boost and order.by_share and order.relegates:
                boosted = start - now <= rules.boost_ns
                if not boosted:
                    change = min(change, start - rules.boost_ns)
        queue.starved = False
        if late is not None:
            queue.starved = late[0] <= now
            if not queue.starved:
                change = min(change, late[0])
            # Where no turn is lent, the hopeless compete for theirs as others do.
            urgent = (
                urgent or queue.starved or (order.by_share and not order.scores and lend is None)
            )
        side = Side.URGENT if urgent else Side.LENDING
        self._list(order, shares, queue, side, boosted=boosted)
        at = None if change >= NEVER else change
        if at != queue.change_at:
            if queue.change_at is not None:
                self.changes.remove(queue.change_at, key)
            if at is not None:
                self.changes.add(at, key)
            queue.change_at = at

    def due(self, now: InstantNs) -> str | None:
        """Return a queue whose listing is out of date at `now`, or None."""
        first = self.changes.first()
        return first[1] if first is not None and first[0] <= now else None

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

    # Turns -----------------------------------------------------------------------------------

    def next_turn(self, order: Order, shares: Shares, blocked: frozenset[ClassName]) -> Turn | None:
        """Return whose turn it is among classes not blocked, or None if nobody waits in them."""
        for side in Side:
            found = next(self._firsts(order, shares, side, blocked), None)
            if found is not None:
                return self.turn_of(order, shares, found)
        return None

    def turns(
        self,
        order: Order,
        shares: Shares,
        blocked: frozenset[ClassName],
        now: InstantNs,
        work_ns: Callable[[int], int],
    ) -> Iterator[Turn]:
        """Yield the turns that may be given next, the best first: one, or all candidates of a score.

        `work_ns`: GPU time of a service.
        """
        if not isinstance(order, Score):
            turn = self.next_turn(order, shares, blocked)
            if turn is not None:
                yield turn
            return
        scored: list[tuple[float, str, ScoreTerms]] = []
        for key in self.candidates(shares, blocked, order.candidates):
            waiting = self.slots[self.queues[key].head()[1]]
            over = sum(term.counter - term.least for term in self.terms(order, shares, key))
            terms = order.terms(
                waiting.start - now, now - waiting.arrived_at, work_ns(over), waiting.prefill_ns
            )
            scored.append((-terms.total, key, terms))
        for _, key, terms in sorted(scored, key=lambda one: one[:2]):
            yield replace(self.turn_of(order, shares, key), score=terms)

    def candidates(
        self, shares: Shares, blocked: frozenset[ClassName], most: int
    ) -> tuple[str, ...]:
        """Return the queues with the least turns of each class not blocked: the urgent, if any are."""
        for side in Side:
            found: list[str] = []
            for first in shares.queues(side, blocked):
                way = self.queues[first].way
                if way[0].level > Level.CLASS:  # no classes: all queues stand side by side
                    return tuple(shares.lowest(side, ROOT, most))
                found += shares.lowest(side, class_key(way), most)
            if found:
                return tuple(found)
        return ()

    def in_line(self, order: Order, shares: Shares) -> Iterator[int]:
        """Yield the requests that can still make it in the order in which they go, if nobody joins.

        By share that is exact for the first only: each that goes is charged for, and may let others pass
        before its queue's next. Then the heads of further queues are told in the order of their turns.
        """
        if order.by_share:
            for side in Side:
                for key in shares.lowest(side, ROOT, IN_LINE) if shares.sides[side] else ():
                    yield self.queues[key].head()[1]
            return
        urgent, lending = (merge(*line.values()) for line in self.lines)
        yield from self._merged(urgent, late=False)
        # All that is ready is told: what is late behind it joins those who have nothing else.
        behind = sorted(
            (first[0], key)
            for line in self.lines[Side.URGENT].values()
            for _, key in line
            if (first := self.queues[key].late.first()) is not None
        )
        yield from self._merged(merge(lending, behind), late=True)

    def _merged(self, line: Iterator[tuple[int, str]], *, late: bool) -> Iterator[int]:
        """Yield the requests of the queues of a line by their keys; queues are opened as they come."""
        coming = next(line, None)
        near: list[tuple[int, int, Iterator[tuple[int, int]]]] = []
        while coming is not None or near:
            if coming is not None and (not near or coming[0] <= near[0][0]):
                queue = self.queues[coming[1]]
                rest = iter(queue.late if late else queue.ready)
                heappush(near, (*next(rest), rest))
                coming = next(line, None)
                continue
            _, request, rest = heappop(near)
            yield request
            following = next(rest, None)
            if following is not None:
                heappush(near, (*following, rest))

    def turn_of(self, order: Order, shares: Shares, key: str) -> Turn:
        """Return the turn that a listed queue would have."""
        queue = self.queues[key]
        _, request, late = queue.head()
        late = late and not queue.starved
        urgent = queue.side is Side.URGENT
        lent = urgent and order.by_share and shares.lent(queue.way)
        return Turn(queue.tenant, RequestId(request), queue.slo_class, late, lent, not urgent, key)

    def terms(self, order: Order, shares: Shares, key: str) -> tuple[Term, ...]:
        """Return why it is a listed queue's turn, level by level; () where shares do not matter."""
        queue = self.queues[key]
        return shares.terms(queue.way, queue.side or Side.URGENT) if order.by_share else ()

    def furthest_over(self, order: Order, shares: Shares, slo_class: ClassName) -> Queue:
        """Return the queue of a class furthest over its share, which makes room if one must.

        Without shares, the one whose first request is the last in line.
        """
        if order.by_share:
            return self.queues[shares.furthest_over(self.classes[slo_class])]
        best: tuple[Side, int, int, str] | None = None
        for side in Side:
            ranked = self.lines[side].get(slo_class)
            if ranked is None:
                continue
            for seen, (turn, key) in enumerate(ranked.backwards()):
                if seen == TIED or (best is not None and (side, turn) < best[:2]):
                    break
                place = (side, turn, self.queues[key].work, key)
                best = place if best is None or place > best else best
        assert best is not None, f"nobody is listed in {slo_class}"
        return self.queues[best[3]]

    def _firsts(
        self, order: Order, shares: Shares, side: Side, blocked: frozenset[ClassName]
    ) -> Iterator[str]:
        if order.by_share:
            yield from shares.queues(side, blocked)
            return
        best: tuple[int, str] | None = None
        for name, ranked in self.lines[side].items():
            first = ranked.first()
            if first is not None and name not in blocked and (best is None or first < best):
                best = first
        if best is not None:
            yield best[1]

    # Listing ---------------------------------------------------------------------------------

    def _list(
        self, order: Order, shares: Shares, queue: Queue, side: Side, *, boosted: bool
    ) -> None:
        key = queue.way[-1].key
        if order.by_share:
            since = queue.since
            if shares.rules.aging:
                since = self.slots[queue.head()[1]].arrived_at
            same = side is queue.side and boosted is queue.boosted and since == queue.since
            if not same:
                shares.enlist(queue.way, side, since, boosted=boosted)
            queue.side, queue.boosted, queue.since = side, boosted, since
            return
        turn = queue.head()[0]
        if side is queue.side and turn == queue.turn:
            return
        if queue.side is not None:
            self.lines[queue.side][queue.slo_class].remove(queue.turn, key)
        line = self.lines[side].get(queue.slo_class)
        if line is None:
            line = self.lines[side][queue.slo_class] = Ranked()
        line.add(turn, key)
        queue.side, queue.turn = side, turn

    def _unlist(self, order: Order, shares: Shares, queue: Queue) -> None:
        if queue.side is None:
            return
        if order.by_share:
            shares.delist(queue.way)
        else:
            self.lines[queue.side][queue.slo_class].remove(queue.turn, queue.way[-1].key)
        queue.side = None

    def _insert(self, order: Order, queue: Queue, waiting: Waiting) -> None:
        if waiting.late:
            queue.late.add(waiting.starve_at, waiting.request, waiting.work)
            return
        queue.ready.add(waiting.key, waiting.request, waiting.work)
        if order.relegates and not _key_is_start(order, queue):
            queue.starts.add(waiting.start, waiting.request)

    def _remove(self, order: Order, queue: Queue, waiting: Waiting) -> None:
        if waiting.late:
            queue.late.remove(waiting.starve_at, waiting.request)
            return
        queue.ready.remove(waiting.key, waiting.request)
        if order.relegates and not _key_is_start(order, queue):
            queue.starts.remove(waiting.start, waiting.request)

    @staticmethod
    def _relegation(order: Order, queue: Queue) -> int:
        """Return when the first of a queue's ready requests can no longer make it."""
        first = None
        if order.relegates:
            first = (queue.ready if _key_is_start(order, queue) else queue.starts).first()
        return NEVER if first is None else first[0] + 1


def _key_is_start(order: Order, queue: Queue) -> bool:
    """Return whether the keys of a queue's requests are their latest starts."""
    return order.by_start and not queue.bounded


def waiting_key(
    order: Order, place: Place, arrived_at: InstantNs, starve_ns: DurationNs | None
) -> int:
    """Return the key of a request that may wait for `starve_ns` at most before others pass it no more.

    It is as urgent then as if its latest start were so near that it lends no turn. Only where turns are
    lent; elsewhere the key stands.
    """
    key, lend = order.key(place), order.lend_after_ns
    if starve_ns is None or lend is None:
        return key
    return min(key, arrived_at + starve_ns + lend)


def is_patient(order: Order, soon: int, now: InstantNs) -> bool:
    """Return whether a request that must go by `soon` can wait so long that its tenant lends its turn."""
    lend = order.lend_after_ns
    return lend is not None and soon - now > lend


NONE: frozenset[ClassName] = frozenset()
"""No class is blocked."""
