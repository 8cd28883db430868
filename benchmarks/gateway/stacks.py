"""Which gateways are compared, and how is each started? Each as its makers would, logs off.

Peers other than nginx live in environments of their own under HEADRACE_PEERS, build/peers unless
set, and are installed on first use. What cannot be had is absent, which fails nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from benchmarks.gateway.engine import HOST
from benchmarks.gateway.wire import MODEL
from headrace.gateway.auth import key_hash, minted

ROUTER_BLIND = "vllm-router rr"
OURS, NGINX, ROUTER, LITELLM = "headrace", "nginx", "vllm-router", "litellm"
_PEERS = Path(__file__).parents[2] / "build" / "peers"
_INSTALL_S = 600


class AbsentError(Exception):
    """A peer that is not there and cannot be installed."""


class Place(Struct, frozen=True, kw_only=True):
    """Where a gateway is to run."""

    folder: Path
    """For its files; gone when it has ended."""
    port: int
    engine_port: int

    @property
    def engine(self) -> str:
        """The engine's address."""
        return f"http://{HOST}:{self.engine_port}"


class Launch(Struct, frozen=True, kw_only=True):
    """How to start one."""

    command: list[str]
    key: str | None = None
    """What callers must show."""
    env: dict[str, str] = {}


class Stack(Struct, frozen=True, kw_only=True):
    """A gateway to measure."""

    name: str
    prepare: Callable[[], str]
    """Install it unless it is there; returns its version or raises AbsentError."""
    launch: Callable[[Place], Launch]
    streams: int = 512
    """Streams at once; offered 50 chunks a second each."""
    memory_streams: int = 1_000
    exact: bool = True
    """Whether it passes on each frame of the engine."""


def headrace(place: Place) -> Launch:
    """Return how to start ours, with authentication and metrics, admission letting all pass."""
    key = minted()
    _write(place.folder / "profile.json", profile())
    file = _write(place.folder / "headrace.json", config(place, key_hash(key)))
    return Launch(command=serve_command(file, place.port), key=key)


def serve_command(config: Path, port: int) -> list[str]:
    """Return the command line of our gateway."""
    code = "import sys; from headrace.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, "serve", "--config", str(config), "--port", str(port)]


def config(place: Place, hashed: str) -> dict[str, object]:
    """Return our configuration: one engine, and limits that no load here comes near."""
    patient = {"name": "bench", "ttft_ms": None, "itl_ms": 60_000, "expire": False}
    pool = {"name": "bench", "model": MODEL, "profile": str(place.folder / "profile.json")}
    return {
        "deployment": {
            "models": [{"name": MODEL}],
            "pools": [pool | {"work_rate": 10}],
            "classes": [patient | {"tenant_queue": 100_000, "queue": 100_000}],
            "tenants": [{"name": "bench"}],
            "admission": {"mode": "audit"},
            "window": {"prefill_ms": 60_000},
        },
        "keys": [{"name": "bench", "tenant": "bench", "hash": hashed}],
        "upstreams": [
            {"url": place.engine, "pool": "bench", "kind": "openai", "connections": 8_192}
        ],
        "admin": {"port": 0, "open": True},
    }


def profile() -> dict[str, object]:
    """Return an engine that is never full: steps of a microsecond, room for 100,000 requests."""
    step = {"a_ms": 1e-3, "c_ms": 0, "d_ms": 0}
    return {
        "name": "bench",
        "source": "Made up, so that the engine never is the limit.",
        "hardware": "none",
        "model": MODEL,
        "kv_bytes_per_token": 1,
        "kv_capacity_tokens": 1_000_000_000,
        "max_running": 100_000,
        "token_budget": 1_000_000,
        "reference_batch": 100_000,
        "decode": step,
        "mixed": step | {"knee": 0, "b_ms": 1e-6, "e_ms": 0},
    }


def nginx(place: Place) -> Launch:
    """Return how to start nginx with one worker, in the foreground, on files of its own."""
    file = place.folder / "nginx.conf"
    file.write_text(nginx_conf(place, root=os.geteuid() == 0), encoding="utf-8")
    return Launch(command=[_nginx_path(), "-p", str(place.folder), "-c", str(file)])


def nginx_conf(place: Place, *, root: bool) -> str:
    """Return its configuration: an unbuffered proxy that keeps its connections to the engine.

    Started by root, its worker stays root, or it could not write to the folder.
    """
    temporary = "\n".join(
        f"  {kind}_temp_path {place.folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""\
daemon off;
{"user root;" if root else ""}
worker_processes 1;
pid {place.folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off;
{temporary}
  keepalive_requests 1000000000;
  upstream engine {{
    server {HOST}:{place.engine_port};
    keepalive 4096;
    keepalive_requests 1000000000;
  }}
  server {{
    listen {HOST}:{place.port} backlog=4096;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def router(place: Place, *policy: str) -> Launch:
    """Return how to start vllm-router.

    As it comes it looks at prefixes, as ours does, and asks the engine for the tokens of each
    prompt. With round_robin it asks for nothing and knows nothing.
    """
    command = [str(_bin(ROUTER) / "vllm-router"), "--host", HOST, "--port", str(place.port)]
    command += ["--worker-urls", place.engine, "--log-level", "error", *policy]
    # Its metrics listen somewhere in any case; next to it nobody else does.
    command += ["--prometheus-port", str(place.port + 1), "--max-concurrent-requests", "32768"]
    return Launch(command=command)


def litellm(place: Place) -> Launch:
    """Return how to start the litellm proxy, without database or telemetry."""
    file = _write(place.folder / "litellm.json", litellm_conf(place))
    command = [str(_bin(LITELLM) / "litellm"), "--config", str(file), "--host", HOST]
    command += ["--port", str(place.port), "--num_workers", "1", "--telemetry", "False"]
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    key = minted()  # without one it does not start
    return Launch(command=command, env=env | {"LITELLM_MASTER_KEY": key}, key=key)


def litellm_conf(place: Place) -> dict[str, object]:
    """Return its configuration: one model, at the engine."""
    at = {"model": f"openai/{MODEL}", "api_base": f"{place.engine}/v1", "api_key": "none"}
    return {
        "model_list": [{"model_name": MODEL, "litellm_params": at}],
        "litellm_settings": {"telemetry": False, "num_retries": 0},
    }


def _write(file: Path, content: dict[str, object]) -> Path:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return file


def _nginx_path() -> str:
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise AbsentError("nginx is not installed")
    return found


def _prepare_nginx() -> str:
    try:
        path = _nginx_path()
    except AbsentError:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise
        install = ["apt-get", "install", "-y", "-q", "nginx-light"]
        if _run(install):
            _run(["apt-get", "update", "-q"])
            _run(install)
        path = _nginx_path()
    said = subprocess.run([path, "-v"], check=False, capture_output=True, text=True)  # noqa: S603
    return said.stderr.strip().rpartition("/")[2]


def _from_index(name: str, requirement: str) -> Callable[[], str]:
    """Return a `prepare` that installs a Python package into an environment of its own."""

    def prepare() -> str:
        folder, python = _bin(name).parent, str(_bin(name) / "python")
        stamp = folder / "installed"
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != requirement:
            print(f"installing {requirement} ...", file=sys.stderr, flush=True)
            if _run([sys.executable, "-m", "venv", "--clear", str(folder)]):
                raise AbsentError("no environment could be made")
            if _run([python, "-m", "pip", "install", "-q", requirement]):
                raise AbsentError(f"pip could not install {requirement}")
            stamp.write_text(requirement, encoding="utf-8")
        code = f"from importlib.metadata import version; print(version({name!r}))"
        asked = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)  # noqa: S603
        return asked.stdout.strip()

    return prepare


def _bin(name: str) -> Path:
    return Path(os.environ.get("HEADRACE_PEERS", _PEERS)).absolute() / name / "bin"


def _run(command: list[str]) -> int:
    """Run an installer; its output may name what no record should, so it goes to stderr alone."""
    try:
        ran = subprocess.run(command, check=False, stdout=sys.stderr, timeout=_INSTALL_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return 1
    return ran.returncode


STACKS = (
    Stack(name=NGINX, prepare=_prepare_nginx, launch=nginx),
    Stack(name=OURS, prepare=lambda: "this commit", launch=headrace),
    Stack(name=ROUTER, prepare=_from_index(ROUTER, "vllm-router==0.1.17"), launch=router),
    Stack(
        name=ROUTER_BLIND,
        prepare=_from_index(ROUTER, "vllm-router==0.1.17"),
        launch=lambda place: router(place, "--policy", "round_robin"),
    ),
    Stack(
        name=LITELLM,
        prepare=_from_index(LITELLM, "litellm[proxy]>=1.108"),
        launch=litellm,
        streams=16,  # about what one core of it carries
        memory_streams=200,
        exact=False,
    ),
)
"""All of them; nginx is what the others are compared with, the blind router for information."""
