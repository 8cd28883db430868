"""Groups of engine processes behind a gateway: more, fewer, lost; and nobody's request fails."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from headrace.adapters.actuators.process.actuator import ProcessActuator, Recipe
from headrace.cli.local import MODEL as LOCAL
from headrace.cli.local import missing
from headrace.cli.local import recipe as llamacpp
from headrace.config.schema import ServerSpec, Settings
from headrace.gateway.clock import LoopClock
from headrace.gateway.groups import Groups
from headrace.gateway.server import Gateway, listen
from headrace.model.effect import Concluded
from headrace.model.engine import EngineKind
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.slo import Outcome
from headrace.ports.actuator import Stage, stage_seconds
from headrace.units import DurationNs, seconds
from tests.gateway.managed import ADMIN_KEY, SPEC
from tests.gateway.scenes import KEYS, MODEL, Caller, assert_books_closed, deployment, keys
from tests.support import require_service

pytestmark = [pytest.mark.asyncio, pytest.mark.service]
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the sea."}]
POOL = PoolName("p")
COMMAND = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
PATIENCE_S = 60.0


def emulated() -> Recipe:
    """Return how an emulated engine is started as a process."""
    told = ("engine", "--port", "{port}", "--model", MODEL)
    command = (sys.executable, "-c", COMMAND, *told)
    return Recipe(command=command, model=MODEL, kind=EngineKind.EMULATED)


def real() -> Recipe:
    """Return how llama.cpp is started, under the name by which the gateway has the model."""
    if missing():
        require_service("llamacpp", "; ".join(missing()))
    given = llamacpp()
    command = tuple(MODEL if part == LOCAL else part for part in given.command)
    return replace(given, command=command, model=MODEL)


class Scene:
    """A gateway whose engines are groups of processes, and what became of its requests."""

    def __init__(self, folder: Path, recipe: Recipe, drain_ns: DurationNs) -> None:
        clock = LoopClock(asyncio.get_running_loop())
        settings = Settings(
            deployment=deployment(replicas=0, ttft_ms=60_000),
            keys=keys(),
            server=ServerSpec(port=0, drain_s=0),
            admin=SPEC,
        )
        self.rows: list[Concluded] = []
        self.actuator = ProcessActuator(clock, folder, {POOL: recipe})
        self.groups = Groups(self.actuator, clock, drain_ns=drain_ns)
        self.gateway = Gateway(settings, clock, self.rows.append)
        self.groups.attach(self.gateway)
        self.sock = listen("127.0.0.1", 0)
        host, port = self.sock.getsockname()
        self.sdk = AsyncOpenAI(
            api_key=KEYS["free"], base_url=f"http://{host}:{port}/v1", max_retries=0, timeout=300
        )

    async def grow(self, *names: str) -> None:
        """Have so many groups more, all of them serving."""
        rising = [self.groups.grow(ReplicaName(name), POOL) for name in names]
        for event in await asyncio.gather(*rising):
            assert event.stage is Stage.READY, event
        await self.until_serving(len(self.groups.ready))

    async def until_serving(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.gateway.driver.ready_replicas != count:  # noqa: ASYNC110 - probes tell
                await asyncio.sleep(0.01)

    async def shrink(self, *names: str) -> None:
        going = [self.groups.shrink(ReplicaName(name)) for name in names]
        for event in await asyncio.gather(*going):
            assert event.stage is Stage.STOPPED, event

    async def ask(self, tokens: int = 24) -> int:
        """Ask for a stream; return how many pieces came."""
        stream = await self.sdk.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return len([chunk async for chunk in stream])

    def incarnations(self) -> list[int]:
        models = self.gateway.driver.plane.state.models.values()
        return [one.incarnation for known in models for one in known.fleet.replicas.values()]

    async def shown(self) -> list[dict[str, Any]]:
        """Return the groups as `/state` shows them."""
        admin = self.gateway.admin
        assert admin is not None
        caller = Caller(admin, path="/state", method="GET", body=b"", key=ADMIN_KEY)
        groups: list[dict[str, Any]] = (await caller.done()).json["groups"]
        return groups

    def pid(self, name: str) -> int:
        ranks = self.actuator._held[ReplicaName(name)].ranks
        assert ranks is not None
        return ranks._processes[0].pid


@asynccontextmanager
async def scene(folder: Path, recipe: Recipe, drain_s: float = PATIENCE_S) -> AsyncIterator[Scene]:
    made = Scene(folder, recipe, seconds(drain_s))
    running = asyncio.create_task(made.gateway.serve(made.sock))
    try:
        async with made.sdk:
            yield made
    finally:
        made.groups.detach()
        made.gateway.stop()
        assert await running
        made.actuator.kill()
        await made.actuator.close()
        assert_books_closed(made.gateway.driver.plane)


async def _one_three_one(folder: Path, recipe: Recipe, callers: int) -> Scene:
    """Go from one group to three and back under load, with one of the first two to go."""
    async with scene(folder, recipe) as made:
        await made.grow("a")
        over = asyncio.Event()

        async def caller() -> int:
            asked = 0
            while not over.is_set():
                assert await made.ask() > 1
                asked += 1
            return asked

        async with asyncio.TaskGroup() as tasks:
            loads = [tasks.create_task(caller()) for _ in range(callers)]
            await made.grow("b", "c")
            seen = len(made.rows)
            async with asyncio.timeout(PATIENCE_S):
                while {row.replica for row in made.rows[seen:]} != {"a", "b", "c"}:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await made.shrink("a", "c")
            seen = len(made.rows)
            async with asyncio.timeout(PATIENCE_S):
                while len(made.rows) < seen + callers:  # noqa: ASYNC110 - callers go on
                    await asyncio.sleep(0.01)
            over.set()
        asked = sum(load.result() for load in loads)
        assert len(made.rows) == asked
        assert {row.outcome for row in made.rows} == {Outcome.SUCCESS}
        assert {row.replica for row in made.rows[seen + callers :]} <= {"b"}
        assert [group.name for group in made.actuator.groups()] == ["b"]
        for name in "abc":
            events = [one for one in made.actuator.record if one.group == name]
            up = [one.stage for one in events][:6]
            assert up[0] is Stage.ASKED
            assert up[-1] is Stage.READY
            assert all(took >= 0 for took in stage_seconds(events).values())
        return made


async def test_from_one_to_three_and_back_no_request_fails(tmp_path: Path) -> None:
    await _one_three_one(tmp_path, emulated(), callers=8)


async def test_from_one_to_three_and_back_on_llamacpp_no_request_fails(tmp_path: Path) -> None:
    await _one_three_one(tmp_path, real(), callers=4)


async def test_a_stream_that_runs_has_its_time_and_no_more(tmp_path: Path) -> None:
    """What is to go takes nothing new; past the deadline it goes with what it has."""
    async with scene(tmp_path, emulated(), drain_s=0.5) as made:
        await made.grow("a", "b")
        long = asyncio.create_task(made.ask(tokens=8_000))
        async with asyncio.timeout(PATIENCE_S):
            while not made.gateway.driver.plane.state.ledger.flights:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (live,) = made.gateway.driver.plane.state.live.values()
        chosen = live.replica
        assert chosen is not None
        shrinking = asyncio.create_task(made.shrink(chosen))
        assert await made.ask() > 1
        await shrinking
        with suppress(Exception):
            await long
        (other,) = [row for row in made.rows if row.outcome is Outcome.SUCCESS]
        assert other.replica != chosen
        lost = [row for row in made.rows if row.outcome is Outcome.ERROR]
        assert [row.replica for row in lost] == [chosen]
        assert [row.reason for row in lost] == ["replica_lost"]


async def test_a_group_that_is_killed_comes_back_as_another_life(tmp_path: Path) -> None:
    async with scene(tmp_path, emulated()) as made:
        await made.grow("a")
        assert await made.ask() > 1
        (first,) = made.incarnations()
        (group,) = await made.shown()
        assert (group["group"], group["life"], group["stage"]) == ("a", 1, "ready")
        assert list(group["seconds"])[-1] == "ready"
        os.kill(made.pid("a"), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while made.incarnations() in ([], [first]):  # noqa: ASYNC110 - probes tell
                await asyncio.sleep(0.01)
        (second,) = made.incarnations()
        assert second > first
        assert [(one["life"], one["stage"]) for one in await made.shown()] == [(2, "ready")]
        assert await made.ask() > 1


async def test_a_group_that_is_to_go_and_dies_first_stays_away(tmp_path: Path) -> None:
    async with scene(tmp_path, emulated()) as made:
        await made.grow("a", "b")
        running = [asyncio.create_task(made.ask(tokens=8_000)) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while len(made.gateway.driver.plane.state.ledger.flights) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        shrinking = asyncio.create_task(made.shrink("a"))
        await asyncio.sleep(0)
        os.kill(made.pid("a"), signal.SIGKILL)
        await shrinking
        assert made.groups.ready == ("b",)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
