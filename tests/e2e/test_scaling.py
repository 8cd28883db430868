"""Engine processes that the scaler starts and gives back under load, and nobody's request fails."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI

from headrace.adapters.actuators.process.actuator import Recipe
from headrace.config.schema import GroupsSpec, ServerSpec, Settings
from headrace.gateway.auth import key_hash
from headrace.gateway.clock import LoopClock
from headrace.gateway.providing import provided
from headrace.gateway.server import Gateway, listen
from headrace.model.deployment import TenantSpec
from headrace.model.effect import Concluded
from headrace.model.ids import PoolName
from headrace.model.scaling_spec import Scaling
from headrace.model.slo import Outcome
from headrace.plane.scale_state import Offers
from tests.e2e.test_groups import COMMAND, HELLO, emulated, real
from tests.e2e.test_handover import KEY, SERVE, Served, ended, served, written
from tests.gateway.scaled import TIMES
from tests.gateway.scenes import KEYS, MODEL, assert_books_closed, deployment, keys

pytestmark = pytest.mark.service
PATIENCE_S = 180.0
QUICK = Scaling(
    max=3, times=TIMES, tick_s=0.25, in_window_s=1.0, cancel_window_s=1.0, min_life_s=0.5,
    stale_s=60.0, forecast=None,
)  # fmt: skip


class Scene:
    """A gateway whose pool scales by processes, and what became of its requests."""

    def __init__(self, gateway: Gateway, rows: list[Concluded], sdk: AsyncOpenAI) -> None:
        self.gateway, self.rows, self.sdk = gateway, rows, sdk

    @property
    def there(self) -> int:
        return len(self.gateway.driver.plane.state.pools[PoolName("p")].groups)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 - processes tell nobody here
                await asyncio.sleep(0.05)

    async def ask(self) -> int:
        """Ask for a stream; return how many pieces came."""
        stream = await self.sdk.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=24,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return len([chunk async for chunk in stream])

    async def keep_asking(self, over: asyncio.Event, pause: Callable[[], Awaitable[object]]) -> int:
        asked = 0
        while not over.is_set():
            assert await self.ask() > 1
            asked += 1
            await pause()
        return asked


@asynccontextmanager
async def scene(folder: Path, recipe: Recipe, each: float) -> AsyncIterator[Scene]:
    base = deployment(ttft_ms=60_000, tenants=(TenantSpec(name="free"),))
    pool = replace(base.pools[0], scaling=QUICK, work_rate=each)
    spec = GroupsSpec(pool="p", command=recipe.command, model=recipe.model, kind=recipe.kind)
    settings = Settings(
        deployment=replace(base, pools=(pool, base.pools[1])),
        keys=keys()[:1],
        groups=(spec,),
        server=ServerSpec(port=0, drain_s=0),
    )
    clock, rows = LoopClock(asyncio.get_running_loop()), list[Concluded]()
    sock = listen("127.0.0.1", 0)
    host, port = sock.getsockname()
    sdk = AsyncOpenAI(
        api_key=KEYS["free"], base_url=f"http://{host}:{port}/v1", max_retries=0, timeout=300
    )
    async with provided(settings, clock, folder) as groups, sdk:
        assert groups is not None
        gateway = Gateway(settings, clock, rows.append)
        groups.attach(gateway)
        running = asyncio.create_task(gateway.serve(sock))
        try:
            yield Scene(gateway, rows, sdk)
        finally:
            groups.detach()
            gateway.stop()
            assert await running
            assert_books_closed(gateway.driver.plane)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("recipe", "callers", "each"),
    [pytest.param(emulated, 8, 0.002, id="emulated"), pytest.param(real, 4, 0.0005, id="llamacpp")],
)
async def test_the_scaler_goes_from_one_to_three_and_back_and_no_request_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: Callable[[], Recipe],
    callers: int,
    each: float,
) -> None:
    monkeypatch.setattr(Offers, "MEMORY_S", 2)  # it forgets load within seconds
    async with scene(tmp_path, recipe(), each) as made:
        await made.until(lambda: made.gateway.driver.ready_replicas == 1)
        busy, over = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            loads = [
                tasks.create_task(made.keep_asking(busy, lambda: asyncio.sleep(0)))
                for _ in range(callers)
            ]
            last = tasks.create_task(made.keep_asking(over, lambda: asyncio.sleep(2)))
            await made.until(lambda: made.gateway.driver.ready_replicas == 3)
            seen = len(made.rows)
            await made.until(lambda: len({row.replica for row in made.rows[seen:]}) == 3)
            busy.set()
            await made.until(lambda: made.gateway.driver.ready_replicas == made.there == 1)
            seen = len(made.rows)
            await made.until(lambda: len(made.rows) > seen)
            over.set()
        asked = sum(load.result() for load in (*loads, last))
        assert len(made.rows) == asked
        assert {row.outcome for row in made.rows} == {Outcome.SUCCESS}


STARTED = {
    "pool": "p",
    "command": [sys.executable, "-c", COMMAND, "engine", "--port", "{port}", "--model", "m"],
    "kind": "emulated",
}
ONE_POOL: dict[str, Any] = {
    "models": [{"name": "m"}],
    "pools": [
        {
            "name": "p",
            "model": "m",
            "profile": "h100-8b-tp1",
            "replicas": 2,
            "scaling": {"min": 2, "max": 3, "tick_s": 1.0},
        }
    ],
    "tenants": [{"name": "free"}],
}


def ready(front: Served) -> list[str]:
    """Wait until two groups are ready; return their names."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        (pool,) = json.loads(front.told("/scale"))["pools"]
        found = sorted(one["group"] for one in pool["groups"] if one["standing"] == "ready")
        if len(found) == len(pool["groups"]) == 2:
            return found
        time.sleep(0.1)
    raise AssertionError(front.told("/scale"))


def configured(folder: Path, replicas: int = 2) -> str:
    deployment = {**ONE_POOL, "pools": [{**ONE_POOL["pools"][0], "replicas": replicas}]}
    key = {"name": "free", "tenant": "free", "hash": key_hash(f"{KEY}free")}
    return str(written(folder, deployment=deployment, groups=[STARTED], keys=[key]))


@pytest.fixture(autouse=True)
def _state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_groups_of_a_killed_gateway_end_and_the_next_one_starts_its_own(tmp_path: Path) -> None:
    path = configured(tmp_path)
    with served(SERVE, path) as first:
        assert ready(first) == ["p-0", "p-1"]
        assert first.ask() == 200
        children = engines_of(first.pids[0])
        assert len(children) == 2
        first.process.send_signal(signal.SIGKILL)
        assert all(ended(pid) for pid in children)
    with served(SERVE, path) as second:
        assert ready(second) == ["p-0", "p-1"]
        assert second.ask() == 200


def test_a_group_that_is_lost_is_counted_as_coming_and_comes_back(tmp_path: Path) -> None:
    with served(SERVE, configured(tmp_path)) as front:
        ready(front)
        before = engines_of(front.pids[0])
        os.kill(before[0], signal.SIGKILL)
        assert ended(before[0])
        until = time.monotonic() + PATIENCE_S
        while len(set(engines_of(front.pids[0])) - set(before)) < 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert ready(front) == ["p-0", "p-1"]
        assert front.ask() == 200
        assert 'headrace_group_starts_total{pool="p",result="ready"}' in front.told("/metrics")


def test_a_successor_takes_over_with_groups_that_are_ready(tmp_path: Path) -> None:
    with served(SERVE, configured(tmp_path, replicas=1)) as front:
        assert ready(front) == ["p-0", "p-0.1"]
        front.hand_over()
        assert front.ask() == 200, "its groups were ready before it took over"
        assert len(engines_of(front.pids[1])) == 2, (
            "as many as were wanted, though fewer are at first"
        )
        assert ready(front) == ["p-0", "p-1"]


def engines_of(pid: int) -> list[int]:
    """Return the engine processes of a gateway."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]
