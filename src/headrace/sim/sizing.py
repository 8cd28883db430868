"""How many replicas of one kind does a rate take, each measured as `capacity` measures it?"""

from collections.abc import Callable
from functools import partial
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.hardware import hardware_of
from headrace.model.ids import ClassName, TenantId
from headrace.model.price import GpuPrices
from headrace.model.profile import Profile
from headrace.policy.catalog import PlaneConfig
from headrace.replica.rules import NO_RULES
from headrace.report.sizing import Sized
from headrace.sim.capacity import Bench, CapacityError, Question
from headrace.sim.knee import NoKneeError, knee
from headrace.sim.scenario import Scenario
from headrace.sim.traffic import Traffic
from headrace.trace.mix import Fixed, Mix, Poisson, TenantSource

CALLER, CLASS = TenantId("caller"), ClassName("asked")
"""Who asks, and by what they are judged, in traffic that is to be sized for."""
_FEWER = 3
_GAP_MS = 1_000.0
_S_PER_HOUR = 3_600


class Ask(Struct, frozen=True, kw_only=True):
    """What is to be served."""

    rate: float
    """Requests a second."""
    ttft_ms: float
    tpot_ms: float
    traffic: Traffic
    """Of `CALLER` and `CLASS`."""


def size(
    ask: Ask,
    profile: Profile,
    question: Question,
    prices: GpuPrices,
    note: Callable[[str], None] = lambda _: None,
) -> Sized:
    """Return the fewest replicas of a profile that hold the rate, each with an equal part of it."""
    plan = hardware_of(profile.hardware)
    answer = Sized(profile=profile.name, model=profile.model, gpu=plan.gpu, gpus_each=plan.gpus)
    scenario = _scenario(ask, profile)
    try:
        bench = Bench(scenario, scenario.deployment.pools[0], ask.traffic, question, NO_RULES)
        bench.judge_alone()
        holds = partial(bench.holds, note=lambda line: note(f"{profile.name}: {line}"))
        carries = knee(holds, bench.guess, question.precision)
    except (CapacityError, NoKneeError) as error:
        return replace(answer, why=str(error))
    replicas = max(1, ceil(ask.rate / carries))
    # What was found to hold may be a little below what does: a few less may be enough.
    for _ in range(_FEWER):
        if replicas == 1 or not holds(ask.rate / (replicas - 1)):
            break
        replicas -= 1
    attained = bench.point(ask.rate / replicas).attained.get(CLASS)
    price = prices.of(plan.gpu)
    hour = None if price is None else price * plan.gpus * replicas
    share = bench.wanted[CLASS] if attained is None else attained
    met = ask.rate * share * _S_PER_HOUR
    return replace(
        answer,
        carries_rps=carries,
        replicas=replicas,
        gpus=replicas * plan.gpus,
        attained=attained,
        usd_hour=hour,
        usd_million=None if hour is None else hour / met * 1e6,
    )


def _scenario(ask: Ask, profile: Profile) -> Scenario:
    gap_ms = max(_GAP_MS, ask.tpot_ms)  # the mean is asked for, so nothing is held back for one gap
    deployment = PlaneConfig(
        models=(ModelSpec(name=profile.model),),
        pools=(PoolSpec(name=profile.name, model=profile.model, profile=profile),),
        tenants=(TenantSpec(name=CALLER),),
        classes=(ClassSpec(name=CLASS, ttft_ms=ask.ttft_ms, itl_ms=gap_ms, tpot_ms=ask.tpot_ms),),
    )
    nothing = TenantSource(tenant=CALLER, arrivals=Poisson(1.0), lengths=Fixed(1, 1))
    return Scenario(name="sizing", deployment=deployment, mix=Mix(sources=(nothing,), rows=1))
