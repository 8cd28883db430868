"""Files and batches by the SDK: from end to end, and through a kill of the gateway that works on them."""

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch, FileObject

from headrace.adapters.engines.server.engine import EngineServer, EngineSpec
from headrace.config.profiles import load_profile
from headrace.gateway.auth import key_hash
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from tests.e2e.test_deferred import KEY, Served, call, served, settings
from tests.gateway.filing import line, lines
from tests.gateway.scenes import KEYS

pytestmark = [pytest.mark.service, pytest.mark.asyncio]

OVER = ("completed", "failed", "expired", "cancelled")


async def ended(sdk: AsyncOpenAI, batch: str) -> Batch:
    """Poll a batch until it is over."""
    while (found := await sdk.batches.retrieve(batch)).status not in OVER:
        pass
    return found


async def answers(sdk: AsyncOpenAI, file: str | None) -> dict[str, Any]:
    """Return the lines of a file of answers by custom_id; each is there once."""
    if file is None:
        return {}
    content = (await sdk.files.content(file)).text
    told = [json.loads(one) for one in content.splitlines()]
    found = {one["custom_id"]: one for one in told}
    assert len(found) == len(told)
    return found


async def batched(sdk: AsyncOpenAI, content: bytes, **fields: Any) -> Batch:
    """Put a file and make a batch of it."""
    file = await sdk.files.create(file=("in.jsonl", content), purpose="batch")
    told = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    return await sdk.batches.create(input_file_id=file.id, **told)


async def test_an_sdk_puts_a_file_and_fetches_the_answers_of_its_batch(tmp_path: Path) -> None:
    gateway = Gateway(settings(tmp_path), LoopClock(asyncio.get_running_loop()))
    sock, admin_sock = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    place = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    admin = f"http://127.0.0.1:{admin_sock.getsockname()[1]}"
    serving = asyncio.create_task(gateway.serve(sock, admin_sock))
    async with AsyncOpenAI(api_key=KEYS["free"], base_url=place, max_retries=0) as sdk:
        content = lines(300) + line("wrong", max_tokens=10**7)
        file = await sdk.files.create(
            file=("mine.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7_200},
        )
        assert (file.bytes, file.filename, file.purpose) == (len(content), "mine.jsonl", "batch")
        assert (file.expires_at or 0) - file.created_at == 7_200
        assert (await sdk.files.retrieve(file.id)) == file
        assert (await sdk.files.content(file.id)).content == content
        batch = await sdk.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"for": "tests"},
            output_expires_after={"anchor": "created_at", "seconds": 3_600},
        )
        assert (batch.status, batch.metadata) == ("validating", {"for": "tests"})
        cancelled = await sdk.batches.cancel((await batched(sdk, lines(9))).id)
        assert cancelled.status in ("cancelling", "cancelled")
        failed = await ended(sdk, (await batched(sdk, line("a") + line("a"))).id)
        assert failed.errors is not None
        told = [(one.code, one.line) for one in failed.errors.data or ()]
        assert told == [("duplicate_custom_id", 2)]

        found = await ended(sdk, batch.id)
        assert found.status == "completed"
        assert found.request_counts is not None
        assert found.request_counts.to_dict() == {"total": 301, "completed": 300, "failed": 1}
        output = await answers(sdk, found.output_file_id)
        assert list(output) == [f"{n}" for n in range(300)]
        assert {one["response"]["status_code"] for one in output.values()} == {200}
        (wrong,) = (await answers(sdk, found.error_file_id)).values()
        assert wrong["response"]["status_code"] == 400
        assert len([one async for one in sdk.batches.list(limit=1)]) == 3
        await refused(sdk, batch, file)

        metrics = (await asyncio.to_thread(call, "GET", f"{admin}/metrics", "")).body.decode()
        for sample in (
            'headrace_batches{status="completed"} 1.0',
            'headrace_batches{status="failed"} 1.0',
            'headrace_batch_lines_total{to="output"} 300.0',
            "headrace_files_bytes ",
        ):
            assert sample in metrics
    gateway.stop()
    assert await serving


async def refused(sdk: AsyncOpenAI, over: Batch, file: FileObject) -> None:
    """Do what cannot be done, by the SDK's own errors; delete a file."""
    files = [one.id async for one in sdk.files.list(limit=2, order="asc", purpose="batch")]
    assert len(files) == 3
    assert (await sdk.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        await sdk.files.content(file.id)
    with pytest.raises(openai.BadRequestError, match="left to be cancelled"):
        await sdk.batches.cancel(over.id)
    with pytest.raises(openai.BadRequestError, match="batches alone"):
        await sdk.files.create(file=b"x", purpose="vision")


# Real processes ---------------------------------------------------------------------------------


class Witness:
    """An emulated engine that counts what it is asked, and ends no answer until it is let."""

    def __init__(self) -> None:
        spec = EngineSpec(profile=load_profile("h100-8b-tp1"), model="m", speed=5.0)
        self.server = EngineServer(spec, LoopClock(asyncio.get_running_loop()))
        self.server._server.config.app = self
        self.asked: Counter[str] = Counter()
        """Requests by what they say."""
        self.running: set[str] = set()
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request of HTTP."""
        if scope["path"] != "/v1/chat/completions":
            await self.server.app(scope, receive, send)
            return
        parts: list[bytes] = []
        said: list[str] = []

        async def heard() -> Any:
            message = await receive()
            parts.append(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                told = json.loads(b"".join(parts)).get("messages")
                if told:  # else the gateway looks which kind of engine it is
                    said.append(told[0]["content"])
                    self.asked[said[0]] += 1
                    self.running.add(said[0])
            return message

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await self.may_end.wait()
            await send(message)

        try:
            await self.server.app(scope, heard, answer)
        finally:
            self.running.difference_update(said)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        sock = listen("127.0.0.1", 0)
        running = asyncio.create_task(self.server.serve(sock))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            self.server.stop()
            assert await running


def written(folder: Path, engine: str) -> Path:
    """Write a configuration in which at most 50 jobs run at a time."""
    told = {
        "deployment": {
            "models": [{"name": "m"}],
            "pools": [{"name": "p", "model": "m", "profile": "h100-8b-tp1", "replicas": 0}],
            "tenants": [{"name": "free"}],
        },
        "keys": [{"name": "free", "tenant": "free", "hash": key_hash(KEY)}],
        "server": {"port": 0},
        "admin": {"port": 0, "open": True},
        "upstreams": [{"url": engine, "pool": "p", "model": "m", "kind": "emulated"}],
        "jobs": {"file": str(folder / "jobs.db"), "leftover": {"at_once": 50}},
    }
    path = folder / "headrace.json"
    path.write_text(json.dumps(told))
    return path


def named(name: str, count: int) -> bytes:
    """Return lines whose prompts say which they are."""
    return b"".join(
        line(f"{n}", model="m", messages=[{"role": "user", "content": f"{name} {n}"}])
        for n in range(count)
    )


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Look until it is so."""
    while not await holds():
        pass


@asynccontextmanager
async def process(path: Path) -> AsyncIterator[tuple[Served, AsyncOpenAI]]:
    """A gateway in a process of its own, and an SDK that asks it."""
    with ExitStack() as stack:
        one = await asyncio.to_thread(stack.enter_context, served(path))
        async with AsyncOpenAI(api_key=KEY, base_url=f"{one.place}/v1", max_retries=0) as sdk:
            yield one, sdk


async def check(sdk: AsyncOpenAI, wanted: Batch, late: Batch, unwanted: Batch) -> None:
    """Wait for the ends of all three, and read every line of them."""
    done = await ended(sdk, wanted.id)
    assert (done.status, done.error_file_id) == ("completed", None)
    output = await answers(sdk, done.output_file_id)
    assert list(output) == [f"{n}" for n in range(500)]
    assert {one["response"]["status_code"] for one in output.values()} == {200}
    for batch, status in ((late, "expired"), (unwanted, "cancelled")):
        found = await ended(sdk, batch.id)
        assert (found.status, found.output_file_id) == (status, None)
        assert found.request_counts is not None
        assert found.request_counts.to_dict() == {"total": 20, "completed": 0, "failed": 20}
        told = await answers(sdk, found.error_file_id)
        assert list(told) == [f"{n}" for n in range(20)]
        assert {one["error"]["code"] for one in told.values()} == {f"batch_{status}"}


@pytest.mark.slow
async def test_each_line_of_a_killed_gateways_batches_is_answered_once_and_the_unwanted_never_run(
    tmp_path: Path,
) -> None:
    engine = Witness()
    async with engine.serving() as place:
        path = written(tmp_path, place)
        async with process(path) as (first, sdk):
            wanted = await batched(sdk, named("wanted", 500))

            async def all_run() -> bool:
                await sdk.batches.retrieve(wanted.id)
                return len(engine.running) == 50

            await until(all_run)
            late = await batched(sdk, named("late", 20), completion_window="1s")
            unwanted = await batched(sdk, named("unwanted", 20))

            async def are_jobs() -> bool:
                found = [await sdk.batches.retrieve(one.id) for one in (late, unwanted)]
                return all(one.status != "validating" for one in found)

            await until(are_jobs)
            assert (await sdk.batches.cancel(unwanted.id)).status in ("cancelling", "cancelled")
            assert await asyncio.to_thread(first.running) == 50
            ran = set(engine.running)
            first.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.process.wait)
        assert engine.asked == Counter(ran)
        while time.time() <= (late.expires_at or 0) + 1:
            pass  # nobody is waited for: only the window must be over
        engine.may_end.set()
        async with process(path) as (second, sdk):
            await check(sdk, wanted, late, unwanted)
            second.process.send_signal(signal.SIGTERM)
            out, err = await asyncio.to_thread(second.process.communicate)
            assert (second.process.returncode, out) == (0, "headrace: stopped\n")
            assert "wanted" not in err
    every = Counter(f"wanted {n}" for n in range(500))
    assert engine.asked == every + Counter(ran), "again only what was running, the rest once"


@pytest.mark.slow
async def test_a_batch_goes_on_through_a_hand_over(tmp_path: Path) -> None:
    engine = Witness()
    async with engine.serving() as place, process(written(tmp_path, place)) as (first, sdk):
        batch = await batched(sdk, named("wanted", 700))

        async def some_run() -> bool:
            await sdk.batches.retrieve(batch.id)
            return len(engine.running) >= 3

        await until(some_run)
        first.process.send_signal(signal.SIGUSR2)
        assert first.process.stdout is not None
        said = await asyncio.to_thread(first.process.stdout.readline)
        pid = re.search(r"process (\d+) serves on", said)
        assert pid, said
        engine.may_end.set()
        found = await ended(sdk.with_options(max_retries=3), batch.id)
        assert (found.status, found.error_file_id) == ("completed", None)
        output = await answers(sdk, found.output_file_id)
        assert list(output) == [f"{n}" for n in range(700)]
        os.kill(int(pid.group(1)), signal.SIGTERM)
        assert await asyncio.to_thread(first.process.wait) == 0
        await asyncio.to_thread(first.process.stdout.read)
    every = Counter(f"wanted {n}" for n in range(700))
    assert engine.asked == every, "none was taken from whom it ran at"
