"""Engine, gateway and callers as processes on cores of their own, all ended with the run."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec import Struct

from benchmarks.gateway import load, wire
from benchmarks.gateway.engine import HOST
from benchmarks.gateway.stacks import Place, Stack

_PORTS = iter(range(21_000, 32_000, 10))
_ROOT = Path(__file__).parents[2]
_READY_S = 120.0
_TRY_S = 0.1
_END_S = 5.0
_JOB_S = 150.0


class FailedError(Exception):
    """A gateway that does not start, or a measurement that ended without a result."""


class Cores(Struct, frozen=True):
    """Who runs where; the same core twice on a machine that has one."""

    gateway: int
    load: int


class Running(Struct, frozen=True, kw_only=True):
    """A gateway that answers."""

    port: int
    root: int
    key: str | None


def cores() -> Cores:
    """Return the first and the last core this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    return Cores(usable[0], usable[-1])


@contextmanager
def engine(core: int) -> Iterator[int]:
    """Run the engine; yields its port."""
    port = free_port()
    with _process(_own("engine", str(port)), core) as started:
        _wait(started, lambda: load.get(port, "/health") == b"{}", "the engine")
        yield port


@contextmanager
def gateway(stack: Stack, engine_port: int, core: int) -> Iterator[Running]:
    """Run a gateway; yields it once a request has come back through it."""
    with TemporaryDirectory(prefix="headrace-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        place = Place(folder=folder, port=free_port(), engine_port=engine_port)
        launch = stack.launch(place)
        log = folder / "log"
        with (
            log.open("wb") as out,
            _process(launch.command, core, launch.env, out.fileno()) as started,
        ):
            try:
                _wait(started, lambda: _answers(place.port, launch.key), stack.name)
            except FailedError as error:
                told = log.read_text(encoding="utf-8", errors="replace")[-2_000:]
                raise FailedError(f"{error}\n{told}") from None
            yield Running(port=place.port, root=started.pid, key=launch.key)


def measure(job: load.Job, core: int) -> load.Sample:
    """Run the callers of one measurement."""
    with _pinned(core):
        try:
            ran = subprocess.run(  # noqa: S603 - our own module
                _own("load"),
                input=msgspec.json.encode(job),
                stdout=subprocess.PIPE,
                cwd=_ROOT,
                check=False,
                timeout=_JOB_S,
            )
        except subprocess.TimeoutExpired:
            raise FailedError("the callers did not end") from None
    if ran.returncode:
        raise FailedError(f"the callers ended with {ran.returncode}")
    return msgspec.json.decode(ran.stdout, type=load.Sample)


def free_port() -> int:
    """Return a port nobody listens at, below those given to outgoing connections."""
    for port in _PORTS:
        with socket.socket() as one, suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((HOST, port))
            return port
    raise FailedError("no port is free")


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM, too, end what has been started."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _answers(port: int, key: str | None) -> bool:
    """Return whether a request comes back with an answer through the gateway."""
    with socket.create_connection((HOST, port), timeout=10) as sock:
        sock.sendall(wire.request(stream=False, key=key))
        return sock.recv(64)[9:12] == b"200"


def _wait(started: subprocess.Popen[bytes], ready: Callable[[], bool], name: str) -> None:
    began = time.monotonic()
    while time.monotonic() - began < _READY_S:
        if started.poll() is not None:
            raise FailedError(f"{name} ended with {started.returncode}")
        with suppress(OSError):
            if ready():
                return
        time.sleep(_TRY_S)
    raise FailedError(f"{name} does not answer")


def _own(module: str, *args: str) -> list[str]:
    """Return the command of a module of this package."""
    code = f"from benchmarks.gateway.{module} import main; main()"
    return [sys.executable, "-c", code, *args]


@contextmanager
def _process(
    command: Sequence[str],
    core: int,
    env: Mapping[str, str] | None = None,
    out: int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command as a process group, ended whole."""
    with _pinned(core):
        started = subprocess.Popen(  # noqa: S603 - commands of this package
            command,
            env=os.environ | (env or {}),
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out if out is not None else sys.stderr.fileno(),
            stderr=out,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            started.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Let what is started meanwhile inherit one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
