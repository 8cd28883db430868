"""The emulated engine does step for step as vLLM's own scheduler does, at the same instants.

As it plans one step at a time, with no prompt shared: `Scheduler`, without prefix cache. With two
steps in flight, vLLM's default on GPUs, who comes or starts anew misses one step more.
"""

import random
from collections import deque
from collections.abc import Sequence

import pytest
from msgspec import Struct
from msgspec.structs import replace

from headrace.model.ids import AttemptId
from headrace.model.profile import Profile
from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.policy.batching.preemption import Offers, Whole
from headrace.replica.core import Replica
from headrace.units import InstantNs
from tests.adapters.vllm_plugin.scenes import engine, play, starts
from tests.replica.scenes import engine as emulated
from tests.replica.scenes import job, small
from tests.services.vllm_scene import SYNC, Asked, Run

pytestmark = pytest.mark.vllm

Made = tuple[int, int, frozenset[str], tuple[tuple[str, int], ...]]
"""One step: when it starts and ends in ps, who decodes, whose prompt tokens are computed."""


class Case(Struct, frozen=True, kw_only=True):
    """Sizes of an engine and what comes to it."""

    blocks: int
    running: int = 32
    budget: int = 512
    chunk: int | None = None
    together: bool = False
    """Whether all come within the first step, in place of 1.1 times what it can do."""
    aborted: int = 0
    """Percent of the requests."""
    seed: int = 1
    whole: bool = True
    """Whether a request starts only where its whole prompt fits: vLLM's default."""


ROOMY = Case(blocks=4_000)
CASES = [
    ROOMY,
    Case(blocks=4_000, running=8),
    Case(blocks=4_000, budget=64),
    Case(blocks=4_000, running=8, aborted=30),
    Case(blocks=400),
    Case(blocks=120, budget=128, seed=2),
    Case(blocks=250, running=4, budget=2_048, aborted=20),
    Case(blocks=400, whole=False),
    Case(blocks=120, budget=128, seed=2, whole=False),
    Case(blocks=250, running=4, budget=2_048, aborted=20, whole=False),
    Case(blocks=4_000, budget=40, chunk=24, together=True),
    Case(blocks=300, chunk=24, together=True),
    Case(blocks=300, chunk=24, together=True, whole=False),
]


def drawn(case: Case, rate: float, count: int = 200) -> list[Asked]:
    """Return requests of 16 to 1,500 prompt tokens and 1 to 120 output tokens, `rate` a second."""
    draw = random.Random(case.seed)
    at, asked = 0.0, []
    for nth in range(count):
        at = nth if case.together else at + draw.expovariate(rate) * 1e9
        gone = draw.randrange(100) < case.aborted
        asked.append(
            Asked(
                id=f"{nth}",
                at_ns=round(at),
                length=draw.randint(16, 1_500),
                max_tokens=draw.randint(1, 120),
                abort_at_ns=round(at) + draw.randrange(10**9) if gone else None,
            )
        )
    return asked


def emulate(profile: Profile, case: Case, asked: Sequence[Asked]) -> list[Made]:
    """Return the steps of the emulated engine, taken one by one."""
    offers = Offers(whole=Whole.ALL if case.whole else Whole.NEVER)
    policy = ChunkedPrefill(chunk_limit=case.chunk)
    replica = emulated(profile, policy, jumps=False, offers=offers)
    made: list[Made] = []
    calls = [(each.at_ns, 0, each) for each in asked]
    calls += [(each.abort_at_ns, 1, each) for each in asked if each.abort_at_ns is not None]
    coming = deque(sorted(calls, key=lambda call: call[:2]))
    while coming or replica.next_event() is not None:
        due = replica.next_event()
        if due is None or (coming and coming[0][0] < due):
            at, gives_up, each = coming.popleft()
            if gives_up:
                replica.abort(AttemptId(int(each.id)), InstantNs(at))
            else:
                tokens = each.length, each.max_tokens
                assert replica.submit(job(int(each.id), *tokens), InstantNs(at)) is None
        else:
            replica.advance(due)
        look(replica, made)
    return made


def look(replica: Replica, made: list[Made]) -> None:
    """Add the step that the engine is in, if it is a new one."""
    batch = replica._batch
    if replica._left and (not made or made[-1][1] != replica._end):
        decodes = frozenset(str(attempt) for attempt in batch.decodes)
        prompts = tuple((str(stream.job.attempt), chunk) for stream, chunk in batch.plan)
        made.append((replica._start, replica._end, decodes, prompts))


def steps(run: Run) -> list[Made]:
    """Return vLLM's steps that computed something."""
    return [
        (step.start_ps, step.end_ps, frozenset(step.decodes), tuple(step.prompts.items()))
        for step in run.steps
        if step.tokens
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_emulated_engine_takes_vllms_steps(case: Case) -> None:
    profile = small(case.blocks, budget=case.budget, running=case.running)
    busy = emulate(profile, case, drawn(case, 1e9))[-1][1] / 1e12
    asked = drawn(case, 1.1 * 200 / busy)
    run = play(
        *asked,
        engine=replace(
            engine(SYNC),
            max_num_seqs=case.running,
            max_num_batched_tokens=case.budget,
            num_gpu_blocks=case.blocks + 1,
            long_prefill_token_threshold=case.chunk or 0,
            prefix_caching=False,
            reserve_full_isl=case.whole,
        ),
        profile=profile,
    )
    made = emulate(profile, case, asked)
    assert made == steps(run)
    order = list(dict.fromkeys(name for _, _, _, prompts in made for name, _ in prompts))
    assert order == starts(run)
    assert (case.blocks < 1_000) == any(step.preempted for step in run.steps)
