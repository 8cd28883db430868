"""One attempt inside the engine, and the queue of those that wait for a slot."""

from collections.abc import Iterator
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from headrace.model.engine import Usage
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.policy.batching.knobs import BatchingPolicy, Entry, Key
from headrace.replica.gaps import Account
from headrace.replica.job import Finished, Job
from headrace.units import BLOCK_TOKENS, DurationNs, InstantNs, Tokens

if TYPE_CHECKING:
    from headrace.replica.kv import Extent


class Phase(Enum):
    """Where a stream is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DOOMED = "doomed"
    """Aborted; it keeps its slot to the end of the step it is in."""
    GONE = "gone"


class Stream:
    """What the engine keeps of an attempt; plain fields, written by the batch it is in."""

    __slots__ = (
        "account", "arrived_at", "blocks", "cached", "end_step", "extent", "first_at", "had", "host",
        "job", "join_step", "last_at", "made", "offset", "paused_at", "paused_ns", "phase", "pos",
        "preemptions", "prefix_blocks", "reported", "resumes", "serial", "target",
    )  # fmt: skip

    def __init__(self, job: Job, arrived_at: InstantNs, serial: int) -> None:
        """Start waiting, with nothing computed."""
        self.job = job
        self.arrived_at = arrived_at
        self.serial = serial
        """Order of submission: breaks every tie."""
        self.phase = Phase.WAITING
        self.target: int = job.prompt_tokens
        """Tokens to compute before the next one is made: the prompt, and after a preemption the
        output made before it."""
        self.pos = 0
        """Tokens whose KV there is, here or on the host; while decoding, as of when it began."""
        self.blocks = 0
        """KV blocks held, those of the tree included, unless it decodes."""
        self.host = 0
        """Blocks of its KV on the host: it waits then, and holds none here."""
        self.resumes = False
        """Whether it has its KV back and makes its next token in this very step, as a decode."""
        self.had = 0
        """The most tokens whose KV there was when it gave way: fewer are computed again."""
        self.prefix_blocks = min(job.prompt_tokens, len(job.prefix) * job.prefix_tokens) // (
            BLOCK_TOKENS
        )
        """Full blocks of the prompt that have ids."""
        self.extent: Extent | None = None
        """The end of the path locked in the prefix tree, while it holds blocks."""
        self.cached: int | None = None
        """Tokens found in the prefix cache at the first start."""
        self.made = 0
        """Output tokens; while decoding, those made before `join_step`."""
        self.join_step = 0
        self.end_step = 0
        """The step count at which the output is complete, while decoding."""
        self.offset = 0
        """The step count modulo the block size at which a decode needs its next block."""
        self.reported = 0
        """Output tokens told by `progress`."""
        self.first_at: InstantNs | None = None
        self.last_at = InstantNs(0)
        self.account = Account(job.gap_bound_ns)
        self.paused_at: InstantNs | None = None
        """Since when it makes no tokens because it gave way."""
        self.preemptions = self.paused_ns = 0
        """How often it gave way, and for how long, of pauses that are over."""

    def entry(self, computed: int, made: int) -> Entry:
        """Return what a policy may know."""
        job = self.job
        return Entry(
            attempt=job.attempt,
            tenant=job.tenant,
            arrived_at=self.arrived_at,
            deadline=job.deadline,
            relegated=job.relegated,
            counter=job.counter,
            weight=job.weight,
            prompt_tokens=job.prompt_tokens,
            computed=Tokens(computed),
            made=Tokens(made),
            gap_ns=job.gap_bound_ns,
        )

    def made_by(self, steps: int) -> int:
        """Return the output tokens at a step of the decodes' clock, of a stream that is not over."""
        return self.made + (steps - self.join_step if self.phase is Phase.DECODE else 0)

    def finished(self) -> Finished:
        """Return the final account of a stream that no longer decodes."""
        job, account = self.job, self.account
        usage = Usage(
            input_tokens=job.prompt_tokens,
            cached_tokens=Tokens(self.cached or 0),
            output_tokens=Tokens(self.made),
        )
        timing = NO_STREAM
        if self.first_at is not None:
            timing = StreamTiming(
                tokens=Tokens(self.made),
                first_at=self.first_at,
                last_at=self.last_at,
                max_gap_ns=DurationNs(account.max_gap),
                gaps_over=account.over,
                gap_counts=tuple(account.counts),
            )
        return Finished(
            attempt=job.attempt,
            usage=usage,
            timing=timing,
            preemptions=self.preemptions,
            paused_ns=DurationNs(self.paused_ns),
        )


class WaitingQueue:
    """Waiting streams in the policy's order, ties by submission."""

    __slots__ = ("_heap", "_policy", "count")

    def __init__(self, policy: BatchingPolicy) -> None:
        """Start empty; `policy` gives the keys."""
        self._policy = policy
        self._heap: list[tuple[Key, int, Stream]] = []  # streams that left are skipped when met
        self.count = 0

    def push(self, stream: Stream) -> None:
        """Add a stream in phase `WAITING`."""
        key = self._policy.waiting_key(stream.entry(stream.pos, stream.made))
        heappush(self._heap, (key, stream.serial, stream))
        self.count += 1

    def head(self) -> Stream | None:
        """Return the stream to start next."""
        heap = self._heap
        while heap:
            stream = heap[0][2]
            if stream.phase is Phase.WAITING:
                return stream
            heappop(heap)
        return None

    def first(self) -> Iterator[Stream]:
        """Yield the streams in order, each as cheaply as the depth of a heap allows."""
        heap = self._heap
        near = [(heap[0], 0)] if heap else []
        while near:
            item, at = heappop(near)
            if item[2].phase is Phase.WAITING:
                yield item[2]
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heappush(near, (heap[child], child))

    def pop(self) -> None:
        """Remove the head, which gets a slot."""
        heappop(self._heap)
        self.count -= 1

    def left(self) -> None:
        """Note that one stream ended here; most entries dead is the signal to sweep them."""
        self.count -= 1
        if len(self._heap) > 2 * self.count + 64:
            self._heap = [item for item in self._heap if item[2].phase is Phase.WAITING]
            heapify(self._heap)

    def reorder(self) -> None:
        """Compute all keys again."""
        streams = [item[2] for item in self._heap if item[2].phase is Phase.WAITING]
        key = self._policy.waiting_key
        self._heap = [(key(each.entry(each.pos, each.made)), each.serial, each) for each in streams]
        heapify(self._heap)
