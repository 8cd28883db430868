"""A real vLLM on the CPU with a small random model, as processes of its own on a free loopback port.

HEADRACE_VLLM names the environment that has it (`make test-vllm` makes one and sets it); models are made
there on first use. One server is shared by all tests of a run, since it takes half a minute to start.
"""

import atexit
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from msgspec import Struct

from tests.support import require_service

ENVIRONMENT = "HEADRACE_VLLM"
MODEL = "tiny"
SLOTS = 2
CONTEXT = 32_768
QUEUE_BOUND = 8
"""Requests inside, running and waiting, beyond which the shared one refuses."""
BLOCKS, BLOCK_TOKENS = 2_048, 32
"""Of its KV cache."""
_START_S = 300.0
_STOP_S = 30.0
_PAUSE_S = 0.2
_MAKER = Path(__file__).with_name("vllm_model.py")
_ROOT = Path(__file__).parents[2]
_SITE = Path(__file__).with_name("vllm_site")
_SLEPT = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)

# vLLM's own entry as a module; its console script asks for a distribution of another name. It ends with
# its standard input, so that it does not outlive whoever started it.
_SERVE = """
import os, runpy, signal, threading
def watch():
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Two threads that spin for work would leave nobody else on two cores a turn.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
SHARED_FLAGS = (
    *("--max-model-len", str(CONTEXT)),
    *("--max-num-seqs", str(SLOTS)),
    *("--max-num-batched-tokens", "2048"),
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
    *("--max-num-queued-reqs", str(QUEUE_BOUND)),
    *("--scheduling-policy", "priority"),
    "--enable-prompt-tokens-details",
    "--enable-scale-out",  # opens /inference/v1/abort_requests
)


class VllmServer(Struct, frozen=True, kw_only=True):
    """One that runs: an API server, its engine and that one's worker, in a group of processes."""

    process: subprocess.Popen[bytes]
    base: str
    """Its address, without `/v1`."""
    log: IO[bytes]

    @property
    def pid(self) -> int:
        """The API server's process; that of the group as well."""
        return self.process.pid

    def get(self, path: str) -> bytes:
        """Return what is under a path."""
        with urllib.request.urlopen(self.base + path, timeout=_STOP_S) as reply:
            content: bytes = reply.read()
            return content

    def post(self, path: str, body: object) -> None:
        """Send what is asked for under a path."""
        request = urllib.request.Request(
            self.base + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_STOP_S) as reply:
            reply.read()

    def said(self, characters: int = 4_000) -> str:
        """Return the end of its log."""
        self.log.seek(0)
        return self.log.read()[-characters:].decode(errors="replace")

    def is_gone(self) -> bool:
        """Return whether none of its processes is left."""
        self.process.poll()
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def sleeps(self) -> int:
        """Return how often its engine and its worker gave up their turn until something woke them."""
        slept = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended
                ours = os.getpgid(int(folder.name)) == self.pid
                if ours and (folder / "comm").read_text().startswith("VLLM::"):
                    slept += sum(map(int, _SLEPT.findall((folder / "status").read_text())))
        return slept

    def kill(self) -> None:
        """Have all of its processes be gone at once: told to stop, it ends its streams as if whole."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """End all of its processes; those that do not go within half a minute are killed."""
        assert self.process.stdin is not None
        self.process.terminate()
        self.process.stdin.close()
        if not self._goes():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            assert self._goes(), f"vLLM's processes stay though they were killed: group {self.pid}"
        self.log.close()

    def _goes(self) -> bool:
        """Wait until all of its processes are gone, and return whether they are."""
        until = time.monotonic() + _STOP_S
        while not self.is_gone():
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_S)
        return True


def environment() -> Path | None:
    """Return the folder of vLLM's environment; None if there is none."""
    named = os.environ.get(ENVIRONMENT)
    folder = Path(named) if named else None
    return folder if folder is not None and (folder / "bin" / "python").exists() else None


def needed() -> Path:
    """Return the folder of vLLM's environment, or skip the running test."""
    folder = environment()
    if folder is None:
        require_service("vllm", f"{ENVIRONMENT} names no environment of vLLM; make test-vllm")
    return folder


def model_folder(home: Path, size: str = MODEL) -> Path:
    """Return the folder of a model, made on first use."""
    digest = hashlib.sha256(_MAKER.read_bytes()).hexdigest()[:12]
    folder = home / "headrace" / f"{size}-{digest}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=_made(home / "headrace")) as making:
            part = Path(making) / size
            subprocess.run(
                [home / "bin" / "python", _MAKER, part, size],
                env={**os.environ, **QUIET},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=_START_S,
            )
            with suppress(OSError):  # another was first
                part.rename(folder)
    return folder


def start(home: Path, flags: Sequence[str], *, size: str = MODEL) -> VllmServer:
    """Start one with flags, ready to answer, in the environment at `home`."""
    port = free_port()
    command = [str(home / "bin" / "python"), "-c", _SERVE, "--model", str(model_folder(home, size))]
    command += ["--served-model-name", size, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--enforce-eager", *flags]
    # Our own code, for a scheduler of ours.
    places = [_SITE, _ROOT / "src", _ROOT, os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(str(place) for place in places if place)
    own = {"VLLM_CACHE_ROOT": str(home / "headrace" / "cache"), "PYTHONPATH": path}
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
    process = subprocess.Popen(
        command,
        env={**os.environ, **QUIET, **own},
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    server = VllmServer(process=process, base=f"http://127.0.0.1:{port}", log=log)
    until = time.monotonic() + _START_S
    while not _answers(server):
        if process.poll() is not None or time.monotonic() > until:
            said = server.said()
            server.stop()
            raise AssertionError(f"vLLM did not start:\n{said}")
        time.sleep(_PAUSE_S)
    return server


@contextmanager
def serving(home: Path, flags: Sequence[str], *, size: str = MODEL) -> Iterator[VllmServer]:
    """Run one."""
    server = start(home, flags, size=size)
    try:
        yield server
    finally:
        server.stop()


@cache
def _shared(home: Path) -> VllmServer:
    server = start(home, SHARED_FLAGS)
    atexit.register(server.stop)
    return server


def shared() -> VllmServer:
    """Return the server that all tests share, or skip the running test; it ends with this process.

    Whoever uses it leaves it idle.
    """
    return _shared(needed())


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def free_port() -> int:
    """Return a port of loopback that nobody has just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _answers(server: VllmServer) -> bool:
    try:
        server.get("/health")
    except (OSError, urllib.error.URLError):
        return False
    return True
