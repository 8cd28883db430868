"""The harness steps vLLM's own schedulers as vLLM's engine does: known facts hold, times are exact."""

import random

import pytest
from msgspec.structs import replace

from tests.adapters.vllm_plugin.scenes import (
    BOTH,
    FLAT,
    STEP_NS,
    STEP_PS,
    engine,
    play,
    starts,
    tokens_at,
)
from tests.replica.scenes import small
from tests.services import vllm_steps
from tests.services.vllm_scene import ASYNC, SYNC, Asked, Engine, Plant, Scene

pytestmark = pytest.mark.vllm

both = pytest.mark.parametrize("one", BOTH, ids=("sync", "async"))


@both
def test_the_class_that_was_named_runs(one: Engine) -> None:
    assert play(Asked(id="a", length=8), engine=one).scheduler == one.scheduler


@both
def test_first_come_first_served(one: Engine) -> None:
    names = list("dbca")
    asked = [Asked(id=name, length=8, max_tokens=2, at_ns=n) for n, name in enumerate(names)]
    run = play(*asked[::-1], engine=replace(one, max_num_seqs=1))
    assert starts(run) == names


@both
def test_least_priority_first_then_first_come(one: Engine) -> None:
    asked = [
        Asked(id="running", length=8, max_tokens=3),
        Asked(id="late", length=8, priority=1, at_ns=1),
        Asked(id="urgent", length=8, priority=-1, at_ns=3),
        Asked(id="later", length=8, priority=1, at_ns=2),
    ]
    run = play(*asked, engine=replace(one, max_num_seqs=1, policy="priority"))
    assert starts(run) == ["running", "urgent", "late", "later"]


@both
def test_who_started_last_gives_way_and_comes_back(one: Engine) -> None:
    """Three prompts of 4 blocks in 14: the first that lacks a 5th takes it, then from the last."""
    asked = [Asked(id=f"{n}", length=63, max_tokens=40, at_ns=n) for n in range(3)]
    run = play(*asked, engine=replace(one, num_gpu_blocks=15, prefix_caching=False))
    assert [step.preempted for step in run.steps if step.preempted] == [("2",)]
    assert [fate.preemptions for fate in run.fates.values()] == [0, 0, 1]
    assert all(len(fate.token_ps) == 40 for fate in run.fates.values())
    (back,) = [step for step in run.steps if step.resumed]
    made = sum(at <= back.planned_ps for at in run.fates["2"].token_ps)
    again = sum(step.prompts.get("2", 0) for step in run.steps if step.number >= back.number)
    assert again == 63 + made


@both
def test_the_largest_priority_gives_way_though_it_came_first(one: Engine) -> None:
    asked = [Asked(id=f"{n}", length=63, max_tokens=40, at_ns=n, priority=-n) for n in range(3)]
    tight = replace(one, num_gpu_blocks=15, policy="priority")
    run = play(*asked, engine=tight)
    assert next(step.preempted for step in run.steps if step.preempted) == ("0",)


@both
def test_a_long_prompt_goes_in_chunks_beside_decodes(one: Engine) -> None:
    asked = [Asked(id="short", length=8, max_tokens=20), Asked(id="long", length=1_000, at_ns=1)]
    run = play(*asked, engine=replace(one, max_num_batched_tokens=100))
    chunks = [step.prompts["long"] for step in run.steps if "long" in step.prompts]
    assert chunks == [99] * 10 + [10]
    assert max(sum(step.tokens.values()) for step in run.steps) == 100
    assert all("short" in step.decodes for step in run.steps if "long" in step.tokens)


def test_one_step_at_a_time_a_newcomer_misses_the_step_that_runs() -> None:
    asked = [
        Asked(id="a", length=8, max_tokens=5),
        Asked(id="b", length=8, max_tokens=2, at_ns=1),
        Asked(id="c", length=8, at_ns=STEP_NS),
    ]
    run = play(*asked, engine=engine(SYNC))
    assert tokens_at(run, "a") == [1, 2, 3, 4, 5]
    assert tokens_at(run, "b") == [2, 3]
    assert tokens_at(run, "c") == [2], "who comes at a boundary is in the step that it begins"


def test_with_two_in_flight_it_misses_the_next_one_too() -> None:
    """That was planned when the running one began."""
    asked = [Asked(id="a", length=8, max_tokens=5), Asked(id="b", length=8, max_tokens=2, at_ns=1)]
    run = play(*asked, engine=engine(ASYNC))
    assert tokens_at(run, "a") == [1, 2, 3, 4, 5]
    assert tokens_at(run, "b") == [3, 4]
    first = [(step.planned_ps // STEP_PS, step.start_ps // STEP_PS) for step in run.steps[:4]]
    assert first == [(0, 0), (0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(("one", "begins"), [(BOTH[0], 3), (BOTH[1], 4)], ids=("sync", "async"))
def test_a_slot_is_free_when_the_last_token_is_in(one: Engine, begins: int) -> None:
    """With two in flight the step after the last token is planned already, and goes with less."""
    asked = [
        Asked(id="beside", length=8, max_tokens=9),
        Asked(id="a", length=8, max_tokens=3),
        Asked(id="b", length=8, at_ns=1),
    ]
    run = play(*asked, engine=replace(one, max_num_seqs=2))
    assert tokens_at(run, "a") == [1, 2, 3]
    taken = next(step for step in run.steps if "b" in step.new)
    assert (taken.planned_ps, taken.start_ps) == (3 * STEP_PS, begins * STEP_PS)


@both
def test_a_step_takes_what_the_profile_says(one: Engine) -> None:
    profile = small()
    asked = [Asked(id="a", length=40, max_tokens=3), Asked(id="b", length=30, max_tokens=3)]
    run = play(*asked, engine=one, profile=profile)
    prices = [
        profile.step_ps(0, 0, 70, 40 * 40 + 30 * 30),
        profile.step_ps(2, 72, 0, 0),
        profile.step_ps(2, 74, 0, 0),
    ]
    took = [step.end_ps - step.start_ps for step in run.steps if step.tokens]
    assert took == prices
    assert run.fates["a"].token_ps == (prices[0], sum(prices[:2]), sum(prices))


@both
def test_every_output_has_its_length_whatever_the_squeeze(one: Engine) -> None:
    draw = random.Random(5)
    asked = [
        Asked(
            id=f"{n}",
            at_ns=draw.randrange(400_000_000),
            length=draw.randint(1, 300),
            max_tokens=draw.randint(1, 60),
        )
        for n in range(60)
    ]
    tight = replace(one, num_gpu_blocks=40, max_num_batched_tokens=64, reserve_full_isl=False)
    run = play(*asked, engine=tight)
    assert {name: len(fate.token_ps) for name, fate in run.fates.items()} == {
        each.id: each.max_tokens for each in asked
    }
    assert {fate.reason for fate in run.fates.values()} == {"length"}
    assert sum(fate.preemptions for fate in run.fates.values()) > 0


@both
def test_aborted_waiting_running_and_in_flight(one: Engine) -> None:
    asked = [
        Asked(id="running", length=8, max_tokens=50, abort_at_ns=3 * STEP_NS + 1),
        Asked(id="waiting", length=8, at_ns=1, abort_at_ns=2 * STEP_NS),
        Asked(id="unheard", length=8, at_ns=STEP_NS + 1, abort_at_ns=STEP_NS + 2),
        Asked(id="next", length=8, at_ns=2),
    ]
    run = play(*asked, engine=replace(one, max_num_seqs=1))
    assert [len(run.fates[each.id].token_ps) for each in asked] == [3, 0, 0, 1]
    assert starts(run) == ["running", "next"]


@both
def test_what_was_computed_before_is_found_under_the_same_salt(one: Engine) -> None:
    asked = [
        Asked(id=f"{n}", length=100, seed=1, cache_salt=salt, at_ns=n * 100 * STEP_NS)
        for n, salt in enumerate(("x", "x", "y"))
    ]
    run = play(*asked, engine=one)
    assert [fate.cached_tokens for fate in run.fates.values()] == [0, 96, 0]


def test_a_scheduler_of_ours_is_given_the_clock_and_what_callers_send() -> None:
    asked = Asked(id="a", length=8, max_tokens=2, at_ns=7, extra_args={"deadline_ms": 5})
    clocked = replace(
        engine(SYNC),
        scheduler="tests.adapters.vllm_plugin.clocked.Clocked",
        additional_config={"headrace": {"x": 1}},
    )
    run = play(asked, engine=clocked, read=("planned_ns", "given"))
    assert run.read["planned_ns"] == [7, 7 + STEP_NS, 7 + 2 * STEP_NS]
    assert run.read["given"] == [{"headrace": {"x": 1}}, {"deadline_ms": 5}]


def test_a_planted_error_ends_the_run_and_not_the_next() -> None:
    plant = Plant(path=f"{SYNC}.update_from_output", calls=(2,))
    asked = (Asked(id="a", length=8, max_tokens=5),)
    scene = Scene(engine=engine(SYNC), profile=FLAT, requests=asked, plants=(plant,))
    run = vllm_steps.shared().play(scene)
    assert run.error is not None
    assert f"PlantedError: call 2 of {SYNC}.update_from_output" in run.error
    assert not run.is_clean
    assert play(*asked, engine=engine(SYNC)).is_clean


@both
def test_what_never_fits_is_stuck(one: Engine) -> None:
    """vLLM refuses such a prompt at the door; behind it, it waits for ever."""
    scene = Scene(
        engine=replace(one, num_gpu_blocks=4),
        profile=FLAT,
        requests=(Asked(id="a", length=100),),
        max_steps=200,
    )
    run = vllm_steps.shared().play(scene)
    assert run.stuck
    assert run.left["waiting"] == 1


def test_two_schedulers_side_by_side_do_as_each_does_alone() -> None:
    asked = [Asked(id=f"{n}", length=50 * n + 1, max_tokens=9, at_ns=n * 1_000) for n in range(9)]
    scene = Scene(engine=engine(SYNC), beside=engine(ASYNC), profile=FLAT, requests=tuple(asked))
    both_runs = vllm_steps.shared().play_beside(scene)
    for run, one in zip(both_runs, BOTH, strict=True):
        alone = play(*asked, engine=one)
        assert [step.tokens for step in run.steps] == [step.tokens for step in alone.steps]
        assert run.fates == alone.fates
        assert vllm_steps.schedule_ns(run, running=8, prefill=False)
