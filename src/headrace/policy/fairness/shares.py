"""Who has had how much of what was served? A tree of virtual counters, and whose turn it makes.

Shares form a tree: lane, class, organisation, tenant, user (FAIR-4). Every node has a virtual counter,
service / weight, and competes with its siblings alone: from the root down, the backlogged child with
the least counter goes first. A child that becomes backlogged is lifted to the least of its backlogged
siblings, so that idle time earns no credit (virtual token counters of Sheng et al., OSDI 2024, at each
level; the hierarchy is that of H-SFQ, Goyal et al., OSDI 1996). What one node does not use goes to its
siblings: the tree is work-conserving.

Between siblings a node may have a *minimum*, a share of what its parent serves that it gets before
the counters are asked, and a *maximum*, beyond which it goes only if nobody else wants to (the two
further curves of H-FSC, Stoica et al., SIGCOMM 1997, with the parent's service for a clock). *Aging*
and *boost* change a turn, not a counter, so that both are bounded exceptions.

Two sides: those with work that cannot wait, and those that lend their turn. State is plain data, so
that it can be frozen; whoever owns the counters (the plane's ledger, an engine's batch) calls `charge`,
and the backlog says who waits.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum

from msgspec import Struct, field

from headrace.model.ids import ClassName
from headrace.model.paths import ROOT, Band, Level, Path, Step, Term, class_of, is_lane, parent_of
from headrace.policy.fairness.siblings import TIED, Mark, Siblings
from headrace.policy.fairness.vtc import lifted, share
from headrace.units import MICRO, NS_PER_S, DurationNs

SINK_AT = 1 << 60
"""Service at which counters are brought down: far from 2^63, and some days of a large fleet."""
SUNK = 1 << 50
"""Where they are brought to: more than all requests in flight may give back."""
USERS = 65_536
"""Users that are remembered while nothing of theirs waits; beyond, the one idle longest is forgotten."""


class Side(IntEnum):
    """Why a queue waits for a turn."""

    URGENT = 0
    """It has work that can still make it and cannot wait, or that has waited for too long."""
    LENDING = 1
    """All it has can wait, or is hopeless: it goes when nobody is urgent."""


class Rules(Struct, frozen=True, kw_only=True, gc=False):
    """Bounded exceptions from the counters, in service."""

    aging: int = 0
    """Service that a node's turn is ahead of its counter for each second its first request has waited."""
    boost: int = 0
    """Service that a queue's turn is ahead near its deadline."""
    boost_ns: DurationNs = DurationNs(0)
    """Slack below which that begins."""
    memory: int = 1 << 40
    """Service beyond a minimum or maximum, or short of it, that is remembered, and most of what was lent that
    a lender has back: what is older is forgiven, and a loan given away."""


class Shares(Struct):
    """The counters of one model's tree, and its backlogged nodes by their turns."""

    counters: dict[str, int] = {}
    """By node, service / weight."""
    served: dict[str, int] = {}
    """By inner node, the service of all below it: the clock of its children's minimums and maximums."""
    lows: dict[str, int] = {}
    """Where its parent's clock must stand for a node with a minimum to have had it."""
    highs: dict[str, int] = {}
    """Where its parent's clock must stand for a node with a maximum to be within it."""
    waiting: dict[str, int] = {}
    """Queues below a node in which something waits; none: not in here."""
    work: dict[str, int] = {}
    """Predicted work that waits below a node, likewise."""
    last_out: dict[str, str] = {}
    """By inner node, the child that was the last to have nothing waiting any more."""
    idle_users: dict[str, None] = {}
    """Users with nothing waiting, idle longest first."""
    sides: tuple[dict[str, Siblings], dict[str, Siblings]] = field(default_factory=lambda: ({}, {}))
    """By inner node, its listed children."""
    rules: Rules = Rules()

    # Counters --------------------------------------------------------------------------------

    def join(self, way: Path, *, again: bool = False) -> None:
        """Let a queue wait: nodes that were idle are lifted.

        `again`: it has waited all the time and is only listed anew; nodes that are known stay.
        """
        parent = ROOT
        for step in way:
            key = step.key
            count = self.waiting.get(key, 0)
            if not count and not (again and key in self.counters):
                self._lift(parent, step)
            self.waiting[key] = count + 1
            parent = key
        self.idle_users.pop(parent, None)

    def leave(self, way: Path) -> None:
        """Let a queue have nothing waiting any more; it must not be listed."""
        parent = ROOT
        for step in way:
            key = step.key
            count = self.waiting[key] - 1
            if count:
                self.waiting[key] = count
            else:
                del self.waiting[key]
                self.last_out[parent] = key
            parent = key
        last = way[-1]
        if last.level is Level.USER and not self.waiting.get(last.key):
            self._idle(last.key)

    def come(self, way: Path) -> None:
        """Lift a queue whose request may go at once, where nothing waits: as `join` would."""
        assert not self.waiting, "somebody waits"
        parent = ROOT
        for step in way:
            if self.last_out.get(parent) != step.key or step.minimum or step.maximum < MICRO:
                self._lift(parent, step)
            parent = step.key

    def gone(self, way: Path) -> None:
        """Remember a queue whose request went at once: as `leave` would."""
        parent = ROOT
        for step in way:
            self.last_out[parent] = step.key
            parent = step.key
        if way[-1].level is Level.USER:
            self.idle_users.pop(parent, None)
            self._idle(parent)

    def _idle(self, key: str) -> None:
        """Remember an idle user, and forget the one that has been idle longest if there are many."""
        self.idle_users[key] = None
        if len(self.idle_users) > USERS:
            gone = next(iter(self.idle_users))
            del self.idle_users[gone]
            self.counters.pop(gone, None)
            if self.last_out.get(parent_of(gone)) == gone:
                del self.last_out[parent_of(gone)]

    def _lift(self, parent: str, step: Step) -> None:
        key = step.key
        floor = self.least(parent)
        last = self.last_out.get(parent)
        stood = None if last is None else self.counters.get(last)
        self.counters[key] = lifted(self.counters.get(key, 0), floor, stood)
        clock = self.served.get(parent, 0)
        if step.minimum:
            self.lows[key] = max(self.lows.get(key, 0), clock)
        if step.maximum < MICRO:
            self.highs[key] = max(self.highs.get(key, 0), clock)

    def least(self, parent: str) -> int | None:
        """Return the least counter among listed children that compete, else among those that lend.

        A lender's counter stands still while others are served; whoever comes back from idle must not
        be lifted only that far, or its idle time would have earned credit (FAIR-1).
        """
        for side in self.sides:
            siblings = side.get(parent)
            if siblings is not None and siblings.marks:
                found = siblings.fair.first() or siblings.capped.first()
                assert found is not None
                return self.counters[found[1]]
        return None

    def counter(self, key: str) -> int:
        """Return where a node's counter stands; 0 for one that was never served."""
        return self.counters.get(key, 0)

    def receive(self, way: Path, counters: tuple[int, ...]) -> None:
        """Take over where another that schedules the same nodes says that their counters stand.

        An engine counts on from there by what it makes: base = max(base + local, told).
        """
        for step, told in zip(way, counters, strict=True):
            if told > self.counters.get(step.key, 0):
                self.counters[step.key] = told
        if self.waiting:
            self._rerank(way)

    def charge(self, way: Path, before: int, after: int) -> None:
        """Replace a service of `before` on a path by `after`, at every level of it."""
        if before == after:
            return
        parent = ROOT
        for step in way:
            key = step.key
            clock = self.served.get(parent, 0) + after - before
            self.served[parent] = clock
            if key not in self.counters:  # forgotten meanwhile, and so is what stands below it
                break
            self.counters[key] += share(after, step.weight) - share(before, step.weight)
            if step.minimum:
                self.lows[key] = self._mark(self.lows, step, step.minimum, before, after, clock)
            if step.maximum < MICRO:
                self.highs[key] = self._mark(self.highs, step, step.maximum, before, after, clock)
            parent = key
        if self.waiting:
            self._rerank(way)
        if self.served[ROOT] > SINK_AT:
            self._sink()

    def _sink(self) -> None:
        """Take from all counters and clocks what they have in common: only differences count.

        A journal's numbers have 64 bits, and a hundred busy replicas would fill them in weeks. Idle
        nodes that stand below those that wait come up, as they would on their return.
        """
        children: dict[str, list[str]] = {}
        for key in self.counters:
            children.setdefault(parent_of(key), []).append(key)
        for parent, keys in children.items():
            floor = self.least(parent)
            if floor is None:
                floor = min(self.counters[key] for key in keys)
            taken = max(0, floor - 2 * SUNK)
            for key in keys:
                kept = self.counters[key] - taken
                self.counters[key] = max(kept, SUNK) if taken else kept
            passed = max(0, self.served.get(parent, 0) - SUNK)
            if passed:
                self.served[parent] = SUNK
            for marks in (self.lows, self.highs):
                for key in marks.keys() & set(keys):
                    marks[key] -= passed
            for side in self.sides:
                if parent in side:
                    side[parent] = side[parent].shifted(taken, passed)

    def _mark(
        self, marks: dict[str, int], step: Step, part: int, before: int, after: int, clock: int
    ) -> int:
        """Return where a minimum's or maximum's mark stands then; an old excess is forgiven, and an old lack."""
        # Without the latter, refunds of a forgiven excess would add up to a right to everything.
        moved = marks.get(step.key, clock) + after * MICRO // part - before * MICRO // part
        reach = min(self.rules.memory * MICRO // part, SINK_AT)
        return min(max(moved, clock - reach), clock + reach)

    def rebase(self) -> None:
        """Start all counters anew, as under another cost; call it while nobody is listed."""
        assert not any(side for side in self.sides), "somebody is listed"
        self.counters = dict.fromkeys(self.counters, 0)
        self.served, self.lows, self.highs = {}, {}, {}

    def forget_listings(self) -> None:
        """Let nobody wait: who does must join and be listed anew."""
        self.sides = ({}, {})
        self.waiting, self.work = {}, {}

    def keep(self, declared: Callable[[str], bool]) -> None:
        """Forget the nodes that are declared no more; nothing waits there."""
        for marks in (self.counters, self.served, self.lows, self.highs, self.idle_users):
            for key in [one for one in marks if not declared(one)]:
                del marks[key]
        for parent, child in list(self.last_out.items()):
            if child not in self.counters:
                del self.last_out[parent]

    # Listings --------------------------------------------------------------------------------

    def weigh(self, way: Path, work: int) -> None:
        """Count so much more (or less) predicted work as waiting."""
        for step in way:
            total = self.work.get(step.key, 0) + work
            if total:
                self.work[step.key] = total
            else:
                self.work.pop(step.key, None)

    def enlist(self, way: Path, side: Side, since: int, *, boosted: bool = False) -> None:
        """List a waiting queue on one side, where it may be already, by its present turn.

        `since`: when its first request came.
        """
        last = way[-1]
        parent = way[-2].key if len(way) > 1 else ROOT
        self._drop(1 - side, parent, last.key)
        boost = share(self.rules.boost, last.weight) if boosted else 0
        self._put(side, parent, last, since, boost)
        self._rise(way)

    def delist(self, way: Path) -> None:
        """Take a queue off its list, if it is on one."""
        last = way[-1]
        parent = way[-2].key if len(way) > 1 else ROOT
        for side in Side:
            self._drop(side, parent, last.key)
        self._rise(way)

    def bias(self, since: int) -> int:
        """Return how far a turn stands behind its counter by when its request came: all ages grow alike."""
        return since * self.rules.aging // NS_PER_S

    def _rise(self, way: Path) -> None:
        """List the inner nodes of a path by what is listed below them."""
        for at in range(len(way) - 2, -1, -1):
            step = way[at]
            parent = way[at - 1].key if at else ROOT
            for side in Side:
                below = self.sides[side].get(step.key)
                if below is not None:
                    self._put(side, parent, step, self._age(step.key, below))
                else:
                    self._drop(side, parent, step.key)

    def _age(self, key: str, below: Siblings) -> int:
        """Return since when an inner node waits: it is as old as the child of it that goes next."""
        if not self.rules.aging:
            return 0
        found = below.first(self.served.get(key, 0))
        assert found is not None
        return below.marks[found[0]].since

    def _put(self, side: int, parent: str, step: Step, since: int, boost: int = 0) -> None:
        """List a node, or move it to where it stands now."""
        siblings = self.sides[side].get(parent)
        if siblings is None:
            siblings = self.sides[side][parent] = Siblings()
        elif side == Side.URGENT and step.key not in siblings.marks:
            self._limit(parent, step)
        like = Mark(
            weight=step.weight,
            turn=0,
            bias=self.bias(since) - boost,
            since=since,
            high=0 if step.maximum < MICRO else None,
            low=0 if step.minimum else None,
        )
        self._stand(siblings, parent, step.key, like)

    def _limit(self, parent: str, step: Step) -> None:
        """Bound what a lender may have back at once: what it lent longer ago than `memory` is given away.

        Else whoever has lent for minutes would have everything for minutes.
        """
        floor = self.least(parent)
        if floor is not None:
            lowest = floor - share(self.rules.memory, step.weight)
            self.counters[step.key] = max(self.counters[step.key], lowest)

    def _stand(self, siblings: Siblings, parent: str, key: str, like: Mark) -> None:
        """Rank a node by what it has had until now; the rest is as it was marked."""
        clock = self.served.get(parent, 0)
        high = None if like.high is None else self.highs.setdefault(key, clock)
        mark = Mark(
            weight=like.weight,
            turn=self.counters[key] + like.bias,
            bias=like.bias,
            since=like.since,
            capped=high is not None and high > clock,
            high=high,
            low=None if like.low is None else self.lows.setdefault(key, clock),
        )
        siblings.put(key, mark)

    def _rerank(self, way: Path) -> None:
        """Rank the listed nodes of a path by their counters as they stand now.

        As they are marked, not as the path says: it may be of an earlier configuration.
        """
        self._release(way)
        for at in range(len(way) - 1, -1, -1):
            key = way[at].key
            parent = way[at - 1].key if at else ROOT
            for side in self.sides:
                siblings = side.get(parent)
                mark = None if siblings is None else siblings.marks.get(key)
                if siblings is None or mark is None:
                    continue
                below = side.get(key)
                if below is not None:
                    mark.since = self._age(key, below)
                    mark.bias = self.bias(mark.since)
                self._stand(siblings, parent, key, mark)

    def _drop(self, side: int, parent: str, key: str) -> None:
        """Take a node off its list, if it is on one."""
        siblings = self.sides[side].get(parent)
        if siblings is None or key not in siblings.marks:
            return
        siblings.drop(key)
        if not siblings.marks:
            del self.sides[side][parent]

    def _release(self, way: Path) -> None:
        """Let back among their siblings whom others' service has brought within their maximum."""
        parent = ROOT
        for step in way:
            clock = self.served.get(parent, 0)
            for side in self.sides:
                siblings = side.get(parent)
                if siblings is not None and siblings.capped.size:
                    siblings.release(clock)
            parent = step.key

    # Questions -------------------------------------------------------------------------------

    def queues(self, side: Side, blocked: frozenset[ClassName]) -> Iterator[str]:
        """Yield, for each class not blocked in the order of their turns, the queue that goes."""
        yield from self._below(side, ROOT, blocked)

    def _below(self, side: Side, parent: str, blocked: frozenset[ClassName]) -> Iterator[str]:
        siblings = self.sides[side].get(parent)
        if siblings is None:
            return
        for key, _ in siblings.order(self.served.get(parent, 0)):
            if is_lane(key):
                yield from self._below(side, key, blocked)
            elif class_of(key) not in blocked:
                yield self.leaf(side, key)

    def leaf(self, side: Side, key: str) -> str:
        """Return the queue below a listed node that goes first."""
        while (siblings := self.sides[side].get(key)) is not None:
            found = siblings.first(self.served.get(key, 0))
            assert found is not None, f"{key!r} has nobody listed"
            key = found[0]
        return key

    def lowest(self, side: Side, key: str, most: int) -> Iterator[str]:
        """Yield at most so many queues below a listed node, in the order of their turns."""
        siblings = self.sides[side].get(key)
        if siblings is None:
            yield key
            return
        for child, _ in siblings.order(self.served.get(key, 0)):
            for found in self.lowest(side, child, most):
                yield found
                most -= 1
                if not most:
                    return

    def lent(self, way: Path) -> bool:
        """Return whether at some level a lender with a lesser turn lets this urgent queue pass."""
        parent = ROOT
        for step in way:
            lending = self.sides[Side.LENDING].get(parent)
            first = None if lending is None else lending.fair.first()
            mark = self.sides[Side.URGENT][parent].marks.get(step.key)
            if mark is None or first is None or first[1] == step.key:
                pass
            elif first[0] < mark.turn:
                return True
            parent = step.key
        return False

    def terms(self, way: Path, side: Side) -> tuple[Term, ...]:
        """Return level by level why a queue goes: for the record of a turn."""
        found: list[Term] = []
        parent = ROOT
        for step in way:
            counter = self.counters.get(step.key, 0)
            least, band, ahead = counter, Band.FAIR, 0
            siblings = self.sides[side].get(parent)
            mark = None if siblings is None else siblings.marks.get(step.key)
            if siblings is not None and mark is not None:
                first = siblings.fair.first()
                if first is not None:
                    least = min(counter, self.counters[first[1]])
                if mark.low is not None and mark.low < self.served.get(parent, 0):
                    band = Band.MINIMUM
                elif mark.capped:
                    band = Band.CAPPED
                ahead = self.bias(mark.since) - mark.bias
            found.append(Term(step.level, step.name, counter, least, step.weight, band, ahead))
            parent = step.key
        return tuple(found)

    def furthest_over(self, key: str) -> str:
        """Return the queue below a node that waits and is furthest over its share.

        Of equals, as nodes lifted to the same counter are, the one with most work waiting for its
        weight: it is furthest over as soon as that is served. `TIED` of them are compared.
        """
        while (child := self._last(key)) is not None:
            key = child
        return key

    def _last(self, parent: str) -> str | None:
        best: tuple[bool, int, int, str] | None = None
        for side in self.sides:
            siblings = side.get(parent)
            if siblings is None:
                continue
            for seen, (capped, rank, name) in enumerate(siblings.last()):
                if seen == TIED or (best is not None and (capped, rank) < best[:2]):
                    break
                weight = siblings.marks[name].weight
                place = (capped, rank, self.work.get(name, 0) // weight, name)
                best = place if best is None else max(best, place)
        return None if best is None else best[3]
