"""What does each cost of service share evenly, and whom does it let have more of something else?

Five tenants of equal weight, each of which asks within seconds for more than it will get, on one
H100 8B replica and one trace: `chat` (512 in, 128 out), `reader` (16K in, 16 out), `writer` (128 in, 2,048 out), `long` (32K
in, 4K out) and `agent` (8K that it shares with itself and 256 of its own in, 128 out). For each cost
the share of each tenant in requests, tokens, GPU time, KV byte-seconds and money, after a warm-up.
A cost shares evenly what it counts and lets tenants differ in all it does not: its trap.
"""

from collections import Counter
from collections.abc import Sequence

from benchmarks.harness import CLAIM_SEEDS, Claim, Result, at_least, at_most
from benchmarks.scenes import MODEL
from headrace.config.profiles import load_profile
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Concluded, Effect
from headrace.model.ids import ModelName, TenantId
from headrace.model.price import PriceSpec
from headrace.plane.ledger import Flight
from headrace.policy.catalog import PlaneConfig
from headrace.policy.fairness.costs import (
    Cost,
    KvCost,
    MixCost,
    MoneyCost,
    RequestCost,
    TokenCost,
    WorkCost,
    price,
    revision,
)
from headrace.policy.fairness.vtc import Vtc
from headrace.sim.experiment import LIMIT_MAX
from headrace.sim.scenario import Scenario, rows_of
from headrace.sim.world import World
from headrace.trace.mix import Even, Fixed, Lengths, Mix, SharedPrefix, TenantSource
from headrace.units import NS_PER_S

PROFILE = load_profile("h100-8b-tp1")
SHARED = SharedPrefix(tokens=8_192)
TENANTS: dict[str, tuple[float, Lengths, SharedPrefix | None]] = {
    "chat": (20.0, Fixed(512, 128), None),
    "reader": (2.0, Fixed(16_384, 16), None),
    "writer": (4.0, Fixed(128, 2_048), None),
    "long": (0.5, Fixed(32_768, 4_096), None),
    "agent": (8.0, Fixed(256, 128), SHARED),
}
"""Requests for each second of the run, lengths, and what all of its prompts begin with."""
ASKED_S = 2
"""In so many seconds all of them arrive."""
EVEN = 1 / len(TENANTS)
OLD = PriceSpec(input=0.5, output=1.5)
"""A list from before prefixes were cached."""
NEW = PriceSpec(input=0.5, cached=0.05, output=1.5)
COSTS: dict[str, Cost] = {
    "request": RequestCost(),
    "tokens": TokenCost(),
    "tokens 1:1": TokenCost(input_weight=1.0, output_weight=1.0, cached_weight=0.1),
    "work": WorkCost(),
    "kv": KvCost(),
    "money": MoneyCost(as_of="with a price for cached tokens", price=NEW),
    "old money": MoneyCost(as_of="before it", price=OLD),
    "mix": MixCost(),
}
HELD = "kv held"
"""Token-seconds in the pool as they were seen; `kv` is what its formula makes of the true lengths."""
PRICES = {name: price(cost, MODEL, PROFILE) for name, cost in COSTS.items()}
FIRST_S = 60
"""For so long forecasts of output are the prior's, and answers beyond it are owed for."""

Sums = dict[str, Counter[str]]
"""What tenants have had so far, by measure and tenant."""


def add(sums: Sums, tenant: str, uncached: int, cached: int, output: int) -> None:
    """Count served tokens as each cost would."""
    for name, listed in PRICES.items():
        sums[name][tenant] += listed.service(uncached, cached, output)


class Watch:
    """Looks on: what each tenant has had at each second, answers under way included."""

    def __init__(self) -> None:
        """Start with nothing served."""
        self.ended: Sums = {name: Counter() for name in (*COSTS, HELD)}
        self.seconds: list[Sums] = []
        self.starved: set[str] = set()
        """Tenants that once had nothing waiting, once all have asked."""
        self._at = 0
        self._held: Counter[str] = Counter()

    def __call__(self, world: World, effects: list[Effect]) -> None:
        """Add what ended, and take a sample once a second."""
        for effect in effects:
            if isinstance(effect, Concluded) and effect.usage is not None:
                usage = effect.usage
                fresh = usage.input_tokens - usage.cached_tokens
                add(self.ended, effect.tenant, fresh, usage.cached_tokens, usage.output_tokens)
        if world.now < self._at + NS_PER_S // 20:
            return
        flights = list(world.plane.state.ledger.flights.values())
        for tenant, tokens in self._held.items():
            self.ended[HELD][tenant] += tokens * (world.now - self._at)
        self._at = world.now
        self._held = held(flights)
        if world.now >= len(self.seconds) * NS_PER_S:
            self._sample(world, flights)

    def _sample(self, world: World, flights: Sequence[Flight]) -> None:
        now = {name: Counter(counts) for name, counts in self.ended.items()}
        for flight in flights:
            if flight.streaming:
                fresh = flight.input_tokens - flight.cached_tokens
                add(now, flight.tenant, fresh, flight.cached_tokens, flight.made)
        self.seconds.append(now)
        queues = world.plane.state.models[ModelName(MODEL)].backlog.queues.values()
        if world.now > ASKED_S * NS_PER_S:
            self.starved |= TENANTS.keys() - {queue.tenant for queue in queues}


def held(flights: Sequence[Flight]) -> Counter[str]:
    """Return tokens in the pool by tenant; whose prefill is at the front holds half its prompt."""
    found: Counter[str] = Counter()
    front = next((flight for flight in flights if not flight.streaming), None)
    for flight in flights:
        if flight.streaming:
            found[flight.tenant] += flight.input_tokens + flight.made
    if front is not None:
        found[front.tenant] += (front.input_tokens + front.cached_tokens) // 2
    return found


def scene(cost: Cost, duration_s: float) -> Scenario:
    """Return the five tenants under one cost, without deadlines."""
    patient = ClassSpec(
        name="any",
        ttft_ms=None,
        itl_ms=2_000.0,
        expire=False,
        tenant_queue=LIMIT_MAX,
        queue=LIMIT_MAX,
    )
    deployment = PlaneConfig(
        models=(ModelSpec(name=MODEL),),
        pools=(PoolSpec(name="pool", model=MODEL, profile=PROFILE),),
        tenants=tuple(TenantSpec(name=name) for name in TENANTS),
        classes=(patient,),
        fairness=Vtc(cost=cost),
    )
    sources = tuple(
        TenantSource(
            tenant=TenantId(name),
            arrivals=Even(rate * duration_s / ASKED_S),
            lengths=lengths,
            prefix=prefix,
        )
        for name, (rate, lengths, prefix) in TENANTS.items()
    )
    mix = Mix(sources=sources, duration_s=ASKED_S)
    return Scenario(name="costs", deployment=deployment, mix=mix, drain_s=duration_s - ASKED_S)


def watched(cost: Cost, duration_s: float, seed: int) -> Watch:
    """Run the scene under one cost."""
    one, watch = scene(cost, duration_s), Watch()
    World(one, rows_of(one, seed), seed, after=watch).run()
    return watch


Shares = dict[str, dict[str, float]]
"""Of each tenant, by measure."""


def shares(watch: Watch, since_s: int, until_s: int) -> Shares:
    """Return each tenant's part of what was served between two seconds."""
    first, last = watch.seconds[since_s], watch.seconds[until_s]
    found: Shares = {}
    for measure in last:
        grown = {name: last[measure][name] - first[measure][name] for name in TENANTS}
        total = sum(grown.values())
        found[measure] = {name: part / total for name, part in grown.items()}
    return found


def mean(found: Sequence[Shares]) -> Shares:
    """Return the mean of several runs."""
    return {
        measure: {
            name: round(sum(one[measure][name] for one in found) / len(found), 4)
            for name in TENANTS
        }
        for measure in found[0]
    }


def off(of: dict[str, float]) -> float:
    """Return the largest deviation from an even share, as a part of it."""
    return max(abs(share / EVEN - 1) for share in of.values())


def measure(quick: bool) -> Result:
    """Run the trace under every cost, and tell who has what of what."""
    seeds = CLAIM_SEEDS[:1] if quick else CLAIM_SEEDS
    warm_s, until_s = (150, 450) if quick else (300, 900)
    matrix: dict[str, Shares] = {}
    first: dict[str, Shares] = {}
    starved: set[str] = set()
    for name, cost in COSTS.items():
        runs = [watched(cost, until_s, seed) for seed in seeds]
        matrix[name] = mean([shares(run, warm_s, until_s - 1) for run in runs])
        first[name] = mean([shares(run, 0, FIRST_S) for run in runs])
        starved.update(*(run.starved for run in runs))
    own = {name: round(off(matrix[name][name]), 4) for name in COSTS}
    return Result(
        name="costs",
        seeds=list(seeds),
        claims=claims(matrix, first, own, starved, quick=quick),
        detail={
            "shares": matrix,
            "shares_in_first_minute": first,
            "own_measure_off_by": own,
            "revisions": {name: revision(cost) for name, cost in COSTS.items()},
        },
    )


def claims(
    matrix: dict[str, Shares],
    first: dict[str, Shares],
    own: dict[str, float],
    starved: set[str],
    *,
    quick: bool,
) -> list[Claim]:
    """Return each cost's own evenness and its trap; what a short run shows is its direction."""
    work = {name: of["work"] for name, of in matrix.items()}
    mixed = max(*work["mix"].values(), *matrix["mix"]["kv"].values())
    single = min(max(matrix["work"]["kv"].values()), max(work["kv"].values()))
    alike, measured = work["tokens 1:1"]["writer"], work["tokens"]["writer"]
    return [
        at_most("tenants that had nothing waiting", len(starved), 0),
        at_most(
            "what a cost counts, off from even by (worst cost)",
            max(own.values()),
            0.3 if quick else 0.15,  # `kv` and `work` count long requests as they end
        ),
        at_least("request: GPU share of 32K in, 4K out", work["request"]["long"], 0.9),
        at_least("tokens: GPU share of long context, over even", work["tokens"]["long"] / EVEN, 2),
        at_least(
            "tokens 1:1: GPU share of long answers, over measured weights", alike / measured, 2
        ),
        at_least(
            "work: first-minute GPU share of answers beyond their forecast, over even",
            first["work"]["work"]["writer"] / EVEN,
            1.5,
        ),
        at_least("kv: GPU share of long prompts, over even", work["kv"]["reader"] / EVEN, 2),
        at_most(
            "money: GPU share of cached prompts at old prices, over new ones",
            work["old money"]["agent"] / work["money"]["agent"],
            0.5,
        ),
        at_most("mix: largest share of GPU or KV", mixed, 0.4),
        at_most("mix: that, over what work or kv alone let one have", mixed / single, 1),
    ]
