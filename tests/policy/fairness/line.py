"""A backlog in its share tree, driven as the plane does it: with a clock, ids and charges."""

from collections import Counter

from headrace.model.ids import ClassName, RequestId, TenantId
from headrace.model.paths import Level, Link, Path, class_key, class_of, path
from headrace.policy.fairness.backlog import NEVER, NONE, Backlog, Turn, Waiting, waiting_key
from headrace.policy.fairness.shares import Rules, Shares
from headrace.policy.ordering.orders import FAR, Order, Place, TenantFirst
from headrace.units import MICRO, NS_PER_S, InstantNs, WorkNs, seconds

S = NS_PER_S
CHAT, BATCH = ClassName("chat"), ClassName("batch")
BEGIN = InstantNs(10_000 * S)


def node(
    level: Level, name: str, weight: int = 1, *, least: float = 0.0, most: float = 1.0
) -> Link:
    """Return a node of the tree with its limits as shares."""
    return Link(level, name, weight, round(least * MICRO), round(most * MICRO))


def lane(name: str, weight: int = 1, *, least: float = 0.0, most: float = 1.0) -> Link:
    return node(Level.LANE, name, weight, least=least, most=most)


def klass(name: str, weight: int = 1, *, least: float = 0.0, most: float = 1.0) -> Link:
    return node(Level.CLASS, name, weight, least=least, most=most)


def org(name: str, weight: int = 1, *, least: float = 0.0, most: float = 1.0) -> Link:
    return node(Level.ORGANISATION, name, weight, least=least, most=most)


def tenant(name: str, weight: int = 1, *, least: float = 0.0, most: float = 1.0) -> Link:
    return node(Level.TENANT, name, weight, least=least, most=most)


def user(name: str) -> Link:
    return node(Level.USER, name)


def chat(name: str, weight: int = 1, *, least: float = 0.0, most: float = 1.0) -> Path:
    """Return the way to a tenant in the class of most tests."""
    return path(klass(CHAT), tenant(name, weight, least=least, most=most))


def batch(name: str, weight: int = 1) -> Path:
    """Return the way to a tenant in another class of the same weight."""
    return path(klass(BATCH), tenant(name, weight))


class Line:
    """What waits, the counters, and the time."""

    def __init__(self, order: Order | None = None, rules: Rules | None = None) -> None:
        self.backlog = Backlog()
        self.shares = Shares(rules=rules or Rules())
        self.order: Order = order or TenantFirst()
        self.now = BEGIN
        self.ids = 0
        self.served: Counter[str] = Counter()

    def add(
        self, way: Path, latest_s: float = 1.0, *, work: int = 10, tokens: int = 1,
        starve_s: float | None = None, until_s: float | None = None,
    ) -> int:  # fmt: skip
        """Queue a request that must start within so many seconds; return its id."""
        self.ids += 1
        start = InstantNs(self.now + round(latest_s * S))
        place = Place(self.ids, InstantNs(start + work), start, tokens, WorkNs(work))
        starve = None if starve_s is None else seconds(starve_s)
        waiting = Waiting(
            request=self.ids,
            key=waiting_key(self.order, place, self.now, starve),
            arrived_at=self.now,
            start=start,
            work=work,
            starve_at=InstantNs(NEVER + self.ids if starve is None else self.now + starve),
            until=None if until_s is None else InstantNs(self.now + seconds(until_s)),
        )
        slo_class = class_of(class_key(way))
        names = [step.name for step in way if step.level is Level.TENANT]
        self.backlog.add(self.order, self.shares, way, TenantId(names[-1]), slo_class, waiting)
        self.refresh(way[-1].key)
        return self.ids

    def add_for_ever(self, way: Path, *, work: int = 10, starve_s: float | None = None) -> int:
        """Queue a request without a deadline."""
        return self.add(way, FAR / S, work=work, starve_s=starve_s)

    def refresh(self, key: str) -> list[RequestId]:
        moved = self.backlog.relegate(self.order, key, self.now)
        self.backlog.refresh(self.order, self.shares, key, self.now)
        return moved

    def take(self, request: int) -> str | None:
        """Take a request out; return its queue if something is left there."""
        left = self.backlog.take(self.order, self.shares, request)
        if left is not None:
            self.refresh(left)
        return left

    def charge(self, way: Path, service: int) -> None:
        self.shares.charge(way, 0, service)
        for step in way:
            self.served[step.key] += service

    def wait(self, for_s: float) -> list[RequestId]:
        """Let time pass as the plane does; return what was relegated."""
        self.now = InstantNs(self.now + round(for_s * S))
        moved: list[RequestId] = []
        while (key := self.backlog.due(self.now)) is not None:
            moved += self.refresh(key)
        return moved

    def look(self, *blocked: ClassName) -> Turn | None:
        return self.backlog.next_turn(self.order, self.shares, frozenset(blocked))

    def turn(self, *blocked: ClassName) -> int | None:
        """Return the request whose turn it is."""
        found = self.look(*blocked)
        return None if found is None else found.request

    def serve(self, service: int = 1) -> Path:
        """Give the next turn, at so much service; return whose it was."""
        found = self.look(*NONE)
        assert found is not None, "somebody waits"
        way = self.backlog.queues[found.queue].way
        self.charge(way, service)
        self.take(found.request)
        return way

    def counter(self, way: Path) -> int:
        return self.shares.counter(way[-1].key)


def busy(line: Line, ways: tuple[Path, ...], turns: int, service: int = 1_000) -> list[Path]:
    """Give so many turns while something waits on each of these ways; return whose they were."""
    for way in ways:
        while way[-1].key not in line.backlog.queues or line.backlog.queues[way[-1].key].size < 2:
            line.add(way, 5)
    found = []
    for _ in range(turns):
        found.append(line.serve(service))
        line.add(found[-1], 5)
    return found


def parts(turns: list[Path], ways: tuple[Path, ...]) -> list[float]:
    return [turns.count(way) / len(turns) for way in ways]
