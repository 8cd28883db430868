"""Deferred requests over real sockets: SDKs, metrics, a process that is killed, one that hands over."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import AsyncOpenAI

from headrace.adapters.jobs.sqlite import SqliteJobs
from headrace.adapters.journal.ring import segments
from headrace.config.errors import ConfigError
from headrace.config.schema import AdminSpec, EmulatorSpec, JobsSpec, ServerSpec, Settings
from headrace.gateway.auth import key_hash
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from headrace.model.ids import TenantId
from headrace.plane.journal import Verified, verify
from headrace.ports.job import Job, State
from tests.gateway.deferring import ASK, config
from tests.gateway.scenes import KEYS, MODEL, keys

pytestmark = pytest.mark.service

KEY = "sk-hr-of-the-test"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "a secret nobody logs"}]}
SERVE = """
import sys
from headrace.cli import main
sys.exit(main(["serve", "--config", sys.argv[1]]))
"""


def settings(folder: Path) -> Settings:
    return Settings(
        deployment=config(replicas=2),
        keys=keys(),
        server=ServerSpec(port=0, drain_s=0, trusted_replay=True),
        emulator=EmulatorSpec(noise_percent=0),
        admin=AdminSpec(port=0, open=True),
        jobs=JobsSpec(file=str(folder / "jobs.db")),
    )


class Answer(NamedTuple):
    """An answer, whatever its status."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def call(method: str, url: str, key: str, body: Any = None, **headers: str) -> Answer:
    """Ask, and wait for the answer."""
    told = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
    content = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, content, told, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=60) as found:
            return Answer(found.status, found.headers, found.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, error.read())


@pytest.mark.asyncio
async def test_an_sdk_hands_over_and_finds_its_answer(tmp_path: Path) -> None:
    given = settings(tmp_path)
    gateway = Gateway(given, LoopClock(asyncio.get_running_loop()))
    sock, admin_sock = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    place = f"http://127.0.0.1:{sock.getsockname()[1]}"
    admin = f"http://127.0.0.1:{admin_sock.getsockname()[1]}"
    serving = asyncio.create_task(gateway.serve(sock, admin_sock))
    key = KEYS["free"]
    async with AsyncOpenAI(api_key=key, base_url=f"{place}/v1", max_retries=0) as sdk:
        raw = await sdk.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=4,
            extra_headers=ASK,
        )
        assert raw.status_code == 202
        where = place + raw.headers["location"]
        done = await asyncio.to_thread(call, "GET", where, key, prefer="wait=20")
        assert done.status == 200
        assert done.json()["usage"]["completion_tokens"] == 4
        over = await asyncio.to_thread(call, "DELETE", where, key)
        assert over.json()["status"] == "done"
        cut = await asyncio.to_thread(call, "GET", f"{place}/v1/headrace/jobs/none", key)
        assert (cut.status, cut.headers["x-should-retry"]) == (404, "false")

        metrics = (await asyncio.to_thread(call, "GET", f"{admin}/metrics", "")).body.decode()
        assert 'headrace_deferred_requests_total{class="batch",tenant="free"} 1.0' in metrics
        assert 'headrace_deferred_ended_total{result="done"} 1.0' in metrics
        assert f'headrace_deferred_limit{{model="{MODEL}"}}' in metrics
        assert "headrace_deferred_store_ok 1.0" in metrics
        state = (await asyncio.to_thread(call, "GET", f"{admin}/state", "")).json()["jobs"]
        assert (state["ended"], state["trouble"]) == ({"done": 1}, None)
    gateway.stop()
    assert await serving


def test_a_file_that_is_none_of_jobs_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_bytes(b"nothing of ours" * 100)

    async def start() -> None:
        Gateway(settings(tmp_path), LoopClock(asyncio.get_running_loop()))

    with pytest.raises(ConfigError, match=r"jobs\.db"):
        asyncio.run(start())


# Real processes ---------------------------------------------------------------------------------


def written(folder: Path) -> Path:
    """Write a configuration in which at most 20 jobs run at a time."""
    told = {
        "deployment": {
            "models": [{"name": "m"}],
            "pools": [{"name": "p", "model": "m", "profile": "h100-8b-tp1", "replicas": 2}],
            "tenants": [{"name": "free"}],
        },
        "keys": [{"name": "free", "tenant": "free", "hash": key_hash(KEY)}],
        "server": {"port": 0, "trusted_replay": True},
        "admin": {"port": 0, "open": True},
        "journal": {"path": str(folder / "journal")},
        "jobs": {"file": str(folder / "jobs.db"), "leftover": {"at_once": 20}},
    }
    path = folder / "headrace.json"
    path.write_text(json.dumps(told))
    return path


class Served:
    """A gateway's process, as its callers see it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        greeting = [process.stdout.readline() for _ in range(2)]
        found = [re.search(r"http://[\d.]+:\d+", line) for line in greeting]
        assert all(found), greeting
        self.place, self.admin = (one.group() for one in found if one is not None)

    def defer(self, tokens: int, **headers: str) -> str:
        told = {**ASK, "x-headrace-replay-output": str(tokens), **headers}
        answer = call("POST", f"{self.place}/v1/chat/completions", KEY, HELLO, **told)
        assert answer.status == 202, answer.body
        return str(answer.headers["location"])

    def look(self, where: str, wait: int = 0) -> Answer:
        return call("GET", self.place + where, KEY, prefer=f"wait={wait}")

    def jobs(self) -> Any:
        return call("GET", f"{self.admin}/state", "").json()["jobs"]

    def running(self) -> int:
        return sum(self.jobs()["running"].values())


@contextmanager
def served(path: Path) -> Iterator[Served]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        one = Served(process)
        try:
            yield one
        finally:
            process.kill()


def stored(folder: Path) -> list[Job]:
    async def read() -> list[Job]:
        store = SqliteJobs(folder / "jobs.db")
        jobs = await store.page(TenantId("free"), limit=1_000)
        results = [await store.result(TenantId("free"), one.spec.id) for one in jobs]
        assert [one.state is State.DONE for one in jobs] == [one is not None for one in results]
        await store.close()
        return jobs

    return asyncio.run(read())


@pytest.mark.slow
def test_a_killed_gateways_jobs_end_once_each_and_the_unwanted_never_run(tmp_path: Path) -> None:
    path = written(tmp_path)
    with served(path) as first:
        long = [first.defer(600) for _ in range(20)]
        while first.running() < 20:
            pass
        short = [first.defer(3) for _ in range(60)]
        unwanted = [first.defer(3) for _ in range(5)]
        late = [first.defer(3, **{"x-llm-d-inference-ttl": "1s"}) for _ in range(5)]
        for where in unwanted:
            assert call("DELETE", first.place + where, KEY).status == 200
        begin_by = max(first.look(where).json()["begin_by"] for where in late)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    while time.time() <= begin_by + 1:
        pass  # nobody is waited for: only the deadline must be over
    with served(path) as second:
        for where in [*long, *short]:
            assert second.look(where, wait=50).status == 200
        assert {second.look(where).status for where in unwanted} == {410}
        assert {second.look(where).status for where in late} == {504}
        second.process.send_signal(signal.SIGTERM)
        out, err = second.process.communicate()
        assert (second.process.returncode, out) == (0, "headrace: stopped\n")
        assert "secret" not in err
    jobs = stored(tmp_path)
    assert Counter(one.state for one in jobs) == {
        State.DONE: 80,
        State.CANCELLED: 5,
        State.EXPIRED: 5,
    }
    for one in jobs:
        if one.state is State.DONE:
            assert one.attempts == 1 + one.lost, "again only because its process was killed"
        else:
            assert one.attempts == 0, "it never ran"
    assert 0 < sum(one.lost for one in jobs) <= 20
    assert isinstance(verify(segments(tmp_path / "journal")), Verified)


@pytest.mark.slow
def test_jobs_go_on_through_a_hand_over_without_being_taken_from_anybody(tmp_path: Path) -> None:
    path = written(tmp_path)
    with served(path) as first:
        long = [first.defer(300) for _ in range(6)]
        while first.running() < 6:
            pass
        more = [first.defer(3) for _ in range(10)]
        first.process.send_signal(signal.SIGUSR2)
        for where in [*long, *more]:
            assert first.look(where, wait=50).status == 200
        assert first.process.wait(60) == 0
        assert first.process.stdout is not None
        said = first.process.stdout.readline()
        pid = re.search(r"process (\d+) serves on", said)
        assert pid, said
        os.kill(int(pid.group(1)), signal.SIGTERM)
        first.process.stdout.read()
    jobs = stored(tmp_path)
    assert {one.state for one in jobs} == {State.DONE}
    assert {(one.attempts, one.lost) for one in jobs} == {(1, 0)}, "what ran was finished"
