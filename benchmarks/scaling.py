"""How much is lost to starts, and what does it cost, beside who knows the load beforehand (SCALE-2..5)?

Conversations at 10 req/s with bursts of 34 for 300 s and of 45 for 60 s, with starts of 10, 90 and 300 s; a day of
a reasoning service, client by client, thinned to an eighth, five windows of three hours of it; and a day of a
general service, thinned to one request a second, which a floor of two groups serves whatever comes: there nothing
is to be asked for. Starts of the services take 90 s.

`yardstick` says what could not have been served and what a clairvoyant holds, from the trace alone;
`scaling_runs` how runs are held against that; `scaling_rules` holds other autoscalers' rules against what was
published of them first. Three claims of every load: unserved work in the spans over U, attainment over what is
offered outside of them, GPU-hours over the clairvoyant's; of several seeds or windows the worse end of the 95 % interval. And the logs of all
decisions: nothing is reversed within a window, and no more asked for than is needed.

HEADRACE_DATA names the folder of public traces; without it there are the bursts alone, of tables' lengths.
"""

from collections.abc import Sequence

from benchmarks import scaling_rules, servegen, tenants
from benchmarks.capacity import envelope
from benchmarks.harness import CLAIM_SEEDS, Claim, Result, at_least, at_most, interval95
from benchmarks.mixes import TENANT, mixes
from benchmarks.scaling_runs import OTHERS, Load, Ran
from benchmarks.scaling_runs import run as ran
from benchmarks.scaling_table import text
from benchmarks.scenes import CHAT
from headrace.model.envelope import Envelope
from headrace.model.scaling_spec import By
from headrace.trace.generate import generate
from headrace.trace.mix import Mix, Ramp, Segment, TenantSource

STARTS_S = (10.0, 90.0, 300.0)
USUAL_S = 90.0
TUNING_SEEDS = (0, 1, 2)
"""Of envelopes."""
SHORT_UNTIL_S = (120.0, 240.0, 540.0, 600.0, 660.0)
"""Of the quick form."""
WINDOWS_H = (0, 3, 9, 15, 21)
"""When windows of the day begin: its two peaks, with the fall of the first, and two calm ones."""
WINDOW_S = 3 * 3_600
OTHERS_SEEDS, OTHERS_HOURS = 1, (9,)
"""How many seeds of the bursts and which windows other rules run on, in the full form: theirs are no claims."""


def run(quick: bool, seeds: Sequence[int] = CLAIM_SEEDS) -> Result:
    """Measure all; quick takes short bursts, one seed and starts of 90 s."""
    seeds = seeds[:1] if quick else seeds
    known = envelopes(quick)
    claims, rules = ([], {}) if quick else scaling_rules.reproduced()
    found = short(known, seeds[0]) if quick else full(known, seeds)
    mine = [one for one in found if one.rule is By.SLO]
    claims += held(mine, quick=quick)
    detail = {"envelopes": known, "rules": rules, "runs": found}
    return Result(
        name="scaling", claims=claims, seeds=list(seeds), detail=detail, table=text(found)
    )


def envelopes(quick: bool) -> tuple[Envelope, ...]:
    """Return what one group holds of conversations and of reasoning."""
    names, seeds = (("conv",), TUNING_SEEDS[:2]) if quick else (("conv", "reasoning"), TUNING_SEEDS)
    return tuple(envelope(name, mixes()[name], seeds) for name in names)


def short(known: tuple[Envelope, ...], seed: int) -> list[Ran]:
    """Return short bursts under every rule."""
    return [ran(bursts(seed, SHORT_UNTIL_S), by, USUAL_S, known, seed) for by in (By.SLO, *OTHERS)]


def full(known: tuple[Envelope, ...], seeds: Sequence[int]) -> list[Ran]:
    """Return every load, under ours and where time allows under the others."""
    found = []
    for start_s in STARTS_S:
        for by in (By.SLO, *OTHERS):
            some = seeds if by is By.SLO else seeds[:OTHERS_SEEDS]
            found += [ran(bursts(seed), by, start_s, known, seed) for seed in some]
    if tenants.data_dir() is None:
        return found
    first = seeds[0]
    for hour in WINDOWS_H:
        load = reasoning(first, 3_600 * hour, WINDOW_S, "reasoning, 3 h")
        rules = (By.SLO, *OTHERS) if hour in OTHERS_HOURS else (By.SLO,)
        found += [ran(load, by, USUAL_S, known, first) for by in rules]
    day = reasoning(first, 0, servegen.DAY_S, "reasoning, a day")
    return [*found, *(ran(load, By.SLO, USUAL_S, known, first) for load in (day, general(first)))]


# Loads -------------------------------------------------------------------------------------------


def bursts(seed: int, until_s: Sequence[float] | None = None) -> Load:
    """Return conversations with two bursts, whose parts may end at other times."""
    steps = scaling_rules.BURSTS.segments
    if until_s is not None:
        steps = tuple(
            Segment(until_s=end, rate=one.rate) for one, end in zip(steps, until_s, strict=True)
        )
    source = TenantSource(
        tenant=TENANT, slo_class=CHAT, arrivals=Ramp(steps), lengths=tenants.conv()
    )
    end_s = steps[-1].until_s
    rows = generate(Mix(sources=(source,), duration_s=end_s), seed)
    return Load(name="bursts", rows=rows, span_s=end_s)


def reasoning(seed: int, start_s: int, span_s: int, name: str) -> Load:
    """Return a part of the reasoning service's day, an eighth of its requests."""
    part = servegen.Part(start_s=start_s, span_s=span_s, keep=1 / 8)
    return _served("deepseek-r1", part, seed, name)


def general(seed: int) -> Load:
    """Return a day of the general service, one request a second."""
    return _served("m-large", servegen.Part(rps=1.0), seed, "general, a day")


def _served(service: str, part: servegen.Part, seed: int, name: str) -> Load:
    data = tenants.data_dir()
    assert data is not None, "checked before"
    told = servegen.read(data / "traces" / "servegen" / f"{service}.json.gz")
    rows = servegen.offered(told, part, seed, tenant=TENANT, slo_class=CHAT)
    return Load(name=name, rows=rows, span_s=float(part.span_s))


# Claims ------------------------------------------------------------------------------------------


def held(mine: Sequence[Ran], *, quick: bool) -> list[Claim]:
    """Hold ours against what could be served, what it may cost, and what it promises."""
    claims = []
    for name, start_s in dict.fromkeys((one.load, one.start_s) for one in mine):
        some = [one for one in mine if (one.load, one.start_s) == (name, start_s)]
        most = 1.75 if quick else 1.5 if name == "bursts" else 1.25
        claims += _of_load(f"{name}, starts of {start_s:g} s", some, most)
    for what in ("reversals", "over_asked", "served_first"):
        count = sum(getattr(one.log, what) for one in mine)
        claims.append(at_most(f"decisions of all runs: {what.replace('_', ' ')}", count, 0))
    return claims


def _of_load(name: str, some: Sequence[Ran], most: float) -> list[Claim]:
    lost, spare = [one.unserved_s for one in some], [one.unavoidable_s for one in some]
    claims = []
    if sum(spare):
        over = [a / b for a, b in zip(lost, spare, strict=True) if b]
        claims.append(at_most(f"{name}: unserved in spans over U", worse(over, 1), 1.3))
    outside = worse([one.outside_attained for one in some], -1)
    claims.append(at_least(f"{name}: attainment over offered outside", outside, 0.99))
    cost = worse([one.cost for one in some], 1)
    claims.append(at_most(f"{name}: GPU-hours over the clairvoyant's", cost, most))
    return claims


def worse(values: Sequence[float], sign: int) -> float:
    """Return the upper (1) or lower (-1) end of an interval; a single value stands for itself."""
    if len(values) == 1:
        return values[0]
    found = interval95(values)
    return found.high if sign > 0 else found.low
