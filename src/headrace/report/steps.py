"""What do the steps of an engine come to? Shares, order, interference and victims of a step log.

Each function takes the steps in order, and whom the log's head tells to be alive when they begin.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from msgspec import Struct

from headrace.model.ids import ClassName, TenantId
from headrace.model.steplog import Alive, Arrived, Step
from headrace.policy.fairness.costs import Linear, TokenCost
from headrace.report.stats import ratio
from headrace.units import MICRO, NS_PER_MS, DurationNs, InstantNs, Service

UNKNOWN = TenantId("?")
"""Tenant of a request whose arrival is not in the log."""
OUTPUT_WEIGHT = 2.0
"""Service of an output token in those of an input token, where no profile says: the published 1:2."""


def token_service(output_weight: float = OUTPUT_WEIGHT) -> Linear:
    """Return the service of tokens, in millionths of an input token; a cached one as by default."""
    return Linear(
        uncached=MICRO,
        cached=round(MICRO * TokenCost().cached_weight),
        output=round(MICRO * output_weight),
    )


class Requests:
    """Who is known and who waits, as one step after another is taken; who ended is forgotten.

    A step that was planned while the one before it ran may still have somebody who ended in that: what
    it computed of such a request is nobody's, and told of nobody.
    """

    def __init__(self, alive: Iterable[Alive] = ()) -> None:
        """Begin with those who were there before."""
        self.known: dict[int, Arrived] = {}
        self._waiting: dict[int, TenantId] = {}
        self._by_tenant: dict[TenantId, int] = {}
        for one in alive:
            self.known[one.arrived.n] = one.arrived
            if not one.running:
                self._wait(one.arrived.n)

    def begin(self, step: Step) -> None:
        """Take who arrived and what scheduling did."""
        for one in step.arrived:
            self.known[one.n] = one
            self._wait(one.n)
        for n in (*step.started, *step.resumed):
            self._leave(n)
        for n in step.preempted:
            self._wait(n)

    def end(self, step: Step) -> None:
        """Take who ended."""
        for one in step.ended:
            self._leave(one.n)
            self.known.pop(one.n, None)

    def of(self, numbers: Iterable[int]) -> list[int]:
        """Return those of them that are not over."""
        return [n for n in numbers if n in self.known]

    def backlogged(self) -> set[TenantId]:
        """Return the tenants of whom at least one request waits."""
        return self._by_tenant.keys() - {UNKNOWN}

    def _wait(self, n: int) -> None:
        if n in self.known and n not in self._waiting:
            tenant = self._waiting[n] = self.known[n].tenant
            self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + 1

    def _leave(self, n: int) -> None:
        tenant = self._waiting.pop(n, None)
        if tenant is not None:
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]


def walk(steps: Iterable[Step], alive: Iterable[Alive] = ()) -> Iterator[tuple[Step, Requests]]:
    """Yield each step with who waits once it is scheduled; who ends in it is still known then."""
    requests = Requests(alive)
    for step in steps:
        requests.begin(step)
        yield step, requests
        requests.end(step)


class Used(Struct, kw_only=True, gc=False):
    """Tokens that a tenant was served."""

    computed: int = 0
    """Prompt tokens computed for the first time."""
    recomputed: int = 0
    """Tokens computed again after a preemption: nobody is charged for them."""
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    output: int = 0
    """Tokens made: one for each decode step, and one where a prefill ends."""

    def add(self, other: "Used") -> None:
        """Add another's to these."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def service(self, rates: Linear) -> Service:
        """Return what they weigh, in millionths of an input token."""
        return Service(rates.amount(self.computed, self.cached, self.output))


class Meter:
    """Counts each position of a request once, however often it is computed."""

    def __init__(self) -> None:
        """Count from nothing."""
        self._to: dict[int, int] = {}  # by request: the first position not yet computed
        self._made: dict[int, int] = {}  # and tokens made

    def take(self, step: Step, requests: Requests) -> dict[TenantId, Used]:
        """Return what a step gave each tenant."""
        found: dict[TenantId, Used] = {}
        started = set(step.started)
        for n, position, tokens in step.prefills:
            one = requests.known.get(n)
            if one is None:
                continue
            used = found.setdefault(one.tenant, Used())
            if n in started and n not in self._to:
                used.cached += position
            to = max(position, self._to.get(n, 0))
            end = position + tokens
            new = max(0, min(end, one.prompt_tokens) - to)
            used.computed += new
            used.recomputed += tokens - new
            self._to[n] = max(to, end)
            if end >= one.prompt_tokens + self._made.get(n, 0):
                self._token(n, used)
        for n in requests.of(step.decodes):
            self._token(n, found.setdefault(requests.known[n].tenant, Used()))
        for over in step.ended:
            self._to.pop(over.n, None)
            self._made.pop(over.n, None)
        return found

    def _token(self, n: int, used: Used) -> None:
        self._made[n] = self._made.get(n, 0) + 1
        used.output += 1


class Contended(Struct, frozen=True, kw_only=True):
    """What tenants got while they had to share."""

    steps: int
    """Steps in which requests of at least two tenants waited."""
    backlogged: dict[TenantId, int]
    """By tenant, in how many of those steps one of its own did."""
    service: dict[TenantId, Service]
    """By tenant, what it was given in the latter: who waits for nothing is owed nothing."""


def contended(
    steps: Iterable[Step], alive: Iterable[Alive] = (), rates: Linear | None = None
) -> Contended:
    """Return what backlogged tenants got in the steps in which at least two of them were."""
    rates = token_service() if rates is None else rates
    meter, count = Meter(), 0
    waited: dict[TenantId, int] = {}
    service: dict[TenantId, Service] = {}
    for step, requests in walk(steps, alive):
        given = meter.take(step, requests)
        tenants = requests.backlogged()
        if len(tenants) < 2:  # noqa: PLR2004
            continue
        count += 1
        for tenant in tenants:
            waited[tenant] = waited.get(tenant, 0) + 1
            got = given[tenant].service(rates) if tenant in given else 0
            service[tenant] = Service(service.get(tenant, 0) + got)
    return Contended(steps=count, backlogged=waited, service=service)


def share_while_backlogged(
    steps: Iterable[Step], alive: Iterable[Alive] = (), rates: Linear | None = None
) -> dict[TenantId, float]:
    """Return each tenant's part of the service given to backlogged tenants, while two or more were.

    A tenant is backlogged in a step if one of its requests waits once that is scheduled. Nothing where
    there was no such step, or no service in any.
    """
    service = contended(steps, alive, rates).service
    total = sum(service.values())
    return {tenant: got / total for tenant, got in sorted(service.items())} if total else {}


def prefill_between_tokens(
    steps: Iterable[Step], alive: Iterable[Alive] = ()
) -> dict[TenantId, list[int]]:
    """Return by tenant the prompt tokens computed between two decode steps of one request.

    They are everybody's, of all steps after the former up to and with the latter, for it is those that
    the token of the latter had to wait for. Two steps between which the request was preempted are no pair.
    """
    found: dict[TenantId, list[int]] = {}
    before: dict[int, int] = {}  # by request: prefill up to and with its last decode step
    total = 0
    for step, requests in walk(steps, alive):
        for n in step.preempted:
            before.pop(n, None)
        total += sum(tokens for _, _, tokens in step.prefills)
        for n in requests.of(step.decodes):
            if n in before:
                found.setdefault(requests.known[n].tenant, []).append(total - before[n])
            before[n] = total
        for over in step.ended:
            before.pop(over.n, None)
    return found


class Order(Struct, frozen=True, gc=False):
    """Pairs of requests that waited together, and in how many the earlier deadline went first."""

    pairs: int = 0
    kept: int = 0

    @property
    def share(self) -> float | None:
        """Return the part in order; None: there was no pair."""
        return ratio(self.kept, self.pairs)


def first_order(steps: Iterable[Step], alive: Iterable[Alive] = ()) -> Order:
    """Return how far tenants' requests were started earliest deadline first.

    A pair is two requests of one tenant, both with a deadline (arrival plus time left), that had
    arrived and not started when the first of them did. Equal deadlines are in order. Relegated ones
    pair among themselves: they go behind the others whatever their deadlines.
    """
    lanes = _Lanes()
    pairs = kept = 0
    for one in alive:
        if not one.started:
            lanes.wait(one.arrived)
    for step in steps:
        for came in step.arrived:
            lanes.wait(came)
        for n in step.started:
            behind, later = lanes.leave(n)
            pairs, kept = pairs + behind, kept + later
        for over in step.ended:
            lanes.leave(over.n)
    return Order(pairs, kept)


class _Lanes:
    """Deadlines of those never started, sorted, by tenant and whether they are relegated."""

    def __init__(self) -> None:
        self._due: dict[tuple[TenantId, bool], list[InstantNs]] = {}
        self._one: dict[int, Arrived] = {}

    def wait(self, one: Arrived) -> None:
        """Take a request, if it has a deadline."""
        due = deadline(one)
        if due is not None:
            self._one[one.n] = one
            insort(self._due.setdefault((one.tenant, one.relegated), []), due)

    def leave(self, n: int) -> tuple[int, int]:
        """Return how many it leaves behind in its lane, and how many of those are due no earlier."""
        one = self._one.pop(n, None)
        due = None if one is None else deadline(one)
        if one is None or due is None:
            return 0, 0
        lane = self._due[one.tenant, one.relegated]
        at = bisect_left(lane, due)
        lane.pop(at)
        return len(lane), len(lane) - at


def deadline(one: Arrived) -> InstantNs | None:
    """Return when a first token is due, on the clock of the steps; None: nobody told."""
    return None if one.left_ms is None else InstantNs(one.at_ns + one.left_ms * NS_PER_MS)


class Victim(Struct, frozen=True, kw_only=True, gc=False):
    """One preemption."""

    step: int
    """Number of the step."""
    at_ns: InstantNs
    n: int
    tenant: TenantId
    slo_class: ClassName
    relegated: bool
    deadline_ns: InstantNs | None
    """When its first token was due."""


def victims(steps: Iterable[Step], alive: Iterable[Alive] = ()) -> list[Victim]:
    """Return every preemption in order, with who it was."""
    return [
        Victim(
            step=step.step,
            at_ns=step.at_ns,
            n=n,
            tenant=one.tenant,
            slo_class=one.slo_class,
            relegated=one.relegated,
            deadline_ns=deadline(one),
        )
        for step, requests in walk(steps, alive)
        for n in requests.of(step.preempted)
        for one in (requests.known[n],)
    ]


def queue_times(
    steps: Iterable[Step], alive: Iterable[Alive] = ()
) -> dict[TenantId, list[DurationNs]]:
    """Return by tenant how long requests waited in the engine, from arrival to their first step."""
    found: dict[TenantId, list[DurationNs]] = {}
    for step, requests in walk(steps, alive):
        for one in (requests.known[n] for n in requests.of(step.started)):
            if one.tenant != UNKNOWN:
                waited = DurationNs(max(0, step.at_ns - one.at_ns))
                found.setdefault(one.tenant, []).append(waited)
    return found
