"""What an operator declares: models, pools, classes and tenants.

The fields are the configuration's own names, units included; deciders read them as they stand.
Every default says why.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.budget import WindowSpec
from headrace.model.engine import Usage
from headrace.model.envelope import Envelope
from headrace.model.features import EVERY, Feature
from headrace.model.ids import ClassName, ModelName, PoolName, TenantId
from headrace.model.ladder import LadderSpec, Level
from headrace.model.price import PriceSpec
from headrace.model.profile import Profile
from headrace.model.scaling_spec import Scaling
from headrace.model.slo import Bounds
from headrace.units import REQUEST_TOKENS_MAX, DurationNs, MicroUsd, Tokens, ms

END = r"$(?!\n)"
"""Ends the pattern of a setting: `$` alone would let a line break follow, and a schema knows no `\\Z`."""
Name = Annotated[
    str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*" + END)
]
Millis = Annotated[float, Meta(gt=0, le=86_400_000)]
Weight = Annotated[int, Meta(ge=1, le=1_000)]
Limit = Annotated[int, Meta(ge=1, le=10**15)]
Part = Annotated[float, Meta(ge=0, le=1)]


class ModelSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that callers may name."""

    name: Name
    aliases: tuple[Name, ...] = ()
    adapters: Annotated[tuple[Name, ...], Meta(max_length=1_000)] = ()
    """Adapters (LoRA) that its engines have loaded, by the names they know them under: callers name one
    as the model."""
    revision: str = "1"
    """Which weights; part of pool selection, prediction and every answer's headers."""
    quantization: str = ""
    context_limit: Annotated[int, Meta(ge=16, le=REQUEST_TOKENS_MAX)] = 131_072
    """Input plus output tokens. 131,072: Llama 3.1's."""
    output_limit: Annotated[int, Meta(ge=1, le=REQUEST_TOKENS_MAX)] = 16_384
    """Output tokens one answer may have, and what a caller that names no limit gets at most."""
    fan_out_limit: Annotated[int, Meta(ge=1, le=64)] = 1
    """Parallel answers (n). 1: one reservation is one answer."""
    features: tuple[Feature, ...] = EVERY
    """What it does beside text: streaming, tools, json, schema, logprobs, best_of, priority. A request
    for another of these is refused. All: engines judge for themselves."""
    price: PriceSpec | None = None
    """What its tokens take of a tenant's budgets in money. None: nothing."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that callers may call it."""
        return (self.name, *self.aliases, *self.adapters)

    def cost(self, given: int, cached: int, output: int, answers: int = 1) -> MicroUsd:
        """Return what so many answers cost a tenant, prompt included in each."""
        if self.price is None:
            return MicroUsd(0)
        usage = Usage(
            input_tokens=Tokens(given), cached_tokens=Tokens(cached), output_tokens=Tokens(output)
        )
        return MicroUsd(self.price.micro_usd(usage) * answers)


class PoolSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool of equal replicas of one model revision."""

    name: Name
    model: Name
    profile: Profile
    """Hardware profile: step times, KV pool and limits."""
    revision: str = "1"
    role: Annotated[str, Meta(pattern="^(both|prefill|decode)" + END)] = "both"
    classes: tuple[Name, ...] = ()
    """Classes it serves; empty serves all."""
    region: str = ""
    zone: str = ""
    replicas: Annotated[int, Meta(ge=0, le=1_024)] = 1
    """Emulated replicas to start."""
    scaling: Scaling | None = None
    """How it grows and shrinks. None: its number of replicas is fixed."""
    work_rate: Annotated[float, Meta(gt=0, le=10)] | None = None
    """Work-seconds per second that one replica completes at its SLO, until measured live. None: what its
    envelopes say; 0.7 where they say nothing, since chunked prefill spends about a third of a step on
    fixed cost that the work unit does not count."""
    envelopes: Annotated[tuple[Envelope, ...], Meta(max_length=64)] = ()
    """What one replica was measured to carry, by mix: a file that `headrace capacity --json` wrote, or what
    stands in it."""
    mix: Annotated[str, Meta(max_length=256)] = ""
    """Which of the measured mixes it serves. Empty: any, so that the lowest counts."""


class Defer(StrEnum):
    """Which requests of a class are put aside and answered later."""

    NEVER = "never"
    ASKED = "asked"
    """Those that say `Prefer: respond-async`."""
    ALWAYS = "always"


class ClassSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service class: what it promises and how it queues (SLO-3)."""

    name: Name
    ttft_ms: Millis | None = 2_000.0
    """First token. 2,000: the default interactive objective. None: judged by completion alone."""
    itl_ms: Millis = 80.0
    """Each inter-token gap, pooled over gaps. 80: faster than reading."""
    tpot_ms: Millis | None = None
    """Mean time per token of one answer. None: as itl_ms."""
    stall_ms: Millis | None = None
    """Largest single gap of an answer."""
    completion_ms: Millis | None = None
    """Whole answer; a class with neither this nor ttft_ms has no deadline."""
    target: Annotated[float, Meta(gt=0, le=1)] = 0.99
    """Share that must hold the bounds in the default objectives."""
    weight: Weight = 1
    """Its part of what is served, beside the other classes that have urgent work waiting."""
    lane: Name | None = None
    """The lane it belongs to; None: it stands beside the lanes."""
    minimum: Part = 0.0
    """Share of what is served that it gets before weights are asked. 0: no such right."""
    maximum: Part = 1.0
    """Share of it beyond which others go first. 1: no such limit."""
    starve_ms: Annotated[float, Meta(gt=0, le=86_400_000)] | None = 600_000.0
    """Longest that a request lets others pass, where the class does not end hopeless ones: from then on
    its queue has its turn by its share, hopeless or not. 600,000: ten minutes; None: for ever."""
    tenant_queue: Limit = 1_000
    """Requests one tenant may have waiting in this class."""
    queue: Limit = 20_000
    """Requests of all tenants that may wait in this class; beyond, the tenant furthest over its
    share loses its last one."""
    expire: bool = True
    """Whether a request that can no longer meet its first-token bound is ended with 504."""

    early_200: bool = False
    """Whether a stream's head goes out before admission, with comments to keep the connection
    until its first token. False: a refusal keeps its status; with it, it is an event (ADM-5)."""
    defer: Defer = Defer.NEVER
    """Whether its requests may wait in the durable queue, where there is one (`jobs`): `never`, `asked`
    (by `Prefer: respond-async`) or `always`. Never: who names no class wants an answer now."""
    degrade: LadderSpec | None = None
    """What its requests may be given instead of a refusal, if their tenant agreed. None: nothing."""

    def bounds(self, ttft_ns: DurationNs | None, gap_ns: DurationNs | None) -> Bounds:
        """Return what one request is promised: the caller may tighten, never widen (FAIR-4)."""
        itl = ms(self.itl_ms)
        gap = itl if gap_ns is None else min(itl, gap_ns)
        own = None if self.ttft_ms is None else ms(self.ttft_ms)
        # A class without a first-token bound keeps none: with one it would no longer lend its turn,
        # and its caller would have raised its class.
        ttft = own if own is None or ttft_ns is None else min(own, ttft_ns)
        tpot = gap if self.tpot_ms is None else min(ms(self.tpot_ms), gap_ns or ms(self.tpot_ms))
        return Bounds(
            ttft_ns=ttft,
            gap_ns=gap,
            tpot_ns=tpot,
            stall_ns=None if self.stall_ms is None else ms(self.stall_ms),
            e2e_ns=None if self.completion_ms is None else ms(self.completion_ms),
        )


class LaneSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traffic of its own kind, as an operator's or a safety check's, apart from everybody's (FAIR-4).

    Classes join it by their `lane`. Only tenants that name these in their `classes` may use them.
    """

    name: Name
    weight: Weight = 1
    minimum: Part = 0.0
    """Share of what is served that it gets before weights are asked: keep it small, and it is there
    at once whoever else has waited."""
    maximum: Part = 1.0
    """Share of it beyond which others go first."""


class OrganisationSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several tenants that share one part between them."""

    name: Name
    weight: Weight = 1
    minimum: Part = 0.0
    """Share of its class that it gets before weights are asked."""
    maximum: Part = 1.0
    """Share of its class beyond which others go first."""


class TenantSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who pays, with what share and limits. LiteLLM's names where it has one."""

    name: Name
    weight: Weight = 1
    organisation: Name | None = None
    """Whose part it has its own of; None: it stands beside the organisations."""
    minimum: Part = 0.0
    """Share of its organisation's, or else its class's, that it gets before weights are asked."""
    maximum: Part = 1.0
    """Share of it beyond which others go first."""
    by_user: bool = False
    """Whether its users have equal parts of its own, as `x-headrace-user`, `safety_identifier` or `user`
    tells them apart. False: it is one queue."""
    models: tuple[Name, ...] = ()
    """Models it may use, with their adapters, or single adapters; empty allows all."""
    classes: tuple[Name, ...] = ()
    """Classes it may use, the first being its default; empty allows all that belong to no lane."""
    tpm_limit: Limit | None = None
    """Tokens per minute, input plus output, reserved on admission and settled on usage."""
    rpm_limit: Limit | None = None
    """Requests per minute."""
    max_parallel_requests: Limit | None = None
    """Requests queued or running at once; one that asks for several answers counts as so many."""
    max_parallel_sessions: Limit | None = None
    """Sessions (`x-session-id`) with requests queued or running at once; requests without one are of
    one session together."""
    budgets: Annotated[tuple[WindowSpec, ...], Meta(max_length=16)] = ()
    """What it may use up in a minute, an hour, a day or a month."""
    degrade: Level = 0
    """The lowest level of its classes' ladders that it agreed to. 0: as asked, or not at all (DEG-2)."""

    def may_ask(self, model: ModelSpec, name: str) -> bool:
        """Return whether it may use a model, or the adapter of it that `name` is."""
        if not self.models or model.name in self.models:
            return True
        return name in model.adapters and name in self.models

    def may_use(self, spec: ClassSpec) -> bool:
        """Return whether it is let into a class: one of a lane must be named (FAIR-4)."""
        return spec.name in self.classes if self.classes else spec.lane is None


DEFAULT_CLASSES: tuple[ClassSpec, ...] = (
    ClassSpec(name="interactive", weight=4),
    ClassSpec(name="long_reasoning", ttft_ms=10_000.0, completion_ms=600_000.0, weight=2),
    ClassSpec(
        name="batch",
        ttft_ms=None,
        itl_ms=1_000.0,
        completion_ms=3_600_000.0,
        expire=False,
        starve_ms=1_800_000.0,
        defer=Defer.ASKED,
    ),
    ClassSpec(name="best_effort", ttft_ms=None, itl_ms=2_000.0, expire=False, defer=Defer.ASKED),
)
"""The classes that ship (SLO-3); users define more, or others, by name."""

__all__ = [
    "DEFAULT_CLASSES",
    "ClassName",
    "ClassSpec",
    "ModelName",
    "ModelSpec",
    "PoolName",
    "PoolSpec",
    "TenantId",
    "TenantSpec",
]
