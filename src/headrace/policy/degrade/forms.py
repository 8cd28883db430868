"""In which forms may a request be served, and which one is it?

The steps of the ladder as far as class, tenant and caller all agree (DEG-1, DEG-2), how a request looks at
each, and in which order they are tried. Knows no queue: whether a form fits is for the gates to say.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.decision import Decision, Degrade, LetIn, Reject
from headrace.model.ids import ModelName
from headrace.model.ladder import LEVEL_MAX, Effort, LadderFacts, LadderSpec, Lesser
from headrace.units import MICRO, Tokens, ceil_div


class Form(Struct, frozen=True, kw_only=True, gc=False):
    """A request as it would be served at one level."""

    level: int
    model: ModelName
    input_tokens: Tokens
    max_output: Tokens | None
    kept: int | None = None
    effort: Effort | None = None

    def lesser(self) -> Lesser:
        """Return what the driver has to know of it."""
        return Lesser(level=self.level, model=self.model, kept=self.kept, effort=self.effort)


def agreed(spec: LadderSpec, facts: LadderFacts) -> int:
    """Return the lowest level that class, tenant and caller all agree to."""
    lowest = min(spec.level, facts.tenant, facts.caller)
    return lowest if facts.smaller else min(lowest, LEVEL_MAX - 1)


def forms(spec: LadderSpec, facts: LadderFacts) -> tuple[Form, ...]:
    """Return the forms that a request may have, as asked first; a level that changes nothing has none."""
    asked = Form(
        level=0,
        model=facts.model,
        input_tokens=facts.input_tokens,
        max_output=facts.max_output,
    )
    found, lowest = [asked], agreed(spec, facts)
    if lowest < 1:
        return (asked,)
    cap, kept = _cap(spec, facts), min(spec.keep, len(facts.optional))
    left = Tokens(max(1, facts.input_tokens - sum(facts.optional[kept:])))
    step = Form(
        level=1,
        model=facts.model,
        input_tokens=facts.input_tokens,
        max_output=cap,
        effort=spec.effort,
    )
    if cap != facts.max_output or spec.effort is not None:
        found.append(step)
    if lowest > 1 and left < facts.input_tokens:
        step = Form(
            level=2,
            model=facts.model,
            input_tokens=left,
            max_output=cap,
            kept=kept,
            effort=spec.effort,
        )
        found.append(step)
    if lowest == LEVEL_MAX and spec.model is not None:
        caps = [one for one in (cap, facts.smaller_cap) if one is not None]
        least = min(caps, default=None)
        model = ModelName(spec.model)
        found.append(replace(step, level=LEVEL_MAX, model=model, max_output=least))
    return tuple(found)


def _cap(spec: LadderSpec, facts: LadderFacts) -> Tokens | None:
    """Return the most output from level 1 on: a part of what the caller allows, or else of the forecast."""
    part = round(spec.output_part * MICRO)
    if part == MICRO:
        return facts.max_output
    allowed = facts.output_p90 if facts.max_output is None else facts.max_output
    return Tokens(max(1, ceil_div(allowed * part, MICRO)))


def at_level(steps: Sequence[Form], level: int) -> int:
    """Return which of the forms a request has at a level: the last that does not go beyond it."""
    return sum(step.level <= level for step in steps) - 1


class Climbed(Struct, frozen=True, kw_only=True):
    """What was found on the ladder."""

    decision: Decision
    form: Form
    """What it is about."""
    nth: int
    """Which of the forms that were looked at that was."""


def climb(
    spec: LadderSpec, facts: LadderFacts, base: int, look: Callable[[Form], Decision]
) -> Climbed:
    """Return the first form from the level of its class down that is let in, or a refusal.

    As asked is looked at first whatever the level, so that a fault of the caller's own is told alike at
    all times, and never makes a request step down. The last that is let in stands, or else the last
    refusal of ours: the one that says when there is room for the least of them.
    """
    steps = forms(spec, facts)
    asked = steps[0]
    seen = [(asked, look(asked))]
    at = max(1, at_level(steps, base))
    first = seen[0][1]
    if at_level(steps, base) if isinstance(first, LetIn) else first.is_ours:
        for step in steps[at:]:
            seen.append((step, look(step)))
            if isinstance(seen[-1][1], LetIn):
                break
    nth = max(range(len(seen)), key=lambda nth: (_rank(seen[nth][1]), nth))
    form, decision = seen[nth]
    if isinstance(decision, Reject):
        whole = min(facts.tenant, facts.caller) >= spec.level
        if spec.defer and whole and decision.is_ours:
            decision = replace(decision, defer=True)
    elif nth:
        decision = _lesser(form, decision, seen[nth - 1][1])
    return Climbed(decision=decision, form=form, nth=nth)


def _rank(decision: Decision) -> int:
    """Return how much it counts beside decisions on other forms of the same request."""
    if isinstance(decision, Reject):
        return int(decision.is_ours)
    return 2


def _lesser(form: Form, decision: LetIn, before: Decision) -> Degrade:
    return Degrade(
        slack_ns=decision.slack_ns,
        wait_ns=decision.wait_ns,
        verdicts=decision.verdicts,
        over_soft=decision.over_soft,
        lesser=form.lesser(),
        input_tokens=form.input_tokens,
        max_output=form.max_output,
        reason=before.reason if isinstance(before, Reject) else None,
    )
