"""Whose turn is it in the emulated engine, when many steps pass at once?

The line that waits for slots is that of every engine (`policy/fairness/line`). Here its counters are
brought up to date from the decodes' clock: all who decode make one token at each of its steps.
"""

from collections.abc import Iterator

from headrace.model.paths import Path
from headrace.policy.fairness.costs import Linear
from headrace.policy.fairness.line import LATE_NS, Line
from headrace.policy.ordering.orders import Order
from headrace.replica.stream import Stream
from headrace.units import DurationNs, InstantNs


class Decoding:
    """How many streams of one queue decode, and since which step that was charged."""

    __slots__ = ("charged", "count", "since", "way")

    def __init__(self, way: Path, since: int) -> None:
        """Start with none."""
        self.way, self.count, self.since = way, 0, since
        self.charged = 0
        """Tokens."""


class Turns:
    """Waiting streams in the order's line, ties by submission, and the counters behind it."""

    __slots__ = ("_counts", "_decoding", "_line", "_settled", "_streams")

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
        self._counts = counts or order.by_share
        self._line = Line(order, rates, token_ns, late_ns)
        self._streams: dict[int, Stream] = {}
        self._decoding: dict[str, Decoding] = {}
        self._settled = 0  # the step up to which every queue is charged

    @property
    def count(self) -> int:
        """Streams that wait."""
        return self._line.count

    def is_fixed(self) -> bool:
        """Return whether tokens made by others leave the first in line where it is."""
        return self._line.is_fixed()

    def next_change(self) -> InstantNs | None:
        """Return when time alone may put another in front."""
        return self._line.next_change()

    def push(self, stream: Stream, now: InstantNs, steps: int, *, again: bool = False) -> None:
        """Let a stream wait, or wait `again`.

        Here and in `take` the counters must stand where they do after so many steps.
        """
        self._settle(steps)
        self._streams[stream.serial] = stream
        self._line.push(stream.seat(), now, again=again)

    def head(self, now: InstantNs, steps: int) -> Stream | None:
        """Return the stream to start next, at a boundary after so many steps of the decodes."""
        if not self._line.is_fixed():
            self._settle(steps)
        serial = self._line.head(now)
        return None if serial is None else self._streams[serial]

    def first(self, steps: int) -> Iterator[Stream]:
        """Yield waiting streams in the order in which they would start after so many steps, as far as known."""
        if not self._line.is_fixed():
            self._settle(steps)
        for serial in self._line.first():
            yield self._streams[serial]

    def take(self, stream: Stream, now: InstantNs, steps: int) -> None:
        """Take a stream out that gets its slot or is over."""
        self._settle(steps)
        del self._streams[stream.serial]
        self._line.take(stream.serial, now)

    # Counters --------------------------------------------------------------------------------

    def prefill(self, stream: Stream, uncached: int, cached: int) -> None:
        """Charge a prompt whose prefill starts."""
        if self._counts:
            self._line.charge_prompt(stream.way, uncached, cached)

    def token(self, stream: Stream) -> None:
        """Charge the token that the end of a prefill gives."""
        if self._counts:
            self._line.charge_output(stream.way, 0, 1)

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
        return self._line.counter(stream.way)

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
            self._line.charge_output(tally.way, tally.charged, tally.charged + made)
            tally.charged += made
