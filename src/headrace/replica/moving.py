"""What is it that goes from one engine to another when a running request is moved?

KV only grows at its end. So it is copied while the request decodes on, and the request stands still only while
the last of it follows and it is handed over: for as long whatever its length (Llumnix, OSDI '24). The time
that passes is the driver's; an engine gives away what it has, and takes in what it is given.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.profile import Profile
from headrace.policy.batching.preemption import block_bytes
from headrace.replica.job import Finished, Job
from headrace.replica.stream import Stream
from headrace.units import NS_PER_S, DurationNs, InstantNs, Tokens, ms

_GB = 1_000_000_000


class Migration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How running requests get from one replica to another."""

    gb_per_s: Annotated[float, Meta(gt=0, le=10_000)] = 25.0
    """10^9 bytes a second from one replica to another. 25: a network card of 200 Gbit/s, which is assumed."""
    pause_ms: Annotated[float, Meta(ge=0, le=60_000)] = 25.0
    """How long a request stands still while the last of its KV follows and it is handed over. 25: Llumnix
    reports 20 to 30 at any length."""

    def copy_ns(self, blocks: int, profile: Profile) -> DurationNs:
        """Return how long so many KV blocks take while their request decodes on."""
        size = blocks * block_bytes(profile)
        return DurationNs(size * NS_PER_S // round(self.gb_per_s * _GB))

    @property
    def pause_ns(self) -> DurationNs:
        """How long it stands still after that."""
        return ms(self.pause_ms)


class Moved(Struct, frozen=True, kw_only=True):
    """A request between two engines: all that the next one needs to go on where the last one stopped."""

    job: Job
    arrived_at: InstantNs
    reported: Tokens
    """Output tokens of it that were told as progress."""
    so_far: Finished
    """What it has had, as if it ended here."""

    def stream(self, serial: int) -> Stream:
        """Return it as it waits in the next engine, with the KV of all tokens but the last one made."""
        made, timing = self.so_far.usage.output_tokens, self.so_far.timing
        stream = Stream(self.job, self.arrived_at, serial)
        stream.made, stream.reported = made, self.reported
        stream.target = self.job.prompt_tokens + made
        stream.pos = stream.had = stream.target - 1
        stream.cached = self.so_far.usage.cached_tokens
        stream.first_at, stream.last_at = timing.first_at, timing.last_at or InstantNs(0)
        account = stream.account
        account.counts, account.over = list(timing.gap_counts), timing.gaps_over
        account.max_gap = timing.max_gap_ns
        stream.preemptions, stream.paused_ns = self.so_far.preemptions, self.so_far.paused_ns
        return stream
