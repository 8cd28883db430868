"""Does everything in a batch add up? For tests and checkers; nothing of it runs otherwise."""

# ruff: noqa: SLF001  the batch's own books are what is looked at

from headrace.replica.batch import Batch
from headrace.replica.rules import whole
from headrace.replica.stream import Phase
from headrace.units import BLOCK_TOKENS, blocks_for


def audit(batch: Batch) -> None:
    """Assert that blocks, tokens and streams add up."""
    held, context = sum(batch.berths.values()), 0
    due, bounds = [0] * BLOCK_TOKENS, dict.fromkeys(batch.bounds, 0)
    for stream in batch.decodes.values():
        assert stream.phase in {Phase.DECODE, Phase.DOOMED}, f"{stream.phase=}"
        assert stream.extent is not None
        computed = batch._computed(stream)
        held += blocks_for(computed + batch._granted) - stream.extent.end
        context += computed + 1
        due[stream.offset] += 1
        bounds[stream.job.gap_bound_ns] += 1
        assert (computed - batch.steps + stream.offset) % BLOCK_TOKENS == 0
        assert batch.steps <= stream.end_step, "a decode past its end"
    backlog = 0
    for stream in batch.prefills:
        assert stream.phase in {Phase.PREFILL, Phase.DOOMED}, f"{stream.phase=}"
        assert stream.extent is not None
        assert stream.pos < stream.target
        held += stream.blocks - stream.extent.end
        backlog += stream.target - stream.pos
    running = (*batch.decodes.values(), *batch.prefills)
    assert batch._door.promised == sum(whole(stream.job) for stream in running)
    waiting = [each for each in batch.streams.values() if each.phase is Phase.WAITING]
    assert len(waiting) == batch.waiting.count
    for stream in waiting:
        backlog += stream.target - stream.pos
        if stream.extent is not None:
            assert batch.kept[stream.job.attempt] is stream
            assert not stream.host, "KV in two places"
            held += stream.blocks - stream.extent.end
        else:
            assert stream.pos <= stream.host * BLOCK_TOKENS, "KV out of nowhere"
            assert not stream.blocks
    assert backlog == batch.backlog, f"{backlog=} {batch.backlog=}"
    assert sum(stream.host for stream in waiting) == batch.yielding.host_used
    assert batch.yielding.host_used <= batch.yielding.host_total
    assert context == batch.context, f"{context=} {batch.context=}"
    assert due == batch._due, f"{due=} {batch._due=}"
    assert bounds == batch.bounds, f"{bounds=} {batch.bounds=}"
    batch.pool.check(held)
