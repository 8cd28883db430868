"""Who waits for a slot in an engine, and whose turn is it there?

The gateway's fair queue once more: the same order, the same share tree. An engine's counters hold only
what happened, so its owner charges what it sees: a prompt as its prefill starts, tokens as they are
made. Where a request brings the counters of a gateway, the greater of the two stands (design: counters
across both levels). Emulated engines and the scheduler class in vLLM wait in the same line.
"""

from collections.abc import Iterator

from msgspec import Struct

from headrace.model.ids import ClassName, TenantId
from headrace.model.paths import UNTOLD, Level, Link, Path, step_down, tenant_key
from headrace.policy.fairness.backlog import NEVER, NONE, Backlog, Waiting
from headrace.policy.fairness.costs import Linear
from headrace.policy.fairness.shares import Rules, Shares
from headrace.policy.fairness.vtc import MEMORY_TOKENS
from headrace.policy.ordering.orders import Order, Place
from headrace.units import DurationNs, InstantNs, Tokens, WorkNs, later, seconds

LATE_NS = seconds(10)
"""Longest that a request past its latest start lets others pass here: it has had its turn before. 10 s: what
hopes for less than that in the gateway's queue lends no turn there either."""
_ANY = ClassName("")


class Seat(Struct, frozen=True, kw_only=True, gc=False):
    """What the line knows of a request."""

    serial: int
    """In order of arrival: it breaks every tie."""
    tenant: TenantId
    way: Path
    counters: tuple[int, ...] = ()
    """The counters of a gateway on that way, told with it; (): none."""
    arrived_at: InstantNs
    deadline: InstantNs
    prompt_tokens: Tokens
    target: int
    """Tokens to compute before its next one: after a preemption, the output made before as well."""
    relegated: bool


class Line:
    """Requests in the order in which they get slots, and the counters behind that."""

    __slots__ = ("_backlog", "_late_ns", "_order", "_rates", "_shares", "_token_ns")

    def __init__(
        self, order: Order, rates: Linear, token_ns: int, late_ns: DurationNs = LATE_NS
    ) -> None:
        """Start empty. `rates`: service of tokens; `token_ns`: what one of a prompt takes, for latest starts."""
        self._order, self._rates, self._token_ns, self._late_ns = order, rates, token_ns, late_ns
        self._shares = Shares(rules=Rules(memory=rates.amount(round(MEMORY_TOKENS), 0, 0)))
        self._backlog = Backlog()

    @property
    def count(self) -> int:
        """Requests that wait."""
        return self._backlog.size

    @property
    def lends(self) -> bool:
        """Whether what can wait, or is hopeless, lets urgent work pass."""
        return self._order.by_share and self._order.relegates

    @property
    def nodes(self) -> int:
        """Nodes of the share tree whose counters are kept."""
        return len(self._shares.counters)

    def knows(self, way: Path) -> bool:
        """Return whether the counters of all nodes of a path are kept already."""
        return all(step.key in self._shares.counters for step in way)

    def is_fixed(self) -> bool:
        """Return whether tokens made by others leave the first in line where it is."""
        return not self._order.by_share or len(self._backlog.queues) < 2  # noqa: PLR2004  no rival

    def next_change(self) -> InstantNs | None:
        """Return when time alone may put another in front."""
        return self._backlog.next_change()

    def push(self, seat: Seat, now: InstantNs, *, again: bool = False) -> None:
        """Let a request wait; `again`: it only waits once more, so that nothing of its tenant's was idle.

        All that was served must be charged: who joins is lifted to the counters of others, and what a
        gateway tells is compared with them.
        """
        order = self._order
        if seat.counters:
            self._shares.receive(seat.way, seat.counters)
        prefill_ns = seat.target * self._token_ns
        start = InstantNs(seat.deadline - prefill_ns)
        place = Place(seat.serial, seat.deadline, start, seat.prompt_tokens, WorkNs(seat.target))
        waiting = Waiting(
            request=seat.serial,
            key=order.key(place),
            arrived_at=seat.arrived_at,
            start=start,
            work=seat.target,
            prefill_ns=prefill_ns,
            starve_at=self._starve_at(seat),
            late=seat.relegated,
        )
        way = self._apart(seat.way)
        self._backlog.add(order, self._shares, way, seat.tenant, _ANY, waiting, again=again)
        self._refresh(way[-1].key, now)

    def _apart(self, way: Path) -> Path:
        """Return the queue's path for a way: one that no other's runs through, nor through another's.

        Two gateways, or one before and after a reload, may tell a tenant's users apart or not. While both
        wait here, users join the tenant's queue if that was there first; else it is one user more.
        """
        queues = self._backlog.queues
        for at, step in enumerate(way[:-1], start=1):
            if step.key in queues:
                return way[:at]
        last = way[-1].key
        if last in self._shares.waiting and last not in queues:
            return step_down(way, Link(Level.USER, UNTOLD))
        return way

    def _starve_at(self, seat: Seat) -> InstantNs:
        """Return until when a request lets others pass; in one line for everybody it does so for ever."""
        if self.lends:
            return later(seat.arrived_at, self._late_ns)
        return InstantNs(NEVER + seat.serial)

    def head(self, now: InstantNs) -> int | None:
        """Return the serial of the request to start next, or None if nobody waits."""
        backlog = self._backlog
        if not backlog.size:
            return None
        while (queue := backlog.due(now)) is not None:
            self._refresh(queue, now)
        turn = next(backlog.turns(self._order, self._shares, NONE, now, self._work_ns))
        return turn.request

    def _work_ns(self, service: int) -> int:
        """Return about how much GPU time a service stands for."""
        return service * self._token_ns // self._rates.uncached

    def first(self) -> Iterator[int]:
        """Yield waiting requests in the order in which they would start, as far as that is known."""
        return self._backlog.in_line(self._order, self._shares)

    def take(self, serial: int, now: InstantNs) -> None:
        """Take a request out that gets its slot or is over."""
        queue = self._backlog.take(self._order, self._shares, serial)
        if queue is not None:
            self._refresh(queue, now)

    def _refresh(self, queue: str, now: InstantNs) -> None:
        self._backlog.relegate(self._order, queue, now)
        self._backlog.refresh(self._order, self._shares, queue, now)

    # Counters --------------------------------------------------------------------------------

    def charge_prompt(self, way: Path, uncached: int, cached: int) -> None:
        """Charge a prompt whose prefill starts; one computed again after a preemption costs nothing."""
        self._shares.charge(way, 0, self._rates.amount(uncached, cached, 0))

    def charge_output(self, way: Path, before: int, after: int) -> None:
        """Charge the tokens that a queue made: from one total to the next, so that when it is done rounds nothing."""
        self._shares.charge(way, self._rates.amount(0, 0, before), self._rates.amount(0, 0, after))

    def counter(self, way: Path) -> int:
        """Return where the counter of a path's tenant stands."""
        return self._shares.counter(tenant_key(way))
