"""The admin listener of a real process: beside traffic, through a drain, with a file to reload."""

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.adapters.journal.ring import segments
from headrace.cli import main
from headrace.config.schema import AdminSpec, ServerSpec, Settings
from headrace.gateway.auth import key_hash
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from headrace.plane.journal import Verified, verify
from headrace.report.decisions import Verified as DecisionsVerified
from headrace.report.decisions import verify_decisions
from tests.gateway.scenes import KEYS, MODEL, deployment, keys

pytestmark = pytest.mark.service

SERVE = """
import sys
from pathlib import Path
from headrace.cli.serve import serve
sys.exit(serve(config=Path(sys.argv[1])))
"""
KEY, ADMIN, SECRET = "sk-hr-planted-key", "sk-hr-planted-admin", "correct horse battery"


def written(folder: Path, *, rpm: int = 1_000, pool: int = 1) -> Path:
    """Write the configuration; return its path."""
    config = {
        "deployment": {
            "models": [{"name": "m"}],
            "pools": [{"name": "p", "model": "m", "profile": "h100-8b-tp1", "replicas": pool}],
            "tenants": [{"name": "t", "rpm_limit": rpm}],
        },
        "keys": [{"name": "k", "tenant": "t", "hash": key_hash(KEY)}],
        "server": {"port": 0},
        "admin": {
            "port": 0,
            "keys": [{"name": "ops", "hash": key_hash(ADMIN)}],
            "audit_log": str(folder / "audit.jsonl"),
        },
        "journal": {"path": str(folder / "journal")},
        "decision_log": str(folder / "decisions.jsonl"),
    }
    path = folder / "headrace.json"
    path.write_text(json.dumps(config))
    return path


@contextmanager
def served(config: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run the command; yield the process and both addresses."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        greeting = [process.stdout.readline() for _ in range(2)]
        places = [re.search(r"http://[\d.]+:\d+", line) for line in greeting]
        assert places[0], greeting
        assert places[1], greeting
        try:
            yield process, places[0].group(), places[1].group()
        finally:
            process.kill()


def call(url: str, body: Any = None, *, method: str = "GET", key: str = ADMIN) -> tuple[int, str]:
    content = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(
        url,
        data=content,
        method=method if body is None else "POST",
        headers={"authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@contextmanager
def asking(traffic: str) -> Iterator[Callable[[], dict[str, str]]]:
    """Yield what asks for a short answer and returns its headers."""
    with openai.OpenAI(api_key=KEY, base_url=f"{traffic}/v1", max_retries=0) as sdk:

        def ask() -> dict[str, str]:
            answer = sdk.chat.completions.with_raw_response.create(
                model="m", messages=[{"role": "user", "content": SECRET}], max_tokens=3
            )
            return dict(answer.headers)

        yield ask


def finished(process: "subprocess.Popen[str]") -> str:
    """Stop a process as Kubernetes does; return what it wrote to stderr."""
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return err


def test_a_process_is_changed_and_reloaded_and_its_record_replays(tmp_path: Path) -> None:
    config = written(tmp_path)
    with served(config) as (process, traffic, admin), asking(traffic) as ask:
        told = ask()
        assert told["x-headrace-policy-revision"] == "1"
        assert told["x-ratelimit-remaining-requests"] == "999"
        assert call(f"{admin}/policy", {"admission": {"margin_ms": 75}})[0] == 200
        written(tmp_path, rpm=500)
        status, text = call(f"{admin}/reload", {})
        assert status == 200, text
        changed = json.loads(text)["changes"]
        assert changed["deployment.tenants[t].rpm_limit"] == [1_000, 500]
        assert changed["deployment.admission.margin_ms"] == [75.0, 50.0], "as the file says"
        told = ask()
        assert told["x-headrace-policy-revision"] == "3"
        assert told["x-ratelimit-limit-requests"] == "500"
        written(tmp_path, rpm=500, pool=2)
        assert call(f"{admin}/reload", {})[0] == 409
        config.write_text("{")
        assert call(f"{admin}/reload", {})[0] == 400
        err = finished(process)
    lines = [json.loads(line) for line in err.splitlines()]
    assert [(line["who"], line["what"], line["outcome"]) for line in lines] == [
        ("ops", "policy", "made"),
        ("ops", "reload", "made"),
        ("ops", "reload", "refused"),
        ("ops", "reload", "refused"),
    ]
    assert [json.loads(x) for x in (tmp_path / "audit.jsonl").read_text().splitlines()] == lines
    assert isinstance(verify(segments(tmp_path / "journal")), Verified)
    assert verify_decisions(tmp_path / "decisions.jsonl") == DecisionsVerified(count=4)


def test_a_process_is_watched_and_drained_and_tells_no_secret(tmp_path: Path) -> None:
    with served(written(tmp_path)) as (process, traffic, admin), asking(traffic) as ask:
        ask()
        assert call(f"{admin}/state", key=KEY)[0] == 401, "a tenant's key is none here"
        paths = ("/metrics", "/state", "/config", "/policy", "/tenants", "/keys")
        shown = "".join(call(admin + path)[1] for path in paths)
        assert 'headrace_met_requests_total{class="interactive",tenant="t"} 1.0' in shown
        assert call(f"{admin}/drain", {})[0] == 200
        assert call(f"{traffic}/readyz")[0] == 503
        assert call(f"{traffic}/livez")[0] == 200
        with pytest.raises(openai.InternalServerError) as refused:
            ask()
        dropped = refused.value.response.headers["x-llm-d-request-dropped-reason"]
        assert dropped == "rejected-shutting-down"
        err = finished(process)
    kept = [path.read_text("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    for planted in (KEY, ADMIN, SECRET):
        assert planted not in "".join([shown, err, *kept])
    for planted in (KEY, ADMIN):
        assert key_hash(planted).removeprefix("sha256:") not in shown + err


def test_what_an_answer_was_decided_by_is_told_while_the_process_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(written(tmp_path)) as (process, traffic, _), asking(traffic) as ask:
        told = [ask()["x-headrace-decision-id"] for _ in range(2)]
        for number in told:
            for source in (["journal"], ["--log", "decisions.jsonl"]):
                *flag, name = source
                words = [number, *flag, str(tmp_path / name), "--decision", "--json"]
                assert main(["explain", *words]) == 0
                story = json.loads(capsys.readouterr().out)
                assert str(story["entry"]["decision_id"]) == number
                assert story["entry"]["decision"]["type"] == "admit"
                assert len(story["routes"]) == 1
        assert main(["explain", told[0], str(tmp_path / "journal"), "--decision"]) == 0
        assert "It succeeded at p-0 and met every bound." in capsys.readouterr().out
        finished(process)


@pytest.mark.asyncio
async def test_the_admin_side_answers_until_the_last_stream_is_over() -> None:
    given = Settings(
        deployment=deployment(),
        keys=keys(),
        server=ServerSpec(port=0, drain_s=20, trusted_replay=True),
        admin=AdminSpec(port=0, open=True),
    )
    gateway = Gateway(given, LoopClock(asyncio.get_running_loop()))
    with listen("127.0.0.1", 0) as sock, listen("127.0.0.1", 0) as admin_sock:
        base, admin = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in (sock, admin_sock))
        running = asyncio.create_task(gateway.serve(sock, admin_sock))
        async with openai.AsyncOpenAI(api_key=KEYS["free"], base_url=f"{base}/v1") as sdk:
            stream = await sdk.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hello"}],
                stream=True,
                extra_headers={"x-headrace-replay-output": "200"},
            )
            assert (await asyncio.to_thread(call, f"{admin}/readyz"))[0] == 200
            gateway.stop()
            chunks = [chunk async for chunk in stream if await _told(admin)]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert await running


async def _told(admin: str) -> bool:
    status, _ = await asyncio.to_thread(call, f"{admin}/metrics")
    return status == http.client.OK
