"""What `headrace serve` is to decide beside its own plane: `--observe`, `--shadow`, and their report."""

import os
import sys
from pathlib import Path

from msgspec.structs import replace

from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.resolve import resolve
from headrace.config.schema import Settings
from headrace.gateway.shadow import Beside, Shadow
from headrace.policy.catalog import PlaneConfig, advising, passing


def beside(
    settings: Settings, *, observe: bool, shadow: Path | None, log: Path | None, shown: bool
) -> tuple[Settings, Beside | None]:
    """Return the settings to serve by, and what decides beside them without effect.

    Raises ConfigError if the shadow's file is wrong, or not about these replicas.
    """
    if observe and shadow is not None:
        message = "give either: with --observe the configuration itself is the shadow"
        raise ConfigError([Fault(Origin("flag --shadow"), message)])
    given = settings.deployment
    if observe:
        passed = replace(settings, deployment=advising(passing(given)))
        named = "the configuration"
        return passed, Beside(config=given, name=named, observed=True, log=log, shown=shown)
    if shadow is not None:
        other = _read(shadow, given)
        return settings, Beside(config=other, name=str(shadow), log=log, shown=shown)
    alone = [name for name, told in (("--shadow-log", log), ("--shadow-header", shown)) if told]
    if alone:
        message = "give --shadow or --observe too"
        raise ConfigError([Fault(Origin(f"flag {name}"), message) for name in alone])
    return settings, None


def tell(second: Beside, shadow: Shadow) -> None:
    """Print what the two planes differed in."""
    meant = "would have decided, had it not only observed" if second.observed else "would decide"
    print(f"headrace: what {second.name} {meant}:")
    for line in shadow.found.lines():
        print(f"  {line}")
    if shadow.broken is not None:
        print("  (stopped by a bug of its own before the end; see above)")


def _read(path: Path, given: PlaneConfig) -> PlaneConfig:
    """Return the deployment of another file, for the replicas of this one.

    Flags are about the real configuration; the environment is about every one.
    """
    found = resolve(path, os.environ, {})
    for fault in found.warnings:
        if fault.path.startswith("$.deployment"):
            print(f"headrace: warning: {fault}", file=sys.stderr)
    other = found.settings.deployment
    known = {(pool.name, pool.model) for pool in other.pools}
    faults = [
        Fault(
            Origin(str(path)),
            f"no pool `{pool.name}` of model `{pool.model}`, whose replicas it is to decide about",
            "$.deployment.pools",
        )
        for pool in given.pools
        if (pool.name, pool.model) not in known
    ]
    if faults:
        raise ConfigError(faults)
    return other
