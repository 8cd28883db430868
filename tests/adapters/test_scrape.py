"""How an engine is found out, made ready and asked for its load; whatever fails there is told, once."""

import logging
from collections.abc import AsyncIterator, Callable
from itertools import pairwise

import pytest
import pytest_asyncio

from headrace.adapters.engines.fetch import PAGE_MAX
from headrace.adapters.engines.remote import Patience, RemoteEngine
from headrace.adapters.engines.scrape import FAILURES
from headrace.adapters.upstream.client import Upstream
from headrace.model.engine import EngineKind, Snapshot
from headrace.model.ids import PoolName, ReplicaName
from headrace.units import NS_PER_S, DurationNs
from tests.adapters.test_exposition import page
from tests.adapters.test_remote import Heard, answer
from tests.adapters.upstream.scenes import OK, Peer, Scene

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
TOKEN = answer(200, b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
NOT_THERE = answer(404, b'{"error":"no"}')
KINDS_BY_PATH = {
    EngineKind.VLLM: {"/metrics": page("vllm.txt")},
    EngineKind.SGLANG: {"/get_server_info": b'{"tp_size":1,"model_path":"m"}'},
    EngineKind.LLAMACPP: {"/props": b'{"default_generation_settings":{},"total_slots":4}'},
    EngineKind.TRTLLM: {"/prometheus/metrics": page("trtllm.txt")},
    EngineKind.EMULATED: {"/metrics": b"headrace_engine_info{} 1\n" + page("vllm.txt")},
    EngineKind.OPENAI: {"/metrics": b"<html>hello</html>", "/props": b"[1]"},
}


def missing(world: "World") -> tuple[str, ...]:
    """Return what the engine should tell and does not."""
    return world.engine.missing


class Reports(Heard):
    """A listener that remembers reports too."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.snapshots: list[Snapshot] = []

    def reported(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)


class World:
    """A server with so many paths, and the engine that it is."""

    def __init__(self, scene: Scene, kind: EngineKind | None) -> None:
        self.scene, self.kind, self.heard = scene, kind, Reports(scene)
        self.paths: dict[str, bytes] = {"/health": OK, "/v1/completions": TOKEN}
        self.asked: list[str] = []

    async def start(self) -> "World":
        self.server = await self.scene.server(self._behave)
        upstream = Upstream(f"http://127.0.0.1:{self.server.port}", self.scene.clock)
        self.scene.pools.append(upstream.pool)
        wait = DurationNs(30 * NS_PER_S)
        self.engine = RemoteEngine(
            ReplicaName("r"),
            PoolName("p"),
            upstream,
            self.scene.clock,
            model="theirs",
            patience=Patience(first_byte_ns=wait, gap_ns=wait),
            kind=self.kind,
        )
        self.engine.connect(self.heard)
        return self

    def _behave(self, peer: Peer) -> None:
        path = peer.requests[-1].split(b" ")[1].decode()
        self.asked.append(path)
        said = self.paths.get(path, NOT_THERE)
        if said:  # else it is silent
            peer.say(said)
        self.scene.changed()

    async def polls(self, count: int) -> None:
        """Let so many looks come and go, a second apart."""
        for _ in range(count):
            self.engine.poll()
            await self.scene.turns(60)
            await self.pass_s(1)

    async def pass_s(self, seconds: float) -> None:
        due = self.scene.loop.time() + seconds
        self.scene.loop.call_at(due, self.scene.changed)
        await self.scene.until(lambda: self.scene.loop.time() >= due)


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await made.assert_nothing_left()


@pytest.mark.parametrize("kind", EngineKind)
async def test_a_kind_is_found_out_once_by_what_only_it_has(scene: Scene, kind: EngineKind) -> None:
    world = World(scene, None)
    world.paths |= {path: answer(200, body) for path, body in KINDS_BY_PATH[kind].items()}
    await world.start()
    await world.polls(2)
    assert world.engine.is_up
    assert world.engine._kind is kind
    looked = [path for path in world.asked if path == "/props"]
    await world.polls(3)
    assert [path for path in world.asked if path == "/props"] == looked


@pytest.mark.parametrize("said", [answer(503, b"{}"), answer(500, b"{}"), b""])
async def test_health_alone_makes_nothing_ready(
    scene: Scene, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(scene, EngineKind.VLLM)
    world.paths["/v1/completions"] = said
    await world.start()
    await world.polls(40)
    assert world.heard.lives == []
    assert "no token yet" in caplog.text
    world.paths["/v1/completions"] = TOKEN
    await world.polls(31)
    assert world.heard.lives == [("up", 1)]


async def test_one_that_completes_no_texts_is_ready_all_the_same(scene: Scene) -> None:
    world = World(scene, EngineKind.VLLM)
    world.paths["/v1/completions"] = NOT_THERE
    await world.start()
    await world.polls(1)
    assert world.heard.lives == [("up", 1)]


UNKNOWN_MODEL = b'{"error":{"message":"The model `theirs` does not exist.","code":404}}'
MODELS = b'{"object":"list","data":[%s]}'
OURS = answer(200, MODELS % b'{"id":"other"},{"id":"theirs"}')
OTHERS = answer(200, MODELS % b'{"id":"other"}')


@pytest.mark.parametrize(
    ("refusal", "listed", "rises"),
    [
        (NOT_THERE, NOT_THERE, True),
        (NOT_THERE, OURS, True),
        (NOT_THERE, OTHERS, False),
        (answer(405, b""), OURS, True),
        (answer(400, b"{}"), OTHERS, False),
        (answer(400, UNKNOWN_MODEL), OURS, True),
        (answer(404, UNKNOWN_MODEL), NOT_THERE, False),
        (answer(404, UNKNOWN_MODEL), answer(200, b"<html>"), False),
        (answer(404, UNKNOWN_MODEL), answer(200, b"[" * 5_000), False),
        (answer(400, b'{"error":{"code":"model_not_found"}}'), NOT_THERE, False),
        (answer(501, b""), OURS, False),
    ],
)
async def test_who_refuses_its_first_question_is_ready_unless_it_has_another_model(
    scene: Scene,
    refusal: bytes,
    listed: bytes,
    rises: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(scene, EngineKind.VLLM)
    world.paths |= {"/v1/completions": refusal, "/v1/models": listed}
    await world.start()
    await world.polls(3)
    assert world.heard.lives == ([("up", 1)] if rises else [])
    if not rises:
        assert world.engine.trouble
        assert world.engine.trouble in caplog.text
        world.paths |= {"/v1/completions": TOKEN, "/v1/models": OURS}
        await world.polls(2)
        assert world.heard.lives == [("up", 1)]
        assert world.engine.trouble is None


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.OPENAI])
async def test_one_that_lost_its_model_while_it_served_is_down_until_it_lists_it(
    scene: Scene, kind: EngineKind
) -> None:
    world = World(scene, kind)
    world.paths |= {"/v1/models": OURS}
    await world.start()
    await world.polls(1)
    assert world.heard.lives == [("up", 1)]
    world.engine.doubt_model()
    await world.polls(1)
    assert world.heard.lives == [("up", 1)], "it lists it: one request's bad luck"
    world.paths |= {"/v1/models": OTHERS}
    world.engine.doubt_model()
    await world.polls(4)
    assert world.heard.lives == [("up", 1), ("down", 1)]
    assert world.engine.trouble == "it has no model named 'theirs'"
    world.paths |= {"/v1/models": OURS}
    await world.polls(2)
    assert world.heard.lives[2:] == [("up", 2)]


@pytest.mark.parametrize("fault", [answer(500, b""), answer(503, b"{}"), answer(429, b""), b""])
async def test_a_kind_that_failures_hide_is_asked_for_again(scene: Scene, fault: bytes) -> None:
    world = World(scene, None)
    hidden = ("/metrics", "/props", "/get_server_info", "/prometheus/metrics")
    world.paths |= dict.fromkeys(hidden, fault)
    await world.start()
    await world.polls(2)
    assert world.heard.lives == []
    world.paths |= {"/metrics": answer(200, page("vllm.txt")), "/v1/models": OURS}
    await world.polls(12)
    assert world.engine._kind is EngineKind.VLLM
    assert world.heard.lives == [("up", 1)]
    assert world.engine.trouble is None
    assert world.heard.snapshots


async def test_one_whose_kind_is_never_told_rises_and_is_asked_again_now_and_then(
    scene: Scene,
) -> None:
    world = World(scene, None)
    world.paths["/metrics"] = answer(500, b"")
    await world.start()
    await world.polls(50)
    assert world.heard.lives == [("up", 1)], "as little as any is known of"
    assert world.asked.count("/metrics") == FAILURES
    world.paths["/metrics"] = answer(200, page("vllm.txt"))
    await world.polls(20)
    assert world.engine._kind is EngineKind.VLLM
    assert world.heard.lives == [("up", 1)]
    assert world.heard.snapshots


async def test_whatever_a_page_says_it_ends_in_a_report_or_in_none(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(scene, EngineKind.VLLM)
    twice = b'vllm:num_requests_running{rank="%d"} 1e308\n'
    long = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1\n' % (b"9" * 5_000)
    world.paths["/metrics"] = answer(200, twice % 0 + twice % 1 + long)
    await world.start()
    await world.polls(5)
    assert "running" in missing(world)
    assert {told.running for told in world.heard.snapshots} == {None}
    assert {told.kv_blocks_total for told in world.heard.snapshots} == {None}
    assert "does not tell its load" in caplog.text


async def test_a_hosted_one_is_asked_for_neither_token_nor_load(scene: Scene) -> None:
    world = await World(scene, EngineKind.OPENAI).start()
    await world.polls(5)
    assert world.asked.count("/v1/chat/completions") == 1, "an empty request, for our key"
    assert set(world.asked) == {"/health", "/v1/chat/completions"}
    assert missing(world) == ()


async def test_the_load_is_reported_as_of_when_it_was_asked_for(scene: Scene) -> None:
    world = World(scene, EngineKind.VLLM)
    world.paths["/metrics"] = answer(200, page("vllm.txt"))
    await world.start()
    await world.polls(3)
    told = world.heard.snapshots
    assert len(told) == 2, "one for each poll while it is up"
    assert (told[0].replica, told[0].incarnation, told[0].running, told[0].kv_blocks_used) == (
        "r",
        1,
        9,
        1_000,
    )
    gaps = {b.observed_at - a.observed_at for a, b in pairwise(told)}
    assert gaps == {NS_PER_S}
    assert told[-1].observed_at <= scene.clock.now()
    assert missing(world) == ()


Fault = Callable[[World], object]
FAULTS: dict[str, Fault] = {
    "path": lambda world: world.paths.pop("/metrics"),
    "waiting": lambda world: world.paths.update(
        {"/metrics": answer(200, page("vllm.txt").replace(b"num_requests_waiting", b"queue"))}
    ),
    "silent": lambda world: world.paths.update({"/metrics": b""}),
}


@pytest.mark.parametrize("signal", FAULTS)
async def test_a_load_path_that_fails_is_told_once_and_once_when_it_is_back(
    scene: Scene, signal: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(scene, EngineKind.VLLM)
    well = world.paths["/metrics"] = answer(200, page("vllm.txt"))
    await world.start()
    await world.polls(2)
    FAULTS[signal](world)
    await world.polls(8 * FAILURES)
    assert missing(world) == (signal,)
    assert world.engine.is_up, "it serves all the same"
    world.paths["/metrics"] = well
    await world.polls(6)
    assert missing(world) == ()
    told = [line for line in caplog.messages if "load" in line]
    assert told == [
        f"engine r does not tell its load: {signal}; see docs/engines.md",
        "engine r tells its load again",
    ]


async def test_llamacpp_without_metrics_tells_by_its_slots(scene: Scene) -> None:
    world = World(scene, EngineKind.LLAMACPP)
    world.paths["/metrics"] = answer(501, b'{"error":{"code":501}}')
    world.paths["/slots"] = answer(200, b'[{"is_processing":true},{"is_processing":false}]')
    await world.start()
    await world.polls(4)
    assert {told.running for told in world.heard.snapshots} == {1}
    assert {told.waiting for told in world.heard.snapshots} == {None}
    assert missing(world) == ("waiting",)
    world.paths["/slots"] = NOT_THERE
    await world.polls(1)
    assert missing(world) == ("path",)


async def test_a_page_that_cannot_be_read_or_is_too_large_is_no_report(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    world = World(scene, EngineKind.LLAMACPP)
    world.paths["/slots"] = answer(200, b"<html>")
    await world.start()
    await world.polls(4)
    assert missing(world) == ("unreadable",)
    large = b"llamacpp:requests_processing 1\n" + b"#" * PAGE_MAX
    world.paths["/metrics"] = world.paths["/slots"] = answer(200, large)
    await world.polls(FAILURES + 1)
    assert missing(world) == ("silent",)
    assert world.heard.snapshots == []


async def test_one_that_falls_is_asked_for_no_load_and_lacks_nothing(scene: Scene) -> None:
    world = World(scene, EngineKind.VLLM)
    await world.start()
    await world.polls(2)
    assert missing(world) == ("path",)
    world.paths["/health"] = answer(500, b"{}")
    await world.polls(4)
    assert not world.engine.is_up
    assert missing(world) == ()
    before = world.asked.count("/metrics")
    await world.polls(3)
    assert world.asked.count("/metrics") == before
