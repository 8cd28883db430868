"""What is offered to one pool, at whatever rate is asked for: a scenario's own requests, or a named mix."""

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.deployment import PoolSpec
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.policy.catalog import PlaneConfig
from headrace.policy.envelopes import digest
from headrace.sim.scenario import Scenario, rows_of
from headrace.trace.generate import generate
from headrace.trace.mix import Lengths, Mix, Poisson, TenantSource
from headrace.trace.row import TraceRow, trace_hash
from headrace.trace.steady import retimed, steady

_SAMPLED_AT = 100.0
"""Requests a second of a sample, whose lengths alone matter."""


class Traffic(Struct, frozen=True, kw_only=True):
    """Requests of one mix, at any rate."""

    name: str
    digest: str
    """Of what it is, whatever it is called."""
    rows: Callable[[float, float, int], list[TraceRow]]
    """(requests a second, seconds, seed) to the requests that are offered."""

    def sample(self, count: int) -> list[TraceRow]:
        """Return about so many of its requests."""
        return self.rows(_SAMPLED_AT, count / _SAMPLED_AT, 0)[:count]


def own(scenario: Scenario, pool: PoolSpec, folders: tuple[Path, ...]) -> Traffic:
    """Return what a scenario offers to a pool. Raises TraceError, also if its trace is not there."""
    whose = _Owner(scenario.deployment, pool)
    if scenario.mix is None:
        rows = [row for row in map(whose.row, rows_of(scenario, scenario.seed, folders)) if row]
        return of_rows(scenario.name, rows)
    sources = [one for one in map(whose.source, scenario.mix.sources) if one]
    if not sources:
        return nothing(scenario.name)
    return of_mix(scenario.name, replace(scenario.mix, sources=tuple(sources)))


def named(name: str, lengths: Lengths, scenario: Scenario, pool: PoolSpec) -> Traffic:
    """Return requests of other lengths by the scenario's own callers, or by its first tenant."""
    whose = _Owner(scenario.deployment, pool)
    sources: list[TenantSource] = []
    if scenario.mix is not None:
        sources = [one for one in map(whose.source, scenario.mix.sources) if one]
    if not sources:
        sources = [whose.anybody(lengths)]
    end_s = None if scenario.mix is None else scenario.mix.duration_s
    changed = tuple(replace(one, lengths=lengths, prefix=None) for one in sources)
    return of_mix(name, Mix(sources=changed, duration_s=end_s, rows=1))


def of_mix(name: str, mix: Mix) -> Traffic:
    """Return a mix's sources, each at its part of the rate that is asked for."""
    return Traffic(
        name=name,
        digest=digest(steady(mix, 1.0, 1.0)),
        rows=lambda rate, duration_s, seed: generate(steady(mix, rate, duration_s), seed),
    )


def nothing(name: str) -> Traffic:
    """Return no requests, at any rate."""
    return Traffic(name=name, digest="", rows=lambda *_: [])


def of_lengths(name: str, lengths: Lengths, tenant: TenantId, slo_class: ClassName) -> Traffic:
    """Return one caller's requests of some lengths."""
    source = TenantSource(
        tenant=tenant, slo_class=slo_class, arrivals=Poisson(1.0), lengths=lengths
    )
    return of_mix(name, Mix(sources=(source,), rows=1))


def of_rows(name: str, rows: Sequence[TraceRow]) -> Traffic:
    """Return a trace's requests in their order, at the rate that is asked for."""
    if not rows:
        return nothing(name)
    return Traffic(
        name=name,
        digest=trace_hash(rows)[:12],
        rows=lambda rate, duration_s, seed: retimed(rows, rate, duration_s, seed),
    )


class _Owner:
    """Gives each request the class that the plane would, and leaves out what the pool does not serve."""

    def __init__(self, deployment: PlaneConfig, pool: PoolSpec) -> None:
        first = deployment.models[0].name
        names = {name: one.name for one in deployment.models for name in one.names}
        self._mine = {name for name, model in names.items() if model == pool.model}
        self._unnamed = first == pool.model
        served = pool.classes or tuple(one.name for one in deployment.classes)
        self._classes = tuple(map(ClassName, served))
        free = [one.name for one in deployment.classes if one.lane is None]
        self._first = {
            TenantId(one.name): ClassName(one.classes[0] if one.classes else free[0])
            for one in deployment.tenants
            if one.classes or free
        }
        self._tenant = TenantId(deployment.tenants[0].name)

    def row(self, row: TraceRow) -> TraceRow | None:
        tenant = row.tenant or self._tenant
        slo_class = self._class(row.model, tenant, row.slo_class)
        if slo_class is None:
            return None
        return replace(row, tenant=tenant, slo_class=slo_class, model=None)

    def source(self, source: TenantSource) -> TenantSource | None:
        slo_class = self._class(source.model, source.tenant, source.slo_class)
        return None if slo_class is None else replace(source, slo_class=slo_class, model=None)

    def anybody(self, lengths: Lengths) -> TenantSource:
        """Return requests of the first tenant, of its own class or of the first that the pool serves."""
        own_class = self._first.get(self._tenant)
        slo_class = own_class if own_class in self._classes else self._classes[0]
        return TenantSource(
            tenant=self._tenant, slo_class=slo_class, arrivals=Poisson(1.0), lengths=lengths
        )

    def _class(
        self, model: ModelName | None, tenant: TenantId, given: ClassName | None
    ) -> ClassName | None:
        """Return the class of a request that this pool serves; None: it does not."""
        if not (self._unnamed if model is None else model in self._mine):
            return None
        found = given or self._first.get(tenant)
        return found if found in self._classes else None
