"""`headrace engine`: one emulated replica behind the HTTP surface of vLLM."""

import asyncio
import gc
import signal
import socket
from collections.abc import Mapping
from typing import Annotated

import msgspec
import uvloop
from cyclopts import Parameter

from headrace.adapters.engines.server import faults as wrong
from headrace.adapters.engines.server.engine import EngineServer, EngineSpec
from headrace.cli.errors import FAILED, OK
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.profiles import load_profile
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.server import listen
from headrace.model.profile import Profile
from headrace.policy.batching.preemption import RECOMPUTE_ONLY

_PORT_MAX = 65_535

Port = Annotated[int, Parameter(help="TCP port; 0 takes a free one.")]
Host = Annotated[str, Parameter(help="Address to listen at.")]
ProfileName = Annotated[str, Parameter(help="Hardware profile, by name or file.")]
Model = Annotated[str | None, Parameter(help="Name it serves [default: the profile's model].")]
Speed = Annotated[float, Parameter(help="Time runs so many times as fast.")]
Seed = Annotated[int, Parameter(help="Seed of lengths, noise and chance errors.")]
BatchingPolicy = Annotated[
    str,
    Parameter(help="How steps are filled: a kind, or a JSON object with its settings."),
]
OrderingPolicy = Annotated[
    str,
    Parameter(
        help="Who starts first, by what a gateway tells: a kind, or a JSON object with its settings."
    ),
]
Queued = Annotated[
    int | None, Parameter(help="Most requests inside, running or waiting; more get 503.")
]
Context = Annotated[int | None, Parameter(help="Most tokens of prompt and output together.")]
Ways = Annotated[
    tuple[str, ...],
    Parameter(
        name="--preemption",
        help="How requests may give way: recompute, swap, keep; may be repeated [default: recompute].",
    ),
]
Whom = Annotated[str, Parameter(help="Whose key says who gives way: policy or fair.")]
Starts = Annotated[
    str,
    Parameter(help="Who starts only where all that it has to compute fits: all, resumed or never."),
]
HostSpeed = Annotated[float, Parameter(help="10^9 bytes a second to and from the host.")]
HostSize = Annotated[float, Parameter(help="GiB of host memory for swapped KV.")]
Wrong = Annotated[
    tuple[str, ...],
    Parameter(name="--fault", help="Something that goes wrong: NAME=VALUE; may be repeated."),
]


def engine(  # noqa: PLR0913 - a command's options
    *,
    profile: ProfileName = "h100-8b-tp1",
    port: Port = 8_000,
    host: Host = "127.0.0.1",
    model: Model = None,
    speed: Speed = 1.0,
    seed: Seed = 0,
    batching: BatchingPolicy = "chunked_prefill",
    ordering: OrderingPolicy = "fifo",
    max_num_queued_reqs: Queued = None,
    max_model_len: Context = None,
    preemption: Ways = ("recompute",),
    victims: Whom = RECOMPUTE_ONLY.victims,
    whole: Starts = RECOMPUTE_ONLY.whole,
    host_gb_per_s: HostSpeed = RECOMPUTE_ONLY.host_gb_per_s,
    host_gib: HostSize = RECOMPUTE_ONLY.host_gib,
    fault: Wrong = (),
) -> int:
    """Serve one emulated replica as vLLM would, until Ctrl-C. See docs/engine.md."""
    told = {
        "model": model,
        "speed": speed,
        "emulator": {
            "seed": seed,
            "batching": _policy(batching, "--batching"),
            "ordering": _policy(ordering, "--ordering"),
            "preemption": {
                "mechanisms": preemption,
                "victims": victims,
                "whole": whole,
                "host_gb_per_s": host_gb_per_s,
                "host_gib": host_gib,
            },
        },
        "max_num_queued_reqs": max_num_queued_reqs,
        "max_model_len": max_model_len,
    }
    spec = _spec(profile, told, fault)
    if not 0 <= port <= _PORT_MAX:
        raise _blamed("--port", f"Expected `int` from 0 to {_PORT_MAX}")
    with (
        listen(host, port) as sock,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        well = runner.run(_serve(spec, sock))
    return OK if well else FAILED


def _spec(profile: str, told: Mapping[str, object], words: tuple[str, ...]) -> EngineSpec:
    """Return what the flags say; ConfigError names the flag that is wrong."""
    try:
        faults = wrong.from_words(words)
    except wrong.FaultError as error:
        raise _blamed("--fault", str(error)) from None
    try:
        return msgspec.convert({**told, "profile": _profile(profile), "faults": faults}, EngineSpec)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`").removeprefix("emulator.") or "max_model_len"
        flag, _, setting = name.partition(".")
        if flag == "preemption" and setting and not setting.startswith("mechanisms"):
            flag, setting = setting, ""  # a flag of its own
        what = f"{setting}: {message}" if setting else message
        raise _blamed(f"--{flag.replace('_', '-')}", what) from None


def _policy(told: str, flag: str) -> object:
    """Return a policy as a configuration would give it."""
    if not told.startswith("{"):
        return {"kind": told}
    try:
        return msgspec.json.decode(told)
    except msgspec.DecodeError as error:
        raise _blamed(flag, str(error)) from None


def _profile(name: str) -> Profile:
    try:
        return load_profile(name)
    except ValueError as error:
        raise _blamed("--profile", str(error)) from None


def _blamed(flag: str, message: str) -> ConfigError:
    return ConfigError([Fault(Origin(f"flag {flag}"), message)])


async def _serve(spec: EngineSpec, sock: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    clock = MonotonicClock(loop)
    server = EngineServer(spec, clock)
    clock.on_error = server.fail
    for taken in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(taken, server.stop)
    host, port = sock.getsockname()[:2]
    place = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    what = f"emulated {spec.profile.name} as {spec.served}"
    print(f"headrace: engine at {place}/v1 ({what}); Ctrl-C stops", flush=True)
    gc.collect()
    gc.freeze()  # what is there now stays: no need to look through it again
    return await server.serve(sock)
