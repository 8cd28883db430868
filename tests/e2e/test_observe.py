"""`headrace serve --observe` and `--shadow` as processes: all pass, and the end says what differed."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from headrace.cli import main
from headrace.report.decisions import Verified, verify_decisions

pytestmark = pytest.mark.service

SERVE = "import sys; from headrace.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"
ENGINE = SERVE.replace("serve", "engine")
STRICT = ("--set", 'deployment.classes=[{"name": "interactive", "ttft_ms": 1}]')
NEW = """
deployment:
  models: [{name: headrace-demo}]
  pools: [{name: demo, model: headrace-demo, profile: h100-8b-tp1}]
  tenants: [{name: demo}]
  classes: [{name: interactive, ttft_ms: 1}]
"""


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """Run the command; yield the process and a caller of it."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, "--port=0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            greeting = "".join(process.stdout.readline() for _ in range(3))
            place = re.search(r"http://\S+/v1", greeting)
            key = re.search(r"sk-hr-\S+(?=,)", greeting)
            assert place, greeting
            assert key, greeting
            if "--upstream" in flags:
                assert "/v1 (1 engine at its address for headrace-demo);" in greeting
                assert process.stderr is not None
                assert process.stderr.readline() == "engine demo-0: ready\n"
            with openai.OpenAI(api_key=key[0], base_url=place[0], max_retries=0) as sdk:
                yield process, sdk
        finally:
            process.kill()


def answered(sdk: openai.OpenAI) -> str | None:
    """Ask for a short answer; return what would have been decided, if the answer tells."""
    answer = sdk.chat.completions.with_raw_response.create(
        model="headrace-demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=3
    )
    assert answer.status_code == 200
    return answer.headers.get("x-headrace-observed")


def ended(process: subprocess.Popen[str]) -> str:
    """Stop a process; return what it said since its greeting."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, ""), err
    return out


def test_observing_lets_pass_what_would_be_refused(tmp_path: Path) -> None:
    log, apart = tmp_path / "decisions.jsonl", tmp_path / "apart.jsonl"
    flags = ("--decisions", str(log), "--shadow-log", str(apart), "--shadow-header")
    with served("--observe", *flags, *STRICT) as (process, sdk):
        assert [answered(sdk) for _ in range(3)] == ["reject:deadline_impossible"] * 3
        out = ended(process)
    assert out.splitlines()[:4] == [
        "headrace: what the configuration would have decided, had it not only observed:",
        "  3 requests: 0 decided alike, 3 admitted by the real plane alone, 0 by the shadow alone",
        "    real   shadow               requests",
        "    admit  deadline_impossible         3",
    ]
    assert out.splitlines()[-1] == "headrace: stopped"
    assert verify_decisions(log) == Verified(count=3)
    assert main(["decisions", "verify", str(log)]) == 0
    lines = [json.loads(line) for line in apart.read_text().splitlines()]
    assert [line["shadow"]["decision"] for line in lines] == ["deadline_impossible"] * 3


def test_real_engines_are_observed_alike() -> None:
    command = [sys.executable, "-c", ENGINE, "--port=0", "--model", "headrace-demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            place = re.search(r"http://[^/]+", engine.stdout.readline())
            assert place
            limits = 'deployment.tenants=[{"name": "demo", "rpm_limit": 2}]'
            with served(
                "--observe", "--upstream", place[0], "--shadow-header", "--set", limits
            ) as (process, sdk):
                told = [answered(sdk) for _ in range(4)]
                out = ended(process)
        finally:
            engine.kill()
    assert told == ["admit", "admit", "reject:request_rate", "reject:request_rate"]
    assert "  4 requests: 2 decided alike, 2 admitted by the real plane alone" in out


def test_a_shadow_reports_the_difference(tmp_path: Path) -> None:
    path, log = tmp_path / "new.yaml", tmp_path / "decisions.jsonl"
    path.write_text(NEW)
    with served("--shadow", str(path), "--decisions", str(log)) as (process, sdk):
        assert answered(sdk) is None
        out = ended(process)
    assert out.startswith(f"headrace: what {path} would decide:\n  1 requests: 0 decided alike")
    assert verify_decisions(log) == Verified(count=2)
    assert "observed" not in log.read_text()
