"""How do requests give way in this engine, and what has come of it?

The host pool, the transfers of the planned step, and the counts. The choice is the policy's
(`policy.batching.preemption`), the victim's blocks are the batch's.

A transfer stops the whole engine: its time is added to the step in which it happens, out when a
request gives way, back when it goes on. Real engines copy on streams of their own while they
compute, as far as the blocks are not needed at once: what leaves for a step's own blocks must be out
before it, and what comes back must be in, so that a real pause is as long, but its neighbours wait
less. Both ways share one link here; real links are full duplex.
"""

from collections import deque
from collections.abc import Callable

from msgspec import Struct

from headrace.model.engine import Preemption, Yielded
from headrace.model.ids import AttemptId
from headrace.model.profile import Profile
from headrace.policy.batching.knobs import BatchingPolicy, Entry, Key
from headrace.policy.batching.preemption import (
    Choice,
    Held,
    Offers,
    Victims,
    Whole,
    block_bytes,
    choose,
    gives_way,
    giving_way,
    marked,
    tied,
    yields,
)
from headrace.replica.stream import Stream
from headrace.units import Blocks, Bytes, DurationNs, InstantNs, Ps, Tokens, blocks_for

_RECORDS = 64


class GaveWay(Struct, frozen=True, kw_only=True, gc=False):
    """One request gave way: for records."""

    at: InstantNs
    attempt: AttemptId
    held: Held
    choice: Choice


class Yielding:
    """What one engine has for requests that give way, and what it counts of them."""

    __slots__ = (
        "_choices", "_key", "blocks_in", "blocks_out", "host_total", "host_used", "keeps",
        "longest", "moving", "offers", "on_host", "paused", "pauses", "preemptions", "profile",
        "records", "tokens_recomputed",
    )  # fmt: skip

    def __init__(self, policy: BatchingPolicy, offers: Offers, profile: Profile) -> None:
        """Start with an empty host pool; `policy` says who goes first."""
        self._key = gives_way if offers.victims is Victims.FAIR else policy.victim_key
        self.offers = offers
        self.keeps = offers.has(Preemption.KEEP)
        """Whether a request may lose its slot and keep its memory."""
        self.profile = profile
        """Prices the choices; another of the same sizes may take its place."""
        self.host_total: int = offers.host_blocks(profile)
        self.host_used = 0
        self.on_host = 0
        self.moving = 0
        """Blocks that the planned step moves, either way."""
        self.blocks_out = self.blocks_in = 0
        self.tokens_recomputed = 0
        self.pauses = self.paused = self.longest = 0
        self.records: deque[GaveWay] = deque(maxlen=_RECORDS)
        """The last ones, each with all that its choice was made of."""
        self._choices = dict.fromkeys(Preemption, 0)
        self.preemptions = 0
        """How often a request gave way."""

    def first(
        self, streams: list[Stream], entries: list[Entry], held: Callable[[Stream], Held]
    ) -> Stream:
        """Return who loses its memory first: of equals the cheapest, of these the youngest.

        `entries` are what a policy may know of the streams, `held` says what one holds.
        """

        def pause(nth: int) -> Key:
            one = streams[nth]
            return self._price(held(one)).per_block_ns, -one.serial

        return streams[giving_way(entries, self._key, pause)[0]]

    def loser(self, running: list[Stream], entries: list[Entry], head: Entry) -> Stream | None:
        """Return who would give its slot to the first in line, if anybody is less urgent."""
        entries = marked(entries)
        equals = tied(entries, self._key)
        last = max(equals, key=lambda nth: running[nth].serial)
        return running[last] if yields(entries[last], head) else None

    def whole(self, stream: Stream) -> bool:
        """Return whether a waiting request starts only where all that it has to compute fits."""
        which = self.offers.whole
        return which is Whole.ALL or (which is Whole.RESUMED and stream.had > 0)

    def _price(self, held: Held, *, for_slot: bool = False) -> Choice:
        """Return how a request would give way now."""
        free = self.host_total - self.host_used
        return choose(held, self.offers, self.profile, host_free=free, for_slot=for_slot)

    def take(self, stream: Stream, held: Held, now: InstantNs, *, for_slot: bool) -> Preemption:
        """Let a request give way and return how; one that is swapped leaves in this step."""
        choice = self._price(held, for_slot=for_slot)
        self._choices[choice.mechanism] += 1
        self.preemptions += 1
        record = GaveWay(at=now, attempt=stream.job.attempt, held=held, choice=choice)
        self.records.append(record)
        stream.preemptions += 1
        if stream.paused_at is None:
            stream.paused_at = now
        if choice.mechanism is Preemption.SWAP:
            stream.host = blocks_for(held.computed)
            self.host_used += stream.host
            self.on_host += 1
            self.blocks_out += stream.host
            self.moving += stream.host
        return choice.mechanism

    def bring(self, stream: Stream, found: int) -> None:
        """Bring a swapped request back in this step, but for the `found` blocks that are there."""
        blocks = max(stream.host - found, 0)
        self.blocks_in += blocks
        self.moving += blocks
        self.drop(stream)

    def drop(self, stream: Stream) -> None:
        """Free what a request has on the host, if anything."""
        self.on_host -= stream.host > 0
        self.host_used -= stream.host
        stream.host = 0

    def resume(self, stream: Stream, now: InstantNs) -> None:
        """End a request's pause, if it has one."""
        if stream.paused_at is None:
            return
        pause = now - stream.paused_at
        stream.paused_at = None
        stream.paused_ns += pause
        self.pauses += 1
        self.paused += pause
        self.longest = max(self.longest, pause)

    def moving_ps(self) -> Ps:
        """Return how much longer the planned step is for what it moves."""
        return self.transfer_ps(self.moving)

    def transfer_ps(self, blocks: int) -> Ps:
        """Return how long blocks take one way."""
        return self.offers.transfer_ps(blocks, self.profile) if blocks else Ps(0)

    def totals(self) -> Yielded:
        """Return all counts."""
        size = block_bytes(self.profile)
        return Yielded(
            kept=self._choices[Preemption.KEEP],
            swapped=self._choices[Preemption.SWAP],
            recomputed=self._choices[Preemption.RECOMPUTE],
            pauses=self.pauses,
            paused_ns=DurationNs(self.paused),
            longest_pause_ns=DurationNs(self.longest),
            bytes_out=Bytes(self.blocks_out * size),
            bytes_in=Bytes(self.blocks_in * size),
            tokens_recomputed=Tokens(self.tokens_recomputed),
            on_host=self.on_host,
            host_blocks_used=Blocks(self.host_used),
            host_blocks_total=Blocks(self.host_total),
        )
