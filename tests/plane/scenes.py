"""Small planes for tests: one profile, a configuration, and a driver that keeps time and ids."""

from itertools import count
from typing import Any

from msgspec.structs import replace

from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Concluded, Decided, Dispatch, Effect, Fail, Refuse
from headrace.model.engine import Snapshot, Usage
from headrace.model.event import (
    CallerLeft,
    ConfigChanged,
    Ended,
    Event,
    FirstToken,
    ProgressTick,
    ReplicaDown,
    ReplicaDraining,
    ReplicaForgot,
    ReplicaReported,
    ReplicaUp,
    RequestArrived,
    Restarted,
    ShutDown,
)
from headrace.model.evidence import EntryRecord, RouteRecord
from headrace.model.ids import (
    AttemptId,
    ClassName,
    Incarnation,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.paths import Path
from headrace.model.price import PriceSpec
from headrace.model.profile import DecodeFit, MixedFit, Profile
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.plane.state import Live, ModelState
from headrace.policy.catalog import PlaneConfig, canonical
from headrace.policy.fairness.costs import (
    Cost,
    KvCost,
    MixCost,
    MoneyCost,
    RequestCost,
    TokenCost,
    WorkCost,
)
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, InstantNs, Tokens

H100 = Profile(
    name="h100-8b-tp1",
    source="test",
    hardware="H100",
    model="llama-3.1-8b",
    kv_bytes_per_token=131_072,
    kv_capacity_tokens=Tokens(430_000),
    reference_batch=256,
    decode=DecodeFit(a_ms=6.06, c_ms=0.0079, d_ms=4.32e-5),
    mixed=MixedFit(a_ms=6.15, knee=115, b_ms=0.0143, c_ms=0.0012, d_ms=4.25e-5, e_ms=2.19e-6),
)
MODEL = ModelName("m")
S = NS_PER_S
MS = NS_PER_MS
COSTS: dict[str, Cost] = {
    "request": RequestCost(),
    "tokens": TokenCost(),
    "alike": TokenCost(input_weight=1, output_weight=1, cached_weight=1),
    "work": WorkCost(),
    "kv": KvCost(),
    "money": MoneyCost(as_of="2025-01", price=PriceSpec(input=0.5, cached=0.05, output=1.5)),
    "mix": MixCost(prefill_weight=2, decode_weight=0.5),
}
"""One of each kind, and weights that are not the default ones."""


def config(**changes: Any) -> PlaneConfig:
    """Return a configuration of one model, one pool and three tenants, changed as told."""
    given: dict[str, Any] = {
        "models": (ModelSpec(name="m", aliases=("alias",)),),
        "pools": (PoolSpec(name="p", model="m", profile=H100),),
        "tenants": (TenantSpec(name="a"), TenantSpec(name="b"), TenantSpec(name="c")),
    }
    return PlaneConfig(**(given | changes))


def small(capacity: int, running: int = 256) -> Profile:
    """Return a profile with a small KV pool."""
    return replace(
        H100,
        kv_capacity_tokens=Tokens(capacity),
        max_running=running,
        reference_batch=max(1, min(running, capacity // 1_024)),
    )


class Driver:
    """A plane with a clock and fresh ids; every call returns the effects."""

    def __init__(self, settings: PlaneConfig | None = None, *, replicas: int = 1) -> None:
        self.plane = Plane()
        self.now = InstantNs(0)
        self.ids = count(1)
        self.incarnations = count(1)
        self.epochs = count(1)
        self.seen: list[Effect] = []
        self.configure(settings or config())
        for nth in range(replicas):
            self.up(f"r{nth}")

    def tell(self, event: Event) -> list[Effect]:
        effects = self.plane.handle(event, now=self.now)
        self.seen += effects
        return effects

    def wait(self, ns: int) -> None:
        """Let time pass; due timers fire at their instants."""
        until = InstantNs(self.now + ns)
        while (when := self.plane.next_timer()) is not None and when <= until:
            self.now = max(self.now, when)
            self.seen += self.plane.handle_timer(now=self.now)
        self.now = until

    def configure(self, settings: PlaneConfig, revision: int = 1) -> list[Effect]:
        return self.tell(ConfigChanged(revision=revision, config=canonical(settings)))

    def up(self, name: str, pool: str = "p", incarnation: int | None = None) -> Incarnation:
        life = Incarnation(next(self.incarnations) if incarnation is None else incarnation)
        self.tell(ReplicaUp(replica=ReplicaName(name), incarnation=life, pool=PoolName(pool)))
        return life

    def down(
        self, name: str, incarnation: int, *shown: tuple[AttemptId, StreamTiming]
    ) -> list[Effect]:
        return self.tell(
            ReplicaDown(
                replica=ReplicaName(name), incarnation=Incarnation(incarnation), timings=shown
            )
        )

    def drain(self, name: str, incarnation: int) -> list[Effect]:
        return self.tell(
            ReplicaDraining(replica=ReplicaName(name), incarnation=Incarnation(incarnation))
        )

    def arrive(self, tenant: str = "a", tokens: int = 1_000, **more: Any) -> RequestId:
        """Offer a request and return its id."""
        request = RequestId(next(self.ids))
        given: dict[str, Any] = {"model": MODEL, "tenant": TenantId(tenant)} | more
        if "slo_class" in given:
            given["slo_class"] = ClassName(given["slo_class"])
        self.tell(RequestArrived(Request(id=request, input_tokens=Tokens(tokens), **given)))
        return request

    def leave(self, request: int, timing: StreamTiming = NO_STREAM) -> list[Effect]:
        return self.tell(CallerLeft(RequestId(request), timing=timing))

    def shut_down(self, request: int, timing: StreamTiming = NO_STREAM) -> list[Effect]:
        return self.tell(ShutDown(RequestId(request), timing=timing))

    def first(self, attempt: int | None) -> list[Effect]:
        assert attempt is not None
        return self.tell(FirstToken(AttemptId(attempt)))

    def tick(self, *moved: tuple[int | None, int]) -> list[Effect]:
        pairs = tuple((AttemptId(attempt), made) for attempt, made in moved if attempt is not None)
        return self.tell(ProgressTick(pairs))

    def end(
        self,
        attempt: int | None,
        outcome: Outcome = Outcome.SUCCESS,
        *,
        usage: Usage | None = None,
        timing: StreamTiming = NO_STREAM,
    ) -> list[Effect]:
        assert attempt is not None
        return self.tell(
            Ended(attempt=AttemptId(attempt), outcome=outcome, usage=usage, timing=timing)
        )

    def serve(self, request: int, output: int = 10) -> list[Effect]:
        """Let a sent request stream and succeed at once."""
        live = self.live(request)
        self.first(live.attempt)
        return self.end(
            live.attempt, usage=usage(live.request.input_tokens, output), timing=self.timing(output)
        )

    def report(self, name: str, incarnation: int, **more: Any) -> list[Effect]:
        given: dict[str, Any] = {"observed_at": self.now} | more
        snapshot = Snapshot(
            replica=ReplicaName(name), incarnation=Incarnation(incarnation), **given
        )
        return self.tell(ReplicaReported(snapshot))

    def forget(self, name: str, incarnation: int) -> list[Effect]:
        return self.tell(
            ReplicaForgot(replica=ReplicaName(name), incarnation=Incarnation(incarnation))
        )

    def restart(self) -> list[Effect]:
        return self.tell(Restarted(next(self.epochs)))

    def timing(self, tokens: int) -> StreamTiming:
        """Return the timing of a stream that came all at once, now."""
        return StreamTiming(
            tokens=Tokens(tokens),
            first_at=self.now,
            last_at=self.now,
            max_gap_ns=DurationNs(0),
            gaps_over=0,
            gap_counts=(tokens - 1,),
        )

    # What one sees ---------------------------------------------------------------------------

    @property
    def known(self) -> ModelState:
        return self.plane.state.models[MODEL]

    def live(self, request: int) -> Live:
        return self.plane.state.live[RequestId(request)]

    def way(self, tenant: str, slo_class: str | None = None) -> Path:
        """Return where a tenant's queue of a class stands; of its default one if none is named."""
        settings = self.plane.settings
        spec = settings.tenants[TenantId(tenant)]
        name = settings.class_of(None if slo_class is None else ClassName(slo_class), spec)
        return settings.way(spec, name, None)

    def counter(self, tenant: str, slo_class: str | None = None) -> int:
        return self.plane.state.ledger.shares[MODEL].counter(self.way(tenant, slo_class)[-1].key)

    def sent(self) -> list[Dispatch]:
        return [effect for effect in self.seen if isinstance(effect, Dispatch)]

    def places(self) -> list[str]:
        return [effect.replica for effect in self.sent()]

    def refused(self) -> list[Refuse]:
        return [effect for effect in self.seen if isinstance(effect, Refuse)]

    def failed(self) -> list[Fail]:
        return [effect for effect in self.seen if isinstance(effect, Fail)]

    def rows(self) -> list[Concluded]:
        return [effect for effect in self.seen if isinstance(effect, Concluded)]

    def entries(self) -> list[EntryRecord]:
        found = (effect.record for effect in self.seen if isinstance(effect, Decided))
        return [record for record in found if isinstance(record, EntryRecord)]

    def routes(self) -> list[RouteRecord]:
        found = (effect.record for effect in self.seen if isinstance(effect, Decided))
        return [record for record in found if isinstance(record, RouteRecord)]


def usage(given: int, output: int, cached: int = 0) -> Usage:
    """Return an engine's own count."""
    return Usage(
        input_tokens=Tokens(given), cached_tokens=Tokens(cached), output_tokens=Tokens(output)
    )


def patient(**more: Any) -> ClassSpec:
    """Return a class whose requests never expire: what waits keeps waiting."""
    given: dict[str, Any] = {
        "name": "patient",
        "ttft_ms": None,
        "itl_ms": 2_000.0,
        "expire": False,
    }
    return ClassSpec(**(given | more))
