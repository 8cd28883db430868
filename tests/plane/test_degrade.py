"""What a request is given that cannot be served as asked: booked, sent, judged and counted as what it is."""

from typing import Any

import pytest

from headrace.model.decision import Admit, Degrade, Reason, Reject
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import ModelName, PoolName
from headrace.model.ladder import Effort, LadderSpec
from headrace.model.request import BY_BYTES, TextBytes
from headrace.plane.core import Plane
from headrace.plane.levels import Inflow, Standing
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import PlaneConfig
from headrace.policy.degrade.level import Degrading
from headrace.policy.predict.ceiling import OutputBudget
from headrace.units import NS_PER_S, InstantNs, Tokens
from tests.plane import invariants
from tests.plane.scenes import H100, MODEL, MS, Driver, S, config, small

PARTS = (Tokens(3_000), Tokens(2_000), Tokens(1_000))


def ladder(**more: Any) -> PlaneConfig:
    """Return a class of a tight bound with a ladder; tenant a agreed to all of it, b to nothing."""
    spec: dict[str, Any] = {"ttft_ms": 500.0, "degrade": LadderSpec(**more.pop("spec", {}))}
    given: dict[str, Any] = {
        "classes": (ClassSpec(name="interactive", **spec), ClassSpec(name="plain", ttft_ms=500.0)),
        "tenants": (TenantSpec(name="a", degrade=3), TenantSpec(name="b")),
    }
    return config(**(given | more))


def asked(made: Driver, tenant: str = "a", tokens: int = 8_000, **more: Any) -> int:
    """Offer a request with optional parts."""
    given: dict[str, Any] = {"optional": PARTS, "max_output": Tokens(400)} | more
    return made.arrive(tenant, tokens, **given)


def crowd(made: Driver, count: int = 2, tokens: int = 5_000) -> None:
    """Send what makes the next ones late: prompts of a tenant without consent."""
    for _ in range(count):
        asked(made, "b", tokens, optional=())


def test_what_fits_as_asked_is_served_as_asked() -> None:
    made = Driver(ladder())
    request = asked(made)
    (record,) = made.entries()
    assert isinstance(record.decision, Admit)
    assert record.ladder is not None
    assert [one.level for one in record.ladder.tried] == [0]
    assert made.live(request).lesser is None
    assert made.sent()[0].lesser is None


def test_what_does_not_fit_as_asked_is_served_in_the_first_form_that_does() -> None:
    made = Driver(ladder(spec={"keep": 1}))
    crowd(made, 1, 7_000)
    request = asked(made)
    record = made.entries()[-1]
    decision = record.decision
    assert isinstance(decision, Degrade)
    assert record.ladder is not None
    assert [one.level for one in record.ladder.tried] == [0, 1, 2]
    assert decision.reason is Reason.DEADLINE_QUEUE
    assert (decision.lesser.level, decision.lesser.kept) == (2, 1)
    assert (decision.input_tokens, decision.max_output) == (5_000, 200)
    live = made.live(request)
    assert live.demand.input_tokens == live.request.input_tokens == 5_000
    assert live.request.optional == PARTS[:1]
    assert live.entry.input_tokens == 8_000  # offered as asked


def test_it_is_sent_in_its_form_and_ends_in_it() -> None:
    made = Driver(ladder())
    crowd(made)
    request = asked(made)
    for early in (1, 2):
        made.serve(early)
    sent = made.sent()[-1]
    assert sent.request == request
    assert sent.lesser is not None
    assert (sent.lesser.level, sent.lesser.kept, sent.lesser.effort) == (2, 0, Effort.LOW)
    assert (sent.lesser.model, sent.output_limit) == (MODEL, 200)
    made.serve(request)
    assert [row.level for row in made.rows()] == [0, 0, 2]
    tally = made.plane.state.accounts.tallies["a"]["interactive"]  # type: ignore[index]
    assert (tally.offered, tally.admitted, tally.degraded) == (1, 1, {2: 1})


@pytest.mark.parametrize(
    ("tenant", "more"),
    [("b", {}), ("a", {"lowest": 0}), ("a", {"slo_class": "plain"})],
    ids=["tenant", "caller", "class"],
)
def test_who_did_not_agree_is_refused_as_ever(tenant: str, more: dict[str, Any]) -> None:
    made, same = Driver(ladder()), Driver(ladder())
    crowd(made)
    crowd(same)
    asked(made, tenant, **more)
    record = made.entries()[-1]
    assert isinstance(record.decision, Reject)
    assert record.ladder is None
    assert record.decision.reason is Reason.DEADLINE_QUEUE
    asked(same, "a", optional=PARTS)
    assert isinstance(same.entries()[-1].decision, Degrade)


def test_no_level_beyond_what_the_caller_accepts_is_tried() -> None:
    made = Driver(ladder())
    crowd(made)
    asked(made, lowest=1)
    record = made.entries()[-1]
    assert record.ladder is not None
    assert [one.level for one in record.ladder.tried] == [0, 1]
    assert isinstance(record.decision, Reject)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"tpm_limit": 8_200}, Reason.TOKEN_LIMIT), ({"rpm_limit": 1}, Reason.REQUEST_RATE)],
)
def test_a_fault_of_the_caller_never_makes_a_request_step_down(
    limits: dict[str, Any], reason: Reason
) -> None:
    """Its budget would hold the lesser form; it is refused for what it asked for."""
    tenant = TenantSpec(name="a", degrade=3, **limits)
    made = Driver(ladder(tenants=(tenant, TenantSpec(name="b"))))
    crowd(made, 1)
    if "rpm_limit" in limits:
        asked(made, tokens=100, optional=())
    asked(made)
    record = made.entries()[-1]
    assert isinstance(record.decision, Reject)
    assert (record.decision.reason, record.decision.defer) == (reason, False)
    assert record.ladder is not None
    assert len(record.ladder.tried) == 1


def test_the_same_is_so_at_any_level_of_the_class() -> None:
    tenant = TenantSpec(name="a", degrade=3, tpm_limit=8_200)
    made = Driver(ladder(tenants=(tenant, TenantSpec(name="b"))))
    asked(made, tokens=100, optional=())
    made.known.standings["interactive"].level = 2  # type: ignore[index]
    asked(made)
    assert isinstance(made.entries()[-1].decision, Reject)
    asked(made, tokens=7_000, optional=PARTS)
    decision = made.entries()[-1].decision
    assert isinstance(decision, Degrade)
    assert decision.reason is None


def test_a_budget_is_charged_for_the_lesser_form() -> None:
    tenants = (TenantSpec(name="a", degrade=3, tpm_limit=50_000), TenantSpec(name="b"))
    made = Driver(ladder(tenants=tenants))
    crowd(made)
    request = asked(made)
    ledger = made.plane.state.ledger
    quota = ledger.quota(tenants[0], made.now)
    assert quota.tokens is not None
    assert quota.tokens.level == 50_000 - 2_000 - 200
    made.serve(1)
    made.serve(2)
    made.serve(request, output=50)
    assert ledger.quota(tenants[0], made.now).tokens.level == 50_000 - 2_050  # type: ignore[union-attr]


def test_a_prompt_too_large_for_every_pool_is_cut_until_it_fits() -> None:
    pools = (PoolSpec(name="p", model="m", profile=small(8_192)),)
    plain = (ClassSpec(name="interactive", ttft_ms=9_000.0, degrade=LadderSpec()),)
    made = Driver(ladder(pools=pools, classes=plain))
    asked(made, tokens=9_000)
    decision = made.entries()[-1].decision
    assert isinstance(decision, Degrade)
    assert decision.reason is Reason.KV_TOO_LARGE
    assert decision.lesser.level == 2


@pytest.mark.parametrize("mode", [GateMode.AUDIT, GateMode.OBSERVE])
def test_gates_that_only_record_change_nothing(mode: GateMode) -> None:
    made = Driver(ladder(admission=Gates(mode=mode)))
    crowd(made, 9)
    for _ in range(20):
        asked(made)
    found = made.entries()[9:]
    assert all(isinstance(one.decision, Admit) for one in found)
    assert {one.ladder.base for one in found if one.ladder is not None} == {0}


def test_what_is_left_out_changes_the_prefix_after_it_alone() -> None:
    made = Driver(ladder())
    crowd(made)
    chunks = tuple(range(10, 18))
    text = TextBytes(ascii=32_000)
    request = asked(made, prefix=chunks, prefix_tokens=Tokens(1_000), prefix_kept=2, text=text)
    live = made.live(request)
    assert live.lesser is not None
    assert live.request.prefix == chunks[:2]
    assert live.request.text is None  # what bytes come to is not learned from it


def test_a_limit_of_ours_teaches_nothing_of_lengths() -> None:
    made = Driver(ladder())
    crowd(made)
    request = asked(made)
    for early in (1, 2):
        made.serve(early, output=10)
    before = made.plane.freeze(), len(made.plane.state.outputs.windows)
    seen = {name: list(one.recent) for name, one in made.plane.state.outputs.windows.items()}
    made.serve(request, output=200)
    after = {name: list(one.recent) for name, one in made.plane.state.outputs.windows.items()}
    assert after == seen
    assert len(made.plane.state.outputs.windows) == before[1]


def test_parts_are_measured_as_their_prompt_is() -> None:
    """Bytes come to tokens by what was learned: of the optional parts alike."""
    made = Driver(ladder())
    text = TextBytes(ascii=4_000)
    for _ in range(made.plane.settings.config.input_prediction.enough):
        taught = made.arrive("a", 1_000, text=text, input_revision=BY_BYTES)
        made.serve(taught)  # the engine counts what was told
        row = made.plane.state.inputs
    assert row.windows
    live = made.live(
        made.arrive(
            "a", 500, text=text, input_revision=BY_BYTES, optional=(Tokens(100), Tokens(50))
        )
    )
    assert live.request.input_tokens == 1_000
    assert live.request.optional == (200, 100)


# A smaller model -------------------------------------------------------------------------------------

LITTLE = (Tokens(100),)
"""Leaving out so little saves nobody."""
TWO: dict[str, Any] = {
    "models": (ModelSpec(name="m"), ModelSpec(name="small")),
    "pools": (
        PoolSpec(name="p", model="m", profile=H100),
        PoolSpec(name="q", model="small", profile=H100),
    ),
    "spec": {"level": 3, "model": "small"},
}


def test_the_smaller_model_answers_from_its_own_pool() -> None:
    made = Driver(ladder(**TWO))
    made.up("small-0", "q")
    crowd(made)
    request = asked(made, optional=LITTLE)
    live = made.live(request)
    assert live.model == "small"
    assert live.lesser is not None
    assert (live.lesser.level, live.lesser.model) == (3, "small")
    sent = made.sent()[-1]
    assert (sent.request, sent.replica) == (request, "small-0")
    made.serve(request)
    row = made.rows()[-1]
    assert (row.model, row.level) == ("small", 3)
    assert made.plane.state.models[ModelName("small")].backlog.size == 0


@pytest.mark.parametrize(("told", "limit"), [(None, 30), (400, 200), (40, 20)])
@pytest.mark.parametrize("part", [0.5, 1.0])
def test_the_smaller_model_keeps_the_output_budget_that_it_has(
    told: int | None, limit: int, part: float
) -> None:
    """Whoever named no limit gets no more of it for having asked for another model."""
    budget = OutputBudget(tokens=900, models={"small": 30})
    spec = TWO["spec"] | {"output_part": part}
    made = Driver(ladder(**(TWO | {"spec": spec}), output_budget=budget))
    made.up("small-0", "q")
    crowd(made)
    asked(made, optional=LITTLE, max_output=told)
    decision = made.entries()[-1].decision
    assert isinstance(decision, Degrade)
    assert decision.lesser.model == "small"
    kept = limit if told is None or part < 1 else told
    assert (decision.max_output, made.sent()[-1].output_limit) == (kept, kept)
    invariants.hold(made.plane, made.now)


@pytest.mark.parametrize(
    "tenant",
    [TenantSpec(name="a", degrade=2), TenantSpec(name="a", degrade=3, models=("m",))],
    ids=["not agreed to", "not allowed"],
)
def test_the_smaller_model_is_for_tenants_that_may_use_it(tenant: TenantSpec) -> None:
    made = Driver(ladder(tenants=(tenant, TenantSpec(name="b")), **TWO))
    made.up("small-0", "q")
    crowd(made)
    asked(made, optional=LITTLE)
    decision = made.entries()[-1].decision
    assert isinstance(decision, Reject)
    assert decision.reason is Reason.DEADLINE_QUEUE


def test_a_refusal_is_of_the_model_that_was_asked_for() -> None:
    made = Driver(ladder(**TWO))
    made.up("small-0", "q")
    for _ in range(9):
        asked(made, optional=LITTLE, ttft_ns=1_000_000)
    row = made.rows()[-1]
    assert (row.admitted, row.model, row.level) == (False, "m", 0)
    assert made.plane.state.models[ModelName("small")].lengths == {}


def test_without_a_ready_replica_of_one_model_the_other_answers() -> None:
    made = Driver(ladder(**TWO), replicas=0)
    made.up("small-0", "q")
    request = asked(made)
    decision = made.entries()[-1].decision
    assert isinstance(decision, Degrade)
    assert decision.reason is Reason.NO_READY_REPLICA
    assert made.live(request).model == "small"


# The level of a class --------------------------------------------------------------------------------


def overload(made: Driver, seconds: float, every_ms: int = 50) -> None:
    """Offer far more than can be done, and let what is sent be served."""
    until = made.now + seconds * S
    while made.now < until:
        asked(made)
        made.wait(every_ms * MS)
        for request, live in list(made.plane.state.live.items()):
            if live.attempt is not None and live.dispatched_at + 150 * MS <= made.now:
                made.serve(request)


def standing(made: Driver) -> Standing:
    return made.known.standings["interactive"]  # type: ignore[index]


def test_under_overload_everybody_starts_at_the_level_that_all_fit_at() -> None:
    made = Driver(ladder())
    overload(made, 5)
    assert standing(made).level > 0
    late = [one for one in made.entries() if one.at >= 4 * S and one.ladder is not None]
    assert {one.ladder.base for one in late if one.ladder} == {standing(made).level}
    for one in late:
        assert one.ladder is not None
        levels = [tried.level for tried in one.ladder.tried]
        assert levels[:2] in ([0, 1], [0, 2])
        assert isinstance(one.decision, Degrade | Reject)


def test_a_class_comes_back_by_itself_step_by_step_and_how_long_that_took_is_kept() -> None:
    made = Driver(ladder())
    overload(made, 10)
    left = standing(made).left_at
    assert standing(made).level == 2
    assert left is not None
    made.wait(9 * S)
    assert standing(made).level == 2
    made.wait(60 * S)
    found = standing(made)
    assert (found.level, found.left_at) == (0, None)
    assert found.recovered_ns == found.since - left
    assert found.entered[0] == 1
    assert sum(found.time_at(made.now)) == made.now
    assert found.time_at(made.now)[1] >= 10 * S
    assert made.plane.next_timer() is None


def test_nothing_is_timed_while_all_is_as_asked() -> None:
    made = Driver(ladder())
    request = asked(made)
    made.serve(request)
    assert made.plane.next_timer() is None


def test_a_level_outlives_a_checkpoint() -> None:
    made = Driver(ladder())
    overload(made, 5)
    again = Plane.thaw(made.plane.freeze())
    assert again.freeze() == made.plane.freeze()
    assert again.state.models[MODEL].standings == made.known.standings
    assert again.next_timer() == made.plane.next_timer()


def test_another_configuration_takes_ladders_away_or_makes_them_shorter() -> None:
    made = Driver(ladder())
    overload(made, 5)
    made.configure(ladder(spec={"level": 1}), revision=2)
    asked(made)
    record = made.entries()[-1]
    assert record.ladder is not None
    assert record.ladder.base <= 1
    made.configure(config(), revision=3)
    assert made.known.standings == {}
    assert made.known.inflow.work_ns == {}
    assert made.plane.next_timer() is None or not made.known.standings


def test_a_class_without_a_ladder_counts_where_it_shares_a_pool() -> None:
    made = Driver(ladder())
    crowd(made, 1)
    assert set(made.known.inflow.work_ns) == {"interactive"}
    asked(made, "b", 100, slo_class="plain", optional=())
    assert set(made.known.inflow.work_ns) == {"interactive", "plain"}


def test_without_any_ladder_nothing_is_counted() -> None:
    made = Driver()
    made.arrive()
    assert made.known.inflow == Inflow()
    assert made.known.standings == {}


def test_a_measured_rate_far_below_the_declared_one_is_not_believed() -> None:
    made = Driver(ladder(), replicas=2)
    rate = made.known.rates[PoolName("p")]
    for done, seen in ((1.0, 2_000_000), (0.6, 1_200_000), (0.01, 700_000)):
        rate.time_ns, rate.done_ns = S, round(done * S)
        asked(made, tokens=100, optional=())
        ladder_of = made.entries()[-1].ladder
        assert ladder_of is not None
        assert ladder_of.pressure.rate_micro == seen


def test_marks_of_the_configuration_decide() -> None:
    """With a far mark a refusal puts the class down by a single step."""
    made = Driver(ladder(degrading=Degrading(high=2.0, low=0.1, recover_s=3_600.0)))
    overload(made, 2)
    assert standing(made).level == 1


# The account -----------------------------------------------------------------------------------------


def test_inflow_forgets_about_a_tenth_a_second_and_all_of_it_in_the_end() -> None:
    inflow, name = Inflow(), "c"
    inflow.add(name, (10 * NS_PER_S, 5 * NS_PER_S, NS_PER_S, 0))  # type: ignore[arg-type]
    assert inflow.micro([name]) == (10**6, 500_000, 100_000, 0)  # type: ignore[list-item]
    inflow.forget(InstantNs(NS_PER_S))
    assert inflow.micro([name])[0] == 900_000  # type: ignore[list-item]
    inflow.forget(InstantNs(400 * NS_PER_S))
    assert inflow.work_ns == {}
    assert inflow.micro([name]) == (0, 0, 0, 0)  # type: ignore[list-item]


def test_steps_up_against_the_forecast_that_are_taken_back_are_counted() -> None:
    one = Standing()
    at = InstantNs(0)
    for level, trying, failed in (
        *((1, False, 0), (2, False, 0), (1, True, 0), (2, False, 1), (1, True, 1), (2, True, 2)),
        *((1, False, 0), (0, False, 0)),
    ):
        at = InstantNs(at + S)
        one.move(level, at, trying=trying)
        assert (one.level, one.failed) == (level, failed)
    assert one.entered == [1, 4, 3, 0]
    assert one.recovered_ns == 7 * S
    assert one.time_at(InstantNs(at + S)) == (2 * S, 4 * S, 3 * S, 0)
