"""Who is in the engine, and what KV does each of them hold?

The books of a batch: who waits, runs or left, with how many tokens and blocks. What the next step does
with them, and who must give way, is `batch`'s.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.policy.batching.knobs import Break, Entry, Knobs
from headrace.policy.batching.preemption import Held
from headrace.replica.gaps import GapLog
from headrace.replica.job import Finished
from headrace.replica.kv import KvPool, Match
from headrace.replica.rules import Door, Rules, whole
from headrace.replica.stream import Phase, Stream
from headrace.replica.turns import Turns
from headrace.replica.yielding import Yielding
from headrace.units import BLOCK_TOKENS, Blocks, InstantNs, Tokens, blocks_for

if TYPE_CHECKING:
    from headrace.model.ids import AttemptId

_BLOCK_MASK = BLOCK_TOKENS - 1
# Flags as plain integers: operators of `IntFlag` are slow, and these run several times a jump.
_ARRIVAL, _START, _END = int(Break.ARRIVAL), int(Break.START), int(Break.END)


def part_of(knobs: Knobs, rest: int, left: int, *, first: bool) -> int:
    """Return how much of a prompt's `rest` is computed where `left` tokens remain; 0: nothing.

    `first`: the step has no other prompt.
    """
    if knobs.mixed:
        return min(rest, left, knobs.chunk_limit or left)
    return rest if rest <= left or first else 0


class Holders:
    """The streams with a slot, those that wait for one, and the KV they hold."""

    __slots__ = (
        "_aside", "_doomed", "_door", "_due", "_ends", "_granted", "alone", "backlog", "berths", "bounds",
        "changed", "closed", "context", "decodes", "gaps", "kept", "plan", "pool", "prefills",
        "prefix_hit", "prefix_queried", "prompt_tokens_computed", "reseated", "rounds", "standing",
        "steps", "streams", "tokens_made", "unreported", "waiting", "yielding",
    )  # fmt: skip

    def __init__(self, blocks: int, turns: Turns, rules: Rules, yielding: Yielding) -> None:
        """Start empty, with `blocks` of KV; `turns` says who starts next."""
        self._door, self.yielding = Door(rules), yielding
        self.pool, self.waiting, self.gaps = KvPool(blocks), turns, GapLog()
        self.streams: dict[AttemptId, Stream] = {}
        """All that are not over, oldest first."""
        self.decodes: dict[AttemptId, Stream] = {}
        self.prefills: list[Stream] = []
        self.kept: dict[AttemptId, Stream] = {}
        """Those that wait and have their blocks."""
        # Blocks set aside for those that are to come from other engines.
        self.berths: dict[AttemptId, int] = {}
        self.plan: list[tuple[Stream, int]] = []
        """The prompts of the planned step and their chunks."""
        self.closed = False
        """Whether the planned step has no room for a newcomer, whatever its key."""
        self.alone = False
        """Whether the planned step can be no other's repetition: it preempts, moves blocks, takes back what
        was set aside, or leaves another to be first in line for a slot."""
        self.reseated = True
        """Whether others run than when it was last asked who gives its slot."""
        self.changed = 0
        """What happened since the knobs were set: flags of `Break`."""
        self.steps = 0
        """The decodes' clock: steps done that made one token for every decode."""
        self.rounds = 0
        """Steps done, those included in which decodes stood still."""
        self.standing = False
        """Whether the decodes stand still in the planned step."""
        self.context = 0
        """Total context of the decodes, the token of the next step included."""
        self.backlog = 0
        """Prompt tokens still to be computed of running and waiting streams."""
        self.bounds: dict[int, int] = {}
        """Decodes by ITL bound."""
        self.unreported: dict[AttemptId, Stream] = {}
        """Preempted streams that may have tokens that `progress` has not told."""
        self.tokens_made = self.prompt_tokens_computed = self.prefix_queried = self.prefix_hit = 0
        # Decodes by the step count, modulo the block size, at which they need their next block.
        self._due = [0] * BLOCK_TOKENS
        self._granted = 0  # 1 from when the decodes have their blocks of the planned step
        self._ends: list[tuple[int, int, Stream]] = []  # decodes by `end_step`, some stale
        self._doomed: list[Stream] = []  # aborted during the step they are in
        self._aside: Stream | None = None  # lost its slot in this step, which is for another

    def add(self, stream: Stream, now: InstantNs, steps: int) -> None:
        """Let a new stream wait, at so many steps of the decodes' clock."""
        self.streams[stream.job.attempt] = stream
        self.backlog += stream.target
        self.changed |= _ARRIVAL
        self.waiting.push(stream, now, steps)

    def set_aside(self, attempt: "AttemptId", blocks: int) -> bool:
        """Set blocks aside for a stream that is to come; False: not as many are there."""
        assert attempt not in self.berths, f"set aside twice: {attempt=}"
        if blocks > self.pool.free + self.pool.evictable:
            return False
        self.pool.take(blocks)
        self.berths[attempt] = blocks
        self.changed |= _ARRIVAL
        return True

    def give_up(self, attempt: "AttemptId") -> None:
        """Free what was set aside, if it still is."""
        self.pool.free += self.berths.pop(attempt, 0)
        self.changed |= _END

    def _take_back(self) -> bool:
        """Free the blocks last set aside: those that are here go before those that are to come."""
        if not self.berths:
            return False
        self.give_up(next(reversed(self.berths)))
        return True

    def take_in(self, stream: Stream, now: InstantNs) -> None:
        """Let a stream wait that ran in another engine: with its KV, or if there is no room to compute it again."""
        attempt, need, pool = stream.job.attempt, blocks_for(stream.pos), self.pool
        self.give_up(attempt)
        if need <= pool.free + pool.evictable:
            pool.take(need)
            stream.extent, stream.blocks = pool.lock(Match(pool.root, 0, 0)), need
            self.kept[attempt] = stream
        else:
            stream.pos = 0
        self.streams[attempt] = self.unreported[attempt] = stream
        self.backlog += stream.target - stream.pos
        self.changed |= _ARRIVAL
        self.waiting.push(stream, now, self.steps)

    def filled(self, stream: Stream) -> int:
        """Return the blocks that a decode's KV fills."""
        return blocks_for(self._computed(stream))

    def lookup(self, stream: Stream) -> tuple[Match, int]:
        """Return what the prefix cache has of a waiting stream, and the tokens that it starts from.

        One token at least must be computed. One that kept its blocks needs none of the cache's.
        """
        pool, limit = self.pool, stream.prefix_blocks
        found = Match(pool.root, 0, 0)
        if limit and stream.extent is None:
            limit = min(limit, (stream.target - 1) // BLOCK_TOKENS)
            found = pool.match(stream.job.prefix, limit)
        return found, max(found.blocks * BLOCK_TOKENS, stream.pos)

    def lacks(self, stream: Stream, upto: int, found: int) -> tuple[int, int]:
        """Return the blocks that a waiting stream lacks for `upto` tokens, and how many must be there.

        `found`: its blocks in the prefix cache.
        """
        held = stream.blocks or found
        need = blocks_for(upto) - held
        return need, blocks_for(stream.target) - held if self.yielding.whole(stream) else need

    def _seat(self, stream: Stream, start: int, found: int) -> None:
        """Give a waiting stream its slot; `found` blocks of it were in the prefix cache."""
        if stream.host:
            self.yielding.bring(stream, found)
        self.kept.pop(stream.job.attempt, None)
        stream.phase = Phase.PREFILL
        self.backlog -= start - stream.pos
        stream.resumes = stream.goes_on(start)
        stream.pos = start
        if stream.cached is None:
            stream.cached = start
            self.prefix_queried += stream.target
            self.prefix_hit += start
            self.waiting.prefill(stream, stream.target - start, start)
        self.prefills.append(stream)
        self._door.promised += whole(stream.job)
        self.changed |= _START
        self.reseated = True

    def _publish(self, stream: Stream) -> None:
        """Share the prefix of a prompt whose last chunk is planned, as vLLM does."""
        extent, blocks = stream.extent, stream.prefix_blocks
        assert extent is not None
        if blocks > extent.end:
            stream.extent = self.pool.share(extent, stream.job.prefix, blocks)

    def _running(self) -> Iterator[Stream]:
        """Yield the streams with a slot."""
        yield from self.decodes.values()
        yield from self.prefills

    def entry(self, stream: Stream) -> Entry:
        """Return what a policy may know of a stream at this boundary."""
        computed = self._computed(stream) if stream.phase is Phase.DECODE else stream.pos
        counter = self.waiting.counter(stream, self.steps)
        return stream.entry(computed, stream.made_by(self.steps), counter)

    def _held(self, stream: Stream) -> Held:
        """Return what a stream with memory holds."""
        computed, blocks = stream.pos, stream.blocks
        if stream.phase is Phase.DECODE:
            computed = self._computed(stream)
            blocks = blocks_for(computed + self._granted)
        assert stream.extent is not None
        shared = Tokens(self.pool.shared(stream.extent) * BLOCK_TOKENS)
        return Held(computed=Tokens(computed), shared=shared, blocks=Blocks(blocks))

    @property
    def due(self) -> int:
        """Blocks that the decodes need for the step to be planned."""
        return self._due[self.steps & _BLOCK_MASK]

    # Leaving ----------------------------------------------------------------------------------

    def abort(self, stream: Stream, now: InstantNs) -> Finished:
        """End a stream by its state at the last boundary; a slot stays taken up to the next."""
        self._forget(stream)
        self.yielding.resume(stream, now)
        if stream.phase is Phase.WAITING:
            self.backlog -= stream.target - stream.pos
            self.yielding.drop(stream)
            if self.kept.pop(stream.job.attempt, None):
                self._release(stream)
            stream.phase = Phase.GONE
            self.waiting.take(stream, now, self.steps)
            self.changed |= _END
        else:
            if stream.phase is Phase.DECODE:
                self._close(stream, now)
            stream.phase = Phase.DOOMED
            self._doomed.append(stream)
        return stream.finished()

    def _leave(self, stream: Stream, now: InstantNs) -> None:
        """Take a stream that is over out of the batch."""
        self._unseat(stream, now)
        self._release(stream)
        if stream.phase is not Phase.DOOMED:
            self._forget(stream)
        stream.phase = Phase.GONE
        self.changed |= _END

    def _forget(self, stream: Stream) -> None:
        """Drop a stream that is over for its caller."""
        attempt = stream.job.attempt
        del self.streams[attempt]
        self.unreported.pop(attempt, None)

    def _unseat(self, stream: Stream, now: InstantNs) -> None:
        """Take a running stream's slot; its `pos` and `blocks` tell the KV that it holds."""
        job = stream.job
        self.reseated = True
        self._door.promised -= whole(job)
        if job.attempt in self.decodes:
            stream.pos = self._computed(stream)
            stream.blocks = blocks_for(stream.pos + self._granted)
            if stream.phase is Phase.DECODE:
                self._close(stream, now)
            del self.decodes[job.attempt]
            self.waiting.alight(stream, self.steps)
            self.context -= stream.pos + 1
            self._due[stream.offset] -= 1
            self.bounds[job.gap_bound_ns] -= 1
            if not self.decodes:
                self.gaps.clear()
        else:
            self.prefills.remove(stream)
            self.backlog -= stream.target - stream.pos

    def _release(self, stream: Stream) -> None:
        """Free the blocks of a stream without a slot; its prefix stays as cache."""
        extent, pool = stream.extent, self.pool
        assert extent is not None
        prefix = min(stream.pos // BLOCK_TOKENS, stream.prefix_blocks)
        if prefix > extent.end:
            extent = pool.share(extent, stream.job.prefix, prefix)
        pool.free += stream.blocks - extent.end
        pool.unlock(extent)
        stream.extent, stream.blocks = None, 0

    def _computed(self, stream: Stream) -> int:
        """Return the tokens whose KV a decode has: all but the last one made."""
        return stream.target + self.steps - stream.join_step

    def _close(self, stream: Stream, now: InstantNs) -> None:
        """Bring a decode's own counts up to date as it stops decoding."""
        stream.last_at = self.gaps.close(stream.account, now)
        stream.made += self.steps - stream.join_step
