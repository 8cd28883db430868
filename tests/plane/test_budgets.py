"""Budgets by the hour and beyond: reserved by estimate, settled by use, once on every way out."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.decision import Admit, Gate, Reason, Reject
from headrace.model.deployment import ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import TenantId
from headrace.model.price import PriceSpec
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.plane.quotas import Quota
from headrace.policy.admission.gates import Gates, Mode, Modes
from headrace.policy.catalog import PlaneConfig
from tests.plane import invariants
from tests.plane.scenes import H100, MS, Driver, S, config, small, usage

HOUR = 3_600 * S
PRICE = PriceSpec(input=2.0, cached=0.5, output=8.0)
MODELS = (ModelSpec(name="m", price=PRICE, fan_out_limit=4),)


def budget(unit: Unit, per: Per = Per.HOUR, **limits: float) -> WindowSpec:
    return WindowSpec(unit=unit, per=per, **limits)


ALL = tuple(budget(unit, hard=10**9) for unit in Unit)


def limited(*budgets: WindowSpec, **more: Any) -> PlaneConfig:
    return config(models=MODELS, tenants=(TenantSpec(name="a", budgets=budgets, **more),))


def quota(made: Driver) -> Quota:
    return made.plane.state.ledger.quotas[TenantId("a")]


def used(made: Driver) -> dict[Unit, int]:
    return {window.unit: window.used for window in quota(made).windows}


def why(made: Driver) -> list[Reason]:
    return [one.rejection.reason for one in made.refused()]


# Reserved, settled ---------------------------------------------------------------------------


def test_the_estimate_is_reserved_in_every_unit_and_what_was_used_is_charged() -> None:
    made = Driver(limited(*ALL))
    request = made.arrive(tokens=1_000, max_output=500)
    live, held = made.live(request), quota(made)
    assert held.reserved == 1_500
    assert held.reserved_work_ns == live.demand.work_p90_ns
    assert held.reserved_micro_usd == 1_000 * 2 + 500 * 8
    assert used(made) == {Unit.REQUESTS: 1, Unit.TOKENS: 0, Unit.WORK: 0, Unit.USD: 0}
    made.first(live.attempt)
    made.end(live.attempt, usage=usage(1_000, 20, cached=400), timing=made.timing(20))
    assert used(made) == {
        Unit.REQUESTS: 1,
        Unit.TOKENS: 1_020,
        Unit.WORK: H100.work_ns(600, 400, 20),
        Unit.USD: 600 * 2 + 200 + 20 * 8,
    }
    invariants.over(made.plane)


def test_five_at_once_cannot_spend_a_budget_five_times_over() -> None:
    """The estimate is reserved in the step that admits (trap 3)."""
    for unit, hard in ((Unit.TOKENS, 3_000), (Unit.USD, 0.012), (Unit.WORK, 1.0)):
        made = Driver(limited(budget(unit, hard=hard)), replicas=8)
        if unit is Unit.WORK:
            made.arrive(tokens=1_000, max_output=500)
            one = quota(made).reserved_work_ns
            made = Driver(limited(budget(unit, hard=2.5 * one / S)), replicas=8)
        for _ in range(5):
            made.arrive(tokens=1_000, max_output=500)
        assert len(made.sent()) == 2, unit


def test_a_budget_charges_its_own_unit() -> None:
    """Thirty tokens an hour are not thirty requests (trap 5)."""
    made = Driver(limited(budget(Unit.TOKENS, hard=30)), replicas=4)
    for _ in range(30):
        made.arrive(tokens=9, max_output=1)
    assert len(made.sent()) == 3
    assert set(why(made)) == {Reason.QUOTA_SPENT}


ENDS: dict[str, Callable[[Driver, Any], Any]] = {
    "success": lambda made, live: made.end(
        live.attempt, usage=usage(1_000, 5), timing=made.timing(5)
    ),
    "error": lambda made, live: made.end(live.attempt, Outcome.ERROR),
    "timeout": lambda made, live: made.end(live.attempt, Outcome.TIMEOUT),
    "left": lambda made, live: made.leave(live.request.id),
    "shut down": lambda made, live: made.shut_down(live.request.id),
    "lost": lambda made, _: made.down("r0", 1),
    "restart": lambda made, _: made.restart(),
}


PHASES = ("queued", "sent", "first", "ticked")
SENT_ONLY = ("success", "error", "timeout")
"""Ends that only an engine brings about."""


@pytest.mark.parametrize(
    ("phase", "end"),
    [(phase, end) for phase in PHASES for end in ENDS if phase != "queued" or end not in SENT_ONLY],
)
def test_every_reservation_ends_once_whatever_its_phase_and_its_end(phase: str, end: str) -> None:
    """Every phase times every exit (trap 17); who was never sent is charged nothing but a request."""
    pools = (PoolSpec(name="p", model="m", profile=small(8_192, running=1)),)
    made = Driver(replace(limited(*ALL, max_parallel_sessions=2), pools=pools))
    if phase == "queued":
        made.arrive(tokens=100)
    live = made.live(made.arrive(tokens=1_000, session="s"))
    if phase == "queued":
        assert live.attempt is None
    elif phase != "sent":
        made.first(live.attempt)
    if phase == "ticked":
        made.tick((live.attempt, 7))
    before = used(made)
    ENDS[end](made, live)
    invariants.hold(made.plane, made.now)
    charged = {unit: used(made)[unit] - before[unit] for unit in Unit}
    assert charged[Unit.REQUESTS] == 0
    if end == "success":
        assert charged[Unit.TOKENS] == 1_005
    elif phase == "queued" and end != "lost":
        assert charged == dict.fromkeys(Unit, 0)
    elif phase == "ticked":
        assert charged[Unit.TOKENS] == 1_007
    for other in list(made.plane.state.live):
        made.leave(other)
    invariants.over(made.plane)


def test_an_expired_request_gives_everything_back() -> None:
    """Routing finds nowhere, the bound passes: nothing stays reserved (trap 10)."""
    pools = (PoolSpec(name="p", model="m", profile=small(8_192, running=1)),)
    made = Driver(replace(limited(*ALL), pools=pools))
    made.arrive()
    waits = made.arrive()
    made.wait(10 * S)
    assert waits not in made.plane.state.live
    assert (
        quota(made).reserved == made.live(1).request.input_tokens + made.live(1).demand.output_p90
    )


# Windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "per", "reason"),
    [
        (Unit.REQUESTS, Per.MINUTE, Reason.BUDGET_RATE),
        (Unit.USD, Per.MINUTE, Reason.BUDGET_RATE),
        (Unit.REQUESTS, Per.HOUR, Reason.QUOTA_SPENT),
        (Unit.TOKENS, Per.DAY, Reason.QUOTA_SPENT),
        (Unit.WORK, Per.HOUR, Reason.BUDGET_SPENT),
        (Unit.USD, Per.MONTH, Reason.BUDGET_SPENT),
    ],
)
def test_a_spent_budget_refuses_until_its_window_ends(unit: Unit, per: Per, reason: Reason) -> None:
    probe = Driver(limited(*ALL))
    probe.serve(probe.arrive(tokens=1_000, max_output=100), 100)
    needed = {Unit.REQUESTS: 1.0, Unit.TOKENS: 1_100.0, Unit.WORK: used(probe)[Unit.WORK] / S}
    needed[Unit.USD] = 0.0028
    made = Driver(limited(budget(unit, per, hard=needed[unit] * 1.7)))
    made.serve(made.arrive(tokens=1_000, max_output=100), 100)
    made.wait(per.ns // 4)
    made.arrive(tokens=1_000, max_output=100)
    assert why(made) == [reason]
    rejection = made.refused()[0].rejection
    assert rejection.retry_after_ns == per.ns - per.ns // 4
    assert rejection.verdicts[-1].limit == f"{unit}/{per}"
    made.wait(per.ns - per.ns // 4)
    made.arrive(tokens=1_000, max_output=100)
    assert len(made.sent()) == 2, "the window that ended took its spending with it"


def test_what_no_window_ever_holds_is_not_asked_to_wait() -> None:
    for per in Per:
        made = Driver(limited(budget(Unit.TOKENS, per, hard=100)))
        made.arrive(tokens=1_000)
        rejection = made.refused()[0].rejection
        assert (rejection.reason, rejection.retry_after_ns) == (Reason.QUOTA_SPENT, None)


def test_the_budget_that_refills_last_says_when_to_come_again() -> None:
    budgets = (
        budget(Unit.REQUESTS, Per.MINUTE, hard=1),
        budget(Unit.TOKENS, Per.DAY, hard=1_200),
        budget(Unit.TOKENS, Per.HOUR, hard=1_200),
    )
    made = Driver(limited(*budgets))
    made.serve(made.arrive(tokens=1_000, max_output=100), 100)
    made.arrive(tokens=1_000, max_output=100)
    assert made.refused()[0].rejection.retry_after_ns == Per.DAY.ns
    assert made.refused()[0].rejection.verdicts[-1].limit == "tokens/day"


def test_what_runs_when_a_window_ends_is_held_on_and_charged_to_the_next_one() -> None:
    made = Driver(limited(budget(Unit.TOKENS, hard=2_500)))
    request = made.arrive(tokens=1_000, max_output=500)
    made.first(made.live(request).attempt)
    made.wait(HOUR)
    made.arrive(tokens=1_000, max_output=500)
    assert why(made) == [Reason.QUOTA_SPENT], "1,500 are held by the one that runs"
    made.end(made.live(request).attempt, usage=usage(1_000, 100), timing=made.timing(100))
    assert used(made) == {Unit.TOKENS: 1_100}
    assert quota(made).windows[0].began == HOUR


def test_a_soft_limit_admits_and_tells() -> None:
    soft = (budget(Unit.TOKENS, soft=1_200, hard=5_000), budget(Unit.REQUESTS, soft=2))
    made = Driver(limited(*soft), replicas=4)
    for _ in range(3):
        made.arrive(tokens=1_000, max_output=100)
    over = [one.decision.over_soft for one in made.entries() if isinstance(one.decision, Admit)]
    assert over == [(), ("tokens/hour",), ("tokens/hour", "requests/hour")]


def test_a_budget_that_comes_later_counts_what_runs_already() -> None:
    made = Driver(limited())
    request = made.arrive(tokens=1_000, max_output=500)
    made.configure(limited(budget(Unit.TOKENS, hard=2_000)), revision=2)
    made.arrive(tokens=1_000, max_output=500)
    assert why(made) == [Reason.QUOTA_SPENT]
    made.serve(request)
    assert used(made) == {Unit.TOKENS: 1_010}
    made.configure(limited(), revision=3)
    made.arrive(tokens=1_000, max_output=500)
    assert quota(made).windows == []


def test_an_audited_budget_takes_nothing_of_who_would_have_been_refused() -> None:
    """So that it says of the next one what it would have said: two of three, as enforced."""
    audit = Gates(modes=Modes(budget=Mode.AUDIT))
    spec = budget(Unit.TOKENS, hard=2_500)
    reasons = []
    for gates in (Gates(), audit):
        made = Driver(replace(limited(spec, tpm_limit=2_500), admission=gates), replicas=4)
        for tokens in (1_000, 2_000, 1_000):
            made.arrive(tokens=tokens, max_output=100)
        reasons.append([one.decision.verdicts[1].reason for one in made.entries()])
        if gates is audit:
            assert len(made.sent()) == 3
            assert quota(made).reserved == 2_200
            for request in (1, 2, 3):
                made.serve(request)
            invariants.over(made.plane)
            assert used(made) == {Unit.TOKENS: 2_020}
    assert reasons[0] == reasons[1] == [None, Reason.QUOTA_SPENT, None]


# Branches and sessions -----------------------------------------------------------------------


def test_branches_count_in_parallel_and_in_what_is_reserved() -> None:
    """Each takes its part before it starts, so that none reads another's (trap 7)."""
    made = Driver(limited(*ALL, max_parallel_requests=4), replicas=4)
    made.arrive(tokens=100, max_output=10, fan_out=3)
    assert quota(made).parallel == 3
    assert quota(made).reserved == 330
    assert quota(made).reserved_micro_usd == 3 * (200 + 80)
    made.arrive(tokens=100, max_output=10, fan_out=2)
    made.arrive(tokens=100, max_output=10)
    assert why(made) == [Reason.CONCURRENCY]
    assert made.refused()[0].rejection.retry_after_ns is not None
    assert quota(made).parallel == 4
    invariants.hold(made.plane, made.now)


def test_more_branches_than_may_ever_run_are_not_asked_to_wait() -> None:
    made = Driver(limited(max_parallel_requests=2))
    made.arrive(fan_out=3)
    assert [one.rejection.retry_after_ns for one in made.refused()] == [None]


@pytest.mark.parametrize("limit", ["max_parallel_requests", "max_parallel_sessions"])
def test_whoever_has_too_many_at_once_may_come_when_the_first_of_them_is_over(limit: str) -> None:
    """From when its own requests are expected to end, not from a queue it may never join."""
    made = Driver(limited(**{limit: 2}), replicas=2)
    for nth, output in enumerate((8_000, 2_000)):
        made.arrive(session=f"s{nth}", max_output=output)
    ends = sorted(quota(made).ends.values())
    steps = [
        one.demand.output_p50 * H100.reference_step_ns for one in made.plane.state.live.values()
    ]
    assert ends[0] - made.now > min(steps), "it is decoded, and computed before that"
    made.arrive(session="s2")
    assert made.refused()[-1].rejection.retry_after_ns == max(S, ends[0] - made.now)
    made.wait(S // 2)
    made.arrive(session="s2")
    assert made.refused()[-1].rejection.retry_after_ns == max(S, ends[0] - made.now)
    made.wait(3_600 * S)
    made.arrive(session="s2")
    assert made.refused()[-1].rejection.retry_after_ns == S, "overdue, it may end at any moment"
    invariants.hold(made.plane, made.now)


def test_whoever_asks_for_several_answers_waits_for_as_many_to_end() -> None:
    made = Driver(limited(max_parallel_requests=3), replicas=3)
    for output in (100, 1_000, 4_000):
        made.arrive(max_output=output)
    ends = sorted(quota(made).ends.values())
    for branches, end in enumerate(ends, start=1):
        made.arrive(fan_out=branches)
        assert made.refused()[-1].rejection.retry_after_ns == max(S, end - made.now)


def test_nobody_keeps_when_requests_end_where_their_number_is_not_limited() -> None:
    made = Driver(limited(*ALL))
    made.arrive()
    assert not quota(made).ends


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"rpm_limit": 1}, Reason.REQUEST_RATE),
        ({"tpm_limit": 1_500}, Reason.TOKEN_RATE),
        ({"tpm_limit": 500}, Reason.TOKEN_LIMIT),
        ({"max_parallel_requests": 1}, Reason.CONCURRENCY),
        ({"budgets": (budget(Unit.REQUESTS, hard=1),)}, Reason.QUOTA_SPENT),
        ({"budgets": (budget(Unit.WORK, hard=1e-6),)}, Reason.BUDGET_SPENT),
    ],
)
def test_who_is_over_its_limits_is_refused_before_queue_and_replicas_are_looked_at(
    limits: dict[str, Any], reason: Reason
) -> None:
    settings = config(models=MODELS, tenants=(TenantSpec(name="a", **limits),))
    made, alike = (
        Driver(settings, replicas=3),
        Driver(replace(settings, admission=Gates(modes=Modes(budget=Mode.AUDIT))), replicas=3),
    )
    for each in (made, alike):
        each.arrive(max_output=10)
        each.arrive(max_output=10)
    entry, full = made.entries()[-1], alike.entries()[-1]
    assert isinstance(entry.decision, Reject)
    assert [one.gate for one in entry.decision.verdicts] == [Gate.CONTRACT, Gate.BUDGET]
    assert entry.decision.reason is reason
    assert (entry.evidence.replicas, entry.evidence.ready) == ((), 0)
    assert len(full.evidence.replicas) == 3
    assert entry.evidence.budget.tokens_needed == full.evidence.budget.tokens_needed
    assert entry.decision.verdicts[1].reason == full.decision.verdicts[1].reason
    assert entry.decision == settings.admission.decide(entry.evidence), "as a replay decides it"
    row = made.rows()[-1]
    assert row.entry.predicted_output > 0, "what was offered is counted in full (SLO-5)"
    assert row.entry.work_ns == full.evidence.demand.work_p50_ns


def test_a_contract_fault_is_told_before_a_limit() -> None:
    made = Driver(config(models=MODELS, tenants=(TenantSpec(name="a", rpm_limit=1),)))
    made.arrive(max_output=10)
    made.arrive(tokens=500_000)
    assert why(made) == [Reason.CONTEXT_TOO_LONG]


def test_so_many_sessions_have_requests_in_flight_and_no_more() -> None:
    made = Driver(limited(max_parallel_sessions=2), replicas=4)
    first = made.arrive(session="x")
    again = made.arrive(session="x")
    made.arrive(session="y")
    made.arrive(session="z")
    made.arrive()
    assert why(made) == [Reason.SESSIONS, Reason.SESSIONS], "without one they are one of their own"
    assert quota(made).sessions == {"x": 2, "y": 1}
    made.serve(first)
    made.arrive(session="z")
    assert len(why(made)) == 3, "the other one of x runs"
    made.serve(again)
    made.arrive()
    made.arrive()
    assert quota(made).sessions == {"y": 1, "": 2}
    invariants.hold(made.plane, made.now)


# Kept ----------------------------------------------------------------------------------------


def test_after_a_restart_rates_and_budgets_go_on_and_nothing_runs_any_more() -> None:
    limits = {"rpm_limit": 3, "tpm_limit": 10_000, "max_parallel_requests": 2}
    made = Driver(limited(*ALL, **limits, max_parallel_sessions=2), replicas=2)
    made.serve(made.arrive(tokens=1_000, session="s", max_output=100), 50)
    made.arrive(tokens=1_000, session="t", max_output=100)
    before = used(made)
    made.plane = Plane.thaw(made.plane.freeze())
    made.wait(5 * MS)
    made.restart()
    invariants.over(made.plane)
    assert used(made) == before, "what runs no more made nothing that is known"
    tokens, requests = quota(made).tokens, quota(made).requests
    assert tokens is not None
    assert requests is not None
    assert (tokens.level, requests.level) == (10_000 - 1_050, 1), "neither begins anew"
    made.up("r0")
    for nth in range(2):
        made.arrive(tokens=1_000, session=f"u{nth}", max_output=100)
    assert why(made) == [Reason.REQUEST_RATE], (
        "two may run at once again, one of them comes too soon"
    )


def test_budgets_are_frozen_and_thawed_with_the_plane() -> None:
    made = Driver(limited(*ALL, max_parallel_sessions=9))
    made.serve(made.arrive(tokens=1_000, session="s"), 50)
    made.arrive(tokens=1_000, session="t")
    thawed = Plane.thaw(made.plane.freeze())
    assert thawed.state.ledger == made.plane.state.ledger
    made.plane = thawed
    made.wait(5 * MS)
    made.serve(2)
    assert used(made)[Unit.TOKENS] == 1_050 + 1_010
    invariants.over(made.plane)
