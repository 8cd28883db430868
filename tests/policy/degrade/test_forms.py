"""A ladder has the steps that all three agree to, each gives up more, and they are tried in order."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError, convert
from msgspec.structs import replace

from headrace.model.decision import OVERLOAD, Admit, Decision, Degrade, Gate, LetIn, Reason, Reject
from headrace.model.ids import ModelName
from headrace.model.ladder import LEVEL_MAX, Effort, LadderFacts, LadderSpec
from headrace.policy.degrade.forms import Form, agreed, climb, forms
from headrace.units import DurationNs, Tokens

SPEC = LadderSpec(level=2, output_part=0.5, keep=1, effort=Effort.LOW)
SMALLER = LadderSpec(level=3, model="small")
FACTS = LadderFacts(
    tenant=3,
    caller=3,
    model=ModelName("m"),
    smaller=True,
    input_tokens=Tokens(1_000),
    optional=(Tokens(300), Tokens(200), Tokens(100)),
    max_output=Tokens(401),
    output_p90=Tokens(90),
)
LET_IN = Admit(slack_ns=1, wait_ns=DurationNs(0), verdicts=())


def refusal(reason: Reason = Reason.DEADLINE_QUEUE, gate: Gate = Gate.DEADLINE) -> Reject:
    return Reject(reason=reason, gate=gate, slack_ns=-1, retry_after_ns=None, verdicts=())


OURS = refusal()
THEIRS = refusal(Reason.TOKEN_RATE, Gate.BUDGET)


def test_each_step_gives_up_more() -> None:
    asked, shorter, less = forms(SPEC, FACTS)
    assert asked == Form(
        level=0, model=FACTS.model, input_tokens=Tokens(1_000), max_output=Tokens(401)
    )
    assert shorter == replace(asked, level=1, max_output=Tokens(201), effort=Effort.LOW)
    assert less == replace(shorter, level=2, input_tokens=Tokens(700), kept=1)


def test_a_smaller_model_gets_the_shorter_prompt() -> None:
    last = forms(SMALLER, FACTS)[-1]
    assert (last.level, last.model, last.input_tokens) == (3, "small", 400)


@pytest.mark.parametrize(
    ("spec", "changed", "levels"),
    [
        (SPEC, {"tenant": 0}, [0]),
        (SPEC, {"caller": 0}, [0]),
        (SPEC, {"tenant": 1}, [0, 1]),
        (SPEC, {"caller": 1}, [0, 1]),
        (LadderSpec(level=1), {}, [0, 1]),
        (SPEC, {}, [0, 1, 2]),
        (SPEC, {"optional": ()}, [0, 1]),
        (replace(SPEC, keep=3), {}, [0, 1]),
        (replace(SPEC, output_part=1.0, effort=None), {}, [0, 2]),
        (replace(SPEC, output_part=1.0, effort=None), {"optional": ()}, [0]),
        (SMALLER, {}, [0, 1, 2, 3]),
        (SMALLER, {"smaller": False}, [0, 1, 2]),
        (SMALLER, {"tenant": 2}, [0, 1, 2]),
        (SMALLER, {"optional": ()}, [0, 1, 3]),
    ],
)
def test_the_steps_are_those_that_all_agree_to_and_that_change_anything(
    spec: LadderSpec, changed: dict[str, object], levels: list[int]
) -> None:
    assert [form.level for form in forms(spec, replace(FACTS, **changed))] == levels


@pytest.mark.parametrize(
    ("part", "asked", "cap"), [(0.5, 401, 201), (0.5, 1, 1), (0.01, 5, 1), (1.0, 401, 401)]
)
def test_output_is_capped_at_a_part_of_what_the_caller_allows_rounded_up(
    part: float, asked: int, cap: int
) -> None:
    facts = replace(FACTS, max_output=Tokens(asked))
    assert forms(replace(SPEC, output_part=part), facts)[1].max_output == cap


def test_where_the_caller_allows_any_length_the_forecast_stands_for_it() -> None:
    facts = replace(FACTS, max_output=None)
    assert forms(SPEC, facts)[1].max_output == 45
    assert forms(replace(SPEC, output_part=1.0), facts)[1].max_output is None


@pytest.mark.parametrize(
    ("base", "answers", "levels", "level"),
    [
        (0, [LET_IN], [0], 0),
        (0, [OURS, LET_IN], [0, 1], 1),
        (0, [OURS, OURS, LET_IN], [0, 1, 2], 2),
        (1, [LET_IN, LET_IN], [0, 1], 1),
        (2, [LET_IN, LET_IN], [0, 2], 2),
        (2, [OURS, LET_IN], [0, 2], 2),
        (3, [OURS, LET_IN], [0, 2], 2),
        (0, [THEIRS], [0], None),
        (2, [THEIRS], [0], None),
        (0, [OURS, OURS, OURS], [0, 1, 2], None),
        # Another length is another measure (long prompts are let in first): who fits as asked stays in.
        (2, [LET_IN, OURS], [0, 2], 0),
    ],
)
def test_forms_are_looked_at_from_the_level_of_the_class_down(
    base: int, answers: list[Decision], levels: list[int], level: int | None
) -> None:
    left, seen = iter(answers), []

    def look(form: Form) -> Decision:
        seen.append(form.level)
        return next(left)

    found = climb(SPEC, FACTS, base, look)
    assert seen == levels
    assert list(left) == []
    match found.decision:
        case Degrade() as decision:
            assert decision.lesser.level == level == found.form.level
        case Admit():
            assert level == 0
        case Reject():
            assert level is None


def test_why_it_has_less_is_the_refusal_of_the_step_before_or_the_level_of_its_class() -> None:
    answers = iter((OURS, refusal(Reason.GAP_BOUND), LET_IN))
    found = climb(SPEC, FACTS, 0, lambda _: next(answers)).decision
    assert isinstance(found, Degrade)
    assert (found.reason, found.why) == (Reason.GAP_BOUND, "gap_bound")
    found = climb(SPEC, FACTS, 2, lambda _: LET_IN).decision
    assert isinstance(found, Degrade)
    assert (found.reason, found.why) == (None, OVERLOAD)


def test_the_refusal_that_is_told_is_the_last_of_ours() -> None:
    answers = iter(
        [OURS, refusal(Reason.GAP_BOUND), refusal(Reason.CONTEXT_TOO_LONG, Gate.CONTRACT)]
    )
    found = climb(SPEC, FACTS, 0, lambda _: next(answers))
    assert found.decision == refusal(Reason.GAP_BOUND)
    assert found.nth == 1


@pytest.mark.parametrize(
    ("spec", "changed", "answer", "defer"),
    [
        (replace(SPEC, defer=True), {}, OURS, True),
        (replace(SPEC, defer=True), {"tenant": 1}, OURS, False),
        (replace(SPEC, defer=True), {"caller": 1}, OURS, False),
        (replace(SPEC, defer=True), {}, THEIRS, False),
        (SPEC, {}, OURS, False),
    ],
)
def test_only_who_agreed_to_all_of_the_ladder_is_put_off(
    spec: LadderSpec, changed: dict[str, object], answer: Reject, defer: bool
) -> None:
    found = climb(spec, replace(FACTS, **changed), 0, lambda _: answer).decision
    assert isinstance(found, Reject)
    assert found == replace(answer, defer=defer)


def test_a_third_level_is_a_model_and_no_other_is() -> None:
    for wrong in ({"level": 3}, {"level": 2, "model": "small"}):
        with pytest.raises(ValidationError, match="level 3"):
            convert(wrong, LadderSpec)


# Any ladder ------------------------------------------------------------------------------------------

specs = st.builds(
    lambda level, part, keep: LadderSpec(
        level=level,
        output_part=part,
        keep=keep,
        model="small" if level == LEVEL_MAX else None,
    ),
    st.integers(1, 3),
    st.floats(0.01, 1.0),
    st.integers(0, 4),
)
facts = st.builds(
    lambda tenant, caller, smaller, fixed, optional, cap, p90: LadderFacts(
        tenant=tenant,
        caller=caller,
        model=ModelName("m"),
        smaller=smaller,
        input_tokens=Tokens(fixed + sum(optional)),
        optional=tuple(map(Tokens, optional)),
        max_output=cap,
        output_p90=Tokens(p90),
    ),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 5_000),
    st.lists(st.integers(1, 2_000), max_size=5),
    st.one_of(st.none(), st.integers(1, 4_000).map(Tokens)),
    st.integers(1, 4_000),
)
answers = st.lists(st.sampled_from([LET_IN, OURS, THEIRS]), min_size=4, max_size=4)


@given(specs, facts)
def test_no_form_goes_beyond_consent_or_touches_what_must_stay(
    spec: LadderSpec, facts: LadderFacts
) -> None:
    steps = forms(spec, facts)
    fixed = facts.input_tokens - sum(facts.optional)
    assert [one.level for one in steps] == sorted({one.level for one in steps})
    for before, step in pairwise(steps):
        assert step.level <= agreed(spec, facts) <= min(spec.level, facts.tenant, facts.caller)
        assert fixed <= step.input_tokens <= before.input_tokens
        allowed = facts.output_p90 if facts.max_output is None else facts.max_output
        if spec.output_part < 1:
            assert step.max_output is not None
            assert max(1, round(spec.output_part * 10**6) * allowed / 10**6) <= step.max_output
            assert step.max_output < spec.output_part * allowed + 1.01
        kept = len(facts.optional) if step.kept is None else step.kept
        assert step.input_tokens == fixed + sum(facts.optional[:kept])
        assert (step.model == facts.model) is (step.level < LEVEL_MAX)


@given(specs, facts, st.integers(0, 3), answers)
def test_whatever_the_gates_say_one_decision_stands_and_is_about_its_form(
    spec: LadderSpec, facts: LadderFacts, base: int, answers: Sequence[Decision]
) -> None:
    seen: list[Form] = []

    def look(form: Form) -> Decision:
        seen.append(form)
        return answers[len(seen) - 1]

    found = climb(spec, facts, base, look)
    said = answers[: len(seen)]
    assert seen[0].level == 0
    assert found.form is seen[found.nth]
    assert isinstance(found.decision, LetIn) is any(isinstance(one, LetIn) for one in said)
    assert isinstance(found.decision, Degrade) is (
        isinstance(found.decision, LetIn) and found.form.level > 0
    )
    if answers[0] is THEIRS:
        assert len(seen) == 1
    if answers[0] is LET_IN and not base:
        assert found.decision is LET_IN
