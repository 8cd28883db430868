"""Is a scenario file right? Strictly: any doubt is an error with file, line and path.

What no type can say is asked here: the deployment must make sense as one that is served does, and
what is offered and what fails must name things that it has.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from headrace.config.build import build, descend, read_text, with_profiles
from headrace.config.check import problems
from headrace.config.errors import ConfigError, Fault
from headrace.config.problem import Severity
from headrace.config.schema import Settings
from headrace.config.tree import read_tree
from headrace.sim.faults import Crash, Drain, OfGroups, Slow
from headrace.sim.scenario import Scenario
from headrace.units import BLOCK_TOKENS

_S = TypeVar("_S", bound=Scenario)


def load_scenario(path: Path) -> Scenario:
    """Return the scenario of a YAML or JSON file; raises ConfigError with every fault found."""
    return load_as(path, Scenario)


def load_as(
    path: Path, type_: type[_S], more: Callable[[_S], Iterable[tuple[str, str]]] = lambda _: ()
) -> _S:
    """Return a scenario that says more than any; `more` yields (path, fault) of that."""
    tree = with_profiles(read_tree(read_text(path), str(path)), type_, path.parent)
    scenario = build(tree, type_)
    found = [
        (one.path, one.message)
        for one in problems(Settings(deployment=scenario.deployment))
        if one.severity is Severity.ERROR
    ]
    found += [*_strangers(scenario), *more(scenario)]
    if found:
        faults = [Fault(descend(tree, at).origin, message, at) for at, message in found]
        raise ConfigError(sorted(faults, key=Fault.place))
    return scenario


def _strangers(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Yield (path, fault) of every name and number that refers to nothing."""
    deployment = scenario.deployment
    known = {
        "tenant": {spec.name for spec in deployment.tenants},
        "slo_class": {spec.name for spec in deployment.classes},
        "model": {name for spec in deployment.models for name in spec.names},
    }
    for nth, source in enumerate(scenario.mix.sources if scenario.mix is not None else ()):
        for field, names in known.items():
            value = getattr(source, field)
            if value is not None and value not in names:
                yield f"$.mix.sources[{nth}].{field}", f"unknown {field} `{value}`"
    for field, given, names in (
        ("tenants", scenario.assign.tenants, known["tenant"]),
        ("classes", scenario.assign.classes, known["slo_class"]),
    ):
        for name in given:
            if name not in names:
                yield f"$.assign.{field}.{name}", f"unknown name `{name}`"
    yield from _chunks(scenario)
    replicas = sum(pool.replicas for pool in deployment.pools)
    scales = any(pool.scaling is not None for pool in deployment.pools)
    for nth, fault in enumerate(scenario.faults):
        if isinstance(fault, OfGroups) and not scales:
            yield f"$.faults[{nth}].kind", "expected a pool with `scaling`: no other has groups"
        if isinstance(fault, Crash | Drain | Slow) and (fault.replica or 0) >= replicas:
            yield (
                f"$.faults[{nth}].replica",
                f"no replica {fault.replica}: there are {replicas}, counted from 0",
            )


def _chunks(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Yield (path, fault) of shared prefixes whose chunks no replica could tell apart."""
    first: int | None = None
    for nth, source in enumerate(scenario.mix.sources if scenario.mix is not None else ()):
        if source.prefix is None:
            continue
        at, tokens = f"$.mix.sources[{nth}].prefix.chunk_tokens", source.prefix.chunk_tokens
        first = tokens if first is None else first
        if tokens != first:
            yield (
                at,
                f"chunks of {tokens} tokens beside chunks of {first}: a replica knows one size",
            )
        elif tokens % BLOCK_TOKENS:
            yield at, f"expected a multiple of {BLOCK_TOKENS}, the tokens of a KV block"
