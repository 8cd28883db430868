"""Small scenarios, and runs of them with everything that a test may want to look at."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec import Struct

from headrace.config.profiles import load_profile
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Concluded
from headrace.model.evidence import DecisionRecord
from headrace.model.ids import ClassName, RequestId, TenantId
from headrace.model.profile import Profile
from headrace.plane.journal import Record, frames
from headrace.policy.catalog import PlaneConfig
from headrace.sim.checks import Checker
from headrace.sim.faults import Fault
from headrace.sim.scenario import Scenario, rows_of
from headrace.sim.world import World
from headrace.trace.mix import Lengths, Lognormal, Mix, Poisson, SharedPrefix, TenantSource
from headrace.trace.row import TraceRow
from headrace.units import InstantNs, Tokens, seconds

CHAT = Lognormal(
    input_median=300,
    output_median=60,
    input_sigma=0.9,
    output_sigma=0.8,
    input_max=4_000,
    output_max=400,
)
PROMPT = SharedPrefix(tokens=512, groups=2, chunk_tokens=256)


@cache
def profile() -> Profile:
    """Return a packaged profile, read once."""
    return load_profile("h100-8b-tp1")


def deployment(replicas: int = 2, **settings: Any) -> PlaneConfig:
    """Return two tenants, an interactive and a batch class, one pool."""
    tenants = settings.pop("tenants", (TenantSpec(name="a"), TenantSpec(name="b")))
    return PlaneConfig(
        models=(ModelSpec(name="m"),),
        pools=(PoolSpec(name="pool", model="m", profile=profile(), replicas=replicas),),
        tenants=tenants,
        classes=(
            ClassSpec(name="chat", weight=4),
            ClassSpec(
                name="batch", ttft_ms=None, itl_ms=1_000.0, completion_ms=600_000.0, expire=False
            ),
        ),
        **settings,
    )


def source(
    tenant: str = "a",
    rate: float = 8.0,
    *,
    slo_class: str = "chat",
    lengths: Lengths = CHAT,
    prefix: SharedPrefix | None = PROMPT,
) -> TenantSource:
    """Return a tenant that sends at a constant mean rate."""
    return TenantSource(
        tenant=TenantId(tenant),
        slo_class=ClassName(slo_class),
        arrivals=Poisson(rate),
        lengths=lengths,
        prefix=prefix,
    )


def scenario(
    *sources: TenantSource,
    config: PlaneConfig | None = None,
    rows: int = 200,
    faults: Sequence[Fault] = (),
    **settings: Any,
) -> Scenario:
    """Return a scenario of some sources, by default two tenants of two classes."""
    offered = sources or (source(), source("b", 4.0, slo_class="batch"))
    return Scenario(
        name="small",
        deployment=deployment() if config is None else config,
        mix=Mix(sources=offered, rows=rows),
        faults=tuple(faults),
        **settings,
    )


def burst(count: int, *, at_s: float = 0.0, given: int = 200, made: int = 50) -> list[TraceRow]:
    """Return requests of tenant `a` that come at one instant."""
    return [
        TraceRow(
            at=InstantNs(seconds(at_s)),
            input_tokens=Tokens(given),
            output_tokens=Tokens(made),
            tenant=TenantId("a"),
            slo_class=ClassName("chat"),
        )
        for _ in range(count)
    ]


class Ran(Struct):
    """A finished run."""

    world: World
    segments: list[bytes]
    decisions: list[DecisionRecord]
    checker: Checker

    @property
    def journal(self) -> bytes:
        """All frames in one piece."""
        return b"".join(self.segments)

    def rows(self, **wanted: object) -> list[Concluded]:
        """Return the rows whose fields are as given, in order of request."""
        found = sorted(self.world.concluded.values(), key=lambda row: row.request)
        return [row for row in found if all(getattr(row, k) == v for k, v in wanted.items())]

    def row(self, request: int) -> Concluded:
        """Return one request's row."""
        return self.world.concluded[RequestId(request)]

    def events(self, kind: type) -> list[Any]:
        """Return the journal's events of a type, in order."""
        return [record.event for record in self.records() if isinstance(record.event, kind)]

    def records(self) -> list[Record]:
        """Return the journal's records."""
        return [f for content in self.segments for f in frames(content) if isinstance(f, Record)]


def run(
    one: Scenario,
    seed: int = 0,
    rows: Sequence[TraceRow] | None = None,
    *,
    check: bool = True,
    **settings: Any,
) -> Ran:
    """Run a scenario with its journal kept and every invariant checked."""
    segments: list[bytearray] = []

    def sink(frame: bytes, opens: bool) -> None:
        if opens:
            segments.append(bytearray())
        segments[-1] += frame

    decisions: list[DecisionRecord] = []
    checker = Checker()
    world = World(
        one,
        rows_of(one, seed) if rows is None else rows,
        seed,
        sink=sink,
        decisions=decisions.append,
        after=checker if check else None,
        **settings,
    ).run()
    if check:
        checker.finish(world)
    return Ran(world, [bytes(part) for part in segments], decisions, checker)
