"""The emulated engine: jobs in, first tokens and endings out, time passed in.

The engine runs on planned time, in integer picoseconds: step n+1 starts where step n was planned to
end, however late the driver calls, and what happens at a boundary shows at its instant rounded down
to ns. Every call first lives through the boundaries at or before its `now`; so a job submitted at a
boundary's ns misses that boundary. An idle engine starts at once.

Steps that repeat their plan are taken at once (a jump), with the same results as one by one. A jump
can be cut at the next boundary, or split there without any effect, which is how a state in the
midst of it is read.
"""

from headrace.model.engine import Preemption, Snapshot, Yielded
from headrace.model.ids import AttemptId, Incarnation, ReplicaName
from headrace.model.profile import Profile
from headrace.policy.batching.knobs import BatchingPolicy, BatchView, Knobs
from headrace.policy.batching.preemption import RECOMPUTE_ONLY, Offers, Victims
from headrace.policy.fairness.costs import Linear, TokenCost, token_rates
from headrace.policy.fairness.line import LATE_NS
from headrace.policy.ordering.orders import Fifo, Ordering
from headrace.replica.audit import audit
from headrace.replica.batch import Batch
from headrace.replica.fronts import fronts
from headrace.replica.job import Finished, FirstTokenMade, Job, Refusal, Refused, Totals
from headrace.replica.noise import STRETCH_STEPS, noisy
from headrace.replica.rules import NO_RULES, Rules
from headrace.replica.segment import least_steps, total
from headrace.replica.stream import Phase, Stream
from headrace.replica.turns import Turns
from headrace.replica.yielding import GaveWay, Yielding
from headrace.units import (
    BLOCK_TOKENS,
    MICRO,
    PS_PER_NS,
    Blocks,
    DurationNs,
    InstantNs,
    Ps,
    Tokens,
    blocks_for,
)

FIRST_COME = Fifo()
_FAR = 1 << 62  # more steps than any jump takes
_NEVER = 1 << 80  # ps


class Replica:
    """One life of one emulated replica."""

    def __init__(  # noqa: PLR0913  what an engine is started with
        self,
        name: ReplicaName,
        incarnation: Incarnation,
        profile: Profile,
        batching: BatchingPolicy,
        *,
        ordering: Ordering = FIRST_COME,
        rates: Linear | None = None,
        token_ns: int | None = None,
        offers: Offers = RECOMPUTE_ONLY,
        late_ns: DurationNs = LATE_NS,
        noise_seed: int = 0,
        noise_ppm: int = 0,
        fast_forward: bool = True,
        max_waiting: int = 100_000,
        rules: Rules = NO_RULES,
    ) -> None:
        """Start idle. `fast_forward=False` takes steps one by one and asks the policy at each.

        `ordering`: who starts first; `rates`: what served tokens cost in its counters, the profile's cost
        ratio if None; `token_ns`: what a prompt token takes, for latest starts, the profile's if None;
        `late_ns`: longest that a request past its latest start lets others pass.
        `noise_ppm`: step times vary by at most this many millionths, drawn from `noise_seed`.
        `rules`: whom it lets in, for a benchmark that emulates an engine with rules of its own.
        `offers`: how requests give way.
        """
        assert 0 <= noise_ppm < MICRO, f"{noise_ppm=}"
        self.name, self.incarnation, self.profile = name, incarnation, profile
        self._policy = batching
        self._noise_seed, self._noise_ppm = noise_seed, noise_ppm
        self._jumps = fast_forward
        self._max_waiting = max_waiting
        self._blocks = Blocks(profile.kv_capacity_tokens // BLOCK_TOKENS)
        # A kept request holds memory without a slot: such rules know of none.
        assert rules == NO_RULES or Preemption.KEEP not in offers.mechanisms
        self._rules = rules
        turns = Turns(
            ordering,
            rates or token_rates(TokenCost(), profile),
            profile.prompt_token_ns() if token_ns is None else token_ns,
            late_ns,
            counts=offers.victims is Victims.FAIR or Preemption.KEEP in offers.mechanisms,
        )
        self._batch = Batch(self._blocks, turns, rules, Yielding(batching, offers, profile))
        self._serial = 0
        self._outbox: list[FirstTokenMade | Finished] = []
        self._seen = InstantNs(0)
        # The running segment: `_left` steps (0: idle) from `_start` on to `_end`, see `segment`.
        self._left = 0
        self._start = self._end = 0
        self._alpha = self._beta = 0
        self._costs, self._stretch = profile.costs, -1
        self._knobs: Knobs | None = None
        self._hold_steps = self._hold_until = self._breaks = 0
        self._busy = 0
        self._alive = True

    # What drivers call ------------------------------------------------------------------------

    def submit(self, job: Job, now: InstantNs) -> Refused | None:
        """Take a job; return why not, if it cannot be taken."""
        self._live_to(now)
        batch = self._batch
        attempt = job.attempt
        assert self._alive, "submitted to a crashed engine"
        assert attempt not in batch.streams, f"submitted twice: {attempt=}"
        need = blocks_for(job.prompt_tokens + job.output_tokens - 1)
        reason = None
        held = job.prompt_tokens, job.output_tokens
        if need > self._blocks or not self._rules.allow(sum(held), (held,)):
            reason = Refusal.NEVER_FITS
        elif batch.waiting.count >= self._max_waiting:
            reason = Refusal.QUEUE_FULL
        if reason:
            return Refused(
                attempt=attempt, reason=reason, blocks_needed=need, blocks_total=self._blocks
            )
        if job.prefix:
            batch.pool.chunk_by(job.prefix_tokens)
        self._serial += 1
        stream = Stream(job, now, self._serial)
        batch.add(stream, now, batch.steps + self._done(now))
        if not self._left:
            self._start = max(self._start, now * PS_PER_NS)
            self._begin()
        elif self._left > 1 and self._matters(stream, now):
            self._cut(now)
        return None

    def abort(self, attempt: AttemptId, now: InstantNs) -> Finished | None:
        """End an attempt; return what it has had so far, or None if it is over already.

        A waiting one is gone at once. A running one keeps its slot and blocks up to the end of the
        step it is in, whose token is lost.
        """
        self._live_to(now)
        stream = self._batch.streams.get(attempt)
        if stream is None:
            return None
        self._split(now)
        finished = self._batch.abort(stream, self._boundary())
        if self._left > 1:
            self._cut(now)
        return finished

    def reprice(self, profile: Profile, now: InstantNs) -> None:
        """Let steps take what another profile of the same size says, from the next one on."""
        known = self.profile
        assert profile.kv_capacity_tokens == known.kv_capacity_tokens, "a pool cannot grow"
        self._live_to(now)
        if self._left > 1:
            self._cut(now)
        self.profile = self._batch.yielding.profile = profile
        self._costs, self._stretch = profile.costs, -1
        self._hold_steps = 0  # what the policy promised, it promised of the old one

    def forget_prefixes(self, now: InstantNs) -> None:
        """Drop the cached prefixes that nothing runs on, from the next step on."""
        self._live_to(now)
        self._split(now)
        self._batch.pool.clear()
        if self._left > 1:
            self._cut(now)

    def next_event(self) -> InstantNs | None:
        """Return when to call `advance` next at the latest; None while idle.

        Nothing becomes visible before; it may be that nothing does at that instant either.
        """
        if self._outbox:
            return self._seen
        return InstantNs(self._end // PS_PER_NS) if self._left else None

    def advance(self, now: InstantNs) -> list[FirstTokenMade | Finished]:
        """Return what happened up to and including `now` and was not returned yet, in order."""
        self._live_to(now)
        out, self._outbox = self._outbox, []
        return out

    def progress(self, now: InstantNs) -> list[tuple[AttemptId, int]]:
        """Return the tokens made, by attempt, of live streams that made some since the last call.

        Streams in the order in which they began to decode, then those preempted meanwhile.
        """
        self._live_to(now)
        batch = self._batch
        if not batch.decodes and not batch.unreported:
            return []
        # The segment goes on unsplit: reading it must not cost what accounting for it does.
        steps = batch.steps + self._done(now)
        moved: list[tuple[AttemptId, int]] = []
        for attempt, stream in batch.decodes.items():
            made = stream.made + steps - stream.join_step
            if made != stream.reported and stream.phase is Phase.DECODE:
                stream.reported = made
                moved.append((attempt, made))
        for attempt, stream in batch.unreported.items():
            if attempt not in batch.decodes and stream.made != stream.reported:
                stream.reported = stream.made
                moved.append((attempt, stream.made))
        batch.unreported.clear()
        return moved

    def prompts(self, now: InstantNs) -> list[tuple[AttemptId, Tokens, Tokens]]:
        """Return the prompts in the step being done: attempt, tokens computed before it, its chunk.

        Empty while idle and in a step of decodes alone.
        """
        self._live_to(now)
        self._split(now)
        plan = self._batch.plan if self._left else ()
        return [(each.job.attempt, Tokens(each.pos), Tokens(chunk)) for each, chunk in plan]

    def report(self, now: InstantNs) -> Snapshot:
        """Return the engine's own account of itself at its last step boundary."""
        self._live_to(now)
        self._split(now)
        batch = self._batch
        pool = batch.pool
        return Snapshot(
            replica=self.name,
            incarnation=self.incarnation,
            observed_at=now,
            running=len(batch.decodes) + len(batch.prefills),
            waiting=batch.waiting.count,
            waiting_prefill_tokens=Tokens(batch.backlog),
            kv_blocks_used=Blocks(pool.total - pool.free - pool.evictable),
            kv_blocks_total=Blocks(pool.total),
            preemptions=batch.yielding.preemptions,
            prefix_tokens_queried=batch.prefix_queried,
            prefix_tokens_hit=batch.prefix_hit,
        )

    def totals(self, now: InstantNs) -> Totals:
        """Return the integrals that experiments read."""
        self._live_to(now)
        self._split(now)
        return Totals(
            busy_ps=Ps(self._busy),
            steps=self._batch.rounds,
            tokens_made=Tokens(self._batch.tokens_made),
            prompt_tokens_computed=Tokens(self._batch.prompt_tokens_computed),
            preemptions=self._batch.yielding.preemptions,
        )

    def yielded(self, now: InstantNs) -> Yielded:
        """Return what came of requests that gave way."""
        self._live_to(now)
        self._split(now)
        return self._batch.yielding.totals()

    def gave_way(self) -> tuple[GaveWay, ...]:
        """Return the last requests that gave way, oldest first, with what each choice was made of."""
        return tuple(self._batch.yielding.records)

    def fail(self, now: InstantNs) -> list[AttemptId]:
        """Crash: lose everything not yet finished by `now`; return the attempts lost, oldest first.

        What finished before is still there for `advance`; the engine takes no job after this.
        """
        self._live_to(now)
        self._split(now)
        self._alive = False
        self._left = 0
        lost = list(self._batch.streams)
        self._batch.streams.clear()
        return lost

    def check(self) -> None:
        """Assert everything that must hold between calls."""
        if self._alive:
            batch = self._batch
            audit(batch)
            assert bool(self._left) == bool(batch.decodes or batch.prefills)
            assert self._left or not batch.waiting.count, "idle with work"

    # Time -------------------------------------------------------------------------------------

    def _live_to(self, now: InstantNs) -> None:
        """Live through every boundary at or before `now`."""
        assert now >= self._seen, f"clock ran backwards: {now=} {self._seen=}"
        self._seen = now
        while self._left and self._end // PS_PER_NS <= now:
            self._pass(self._left)
            self._batch.settle(self._boundary(), self._outbox)
            self._begin()

    def _boundary(self) -> InstantNs:
        """Return the instant of the last boundary: where the step being done has begun."""
        return InstantNs(self._start // PS_PER_NS)

    def _upcoming(self, now: InstantNs) -> int:
        """Return which step of the segment is the first to end after `now`."""
        span = (now + 1) * PS_PER_NS - self._start
        return min(least_steps(self._alpha, self._beta, span), self._left)

    def _cut(self, now: InstantNs) -> None:
        """End the segment with the step being done at `now`."""
        self._left = self._upcoming(now)
        self._end = self._start + total(self._alpha, self._beta, self._left)

    def _done(self, now: InstantNs) -> int:
        """Return how many steps of the segment are over by `now`, never its last."""
        return self._upcoming(now) - 1 if self._left > 1 else 0

    def _split(self, now: InstantNs) -> None:
        """Account for the steps done by `now`; the rest of the segment goes on as planned."""
        done = self._done(now)
        if done:
            self._pass(done)

    def _pass(self, done: int) -> None:
        """Let the first steps of the segment be over."""
        batch, alpha, beta = self._batch, self._alpha, self._beta
        if batch.decodes and not batch.standing:
            batch.gaps.note(self._start, alpha, beta, done)
        batch.pass_steps(done, last=done == self._left)
        span = total(alpha, beta, done)
        self._busy += span
        self._start += span
        self._alpha += beta * done
        self._left -= done
        self._hold_steps -= done

    def _begin(self) -> None:
        """Plan the next step and as many more as repeat it; idle if there is nothing to do."""
        batch = self._batch
        if not (batch.decodes or batch.prefills or batch.waiting.count):
            self._left = 0
            return
        knobs = self._ask()
        batch.begin(knobs, self._boundary())
        self._price()
        steps = self._left = self._reach() if self._jumps else 1
        self._end = self._start + total(self._alpha, self._beta, steps)

    def _price(self) -> None:
        """Set the time of the planned step, and by how much each repetition is longer."""
        batch = self._batch
        if self._noise_ppm and batch.rounds // STRETCH_STEPS != self._stretch:
            self._stretch = batch.rounds // STRETCH_STEPS
            costs = self.profile.costs
            self._costs = noisy(costs, self._noise_seed, self._stretch, self._noise_ppm)
        costs, decodes, context = self._costs, len(batch.decodes), batch.context
        if batch.standing:
            decodes = context = 0
        tokens = span = squares = 0
        for stream, chunk in batch.plan:
            if stream.resumes:
                decodes += 1
                context += stream.target
                continue
            tokens += chunk
            span += chunk * (2 * stream.pos + chunk)
            squares += chunk * chunk
        assert tokens or decodes, "a plan of nothing"
        self._alpha = costs.step_ps(decodes, context, tokens, span)
        if batch.yielding.moving:
            self._alpha += batch.yielding.moving_ps()
        if tokens:
            self._beta = costs.mixed_d * decodes + costs.mixed_half_e * 2 * squares
        else:
            self._beta = costs.decode_d * decodes

    def _reach(self) -> int:
        """Return how many steps may be taken at once."""
        batch = self._batch
        if batch.changed & self._breaks:
            return 1
        most = self._hold_steps
        if self._noise_ppm:
            most = min(most, STRETCH_STEPS - batch.rounds % STRETCH_STEPS)
        until = self._hold_until
        if batch.waiting.count and not batch.closed:
            if not batch.waiting.is_fixed():
                return 1  # tokens made by some may put others in front, who fit
            change = batch.waiting.next_change()
            until = until if change is None else min(until, change * PS_PER_NS)
        steps = batch.steps_alike(most)
        if steps > 1 and until < _NEVER:
            span = until - self._start
            steps = min(steps, least_steps(self._alpha, self._beta, span))
        return steps

    # Knobs ------------------------------------------------------------------------------------

    def _ask(self) -> Knobs:
        """Return the knobs of the step that begins, asking the policy unless they hold."""
        batch, knobs = self._batch, self._knobs
        if (
            knobs is not None
            and self._jumps
            and self._hold_steps > 0
            and self._start < self._hold_until
            and not batch.changed & self._breaks
        ):
            return knobs
        knobs = self._knobs = self._policy.knobs(self._view())
        batch.changed = 0
        self._hold_steps = knobs.holds.max_steps or _FAR
        self._breaks = int(knobs.holds.breaks_on)
        until = knobs.holds.until
        self._hold_until = _NEVER if until is None else until * PS_PER_NS
        return knobs

    def _view(self) -> BatchView:
        """Return what the policy may see at this boundary."""
        batch = self._batch
        pool = batch.pool
        bounds = [bound for bound, count in batch.bounds.items() if count]
        return BatchView(
            now=self._boundary(),
            profile=self.profile,
            decodes=len(batch.decodes),
            context=Tokens(batch.context),
            prefills=len(batch.prefills),
            waiting=batch.waiting.count,
            prefill_tokens=Tokens(batch.backlog),
            free_blocks=Blocks(pool.free + pool.evictable),
            tightest_gap_ns=DurationNs(min(bounds)) if bounds else None,
            contests=batch.yielding.keeps,
            fronts=fronts(batch),
        )

    def _matters(self, newcomer: Stream, now: InstantNs) -> bool:
        """Say whether a newcomer can change the plan, so that the jump must end."""
        batch = self._batch
        if batch.changed & self._breaks:
            return True
        if batch.closed:
            return False
        # Waiting streams that did not fit still do not; one behind them does not get a look, unless
        # the tokens of some or time alone may bring it to the front before the jump is over.
        waiting = batch.waiting
        change = waiting.next_change()
        if not waiting.is_fixed() or (change is not None and change * PS_PER_NS < self._end):
            return True
        return waiting.head(now, batch.steps + self._done(now)) is newcomer
