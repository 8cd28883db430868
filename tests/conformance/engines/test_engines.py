"""Every engine that can be had, held against its row of the table: what it has, and what it lacks."""

import asyncio
from collections.abc import Iterator

import pytest

from headrace.adapters.engines.detect import Detection
from headrace.adapters.engines.kinds import Feature
from headrace.adapters.upstream.client import Upstream
from headrace.gateway.clock import LoopClock
from headrace.model.engine import EngineKind
from tests.conformance.engines.checks import CHECKS, OK, UNCHECKED, told_error, until_load
from tests.conformance.engines.engine import PATIENCE_S, EngineUnderTest
from tests.conformance.engines.started import MARKS, STARTERS

pytestmark = pytest.mark.service


PARAMS = [pytest.param(name, marks=MARKS.get(name, ())) for name in STARTERS]


@pytest.fixture(scope="module", params=PARAMS)
def engine(request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    """Yield each engine in turn."""
    with STARTERS[request.param]() as started:
        yield started


def test_every_feature_is_checked_or_said_not_to_be() -> None:
    assert CHECKS.keys() | UNCHECKED.keys() == set(Feature)
    assert not CHECKS.keys() & UNCHECKED.keys()


@pytest.mark.asyncio
@pytest.mark.parametrize("feature", CHECKS, ids=lambda feature: feature.name.lower())
async def test_it_has_what_it_is_said_to_have_and_lacks_what_it_is_said_to_lack(
    engine: EngineUnderTest, feature: Feature
) -> None:
    async with engine.client() as client:
        found = await CHECKS[feature](client)
    declared = engine.traits.has(feature)
    assert found == declared, f"{engine.kind} {'has' if found else 'lacks'}: {feature}"


@pytest.mark.asyncio
async def test_it_is_well_and_makes_a_token(engine: EngineUnderTest) -> None:
    async with engine.client() as client:
        reply = await client.http.get(engine.traits.health_path)
        assert reply.status_code == OK
        told = (await client.complete(max_tokens=1)).json()
        assert told["usage"]["completion_tokens"] == 1


@pytest.mark.asyncio
async def test_its_kind_is_found_out(engine: EngineUnderTest) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    upstream, found = Upstream(engine.base, clock), asyncio.Event()
    kinds: list[EngineKind | None] = []

    def told(kind: EngineKind | None) -> None:
        kinds.append(kind)
        found.set()

    Detection(upstream, clock, told)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await found.wait()
    finally:
        upstream.close()
    assert kinds == [engine.kind]


@pytest.mark.asyncio
async def test_a_stream_ends_with_its_usage_and_its_mark(engine: EngineUnderTest) -> None:
    async with engine.client() as client:
        options = {"include_usage": True}
        async with client.stream(max_tokens=5, ignore_eos=True, stream_options=options) as events:
            told = await events.rest()
            assert events.done
        assert told[-1]["usage"]["completion_tokens"] == 5
        assert not any(event.get("usage") for event in told[:-1])


@pytest.mark.asyncio
async def test_who_leaves_frees_its_slot(engine: EngineUnderTest) -> None:
    if not engine.traits.has(Feature.LOAD):
        pytest.skip("it does not tell who runs")
    async with engine.client() as client:
        async with client.endless() as events:
            await events.first()
            await until_load(client, lambda load: load.running == 1)
        await until_load(client, lambda load: load.running == 0)


@pytest.mark.asyncio
async def test_what_is_no_request_is_blamed_in_words(engine: EngineUnderTest) -> None:
    async with engine.client() as client:
        for content in (b'{"model":', b"[]"):
            reply = await client.post("/v1/completions", content)
            assert 400 <= reply.status_code < 500
            assert told_error(reply)
