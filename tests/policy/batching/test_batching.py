"""Chunked prefill as configured, and what knobs may say."""

import msgspec
import pytest

from headrace.config.profiles import load_profile
from headrace.model.ids import AttemptId, TenantId
from headrace.policy.batching import Batching, ChunkedPrefill
from headrace.policy.batching.knobs import (
    ALWAYS,
    ONE_STEP,
    BatchView,
    Break,
    Entry,
    Holds,
    Knobs,
)
from headrace.units import Blocks, InstantNs, Tokens

PROFILE = load_profile("h100-8b-tp1")
VIEW = BatchView(
    now=InstantNs(0),
    profile=PROFILE,
    decodes=3,
    context=Tokens(900),
    prefills=1,
    waiting=2,
    prefill_tokens=Tokens(5_000),
    free_blocks=Blocks(100),
    tightest_gap_ns=None,
)


def entry(attempt: int, arrived_at: int, *, relegated: bool = False) -> Entry:
    """Return an entry that arrived at an instant."""
    return Entry(
        attempt=AttemptId(attempt),
        tenant=TenantId("t"),
        arrived_at=InstantNs(arrived_at),
        deadline=InstantNs(0),
        relegated=relegated,
        counter=0,
        weight=1,
        prompt_tokens=Tokens(10),
        computed=Tokens(0),
        made=Tokens(0),
    )


def test_chunked_prefill_takes_its_limits_from_the_profile() -> None:
    knobs = ChunkedPrefill().knobs(VIEW)
    assert knobs.token_budget == PROFILE.token_budget
    assert knobs.running_limit == PROFILE.max_running
    assert knobs.chunk_limit is None


def test_chunked_prefill_configured_overrides_the_profile_and_holds_for_good() -> None:
    config = {"kind": "chunked_prefill", "token_budget": 2_048, "running_limit": 9}
    policy = msgspec.convert(config, Batching)
    assert policy.knobs(VIEW) == Knobs(token_budget=2_048, running_limit=9, holds=ALWAYS)


def test_the_last_to_come_is_preempted_first_and_the_relegated_before_it() -> None:
    policy = ChunkedPrefill()
    entries = [entry(1, 30), entry(2, 10, relegated=True), entry(3, 20)]
    assert max(entries, key=policy.victim_key).attempt == 2
    assert max(entries[::2], key=policy.victim_key).attempt == 1


def test_policy_that_says_nothing_holds_one_step_whatever_happens() -> None:
    assert Knobs(token_budget=1, running_limit=1).holds == ONE_STEP
    assert ONE_STEP.max_steps == 1
    assert ONE_STEP.breaks_on == Break.ANYTHING


def test_typo_and_zero_are_refused_with_their_path() -> None:
    with pytest.raises(msgspec.ValidationError, match="token_buget"):
        msgspec.convert({"kind": "chunked_prefill", "token_buget": 1}, Batching)
    with pytest.raises(msgspec.ValidationError, match=r"\$\.token_budget"):
        msgspec.convert({"kind": "chunked_prefill", "token_budget": 0}, Batching)


@pytest.mark.parametrize(
    "knobs",
    [
        {"token_budget": 0, "running_limit": 1},
        {"token_budget": 1, "running_limit": 0},
        {"token_budget": 1, "running_limit": 1, "chunk_limit": 0},
        {"token_budget": 1, "running_limit": 1, "holds": Holds(max_steps=0)},
    ],
)
def test_knobs_under_which_nothing_could_run_are_a_bug(knobs: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        Knobs(**knobs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("holds", "over", "goes_on"),
    [
        (ONE_STEP, (1, 0, Break.NOTHING), (0, 0, Break.NOTHING)),
        (ONE_STEP, (0, 0, Break.ARRIVAL), (0, 10**18, Break.NOTHING)),
        (Holds(max_steps=3), (3, 0, Break.NOTHING), (2, 0, Break.NOTHING)),
        (Holds(max_steps=None, until=InstantNs(7)), (0, 7, Break.NOTHING), (9, 6, Break.NOTHING)),
        (
            Holds(max_steps=None, breaks_on=Break.END | Break.START),
            (0, 0, Break.START | Break.ARRIVAL),
            (9, 9, Break.ARRIVAL | Break.FIRST_TOKEN),
        ),
    ],
)
def test_knobs_are_over_after_steps_time_or_a_break(
    holds: Holds, over: tuple[int, int, Break], goes_on: tuple[int, int, Break]
) -> None:
    for (steps, now, changed), expected in ((over, True), (goes_on, False)):
        assert holds.is_over(steps, InstantNs(now), changed) is expected


def test_what_holds_always_is_never_over() -> None:
    assert not ALWAYS.is_over(10**9, InstantNs(10**18), Break.ANYTHING)
