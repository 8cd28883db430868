"""Taking many engine steps at once changes nothing that anybody can see."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.model.engine import Preemption
from headrace.model.table import TableFit
from headrace.plane.journal import Differs, Verified, verify
from headrace.policy.batching import (
    ChunkedPrefill,
    DecodeFirst,
    DynamicChunk,
    PacedPrefill,
    PrefillFirst,
)
from headrace.policy.batching.preemption import RECOMPUTE_ONLY, Offers, Whole
from headrace.replica.rules import NO_RULES, Reserve, Rules
from headrace.sim.reading import load_scenario
from headrace.sim.scenario import rows_of
from headrace.sim.swarm import draw
from tests.sim.scenes import Ran, burst, profile, run, scenario

ROWS = 100
"""Requests of a drawn world that are run twice: enough for its faults, and quick step by step."""
BATCHING = (PrefillFirst(), ChunkedPrefill(), PacedPrefill(), DecodeFirst(), DynamicChunk())
EXAMPLES = Path(__file__).parents[2] / "examples"


def both(one: Ran, other: Ran) -> None:
    """Assert that two runs are the same to the byte."""
    assert one.world.now == other.world.now
    for mine, its in zip(one.records(), other.records(), strict=True):
        assert mine == its  # the first event that differs, before any bytes
    assert one.journal == other.journal
    for node, same in zip(one.world.nodes, other.world.nodes, strict=True):
        assert node.past == same.past
    assert one.world.engines.victims == other.world.engines.victims


@pytest.mark.parametrize("seed", range(50))
def test_a_drawn_world_is_the_same_step_by_step(seed: int) -> None:
    drawn, whole = draw(seed, profile())
    rows = whole[:ROWS]
    fast = run(drawn.scenario, seed, rows, check=False)
    slow = run(drawn.scenario, seed, rows, check=False, fast_forward=False)
    both(fast, slow)
    assert isinstance(verify(fast.segments), Verified)


STAIRS = TableFit(
    points=((1, 13.2), (64, 13.4), (80, 14.9), (160, 19.5), (512, 33.2), (2_048, 109.7)),
    h_ms=0.6,
    c_ms=0.0053,
    d_ms=8.1e-5,
    e_ms=3.1e-6,
)


@pytest.mark.parametrize("seed", range(20))
def test_whole_prompts_and_measured_steps_are_the_same_step_by_step(seed: int) -> None:
    stairs = replace(profile(), decode=None, mixed=None, table=STAIRS)
    drawn, whole = draw(seed, stairs if seed % 3 else profile())
    batching = BATCHING[seed % len(BATCHING)]
    rules = (
        Rules(reserve=Reserve.WHOLE, capacity=stairs.kv_capacity_tokens) if seed % 4 else NO_RULES
    )
    one, rows = replace(drawn.scenario, batching=batching), whole[:ROWS]
    if rules != NO_RULES:  # which know nobody who holds memory without a slot
        one = replace(one, preemption=RECOMPUTE_ONLY)
    fast = run(one, seed, rows, check=False, rules=rules)
    both(fast, run(one, seed, rows, check=False, fast_forward=False, rules=rules))


def test_a_jump_is_cut_where_somebody_comes_or_leaves() -> None:
    rows = sorted(
        [*burst(3, made=400), *burst(2, at_s=0.731, given=900, made=7), *burst(1, at_s=1.5)],
        key=lambda row: row.at,
    )
    one = replace(scenario(), noise_percent=0.0)
    fast = run(one, 0, rows)
    both(fast, run(one, 0, rows, fast_forward=False))


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_give_way_do_so_in_the_same_steps(seed: int) -> None:
    drawn = scenario(noise_percent=0.0)
    offers = Offers(
        mechanisms=tuple(Preemption),
        by_cost=seed % 2 == 0,
        whole=tuple(Whole)[seed % 3],
        host_gb_per_s=9.0,
        host_gib=0.5,
    )
    small = replace(
        profile(), kv_capacity_tokens=4_096, max_running=16, reference_batch=2, token_budget=256
    )
    pools = (replace(drawn.deployment.pools[0], profile=small, replicas=1),)
    one = replace(drawn, preemption=offers, deployment=replace(drawn.deployment, pools=pools))
    # What it learned of short answers makes the plane send more than the pool will hold.
    learned = [row for nth in range(60) for row in burst(1, at_s=nth / 10, given=100, made=3)]
    rows = [
        *learned,
        *burst(9, at_s=7.0, given=300, made=300 + seed),
        *burst(4, at_s=7.5, made=200),
    ]
    fast = run(one, seed, rows)
    both(fast, run(one, seed, rows, fast_forward=False))
    yielded = fast.world.nodes[0].past[0].yielded
    assert yielded.swapped + yielded.recomputed > 0
    assert 0 < len(fast.world.engines.victims) < len(rows)


@pytest.mark.data
def test_a_public_trace_is_the_same_step_by_step(data_dir: Path) -> None:
    whole = load_scenario(EXAMPLES / "azure_conv.yaml")
    assert whole.trace is not None
    one = replace(whole, trace=replace(whole.trace, first=2_000))
    rows = rows_of(one, 0, (data_dir,))
    fast = run(one, 0, rows, check=False)
    both(fast, run(one, 0, rows, check=False, fast_forward=False))
    assert not isinstance(verify(fast.segments), Differs)
