"""Who is told a request's rank, and by what: the kind of an engine and how it was started decide."""

import json
from itertools import product

import pytest

from headrace.adapters.engines.kinds import KINDS
from headrace.model.engine import EngineKind, Scheduler
from headrace.model.ids import AttemptId
from headrace.ports.engine import Route
from tests.adapters.test_remote import World, scene
from tests.adapters.upstream.scenes import Scene

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
__all__ = ["scene"]

ALL = tuple(product(EngineKind, Scheduler))
BY_PRIORITY, METADATA = {"priority"}, {"vllm_xargs"}
TOLD = {
    (EngineKind.VLLM, Scheduler.PRIORITY): BY_PRIORITY,
    (EngineKind.VLLM, Scheduler.HEADRACE): METADATA,
    (EngineKind.SGLANG, Scheduler.PRIORITY): BY_PRIORITY,
    **{(EngineKind.EMULATED, scheduler): METADATA for scheduler in Scheduler},
}
"""What is sent beside the caller's own words; to all others nothing is."""
REFUSED = {
    *product(
        (EngineKind.LLAMACPP, EngineKind.TRTLLM, EngineKind.OPENAI),
        (Scheduler.PRIORITY, Scheduler.HEADRACE),
    ),
    (EngineKind.SGLANG, Scheduler.HEADRACE),
    (EngineKind.EMULATED, Scheduler.PRIORITY),
}


async def sent(scene: Scene, route: Route, kind: EngineKind, scheduler: Scheduler) -> set[str]:
    """Return what an engine is told of a request's rank."""
    world = World(scene)
    await world.start(kind=kind, scheduler=scheduler, proven=True)
    await world.submit(route=route)
    body = json.loads(world.asked[-1].requests[-1].partition(b"\r\n\r\n")[2])
    world.engine.abort(AttemptId(1))
    await scene.until(lambda: not any(peer.is_open for peer in world.asked))
    world.engine.close()
    return set(body) & (BY_PRIORITY | METADATA)


@pytest.mark.parametrize(("kind", "scheduler"), ALL)
async def test_an_engine_is_told_what_orders_it_and_no_more(
    scene: Scene, kind: EngineKind, scheduler: Scheduler
) -> None:
    told = TOLD.get((kind, scheduler), set())
    assert await sent(scene, Route.CHAT, kind, scheduler) == told
    assert await sent(scene, Route.COMPLETIONS, kind, scheduler) == told
    assert await sent(scene, Route.MESSAGES, kind, scheduler) == told - BY_PRIORITY
    assert not await sent(scene, Route.EMBEDDINGS, kind, scheduler), "nothing is generated there"


@pytest.mark.parametrize(("kind", "scheduler"), ALL)
async def test_a_kind_that_cannot_be_ordered_so_is_told_in_the_log_once_it_is_found_out(
    scene: Scene, kind: EngineKind, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    cannot = (kind, scheduler) in REFUSED
    assert KINDS[kind].may_have(scheduler) is not cannot
    world = World(scene)
    await world.start(kind=None, scheduler=scheduler, proven=True)
    world.engine._detected(kind)
    fault = (
        f"engine r: no engine of kind `{kind}` has the scheduler `{scheduler}`: it is told nothing"
    )
    assert caplog.messages == [fault] * cannot
    world.engine.close()
