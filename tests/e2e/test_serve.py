"""`headrace serve` as a process of its own: greeting, answer, Ctrl-C, record."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.adapters.journal.ring import segments
from headrace.cli.serve import demo_settings, serve
from headrace.config.errors import ConfigError
from headrace.model.engine import EngineKind
from headrace.plane.journal import Verified, verify
from headrace.report.decisions import Verified as DecisionsVerified
from headrace.report.decisions import verify_decisions

pytestmark = pytest.mark.service

SERVE = """
import sys
from pathlib import Path
from headrace.cli.serve import serve
folder = Path(sys.argv[1])
sys.exit(serve(port=0, journal=folder / "journal", decisions=folder / "decisions.jsonl"))
"""


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run the command; yield the process, its address and its key."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        greeting = [process.stdout.readline() for _ in range(3)]
        place = re.search(r"http://\S+/v1", greeting[0])
        key = re.search(r"sk-hr-\S+(?=,)", greeting[1])
        assert place, greeting
        assert key, greeting
        assert greeting[2].lstrip().startswith("curl -N")
        try:
            yield process, place.group(), key.group()
        finally:
            process.kill()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_process_serves_and_stops_well(tmp_path: Path, sent: signal.Signals) -> None:
    with served(tmp_path) as (process, place, key):
        with openai.OpenAI(api_key=key, base_url=place, max_retries=0) as sdk:
            answer = sdk.chat.completions.create(
                model="headrace-demo",
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=3,
            )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        process.send_signal(sent)
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out == "headrace: stopped\n"
        assert err == ""
        assert key not in "".join(
            path.read_text("latin-1") for path in tmp_path.rglob("*") if path.is_file()
        )
    found = verify(segments(tmp_path / "journal"))
    assert isinstance(found, Verified)
    assert found.records >= 8
    assert verify_decisions(tmp_path / "decisions.jsonl") == DecisionsVerified(count=2)


def test_flags_of_the_emulated_fleet_are_refused_beside_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--replicas") as refused:
        serve(config=tmp_path / "headrace.yaml", replicas=3, model="m")
    assert len(refused.value.faults) == 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"upstream": ["http://127.0.0.1:1"], "replicas": 3}, "--replicas"),
        ({"upstream_key_env": "KEY"}, "--upstream-key-env"),
        ({"engine_kind": EngineKind.VLLM}, "--engine-kind"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        serve(port=0, **flags)


def test_a_certificate_that_cannot_be_read_is_named() -> None:
    tls = ("server.tls.cert_file=nope.pem", "server.tls.key_file=nope.key")
    with pytest.raises(ConfigError, match=r"nope\.pem.*no such file"):
        serve(port=0, sets=tls)


def test_the_demo_fleet_is_what_the_flags_say() -> None:
    given = {"server.port": "0", "deployment.pools.0.work_rate": "0.5"}
    found = demo_settings("sk", given, replicas=5, profile="a100-8b-tp1", model="mine")
    (pool,) = found.settings.deployment.pools
    assert (pool.replicas, pool.profile.name, pool.model) == (5, "a100-8b-tp1", "mine")
    assert (found.settings.server.port, pool.work_rate) == (0, 0.5)
    assert not found.warnings


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown profile 'gpu'"):
        serve(profile="gpu")


def test_what_is_not_served_yet_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="one answer a request"):
        serve(port=0, sets=("deployment.models.0.fan_out_limit=2",))


def test_as_many_files_may_be_open_as_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReachedError(Exception):
        pass

    def reached(*_: object) -> None:
        raise ReachedError

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr("headrace.cli.serve.listen", reached)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        with pytest.raises(ReachedError):
            serve(port=0)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
