"""One pool that scales under one load: what came of it, beside what could have.

Emulated A100s as in `overload`, prompts in chunks of 512, 2 s to the first token and 60 ms for each one after
it, gates on. One setting for every load and every length of start; what a group carries is read off measured
envelopes, the lowest of two mixes, as for a pool that does not say what it serves. Other rules run behind
the same gates, with the same floor, ceiling, tick and window.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.doors import TPOT_NS, TTFT_NS
from benchmarks.mixes import ENGINE, TENANT
from benchmarks.scaling_rules import followed, starts
from benchmarks.scenes import CHAT, MODEL
from benchmarks.yardstick import Asked, Fleet, clairvoyant_s, unavoidable
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.envelope import Envelope
from headrace.model.evidence import DecisionRecord
from headrace.model.scaling import ScaleRecord, Standing
from headrace.model.scaling_spec import By, Scaling, ppm
from headrace.policy.catalog import PlaneConfig
from headrace.policy.envelopes import reading
from headrace.report.run import Offered, RunRecord
from headrace.sim.experiment import simulate
from headrace.sim.scenario import Scenario
from headrace.trace.mix import Fixed, Mix, Poisson, TenantSource
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_MS, NS_PER_S, seconds

FLOOR, CEILING = 2, 8
BESIDE, CONTEXT = 64, 64 * 2_048
"""Streams that a group has which carries C of the reasoning mix (1.56 req/s of 1,245 tokens, 35 ms each), and what
they hold."""
OTHERS = (By.UTILIZATION, By.QUEUE, By.TOKENS)


class Load(Struct, frozen=True, kw_only=True):
    """What is offered, and how long."""

    name: str
    rows: Sequence[TraceRow]
    span_s: float


class Log(Struct, frozen=True, kw_only=True):
    """How often decisions did what they promise not to."""

    reversals: int
    """Groups given up within a window of adding some, or added within one of giving up without more need."""
    over_asked: int
    """More asked for than the need and the reserve take, what is on its way counted."""
    served_first: int
    """A group that served was drained while one on its way was kept."""


class Ran(Struct, frozen=True, kw_only=True):
    """What came of one run, with its denominators. Work in GPU-seconds of true lengths."""

    load: str
    rule: By
    start_s: float
    seed: int
    requests: int
    hopeless: int
    """Of them, those that a group which carries C has no time for: left out of all that follows."""
    hopeless_work_s: float
    offered_work_s: float
    attained: float
    """Met over offered, of all that could be served."""
    spans_s: float
    span_s: float
    unavoidable_s: float
    """U."""
    unserved_s: float
    """Work offered in the spans that was refused, missed its bounds or was ended."""
    outside: int
    """Requests offered outside of the spans."""
    outside_attained: float
    outside_attained_all: float
    """The same with the hopeless: the bar is not held against it, since no number of groups meets it."""
    outside_unserved_s: float
    gpu_hours: float
    clairvoyant_hours: float
    log: Log

    @property
    def cost(self) -> float:
        """GPU-hours over the clairvoyant's."""
        return self.gpu_hours / self.clairvoyant_hours


def settings(by: By, start_s: float) -> Scaling:
    """Return how a pool scales: by ours with nothing but defaults, or by another rule."""
    mine = Scaling(min=FLOOR, max=CEILING, times=starts(start_s))
    return mine if by is By.SLO else followed(by, start_s, mine.in_window_s)


def deployment(scaling: Scaling | None, envelopes: tuple[Envelope, ...] = ()) -> PlaneConfig:
    """Return one pool, as it ships but for its bounds."""
    return PlaneConfig(
        models=(ModelSpec(name=MODEL),),
        pools=(
            PoolSpec(
                name="pool",
                model=MODEL,
                profile=ENGINE.profile,
                replicas=1 if scaling is None else scaling.min,
                scaling=scaling,
                envelopes=envelopes,
            ),
        ),
        tenants=(TenantSpec(name=TENANT),),
        classes=(ClassSpec(name=CHAT, ttft_ms=TTFT_NS / NS_PER_MS, itl_ms=TPOT_NS / NS_PER_MS),),
    )


def scene(config: PlaneConfig) -> Scenario:
    """Return a deployment before these engines; rows stand for its traffic."""
    nothing = TenantSource(tenant=TENANT, arrivals=Poisson(1.0), lengths=Fixed(1, 1))
    return Scenario(
        name="scaling",
        deployment=config,
        mix=Mix(sources=(nothing,), rows=1),
        batching=ENGINE.batching,
        noise_percent=0.0,
        drain_s=600.0,
    )


def run(load: Load, by: By, start_s: float, envelopes: tuple[Envelope, ...], seed: int) -> Ran:
    """Run one load through one pool, and hold it against the yardstick."""
    scaling = settings(by, start_s)
    config = deployment(scaling, envelopes)
    decided: list[ScaleRecord] = []

    def note(record: DecisionRecord) -> None:
        if isinstance(record, ScaleRecord):
            decided.append(record)

    found = simulate(scene(config), seed, load.rows, rules=ENGINE.rules, decisions=note)
    fleet = Fleet(
        floor=scaling.min,
        ceiling=scaling.max,
        each_micro=ppm(reading(config, config.pools[0]).work_rate),
        start_s=start_s,
        tick_s=scaling.tick_s,
    )
    ran = judged(load, found, fleet, logged(decided, scaling))
    return replace(ran, rule=by, seed=seed)


def judged(load: Load, found: RunRecord, fleet: Fleet, log: Log) -> Ran:
    """Return what a run came to, beside what could have been."""
    able = [one for one in found.offered if not hopeless(one)]
    lost = [one for one in found.offered if hopeless(one)]
    asked = [Asked(one.at, one.work_ns) for one in able]
    met = {row.request for row in found.rows if row.met}
    least = unavoidable(asked, fleet, load.span_s)
    inside = [one for one in able if least.inside(one.at)]
    outside = [one for one in able if not least.inside(one.at)]
    anyone = [one for one in found.offered if not least.inside(one.at)]
    return Ran(
        load=load.name,
        rule=By.SLO,
        start_s=fleet.start_s,
        seed=found.seed,
        requests=len(found.offered),
        hopeless=len(lost),
        hopeless_work_s=_work_s(lost),
        offered_work_s=_work_s(able),
        attained=sum(one.request in met for one in able) / max(1, len(able)),
        spans_s=least.spans_s,
        span_s=load.span_s,
        unavoidable_s=least.work_s,
        unserved_s=_work_s([one for one in inside if one.request not in met]),
        outside=len(outside),
        outside_attained=sum(one.request in met for one in outside) / max(1, len(outside)),
        outside_attained_all=sum(one.request in met for one in anyone) / max(1, len(anyone)),
        outside_unserved_s=_work_s([one for one in outside if one.request not in met]),
        gpu_hours=sum(pool.gpu_ns for pool in found.pools) / NS_PER_S / 3_600,
        clairvoyant_hours=clairvoyant_s(asked, fleet, load.span_s) / 3_600,
        log=log,
    )


def hopeless(one: Offered) -> bool:
    """Return whether a prompt takes a group that carries C longer than its first token may, with no wait.

    More groups would serve it only where they have next to nothing to do.
    """
    profile = ENGINE.profile
    took = profile.prefill_ns(one.input_tokens, 0, BESIDE, CONTEXT, profile.token_budget)
    return took > TTFT_NS


def _work_s(some: Sequence[Offered]) -> float:
    return sum(one.work_ns for one in some) / NS_PER_S


def logged(decided: Sequence[ScaleRecord], scaling: Scaling) -> Log:
    """Return what a log of decisions has of what ours never does."""
    wide, narrow = seconds(scaling.in_window_s), seconds(scaling.cancel_window_s)
    reversals = over_asked = served_first = 0
    for nth, one in enumerate(decided):
        steps, said = one.decision.steps, one.decision
        past = decided[:nth]
        if steps.drain and any(p.decision.steps.grows for p in _since(past, one, wide)):
            reversals += 1
        if steps.cancel and any(p.decision.steps.grows for p in _since(past, one, narrow)):
            reversals += 1
        if steps.grows:
            reversals += _takes_back(past, one, wide)
            more = len(steps.recall) + len(steps.wake) + steps.ask
            over_asked += said.ordered + more > max(said.need + said.reserve, said.floor)
        if steps.drain:
            groups = one.evidence.groups
            coming = {each.group for each in groups if each.standing is Standing.COMING}
            served_first += not coming <= set(steps.cancel)
    return Log(reversals=reversals, over_asked=over_asked, served_first=served_first)


def _since(past: Sequence[ScaleRecord], one: ScaleRecord, window_ns: int) -> list[ScaleRecord]:
    return [each for each in past if one.at - each.at < window_ns]


def _takes_back(past: Sequence[ScaleRecord], one: ScaleRecord, window_ns: int) -> bool:
    """Return whether one adds what was drained within a window, for no more than was needed before that."""
    drains = [each for each in _since(past, one, window_ns) if each.decision.steps.drain]
    if not drains:
        return False
    before = [
        each.decision.keep
        for each in _since(past, drains[-1], window_ns)
        if each.at < drains[-1].at
    ]
    return one.decision.need <= max([drains[-1].decision.keep, *before])
