"""A gateway that listens to its engines' caches: what is configured, told to the plane, and shown."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.samples import Sample

from headrace.adapters.engines.fetch import Answer
from headrace.adapters.engines.kv.follower import Reset
from headrace.adapters.engines.kv.publishing import PublishingEngine
from headrace.config.errors import ConfigError
from headrace.config.schema import KvEventsSpec, Settings, UpstreamSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.fleet import engines
from headrace.model.engine import EngineKind
from headrace.model.event import ReplicaForgot
from headrace.ports.clock import Clock
from tests.adapters.kv.publisher import Publisher
from tests.adapters.kv.scenes import CLEARED, batch, prompt, removed, store
from tests.gateway.managed import Managed, value
from tests.gateway.scenes import deployment

pytestmark = pytest.mark.asyncio
WELL = Answer(status=200, body=b"", error=None)
PATIENCE_S = 20.0


def settings(
    kind: EngineKind | None = EngineKind.VLLM, told: KvEventsSpec | None = None
) -> Settings:
    spec = told or KvEventsSpec(endpoint="tcp://127.0.0.1:9")
    upstream = UpstreamSpec(url="http://127.0.0.1:9", pool="p", kind=kind, kv_events=spec)
    return Settings(deployment=deployment(), upstreams=(upstream,))


class Listening:
    """A gateway before one engine that publishes, which is up."""

    def __init__(self, folder: Path) -> None:
        self.publisher = Publisher(folder)
        told = KvEventsSpec(
            endpoint=self.publisher.endpoint,
            replay_endpoint=self.publisher.replay_endpoint,
            topic="kv",
        )
        self.gateway = Managed(lambda clock: self._engines(clock, told))
        self.engine._rise()

    def _engines(self, clock: Clock, told: KvEventsSpec) -> list[Any]:
        found = engines(settings(told=told), clock)
        assert isinstance(found[0], PublishingEngine)
        self.engine = found[0]
        self.engine._closed = True  # nobody looks after its health: there is no server
        return [self.engine]

    async def until(self, blocks: int) -> None:
        """Wait until so many blocks are known."""
        async with asyncio.timeout(PATIENCE_S):
            while self.engine.blocks != blocks:  # noqa: ASYNC110 - in another thread's hands
                await asyncio.sleep(0)

    def forgot(self) -> list[ReplicaForgot]:
        """Return what the plane was told."""
        told = (event for _, event in self.gateway.pages.records())
        return [event for event in told if isinstance(event, ReplicaForgot)]

    def figure(self, found: dict[str, list[Sample]], name: str, **more: str) -> float | None:
        return value(found, f"headrace_engine_kv_{name}", pool="p", replica="p-0", **more)

    def close(self) -> None:
        self.gateway.finish()
        self.publisher.close()


async def test_a_cleared_cache_is_told_to_the_plane_and_all_of_it_is_measured(
    tmp_path: Path,
) -> None:
    one = Listening(tmp_path)
    await one.publisher.subscribed()
    await one.publisher.publish(batch(store(1, 3), {"type": "New"}))
    await one.publisher.publish(batch(removed(102)))
    await one.until(2)
    assert one.engine.cached_tokens(prompt(1, 3)) == 8
    assert not one.forgot()
    await one.publisher.publish(batch(CLEARED, store(2)))
    await one.until(1)
    life = one.engine.incarnation
    assert one.forgot() == [ReplicaForgot(replica=one.engine.name, incarnation=life)]
    found = await one.gateway.scrape()
    shown = {name: one.figure(found, name) for name in ("blocks_held", "event_gaps_total")}
    assert shown == {"blocks_held": 1, "event_gaps_total": 0}
    assert one.figure(found, "blocks_stored_total") == 4
    assert one.figure(found, "blocks_removed_total") == 1
    assert one.figure(found, "resets_total", reason="cleared") == 1
    assert one.figure(found, "events_unread_total", reason="unknown") == 1
    (shown_replica,) = json.loads((await one.gateway.look("/state")).content)["replicas"]
    assert (shown_replica["kv_blocks_cached"], shown_replica["kv_blocks_evicted"]) == (1, 1)
    one.close()


async def test_an_engine_that_falls_is_forgotten_and_heard_anew(tmp_path: Path) -> None:
    one = Listening(tmp_path)
    await one.publisher.subscribed()
    await one.publisher.publish(batch(store(1)))
    await one.until(1)
    one.engine._fall("gone")
    assert one.engine.blocks == 0
    assert not one.forgot(), "its end says so already"
    await one.publisher.publish(batch(store(2)))
    await one.publisher.answer(*await one.publisher.asked())
    await one.until(2)
    one.engine._follower._forget(Reset.LOST)
    assert not one.forgot(), "it is not up"
    one.close()


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_only_of_kinds_that_publish(kind: EngineKind) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    if kind in (EngineKind.VLLM, EngineKind.SGLANG):
        assert isinstance(engines(settings(kind), clock)[0], PublishingEngine)
        return
    with pytest.raises(ConfigError, match=rf"`p-0`: kind `{kind}` publishes none"):
        engines(settings(kind), clock)


async def test_without_the_library_the_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    clock = LoopClock(asyncio.get_running_loop())
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[kv-events\]'"):
        engines(settings(), clock)
    bare = Settings(
        deployment=deployment(), upstreams=(UpstreamSpec(url="http://127.0.0.1:9", pool="p"),)
    )
    assert engines(bare, clock), "nobody else needs it"


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"endpoint": "tcp://*:5557"},
        {"endpoint": "tcp://h:0"},
        {"endpoint": "tcp://h"},
        {"endpoint": "http://h:1"},
        {"endpoint": "inproc://h"},
        {"endpoint": "tcp://h:1", "replay_endpoint": "tcp://*:2"},
        {"endpoint": "tcp://h:1", "hwm": 3},
        {"endpoint": "tcp://h:1", "topic": "x" * 257},
    ],
    ids=str,
)
async def test_what_cannot_be_listened_to_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(told, KvEventsSpec)


@pytest.mark.parametrize("endpoint", ["tcp://h:1", "tcp://[::1]:5557", "ipc:///run/v/events"])
async def test_what_can_be_is_taken(endpoint: str) -> None:
    assert msgspec.convert({"endpoint": endpoint}, KvEventsSpec).endpoint == endpoint
