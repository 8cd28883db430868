"""Which prompts do the next steps compute, and from which position on?

For policies that size a step by what it will compute. Changes nothing. Positions are those of the prefix
cache as it stands: a prompt whose prefix is evicted for those before it in the step computes more.
"""

from headrace.policy.batching.knobs import FRONT_PROMPTS, Front
from headrace.replica.batch import Batch
from headrace.replica.stream import Phase, Stream
from headrace.units import Ps, Tokens


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
    for stream in batch.waiting.first(batch.steps):
        if len(found) == FRONT_PROMPTS:
            break
        _, start = batch.lookup(stream)
        if _grows(stream, start, seen):
            break
        # All of it: what the cache has now may be evicted for the prompts before it.
        transfer_ps = batch.yielding.transfer_ps(stream.host)
        found.append(_front(stream, start, transfer_ps, resumes=stream.goes_on(start)))
        seen.append(stream)
    return tuple(found)


def _front(stream: Stream, position: int, transfer_ps: int = 0, *, resumes: bool = False) -> Front:
    job = stream.job
    return Front(
        position=Tokens(position),
        left=Tokens(stream.target - position),
        deadline=job.deadline,
        relegated=job.relegated,
        resumes=resumes,
        transfer_ps=Ps(transfer_ps),
    )


def _grows(stream: Stream, start: int, before: list[Stream]) -> bool:
    """Say whether a prompt before a waiting one may cache more of its prefix in the same step."""
    job = stream.job
    nth = start // job.prefix_tokens
    if stream.extent is not None or nth >= len(job.prefix):
        return False
    own = job.prefix[nth]
    return any(len(one.job.prefix) > nth and one.job.prefix[nth] == own for one in before)
