"""A budget from predicted step times: as much as fits, who may hasten it, and who gets which part."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.config.profiles import load_profile
from headrace.model.profile import Profile
from headrace.policy.batching import Batching, DecodeFirst, DynamicChunk, PacedPrefill
from headrace.policy.batching.knobs import ONE_STEP, BatchView, Break, Front, Knobs
from headrace.policy.batching.steps import Steps
from headrace.units import (
    MICRO,
    NS_PER_MS,
    NS_PER_S,
    PS_PER_NS,
    Blocks,
    DurationNs,
    InstantNs,
    Ps,
    Tokens,
)
from tests.replica.scenes import TABLE, small

PROFILE = load_profile("a100-8b-tp1")
FAR = 3_600 * NS_PER_S


def front(left: int, *, at: int = 0, due_ms: float = 3_600_000, relegated: bool = False) -> Front:
    """Return a prompt in front."""
    return Front(
        position=Tokens(at),
        left=Tokens(left),
        deadline=InstantNs(round(due_ms * NS_PER_MS)),
        relegated=relegated,
    )


def view(
    *fronts: Front,
    decodes: int = 16,
    each: int = 1_000,
    gap_ms: float = 80.0,
    profile: Profile = PROFILE,
) -> BatchView:
    """Return an engine with decodes of `each` context, and prompts in front."""
    return BatchView(
        now=InstantNs(0),
        profile=profile,
        decodes=decodes,
        context=Tokens(decodes * each),
        prefills=min(len(fronts), 1),
        waiting=max(len(fronts) - 1, 0),
        prefill_tokens=Tokens(sum(each.left for each in fronts)),
        free_blocks=Blocks(10_000),
        tightest_gap_ns=DurationNs(round(gap_ms * NS_PER_MS)) if decodes else None,
        fronts=fronts,
    )


def spent(seen: BatchView, knobs: Knobs, extra: int = 0) -> tuple[list[int], int]:
    """Return what an engine gives each prompt, and how long its step takes in ps.

    `extra`: with so many more tokens than it was told.
    """
    left = max(knobs.token_budget + extra - seen.decodes, 0)
    chunks, span = [], 0
    for each in seen.fronts:
        chunk = min(each.left, left, knobs.chunk_limit or left)
        left -= chunk
        chunks.append(chunk)
        span += chunk * (2 * each.position + chunk)
    return chunks, seen.profile.step_ps(seen.decodes, seen.context, sum(chunks), span)


FRONTS = st.lists(
    st.builds(
        front,
        st.integers(1, 9_000),
        at=st.integers(0, 60_000),
        due_ms=st.floats(0, 4_000),
        relegated=st.booleans(),
    ),
    min_size=1,
    max_size=16,
)


@given(
    policy=st.builds(
        PacedPrefill,
        step_ms=st.one_of(st.none(), st.floats(5, 200)),
        hurry_ms=st.floats(0, 3_000),
        least_tokens=st.integers(1, 64),
        token_budget_max=st.integers(1, 4_096),
    ),
    fronts=FRONTS,
    decodes=st.integers(0, 256),
    each=st.integers(1, 4_000),
    gap_ms=st.floats(10, 2_000),
    profile=st.sampled_from([PROFILE, load_profile("h100-70b-tp8"), small(table=TABLE)]),
)
@settings(max_examples=300)
def test_no_step_with_a_prompt_exceeds_the_bound_less_the_margin(
    policy: PacedPrefill,
    fronts: list[Front],
    decodes: int,
    each: int,
    gap_ms: float,
    profile: Profile,
) -> None:
    seen = view(*fronts, decodes=decodes, each=each, gap_ms=gap_ms, profile=profile)
    knobs = policy.knobs(seen)
    chunks, step = spent(seen, knobs)
    assert sum(chunks) >= min(policy.least_tokens, sum(one.left for one in fronts)) > 0
    if sum(chunks) > policy.least_tokens:
        assert sum(chunks) + decodes <= policy.token_budget_max
        if seen.tightest_gap_ns is not None:
            assert step * 100 <= seen.tightest_gap_ns * PS_PER_NS * 95


@given(fronts=FRONTS, decodes=st.integers(1, 200), each=st.integers(1, 3_000))
def test_a_step_is_as_full_as_its_time_allows(fronts: list[Front], decodes: int, each: int) -> None:
    fronts = [replace(one, relegated=False, deadline=InstantNs(FAR)) for one in fronts]
    seen = view(*fronts, decodes=decodes, each=each)
    policy = PacedPrefill(step_ms=40.0, token_budget_max=100_000)
    knobs = policy.knobs(seen)
    chunks, step = spent(seen, knobs)
    assert step <= 40 * MICRO * PS_PER_NS or sum(chunks) <= policy.least_tokens
    more, longer = spent(seen, knobs, extra=1)
    assert more == chunks or longer > 40 * MICRO * PS_PER_NS


def test_a_chunk_deep_in_a_long_prompt_is_smaller() -> None:
    policy = PacedPrefill(step_ms=40.0)
    fresh, deep = (policy.knobs(view(front(20_000, at=at))).token_budget for at in (0, 100_000))
    assert 0 < deep < fresh * 3 // 4


def test_context_of_the_decodes_is_room_that_prompts_do_not_get() -> None:
    policy = PacedPrefill(step_ms=40.0)
    light, heavy = (
        policy.knobs(view(front(20_000), each=each)).token_budget for each in (100, 8_000)
    )
    assert heavy < light


def test_short_of_time_a_prompt_gets_the_whole_gap() -> None:
    policy = PacedPrefill(step_ms=30.0, hurry_ms=200.0)
    calm, hurried = (view(front(6_000, due_ms=due)) for due in (5_000, 600))
    _, step = spent(calm, policy.knobs(calm))
    _, longer = spent(hurried, policy.knobs(hurried))
    assert 29 * MICRO < step // PS_PER_NS <= 30 * MICRO
    assert 75 * MICRO < longer // PS_PER_NS <= 76 * MICRO


def test_the_second_prompt_in_line_hurries_the_first() -> None:
    policy = PacedPrefill(step_ms=30.0, hurry_ms=0.0)
    seen = view(front(4_000, due_ms=2_000), front(4_000, due_ms=550))
    _, step = spent(seen, policy.knobs(seen))
    assert step // PS_PER_NS > 70 * MICRO


def test_relegated_prompts_hurry_nobody() -> None:
    policy = PacedPrefill(step_ms=30.0)
    seen = view(front(6_000, due_ms=1, relegated=True))
    _, step = spent(seen, policy.knobs(seen))
    assert step // PS_PER_NS <= 30 * MICRO


@pytest.mark.parametrize(("decodes", "gap_ms"), [(16, 1_000.0), (0, 80.0)])
def test_decodes_with_loose_bounds_or_none_lend_the_step(decodes: int, gap_ms: float) -> None:
    knobs = PacedPrefill(step_ms=30.0).knobs(view(front(9_000), decodes=decodes, gap_ms=gap_ms))
    assert knobs.token_budget == 2_048


def test_the_bound_of_lenders_still_holds() -> None:
    seen = view(front(20_000), gap_ms=600.0)
    policy = PacedPrefill(token_budget_max=100_000)
    _, step = spent(seen, policy.knobs(seen))
    assert 560 * MICRO < step // PS_PER_NS <= 570 * MICRO


def test_without_a_pace_a_step_is_as_long_as_the_fixed_budget_makes_it_at_its_worst() -> None:
    batch = PROFILE.reference_batch
    worst = PROFILE.full_step_ns(batch, batch * PROFILE.reference_context)
    seen = view(front(9_000), gap_ms=400.0)
    _, step = spent(seen, PacedPrefill().knobs(seen))
    assert worst * 98 // 100 < step // PS_PER_NS <= worst


def test_prompts_progress_beside_decodes_that_leave_no_time() -> None:
    seen = view(front(500), decodes=250, each=2_000, gap_ms=20.0)
    assert spent(seen, PacedPrefill(least_tokens=7).knobs(seen))[0] == [7]


def test_a_relegated_prompt_in_front_leaves_the_others_their_part() -> None:
    policy = PacedPrefill(step_ms=40.0)
    alone = view(front(32_000, relegated=True))
    assert policy.knobs(alone).chunk_limit is None
    seen = view(front(32_000, relegated=True), front(200), front(100))
    chunks, _ = spent(seen, policy.knobs(seen))
    assert chunks[1:] == [200, 100]
    assert chunks[0] > 100
    seen = view(front(32_000, relegated=True), *[front(9_000)] * 3)
    chunks, step = spent(seen, policy.knobs(seen))
    assert max(chunks) - min(chunks) <= 3, "the engine can limit each alike only"
    assert step // PS_PER_NS <= 40 * MICRO


def test_one_due_later_lends_to_one_in_a_hurry_and_no_one_else() -> None:
    policy = PacedPrefill(step_ms=30.0, hurry_ms=200.0)
    late = front(32_000, due_ms=3_600_000)
    assert policy.knobs(view(late, front(300))).chunk_limit is None
    seen = view(late, front(300, due_ms=250))
    assert spent(seen, policy.knobs(seen))[0][1] == 300
    first_come = view(front(4_000, due_ms=800), front(300, due_ms=900))
    assert policy.knobs(first_come).chunk_limit is None


POLICIES = [PacedPrefill(), DynamicChunk()]


@pytest.mark.parametrize("policy", POLICIES)
def test_decodes_alone_are_left_alone_until_a_prompt_comes(policy: Batching) -> None:
    one, other = (
        policy.knobs(view(decodes=decodes, each=each)) for decodes, each in [(3, 9), (9, 3)]
    )
    assert one == other
    assert one.holds.max_steps is None
    assert one.holds.breaks_on == Break.ARRIVAL | Break.PREEMPTION


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_cannot_start_change_nothing(policy: Batching) -> None:
    waiting = replace(view(front(100)), prefills=0, waiting=1)
    full = replace(waiting, decodes=PROFILE.max_running)
    dry = replace(waiting, free_blocks=Blocks(0))
    for seen in (full, dry):
        knobs = policy.knobs(seen)
        assert knobs == policy.knobs(replace(seen, context=Tokens(1)))
        assert knobs.holds.max_steps is None
        assert knobs.holds.breaks_on == Break.END | Break.PREEMPTION
    assert policy.knobs(waiting).holds == ONE_STEP
    # Nor may it be promised where a slot may change hands: what starts then takes its part of a step.
    for seen in (full, dry):
        assert policy.knobs(replace(seen, contests=True)).holds == ONE_STEP


def test_one_that_comes_back_counts_as_a_decode_and_with_its_transfer() -> None:
    back = replace(front(1, at=2_999), resumes=True, transfer_ps=Ps(7 * MICRO * PS_PER_NS))
    seen = view(back, front(600, at=5), decodes=3)
    steps = Steps(seen)
    assert steps.tokens == 601
    for tokens in (1, 201):
        own = tokens - 1
        span = own * (2 * 5 + own)
        alike = PROFILE.step_ps(4, 3 * 1_000 + 3_000, own, span)
        assert steps.step_ps(tokens) == alike + 7 * MICRO * PS_PER_NS
    whole = view(replace(front(600, at=5), transfer_ps=Ps(9)), decodes=3)
    plain = view(front(600, at=5), decodes=3)
    assert Steps(whole).step_ps(80) == Steps(plain).step_ps(80) + 9


def test_no_step_is_lengthened_by_a_transfer_that_its_decodes_cannot_bear() -> None:
    far = replace(front(400, at=2_000), transfer_ps=Ps(60 * MICRO * PS_PER_NS))
    policy = PacedPrefill(step_ms=30.0, hurry_ms=0.0, least_tokens=7)
    behind = view(front(100), far)
    assert policy.knobs(behind).token_budget == behind.decodes + 100, "it waits"
    assert policy.knobs(view(far)).token_budget == 16 + 7, "until it is first"


def test_decode_first_computes_no_prompt_beside_decodes() -> None:
    policy = DecodeFirst()
    seen = view(front(100))
    assert spent(seen, policy.knobs(seen))[0] == [0]
    seen = view(front(100), front(9_000), decodes=0)
    assert spent(seen, policy.knobs(seen))[0] == [100, 8_092]


@pytest.mark.parametrize(
    ("gap_ms", "blocks", "budget"),
    [(80.0, 10_000, 1_024), (40.0, 10_000, 256), (1.0, 10_000, 128), (400.0, 10_000, 2_552),
     (400.0, 1_900, 512)],
)  # fmt: skip
def test_dynamic_chunk_takes_the_largest_of_its_grid_that_fits(
    gap_ms: float, blocks: int, budget: int
) -> None:
    seen = replace(view(front(9_000), gap_ms=gap_ms), free_blocks=Blocks(blocks))
    assert DynamicChunk().knobs(seen).token_budget == budget


def test_dynamic_chunk_leaves_room_for_prompts_it_has_not_looked_at() -> None:
    assert DynamicChunk().knobs(view(front(20), gap_ms=40.0)).token_budget == 2_552
