"""What is a fleet sized for: which requests, on which hardware, at which prices?"""

from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from headrace.cli.replay_setup import Shape, rows_of
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.load import load
from headrace.config.profiles import load_profile, profile_names
from headrace.model.hardware import hardware_of
from headrace.model.price import GpuPrices, begins
from headrace.model.profile import Profile
from headrace.sim.sizing import CALLER, CLASS
from headrace.sim.traffic import Traffic, of_lengths, of_rows
from headrace.trace.builtin import MIXES
from headrace.trace.mix import Fixed

_USD_MAX = 1_000_000
_SUFFIXES = (".yaml", ".yml", ".json")


class Wanted(NamedTuple):
    """What the command line says of a fleet, as it says it."""

    rate: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    input: int | None
    output: int | None
    mix: tuple[str, ...]
    trace: Path | None
    kind: str
    hardware: tuple[str, ...]
    model: str | None

    def names(self) -> list[str]:
        """Return the options that were given of those that only a fleet has."""
        given = {
            "--rate": self.rate,
            "--ttft-ms": self.ttft_ms,
            "--tpot-ms": self.tpot_ms,
            "--input": self.input,
            "--output": self.output,
            "--trace": self.trace,
            "--hardware": self.hardware,
            "--model": self.model,
        }
        return [name for name, value in given.items() if value]

    def complaint(self) -> str | None:
        """Return what is missing or too much; None: it can be answered."""
        if not self.names():
            return "give a scenario, or --rate, --ttft-ms and --tpot-ms"
        needed = {"--rate": self.rate, "--ttft-ms": self.ttft_ms, "--tpot-ms": self.tpot_ms}
        if missing := [name for name, value in needed.items() if value is None]:
            return f"{missing[0]} is missing"
        if (self.input is None) != (self.output is None):
            return "--input and --output belong together"
        ways = [self.input is not None, self.trace is not None, *(True for _ in self.mix)]
        if sum(ways) != 1:
            return "give lengths one way: --input and --output, one --mix, or --trace"
        return None


def traffic_of(wanted: Wanted) -> Traffic:
    """Return the requests to size for. Raises TraceError."""
    if wanted.trace is not None:
        rows = rows_of(wanted.trace, Shape(kind=wanted.kind, nameless=True))
        owned = [replace(row, tenant=CALLER, slo_class=CLASS) for row in rows]
        return of_rows(wanted.trace.name, owned)
    if wanted.mix:
        return of_lengths(wanted.mix[0], MIXES[wanted.mix[0]], CALLER, CLASS)
    assert wanted.input is not None
    assert wanted.output is not None
    name = f"{wanted.input} tokens in and {wanted.output} out"
    return of_lengths(name, Fixed(wanted.input, wanted.output), CALLER, CLASS)


def profiles_of(names: tuple[str, ...], model: str | None) -> list[Profile]:
    """Return the profiles that names and a model choose, each once.

    A name is a profile's, a file's, or the beginning of a GPU's. Raises ConfigError for one that is none.
    """
    packaged = [load_profile(name) for name in profile_names()]
    found: dict[str, Profile] = {}
    for name in names:
        mine = _called(name, packaged)
        found |= {one.name: one for one in mine}
    if not names:
        found = {one.name: one for one in packaged if hardware_of(one.hardware).gpus}
    chosen = [one for one in found.values() if model in (None, one.model)]
    if not chosen:
        models = ", ".join(dict.fromkeys(one.model for one in found.values()))
        raise _wrong("--model", f"no profile of {model!r}; there are: {models}")
    return chosen


def _called(name: str, packaged: list[Profile]) -> list[Profile]:
    if name.endswith(_SUFFIXES):
        return [load(Path(name), Profile)]
    exact = [one for one in packaged if one.name == name]
    mine = exact or [one for one in packaged if begins(hardware_of(one.hardware).gpu, name)]
    if not mine:
        known = ", ".join(one.name for one in packaged)
        raise _wrong("--hardware", f"no profile or GPU {name!r}; there are: {known}")
    return mine


def prices_of(given: tuple[str, ...], file: Path | None) -> GpuPrices:
    """Return prices by kind of GPU, those of the command line over those of a file.

    Raises ConfigError for what is no price.
    """
    found = {} if file is None else dict(load(file, GpuPrices).usd_gpu_hour)
    for text in given:
        name, _, value = text.partition("=")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not name.strip() or not 0 <= price <= _USD_MAX:
            raise _wrong("--price", f"expected NAME=USD, as h100=2.5, not {text}")
        found[name.strip()] = price
    return GpuPrices(usd_gpu_hour=found)


def _wrong(flag: str, what: str) -> ConfigError:
    return ConfigError([Fault(Origin(f"flag {flag}"), what)])
