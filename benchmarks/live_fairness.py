"""Do two tenants in overload get their shares live, over HTTP, read from `/metrics` alone?

A gateway in a process of its own over an emulated A100 70B replica. Tenant `small` offers more
than the replica can serve, `large` three times that, with equal weights, then with 3:1 in favour of `small`,
then with equal weights first come first served, which must fail: else nothing would be shown. Deadlines
are an hour, so that nobody is refused and nobody lends a turn.

Between two scrapes a tenant was backlogged if it waits at both (`tenant_queued_requests`) and its queue
was not empty in between (`tenant_queue_emptied` stands still). Over every interval in which both are, the
difference in service by weight is held against the published bound, 2U with U = max(w_p * L_in, w_q * M),
L_in the longest prompt and M the most tokens that the replica held (Sheng et al., OSDI 2024); what a tick
may be late is added. A run in which an event loop lagged is repeated, three times at most.
"""

import asyncio
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop
from msgspec import Struct

from benchmarks.harness import Claim, Result, at_least, at_most, calibration
from benchmarks.soak_parts import Served, raise_limit
from headrace.config.profiles import load_profile
from headrace.gateway.auth import key_hash, minted
from headrace.load.caller import Answer, Place
from headrace.load.lag import LIMIT_NS, LoopLag
from headrace.load.openloop import Target, offer
from headrace.model.ids import ClassName, TenantId
from headrace.report.stats import nearest_rank
from headrace.trace.generate import generate
from headrace.trace.mix import Lognormal, Mix, Poisson, TenantSource
from headrace.trace.row import TraceRow
from headrace.units import BLOCK_TOKENS, ms, seconds, to_ms

MODEL, PROFILE, CLASS = "llama-3.1-70b", "a100-70b-tp4", "patient"
SMALL, LARGE = TenantId("small"), TenantId("large")
OFFERED = {SMALL: 6.0, LARGE: 18.0}
"""Requests a second; the replica serves about five of this mix."""
LENGTHS = Lognormal(
    input_median=600, input_sigma=0.8, input_max=2_000,
    output_median=120, output_sigma=0.7, output_max=500,
)  # fmt: skip
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
SEEDS = (100, 101)
TRIES = 3
PERIOD_S = 0.1
"""Between two scrapes."""
TICK_S = 0.1
"""How old what a tick told may be."""
CHUNKS_MOST = 3_000.0
DEVIATION_MOST = 0.10


class Plan(Struct, frozen=True):
    """How long is offered, over which windows shares are taken, and how far they may stray."""

    seconds: float
    window_s: float
    seeds: Sequence[int]
    deviation: float
    both: float
    """Share of the time in which both must have waited without a break."""


FULL = Plan(130.0, 60.0, SEEDS, DEVIATION_MOST, 0.8)
QUICK = Plan(
    14.0, 7.0, SEEDS[:1], 2 * DEVIATION_MOST, 0.6
)  # a few dozen requests show the direction


class Look(Struct, frozen=True):
    """One scrape, by tenant where it is about tenants."""

    at: float
    """Seconds."""
    service: dict[str, float]
    """As the counters hold it, before weights."""
    waiting: dict[str, float]
    emptied: dict[str, float]
    output: float
    """Output tokens of all."""
    held: float
    """Tokens in the replica's KV blocks; 0 if it has not told."""


class Seen(Struct, frozen=True, kw_only=True):
    """One run."""

    looks: list[Look]
    lag_ms: float
    """p99, of the callers' loop."""
    gateway_ms: float
    """p99 of the gateway's answer to `/livez`: what its loop lags, and a new connection."""
    scrape_ms: float = 0.0
    """p99 of a scrape's round trip, its own work included."""

    @property
    def valid(self) -> bool:
        """Whether the machine was not what was measured."""
        return self.worst_ms <= to_ms(LIMIT_NS)

    @property
    def worst_ms(self) -> float:
        """The larger of both lags."""
        return max(self.lag_ms, self.gateway_ms)


def run(quick: bool) -> Result:
    """Measure."""
    claims, detail = measure(quick)
    seeds = (QUICK if quick else FULL).seeds
    detail["calibration_s"] = calibration()
    return Result(name="live_fairness", seeds=list(seeds), claims=claims, detail=detail)


def measure(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """Return what is claimed and what explains it, to stand in other benchmarks as well."""
    raise_limit()
    plan = QUICK if quick else FULL
    claims: list[Claim] = []
    detail: dict[str, Any] = {}
    for label, weight in (("1:1", 1), ("3:1", 3)):
        for seed in plan.seeds:
            seen = _valid(plan, seed, weight, "tenant_first")
            made, told = judged(seen, plan, {SMALL: weight, LARGE: 1}, seed)
            claims += [_renamed(claim, f"{label}, seed {seed}: ") for claim in made]
            detail[f"{label}, seed {seed}"] = told
    seen = _valid(plan, plan.seeds[0], 1, "fifo")
    _, told = judged(seen, plan, {SMALL: 1, LARGE: 1}, plan.seeds[0])
    detail["fifo"] = told
    return claims + told_apart(seen, plan, told), detail


def told_apart(seen: Seen, plan: Plan, told: dict[str, Any]) -> list[Claim]:
    """Return that first come first served breaks the limits: else keeping them would mean nothing.

    The bound is out of its reach within seconds, since U grows with the tokens a replica holds.
    """
    if not seen.valid:
        return []
    head, strayed = "first come first served ", told["share_deviation"]
    claims = [at_least(f"{head}strays by more, share deviation", strayed, plan.deviation)]
    if plan is FULL:
        ratio = told["difference"] / (told["two_u"] + told["tick_late"])
        claims.append(at_least(f"{head}exceeds the bound, times", ratio, 1.0))
    return claims


def judged(
    seen: Seen, plan: Plan, weights: dict[TenantId, int], seed: int
) -> tuple[list[Claim], dict[str, Any]]:
    """Return one run's claims; of an invalid one, that it is."""
    lag = seen.worst_ms
    if not seen.valid:
        name = "loop lag p99, ms (invalid: repeat on a quiet machine)"
        return [at_most(name, lag, to_ms(LIMIT_NS))], {"lag_ms": lag}
    both = spans(seen.looks)
    longest = max((span[-1].at - span[0].at for span in both), default=0.0)
    held, late = bound(seen.looks, seed, plan), staleness(both)
    difference = max((gap(span, weights) for span in both), default=0.0)
    strayed = max((deviation(span, weights, plan.window_s) for span in both), default=0.0)
    chunks = streamed(seen.looks)
    claims = [
        at_most("loop lag p99, ms", lag, to_ms(LIMIT_NS)),
        at_most("tokens streamed per second", chunks, CHUNKS_MOST),
        at_least(
            "longest time both are backlogged, of what is offered",
            longest / plan.seconds,
            plan.both,
        ),
        at_most("largest difference in service by weight", difference, held + late),
        at_most(f"share deviation over {plan.window_s:g} s", strayed, plan.deviation),
    ]
    return claims, {
        "lag_ms": seen.lag_ms,
        "gateway_ms": seen.gateway_ms,
        "scrape_ms": seen.scrape_ms,
        "scrapes": len(seen.looks),
        "both_backlogged_s": longest,
        "difference": difference,
        "two_u": held,
        "tick_late": late,
        "share_deviation": strayed,
        "tokens_per_s": chunks,
        "queued_at_end": seen.looks[-1].waiting,
    }


def _renamed(claim: Claim, head: str) -> Claim:
    return Claim(claim=head + claim.claim, value=claim.value, bound=claim.bound, holds=claim.holds)


# What scrapes tell -------------------------------------------------------------------------------

_SERIES = re.compile(
    rb"^headrace_(service_total|served_output_tokens_total|tenant_queued_requests"
    rb"|tenant_queue_emptied_total|replica_kv_blocks_used)\{([^}]*)\} (\S+)$",
    re.MULTILINE,
)
_TENANT = re.compile(rb'tenant="([^"]*)"')


def look(at: float, content: bytes) -> Look:
    """Return what one scrape says."""
    found: dict[bytes, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, labels, value in _SERIES.findall(content):
        tenant = _TENANT.search(labels)
        found[name]["" if tenant is None else tenant.group(1).decode()] += float(value)
    return Look(
        at,
        dict(found[b"service_total"]),
        dict(found[b"tenant_queued_requests"]),
        dict(found[b"tenant_queue_emptied_total"]),
        sum(found[b"served_output_tokens_total"].values()),
        sum(found[b"replica_kv_blocks_used"].values()) * BLOCK_TOKENS,
    )


def spans(looks: Sequence[Look]) -> list[list[Look]]:
    """Return the longest stretches in which both tenants waited all the time."""
    found: list[list[Look]] = []
    before: Look | None = None
    for one in looks:
        if all(one.waiting.get(tenant) for tenant in OFFERED):
            if before is None or before.emptied != one.emptied:
                found.append([])
            found[-1].append(one)
            before = one
        else:
            before = None
    return found


def gap(span: Sequence[Look], weights: dict[TenantId, int]) -> float:
    """Return the largest difference in service by weight over any interval of a stretch."""
    ahead = [
        one.service.get(SMALL, 0.0) / weights[SMALL] - one.service.get(LARGE, 0.0) / weights[LARGE]
        for one in span
    ]
    return max(ahead) - min(ahead)


def deviation(span: Sequence[Look], weights: dict[TenantId, int], window_s: float) -> float:
    """Return the largest share less fair share over any window of a stretch."""
    fair = weights[SMALL] / sum(weights.values())
    worst, first = 0.0, 0
    for last in span:
        while span[first + 1 : first + 2] and span[first + 1].at <= last.at - window_s:
            first += 1
        begin = span[first]
        if last.at - begin.at < window_s:
            continue
        mine, theirs = (last.service[t] - begin.service.get(t, 0.0) for t in (SMALL, LARGE))
        if mine + theirs > 0:
            worst = max(worst, abs(mine / (mine + theirs) - fair))
    return worst


def bound(looks: Sequence[Look], seed: int, plan: Plan) -> float:
    """Return 2U, in the unit of the counters."""
    per_input, per_output = load_profile(PROFILE).service_weights()
    longest = max(row.input_tokens for row in _rows(plan, seed))
    return 2.0 * max(per_input * longest, per_output * max(one.held for one in looks))


def staleness(both: Sequence[Sequence[Look]]) -> float:
    """Return the service of one tick, at the mean rate of the longest stretch."""
    span = max(both, key=len, default=[])
    if len(span) < 2 or span[-1].at == span[0].at:
        return 0.0
    had = sum(span[-1].service.values()) - sum(span[0].service.values())
    return TICK_S * had / (span[-1].at - span[0].at)


def streamed(looks: Sequence[Look]) -> float:
    """Return the most tokens made in a second, over ten scrapes at a time."""
    rates = [
        (later.output - earlier.output) / (later.at - earlier.at)
        for earlier, later in pairwise(looks[::10])
        if later.at > earlier.at
    ]
    return max(rates, default=0.0)


# The run -----------------------------------------------------------------------------------------


def _valid(plan: Plan, seed: int, weight: int, ordering: str) -> Seen:
    """Run, again if this machine was too busy, three times at most."""
    for left in reversed(range(TRIES)):
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
            seen = uvloop.run(_run(plan, seed, weight, ordering, Path(name)))
        if seen.valid or not left:
            return seen
    raise AssertionError("the last try is returned")


def _rows(plan: Plan, seed: int) -> list[TraceRow]:
    sources = tuple(
        TenantSource(
            tenant=tenant, slo_class=ClassName(CLASS), arrivals=Poisson(rate), lengths=LENGTHS
        )
        for tenant, rate in OFFERED.items()
    )
    return generate(Mix(sources=sources, duration_s=plan.seconds), seed)


async def _run(plan: Plan, seed: int, weight: int, ordering: str, folder: Path) -> Seen:
    keys = {tenant: minted() for tenant in OFFERED}
    config = configured(keys, seed, weight, ordering)
    served = await Served.start(config, folder, replicas=1)
    loop = asyncio.get_running_loop()
    scraped: list[Scrape] = []
    lag = LoopLag()
    watching = loop.create_task(_watch(served, scraped))
    try:
        host, port = served.address
        target = Target(
            place=Place(host=host, port=port),
            model=MODEL,
            keys=keys,
            gap_ns=lambda _row: ms(1_000),
            trusted=True,
            spoken=False,
        )
        await _offered(plan, _rows(plan, seed), target)
    finally:
        lag.stop()
        watching.cancel()
        await served.kill()
    return Seen(
        looks=[look((one.began + one.ended) / 2, one.content) for one in scraped],
        lag_ms=to_ms(lag.p99_ns()),
        gateway_ms=_p99_ms([one.began - one.probed for one in scraped]),
        scrape_ms=_p99_ms([one.ended - one.began for one in scraped]),
    )


class Scrape(Struct, frozen=True):
    """One look at the gateway, in seconds of the caller's clock."""

    probed: float
    """When it was asked whether it lives, just before."""
    began: float
    ended: float
    content: bytes


def _p99_ms(took_s: Sequence[float]) -> float:
    took = sorted(seconds(one) for one in took_s)
    return to_ms(nearest_rank(took, 99)) if took else 0.0


async def _offered(plan: Plan, rows: Sequence[TraceRow], target: Target) -> None:
    """Offer rows for as long as is planned, and leave: most still wait then."""

    def note(_index: int, _answer: Answer) -> None:
        """Scrapes tell what is to be known."""

    try:
        async with asyncio.timeout(plan.seconds):
            await offer(rows, target, note)
    except TimeoutError:
        pass


async def _watch(served: Served, scraped: list[Scrape]) -> None:
    """Scrape at a steady rate; what it says is read later."""
    due = time.monotonic()
    while True:
        probed = time.monotonic()
        await served.alive()
        began = time.monotonic()
        content = await served.metrics()
        scraped.append(Scrape(probed, began, time.monotonic(), content))
        due = max(due + PERIOD_S, time.monotonic())
        await asyncio.sleep(due - time.monotonic())


def configured(keys: dict[TenantId, str], seed: int, weight: int, ordering: str) -> dict[str, Any]:
    """Return the gateway's configuration: a class so patient that nothing is refused or lent."""
    order: dict[str, Any] = {"kind": ordering}
    if ordering == "tenant_first":
        order["lend_after_ms"] = DAY_MS
    patient = {"name": CLASS, "ttft_ms": HOUR_MS, "itl_ms": 1_000, "expire": False}
    return {
        "deployment": {
            "models": [{"name": MODEL}],
            "pools": [{"name": "p", "model": MODEL, "profile": PROFILE, "replicas": 1}],
            "tenants": [{"name": SMALL, "weight": weight}, {"name": LARGE}],
            "classes": [patient | {"tenant_queue": 100_000, "queue": 100_000}],
            "admission": {"mode": "audit"},
            "ordering": order,
        },
        "keys": [
            {"name": tenant, "tenant": tenant, "hash": key_hash(key)}
            for tenant, key in keys.items()
        ],
        "emulator": {"seed": seed},
        "server": {"port": 0, "trusted_replay": True, "drain_s": 1},
        "admin": {"port": 0, "open": True},
    }
