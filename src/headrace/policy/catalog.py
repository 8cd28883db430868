"""Configuration struct to policy: the one place that knows which policies exist.

The unions are the registry; an unknown kind is refused when the configuration is read. The same
canonical bytes that start a journal rebuild every policy, so a decision is recomputed by the code
that made it.
"""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.model.decision import Gate
from headrace.model.deployment import (
    DEFAULT_CLASSES,
    ClassSpec,
    LaneSpec,
    ModelSpec,
    Name,
    OrganisationSpec,
    PoolSpec,
    TenantSpec,
)
from headrace.model.ladder import Pressure
from headrace.model.slo import Sla, Slo
from headrace.policy.admission.gates import GateMode, Gates, Mode, Modes
from headrace.policy.degrade.level import Degrading
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.ordering.orders import Fifo, Ordering, TenantFirst
from headrace.policy.predict.ceiling import OutputBudget
from headrace.policy.predict.input import InputPrediction
from headrace.policy.predict.output import OutputPrediction
from headrace.policy.routing.seconds import UNBOUNDED, Seconds
from headrace.units import NS_PER_MS, DurationNs, ms


class Window(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a replica is handed before it shows a first token, and what is held back of it."""

    prefill_ms: Annotated[float, Meta(gt=0, le=60_000)] = 150.0
    """Predicted prefill that may wait in a replica, behind the prompt at its front. 150: two steps, or a
    report period plus a round trip; more would sink the order into the engine's own queue."""
    kv_reserve: Annotated[float, Meta(ge=0, le=0.5)] = 0.05
    """Share of the KV pool kept for growth beyond the predicted p90."""
    route_ms: Annotated[float, Meta(ge=0, le=1_000)] = 2.0
    """p99 of what the gateway itself adds before dispatch."""
    unbounded: bool = False
    """Whether everything is sent at once, whatever a replica holds already: no queue here, all of it
    in the engines. False: for observing alone, where nothing is to be held back."""

    step_tokens: Annotated[
        dict[Name, Annotated[int, Meta(ge=1, le=1_000_000)] | None], Meta(max_length=10_000)
    ] = {}
    """By pool of emulated engines, tokens of one of their steps, prompts' and decodes' together, instead of
    the profile's `token_budget`; null: the profile's. A real engine has its own, which takes its restart."""

    def stepped(self, pool: PoolSpec) -> PoolSpec:
        """Return a pool as its engines' steps are now."""
        tokens = self.step_tokens.get(pool.name)
        if tokens is None:
            return pool
        return replace(pool, profile=replace(pool.profile, token_budget=tokens))

    def reach_ms(self) -> float:
        """Return the prefill that may be in flight, in ms."""
        return UNBOUNDED / NS_PER_MS if self.unbounded else self.prefill_ms


class Reports(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How replicas tell of themselves."""

    poll_ms: Annotated[float, Meta(gt=0, le=600_000)] = 1_000.0
    """Period of the scrape."""
    stale_ms: Annotated[float, Meta(gt=0, le=3_600_000)] = 5_000.0
    """Age beyond which a report counts as unknown; never below the period."""

    def __post_init__(self) -> None:
        """Refuse a limit that every report would exceed."""
        if self.stale_ms < self.poll_ms:
            raise ValueError(f"stale_ms {self.stale_ms} is below poll_ms {self.poll_ms}")


class PlaneConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the plane decides by. Its canonical bytes are the first event of a journal."""

    models: Annotated[tuple[ModelSpec, ...], Meta(min_length=1, max_length=1_000)]
    pools: Annotated[tuple[PoolSpec, ...], Meta(min_length=1, max_length=10_000)]
    tenants: Annotated[tuple[TenantSpec, ...], Meta(min_length=1, max_length=1_000_000)]
    classes: Annotated[tuple[ClassSpec, ...], Meta(min_length=1, max_length=100)] = DEFAULT_CLASSES
    lanes: Annotated[tuple[LaneSpec, ...], Meta(max_length=16)] = ()
    organisations: Annotated[tuple[OrganisationSpec, ...], Meta(max_length=100_000)] = ()
    slos: tuple[Slo, ...] = ()
    slas: tuple[Sla, ...] = ()
    admission: Gates = Gates()
    degrading: Degrading = Degrading()
    ordering: Ordering = TenantFirst()
    fairness: Vtc = Vtc()
    routing: Seconds = Seconds()
    prediction: OutputPrediction = OutputPrediction()
    input_prediction: InputPrediction = InputPrediction()
    output_budget: OutputBudget = OutputBudget()
    window: Window = Window()
    reports: Reports = Reports()

    def stale_after_ns(self) -> DurationNs:
        """Return the age beyond which a report is unknown."""
        return ms(self.reports.stale_ms)


def class_level(config: PlaneConfig, seen: Pressure) -> int:
    """Return the level of a class from now on: as asked, where the deadline gate refuses nobody."""
    if config.admission.mode_of(Gate.DEADLINE) is Mode.AUDIT:
        return 0
    return config.degrading.level(seen)


def passing(config: PlaneConfig) -> PlaneConfig:
    """Return the configuration with nothing refused or held back that can be served at all.

    Contracts stand: who may ask, for what and how long it may be. Bounds stay declared, so that what
    was met is counted alike.
    """
    return replace(
        config,
        admission=replace(config.admission, mode=GateMode.OBSERVE, modes=Modes()),
        ordering=Fifo(),
        window=replace(config.window, unbounded=True),
    )


_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODER = msgspec.json.Decoder(PlaneConfig)
_DIGEST = 16


POLICY = ("admission", "ordering", "routing", "prediction", "output_budget", "window")
"""Parts of a configuration that say how is decided, not for whom: a running process may change them."""


def canonical(config: PlaneConfig) -> bytes:
    """Return the configuration's canonical bytes: equal configurations, equal bytes."""
    return _ENCODER.encode(config)


def digest(config: PlaneConfig) -> bytes:
    """Return what tells a configuration from any other."""
    return blake2b(canonical(config), digest_size=_DIGEST).digest()


def decode(content: bytes) -> PlaneConfig:
    """Return the configuration of canonical bytes; raises `msgspec.ValidationError`."""
    return _DECODER.decode(content)
