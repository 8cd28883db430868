"""`headrace serve`: the gateway over emulated replicas, with or without a configuration."""

import asyncio
import logging
import os
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter
from msgspec import Struct

from headrace.adapters.engines.remote import LOG as ENGINES
from headrace.cli.beside import beside, tell
from headrace.cli.config import Sets, flags
from headrace.cli.errors import FAILED, OK
from headrace.cli.fileless import WHO, fileless
from headrace.cli.local import local_settings, state_folder
from headrace.cli.local import provided as local_groups
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.resolve import Resolved, resolve
from headrace.config.schema import Settings
from headrace.gateway.audit import LOG as AUDIT
from headrace.gateway.auth import minted
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.collector import Collector
from headrace.gateway.fleet import fitting
from headrace.gateway.groups import Groups
from headrace.gateway.hand import wanted
from headrace.gateway.handover import Heir, Succession
from headrace.gateway.providing import first, provided
from headrace.gateway.server import Gateway, listen
from headrace.gateway.shadow import Beside
from headrace.gateway.steward import Reread
from headrace.model.deployment import PoolSpec
from headrace.model.engine import EngineKind

_REPLICAS, _PROFILE, _MODEL = 2, "h100-8b-tp1", "headrace-demo"
_FILES = 65_536
"""Open at most: three for each of 20,000 callers."""
_BROKEN = "headrace: stopped by a bug of its own; see above"

Config = Annotated[
    Path | None, Parameter(help="Configuration file; without it, an emulated fleet and one key.")
]
Local = Annotated[
    bool,
    Parameter(negative=(), help="Serve a small real model on this machine; see docs/local.md."),
]
Replicas = Annotated[
    int | None,
    Parameter(help=f"Emulated replicas [default: {_REPLICAS}]; local ones [default: 1]."),
]
ProfileName = Annotated[
    str | None, Parameter(help=f"Their hardware profile, by name or file [default: {_PROFILE}].")
]
Model = Annotated[str | None, Parameter(help=f"Name of their model [default: {_MODEL}].")]
Upstreams = Annotated[
    list[str] | None,
    Parameter(
        name="--upstream",
        help="Address of a real engine, http://host:port; repeat for more. Replaces the emulated"
        " fleet; --profile then says how fast they are.",
        negative=(),
    ),
]
EngineKinds = Annotated[
    EngineKind | None,
    Parameter(help="Which software the engines are; without it, each is asked once."),
]
KeyEnv = Annotated[str | None, Parameter(help="Environment variable that holds the engines' key.")]
Host = Annotated[str | None, Parameter(help="Address to listen at.")]
Port = Annotated[int | None, Parameter(help="TCP port; 0 takes a free one.")]
JournalDir = Annotated[Path | None, Parameter(help="Write the plane's journal to a folder.")]
Observe = Annotated[
    bool,
    Parameter(negative=(), help="Let everything pass; log what would have been decided."),
]
ShadowFile = Annotated[
    Path | None,
    Parameter(
        name="--shadow",
        help="Configuration that decides beside the real one without effect; ends with a report.",
    ),
]
ShadowLog = Annotated[
    Path | None,
    Parameter(help="Write each request that the shadow treats differently to a file."),
]
ShadowHeader = Annotated[
    bool,
    Parameter(
        negative=(), help="Tell callers what would have been decided, in x-headrace-observed."
    ),
]
Decisions = Annotated[Path | None, Parameter(help="Write the decision log to a file.")]


def serve(  # noqa: PLR0913 - a command's options
    *,
    config: Config = None,
    local: Local = False,
    host: Host = None,
    port: Port = None,
    replicas: Replicas = None,
    profile: ProfileName = None,
    model: Model = None,
    upstream: Upstreams = None,
    upstream_key_env: KeyEnv = None,
    engine_kind: EngineKinds = None,
    journal: JournalDir = None,
    decisions: Decisions = None,
    observe: Observe = False,
    shadow: ShadowFile = None,
    shadow_log: ShadowLog = None,
    shadow_header: ShadowHeader = False,
    sets: Sets = (),
) -> int:
    """Serve an OpenAI-compatible API until Ctrl-C; on SIGUSR2 hand over to a successor.

    Flags override the file. The emulated fleet's own flags are for use without one.
    """
    heir = Heir.of(os.environ)
    key = _demo_key(heir) if config is None else None
    told: dict[str, object] = {"server.host": host, "server.port": port}
    told |= {"journal.path": journal, "decision_log": decisions}
    given = flags(sets) | {name: str(value) for name, value in told.items() if value is not None}
    fleet = _Fleet(
        local=local,
        replicas=replicas,
        profile=profile,
        model=model,
        upstream=upstream or [],
        upstream_key_env=upstream_key_env,
        engine_kind=engine_kind,
    )
    found = _found(config, key, given, fleet)
    for fault in found.warnings:
        print(f"headrace: warning: {fault}", file=sys.stderr)
    settings, second = beside(
        found.settings, observe=observe, shadow=shadow, log=shadow_log, shown=shadow_header
    )
    reread = None if config is None else lambda: resolve(config, os.environ, given).settings
    running = (1 if replicas is None else replicas) if local else 0
    told_to = _Plan(key=key, reread=reread, second=second, heir=heir, local=running)
    well, successor = _run(settings, told_to)
    served_on = "" if successor is None else f"; process {successor} serves on"
    print(f"headrace: stopped{served_on}" if well else _BROKEN)
    return OK if well else FAILED


class _Fleet(Struct, frozen=True, kw_only=True):
    """What the flags say of the replicas."""

    local: bool
    replicas: int | None
    profile: str | None
    model: str | None
    upstream: list[str]
    upstream_key_env: str | None
    engine_kind: EngineKind | None

    def told(self) -> dict[str, object]:
        """Return them by flag."""
        return {
            "--replicas": self.replicas,
            "--profile": self.profile,
            "--model": self.model,
            "--upstream": self.upstream or None,
            "--upstream-key-env": self.upstream_key_env,
            "--engine-kind": self.engine_kind,
        }


def _found(
    config: Path | None, key: str | None, given: Mapping[str, str], fleet: _Fleet
) -> Resolved:
    """Return the settings that file and flags come to."""
    told = fleet.told()
    if fleet.local:
        _refuse({"--config": config, **told, "--replicas": None}, "--local says which model runs")
        assert key is not None
        return local_settings(key, given, 1 if fleet.replicas is None else fleet.replicas)
    if config is not None:
        _refuse(told, "the configuration file says which replicas there are")
        return fitting(resolve(config, os.environ, given))
    assert key is not None
    _refuse_idle(told)
    return demo_settings(
        key,
        given,
        replicas=fleet.replicas,
        profile=fleet.profile,
        model=fleet.model,
        upstreams=[
            {"url": url, "key_env": fleet.upstream_key_env, "kind": fleet.engine_kind}
            for url in fleet.upstream
        ],
    )


class _Plan(Struct, frozen=True, kw_only=True):
    """What a process does beside its settings."""

    key: str | None
    reread: Reread | None
    second: Beside | None
    heir: Heir | None
    local: int = 0
    """Engine processes to start; 0: not `--local`."""


def _run(settings: Settings, plan: _Plan) -> tuple[bool, int | None]:
    """Listen and serve; return whether it ended well, and the process that serves on."""
    _open_more_files()
    with (
        _listener(settings, plan.heir) as sock,
        _admin_listener(settings, plan.heir) as admin_sock,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        _show(ENGINES)
        if admin_sock is not None:
            _show(AUDIT)
        return runner.run(_serve(settings, (sock, admin_sock), plan))


def _open_more_files() -> None:
    """Take all the files that we may have open: each caller is one, and shells grant 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _demo_key(heir: Heir | None) -> str:
    return minted() if heir is None or heir.key is None else heir.key


def _listener(settings: Settings, heir: Heir | None) -> socket.socket:
    if heir is not None:
        return heir.sock
    return listen(settings.server.host, settings.server.port)


def _admin_listener(
    settings: Settings, heir: Heir | None
) -> AbstractContextManager[socket.socket | None]:
    handed = None if heir is None else heir.admin_sock
    if settings.admin is None:
        if handed is not None:
            handed.close()
        return nullcontext()
    return handed or listen(settings.admin.host, settings.admin.port)


def demo_settings(
    key: str,
    given: Mapping[str, str],
    *,
    replicas: int | None = None,
    profile: str | None = None,
    model: str | None = None,
    upstreams: Sequence[Mapping[str, str | None]] = (),
) -> Resolved:
    """Return the settings of a fleet that one key may use, under environment and flags.

    `upstreams` are its engines; without any it is emulated.
    """
    name = _MODEL if model is None else model
    pool = {
        "name": WHO,
        "model": name,
        "profile": _PROFILE if profile is None else profile,
        "replicas": _REPLICAS if replicas is None else replicas,
    }
    real = [
        {name: value for name, value in spec.items() if value is not None} | {"pool": WHO}
        for spec in upstreams
    ]
    return fileless({"models": [{"name": name}], "pools": [pool]}, key, given, upstreams=real)


def _refuse(flags: Mapping[str, object], why: str) -> None:
    """Refuse those flags that are given."""
    faults = [
        Fault(Origin(f"flag {name}"), why) for name, value in flags.items() if value is not None
    ]
    if faults:
        raise ConfigError(faults)


def _refuse_idle(fleet: Mapping[str, object]) -> None:
    """Refuse what would do nothing."""
    names, why = ["--replicas"], "the upstreams are the replicas"
    if not fleet["--upstream"]:
        names, why = ["--upstream-key-env", "--engine-kind"], "give --upstream too"
    _refuse({name: fleet[name] for name in names}, why)


async def _serve(
    settings: Settings, socks: tuple[socket.socket, socket.socket | None], plan: _Plan
) -> tuple[bool, int | None]:
    """Serve; return whether that ended well, and the process that serves on."""
    clock = MonotonicClock(asyncio.get_running_loop())
    if plan.local:
        async with local_groups(plan.local, clock, settings.server.drain_s) as groups:
            return await _serve_by(settings, socks, plan, groups)
    heirs = {} if plan.heir is None else plan.heir.wanted
    async with provided(settings, clock, state_folder(), heirs) as there:
        if plan.heir is not None and there is not None:
            await there.risen()  # callers wait for whoever takes over
            if there.barren:
                raise OSError(f"no group of `{there.barren[0]}` came up: nothing is taken over")
        return await _serve_by(settings, socks, plan, there)


async def _serve_by(
    settings: Settings,
    socks: tuple[socket.socket, socket.socket | None],
    plan: _Plan,
    groups: Groups | None,
) -> tuple[bool, int | None]:
    """Serve by what the settings name, and by groups of processes if there are any."""
    loop, heir, second = asyncio.get_running_loop(), plan.heir, plan.second
    frozen = heir is not None and heir.wait()
    gateway = Gateway(settings, MonotonicClock(loop), reread=plan.reread, beside=second)
    if frozen:
        gateway.freeze()
    if groups is not None:
        first(groups, settings, wanted(gateway.driver.plane))
        groups.attach(gateway)
    start_s = max((spec.start_s for spec in settings.groups), default=0.0)
    succession = Succession(gateway, key=plan.key, start_s=start_s)
    collector = Collector(loop)

    def accepting() -> None:
        if heir is not None:
            print(f"headrace: process {os.getpid()} serves on", flush=True)
            heir.ready()
        succession.accepting()

    try:
        with succession.armed():
            if heir is None:
                _greet(settings, *socks, plan)
            well = await gateway.serve(*socks, accepting=accepting)
    finally:
        collector.stop()
        if second is not None and gateway.driver.shadow is not None:
            tell(second, gateway.driver.shadow)
    return well, succession.successor


def _show(name: str) -> None:
    """Show all of a log on stderr, line by line."""
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger(name)
    log.setLevel(logging.INFO)
    log.addHandler(shown)


def _place(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _described(pool: PoolSpec, settings: Settings, local: int) -> str:
    """Say what a pool consists of."""
    if local:
        return f"{local} llama.cpp here for {pool.model}"
    if any(spec.pool == pool.name for spec in settings.groups):
        return f"processes here for {pool.model}"
    real = sum(spec.pool == pool.name for spec in settings.upstreams)
    if real:
        engines = "engine at its address" if real == 1 else "engines at their addresses"
        return f"{real} {engines} for {pool.model}"
    return f"{pool.replicas} emulated {pool.profile.name} for {pool.model}"


def _greet(
    settings: Settings, sock: socket.socket, admin_sock: socket.socket | None, plan: _Plan
) -> None:
    """Say where it listens and how to ask."""
    key = plan.key
    place = _place(sock, "http" if settings.server.tls is None else "https")
    deployment = settings.deployment
    fleet = ", ".join(_described(pool, settings, plan.local) for pool in deployment.pools)
    print(f"headrace: serving {place}/v1 ({fleet}); Ctrl-C stops")
    if admin_sock is not None:
        print(f"headrace: admin at {_place(admin_sock)}; headrace top --url {_place(admin_sock)}")
    if key is not None:
        print(f"headrace: key {key}, for this run only; try")
        print(
            f"  curl -N {place}/v1/chat/completions -H 'Authorization: Bearer {key}' "
            f"-H 'Content-Type: application/json' -d "
            f'\'{{"model":"{deployment.models[0].name}","stream":true,'
            f'"messages":[{{"role":"user","content":"Hello"}}]}}\'',
        )
    print(end="", flush=True)
