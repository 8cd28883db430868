"""Run a scenario and leave a `RunRecord`: what every report and benchmark starts from."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from headrace.model.deployment import PoolSpec
from headrace.model.effect import Concluded, Effect
from headrace.model.engine import Yielded
from headrace.model.evidence import DecisionRecord
from headrace.model.ids import ClassName, ModelName, PoolName, RequestId, TenantId
from headrace.model.profile import Profile
from headrace.model.scaling_spec import By, Scaling
from headrace.policy.admission.gates import GateMode, Gates, Wait
from headrace.policy.catalog import PlaneConfig
from headrace.policy.fairness.costs import TokenCost, revision
from headrace.policy.ordering.orders import Fifo, Ordering
from headrace.replica.rules import NO_RULES, Rules
from headrace.report.run import Offered, PoolTotals, ReplicaTotals, RunRecord, ServiceSample
from headrace.sim.engines import Node
from headrace.sim.moving import Moves
from headrace.sim.scenario import Scenario, rows_of
from headrace.sim.world import World
from headrace.trace.row import TraceRow, trace_hash
from headrace.units import NS_PER_S, DurationNs, InstantNs, Tokens

LIMIT_MAX = 10**15
"""The largest queue bound that may be declared: none."""
SAMPLE_NS = NS_PER_S
"""Period of the per-tenant service samples."""


def simulate(  # noqa: PLR0913 - what may be looked at
    scenario: Scenario,
    seed: int,
    rows: Sequence[TraceRow] | None = None,
    *,
    label: str | None = None,
    folders: tuple[Path, ...] = (),
    sink: Callable[[bytes, bool], None] | None = None,
    decisions: Callable[[DecisionRecord], None] | None = None,
    fast_forward: bool = True,
    rules: Rules = NO_RULES,
) -> RunRecord:
    """Run one scenario under one seed; `rows` replaces what the scenario itself offers.

    `rules`: whom the replicas let in, for benchmarks that emulate an engine with rules of its own.
    """
    offered = rows_of(scenario, seed, folders) if rows is None else list(rows)
    sampler = Sampler()
    world = World(
        scenario,
        offered,
        seed,
        sink=sink,
        decisions=decisions,
        after=sampler,
        fast_forward=fast_forward,
        rules=rules,
    ).run()
    return record(world, sampler.samples, label or describe(scenario))


def describe(scenario: Scenario) -> str:
    """Return a policy in a few words."""
    deployment = scenario.deployment
    order = deployment.ordering.__struct_config__.tag
    gates = "off" if deployment.admission.audited() else "on"
    wait = ", fifo wait" if deployment.admission.wait is Wait.FIFO else ""
    cost = deployment.fairness.cost
    shared = deployment.ordering.by_share
    counted = "" if not shared or cost == TokenCost() else f", {revision(cost)}"
    others = {one.scaling.by for one in deployment.pools if one.scaling is not None} - {By.SLO}
    scaled = f", scaled by {', '.join(sorted(others))}" if others else ""
    return f"{order}, gates {gates}{wait}{counted}{scaled}"


def without_control(scenario: Scenario) -> Scenario:
    """Return the scenario served first come first served with the capacity gates only watching.

    Queues are as long as it takes: nobody is refused for a full one. What a tenant is limited to
    stays, and what cannot be served at all is refused as ever.
    """
    declared = scenario.deployment
    deployment = replace(
        declared,
        ordering=Fifo(),
        admission=Gates(mode=GateMode.AUDIT),
        classes=tuple(
            replace(one, tenant_queue=LIMIT_MAX, queue=LIMIT_MAX) for one in declared.classes
        ),
    )
    return replace(scenario, deployment=deployment)


def with_fifo_wait(scenario: Scenario) -> Scenario:
    """Return the scenario with the deadline gate believing in the whole backlog."""
    gates = replace(scenario.deployment.admission, wait=Wait.FIFO)
    return replace(scenario, deployment=replace(scenario.deployment, admission=gates))


def with_order(ordering: Ordering) -> Callable[[Scenario], Scenario]:
    """Return what gives a scenario another order, all else being equal."""

    def other(scenario: Scenario) -> Scenario:
        return replace(scenario, deployment=replace(scenario.deployment, ordering=ordering))

    return other


class Sampler:
    """Looks on and samples each tenant's service and queue once a second."""

    def __init__(self) -> None:
        """Start with nothing served."""
        self.samples: list[ServiceSample] = []
        self._next = 0
        self._idle = False

    def __call__(self, world: World, effects: list[Effect]) -> None:
        """Take a sample if one is due."""
        del effects
        state = world.plane.state
        was_idle, self._idle = self._idle, not state.live
        if world.now < self._next:
            return
        begun = world.now - world.now % SAMPLE_NS
        served = dict(world.served)
        if was_idle and self._next < begun:  # no steps since: nobody waited through the pause
            self.samples.append(ServiceSample(at=InstantNs(self._next), work_ns=served, waiting={}))
        self._next = begun + SAMPLE_NS
        waiting: dict[TenantId, int] = {}
        for known in state.models.values():
            for queue in known.backlog.queues.values():
                waiting[queue.tenant] = waiting.get(queue.tenant, 0) + queue.size
        self.samples.append(ServiceSample(at=world.now, work_ns=served, waiting=waiting))


def record(world: World, samples: list[ServiceSample], label: str) -> RunRecord:
    """Return what a finished run leaves behind."""
    rows, deployment = world.rows, world.scenario.deployment
    return RunRecord(
        label=label,
        scenario=world.scenario.name,
        seed=world.seed,
        trace_hash=trace_hash(rows),
        span_ns=DurationNs(rows[-1].at - rows[0].at if rows else 0),
        end_ns=max((row.ended_at for row in world.concluded.values()), default=InstantNs(0)),
        offered=offered_rows(world.scenario, rows, world.concluded),
        rows=list(world.concluded.values()),
        replicas=[_totals(node) for node in world.nodes],
        pools=[_held(world, spec) for spec in deployment.pools],
        victims=list(world.engines.victims.values()),
        samples=samples,
        cut_off=len(world.cut_off),
        slos=deployment.slos,
        weights={
            TenantId(spec.name): spec.weight for spec in deployment.tenants if spec.weight != 1
        },
    )


def offered_rows(
    scenario: Scenario, rows: Sequence[TraceRow], ended: Mapping[RequestId, Concluded]
) -> list[Offered]:
    """Return the offered population of a trace, whoever ran it.

    Tenant and class of a row that names none are those that the plane gave it.
    """
    places = Places(scenario.deployment)
    found = []
    for request, row in zip(map(RequestId, count(1)), rows, strict=False):
        tenant = row.tenant or ended[request].tenant
        slo_class = row.slo_class or ended[request].slo_class
        profile = places.profile(row.model, slo_class)
        found.append(
            Offered(
                request=request,
                at=row.at,
                tenant=tenant,
                slo_class=slo_class,
                input_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                work_ns=profile.work_ns(row.input_tokens, 0, row.output_tokens),
            )
        )
    return found


class Places:
    """Where requests of a model and class are served, and so what their work is measured in."""

    def __init__(self, deployment: PlaneConfig) -> None:
        """Know a deployment's models by every name they have."""
        self._pools = deployment.pools
        self._first = deployment.models[0].name
        self._names = {name: spec.name for spec in deployment.models for name in spec.names}
        self._found: dict[tuple[str | None, ClassName], Profile] = {}

    def profile(self, model: ModelName | None, slo_class: ClassName) -> Profile:
        """Return the profile of the first pool that serves a model's class.

        Work that nobody can do is priced by the model's first pool, or else by the first of all.
        """
        found = self._found.get((model, slo_class))
        if found is None:
            name = self._first if model is None else self._names.get(model)
            mine = [pool for pool in self._pools if pool.model == name]
            able = [pool for pool in mine if not pool.classes or slo_class in pool.classes]
            found = self._found[model, slo_class] = (able or mine or self._pools)[0].profile
        return found


def _held(world: World, spec: PoolSpec) -> PoolTotals:
    """Return what a pool held; one of a fixed number is held for as long as its replicas are up."""
    name, settings = PoolName(spec.name), spec.scaling
    shape = (settings or Scaling()).group_shape(spec.profile.hardware)
    serving = sum(node.up_ns for node in world.nodes if node.pool == name) * shape.gpus
    provider = world.provider
    moves = world.engines.moving.counts.get(name, Moves())
    held = serving if settings is None else provider.gpu_ns.get(name, 0)
    return PoolTotals(
        pool=name,
        gpu_ns=held,
        serving_ns=serving,
        asked=provider.asked.get(name, 0),
        rose=provider.rose.get(name, 0),
        moves_begun=moves.begun,
        moved=moves.done,
        micro_usd=None if settings is None else settings.cost(held),
    )


def _totals(node: Node) -> ReplicaTotals:
    past = node.past
    return ReplicaTotals(
        name=node.name,
        pool=node.pool,
        up_ns=DurationNs(node.up_ns),
        busy_ns=DurationNs(sum(life.busy_ns for life in past)),
        steps=sum(life.steps for life in past),
        prefill_tokens=Tokens(sum(life.prefill_tokens for life in past)),
        output_tokens=Tokens(sum(life.output_tokens for life in past)),
        preemptions=sum(life.preemptions for life in past),
        prefix_tokens_queried=Tokens(sum(life.queried for life in past)),
        prefix_tokens_hit=Tokens(sum(life.hit for life in past)),
        yielded=reduce(Yielded.plus, (life.yielded for life in past), Yielded()),
    )
