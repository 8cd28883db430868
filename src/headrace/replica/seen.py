"""What may a batching policy see of an engine at a boundary?"""

from headrace.model.profile import Profile
from headrace.policy.batching.knobs import BatchView
from headrace.replica.batch import Batch
from headrace.replica.fronts import fronts
from headrace.units import Blocks, DurationNs, InstantNs, Tokens


def seen(batch: Batch, profile: Profile, now: InstantNs) -> BatchView:
    """Return the view of a batch at the boundary `now`."""
    pool = batch.pool
    bounds = [bound for bound, count in batch.bounds.items() if count]
    return BatchView(
        now=now,
        profile=profile,
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
