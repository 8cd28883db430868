"""Requests without metadata are scheduled by our class as vLLM would; so is everything in passive mode."""

from random import Random

import pytest
from msgspec.structs import replace

from tests.adapters.vllm_plugin.fakes import told
from tests.adapters.vllm_plugin.scenes import engine, play, starts
from tests.replica.scenes import small
from tests.services.vllm import needed
from tests.services.vllm_scene import ASYNC, OURS, Asked, Engine, Run

pytestmark = pytest.mark.vllm

ROOMY = engine(ASYNC, num_gpu_blocks=1_024, max_num_seqs=8)
SHORT = engine(ASYNC, num_gpu_blocks=150, max_num_seqs=32, max_num_batched_tokens=256)
CHUNKED = engine(
    ASYNC,
    num_gpu_blocks=120,
    max_num_seqs=16,
    max_num_batched_tokens=128,
    long_prefill_token_threshold=64,
)


def drawn(seed: int, priorities: int = 0) -> list[Asked]:
    """Return requests that load an engine, a few of which leave early."""
    rng, asked, at = Random(seed), [], 0
    for nth in range(120):
        at += int(rng.expovariate(1 / 30e6))
        asked.append(
            Asked(
                id=f"r{nth}",
                at_ns=at,
                length=rng.randint(16, 1_200),
                max_tokens=rng.randint(1, 100),
                priority=rng.randint(-priorities, priorities),
                abort_at_ns=at + rng.randint(1, 2 * 10**9) if rng.random() < 0.2 else None,
            )
        )
    return asked


def beside(one: Engine, asked: list[Asked], **settings: object) -> tuple[Run, Run]:
    """Return what vLLM's own class does with requests, and what ours does."""
    needed()
    ours = replace(one, scheduler=OURS, additional_config={"headrace": settings})
    profile = small(200)
    return play(*asked, engine=one, profile=profile), play(*asked, engine=ours, profile=profile)


def steps(run: Run) -> list[tuple[tuple[tuple[str, int], ...], object]]:
    """Return what each step did, all order included."""
    return [(tuple(s.tokens.items()), (s.new, s.resumed, s.preempted)) for s in run.steps]


@pytest.mark.parametrize("one", [ROOMY, SHORT, CHUNKED], ids=("roomy", "short", "chunked"))
@pytest.mark.parametrize("mode", ["enforce", "passive"])
def test_every_step_is_as_vllms_own(one: Engine, mode: str) -> None:
    theirs, ours = beside(one, drawn(1), mode=mode)
    assert one is ROOMY or any(step.preempted for step in theirs.steps)
    assert [text for text in ours.said if "headrace:" in text] == []
    assert [(set(t), who) for t, who in steps(ours)] == [(set(t), who) for t, who in steps(theirs)]
    if mode == "passive":
        assert steps(ours) == steps(theirs)


def test_by_priority_they_start_as_vllms_own() -> None:
    theirs, ours = beside(replace(ROOMY, policy="priority"), drawn(2, priorities=3))
    assert steps(ours) == steps(theirs)


def test_to_come_without_metadata_is_no_gain() -> None:
    """Others' urgent work goes first, patient work in its turn; after ten seconds it has its own."""
    needed()
    for left_ms, ahead in ((5_000, 20), (60_000, 10)):
        ours = [
            Asked(id=f"told{n}", length=40, max_tokens=4, extra_args=told("t", left_ms=left_ms))
            for n in range(20)
        ]
        bare = [Asked(id=f"bare{n}", length=40, max_tokens=4) for n in range(20)]
        one = engine(OURS, max_num_seqs=1)
        order = starts(play(*bare, *ours, engine=one))
        assert sum(name.startswith("told") for name in order[:20]) >= ahead - 1
