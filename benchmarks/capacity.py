"""Does `headrace capacity` find the knee that an overload run shows (DEM-2, DEM-7)?

One emulated A100 as in `overload`, each mix first come first served without gates, two ways. By bisection
through our plane, as the command does: the highest rate of which 90 % meet their bounds. And by a sweep
over rates with an open door straight before the engine, which knows no such share: the rate at which most
*work* meets its bounds, the mean of each seed's own. (The mean of all seeds is flat at its top: within 1 %
over rates 6 % apart, so that its highest point says little.) Both on the same seeds, which differ by more
than the two ways. And two mixes differ by more than the intervals of either.

HEADRACE_DATA names the folder of public traces; without it lengths come from their tables.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from benchmarks.cells import ours
from benchmarks.doors import open_door, stand
from benchmarks.harness import CLAIM_SEEDS, Result, at_least, at_most
from benchmarks.mixes import ENGINE, TENANT, Came, Load, came, mixes
from benchmarks.scenes import CHAT
from headrace.model.envelope import Envelope
from headrace.policy.admission.gates import Length
from headrace.sim.capacity import Question, measure
from headrace.sim.scenario import Scenario
from headrace.sim.traffic import of_lengths
from headrace.trace.mix import Fixed, Mix, Poisson, TenantSource

STEP = 1.02
"""From one rate of the sweep to the next."""
BELOW, ABOVE = 9, 6
"""Rates of the sweep below and above capacity: a sixth and an eighth of it."""
SHARP = ("conv", "chat", "arxiv")
"""Mixes whose requests are alike enough for a tenth of them to be about a tenth of the work. Where one in
five is a document with most of the work, goodput in work goes on to rise when the documents have long begun
to miss: the detail shows it, no claim is made."""


def run(quick: bool) -> Result:
    """Measure; quick takes two mixes, three seeds, and shorter times."""
    seeds = CLAIM_SEEDS[:3] if quick else CLAIM_SEEDS
    names = SHARP[:2] if quick else (*SHARP, "bimodal")
    known = {name: shorter(mixes()[name]) if quick else mixes()[name] for name in names}
    detail: dict[str, Any] = {}
    found: dict[str, Envelope] = {}
    off: dict[str, float] = {}
    for name, load in known.items():
        found[name] = envelope(name, load, seeds)
        swept = sweep(load, found[name].request_rate, seeds)
        knee = fmean(max(own, key=Came.work).offered_work() for own in swept)
        off[name] = abs(found[name].work_rate / knee - 1)
        detail[name] = {
            "envelope": found[name],
            "knee_work": knee,
            "off": off[name],
            "swept": [shown(each) for each in zip(*swept, strict=True)],
        }
    conv, chat = found["conv"], found["chat"]
    claims = [
        at_most(f"{name}: capacity off the knee of the overload run, share", off[name], 0.05)
        for name in SHARP
        if name in off
    ]
    apart = abs(chat.work_rate / conv.work_rate - 1)
    claims.append(at_least("chat and conv: two envelopes, apart by, share", apart, 0.05))
    if not quick:  # three seeds have wide intervals
        claims.append(
            at_least("chat and conv: lower end of one over upper end", chat.low / conv.high, 1.0)
        )
    return Result(name="capacity", claims=claims, seeds=list(seeds), detail=detail)


def shorter(load: Load) -> Load:
    """Return a mix that is offered for half the time."""
    return replace(load, span_s=load.span_s / 2)


def envelope(name: str, load: Load, seeds: Sequence[int]) -> Envelope:
    """Return what the command finds: through the plane, by bisection."""
    nothing = TenantSource(tenant=TENANT, arrivals=Poisson(1.0), lengths=Fixed(1, 1))
    scene = Scenario(
        name="capacity",
        deployment=ours(Length.FAIR),
        mix=Mix(sources=(nothing,), rows=1),  # the traffic stands for it
        batching=ENGINE.batching,
        noise_percent=0.0,
    )
    traffic = of_lengths(name, load.lengths, TENANT, CHAT)
    asked = Question(seeds=tuple(seeds), warm_s=load.warm_s, span_s=load.span_s)
    pool = scene.deployment.pools[0]
    return measure(scene, pool, traffic, asked, now_s=0, rules=ENGINE.rules).envelope


def sweep(load: Load, middle: float, seeds: Sequence[int]) -> list[list[Came]]:
    """Return what comes of rates around one with an open door: of each seed, by rate."""
    found = []
    for seed in seeds:
        own = []
        for nth in range(-BELOW, ABOVE + 1):
            rows = load.rows(middle * STEP**nth, seed)
            tried = stand(ENGINE, rows, open_door())
            own.append(came(load, rows, tried.admitted, tried.met))
        found.append(own)
    return found


def shown(each: Sequence[Came]) -> dict[str, float]:
    """Return one rate of a sweep, as the mean of the seeds."""
    return {
        "offered_work": fmean(one.offered_work() for one in each),
        "met_work": fmean(one.work() for one in each),
        "attainment": fmean(one.attainment() for one in each),
    }
