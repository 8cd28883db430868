"""Many small worlds, each with every knob and fault drawn from its seed.

Four draws in ten have no faults: noise hides quiet bugs. A failure prints the seed, which with the
commit reproduces it.
"""

from collections import Counter
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.deployment import (
    ClassSpec,
    LaneSpec,
    ModelSpec,
    OrganisationSpec,
    PoolSpec,
    TenantSpec,
)
from headrace.model.engine import Preemption
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.ladder import LEVEL_MAX, LadderSpec
from headrace.model.profile import Profile
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.batching.preemption import RECOMPUTE_ONLY, Offers, Victims, Whole
from headrace.policy.catalog import PlaneConfig, Window
from headrace.policy.catalog import Reports as ReportConfig
from headrace.policy.degrade.level import Degrading
from headrace.policy.fairness.costs import (
    Cost,
    KvCost,
    MixCost,
    RequestCost,
    TokenCost,
    WorkCost,
)
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.ordering.orders import (
    EarliestDeadline,
    Fifo,
    LeastSlack,
    Niyama,
    Ordering,
    Score,
    ShortestFirst,
    TenantFirst,
    VtcOrder,
)
from headrace.sim import drawn_faults
from headrace.sim.checks import Checker
from headrace.sim.drawn_scaling import scaled
from headrace.sim.scenario import Scenario
from headrace.sim.world import World
from headrace.trace.generate import generate
from headrace.trace.mix import (
    Arrivals,
    Gamma,
    Headroom,
    Lognormal,
    MaxTokens,
    Mix,
    OnOff,
    OptionalParts,
    Poisson,
    SharedPrefix,
    TenantSource,
    Undeclared,
)
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import InstantNs, seconds

ORDERS: tuple[Ordering, ...] = (
    TenantFirst(),
    TenantFirst(lend_after_ms=1_000.0),
    TenantFirst(lend_after_ms=None),
    VtcOrder(),
    Score(),
    Niyama(),
    LeastSlack(),
    EarliestDeadline(),
    ShortestFirst(),
)
COSTS: tuple[Cost, ...] = (TokenCost(), RequestCost(), WorkCost(), KvCost(), MixCost())
SCALED = 0.4
"""Part of the worlds in which some pools scale."""
REQUESTS_MAX = 2_000
"""Most requests one seed offers."""


class Swarm(Struct, frozen=True, kw_only=True):
    """One drawn run: printed before it starts."""

    seed: int
    scenario: Scenario
    rows: int
    faults: tuple[str, ...]
    """Kinds of fault in it."""
    changes: tuple[tuple[InstantNs, PlaneConfig], ...] = ()
    """Configurations that come into force while it runs."""


class SwarmResult(Struct, frozen=True, kw_only=True):
    """What many seeds showed."""

    seeds: int
    requests: int
    steps: int
    faults: dict[str, int]
    """In how many seeds each kind of fault occurred."""
    outcomes: dict[str, int]


def draw(seed: int, profile: Profile) -> tuple[Swarm, list[TraceRow]]:
    """Draw a run: sizes, load, policies and faults, all from the seed."""
    rng = stream(seed, "swarm")
    replicas = rng.randint(1, 6)
    tenants = [f"t{nth}" for nth in range(rng.randint(1, 6))]
    requests = rng.randint(120, 700) if rng.random() < 0.9 else rng.randint(700, REQUESTS_MAX)
    rate = replicas * rng.choice((2.0, 6.0, 12.0, 30.0))
    deployment = _deployment(rng, _engine(rng, profile), replicas, tenants)
    mix = _mix(rng, tenants, deployment, rate, requests)
    shape = stream(seed, "shapes")
    if shape.random() < 0.5:
        deployment = _varied(shape, deployment, profile, replicas)
        mix = _spread(shape, mix, deployment)
    deployment = _grown(stream(seed, "tree"), deployment)
    ladder = stream(seed, "ladder")
    if ladder.random() < 0.5:
        deployment, mix = _consenting(ladder, deployment), _marked(ladder, mix)
    grows = stream(seed, "scaled")
    if grows.random() < SCALED:
        deployment = scaled(grows, deployment)
    rows = generate(mix, seed)
    span = rows[-1].at / 1e9 if rows else 0.0
    faults = drawn_faults.faults(rng, replicas, span) if rng.random() < 0.6 else ()
    if faults:
        faults += drawn_faults.drains(stream(seed, "drains"), replicas, span)
        faults += drawn_faults.spells(stream(seed, "spells"), replicas, span)
    if faults and any(pool.scaling is not None for pool in deployment.pools):
        faults += drawn_faults.starts(grows)
        faults += drawn_faults.losses(stream(seed, "losses"), span)
    scenario = Scenario(
        name=f"swarm-{seed}",
        deployment=deployment,
        mix=mix,
        engine_ordering=_within(stream(seed, "within")),
        noise_percent=rng.choice((0.0, 2.0)),
        preemption=_preemption(stream(seed, "preemption")),
        faults=faults,
        seed=seed,
    )
    kinds = tuple(sorted({one for fault in faults for one in drawn_faults.parts(fault)}))
    drawn = Swarm(seed=seed, scenario=scenario, rows=len(rows), faults=kinds)
    if "restart" not in kinds:  # a driver that comes back would read its configuration anew
        drawn = replace(drawn, changes=_changes(stream(seed, "changes"), deployment, span))
    return drawn, rows


def run(seed: int, profile: Profile) -> tuple[Swarm, World, Checker]:
    """Run one seed with all checkers on; raises at the first thing that does not hold."""
    drawn, rows = draw(seed, profile)
    checker = Checker()
    world = World(drawn.scenario, rows, seed, after=checker, changes=drawn.changes).run()
    checker.finish(world)
    return drawn, world, checker


def run_many(seeds: range, profile: Profile) -> SwarmResult:
    """Run many seeds; the exception of a failing one names it."""
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    requests = steps = 0
    for seed in seeds:
        try:
            drawn, world, checker = run(seed, profile)
        except Exception as failed:
            failed.add_note(f"reproduce: headrace swarm --seed {seed}")
            raise
        faults.update(drawn.faults)
        requests += drawn.rows
        steps += checker.steps
        for row in world.concluded.values():
            outcomes[str(row.outcome if row.admitted else row.reason or "left")] += 1
    return SwarmResult(
        seeds=len(seeds),
        requests=requests,
        steps=steps,
        faults=dict(sorted(faults.items())),
        outcomes=dict(sorted(outcomes.items())),
    )


def _engine(rng: Random, profile: Profile) -> Profile:
    """Return an engine of a drawn size: small KV pools force waiting and preemption."""
    capacity = rng.choice((8_192, 24_576, profile.kv_capacity_tokens))
    running = rng.choice((8, 32, profile.max_running))
    batch = max(1, min(running, capacity // 2_048))
    return replace(
        profile,
        kv_capacity_tokens=capacity,
        max_running=running,
        token_budget=rng.choice((128, 512, 2_048)),
        reference_batch=batch,
    )


def _preemption(rng: Random) -> Offers:
    """Return what engines offer those that give way: in half the runs more than vLLM does."""
    if rng.random() < 0.5:
        return RECOMPUTE_ONLY
    more = rng.choice(((Preemption.SWAP,), (Preemption.KEEP,), (Preemption.KEEP, Preemption.SWAP)))
    return Offers(
        mechanisms=(*more, Preemption.RECOMPUTE),
        victims=rng.choice(tuple(Victims)),
        by_cost=rng.random() < 0.8,
        whole=rng.choice(tuple(Whole)),
        host_gb_per_s=rng.choice((2.0, 10.0, 50.0)),
        host_gib=rng.choice((0.1, 1.0, 100.0)),
    )


def _deployment(rng: Random, profile: Profile, replicas: int, tenants: list[str]) -> PlaneConfig:
    classes = (
        ClassSpec(name="interactive", weight=4, queue=rng.choice((20, 200, 20_000))),
        ClassSpec(
            name="batch", ttft_ms=None, itl_ms=1_000.0, completion_ms=600_000.0, expire=False
        ),
        ClassSpec(name="strict", ttft_ms=rng.choice((300.0, 1_000.0)), itl_ms=60.0),
    )
    split = replicas > 2 and rng.random() < 0.3
    pools = (
        PoolSpec(name="main", model="m", profile=profile, replicas=replicas - split),
        PoolSpec(name="own", model="m", profile=profile, replicas=1, classes=("batch", "strict")),
    )
    order: Ordering = Fifo() if rng.random() < 0.15 else TenantFirst()
    return PlaneConfig(
        models=(ModelSpec(name="m", aliases=("alias",), context_limit=8_192),),
        pools=pools if split else pools[:1],
        tenants=tuple(_tenant(rng, name) for name in tenants),
        classes=classes,
        ordering=order,
        admission=Gates(mode=GateMode.AUDIT if rng.random() < 0.2 else GateMode.ENFORCE),
        window=Window(prefill_ms=rng.choice((20.0, 150.0, 1_000.0))),
        reports=ReportConfig(poll_ms=rng.choice((200.0, 1_000.0))),
    )


def _grown(rng: Random, plain: PlaneConfig) -> PlaneConfig:
    """Return the deployment with a tree of shares, as any order and cost; in half the runs as it was."""
    if rng.random() < 0.5:
        return plain
    lanes = ("ops", "probes")[: rng.randint(0, 2)]
    organisations = ("x", "y")[: rng.randint(0, 2)]
    return replace(
        plain,
        lanes=tuple(replace(LaneSpec(name=one), **_part(rng)) for one in lanes),
        organisations=tuple(replace(OrganisationSpec(name=o), **_part(rng)) for o in organisations),
        classes=tuple(
            replace(
                one,
                lane=rng.choice((None, *lanes)),
                starve_ms=rng.choice((None, 500.0, 600_000.0)),
                **_part(rng),
            )
            for one in plain.classes
        ),
        tenants=tuple(
            replace(
                one,
                organisation=rng.choice((None, *organisations)),
                by_user=rng.random() < 0.5,
                classes=tuple(spec.name for spec in plain.classes),  # else none of a lane's
                **_part(rng),
            )
            for one in plain.tenants
        ),
        ordering=rng.choice(ORDERS),
        fairness=Vtc(
            cost=rng.choice(COSTS),
            aging_tokens_per_s=rng.choice((0.0, 0.0, 200.0)),
            boost_tokens=rng.choice((0.0, 0.0, 2_000.0)),
            memory_tokens=rng.choice((100.0, 10_000.0, 100_000.0)),
        ),
    )


def _consenting(rng: Random, plain: PlaneConfig) -> PlaneConfig:
    """Return the deployment with ladders that some classes have, and some tenants agreed to."""
    smaller = plain.models[-1].name if len(plain.models) > 1 else None
    classes = []
    for spec in plain.classes:
        level = rng.choice((0, 1, 2, 2) if smaller is None else (0, 1, 2, 3))
        ladder = LadderSpec(
            level=max(1, level),
            output_part=rng.choice((0.25, 0.5, 1.0)),
            keep=rng.choice((0, 0, 1, 3)),
            model=smaller if level == LEVEL_MAX else None,
            defer=rng.random() < 0.3,
        )
        hurried = spec.ttft_ms if spec.ttft_ms is None else rng.choice((100.0, 300.0, spec.ttft_ms))
        classes.append(replace(spec, ttft_ms=hurried, degrade=ladder if level else None))
    return replace(
        plain,
        classes=tuple(classes),
        tenants=tuple(replace(one, degrade=rng.choice((0, 1, 2, 2, 3))) for one in plain.tenants),
        degrading=Degrading(
            high=(high := rng.choice((0.2, 0.95))),
            low=high * 0.8,
            wait_ms=rng.choice((1.0, 20.0, 500.0)),
            recover_s=rng.choice((1.0, 10.0)),
            probe_s=rng.choice((2.0, 60.0)),
        ),
    )


def _marked(rng: Random, mix: Mix) -> Mix:
    """Return the mix with prompts that may be cut short, and callers who agree to it or not."""
    return replace(
        mix,
        sources=tuple(
            replace(
                source,
                optional=OptionalParts(rng.uniform(0.1, 0.8), rng.choice((1, 3, 8))),
                lowest=rng.choice((0, 1, 2, LEVEL_MAX, LEVEL_MAX)),
            )
            for source in mix.sources
        ),
    )


def _part(rng: Random) -> dict[str, Any]:
    """Draw a node's weight and limits; most have no limit."""
    most = rng.choice((1.0, 1.0, 1.0, 0.5, 0.1))
    least = min(most, rng.choice((0.0, 0.0, 0.0, 0.05, 0.2)))
    return {"weight": rng.choice((1, 2, 4)), "minimum": least, "maximum": most}


def _within(rng: Random) -> Ordering:
    """Draw who starts first inside the engines: in half the runs whoever came first."""
    return Fifo() if rng.random() < 0.5 else rng.choice(ORDERS)


def _varied(rng: Random, plain: PlaneConfig, profile: Profile, replicas: int) -> PlaneConfig:
    """Return a deployment whose pools differ in size, model and the classes they serve."""
    models = plain.models
    if replicas > 1 and rng.random() < 0.6:
        models += (ModelSpec(name="n", context_limit=8_192),)
    places: list[tuple[str, tuple[str, ...]]] = [(spec.name, ()) for spec in models]
    classes = [spec.name for spec in plain.classes]
    if replicas >= len(models) + len(classes) - 1 and rng.random() < 0.6:  # each class on its own
        places = [("m", (name,)) for name in classes] + places[1:]
    elif replicas > len(places):
        places.append(("m", tuple(rng.sample(classes, rng.randint(1, 2)))))
    sizes = [1] * len(places)
    for _ in range(replicas - len(places)):
        sizes[rng.randrange(len(places))] += 1
    pools = tuple(
        PoolSpec(
            name=f"pool{nth}",
            model=model,
            profile=_engine(rng, profile),
            replicas=size,
            classes=served,
        )
        for nth, ((model, served), size) in enumerate(zip(places, sizes, strict=True))
    )
    return replace(plain, models=models, pools=pools)


def _spread(rng: Random, mix: Mix, deployment: PlaneConfig) -> Mix:
    """Return the mix with its sources spread over the models, by all their names."""
    names = [None, *(n for spec in deployment.models for n in (spec.name, *spec.aliases))]
    sources = (
        replace(source, model=None if (name := rng.choice(names)) is None else ModelName(name))
        for source in mix.sources
    )
    return replace(mix, sources=tuple(sources))


def _tenant(rng: Random, name: str) -> TenantSpec:
    limited = rng.random() < 0.3
    return TenantSpec(
        name=name,
        weight=rng.choice((1, 1, 2, 5)),
        tpm_limit=rng.choice((20_000, 200_000)) if limited else None,
        rpm_limit=rng.choice((60, 600)) if limited else None,
        max_parallel_requests=rng.choice((2, 20)) if rng.random() < 0.2 else None,
    )


def _mix(
    rng: Random, tenants: list[str], deployment: PlaneConfig, rate: float, requests: int
) -> Mix:
    sources = []
    for name in tenants:
        own = rate * rng.choice((0.2, 1.0, 3.0)) / len(tenants)
        arrivals: Arrivals = rng.choice((Poisson(own), Gamma(own, 3.0), OnOff(own * 3, 2.0, 4.0)))
        limit: MaxTokens = rng.choice((Undeclared(), Headroom()))
        shared = SharedPrefix(tokens=512, groups=2, chunk_tokens=256)
        sources.append(
            TenantSource(
                tenant=TenantId(name),
                slo_class=ClassName(rng.choice(deployment.classes).name),
                arrivals=arrivals,
                lengths=Lognormal(
                    input_median=rng.choice((80, 400, 1_500)),
                    output_median=rng.choice((20, 120)),
                    input_sigma=1.0,
                    output_sigma=0.8,
                    input_min=1,
                    input_max=6_000,
                    output_min=1,
                    output_max=1_500,
                ),
                max_tokens=limit,
                prefix=shared if rng.random() < 0.4 else None,
            )
        )
    return Mix(sources=tuple(sources), rows=requests)


def _changes(
    rng: Random, before: PlaneConfig, span: float
) -> tuple[tuple[InstantNs, PlaneConfig], ...]:
    """Draw no change, or one of the share tree, order, gates and window in mid-run; somebody may go."""
    if rng.random() < 0.7:
        return ()
    order: Ordering = Fifo() if rng.random() < 0.3 else TenantFirst()
    tenants = tuple(replace(one, weight=rng.choice((1, 3))) for one in before.tenants)
    after = replace(
        _grown(rng, replace(before, tenants=tenants, ordering=order)),
        admission=Gates(mode=rng.choice((GateMode.AUDIT, GateMode.ENFORCE))),
        window=Window(prefill_ms=rng.choice((20.0, 1_000.0))),
    )
    return ((InstantNs(seconds(rng.uniform(0, span))), after),)
