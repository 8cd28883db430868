"""Where our scheduler fails inside vLLM, or is in one that it does not know, no request pays for that."""

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from tests.adapters.vllm_plugin.scenes import FLAT, engine, play, starts
from tests.adapters.vllm_plugin.test_ours_emulated import marked
from tests.services import vllm_steps
from tests.services.vllm_scene import ASYNC, OURS, SYNC, Asked, Plant, Run, Scene

pytestmark = pytest.mark.vllm

ROOM = "headrace.adapters.vllm_plugin"
FAILED = "headrace: the scheduler failed; vLLM's own scheduling goes on"
POINTS = [
    "queue.Ordered.add",
    "queue.Ordered.first",
    "queue.Ordered.pop",
    "queue.Ordered.account",
    "queue.Ordered.take",
    "queue.Ordered._drop",
    "guests.Guests.arrive",
    "guests.Guests.start",
    "guests.Guests.settle",
    "guests.Guests.leave",
    "turning.Turner.knobs",
    "turning.Turner.turn",
    "turning.Turner.rank_victims",
    "scheduler.SLOScheduler._follow",
    "scheduler.SLOScheduler._give_way",
]
RARE = {"queue.Ordered.take", "turning.Turner.rank_victims", "scheduler.SLOScheduler._give_way"}
"""Called a few times only."""
both = pytest.mark.parametrize("depth", [SYNC, ASYNC], ids=("sync", "async"))


def drawn() -> list[Asked]:
    """Return requests with and without metadata that outgrow the blocks; some of them leave early."""
    draw = random.Random(7)
    asked = []
    for nth in range(60):
        at = draw.randrange(400_000_000)
        one = Asked(
            id=f"{nth}",
            at_ns=at,
            length=draw.randint(1, 300),
            max_tokens=draw.randint(1, 60),
            priority=draw.randint(-3, 3),
            abort_at_ns=at + draw.randrange(10**9) if draw.random() < 0.2 else None,
        )
        tenant = draw.choice("ab")
        told = marked(
            one, tenant=tenant, left_ms=draw.randint(1, 900), gap_ms=draw.choice((80, 500))
        )
        asked.append(one if draw.random() < 0.3 else told.asked)
    return asked


def tight(depth: str, policy: str, **settings: object) -> Scene:
    """Return the run of a small engine."""
    one = engine(
        OURS,
        num_gpu_blocks=40,
        max_num_batched_tokens=64,
        policy=policy,
        reserve_full_isl=False,
        additional_config={"headrace": settings},
    )
    asked = tuple(drawn())
    return Scene(engine=replace(one, async_scheduling=depth == ASYNC), profile=FLAT, requests=asked)


def whole(run: Run, asked: Sequence[Asked]) -> None:
    """Assert that every request that nobody aborted has all its tokens."""
    for each in asked:
        fate = run.fates[each.id]
        if each.abort_at_ns is None:
            assert (len(fate.token_ps), fate.reason) == (each.max_tokens, "length")


@both
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("point", POINTS)
def test_no_request_is_lost_wherever_it_fails(point: str, policy: str, depth: str) -> None:
    scene = tight(depth, policy)
    for call in (1, 2) if point in RARE else (1, 2, 9, 60):
        plant = Plant(path=f"{ROOM}.{point}", calls=(call,))
        run = vllm_steps.shared().play(replace(scene, plants=(plant,)))
        assert run.is_clean, (call, run.error or run.left)
        whole(run, scene.requests)
        assert sum(FAILED in line for line in run.said) == 1, call


@both
def test_where_it_does_not_fail_they_end_as_well(depth: str) -> None:
    scene = tight(depth, "fcfs")
    run = vllm_steps.shared().play(scene)
    assert run.is_clean, run.error or run.left
    whole(run, scene.requests)
    assert any(step.preempted for step in run.steps)
    assert not any("headrace" in line for line in run.said)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_after_a_fault_those_that_wait_start_in_vllms_own_order(policy: str) -> None:
    """Latest deadline first, in either of its orders."""
    line = [Asked(id="running", length=8, max_tokens=20)]
    line += [
        marked(
            Asked(id=f"{n}", at_ns=1 + n, length=8, priority=n), tenant="t", left_ms=900 - n
        ).asked
        for n in range(20)
    ]
    one = engine(OURS, max_num_seqs=1, policy=policy)
    ours = play(*line, engine=one)
    assert starts(ours) == ["running", *(f"{n}" for n in reversed(range(20)))]
    plant = Plant(path=f"{ROOM}.turning.Turner.knobs", calls=(30,))
    run = play(*line, engine=one, plants=(plant,))
    first = starts(run)
    turned = next(n for n, name in enumerate(starts(ours)) if first[n] != name)
    assert 2 < turned < 15
    assert first[turned:] == sorted(first[turned:], key=int)


@both
def test_set_up_to_stop_it_ends_the_engine_with_the_reason(depth: str) -> None:
    plant = Plant(path=f"{ROOM}.turning.Turner.turn", calls=(20,))
    scene = replace(tight(depth, "fcfs", on_fault="stop"), plants=(plant,))
    run = vllm_steps.shared().play(scene)
    assert run.error is not None
    assert "headrace: the scheduler failed; the engine stops, as it is set up" in run.error
    assert f"PlantedError: call 20 of {plant.path}" in run.error


def test_in_a_release_it_does_not_know_it_refuses_to_start_and_says_what_is_missing() -> None:
    with pytest.raises(AssertionError, match=r"vLLM 0\.32\.0 is not among .*0\.1\.0"):
        play(Asked(id="a", length=8), engine=engine("tests.adapters.vllm_plugin.odd.Unknown"))
    with pytest.raises(AssertionError, match=r"it lacks kv_cache_manager\.gone_since.*passive"):
        play(Asked(id="a", length=8), engine=engine("tests.adapters.vllm_plugin.odd.Lacking"))


@pytest.mark.parametrize(
    ("name", "choice"),
    [("Unknown", "passive"), ("Unknown", "try"), ("Lacking", "passive")],
)
def test_by_choice_it_runs_there(name: str, choice: str) -> None:
    """Passive, vLLM's order stands; trying, ours does if nothing is missing."""
    settings = {"headrace": {"untested": choice}}
    line = [Asked(id="running", length=8, max_tokens=9)]
    line += [
        marked(Asked(id=f"{n}", at_ns=1 + n, length=8), tenant="t", left_ms=900 - n).asked
        for n in range(5)
    ]
    one = engine(
        f"tests.adapters.vllm_plugin.odd.{name}", max_num_seqs=1, additional_config=settings
    )
    run = play(*line, engine=one)
    order = [f"{n}" for n in range(5)]
    assert starts(run)[1:] == (order[::-1] if choice == "try" else order)
    assert any("0.32.0 is not among" in text for text in run.said)


@both
def test_looking_on_it_changes_nothing_whatever_is_told_it(depth: str) -> None:
    scene = tight(depth, "priority", mode="passive")
    own = replace(scene.engine, scheduler=depth, additional_config={})
    run = vllm_steps.shared().play(scene)
    theirs = vllm_steps.shared().play(replace(scene, engine=own))
    assert [tuple(step.tokens.items()) for step in run.steps] == [
        tuple(step.tokens.items()) for step in theirs.steps
    ]
    assert run.fates == theirs.fates
