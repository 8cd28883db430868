"""INV-13: nobody is given less than was agreed to, and of no prompt is anything left out that must stay.

Recomputed from the declared ladder, the tenant's contract and the row of the trace.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from msgspec import Struct

from headrace.model.decision import Degrade, Reason
from headrace.model.effect import Concluded, Decided, Dispatch, Effect
from headrace.model.evidence import EntryRecord
from headrace.model.ids import RequestId
from headrace.sim.books import hold
from headrace.sim.world import World


class Given(Struct, frozen=True, kw_only=True):
    """In what form a request was let in."""

    level: int
    prompt: int
    limit: int | None
    model: str


class Consent:
    """Looks on at lesser forms from decision to end."""

    def __init__(self) -> None:
        """Start having seen nothing."""
        self._given: dict[RequestId, Given] = {}

    def step(self, world: World, effects: Sequence[Effect]) -> None:
        """Check the effects of one step."""
        for effect in effects:
            match effect:
                case Decided(EntryRecord(decision=Degrade() as decision) as record):
                    self._decided(world, record, decision)
                case Dispatch():
                    self._sent(world, effect)
                case Concluded(admitted=True):
                    self._ended(world, effect)
                case _:
                    pass

    def _decided(self, world: World, record: EntryRecord, decision: Degrade) -> None:
        deployment, form = world.scenario.deployment, decision.lesser
        row, who = world.rows[record.request_id - 1], f"{record.request_id} at level {form.level}"
        spec = next(c.degrade for c in deployment.classes if c.name == record.tenant_class)
        tenant = next(t for t in deployment.tenants if t.name == record.tenant)
        hold(world, "INV-13", spec is not None, f"{who}: its class has no ladder")
        assert spec is not None
        lowest = min(spec.level, tenant.degrade, row.lowest)
        hold(world, "INV-13", 1 <= form.level <= lowest, f"{who}: agreed to {lowest}")
        asked = row.model or deployment.models[0].name
        names = next(m.names for m in deployment.models if asked in m.names)
        mine = spec.model == form.model if form.level > 2 else form.model in names  # noqa: PLR2004
        hold(world, "INV-13", mine, f"{who}: by {form.model}")
        least = spec.keep if form.level > 1 else len(row.optional)
        kept = len(row.optional) if form.kept is None else form.kept
        hold(world, "INV-13", kept >= min(least, len(row.optional)), f"{who}: {kept} parts kept")
        if row.max_tokens is not None:
            cap = ceil(Fraction(str(spec.output_part)) * row.max_tokens)
            hold(world, "INV-13", decision.max_output == cap, f"{who}: {decision.max_output=}")
        self._given[record.request_id] = Given(
            level=form.level,
            prompt=row.input_tokens - sum(row.optional[kept:]),
            limit=decision.max_output,
            model=form.model,
        )

    def _sent(self, world: World, effect: Dispatch) -> None:
        given = self._given.get(effect.request)
        level = 0 if effect.lesser is None else effect.lesser.level
        decided = 0 if given is None else given.level
        hold(world, "INV-13", level == decided, f"{effect.request} sent at {level}, not {decided}")
        if given is not None and given.limit is not None:
            short = effect.output_limit <= given.limit
            hold(world, "INV-13", short, f"{effect.request}: {effect.output_limit=}")

    def _ended(self, world: World, ended: Concluded) -> None:
        given, row = self._given.get(ended.request), world.rows[ended.request - 1]
        if ended.reason is Reason.RESTARTED:  # it may have ended before, in the life that is over
            return
        level = 0 if given is None else given.level
        hold(world, "INV-13", ended.level == level, f"{ended.request} ended at {ended.level}")
        if ended.usage is None:
            return
        prompt = row.input_tokens if given is None else given.prompt
        had: int = ended.usage.input_tokens
        hold(world, "INV-13", had == prompt, f"{ended.request} was sent {had} of {prompt} tokens")
