"""`headrace serve`: the gateway over emulated replicas, with or without a configuration."""

import asyncio
import gc
import socket
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter
from msgspec.structs import replace

from headrace.cli.errors import FAILED, OK
from headrace.cli.keys import key_hash, minted
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.load import load
from headrace.config.profiles import load_profile
from headrace.config.schema import KeySpec, Settings
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.server import Gateway, listen
from headrace.model.deployment import ModelSpec, PoolSpec, TenantSpec
from headrace.policy.catalog import PlaneConfig

_REPLICAS, _PROFILE, _MODEL = 2, "h100-8b-tp1", "headrace-demo"
_DEMO = "demo"

Config = Annotated[
    Path | None, Parameter(help="Configuration file; without it, an emulated fleet and one key.")
]
Replicas = Annotated[int | None, Parameter(help=f"Emulated replicas [default: {_REPLICAS}].")]
ProfileName = Annotated[
    str | None, Parameter(help=f"Their hardware profile, by name or file [default: {_PROFILE}].")
]
Model = Annotated[str | None, Parameter(help=f"Name of their model [default: {_MODEL}].")]
Host = Annotated[str | None, Parameter(help="Address to listen at.")]
Port = Annotated[int | None, Parameter(help="TCP port; 0 takes a free one.")]
JournalDir = Annotated[Path | None, Parameter(help="Write the plane's journal to a folder.")]
Decisions = Annotated[Path | None, Parameter(help="Write the decision log to a file.")]


def serve(  # noqa: PLR0913 - a command's options
    *,
    config: Config = None,
    host: Host = None,
    port: Port = None,
    replicas: Replicas = None,
    profile: ProfileName = None,
    model: Model = None,
    journal: JournalDir = None,
    decisions: Decisions = None,
) -> int:
    """Serve an OpenAI-compatible API until Ctrl-C.

    Flags override the file. The emulated fleet's own flags are for use without one.
    """
    key = None
    if config is None:
        key = minted()
        settings = demo_settings(key, replicas, profile, model)
    else:
        fleet = {"--replicas": replicas, "--profile": profile, "--model": model}
        faults = [
            Fault(Origin(flag), "the configuration file says which replicas there are")
            for flag, value in fleet.items()
            if value is not None
        ]
        if faults:
            raise ConfigError(faults)
        settings = load(config, Settings)
    settings = _overridden(settings, host, port, journal, decisions)
    with (
        listen(settings.server.host, settings.server.port) as sock,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        well = runner.run(_serve(settings, sock, key))
    print("headrace: stopped" if well else "headrace: stopped by a bug of its own; see above")
    return OK if well else FAILED


def demo_settings(
    key: str, replicas: int | None = None, profile: str | None = None, model: str | None = None
) -> Settings:
    """Return the settings of an emulated fleet that one key may use."""
    name = _MODEL if model is None else model
    pool = PoolSpec(
        name=_DEMO,
        model=name,
        profile=load_profile(_PROFILE if profile is None else profile),
        replicas=_REPLICAS if replicas is None else replicas,
    )
    return Settings(
        deployment=PlaneConfig(
            models=(ModelSpec(name=name),), pools=(pool,), tenants=(TenantSpec(name=_DEMO),)
        ),
        keys=(KeySpec(name=_DEMO, tenant=_DEMO, hash=key_hash(key)),),
    )


def _overridden(
    settings: Settings,
    host: str | None,
    port: int | None,
    journal: Path | None,
    decisions: Path | None,
) -> Settings:
    server = settings.server
    server = replace(
        server,
        host=server.host if host is None else host,
        port=server.port if port is None else port,
    )
    settings = replace(settings, server=server)
    if journal is not None:
        settings = replace(settings, journal=replace(settings.journal, path=str(journal)))
    if decisions is not None:
        settings = replace(settings, decision_log=str(decisions))
    return settings


async def _serve(settings: Settings, sock: socket.socket, key: str | None) -> bool:
    gateway = Gateway(settings, MonotonicClock(asyncio.get_running_loop()))
    _greet(settings, sock, key)
    gc.collect()
    gc.freeze()  # what is there now stays: no need to look through it again
    return await gateway.serve(sock)


def _greet(settings: Settings, sock: socket.socket, key: str | None) -> None:
    """Say where it listens and how to ask."""
    host, port = sock.getsockname()[:2]
    place = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    deployment = settings.deployment
    fleet = ", ".join(
        f"{pool.replicas} emulated {pool.profile.name} for {pool.model}"
        for pool in deployment.pools
    )
    print(f"headrace: serving {place}/v1 ({fleet}); Ctrl-C stops")
    if key is not None:
        print(f"headrace: key {key}, for this run only; try")
        print(
            f"  curl -N {place}/v1/chat/completions -H 'Authorization: Bearer {key}' "
            f"-H 'Content-Type: application/json' -d "
            f'\'{{"model":"{deployment.models[0].name}","stream":true,'
            f'"messages":[{{"role":"user","content":"Hello"}}]}}\'',
        )
    print(end="", flush=True)
