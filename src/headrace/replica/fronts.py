"""Which prompts do the next steps compute, and from which position on?

For policies that size a step by what it will compute. Changes nothing.
"""

from headrace.policy.batching.knobs import FRONT_PROMPTS, Front
from headrace.replica.batch import Batch
from headrace.replica.stream import Phase, Stream
from headrace.units import Tokens


def fronts(batch: Batch) -> tuple[Front, ...]:
    """Return the first prompts in the order in which a step computes them."""
    found: list[Front] = []
    seen: list[Stream] = []
    for stream in batch.prefills:
        if len(found) == FRONT_PROMPTS:
            return tuple(found)
        if stream.phase is Phase.PREFILL:
            found.append(_front(stream, stream.pos))
            seen.append(stream)
    for stream in batch.waiting.first():
        if len(found) == FRONT_PROMPTS:
            break
        _, cached = batch.lookup(stream)
        if _grows(stream, cached, seen):
            break
        found.append(_front(stream, cached))
        seen.append(stream)
    return tuple(found)


def _front(stream: Stream, position: int) -> Front:
    job = stream.job
    return Front(
        position=Tokens(position),
        left=Tokens(stream.target - position),
        deadline=job.deadline,
        relegated=job.relegated,
    )


def _grows(stream: Stream, cached: int, before: list[Stream]) -> bool:
    """Say whether a prompt before a waiting one may cache more of its prefix in the same step."""
    job = stream.job
    nth = cached // job.prefix_tokens
    if nth >= len(job.prefix):
        return False
    own = job.prefix[nth]
    return any(len(one.job.prefix) > nth and one.job.prefix[nth] == own for one in before)
