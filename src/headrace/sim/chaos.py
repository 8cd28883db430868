"""What goes wrong in a fleet, and what is expected of it all the same.

A chaos scenario is one of the simulator with a reason and expectations. Those that ship are the files of the
folder `scenarios` beside this module, named like it.
"""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from headrace.config.errors import ConfigError, Fault, Origin
from headrace.sim.expect import OF_GROUPS, AttainmentOf, Expected
from headrace.sim.reading import load_as
from headrace.sim.scenario import Scenario

SUFFIXES = (".yaml", ".yml", ".json")
_FOLDER = resources.files("headrace.sim").joinpath("scenarios")


class Chaos(Scenario, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario with what it is to show."""

    about: Annotated[str, Meta(min_length=1, max_length=200)]
    """What goes wrong, and what it is to show: one line of the list."""
    expect: Annotated[tuple[Expected, ...], Meta(min_length=1, max_length=64)]


def shipped_names() -> tuple[str, ...]:
    """Return the names of the scenarios that ship, sorted."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def load_chaos(name_or_path: str) -> Chaos:
    """Return a scenario that ships by its name, or the one in a file.

    Raises ConfigError with every fault found, or with the names that there are.
    """
    if name_or_path.endswith(SUFFIXES):
        return _load(Path(name_or_path))
    if name_or_path not in shipped_names():
        known = ", ".join(shipped_names())
        message = f"no such scenario: a path ending in .yaml, .yml or .json, or one of {known}"
        raise ConfigError([Fault(Origin(name_or_path), message)])
    with resources.as_file(_FOLDER.joinpath(f"{name_or_path}.yaml")) as path:
        return _load(path)


def _load(path: Path) -> Chaos:
    return load_as(path, Chaos, _strangers)


def _strangers(chaos: Chaos) -> Iterator[tuple[str, str]]:
    """Yield (path, fault) of every expectation of what the deployment does not have."""
    classes = {spec.name for spec in chaos.deployment.classes}
    scales = any(pool.scaling is not None for pool in chaos.deployment.pools)
    for nth, one in enumerate(chaos.expect):
        if isinstance(one, AttainmentOf) and one.slo_class not in classes:
            yield f"$.expect[{nth}].slo_class", f"unknown slo_class `{one.slo_class}`"
        if not scales and isinstance(one, OF_GROUPS):
            yield f"$.expect[{nth}].kind", "expected a pool with `scaling`: no other has groups"
