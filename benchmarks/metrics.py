"""What do metrics cost: for each request, and for the event loop at each scrape?

The feed is given real decisions and conclusions of a plane that serves answers of 200 tokens. A
scrape reads a gateway of as many tenants as have series of their own, in four classes each.
"""

import asyncio
from collections.abc import Sequence

from benchmarks.harness import Result, at_most, best_of, calibration
from headrace.config.profiles import load_profile
from headrace.config.schema import AdminSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.driver import Driver
from headrace.gateway.feed import Feed
from headrace.gateway.metrics import Metrics, Sources, text
from headrace.model.deployment import DEFAULT_CLASSES, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Concluded, Decided, Dispatch, Effect
from headrace.model.engine import Usage
from headrace.model.event import ConfigChanged, Ended, FirstToken, ReplicaUp, RequestArrived
from headrace.model.evidence import DecisionRecord
from headrace.model.ids import (
    ClassName,
    Incarnation,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.meter import Meter
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.policy.catalog import PlaneConfig, canonical
from headrace.ports.engine import Ask, Route
from headrace.trace.streams import stream
from headrace.units import NS_PER_MS, DurationNs, InstantNs, Tokens

REQUESTS = 500
TOKENS = 200
FEED_US_MAX = 15.0
SCRAPE_MS_MAX = 5.0
_MODEL = ModelName("m")
_ASK = Ask(route=Route.CHAT, body=b"{}", stream=True, usage_shown=False)


def run(quick: bool) -> Result:  # noqa: ARG001 - seconds either way
    """Measure feed and scrape."""
    decided, concluded = _life()
    feed = Feed(_config(1))

    def conclude() -> None:
        for row in concluded:
            feed.concluded(row)

    def decide() -> None:
        for record in decided:
            feed.decided(record)

    conclusion_us = best_of(5, conclude) / len(concluded) * 1e6
    decision_us = best_of(5, decide) / len(decided) * 1e6
    take_ms, write_ms, samples = asyncio.run(_scrape())
    return Result(
        name="metrics",
        claims=[
            at_most("us of CPU to feed one conclusion", conclusion_us, FEED_US_MAX),
            at_most("us of CPU to feed one decision", decision_us, FEED_US_MAX),
            at_most("ms that one scrape holds the event loop", take_ms, SCRAPE_MS_MAX),
        ],
        detail={
            "calibration_s": calibration(),
            "samples": samples,
            "write_ms_beside_the_loop": write_ms,
        },
    )


def _config(tenants: int) -> PlaneConfig:
    pool = PoolSpec(name="p", model=_MODEL, profile=load_profile("h100-8b-tp1"))
    return PlaneConfig(
        models=(ModelSpec(name=_MODEL),),
        pools=(pool,),
        tenants=tuple(TenantSpec(name=f"t{nth}") for nth in range(tenants)),
    )


def _request(nth: int, tenant: str, slo_class: str = "interactive") -> Request:
    return Request(
        id=RequestId(nth),
        tenant=TenantId(tenant),
        model=_MODEL,
        input_tokens=Tokens(500),
        slo_class=ClassName(slo_class),
    )


def _life() -> tuple[Sequence[DecisionRecord], Sequence[Concluded]]:
    """Return what a plane decides and concludes about requests that come one after the other."""
    plane, now, rng = Plane(), 0, stream(0, "metrics")
    plane.handle(ConfigChanged(revision=1, config=canonical(_config(1))), now=InstantNs(0))
    up = ReplicaUp(replica=ReplicaName("r"), incarnation=Incarnation(1), pool=PoolName("p"))
    plane.handle(up, now=InstantNs(0))
    effects: list[Effect] = []
    for nth in range(1, REQUESTS + 1):
        here = plane.handle(RequestArrived(_request(nth, "t0")), now=InstantNs(now))
        (sent,) = [effect for effect in here if isinstance(effect, Dispatch)]
        meter = Meter(bound_ns=DurationNs(80 * NS_PER_MS))
        for token in range(TOKENS):
            now += rng.randint(5, 60) * NS_PER_MS
            meter.note(InstantNs(now))
            if not token:
                plane.handle(FirstToken(sent.attempt), now=InstantNs(now))
        usage = Usage(
            input_tokens=Tokens(500), cached_tokens=Tokens(0), output_tokens=Tokens(TOKENS)
        )
        ended = Ended(
            attempt=sent.attempt, outcome=Outcome.SUCCESS, usage=usage, timing=meter.timing()
        )
        effects += here + plane.handle(ended, now=InstantNs(now))
    decided = [effect.record for effect in effects if isinstance(effect, Decided)]
    return decided, [effect for effect in effects if isinstance(effect, Concluded)]


async def _scrape() -> tuple[float, float, int]:
    """Return ms to read a scrape, ms to write it out, and its samples."""
    tenants = AdminSpec(open=True).tenant_series
    config = _config(tenants)
    clock = LoopClock(asyncio.get_running_loop())
    feed = Feed(config)
    driver = Driver(clock, [], decided=feed.decided, concluded=feed.concluded)
    driver.start(config)
    for tenant in range(tenants):
        for one in DEFAULT_CLASSES:
            driver.offer(_request(driver.mint(), f"t{tenant}", one.name), _ASK)
    sources = Sources(
        refusals=dict,
        ignored=dict,
        token_counts=dict,
        frozen=lambda: False,
        denied=lambda: 0,
        dropped={},
    )
    metrics = Metrics(driver, feed, clock, sources, tenants)
    samples = sum(len(metric.samples) for metric in metrics.collect())
    take_ms = best_of(5, metrics.take) * 1e3
    both_ms = best_of(5, lambda: text(metrics.take())) * 1e3
    driver.stop()
    return take_ms, both_ms - take_ms, samples
