"""Who is in the next step, and with how many tokens?

vLLM's scheduler, driven by knobs: decodes first, one token each; then unfinished prompts in the
order they started, in chunks; then waiting requests in key order, up to the first that does not
fit. When a running request needs blocks and none are left, the policy's victim loses all of its own,
and computes them again later or has a copy on the host (`yielding`). A step with a preemption starts
nobody. A waiting request that needs nothing but a slot may get that of one that is less urgent, which
then waits with its blocks.

Knows steps and tokens, no time but the instant that a boundary has; `core` holds the clock.
"""

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from headrace.model.engine import Preemption
from headrace.policy.batching.knobs import BatchingPolicy, Break, Entry, Knobs
from headrace.policy.batching.preemption import Held
from headrace.replica.gaps import GapLog
from headrace.replica.job import Finished, FirstTokenMade
from headrace.replica.kv import KvPool, Match
from headrace.replica.slots import Slots
from headrace.replica.stream import Phase, Stream, WaitingQueue
from headrace.replica.yielding import Yielding
from headrace.units import BLOCK_TOKENS, Blocks, InstantNs, Tokens, blocks_for

if TYPE_CHECKING:
    from headrace.model.ids import AttemptId

_BLOCK_MASK = BLOCK_TOKENS - 1
# Flags as plain integers: operators of `IntFlag` are slow, and these run several times a jump.
_ARRIVAL, _START, _FIRST_TOKEN = int(Break.ARRIVAL), int(Break.START), int(Break.FIRST_TOKEN)
_END, _PREEMPTION = int(Break.END), int(Break.PREEMPTION)


class Batch:
    """The streams with a slot, those that wait for one, and the KV they hold."""

    __slots__ = (
        "_aside", "_doomed", "_due", "_ends", "_granted", "alone", "backlog", "bounds", "changed",
        "closed", "context", "decodes", "gaps", "kept", "plan", "pool", "prefills", "prefix_hit",
        "prefix_queried", "prompt_tokens_computed", "slots", "steps", "streams", "tokens_made", "unreported",
        "waiting", "yielding",
    )  # fmt: skip

    def __init__(self, blocks: int, policy: BatchingPolicy, yielding: Yielding) -> None:
        """Start empty, with `blocks` of KV."""
        self.yielding = yielding
        self.slots = Slots(yielding)
        self.pool = KvPool(blocks)
        self.waiting = WaitingQueue(policy)
        self.gaps = GapLog()
        self.streams: dict[AttemptId, Stream] = {}
        """All that are not over, oldest first."""
        self.decodes: dict[AttemptId, Stream] = {}
        self.prefills: list[Stream] = []
        self.kept: dict[AttemptId, Stream] = {}
        """Those that wait and have their blocks."""
        self.plan: list[tuple[Stream, int]] = []
        """The prompts of the planned step and their chunks."""
        self.closed = False
        """Whether the planned step has no room for a newcomer, whatever its key."""
        self.alone = False
        """Whether the planned step can be no other's repetition: it preempts, moves blocks, or leaves
        another to be first in line for a slot."""
        self.changed = 0
        """What happened since the knobs were set: flags of `Break`."""
        self.steps = 0
        """Steps done; each made one token for every decode."""
        self.context = 0
        """Total context of the decodes, the token of the next step included."""
        self.backlog = 0
        """Prompt tokens still to be computed of running and waiting streams."""
        self.bounds: dict[int, int] = {}
        """Decodes by ITL bound."""
        self.unreported: dict[AttemptId, Stream] = {}
        """Preempted streams that may have tokens that `progress` has not told."""
        self.tokens_made = 0
        self.prompt_tokens_computed = 0
        self.prefix_queried = 0
        self.prefix_hit = 0
        # Decodes by the step count, modulo the block size, at which they need their next block.
        self._due = [0] * BLOCK_TOKENS
        self._granted = 0  # 1 from when the decodes have their blocks of the planned step
        self._ends: list[tuple[int, int, Stream]] = []  # decodes by `end_step`, some stale
        self._doomed: list[Stream] = []  # aborted during the step they are in
        self._aside: Stream | None = None  # lost its slot in this step, which is for another

    def add(self, stream: Stream) -> None:
        """Let a new stream wait."""
        self.streams[stream.job.attempt] = stream
        self.backlog += stream.target
        self.changed |= _ARRIVAL
        self.waiting.push(stream)

    # Planning ---------------------------------------------------------------------------------

    def begin(self, knobs: Knobs, now: InstantNs) -> None:
        """Plan the next step and give it its blocks."""
        self.plan = []
        yielding = self.yielding
        yielding.moving = 0
        contests = yielding.keeps
        if contests and (loser := self.slots.loser(self, knobs)):
            self._preempt(loser, now, for_slot=True)
        before = yielding.preemptions
        if self._due[self.steps & _BLOCK_MASK]:
            pool = self.pool
            while self.due > pool.free + pool.evictable:
                self._preempt(self._victim(), now)
            pool.take(self.due)
        self._granted = 1
        left = max(knobs.token_budget - len(self.decodes), 0)
        if self.prefills:
            left = self._go_on(knobs, left, now)
        self.alone = yielding.preemptions > before
        # Where kept streams hold memory, even the last to run may have given way.
        if self.waiting.count and not (self.alone and (self.decodes or self.plan)):
            left = self._start(knobs, left, now)
        if self._aside is not None:
            self.waiting.push(self._aside)
            self._aside = None
        if yielding.moving or (contests and self.waiting.count and self.slots.open):
            self.alone = True
        running = len(self.decodes) + len(self.prefills)
        full = not left or running >= knobs.running_limit
        self.closed = full and not contests

    def _go_on(self, knobs: Knobs, left: int, now: InstantNs) -> int:
        """Plan the unfinished prompts under `left` tokens; return the tokens that remain."""
        pool, limit = self.pool, knobs.chunk_limit or left
        for stream in tuple(self.prefills):
            if not left:
                break
            if stream.phase is not Phase.PREFILL:
                continue
            chunk = min(stream.target - stream.pos, left, limit)
            need = blocks_for(stream.pos + chunk) - stream.blocks
            if need > pool.free + pool.evictable:
                left += self._squeeze(stream, need, now)
                if stream not in self.prefills:
                    continue  # where vLLM stops: its victims are the last in line, ours need not be
            pool.take(need)
            stream.blocks += need
            self.plan.append((stream, chunk))
            left -= chunk
        # Only now: until here a victim could still lose the chunk.
        for stream, chunk in self.plan:
            if stream.pos + chunk == stream.target:
                self._publish(stream)
        return left

    def _start(self, knobs: Knobs, left: int, now: InstantNs) -> int:
        """Start waiting streams under `left` tokens; return the tokens that remain."""
        pool, waiting = self.pool, self.waiting
        limit = knobs.chunk_limit or left
        slots = knobs.running_limit - len(self.decodes) - len(self.prefills)
        while left and slots > 0:
            stream = waiting.head()
            if stream is None:
                break
            found, start, chunk, need, room = self.need(stream, min(left, limit))
            if room > pool.free + pool.evictable - found.idle:
                if self._clear(stream, now):
                    continue
                break
            waiting.pop()
            if stream.extent is None:
                stream.extent, stream.blocks = pool.lock(found), found.blocks
            pool.take(need)
            stream.blocks += need
            self._seat(stream, start, found.blocks)
            self.plan.append((stream, chunk))
            left -= chunk
            slots -= 1
            if start + chunk == stream.target:
                self._publish(stream)
        return left

    def need(self, stream: Stream, most: int) -> tuple[Match, int, int, int, int]:
        """Return what a waiting stream would start with, at most `most` tokens in its first chunk.

        What the prefix cache has of it (one token at least must be computed; one that kept its
        blocks asks for none), the tokens that it starts from, its chunk, the blocks it lacks for
        that, and how many must be there.
        """
        pool, limit = self.pool, stream.prefix_blocks
        found = Match(pool.root, 0, 0)
        if limit and stream.extent is None:
            limit = min(limit, (stream.target - 1) // BLOCK_TOKENS)
            found = pool.match(stream.job.prefix, limit)
        start = max(found.blocks * BLOCK_TOKENS, stream.pos)
        chunk = min(stream.target - start, most)
        held = stream.blocks or found.blocks
        need = blocks_for(start + chunk) - held
        whole = stream.had and self.yielding.offers.resume_whole
        return found, start, chunk, need, blocks_for(stream.target) - held if whole else need

    def _seat(self, stream: Stream, start: int, found: int) -> None:
        """Give a waiting stream its slot; `found` blocks of it were in the prefix cache."""
        if stream.host:
            self.yielding.bring(stream, found)
        self.kept.pop(stream.job.attempt, None)
        stream.phase = Phase.PREFILL
        self.backlog -= start - stream.pos
        stream.pos = start
        if stream.cached is None:
            stream.cached = start
            self.prefix_queried += stream.target
            self.prefix_hit += start
        self.prefills.append(stream)
        self.changed |= _START
        self.slots.open = True

    def _publish(self, stream: Stream) -> None:
        """Share the prefix of a prompt whose last chunk is planned, as vLLM does."""
        extent, blocks = stream.extent, stream.prefix_blocks
        assert extent is not None
        if blocks > extent.end:
            stream.extent = self.pool.share(extent, stream.job.prefix, blocks)

    # Preemption -------------------------------------------------------------------------------

    def _victim(self) -> Stream:
        """Return whom with memory the policy gives up first."""
        return self._first([*self.decodes.values(), *self.prefills, *self.kept.values()])

    def _first(self, streams: list[Stream]) -> Stream:
        return self.yielding.first(streams, list(map(self.entry, streams)), self._held)

    def entry(self, stream: Stream) -> Entry:
        """Return what a policy may know of a stream at this boundary."""
        if stream.phase is not Phase.DECODE:
            return stream.entry(stream.pos, stream.made)
        since = self.steps - stream.join_step
        return stream.entry(stream.target + since, stream.made + since)

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

    def _clear(self, head: Stream, now: InstantNs) -> bool:
        """Take the memory of a kept stream for one that lacks it where nobody runs who could end."""
        kept = [each for each in self.kept.values() if each is not head]
        if self.decodes or self.prefills or not kept:
            return False
        self._preempt(self._first(kept), now)
        return True

    def _squeeze(self, stream: Stream, need: int, now: InstantNs) -> int:
        """Preempt until a prompt has its blocks or is itself preempted; return tokens regained."""
        pool, regained = self.pool, 0
        while stream.phase is Phase.PREFILL and need > pool.free + pool.evictable:
            victim = self._victim()
            regained += self._unplan(victim)
            self._preempt(victim, now)
        return regained

    def _unplan(self, victim: Stream) -> int:
        """Take a victim out of the planned step; return the tokens that this gives back."""
        if victim.phase is Phase.DECODE:
            return 1
        for nth, (stream, chunk) in enumerate(self.plan):
            if stream is victim:
                del self.plan[nth]
                return chunk
        return 0

    def _preempt(self, victim: Stream, now: InstantNs, *, for_slot: bool = False) -> None:
        """Take a stream's slot, and its blocks unless it may keep them; it waits for its turn."""
        attempt, held = victim.job.attempt, self._held(victim)
        waited = self.kept.pop(attempt, None)
        if not waited:
            self._unseat(victim, now)
            victim.phase = Phase.WAITING
            victim.target = victim.job.prompt_tokens + victim.made
            victim.had = max(victim.had, victim.pos)
            self.backlog += victim.target - victim.pos
            self.unreported[attempt] = victim
        way = self.yielding.take(victim, held, now, for_slot=for_slot)
        if way is Preemption.KEEP:
            self.kept[attempt] = victim
        else:
            self._release(victim)
        if way is Preemption.RECOMPUTE:
            self.backlog += victim.pos
            victim.pos = 0
        if for_slot:
            self._aside = victim
        elif not waited:
            self.waiting.push(victim)
        self.changed |= _PREEMPTION

    # Passing of steps -------------------------------------------------------------------------

    def steps_alike(self, most: int) -> int:
        """Return for how many steps, at most `most`, the plan repeats itself unchanged.

        Until the step that ends an output or a prompt, and while there are blocks without a
        preemption. A waiting stream that did not fit will not: what it lacks only gets scarcer.
        """
        ends = self._ends
        while ends and self._is_stale(ends[0]):
            heappop(ends)
        if ends:
            most = min(most, ends[0][0] - self.steps)
        tokens = everyone = len(self.decodes)
        for stream, chunk in self.plan:
            most = min(most, (stream.target - stream.pos - 1) // chunk)
            tokens += chunk
            everyone += 1
        if self.alone or most <= 1:
            return 1
        room = self.pool.free + self.pool.evictable
        if tokens * most // BLOCK_TOKENS + everyone <= room or self._further(most) <= room:
            return most
        fits, fails = 1, most
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self._further(middle) <= room:
                fits = middle
            else:
                fails = middle
        return fits

    def pass_steps(self, done: int, *, last: bool) -> None:
        """Account for `done` steps of the plan; unless they are the `last`, one more has begun."""
        if done > 1 or not last:
            self.pool.take(self._further(done if last else done + 1))
        for stream, chunk in self.plan:
            if not (stream.made and stream.resumes):
                self.prompt_tokens_computed += chunk * done
            if stream.had > stream.pos:
                again = min(stream.had - stream.pos, chunk * done)
                self.yielding.tokens_recomputed += again
            stream.pos += chunk * done
            stream.blocks = blocks_for(stream.pos if last else stream.pos + chunk)
            self.backlog -= chunk * done
        made = len(self.decodes) * done
        self.tokens_made += made
        self.context += made
        self.steps += done
        if last:
            self._granted = 0

    def _further(self, steps: int) -> int:
        """Return the blocks that the plan needs for its steps 2 to `steps`."""
        rounds, rest = divmod(steps - 1, BLOCK_TOKENS)
        need = rounds * len(self.decodes)
        if rest:
            first = (self.steps + 1) & _BLOCK_MASK
            need += sum(self._due[first : first + rest])
            if first + rest > BLOCK_TOKENS:
                need += sum(self._due[: first + rest - BLOCK_TOKENS])
        for stream, chunk in self.plan:
            need += blocks_for(stream.pos + chunk * steps) - stream.blocks
        return need

    def settle(self, now: InstantNs, out: list[FirstTokenMade | Finished]) -> None:
        """At a boundary: see who was aborted, who is done and whose first token is out."""
        if self._doomed:
            for stream in self._doomed:
                self._leave(stream, now)
            self._doomed = []
        ends = self._ends
        while ends and ends[0][0] <= self.steps:
            note = heappop(ends)
            if not self._is_stale(note):
                self._leave(note[2], now)
                out.append(note[2].finished())
        for stream, _ in self.plan:
            if stream.pos == stream.target and stream.phase is Phase.PREFILL:
                self._token_after_prompt(stream, now, out)

    def _token_after_prompt(
        self, stream: Stream, now: InstantNs, out: list[FirstTokenMade | Finished]
    ) -> None:
        """Make the token that the end of a prefill gives: the first, or the first again."""
        job = stream.job
        self.tokens_made += 1
        stream.made += 1
        if stream.first_at is None:
            stream.first_at = now
            cached = Tokens(stream.cached or 0)
            out.append(FirstTokenMade(attempt=job.attempt, at=now, cached_tokens=cached))
        else:
            stream.account.add(now - stream.last_at)
        stream.last_at = now
        self.yielding.resume(stream, now)
        self.changed |= _FIRST_TOKEN
        self.slots.open = True
        if stream.made == job.output_tokens:
            self._leave(stream, now)
            out.append(stream.finished())
            return
        self.prefills.remove(stream)
        stream.phase = Phase.DECODE
        self.decodes[job.attempt] = stream
        stream.join_step = self.steps
        stream.end_step = self.steps + job.output_tokens - stream.made
        heappush(self._ends, (stream.end_step, stream.serial, stream))
        stream.offset = (self.steps - stream.target) & _BLOCK_MASK
        self._due[stream.offset] += 1
        self.context += stream.target + 1
        self.bounds[job.gap_bound_ns] = self.bounds.get(job.gap_bound_ns, 0) + 1
        self.gaps.open(stream.account)

    def _is_stale(self, note: tuple[int, int, Stream]) -> bool:
        """Say whether a decode left before its end, or came back with another."""
        return note[2].phase is not Phase.DECODE or note[2].end_step != note[0]

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
            self.waiting.left()
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
        self.slots.open = True
        if job.attempt in self.decodes:
            stream.pos = self._computed(stream)
            stream.blocks = blocks_for(stream.pos + self._granted)
            if stream.phase is Phase.DECODE:
                self._close(stream, now)
            del self.decodes[job.attempt]
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
        self.gaps.close(stream.account)
        stream.made += self.steps - stream.join_step
        stream.last_at = now
