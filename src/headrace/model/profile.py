"""How long does one engine step take, and what does a request cost in GPU time?

A `Profile` is one deployment of a model on one kind of replica: its KV pool, its limits and two
fitted step formulas, or a table of measured steps. They are given in ms, turned once into whole
picoseconds (`StepCosts`), and from there on all arithmetic is exact. Knows no requests and no clock; predictions of output length
come from elsewhere.
"""

from functools import cached_property
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.model.hardware import hardware_of
from headrace.model.table import StepTable, TableFit, in_ps
from headrace.units import (
    MICRO,
    NS_PER_S,
    PS_PER_NS,
    DurationNs,
    Ps,
    Service,
    Tokens,
    WorkNs,
    ps_from_ms,
    ps_to_ns,
)

_NotNegative = Annotated[float, Meta(ge=0)]
_Positive = Annotated[float, Meta(gt=0)]
_Count = Annotated[Tokens, Meta(ge=1)]
WORK_MAX_NS = WorkNs(24 * 60 * 60 * NS_PER_S)
"""Most work that one request is put down for. A day of a GPU is beyond any, and sums of it stay in 64
bits for 100,000 requests whose engine lies."""


class DecodeFit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of decodes only, in ms: a + c*D + d*KV for D decodes of KV tokens of context."""

    a_ms: _Positive
    """The step itself: reading the weights."""
    c_ms: _NotNegative
    """Each decode."""
    d_ms: _NotNegative
    """Each token of context that a decode reads."""


class MixedFit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step with prefill, in ms: a + b*max(T - knee, 0) + c*D + d*KV + e*A.

    T: tokens of the step, D: decodes among them, KV: their context, A: sum of prefill tokens times
    the mean context they see, (end^2 - start^2)/2 for each chunk.
    """

    a_ms: _Positive
    knee: Annotated[int, Meta(ge=0)]
    """Tokens that ride free on the reading of the weights."""
    b_ms: _Positive
    c_ms: _NotNegative
    d_ms: _NotNegative
    e_ms: _NotNegative


class Calibration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernel time to step time as served: offset + scale*x, for what the kernels leave out."""

    offset_ms: float = 0.0
    scale: _Positive = 1.0


class StepCosts(Struct, frozen=True, kw_only=True, gc=False):
    """The two step formulas in whole picoseconds; one set for each engine speed.

    With a `table`, steps follow it, and the formulas stand in for it where one rate is asked for.
    """

    decode_a: Ps
    decode_c: Ps
    decode_d: Ps
    mixed_a: Ps
    knee: int
    mixed_b: Ps
    mixed_c: Ps
    mixed_d: Ps
    mixed_half_e: Ps
    """Half of e, so that e*A is `mixed_half_e * span` without a fraction."""
    table: StepTable | None = None

    def step_ps(self, decodes: int, context: int, prefill_tokens: int, span: int) -> Ps:
        """Return the time of one step in ps (algorithms 2.1).

        `context` is the total context of the decodes, `span` the sum of end^2 - start^2 over the
        prefill chunks. Decodes only: a + c*D + d*KV. Any prefill: the mixed formula.
        """
        if not prefill_tokens and self.table is None:
            return Ps(self.decode_a + self.decode_c * decodes + self.decode_d * context)
        step = self.mixed_ps(decodes, context, decodes + prefill_tokens)
        return Ps(step + self.mixed_half_e * span)

    def mixed_ps(self, decodes: int, context: int, tokens: int) -> Ps:
        """Return the time in ps of a step of `tokens`, `decodes` among them, that has a prefill.

        What the prefill's attention takes is left out.
        """
        if self.table is None:
            excess = tokens - self.knee
            line = self.mixed_a + self.mixed_b * excess if excess > 0 else self.mixed_a
        else:
            line = self.table.step_ps(tokens, decodes=decodes > 0)
        return Ps(line + self.mixed_c * decodes + self.mixed_d * context)

    def scaled(self, ppm: int) -> "StepCosts":
        """Return the costs of an engine that takes `ppm` millionths of the time.

        Each coefficient is scaled and rounded down on its own: a jump over many steps and the steps
        one by one then use the same integers and agree to the picosecond.
        """
        return StepCosts(
            decode_a=Ps(self.decode_a * ppm // MICRO),
            decode_c=Ps(self.decode_c * ppm // MICRO),
            decode_d=Ps(self.decode_d * ppm // MICRO),
            mixed_a=Ps(self.mixed_a * ppm // MICRO),
            knee=self.knee,
            mixed_b=Ps(self.mixed_b * ppm // MICRO),
            mixed_c=Ps(self.mixed_c * ppm // MICRO),
            mixed_d=Ps(self.mixed_d * ppm // MICRO),
            mixed_half_e=Ps(self.mixed_half_e * ppm // MICRO),
            table=self.table and self.table.scaled(ppm),
        )


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One model on one kind of replica: sizes, limits and step times."""

    name: Annotated[str, Meta(min_length=1)]
    source: Annotated[str, Meta(min_length=1)]
    """Where the numbers come from and how far they are off."""
    hardware: str
    """What one replica runs on, as `hardware_of` reads it."""
    model: str
    kv_bytes_per_token: Annotated[int, Meta(ge=1)]
    kv_capacity_tokens: _Count
    """Tokens the KV pool holds."""
    max_running: Annotated[int, Meta(ge=1)] = 256
    """Most requests that hold a slot at once."""
    token_budget: Annotated[int, Meta(ge=1)] = 512
    """Tokens of a step. 512 holds a tight ITL; vLLM's own default of 2048 is for throughput."""
    reference_batch: Annotated[int, Meta(ge=1)]
    """B*, at which work is counted: the largest batch that fits the pool and `max_running` and
    whose step at the reference context holds 80 ms."""
    reference_context: _Count = Tokens(1024)
    decode: DecodeFit | None = None
    mixed: MixedFit | None = None
    table: TableFit | None = None
    """In place of the two fits."""
    calibration: Calibration | None = None
    """None: step times are the fitted kernel times."""

    def __post_init__(self) -> None:
        """Refuse what no engine could run."""
        hardware_of(self.hardware)
        if self.reference_batch > self.max_running:
            msg = f"reference_batch {self.reference_batch} is above max_running {self.max_running}"
            raise ValueError(msg)
        if self.reference_batch * self.reference_context > self.kv_capacity_tokens:
            msg = "reference_batch at reference_context does not fit kv_capacity_tokens"
            raise ValueError(msg)
        fits = {self.decode is not None, self.mixed is not None, self.table is None}
        if len(fits) > 1:
            raise ValueError("give `decode` and `mixed`, or `table` alone")
        costs = self.costs
        if min(costs.decode_a, costs.mixed_a) <= 0:
            raise ValueError("a step must take time: calibration leaves none of one")
        if costs.mixed_b <= 0:
            raise ValueError("a prompt token must take time in a step of the token budget")

    @cached_property
    def costs(self) -> StepCosts:
        """The coefficients in whole picoseconds, calibration applied, rounded once."""
        if self.table is not None:
            return self._table_costs(self.table)
        decode, mixed = self.decode, self.mixed
        assert decode is not None, self.name
        assert mixed is not None, self.name
        return StepCosts(
            decode_a=self._level(decode.a_ms),
            decode_c=self._added(decode.c_ms),
            decode_d=self._added(decode.d_ms),
            mixed_a=self._level(mixed.a_ms),
            knee=mixed.knee,
            mixed_b=self._added(mixed.b_ms),
            mixed_c=self._added(mixed.c_ms),
            mixed_d=self._added(mixed.d_ms),
            mixed_half_e=self._added(mixed.e_ms / 2),
        )

    def _table_costs(self, fit: TableFit) -> StepCosts:
        """Return a table's costs, and the two lines nearest to it where an engine works.

        Both rise from the first point: decodes alone up to the reference batch, whose step is the
        table's own; prompt tokens up to the token budget, so that what a step takes anyway is not
        counted again for each prompt.
        """
        table = in_ps(fit, self._level, self._added)
        first, level = table.tokens[0], table.levels[0]
        batch, budget = self.reference_batch, max(self.token_budget, table.tokens[1])
        c, d = self._added(fit.c_ms), self._added(fit.d_ms)
        rise = table.step_ps(batch, decodes=False) - level
        return StepCosts(
            decode_a=Ps(level + table.decodes),
            decode_c=Ps(c + rise // batch),
            decode_d=d,
            mixed_a=level,
            knee=first,
            mixed_b=Ps((table.step_ps(budget, decodes=False) - level) // (budget - first)),
            mixed_c=c,
            mixed_d=d,
            mixed_half_e=self._added(fit.e_ms / 2),
            table=table,
        )

    def _level(self, step_ms: float) -> Ps:
        """Return the time of a whole step as it is served."""
        cal = self.calibration or Calibration()
        return ps_from_ms(cal.offset_ms + cal.scale * step_ms)

    def _added(self, part_ms: float) -> Ps:
        """Return what something adds to a step as it is served."""
        cal = self.calibration or Calibration()
        return ps_from_ms(cal.scale * part_ms)

    def paced(self, factor: float) -> "Profile":
        """Return the same replica when every step takes `factor` times as long."""
        cal = self.calibration or Calibration()
        paced = Calibration(offset_ms=cal.offset_ms * factor, scale=cal.scale * factor)
        return replace(self, calibration=paced)

    @cached_property
    def reference_step_ns(self) -> DurationNs:
        """The ITL of a full reference batch at the reference context, in ns."""
        batch = self.reference_batch
        return self.decode_step_ns(batch, batch * self.reference_context)

    def step_ps(self, decodes: int, context: int, prefill_tokens: int, span: int) -> Ps:
        """Return the time of one step in ps; see `StepCosts.step_ps`."""
        return self.costs.step_ps(decodes, context, prefill_tokens, span)

    def prompt_token_ns(self) -> DurationNs:
        """Return what one prompt token takes where half a reference batch decodes beside it, in ns."""
        decodes = self.reference_batch // 2
        tokens = max(1, self.token_budget - decodes)
        return DurationNs(self.full_step_ns(decodes, decodes * self.reference_context) // tokens)

    def full_step_ns(self, decodes: int, context: int) -> DurationNs:
        """Return the time of a step that prefills with all of its budget that decodes leave, ns.

        At least one prompt token; the context it sees is not counted.
        """
        tokens = self.token_budget if self.token_budget > decodes else decodes + 1
        return DurationNs(self.costs.mixed_ps(decodes, context, tokens) // PS_PER_NS)

    def decode_step_ns(self, decodes: int, context: int) -> DurationNs:
        """Return the ITL of `decodes` streams that hold `context` tokens together, in ns."""
        return DurationNs(ps_to_ns(self.costs.step_ps(decodes, context, 0, 0)))

    def work_ns(self, uncached: int, cached: int, output: int, batch: int | None = None) -> WorkNs:
        """Return the GPU time of one request as its share of a batch of B* (design 3), in ns.

        b*uncached + e*A + output*(a/B* + c + d*ctx): b, e from the mixed fit, a, c, d from the
        decode fit, A = ((cached + uncached)^2 - cached^2)/2, ctx = input + output/2.
        Of a table, the lines nearest to it. `batch` replaces B*. Rounded down once; at most `WORK_MAX_NS`.
        """
        costs, size = self.costs, batch or self.reference_batch
        prompt = cached + uncached
        prefill = uncached * (costs.mixed_b + costs.mixed_half_e * (prompt + cached))
        twice_context = output * (2 * prompt + output)
        doubled = 2 * (prefill + costs.decode_c * output) + costs.decode_d * twice_context
        total = size * doubled + 2 * costs.decode_a * output
        return WorkNs(min(WORK_MAX_NS, total // (2 * size * PS_PER_NS)))

    def token_ns(self, context: int) -> WorkNs:
        """Return the work of one decoded token that sees `context` tokens: a/B* + c + d*ctx, ns."""
        costs, size = self.costs, self.reference_batch
        total = costs.decode_a + size * (costs.decode_c + costs.decode_d * context)
        return WorkNs(total // (size * PS_PER_NS))

    def prefill_ns(
        self, uncached: int, cached: int, decodes: int, context: int, budget: int
    ) -> DurationNs:
        """Return how long one prompt, alone in its prefill, takes beside `decodes` streams, in ns.

        Steps of q = max(1, budget - decodes) prompt tokens each and a last one of the rest, while
        the streams' `context` grows by `decodes` a step: exactly the engine's own steps, summed in
        closed form. Nothing to compute takes no time.
        """
        costs = self.costs
        chunk = budget - decodes if budget > decodes else 1
        full, rest = divmod(uncached, chunk)
        grown = costs.mixed_d * decodes  # what each step's tokens add to every later one
        total = costs.mixed_half_e * uncached * (uncached + 2 * cached)
        if full:
            each = costs.mixed_ps(decodes, context, decodes + chunk)
            total += full * each + grown * (full * (full - 1) // 2)
        if rest:
            total += costs.mixed_ps(decodes, context, decodes + rest) + full * grown
        return DurationNs(total // PS_PER_NS)

    def held_token_ns(self, uncached: int, cached: int, output: int) -> int:
        """Return the context of one request over its expected residency, in token-ns.

        The integral of the tokens held, in closed form: in prefill they grow from `cached` to the
        prompt, by steps full of it and the attention that each token pays; in decode by one a step
        of the reference batch. Times `kv_bytes_per_token` it is KV byte-seconds (DEM-1).
        """
        prompt = cached + uncached
        pace = self.full_step_ns(0, 0) * PS_PER_NS // self.token_budget
        prefill = 3 * pace * uncached * (uncached + 2 * cached)
        prefill += 4 * self.costs.mixed_half_e * (prompt**3 - cached**3)
        step = self.reference_step_ns * PS_PER_NS
        return (prefill + 3 * step * output * (2 * prompt + output)) // (6 * PS_PER_NS)

    def service_weights(self) -> tuple[Service, Service]:
        """Return what one input and one output token weigh in a tenant's counter (FAIR-1).

        In millionths of an input token. Output: (a/B* + c + d*ctx)/b at the reference batch and
        context, rounded down.
        """
        costs, batch = self.costs, self.reference_batch
        step = costs.step_ps(batch, batch * self.reference_context, 0, 0)
        return Service(MICRO), Service(MICRO * step // (batch * costs.mixed_b))
