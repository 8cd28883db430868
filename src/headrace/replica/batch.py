"""Who is in the next step, and with how many tokens?

vLLM's scheduler, driven by knobs: decodes first, one token each; then unfinished prompts in the
order they started, in chunks; then waiting requests in key order, up to the first that does not
fit. Unmixed, the prompts come first and whole, and decodes stand still in a step that has any. When a running request needs blocks and none are left, the policy's victim loses all of its own
and computes them again later. A step with a preemption starts nobody.

Knows steps and tokens, no time but the instant that a boundary has; `core` holds the clock.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from headrace.policy.batching.knobs import BatchingPolicy, Break, Key, Knobs
from headrace.replica.gaps import GapLog
from headrace.replica.job import Finished, FirstTokenMade
from headrace.replica.kv import KvPool, Match
from headrace.replica.rules import Door, Rules, whole
from headrace.replica.stream import Phase, Stream
from headrace.replica.turns import Turns
from headrace.units import BLOCK_TOKENS, InstantNs, Tokens, blocks_for

if TYPE_CHECKING:
    from headrace.model.ids import AttemptId

_BLOCK_MASK = BLOCK_TOKENS - 1
# Flags as plain integers: operators of `IntFlag` are slow, and these run several times a jump.
_ARRIVAL, _START, _FIRST_TOKEN = int(Break.ARRIVAL), int(Break.START), int(Break.FIRST_TOKEN)
_END, _PREEMPTION = int(Break.END), int(Break.PREEMPTION)


class Batch:
    """The streams with a slot, those that wait for one, and the KV they hold."""

    __slots__ = (
        "_doomed", "_door", "_due", "_ends", "_granted", "_policy", "backlog", "bounds", "changed",
        "closed", "context", "decodes", "gaps", "plan", "pool", "preempted", "preemptions", "prefills",
        "prefix_hit", "prefix_queried", "prompt_tokens_computed", "rounds", "standing", "steps",
        "streams", "tokens_made", "unreported", "waiting",
    )  # fmt: skip

    def __init__(self, blocks: int, policy: BatchingPolicy, turns: Turns, rules: Rules) -> None:
        """Start empty, with `blocks` of KV; `turns` says who starts next."""
        self._policy, self._door = policy, Door(rules)
        self.pool = KvPool(blocks)
        self.waiting = turns
        self.gaps = GapLog()
        self.streams: dict[AttemptId, Stream] = {}
        """All that are not over, oldest first."""
        self.decodes: dict[AttemptId, Stream] = {}
        self.prefills: list[Stream] = []
        self.plan: list[tuple[Stream, int]] = []
        """The prompts of the planned step and their chunks."""
        self.closed = False
        """Whether the planned step has no room for a newcomer, whatever its key."""
        self.preempted = False
        """Whether the planned step preempted somebody."""
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
        self.tokens_made = self.prompt_tokens_computed = self.preemptions = 0
        self.prefix_queried = self.prefix_hit = 0
        # Decodes by the step count, modulo the block size, at which they need their next block.
        self._due = [0] * BLOCK_TOKENS
        self._granted = 0  # 1 from when the decodes have their blocks of the planned step
        self._ends: list[tuple[int, int, Stream]] = []  # decodes by `end_step`, some stale
        self._doomed: list[Stream] = []  # aborted during the step they are in

    def add(self, stream: Stream, now: InstantNs) -> None:
        """Let a new stream wait."""
        self.streams[stream.job.attempt] = stream
        self.backlog += stream.target
        self.changed |= _ARRIVAL
        self.waiting.push(stream, now)

    # Planning ---------------------------------------------------------------------------------

    def begin(self, knobs: Knobs, now: InstantNs) -> None:
        """Plan the next step and give it its blocks."""
        before = self.preemptions
        self.plan = []
        left = knobs.token_budget
        if knobs.mixed:
            self._grant(now)
            left = max(left - len(self.decodes), 0)
        if self.prefills:
            left = self._go_on(knobs, left, now)
        self.preempted = self.preemptions > before
        idle = not (self.decodes or self.prefills)
        if self.waiting.count and not self.preempted and self._door.opens(self.steps, idle=idle):
            left = self._start(knobs, left, now)
        self.standing = not knobs.mixed and bool(self.plan)
        if self.standing:
            self.gaps.stand(now)
        elif not knobs.mixed:
            self._grant(now)
            self.preempted = self.preemptions > before
        running = len(self.decodes) + len(self.prefills)
        self.closed = (
            left <= 0 or running >= knobs.running_limit or self._door.rules.admit_every > 1
        )

    def _grant(self, now: InstantNs) -> None:
        """Give the decodes their blocks of the planned step, preempting for them."""
        if due := self._due[self.steps & _BLOCK_MASK]:
            pool = self.pool
            while due > pool.free + pool.evictable:
                self._preempt(self._victim(), now)
                due = self._due[self.steps & _BLOCK_MASK]
            pool.take(due)
        self._granted = 1

    def _chunk(self, knobs: Knobs, rest: int, left: int) -> int:
        """Return how much of a prompt's `rest` is computed where `left` tokens remain; 0: nothing."""
        if knobs.mixed:
            return min(rest, left, knobs.chunk_limit or left)
        return rest if rest <= left or not self.plan else 0

    def _go_on(self, knobs: Knobs, left: int, now: InstantNs) -> int:
        """Plan the unfinished prompts under `left` tokens; return the tokens that remain."""
        pool = self.pool
        for stream in tuple(self.prefills):
            if left <= 0:
                break
            if stream.phase is not Phase.PREFILL:
                continue
            chunk = self._chunk(knobs, stream.target - stream.pos, left)
            if not chunk:
                break
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
        slots = knobs.running_limit - len(self.decodes) - len(self.prefills)
        while left > 0 and slots > 0:
            stream = waiting.head(now, self.steps)
            if stream is None or not self._door.allows(stream, self._running(), self.steps):
                break
            found = self.lookup(stream)
            cached = found.blocks * BLOCK_TOKENS
            chunk = self._chunk(knobs, stream.target - cached, left)
            need = blocks_for(cached + chunk) - found.blocks
            if not chunk or need > pool.free + pool.evictable - found.idle:
                break
            waiting.take(stream, now)
            stream.extent = pool.lock(found)
            pool.take(need)
            self._seat(stream, cached, found.blocks + need)
            self.plan.append((stream, chunk))
            left -= chunk
            slots -= 1
            if cached + chunk == stream.target:
                self._publish(stream)
        return left

    def lookup(self, stream: Stream) -> Match:
        """Return what the prefix cache has of a stream; one token at least must be computed."""
        pool, limit = self.pool, stream.prefix_blocks
        if not limit:
            return Match(pool.root, 0, 0)
        return pool.match(stream.job.prefix, min(limit, (stream.target - 1) // BLOCK_TOKENS))

    def _seat(self, stream: Stream, cached: int, blocks: int) -> None:
        """Give a waiting stream its slot."""
        stream.phase = Phase.PREFILL
        stream.pos = cached
        stream.blocks = blocks
        if stream.cached is None:
            stream.cached = cached
            self.prefix_queried += stream.target
            self.prefix_hit += cached
            self.waiting.prefill(stream, stream.target - cached, cached)
        self.prefills.append(stream)
        self._door.promised += whole(stream.job)
        self.backlog -= cached
        self.changed |= _START

    def _publish(self, stream: Stream) -> None:
        """Share the prefix of a prompt whose last chunk is planned, as vLLM does."""
        extent, blocks = stream.extent, stream.prefix_blocks
        assert extent is not None
        if blocks > extent.end:
            stream.extent = self.pool.share(extent, stream.job.prefix, blocks)

    # Preemption -------------------------------------------------------------------------------

    def _running(self) -> Iterator[Stream]:
        """Yield the streams with a slot."""
        yield from self.decodes.values()
        yield from self.prefills

    def _victim(self) -> Stream:
        """Return the running stream that the policy gives up first."""

        def rank(stream: Stream) -> tuple[Key, int]:
            made = stream.made
            computed = stream.pos
            if stream.phase is Phase.DECODE:
                computed = self._computed(stream)
                made += self.steps - stream.join_step
            counter = self.waiting.counter(stream, self.steps)
            return self._policy.victim_key(stream.entry(computed, made, counter)), stream.serial

        return max(self._running(), key=rank)

    def _squeeze(self, stream: Stream, need: int, now: InstantNs) -> int:
        """Preempt until a prompt has its blocks or is itself preempted; return tokens regained."""
        pool, regained, victim = self.pool, 0, None
        while victim is not stream and need > pool.free + pool.evictable:
            victim = self._victim()
            regained += self._unplan(victim)
            self._preempt(victim, now)
        return regained

    def _unplan(self, victim: Stream) -> int:
        """Take a victim out of the planned step; return the tokens that this gives back."""
        if victim.phase is Phase.DECODE:
            return self._granted
        for nth, (stream, chunk) in enumerate(self.plan):
            if stream is victim:
                del self.plan[nth]
                return chunk
        return 0

    def _preempt(self, victim: Stream, now: InstantNs) -> None:
        """Take a stream's slot and blocks; it waits and computes all its tokens again."""
        self._vacate(victim, now)
        victim.phase = Phase.WAITING
        victim.target = victim.job.prompt_tokens + victim.made
        victim.pos = 0
        self.backlog += victim.target
        self.waiting.push(victim, now)
        self.preemptions += 1
        self.changed |= _PREEMPTION
        self.unreported[victim.job.attempt] = victim

    # Passing of steps -------------------------------------------------------------------------

    def steps_alike(self, most: int) -> int:
        """Return for how many steps, at most `most`, the plan repeats itself unchanged.

        Until the step that ends an output or a prompt, and while there are blocks without a
        preemption. A waiting stream that did not fit will not: what it lacks only gets scarcer.
        """
        if self.standing:
            return 1  # whole prompts: the next step has others
        ends = self._ends
        while ends and self._is_stale(ends[0]):
            heappop(ends)
        if ends:
            most = min(most, ends[0][0] - self.steps)
        most = self._door.steps_alike(self.steps, most, waiting=self.waiting.count > 0)
        tokens = everyone = len(self.decodes)
        for stream, chunk in self.plan:
            most = min(most, (stream.target - stream.pos - 1) // chunk)
            tokens += chunk
            everyone += 1
        if self.preempted or most <= 1:
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
            stream.pos += chunk * done
            stream.blocks = blocks_for(stream.pos if last else stream.pos + chunk)
            self.backlog -= chunk * done
            self.prompt_tokens_computed += chunk * done
        self.rounds += done
        if not self.standing:
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
        self.waiting.token(stream)
        if stream.first_at is None:
            stream.first_at = now
            cached = Tokens(stream.cached or 0)
            out.append(FirstTokenMade(attempt=job.attempt, at=now, cached_tokens=cached))
        else:
            stream.account.add(now - stream.last_at)
        stream.last_at = now
        self.changed |= _FIRST_TOKEN
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
        self.waiting.board(stream, self.steps)
        self.bounds[job.gap_bound_ns] = self.bounds.get(job.gap_bound_ns, 0) + 1
        self.gaps.open(stream.account, now)

    def _is_stale(self, note: tuple[int, int, Stream]) -> bool:
        """Say whether a decode left before its end, or came back with another."""
        return note[2].phase is not Phase.DECODE or note[2].end_step != note[0]

    # Leaving ----------------------------------------------------------------------------------

    def abort(self, stream: Stream, now: InstantNs) -> Finished:
        """End a stream by its state at the last boundary; a slot stays taken up to the next."""
        self._forget(stream)
        if stream.phase is Phase.WAITING:
            self.backlog -= stream.target
            stream.phase = Phase.GONE
            self.waiting.take(stream, now)
            self.changed |= _END
        else:
            if stream.phase is Phase.DECODE:
                self._close(stream, now)
            stream.phase = Phase.DOOMED
            self._doomed.append(stream)
        return stream.finished()

    def _leave(self, stream: Stream, now: InstantNs) -> None:
        """Take a stream that is over out of the batch."""
        self._vacate(stream, now)
        if stream.phase is not Phase.DOOMED:
            self._forget(stream)
        stream.phase = Phase.GONE
        self.changed |= _END

    def _forget(self, stream: Stream) -> None:
        """Drop a stream that is over for its caller."""
        attempt = stream.job.attempt
        del self.streams[attempt]
        self.unreported.pop(attempt, None)

    def _vacate(self, stream: Stream, now: InstantNs) -> None:
        """Free a running stream's slot and blocks; its prefix stays as cache."""
        job = stream.job
        self._door.promised -= whole(job)
        if job.attempt in self.decodes:
            computed = self._computed(stream)
            blocks: int = blocks_for(computed + self._granted)
            if stream.phase is Phase.DECODE:
                self._close(stream, now)
            del self.decodes[job.attempt]
            self.waiting.alight(stream, self.steps)
            self.context -= computed + 1
            self._due[stream.offset] -= 1
            self.bounds[job.gap_bound_ns] -= 1
            if not self.decodes:
                self.gaps.clear()
        else:
            self.prefills.remove(stream)
            computed, blocks = stream.pos, stream.blocks
            self.backlog -= stream.target - computed
        extent, pool = stream.extent, self.pool
        assert extent is not None
        prefix = min(computed // BLOCK_TOKENS, stream.prefix_blocks)
        if prefix > extent.end:
            extent = pool.share(extent, job.prefix, prefix)
        pool.free += blocks - extent.end
        pool.unlock(extent)
        stream.extent = None

    def _computed(self, stream: Stream) -> int:
        """Return the tokens whose KV a decode has: all but the last one made."""
        return stream.target + self.steps - stream.join_step

    def _close(self, stream: Stream, now: InstantNs) -> None:
        """Bring a decode's own counts up to date as it stops decoding."""
        stream.last_at = self.gaps.close(stream.account, now)
        stream.made += self.steps - stream.join_step

    def check(self) -> None:
        """Assert that blocks, tokens and streams add up."""
        held = context = 0
        due, bounds = [0] * BLOCK_TOKENS, dict.fromkeys(self.bounds, 0)
        for stream in self.decodes.values():
            assert stream.phase in {Phase.DECODE, Phase.DOOMED}, f"{stream.phase=}"
            assert stream.extent is not None
            computed = self._computed(stream)
            held += blocks_for(computed + self._granted) - stream.extent.end
            context += computed + 1
            due[stream.offset] += 1
            bounds[stream.job.gap_bound_ns] += 1
            assert (computed - self.steps + stream.offset) % BLOCK_TOKENS == 0
            assert self.steps <= stream.end_step, "a decode past its end"
        backlog = 0
        for stream in self.prefills:
            assert stream.phase in {Phase.PREFILL, Phase.DOOMED}, f"{stream.phase=}"
            assert stream.extent is not None
            assert stream.pos < stream.target
            held += stream.blocks - stream.extent.end
            backlog += stream.target - stream.pos
        assert self._door.promised == sum(whole(stream.job) for stream in self._running())
        waiting = [each for each in self.streams.values() if each.phase is Phase.WAITING]
        assert len(waiting) == self.waiting.count
        assert backlog + sum(stream.target for stream in waiting) == self.backlog
        assert context == self.context, f"{context=} {self.context=}"
        assert due == self._due, f"{due=} {self._due=}"
        assert bounds == self.bounds, f"{bounds=} {self.bounds=}"
        self.pool.check(held)
