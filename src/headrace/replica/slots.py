"""Who gives its slot to a more urgent request that lacks nothing else?

Only the first in line asks, and only when all slots are taken. It is asked anew when another is
first, when others run, or under other knobs: if it had to be asked at every step, no jump could be
longer than one.
"""

from headrace.policy.batching.knobs import Knobs
from headrace.replica.holders import Holders, part_of
from headrace.replica.stream import Phase, Stream
from headrace.replica.yielding import Yielding
from headrace.units import InstantNs, blocks_for


class Slots:
    """Remembers what was answered last."""

    __slots__ = ("_answered", "_yielding")

    def __init__(self, yielding: Yielding) -> None:
        """Start with nothing asked."""
        self._yielding = yielding
        self._answered: tuple[int, int, int | None, int] | None = None

    def loser(self, batch: Holders, knobs: Knobs, now: InstantNs) -> Stream | None:
        """Return who is to give its slot to the first in line before the next step is planned."""
        head = batch.waiting.head(now, batch.steps)
        if head is None:
            return None
        case = (head.serial, knobs.token_budget, knobs.chunk_limit, knobs.running_limit)
        if case == self._answered and not batch.reseated:
            return None
        self._answered, batch.reseated = case, False
        running = [*batch.decodes.values(), *batch.prefills]
        if len(running) != knobs.running_limit:
            return None
        found = self._yielding.loser(running, list(map(batch.entry, running)), batch.entry(head))
        return found if found and _could_start(batch, head, found, knobs) else None


def _could_start(batch: Holders, head: Stream, loser: Stream, knobs: Knobs) -> bool:
    """Say whether a stream could start in this step if another only gave it its slot."""
    left, first = knobs.token_budget, True
    room = batch.pool.free + batch.pool.evictable - batch.due
    if knobs.mixed:
        left -= len(batch.decodes) - (loser.phase is Phase.DECODE)
    for stream in batch.prefills:
        if stream is not loser and left > 0:
            chunk = part_of(knobs, stream.target - stream.pos, left, first=first)
            room -= blocks_for(stream.pos + chunk) - stream.blocks
            left, first = left - chunk, False
    if left <= 0:
        return False
    found, start = batch.lookup(head)
    chunk = part_of(knobs, head.target - start, left, first=first)
    return chunk > 0 and batch.lacks(head, start + chunk, found.blocks)[1] <= room - found.idle
