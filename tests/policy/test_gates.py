"""Four gates, each with its reason and numbers, the caller's own faults before ours."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.budget import Per, Unit
from headrace.model.decision import Admit, Decision, Gate, Reason, Reject, Verdict
from headrace.model.evidence import WindowFacts
from headrace.model.features import Feature
from headrace.policy.admission.gates import (
    GateMode,
    Gates,
    Length,
    Mode,
    Modes,
    Wait,
    nearest,
    predicted_wait,
    retry_after,
    step_bound_broken,
)
from headrace.units import MICRO
from tests.policy.evidence import MS, S, budget, contract, entry, lengths, view, wait, wanted

GATES = Gates()
DAY = 86_400 * S


def last(decision: Decision) -> Verdict:
    """Return the verdict that decided."""
    if isinstance(decision, Reject):
        return next(v for v in decision.verdicts if v.reason is decision.reason)
    return decision.verdicts[-1]


def rejected(changes: dict[str, Any], gates: Gates = GATES) -> Reject:
    decision = gates.decide(entry(**changes))
    assert isinstance(decision, Reject)
    return decision


def test_an_idle_system_admits_with_all_four_verdicts() -> None:
    decision = GATES.decide(entry())
    assert isinstance(decision, Admit)
    assert [v.gate for v in decision.verdicts] == [
        Gate.CONTRACT, Gate.BUDGET, Gate.MEMORY, Gate.DEADLINE,
    ]  # fmt: skip
    assert all(v.reason is None for v in decision.verdicts)
    assert decision.wait_ns == 0


CONTRACT_FAULTS = [
    ({"contract": contract(tenant_known=False)}, Reason.TENANT_UNKNOWN, 0, 0),
    ({"contract": contract(model_known=False)}, Reason.MODEL_UNKNOWN, 0, 0),
    ({"contract": contract(model_allowed=False)}, Reason.MODEL_NOT_ALLOWED, 0, 0),
    ({"contract": contract(class_allowed=False)}, Reason.CLASS_NOT_ALLOWED, 0, 0),
    ({"contract": contract(lacking=Feature.TOOLS)}, Reason.FEATURE_UNSUPPORTED, 0, 0),
    ({"demand": wanted(input_tokens=0)}, Reason.INPUT_EMPTY, 0, 1),
    ({"max_output": 2_049}, Reason.OUTPUT_TOO_LONG, 2_049, 2_048),
    ({"demand": wanted(input_tokens=8_192)}, Reason.CONTEXT_TOO_LONG, 8_193, 8_192),
    (
        {"demand": wanted(input_tokens=7_000), "max_output": 1_193},
        Reason.CONTEXT_TOO_LONG, 8_193, 8_192,
    ),
    ({"fan_out": 2}, Reason.FAN_OUT_UNSUPPORTED, 2, 1),
    ({"fan_out": 0}, Reason.FAN_OUT_UNSUPPORTED, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "reason", "measured", "threshold"), CONTRACT_FAULTS)
def test_contract_faults(
    changes: dict[str, Any], reason: Reason, measured: int, threshold: int
) -> None:
    decision = rejected(changes)
    assert (decision.reason, decision.gate) == (reason, Gate.CONTRACT)
    assert (last(decision).measured, last(decision).threshold) == (measured, threshold)
    assert decision.retry_after_ns is None, "repeating does not help"
    assert len(decision.verdicts) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"demand": wanted(input_tokens=8_191)},
        {"demand": wanted(input_tokens=6_144), "max_output": 2_048},
        {"max_output": 0},
        {"contract": contract(fan_out_limit=4), "fan_out": 4},
    ],
)
def test_what_just_fits_the_contract_passes(changes: dict[str, Any]) -> None:
    assert isinstance(GATES.decide(entry(**changes)), Admit)


BUDGET_FAULTS: list[tuple[Any, Reason, int, int, int | None]] = [
    (
        budget(tokens_needed=1_480, tokens_left=99, tokens_limit=1_000, parallel_left=0),
        Reason.TOKEN_LIMIT, 1_480, 1_000, None,
    ),
    (budget(parallel_left=0, requests_left=0), Reason.CONCURRENCY, 1, 0, S),
    (
        budget(requests_left=0, requests_wait_ns=7 * S),
        Reason.REQUEST_RATE, 1, 0, 7 * S,
    ),
    (
        budget(tokens_left=1_479, tokens_limit=2_000, tokens_wait_ns=3),
        Reason.TOKEN_RATE, 1_480, 1_479, 3,
    ),
    (
        budget(tokens_left=-50, tokens_limit=2_000, tokens_wait_ns=9 * S, requests_left=1),
        Reason.TOKEN_RATE, 1_480, -50, 9 * S,
    ),
]  # fmt: skip


def spent(
    unit: Unit, per: Per, need: int, taken: int, hard: int | None, **more: Any
) -> WindowFacts:
    given: dict[str, Any] = {"soft": None, "wait_ns": 90 * S} | more
    return WindowFacts(unit=unit, per=per, need=need, taken=taken, hard=hard, **given)


def within(*windows: WindowFacts, **more: Any) -> Any:
    return budget(windows=windows, **more)


HOUR_TOKENS = spent(Unit.TOKENS, Per.HOUR, 1_480, 9_000, 10_000)
MINUTE_TOKENS = spent(Unit.TOKENS, Per.MINUTE, 1_480, 9_000, 10_000, wait_ns=9 * S)
BUDGET_FAULTS += [
    (within(HOUR_TOKENS, parallel_left=0), Reason.QUOTA_SPENT, 1_480, 1_000, 90 * S),
    (within(MINUTE_TOKENS, parallel_left=0), Reason.CONCURRENCY, 1, 0, 9 * S),
    (within(MINUTE_TOKENS), Reason.BUDGET_RATE, 1_480, 1_000, 9 * S),
    (within(MINUTE_TOKENS, HOUR_TOKENS), Reason.QUOTA_SPENT, 1_480, 1_000, 90 * S),
    (
        within(HOUR_TOKENS, spent(Unit.USD, Per.DAY, 11, 0, 10, wait_ns=1)),
        Reason.BUDGET_SPENT, 11, 10, None,
    ),
    (within(spent(Unit.WORK, Per.MINUTE, 11, 0, 10)), Reason.BUDGET_SPENT, 11, 10, None),
    (within(spent(Unit.WORK, Per.HOUR, 3, 8, 10)), Reason.BUDGET_SPENT, 3, 2, 90 * S),
    (budget(sessions_left=0), Reason.SESSIONS, 1, 0, S),
    (
        budget(branches=3, parallel_left=2, parallel_limit=9),
        Reason.CONCURRENCY, 3, 2, S,
    ),
    (
        budget(branches=3, parallel_left=2, parallel_limit=2),
        Reason.CONCURRENCY, 3, 2, None,
    ),
]  # fmt: skip


def test_a_soft_limit_is_noted_and_refuses_nobody() -> None:
    over = spent(Unit.TOKENS, Per.DAY, 2, 9, None, soft=10)
    just = spent(Unit.USD, Per.DAY, 2, 8, 10, soft=10)
    decision = GATES.decide(entry(budget=within(over, just)))
    assert isinstance(decision, Admit)
    assert decision.over_soft == ("tokens/day",)


@pytest.mark.parametrize(("facts", "reason", "measured", "threshold", "again"), BUDGET_FAULTS)
def test_budget_faults(
    facts: Any, reason: Reason, measured: int, threshold: int, again: int | None
) -> None:
    decision = rejected({"budget": facts})
    assert (decision.reason, decision.gate) == (reason, Gate.BUDGET)
    assert (last(decision).measured, last(decision).threshold) == (measured, threshold)
    assert last(decision).margin < 0
    assert decision.retry_after_ns == again


def test_a_tenants_full_queue_is_its_own_fault() -> None:
    decision = rejected({"own_queued": 1_000})
    assert (decision.reason, decision.gate) == (Reason.TENANT_QUEUE_FULL, Gate.BUDGET)
    assert (last(decision).measured, last(decision).threshold) == (1_001, 1_000)
    assert isinstance(GATES.decide(entry(own_queued=999)), Admit)


def test_both_buckets_must_have_refilled_before_a_repeat_can_succeed() -> None:
    facts = budget(
        requests_left=0,
        requests_wait_ns=S,
        tokens_left=0,
        tokens_limit=2_000,
        tokens_wait_ns=40 * S,
    )
    assert rejected({"budget": facts}).retry_after_ns == 40 * S


_WAIT = st.integers(1, 10**6).map(lambda ms: ms * MS)


@given(
    bucket=st.none() | _WAIT,
    ends=st.none() | _WAIT,
    windows=st.lists(st.tuples(st.sampled_from(list(Per)), _WAIT), max_size=3),
)
def test_nobody_is_asked_again_before_every_balance_allows_it(
    bucket: int | None, ends: int | None, windows: list[tuple[Per, int]]
) -> None:
    """Whichever of them is named: who came back when it allows it would be refused by the next."""
    waits = [*(one for one in (bucket, ends) if one is not None), *(wait for _, wait in windows)]
    told: dict[str, Any] = {
        "windows": tuple(spent(Unit.TOKENS, per, 2, 9, 10, wait_ns=wait) for per, wait in windows)
    }
    if bucket is not None:
        told |= {"tokens_left": 0, "tokens_limit": 2_000, "tokens_wait_ns": bucket}
    if ends is not None:
        told |= {"parallel_left": 0, "parallel_limit": 1, "ends_wait_ns": ends}
    if not waits:
        return
    again = rejected({"budget": budget(**told)}).retry_after_ns
    assert again is not None
    assert again >= max(waits)


def test_the_budget_verdict_of_who_passes_shows_what_is_left() -> None:
    decision = GATES.decide(entry(budget=budget(tokens_left=2_000, tokens_limit=4_000)))
    verdict = decision.verdicts[1]
    assert (verdict.measured, verdict.threshold, verdict.margin) == (1_480, 2_000, 520)
    assert GATES.decide(entry()).verdicts[1].margin == 0


def test_what_fits_no_pool_is_refused_and_what_fits_the_largest_waits() -> None:
    decision = rejected({"blocks_largest": 92})
    assert (decision.reason, decision.gate) == (Reason.KV_TOO_LARGE, Gate.MEMORY)
    assert (last(decision).measured, last(decision).threshold) == (93, 92)
    assert decision.retry_after_ns is None
    full = view(blocks_reserved=1_000)
    assert isinstance(GATES.decide(entry(blocks_largest=93, replicas=(full,))), Admit)


def test_no_ready_replica_is_passing_and_nobodys_quota() -> None:
    decision = rejected(
        {"ready": 0, "replicas": (), "blocks_largest": 0, "wait": wait(rate_micro=0)}
    )
    assert (decision.reason, decision.gate) == (Reason.NO_READY_REPLICA, Gate.DEADLINE)
    assert decision.retry_after_ns == S


def test_callers_faults_come_before_ours() -> None:
    ours: dict[str, Any] = {"blocks_largest": 1, "ttft_ns": 1, "wait": wait(backlog_ns=DAY)}
    both = ours | {"budget": budget(parallel_left=0), "contract": contract(model_known=False)}
    assert rejected(both).reason is Reason.MODEL_UNKNOWN
    assert rejected(ours | {"budget": budget(parallel_left=0)}).reason is Reason.CONCURRENCY
    decision = rejected(ours)
    assert decision.reason is Reason.KV_TOO_LARGE
    reasons = [v.reason for v in decision.verdicts]
    assert reasons == [None, None, Reason.KV_TOO_LARGE, Reason.DEADLINE_IMPOSSIBLE]


def test_slack_is_the_bound_less_forecast_and_uncertainty() -> None:
    """slack = D - route - wait - prefill - first - (margin + shares of wait and prefill + input)."""
    evidence = entry(
        input_margin_ns=3 * MS,
        wait=wait(backlog_ns=800 * MS, own_ahead_ns=200 * MS, weights=3, rate_micro=2 * MICRO),
        replicas=(view(pending_prefill_ns=60 * MS, prefill_left_ns=40 * MS),),
    )
    waited = 40 * MS + 300 * MS
    uncertain = waited // 4 + 100 * MS // 20
    expected = 2 * S - 2 * MS - waited - 100 * MS - 7 * MS - (50 * MS + uncertain + 3 * MS)
    decision = GATES.decide(evidence)
    assert isinstance(decision, Admit)
    assert (decision.wait_ns, decision.slack_ns) == (waited, expected)
    assert last(decision).margin == expected
    assert Gates(margin_ms=0, wait_margin=0, prefill_margin=0).decide(evidence).slack_ns == (
        2 * S - 2 * MS - waited - 100 * MS - 7 * MS - 3 * MS
    )


def test_a_negative_slack_is_refused_and_says_by_how_much() -> None:
    decision = rejected({"wait": wait(backlog_ns=10 * S, own_ahead_ns=10 * S)})
    assert decision.reason is Reason.DEADLINE_QUEUE
    assert decision.slack_ns < 0
    assert last(decision).margin == decision.slack_ns
    assert decision.retry_after_ns == -decision.slack_ns


def test_a_retry_is_never_asked_for_within_a_second_of_a_queue() -> None:
    assert retry_after(Reason.DEADLINE_QUEUE, entry(), -5) == S
    assert retry_after(Reason.DEADLINE_QUEUE, entry(), -7 * S) == 7 * S
    slow = entry(wait=wait(backlog_ns=9 * S, own_ahead_ns=9 * S))
    for reason in (Reason.TENANT_QUEUE_FULL, Reason.NO_READY_REPLICA):
        assert retry_after(reason, entry(), 0) == S
        assert retry_after(reason, slow, 0) == 9 * S
    assert retry_after(Reason.GAP_BOUND, entry(), 0) == S
    assert retry_after(Reason.LENGTH_SHARE, entry(), 0, 5) == S
    assert retry_after(Reason.LENGTH_SHARE, entry(), 0, 5 * S) == 5 * S


def test_steps_are_short_enough_again_once_so_many_streams_have_ended() -> None:
    """All of them end within an answer's length, so that a part of them takes that part of it."""
    steps: dict[str, Any] = {"step_ns": 90 * MS, "decodes": 8, "decode_extra_ns": 40 * MS}
    long = {"demand": wanted(output_p50=1_000), "gap_ns": 80 * MS}
    crowded = entry(replicas=(view(**steps),), **long)
    assert retry_after(Reason.GAP_BOUND, crowded, 0) == 1_000 * 90 * MS * 10 // 40
    emptier = view("r1", **{**steps, "step_ns": 84 * MS})
    both = entry(replicas=(view(**steps), emptier), **long)
    assert retry_after(Reason.GAP_BOUND, both, 0) == 1_000 * 84 * MS * 4 // 40
    tight = entry(replicas=(view(**steps, tightest_gap_ns=60 * MS),), **long)
    assert retry_after(Reason.GAP_BOUND, tight, 0) == 1_000 * 90 * MS * 30 // 40
    never = entry(replicas=(view(**steps, tightest_gap_ns=MS),), **long)
    assert retry_after(Reason.GAP_BOUND, never, 0) == 1_000 * 90 * MS, "all of them, no more"
    computed = entry(replicas=(view(step_ns=90 * MS, prefill_left_ns=3 * S),), **long)
    assert retry_after(Reason.GAP_BOUND, computed, 0) == 3 * S


def test_too_many_at_once_may_come_when_their_own_are_over() -> None:
    for reason in (Reason.CONCURRENCY, Reason.SESSIONS):
        full: dict[str, Any] = {"parallel_left": 0, "sessions_left": 0}
        late = budget(ends_wait_ns=7 * S, **full)
        assert retry_after(reason, entry(budget=late), 0) == 7 * S
        assert retry_after(reason, entry(budget=budget(**full)), 0) == S


@pytest.mark.parametrize("slack", [0, 1])
def test_no_slack_left_is_enough(slack: int) -> None:
    forecast = 2 * MS + 100 * MS + 7 * MS + 50 * MS + 5 * MS
    decision = GATES.decide(entry(ttft_ns=forecast + slack))
    assert isinstance(decision, Admit)
    assert decision.slack_ns == slack
    assert isinstance(GATES.decide(entry(ttft_ns=forecast - 1)), Reject)


def test_what_an_empty_system_cannot_meet_is_impossible_not_late() -> None:
    """B_queue = D - route - prefill - first - margin < 0 (ADM-2)."""
    alone = 2 * MS + 100 * MS + 7 * MS + 50 * MS
    decision = rejected({"ttft_ns": alone - 1})
    assert decision.reason is Reason.DEADLINE_IMPOSSIBLE
    assert (last(decision).measured, last(decision).threshold) == (alone, alone - 1)
    assert decision.retry_after_ns is None, "no queue is to blame: repeating does not help"
    assert rejected({"ttft_ns": alone}).reason is Reason.DEADLINE_QUEUE
    assert rejected({"ttft_ns": alone, "input_margin_ns": 1}).reason is Reason.DEADLINE_IMPOSSIBLE


def test_a_prefix_that_the_nearest_holds_makes_the_impossible_possible() -> None:
    warm = view(cached_tokens=900, prefill_ns=10 * MS, prefix_credit_ns=90 * MS)
    assert isinstance(GATES.decide(entry(ttft_ns=100 * MS, replicas=(warm,))), Admit)
    assert rejected({"ttft_ns": 100 * MS}).reason is Reason.DEADLINE_IMPOSSIBLE


def test_a_gap_that_no_engine_keeps_even_alone_is_impossible() -> None:
    decision = rejected({"gap_ns": 7 * MS - 1})
    assert decision.reason is Reason.DEADLINE_IMPOSSIBLE
    assert (last(decision).measured, last(decision).threshold) == (7 * MS, 7 * MS - 1)
    assert decision.retry_after_ns is None
    assert isinstance(GATES.decide(entry(gap_ns=7 * MS)), Admit)


def test_without_a_bound_a_day_is_the_bound() -> None:
    decision = GATES.decide(entry(ttft_ns=None))
    assert isinstance(decision, Admit)
    assert decision.slack_ns > DAY - S


def test_gaps_of_those_running_are_kept() -> None:
    tight = view(decodes=3, tightest_gap_ns=10 * MS)
    decision = rejected({"replicas": (tight,)})
    assert (decision.reason, decision.gate) == (Reason.GAP_BOUND, Gate.DEADLINE)
    assert (last(decision).measured, last(decision).threshold) == (12 * MS, 10 * MS)
    assert isinstance(GATES.decide(entry(replicas=(tight, view("r1")))), Admit)


@pytest.mark.parametrize("bound", [None, 60 * S])
def test_who_can_wait_is_not_refused_for_steps_that_are_too_long_just_now(
    bound: int | None,
) -> None:
    tight = (view(decodes=3, tightest_gap_ns=10 * MS),)
    assert isinstance(GATES.decide(entry(ttft_ns=bound, replicas=tight)), Admit)
    forecast = 2 * MS + 100 * MS + 7 * MS + 50 * MS + 5 * MS
    waits = GATES.decide(entry(ttft_ns=10 * S + forecast, replicas=tight))
    assert isinstance(waits, Admit)
    soon = rejected({"ttft_ns": 10 * S + forecast - 1, "replicas": tight})
    assert soon.reason is Reason.GAP_BOUND


def test_the_fair_wait_counts_what_others_get_first_and_never_more_than_waits() -> None:
    owes = wait(backlog_ns=10 * S, own_ahead_ns=S, weights=2, debt_ns=3 * S)
    assert predicted_wait(entry(wait=owes), Wait.FAIR, None) == 5 * S
    assert predicted_wait(entry(wait=owes), Wait.FIFO, None) == 10 * S
    most = wait(backlog_ns=10 * S, own_ahead_ns=S, weights=2, debt_ns=90 * S)
    assert predicted_wait(entry(wait=most), Wait.FAIR, None) == 10 * S
    assert rejected({"wait": owes}).reason is Reason.DEADLINE_QUEUE


def test_nobody_is_harmed_on_an_idle_replica() -> None:
    assert step_bound_broken(entry(gap_ns=8 * MS)) is None
    assert step_bound_broken(entry(replicas=())) is None
    pending = view(pending_prefill_ns=1)
    assert step_bound_broken(entry(gap_ns=8 * MS, replicas=(pending,))) is not None


def test_audit_records_what_it_would_have_refused() -> None:
    audit = Gates(mode=GateMode.AUDIT)
    decision = audit.decide(entry(wait=wait(backlog_ns=10 * S, own_ahead_ns=10 * S)))
    assert isinstance(decision, Admit)
    assert decision.slack_ns < 0
    assert last(decision).reason is Reason.DEADLINE_QUEUE
    impossible = audit.decide(entry(ttft_ns=1))
    assert isinstance(impossible, Admit)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"contract": contract(tenant_known=False)}, Reason.TENANT_UNKNOWN),
        ({"budget": budget(parallel_left=0)}, Reason.CONCURRENCY),
        ({"blocks_largest": 1}, Reason.KV_TOO_LARGE),
        ({"ready": 0, "replicas": ()}, Reason.NO_READY_REPLICA),
    ],
)
def test_audit_still_refuses_what_cannot_be_served_at_all(
    changes: dict[str, Any], reason: Reason
) -> None:
    assert rejected(changes, Gates(mode=GateMode.AUDIT)).reason is reason


def test_observing_refuses_only_what_breaks_a_contract_or_finds_nobody() -> None:
    observe = Gates(mode=GateMode.OBSERVE)
    for changes, reason in (
        ({"budget": budget(parallel_left=0)}, Reason.CONCURRENCY),
        ({"budget": budget(tokens_limit=1)}, Reason.TOKEN_LIMIT),
        ({"blocks_largest": 1}, Reason.KV_TOO_LARGE),
        ({"ttft_ns": 1}, Reason.DEADLINE_IMPOSSIBLE),
    ):
        decision = observe.decide(entry(**changes))
        assert isinstance(decision, Admit)
        assert reason in [verdict.reason for verdict in decision.verdicts], "it is recorded"
    nobody = {"budget": budget(parallel_left=0), "ready": 0, "replicas": ()}
    assert rejected(nobody, observe).reason is Reason.NO_READY_REPLICA
    strange = {"contract": contract(model_known=False), "ready": 0, "replicas": ()}
    assert rejected(strange, observe).reason is Reason.MODEL_UNKNOWN


FAILED: dict[Gate, dict[str, Any]] = {
    Gate.CONTRACT: {"contract": contract(model_allowed=False)},
    Gate.BUDGET: {"budget": budget(parallel_left=0)},
    Gate.MEMORY: {"blocks_largest": 1},
    Gate.DEADLINE: {"ttft_ns": 1},
}
"""What fails one gate each, though an engine could serve it."""
REASONS = {
    Gate.CONTRACT: Reason.MODEL_NOT_ALLOWED,
    Gate.BUDGET: Reason.CONCURRENCY,
    Gate.MEMORY: Reason.KV_TOO_LARGE,
    Gate.DEADLINE: Reason.DEADLINE_IMPOSSIBLE,
}
NOBODY: dict[Gate, tuple[dict[str, Any], Reason]] = {
    Gate.CONTRACT: ({"contract": contract(tenant_known=False)}, Reason.TENANT_UNKNOWN),
    Gate.DEADLINE: ({"ready": 0, "replicas": ()}, Reason.NO_READY_REPLICA),
}
"""What fails a gate because nobody could serve it."""


def only(gate: Gate, mode: Mode, common: GateMode = GateMode.ENFORCE) -> Gates:
    return Gates(mode=common, modes=Modes(**{gate: mode}))


@pytest.mark.parametrize("common", GateMode)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("gate", Gate)
def test_a_gate_in_audit_mode_records_alone_and_in_enforce_mode_refuses(
    gate: Gate, mode: Mode, common: GateMode
) -> None:
    gates = only(gate, mode, common)
    passed = gates.decide(entry())
    assert isinstance(passed, Admit)
    assert [one.reason for one in passed.verdicts] == [None] * len(Gate)
    failed = gates.decide(entry(**FAILED[gate]))
    verdict = next(one for one in failed.verdicts if one.gate is gate)
    assert verdict.reason is REASONS[gate], "recorded in any mode"
    assert isinstance(failed, Admit) is (mode is Mode.AUDIT)
    if isinstance(failed, Reject):
        assert (failed.gate, failed.reason) == (gate, REASONS[gate])
    else:
        assert [one.gate for one in failed.verdicts] == list(Gate), "the others were asked too"


@pytest.mark.parametrize("gate", Gate)
def test_the_gates_beside_one_in_audit_mode_refuse_as_ever(gate: Gate) -> None:
    for other, changes in FAILED.items():
        if other is gate:
            continue
        decision = rejected(FAILED[gate] | changes, only(gate, Mode.AUDIT))
        assert (decision.gate, decision.reason) == (other, REASONS[other])


@pytest.mark.parametrize("gate", NOBODY)
def test_what_nobody_can_serve_is_refused_though_its_gate_only_records(gate: Gate) -> None:
    changes, reason = NOBODY[gate]
    assert rejected(changes, only(gate, Mode.AUDIT)).reason is reason


@pytest.mark.parametrize(
    "changes",
    [
        {"contract": contract(class_allowed=False, served=False)},
        {"contract": contract(model_known=False)},
        {"fan_out": 0},
        {"demand": wanted(input_tokens=0)},
    ],
)
def test_a_contract_that_cannot_be_kept_is_refused_by_its_own_gate(changes: dict[str, Any]) -> None:
    nowhere = {"ready": 0, "replicas": ()}
    assert rejected(changes | nowhere, only(Gate.CONTRACT, Mode.AUDIT)).gate is Gate.CONTRACT


@pytest.mark.parametrize(
    ("gates", "said"),
    [
        (Gates(), "enforce"),
        (Gates(mode=GateMode.AUDIT), "audit"),
        (Gates(mode=GateMode.OBSERVE), "observe"),
        (Gates(modes=Modes(deadline=Mode.AUDIT)), "audit"),
        (Gates(mode=GateMode.AUDIT, modes=Modes(deadline=Mode.ENFORCE)), "enforce"),
        (Gates(modes=Modes(budget=Mode.AUDIT)), "audit:budget"),
        (Gates(mode=GateMode.AUDIT, modes=Modes(contract=Mode.AUDIT)), "audit:contract+deadline"),
    ],
)
def test_modes_are_told_in_a_word_where_there_is_one(gates: Gates, said: str) -> None:
    assert gates.summary() == said


# The wait ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "fair", "fifo"),
    [
        (wait(), 0, 0),
        (wait(backlog_ns=10 * S, own_ahead_ns=0, weights=2), 0, 10 * S),
        (wait(backlog_ns=10 * S, own_ahead_ns=S, weights=2), 2 * S, 10 * S),
        (wait(backlog_ns=10 * S, own_ahead_ns=S, weights=30, own_weight=10), 3 * S, 10 * S),
        (wait(backlog_ns=3 * S, own_ahead_ns=3 * S, weights=5), 3 * S, 3 * S),
        (wait(backlog_ns=S, own_ahead_ns=S, rate_micro=4 * MICRO), S // 4, S // 4),
    ],
)
def test_the_fair_wait_is_own_work_ahead_at_own_share(facts: Any, fair: int, fifo: int) -> None:
    evidence = entry(wait=facts)
    assert predicted_wait(evidence, Wait.FAIR, None) == fair
    assert predicted_wait(evidence, Wait.FIFO, None) == fifo
    assert Gates(wait=Wait.FIFO).decide(entry(wait=facts, ttft_ns=None)).verdicts
    near = view(pending_prefill_ns=60 * MS, prefill_left_ns=40 * MS)
    assert predicted_wait(evidence, Wait.FAIR, near) == fair + 40 * MS


def test_a_hog_does_not_shut_out_the_others() -> None:
    facts = wait(backlog_ns=100 * S, own_ahead_ns=0, weights=2)
    assert isinstance(GATES.decide(entry(wait=facts)), Admit)
    assert isinstance(Gates(wait=Wait.FIFO).decide(entry(wait=facts)), Reject)


def test_without_a_rate_only_what_was_sent_is_waited_for() -> None:
    evidence = entry(wait=wait(rate_micro=0, backlog_ns=S))
    assert predicted_wait(evidence, Wait.FAIR, view(pending_prefill_ns=9, prefill_left_ns=5)) == 5


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 100), st.integers(1, 10**7))
def test_the_fair_wait_is_never_longer_than_the_whole_backlogs(
    backlog: int, ahead: int, weights: int, rate: int
) -> None:
    facts = wait(backlog_ns=backlog, own_ahead_ns=ahead, weights=weights, rate_micro=rate)
    evidence = entry(wait=facts)
    fair, fifo = (predicted_wait(evidence, kind, None) for kind in (Wait.FAIR, Wait.FIFO))
    assert 0 <= fair <= fifo


def test_the_nearest_has_the_least_time_to_a_first_token() -> None:
    views = (
        view("c", prefill_left_ns=50 * MS, prefill_ns=10 * MS),
        view("b", pending_prefill_ns=90 * MS, prefill_left_ns=0, prefill_ns=60 * MS),
        view("d", prefill_ns=70 * MS),
    )
    found = nearest(views)
    assert found is not None
    assert found.replica == "b", "equals go by name"
    assert nearest(()) is None


BUSY = {"replicas": (view(pending_prefill_ns=900 * MS, prefill_left_ns=900 * MS),)}


def test_a_short_prompt_leaves_room_for_a_long_one_that_is_behind() -> None:
    decision = rejected(BUSY | {"lengths": lengths()})
    assert (decision.reason, decision.gate) == (Reason.LENGTH_SHARE, Gate.DEADLINE)
    assert decision.slack_ns > 0, "it would have been in time itself"
    verdict = last(decision)
    late = 900 * MS * 105 // 100 - decision.slack_ns  # 900 ms more of prefill than its own
    assert (verdict.measured, verdict.threshold) == (2 * S + late, 2 * S)
    assert decision.retry_after_ns == S


def test_a_decoding_engine_makes_room_as_well() -> None:
    """Its steps are what makes the long one late, though nothing waits."""
    decoding = (view(decodes=40, context_tokens=40_000),)
    far = lengths(long_prefill_ns=1_900 * MS)
    assert rejected({"replicas": decoding, "lengths": far}).reason is Reason.LENGTH_SHARE
    assert isinstance(GATES.decide(entry(replicas=decoding, lengths=lengths())), Admit)


@pytest.mark.parametrize(
    ("changes", "gates"),
    [
        (BUSY, GATES),
        (BUSY | {"lengths": lengths(is_long=True)}, GATES),
        (BUSY | {"lengths": lengths(long_admitted=60)}, GATES),  # three quarters of the mean
        (BUSY | {"lengths": lengths(long_prefill_ns=150 * MS)}, GATES),
        (BUSY | {"lengths": lengths()}, Gates(length=Length.GREEDY)),
        (BUSY | {"lengths": lengths()}, Gates(mode=GateMode.AUDIT)),
        (BUSY | {"lengths": lengths(long_alone_ns=1_701 * MS)}, GATES),  # of a bound of 2 s
        ({"lengths": lengths(long_prefill_ns=5 * S)}, GATES),  # nothing runs, nothing waits
    ],
    ids=[
        "nobody refused",
        "long itself",
        "not behind",
        "room",
        "greedy",
        "audit",
        "too long",
        "idle",
    ],
)
def test_otherwise_it_goes(changes: dict[str, Any], gates: Gates) -> None:
    assert isinstance(gates.decide(entry(**changes)), Admit)
