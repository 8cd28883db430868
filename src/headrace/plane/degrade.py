"""In what form is a request decided on, and at which level is its class meanwhile?

Makes the forms of `policy/degrade` into evidence for the gates, one after the other, and keeps each class's
level. Where nothing less was agreed to it does nothing.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.decision import Decision, LetIn, Reject
from headrace.model.deployment import ModelSpec, TenantSpec
from headrace.model.evidence import EntryEvidence, LadderRecord, Tried
from headrace.model.ids import ClassName, ModelName, PoolName
from headrace.model.ladder import LEVEL_MAX, LadderFacts, LadderSpec, Pressure
from headrace.model.request import Request
from headrace.plane.asked import Asked, rate_micro
from headrace.plane.fleet import PoolFacts
from headrace.plane.levels import NOTHING, Standing
from headrace.plane.machine import NOT_SURVEYED, Machine
from headrace.plane.state import ModelState
from headrace.policy.admission.gates import OF_THE_MOMENT
from headrace.policy.catalog import class_level
from headrace.policy.degrade.forms import Form, at_level, climb, forms
from headrace.units import MICRO, NS_PER_S, DurationNs, InstantNs, elapsed, later, time_for


class Found(Struct, frozen=True):
    """A decision, and the request in the form it is about."""

    asked: Asked
    evidence: EntryEvidence
    decision: Decision
    ladder: LadderRecord | None = None

    def learnt_on(self, asked: Asked) -> Asked:
        """Return the form whose length counts as let in or refused: of the model that was asked for."""
        let_in = isinstance(self.decision, LetIn)
        return self.asked if let_in or self.asked.model == asked.model else asked


def decide(m: Machine, asked: Asked, now: InstantNs) -> Found:
    """Decide on a request, in lesser forms too if its class, tenant and caller agreed to any."""
    spec, settings = asked.class_spec.degrade, m.settings
    if asked.model not in settings.laddered:
        evidence = asked.evidence(m, now)
        return Found(asked, evidence, settings.config.admission.decide(evidence))
    standing = asked.known.standings.get(asked.slo_class)
    if spec is None or not min(asked.tenant.degrade, asked.request.lowest):
        evidence = asked.evidence(m, now)
        found = Found(asked, evidence, settings.config.admission.decide(evidence))
        _count(m, asked, found.decision, (asked.demand.work_p50_ns,) * len(NOTHING), now)
        return found
    if standing is None:
        standing = asked.known.standings[asked.slo_class] = Standing(since=now, quiet_from=now)
    return _climbed(m, asked, spec, standing, now)


def _climbed(
    m: Machine, asked: Asked, spec: LadderSpec, standing: Standing, now: InstantNs
) -> Found:
    pressure = look(m, asked.model, asked.slo_class, standing, now)
    facts, base = _facts(m, asked, spec), standing.level
    steps = forms(spec, facts)
    tried: list[Tried] = []
    looked: list[Asked] = []

    def see(form: Form) -> Decision:
        mine = asked if not form.level else _in_form(m, asked, form)
        evidence = mine.evidence(m, now)
        decision = m.settings.config.admission.decide(evidence)
        looked.append(mine)
        tried.append(Tried(level=form.level, evidence=evidence, decision=decision))
        return decision

    found = climb(spec, facts, base, see)
    if found.nth != len(tried) - 1:
        m.surveyed = NOT_SURVEYED  # what was seen last was seen for another form
    _count(m, asked, found.decision, _works(asked, steps), now)
    if found.form.model != asked.model and isinstance(found.decision, LetIn):
        less = looked[found.nth]
        _count(m, less, found.decision, (less.demand.work_p50_ns,) * len(NOTHING), now)
    at_base = tried[min(1, at_level(steps, base), len(tried) - 1)].decision
    if isinstance(at_base, Reject) and at_base.reason in OF_THE_MOMENT:
        standing.refuse(now)
    return Found(
        asked=looked[found.nth],
        evidence=tried[found.nth].evidence,
        decision=found.decision,
        ladder=LadderRecord(facts=facts, pressure=pressure, base=base, tried=tuple(tried)),
    )


def look(
    m: Machine, model: ModelName, slo_class: ClassName, standing: Standing, now: InstantNs
) -> Pressure:
    """Move a class to the level that it should be at now; return what that was decided by."""
    config = m.settings.config
    seen = _pressure(m, model, slo_class, standing, now)
    level = class_level(config, seen)
    here = seen
    if level != standing.level:
        standing.move(level, now, trying=config.degrading.is_try(seen))
        here = replace(seen, level=level, refused=0)
    if config.degrading.is_short(here):
        standing.quiet_from = now
    if not config.degrading.is_calm(here):
        standing.calm_from = None
    elif standing.calm_from is None:
        standing.calm_from = now
    return seen


def _pressure(
    m: Machine, model: ModelName, slo_class: ClassName, standing: Standing, now: InstantNs
) -> Pressure:
    settings, known = m.settings, m.state.models[model]
    spec = settings.classes[slo_class].degrade
    assert spec is not None, "it has a ladder"
    known.inflow.forget(now)
    rivals = settings.rivals(model, slo_class)
    serving = settings.serving(model, slo_class)
    rate = max(rate_micro(known, serving), _declared_micro(known, serving) // BELIEVED)
    queued = sum(known.backlog.work.get(name, 0) for name in rivals)
    calm = standing.calm_from
    return Pressure(
        level=standing.level,
        lowest=spec.level,
        offered=known.inflow.micro(rivals)[: spec.level + 1],
        rate_micro=rate,
        wait_ns=time_for(queued, rate) if rate else DurationNs(0),
        refused=standing.refused(now),
        calm_ns=DurationNs(0) if calm is None else elapsed(calm, now),
        quiet_ns=elapsed(standing.quiet_from, now),
        failed=standing.failed,
    )


BELIEVED = 2
"""Below half of what pools were declared to do, the measured rate is no measure of it: where few requests come,
of minutes each, hardly any first token falls into the moments in which others wait."""


def _declared_micro(known: ModelState, pools: Mapping[PoolName, PoolFacts]) -> int:
    """Return what the ready replicas of some pools were declared to do."""
    ready = known.fleet.ready
    return sum(round(facts.work_rate * MICRO) * ready.get(pool, 0) for pool, facts in pools.items())


def again(m: Machine, now: InstantNs) -> None:
    """Look at every class that is not served as asked: time alone may bring it back."""
    for model, known in m.state.models.items():
        for slo_class, standing in known.standings.items():
            if standing.level:
                look(m, model, slo_class, standing, now)


def next_look(known: ModelState) -> InstantNs | None:
    """Return when classes are looked at next; None: all are served as asked."""
    if not any(one.level for one in known.standings.values()):
        return None
    return later(known.inflow.at, DurationNs(NS_PER_S))


def keep(m: Machine) -> None:
    """Forget the levels of classes that have no ladder any more: another configuration came."""
    for model, known in m.state.models.items():
        if model not in m.settings.laddered:
            known.inflow.work_ns.clear()
        known.standings = {
            name: one for name, one in known.standings.items() if m.settings.has_ladder(model, name)
        }


def _facts(m: Machine, asked: Asked, spec: LadderSpec) -> LadderFacts:
    request, less = asked.request, smaller(m, asked.spec, asked.tenant, asked.slo_class, spec)
    cap = None
    if less is not None:
        budget = m.settings.config.output_budget
        cap = budget.cap(ModelName(less.name), asked.slo_class, request.max_output)
    return LadderFacts(
        tenant=asked.tenant.degrade,
        caller=request.lowest,
        model=asked.model,
        smaller=less is not None,
        input_tokens=request.input_tokens,
        optional=request.optional,
        max_output=request.max_output,
        output_p90=asked.demand.output_p90,
        smaller_cap=cap,
    )


def smaller(
    m: Machine, asked: ModelSpec, tenant: TenantSpec, slo_class: ClassName, spec: LadderSpec
) -> ModelSpec | None:
    """Return the smaller model than `asked`, if it is served for the class and its tenant may use it."""
    model = None if spec.model is None else m.settings.models.get(spec.model)
    if model is None or model is asked:
        return None
    if m.settings.pool_for(ModelName(model.name), slo_class) is None:
        return None
    return model if tenant.may_ask(model, model.name) else None


def _in_form(m: Machine, asked: Asked, form: Form) -> Asked:
    """Return a request as it would be served at a level."""
    request = as_served(asked.request, form)
    facts = asked.facts
    if form.model != asked.model:
        found = m.settings.pool_for(form.model, asked.slo_class)
        assert found is not None, "a form has a model that is served"
        facts = found
    return Asked(m, request, asked.slo_class, facts, form.lesser())


def as_served(request: Request, form: Form) -> Request:
    """Return a request in a lesser form; whoever has the prompt has to make it so."""
    changed = replace(request.lessened(form.kept), max_output=form.max_output)
    return replace(changed, model=form.model) if form.level == LEVEL_MAX else changed


def _works(asked: Asked, steps: Sequence[Form]) -> tuple[int, ...]:
    """Return the work of a request at each level for the pools of the model that was asked for."""
    profile, p50 = asked.facts.spec.profile, asked.demand.output_p50
    found = []
    for level in range(len(NOTHING)):
        form = steps[at_level(steps, level)]
        output = p50 if form.max_output is None else min(p50, form.max_output)
        work = profile.work_ns(form.input_tokens, 0, output) * asked.request.fan_out
        found.append(work if form.model == asked.model else 0)
    return tuple(found)


def _count(
    m: Machine, asked: Asked, decision: Decision, works: Sequence[int], now: InstantNs
) -> None:
    """Count the work that came in, whatever was decided, unless it could never be done.

    What can wait is none of it: it takes what is left over.
    """
    lend, due = m.settings.order.lend_after_ns, asked.ttft_ns
    if asked.class_spec.degrade is None and lend is not None and (due is None or due > lend):
        return
    if isinstance(decision, Reject) and decision.reason not in OF_THE_MOMENT:
        return
    inflow = asked.known.inflow
    inflow.forget(now)
    inflow.add(asked.slo_class, works)
