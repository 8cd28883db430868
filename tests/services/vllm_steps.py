"""vLLM's scheduler on virtual time: a process in vLLM's environment that plays scenes.

Importing vLLM takes seconds, so that all tests of a run share one process. It runs whatever class a scene
names, ours from this working tree among them.
"""

import atexit
import os
import select
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import IO

import msgspec

from tests.services.vllm import QUIET, model_folder, needed
from tests.services.vllm_scene import Answer, Run, Scene

_ROOT = Path(__file__).parents[2]
_ANSWER_S = 300.0


class Stepper:
    """The process."""

    def __init__(self, home: Path) -> None:
        """Start it in the environment at `home`."""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        python, model = home / "bin" / "python", model_folder(home)
        self._process = subprocess.Popen(
            [python, "-m", "tests.services.vllm_stepper", model],
            env={
                **os.environ,
                **QUIET,
                "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)]),
                "VLLM_CACHE_ROOT": str(home / "headrace" / "cache"),
            },
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def play(self, scene: Scene) -> Run:
        """Run a scene with one scheduler."""
        (run,) = self.play_beside(scene)
        return run

    def play_beside(self, scene: Scene) -> tuple[Run, ...]:
        """Run a scene with its scheduler and the one beside it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(msgspec.json.encode(scene) + b"\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], _ANSWER_S)
        line = stdout.readline() if ready else b""
        assert line, f"no answer:\n{self._said()}"
        answer = msgspec.json.decode(line, type=Answer)
        assert answer.failed is None, answer.failed
        return answer.runs

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4_000:].decode(errors="replace")


@cache
def _shared(home: Path) -> Stepper:
    stepper = Stepper(home)
    atexit.register(stepper.stop)
    return stepper


def shared() -> Stepper:
    """Return the process that all tests share, or skip the running test; it ends with this one."""
    return _shared(needed())


def schedule_ns(run: Run, *, running: int, prefill: bool) -> list[int]:
    """Return what `schedule` took in real time, of steps with so many running that have prompts or not."""
    return [
        step.schedule_ns
        for step in run.steps
        if step.tokens and step.running == running and bool(step.prompts) is prefill
    ]


def quantile(values: Iterable[int], share: float) -> int:
    """Return the value that a share of them is below or equal to."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
