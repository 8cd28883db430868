"""Who waits for a slot in the engine, and whose turn is it there?

The gateway's fair queue once more (`policy/fairness`): the same order, the same share tree. An engine's
counters hold only what happened: a prompt is charged as its prefill starts, each token as it is made.
Where a request brings the counters of the gateway, the greater of the two stands (design: counters
across both levels).
"""

from collections.abc import Iterator

from headrace.model.ids import ClassName
from headrace.model.paths import Path, tenant_key
from headrace.policy.fairness.backlog import NEVER, NONE, Backlog, Waiting
from headrace.policy.fairness.costs import Linear
from headrace.policy.fairness.shares import Rules, Shares
from headrace.policy.fairness.vtc import MEMORY_TOKENS
from headrace.policy.ordering.orders import Order, Place
from headrace.replica.stream import Stream
from headrace.units import DurationNs, InstantNs, WorkNs, later, seconds

LATE_NS = seconds(10)
"""Longest that a request past its latest start lets others pass here: it has had its turn before. 10 s: what
hopes for less than that in the gateway's queue lends no turn there either."""
_ANY = ClassName("")


class Decoding:
    """How many streams of one queue decode, and since which step that was charged."""

    __slots__ = ("charged", "count", "since", "way")

    def __init__(self, way: Path, since: int) -> None:
        """Start with none."""
        self.way, self.count, self.since = way, 0, since
        self.charged = 0


class Turns:
    """Waiting streams in the order's line, ties by submission, and the counters behind it."""

    __slots__ = (
        "_backlog", "_counts", "_decoding", "_late_ns", "_order", "_rates", "_settled", "_shares",
        "_streams", "_token_ns",
    )  # fmt: skip

    def __init__(
        self,
        order: Order,
        rates: Linear,
        token_ns: int,
        late_ns: DurationNs = LATE_NS,
        *,
        counts: bool = True,
    ) -> None:
        """Start empty. `token_ns`: what a prompt token takes, for latest starts; `late_ns`: LATE_NS.

        `counts`: False where nobody goes by counters, so that none are kept.
        """
        self._order, self._rates, self._token_ns, self._late_ns = order, rates, token_ns, late_ns
        self._counts = counts or order.by_share
        rules = Rules(memory=rates.amount(round(MEMORY_TOKENS), 0, 0))
        self._shares, self._backlog = Shares(rules=rules), Backlog()
        self._streams: dict[int, Stream] = {}
        self._decoding: dict[str, Decoding] = {}
        self._settled = 0  # the step up to which every queue is charged

    @property
    def count(self) -> int:
        """Streams that wait."""
        return self._backlog.size

    def is_fixed(self) -> bool:
        """Return whether tokens made by others leave the first in line where it is."""
        return not self._order.by_share or len(self._backlog.queues) < 2  # noqa: PLR2004  no rival

    def next_change(self) -> InstantNs | None:
        """Return when time alone may put another in front."""
        return self._backlog.next_change()

    def push(self, stream: Stream, now: InstantNs, steps: int) -> None:
        """Let a stream wait.

        Here and in `take` the counters must stand where they do after so many steps: who joins is lifted
        to them, and what another tells is compared with them.
        """
        job, serial, order = stream.job, stream.serial, self._order
        self._settle(steps)
        if job.counters:
            self._shares.receive(stream.way, job.counters)
        start = InstantNs(job.deadline - stream.target * self._token_ns)
        place = Place(serial, job.deadline, start, job.prompt_tokens, WorkNs(stream.target))
        waiting = Waiting(
            request=serial,
            key=order.key(place),
            arrived_at=stream.arrived_at,
            start=start,
            work=stream.target,
            prefill_ns=stream.target * self._token_ns,
            starve_at=self._starve_at(stream),
            late=job.relegated,
        )
        self._streams[serial] = stream
        self._backlog.add(order, self._shares, stream.way, job.tenant, _ANY, waiting)
        self._refresh(stream.way[-1].key, now)

    def _starve_at(self, stream: Stream) -> InstantNs:
        """Return until when a stream lets others pass; in one line for everybody it does so for ever."""
        if self._order.by_share and self._order.relegates:
            return later(stream.arrived_at, self._late_ns)
        return InstantNs(NEVER + stream.serial)

    def head(self, now: InstantNs, steps: int) -> Stream | None:
        """Return the stream to start next, at a boundary after so many steps of the decodes."""
        backlog = self._backlog
        if not backlog.size:
            return None
        if not self.is_fixed():
            self._settle(steps)
        while (queue := backlog.due(now)) is not None:
            self._refresh(queue, now)
        turn = next(backlog.turns(self._order, self._shares, NONE, now, self._work_ns))
        return self._streams[turn.request]

    def _work_ns(self, service: int) -> int:
        """Return about how much GPU time a service stands for."""
        return service * self._token_ns // self._rates.uncached

    def first(self) -> Iterator[Stream]:
        """Yield waiting streams in the order in which they would start, as far as that is known."""
        for serial in self._backlog.in_line(self._order, self._shares):
            yield self._streams[serial]

    def take(self, stream: Stream, now: InstantNs, steps: int) -> None:
        """Take a stream out that gets its slot or is over."""
        self._settle(steps)
        del self._streams[stream.serial]
        queue = self._backlog.take(self._order, self._shares, stream.serial)
        if queue is not None:
            self._refresh(queue, now)

    def _refresh(self, queue: str, now: InstantNs) -> None:
        self._backlog.relegate(self._order, queue, now)
        self._backlog.refresh(self._order, self._shares, queue, now)

    # Counters --------------------------------------------------------------------------------

    def prefill(self, stream: Stream, uncached: int, cached: int) -> None:
        """Charge a prompt whose prefill starts; one computed again after a preemption costs nothing."""
        if self._counts:
            self._shares.charge(stream.way, 0, self._rates.amount(uncached, cached, 0))

    def token(self, stream: Stream) -> None:
        """Charge the token that the end of a prefill gives."""
        if self._counts:
            self._shares.charge(stream.way, 0, self._rates.amount(0, 0, 1))

    def board(self, stream: Stream, steps: int) -> None:
        """Charge a stream's queue for a token at each step from now on."""
        if not self._counts:
            return
        key = stream.way[-1].key
        tally = self._decoding.get(key)
        if tally is None:
            tally = self._decoding[key] = Decoding(stream.way, steps)
        self._catch_up(tally, steps)
        tally.count += 1

    def alight(self, stream: Stream, steps: int) -> None:
        """Stop that, as it ends or is preempted."""
        if not self._counts:
            return
        key = stream.way[-1].key
        tally = self._decoding[key]
        self._catch_up(tally, steps)
        tally.count -= 1
        if not tally.count:
            del self._decoding[key]

    def counter(self, stream: Stream, steps: int) -> int:
        """Return where the counter of a stream's tenant stands; 0 if none are kept."""
        if not self._counts:
            return 0
        self._settle(steps)
        return self._shares.counter(tenant_key(stream.way))

    def _settle(self, steps: int) -> None:
        """Charge every queue for what it made up to now."""
        if steps == self._settled:
            return
        self._settled = steps
        for tally in self._decoding.values():
            self._catch_up(tally, steps)

    def _catch_up(self, tally: Decoding, steps: int) -> None:
        made = tally.count * (steps - tally.since)
        tally.since = steps
        if made:
            # From one total to the next, so that rounding does not depend on when it is looked at.
            total = tally.charged + self._rates.amount(0, 0, made)
            self._shares.charge(tally.way, tally.charged, total)
            tally.charged = total
