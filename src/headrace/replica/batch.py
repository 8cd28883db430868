"""Who is in the next step, and with how many tokens?

vLLM's scheduler, driven by knobs: decodes first, one token each; then unfinished prompts in the
order they started, in chunks; then waiting requests in key order, up to the first that does not
fit. Unmixed, the prompts come first and whole, and decodes stand still in a step that has any. When
a running request needs blocks and none are left, the policy's victim loses all of its own, and
computes them again later or has a copy on the host (`yielding`). A step with a preemption starts
nobody. A waiting request that needs nothing but a slot may get that of one that is less urgent, which
then waits with its blocks.

Knows steps and tokens, no time but the instant that a boundary has; `core` holds the clock.
"""

from heapq import heappop, heappush

from msgspec.structs import replace

from headrace.model.engine import Preemption
from headrace.policy.batching.knobs import Break, Knobs
from headrace.replica.holders import Holders, part_of
from headrace.replica.job import Finished, FirstTokenMade
from headrace.replica.rules import Rules
from headrace.replica.slots import Slots
from headrace.replica.stream import Phase, Stream
from headrace.replica.turns import Turns
from headrace.replica.yielding import Yielding
from headrace.units import BLOCK_TOKENS, InstantNs, Tokens, blocks_for

_BLOCK_MASK = BLOCK_TOKENS - 1
# Flags as plain integers: operators of `IntFlag` are slow, and these run several times a jump.
_FIRST_TOKEN, _PREEMPTION = int(Break.FIRST_TOKEN), int(Break.PREEMPTION)


class Batch(Holders):
    """The next step, and what comes of it."""

    __slots__ = ("_slots",)

    def __init__(self, blocks: int, turns: Turns, rules: Rules, yielding: Yielding) -> None:
        """Start empty, with `blocks` of KV; `turns` says who starts next."""
        super().__init__(blocks, turns, rules, yielding)
        self._slots = Slots(yielding)

    # Planning ---------------------------------------------------------------------------------

    def begin(self, knobs: Knobs, now: InstantNs) -> None:
        """Plan the next step and give it its blocks."""
        self.plan = []
        yielding = self.yielding
        yielding.moving = 0
        contests = yielding.keeps
        if contests and (loser := self._slots.loser(self, knobs, now)):
            self._preempt(loser, now, for_slot=True)
        unlimited = knobs.chunk_limit is not None and self._one_prompt()
        if unlimited:
            knobs = replace(knobs, chunk_limit=None)
        before, berths = yielding.preemptions, len(self.berths)
        left = knobs.token_budget
        if knobs.mixed:
            self._grant(now)
            left = max(left - len(self.decodes), 0)
        if self.prefills:
            left = self._go_on(knobs, left, now)
        if yielding.preemptions == before:
            left = self._start(knobs, left, now)
        if not knobs.mixed and not self.plan:
            self._grant(now)
        if not (self.decodes or self.plan):
            # Where kept streams hold memory, even the last to run may have given way.
            left = self._start(knobs, left, now)
        self.standing = not knobs.mixed and bool(self.plan)
        if self.standing:
            self.gaps.stand(now)
        self._back(now)
        self.alone = unlimited or yielding.preemptions > before or yielding.moving > 0
        self.alone |= len(self.berths) < berths  # who did not fit may do so now
        self.alone |= contests and self.waiting.count > 0 and self.reseated
        running = len(self.decodes) + len(self.prefills)
        full = left <= 0 or running >= knobs.running_limit
        self.closed = (full or self._door.rules.admit_every > 1) and not contests

    def _back(self, now: InstantNs) -> None:
        """Let whoever lost its slot in this step wait again."""
        if self._aside is not None:
            self.waiting.push(self._aside, now, self.steps, again=True)
            self._aside = None

    def _one_prompt(self) -> bool:
        """Return whether one prompt is all there is: then its chunks are not limited, as in vLLM."""
        return not self.decodes and len(self.prefills) + self.waiting.count == 1

    def _grant(self, now: InstantNs) -> None:
        """Give the decodes their blocks of the planned step, preempting for them."""
        if self._due[self.steps & _BLOCK_MASK]:
            pool = self.pool
            while self.due > pool.free + pool.evictable:
                if not self._take_back():
                    self._preempt(self._victim(), now)
            pool.take(self.due)
        self._granted = 1

    def _go_on(self, knobs: Knobs, left: int, now: InstantNs) -> int:
        """Plan the unfinished prompts under `left` tokens; return the tokens that remain."""
        pool = self.pool
        for stream in tuple(self.prefills):
            if left <= 0:
                break
            if stream.phase is not Phase.PREFILL:
                continue
            chunk = part_of(knobs, stream.target - stream.pos, left, first=not self.plan)
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
        idle = not (self.decodes or self.prefills)
        if not (waiting.count and self._door.opens(self.steps, idle=idle)):
            return left
        slots = knobs.running_limit - len(self.decodes) - len(self.prefills)
        while left > 0 and slots > 0:
            stream = waiting.head(now, self.steps)
            if stream is None or not self._door.allows(stream, self._running(), self.steps):
                break
            found, start = self.lookup(stream)
            chunk = part_of(knobs, stream.target - start, left, first=not self.plan)
            if not chunk:
                break
            need, room = self.lacks(stream, start + chunk, found.blocks)
            if room > pool.free + pool.evictable - found.idle:
                if self._clear(stream, now):
                    continue
                break
            waiting.take(stream, now, self.steps)
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

    # Preemption -------------------------------------------------------------------------------

    def _victim(self) -> Stream:
        """Return whom with memory the policy gives up first."""
        return self._first([*self.decodes.values(), *self.prefills, *self.kept.values()])

    def _first(self, streams: list[Stream]) -> Stream:
        return self.yielding.first(streams, list(map(self.entry, streams)), self._held)

    def _clear(self, head: Stream, now: InstantNs) -> bool:
        """Take memory that is kept or set aside for one that lacks it where nobody runs who could end."""
        if self.decodes or self.prefills:
            return False
        if self._take_back():
            return True
        kept = [each for each in self.kept.values() if each is not head]
        if not kept:
            return False
        self._preempt(self._first(kept), now)
        return True

    def _squeeze(self, stream: Stream, need: int, now: InstantNs) -> int:
        """Preempt until a prompt has its blocks or is itself preempted; return tokens regained."""
        pool, regained = self.pool, 0
        while stream.phase is Phase.PREFILL and need > pool.free + pool.evictable:
            if self._take_back():
                continue
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
            self.waiting.push(victim, now, self.steps, again=True)
        self.changed |= _PREEMPTION

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
            if not stream.resumes:
                self.prompt_tokens_computed += chunk * done
            if stream.had > stream.pos:
                again = min(stream.had - stream.pos, chunk * done)
                self.yielding.tokens_recomputed += again
            stream.pos += chunk * done
            stream.blocks = blocks_for(stream.pos if last else stream.pos + chunk)
            self.backlog -= chunk * done
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
        self.yielding.resume(stream, now)
        self.changed |= _FIRST_TOKEN
        self.reseated = True
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
