"""Which engines a configuration names, and that the plane can tell them apart."""

import asyncio
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.adapters.engines.fetch import Answer
from headrace.adapters.engines.inprocess import InProcessEngine
from headrace.adapters.engines.kinds import KINDS
from headrace.adapters.engines.remote import RemoteEngine
from headrace.config.errors import ConfigError
from headrace.config.resolve import resolved
from headrace.config.schema import EmulatorSpec, Settings, UpstreamSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.driver import Driver
from headrace.gateway.fleet import engines, fitting
from headrace.model.engine import EngineKind, Scheduler
from headrace.policy.batching import ChunkedPrefill
from headrace.policy.catalog import Window
from headrace.units import NS_PER_MS
from tests.adapters.test_emulated import Ear, LateClock, call
from tests.config.configs import BASE
from tests.gateway.scenes import deployment

pytestmark = pytest.mark.asyncio
WELL = Answer(status=200, body=b"", error=None)
PLACES = tuple(f"http://127.0.0.1:{port}" for port in (9, 10, 11))


async def test_every_engine_of_a_pool_serves_beside_emulated_ones() -> None:
    config = deployment()
    first, second = config.pools
    config = replace(config, pools=(first, replace(second, replicas=2)))
    settings = Settings(
        deployment=config,
        upstreams=tuple(
            UpstreamSpec(url=place, pool="p", kind=EngineKind.OPENAI) for place in PLACES
        ),
    )
    clock = LoopClock(asyncio.get_running_loop())
    found = engines(settings, clock)
    driver = Driver(clock, found)
    driver.start(config)
    for engine in found:
        if isinstance(engine, RemoteEngine):
            engine._keyed(WELL)
    assert [engine.name for engine in found] == ["p-0", "p-1", "p-2", "q-0", "q-1"]
    assert driver.ready_replicas == 5
    driver.stop()


async def test_emulated_engines_fill_their_steps_as_configured() -> None:
    """One slot and eight prompt tokens a step: who comes second waits, the first takes 63 steps."""
    clock = LateClock()
    settings = Settings(
        deployment=deployment(),
        emulator=EmulatorSpec(batching=ChunkedPrefill(token_budget=8, running_limit=1)),
    )
    found = engines(settings, clock)[0]
    assert isinstance(found, InProcessEngine)
    made, ear = found._engine, Ear(clock)
    made.connect(ear)
    made.submit(call(1))
    made.submit(call(2))
    clock.run(10 * NS_PER_MS)
    made.poll()
    (report,) = ear.reports
    assert (report.running, report.waiting) == (1, 1)
    assert report.waiting_prefill_tokens is not None
    assert 900 < report.waiting_prefill_tokens < 1_000


async def test_emulated_engines_start_with_the_steps_that_their_pool_has_by_now() -> None:
    window = Window(step_tokens={"p": 96, "q": None})
    settings = Settings(deployment=replace(deployment(), window=window))
    found = engines(settings, LateClock())[0]
    assert isinstance(found, InProcessEngine)
    assert found._engine._replica.profile.token_budget == 96


@pytest.mark.parametrize(("kind", "scheduler"), list(product((None, *EngineKind), Scheduler)))
async def test_a_kind_that_cannot_be_ordered_so_is_refused_with_its_line(
    kind: EngineKind | None, scheduler: Scheduler
) -> None:
    one = f"- url: http://h:1\n  pool: p\n  kind: {kind or 'null'}\n  scheduler: {scheduler}\n"
    found = resolved(f"{BASE}upstreams:\n{one}", "d", Path(), {}, {})
    if kind is None or KINDS[kind].may_have(scheduler):
        assert fitting(found) is found
        return
    with pytest.raises(ConfigError) as caught:
        fitting(found)
    known = ", ".join(each for each in Scheduler if KINDS[kind].may_have(each))
    assert str(caught.value) == (
        f"d:14: no engine of kind `{kind}` has the scheduler `{scheduler}` "
        f"at `$.upstreams[0].scheduler` (known: {known})"
    )
