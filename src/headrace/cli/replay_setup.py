"""What a replay is made of: address, keys, rows with owners, and what answers are judged by."""

import http.client
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.cli.address import address_of
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.profiles import load_profile
from headrace.config.resolve import resolve
from headrace.load.caller import Place
from headrace.load.judge import Judge, Terms
from headrace.model.deployment import DEFAULT_CLASSES
from headrace.model.ids import ClassName, TenantId
from headrace.policy.catalog import PlaneConfig
from headrace.sim.experiment import Places
from headrace.trace.lines import TraceError
from headrace.trace.read import read_trace
from headrace.trace.reshape import assign, cap_lengths, head, scale, window
from headrace.trace.row import TraceRow
from headrace.units import InstantNs, seconds

PROFILE = "h100-8b-tp1"
"""What prices work where no configuration says."""
ANYBODY = TenantId("default")
"""Who asks where neither trace nor keys say."""
TIMEOUT_S = 10.0
_SHOWN = 10


def place_of(url: str) -> Place:
    """Return where an API is; raises ConfigError for what is no address."""
    found = address_of(url, "http://127.0.0.1:8000")
    return Place(
        host=found.host,
        port=found.port,
        path=found.path if found.path.endswith("/v1") else f"{found.path}/v1",
        tls=found.tls,
    )


def _wrong(where: str, what: str) -> ConfigError:
    return ConfigError([Fault(Origin(f"flag {where}"), what)])


def keys_of(given: Sequence[str], file: Path | None) -> dict[TenantId, str]:
    """Return API keys by tenant, those on the command line over those of the file."""
    found: dict[TenantId, str] = {}
    lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            name, secret = _pair("--keys", line)
            found[TenantId(name)] = secret
    for one in given:
        name, secret = _pair("--key", one)
        found[TenantId(name)] = secret
    return found


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not name or not equals or not value:
        raise _wrong(flag, "expected NAME=KEY")  # whatever it is, it may be a key: not repeated
    if not value.isascii() or not value.isprintable():
        raise _wrong(flag, f"the key of {name} has characters that no header may have")
    return name, value


def weights(flag: str, given: Sequence[str]) -> dict[str, float]:
    """Return weights by name."""
    found: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            weight = float(value) if equals else 1.0
        except ValueError:
            weight = 0.0
        if not name or not 0 < weight < float("inf"):
            raise _wrong(flag, f"expected NAME or NAME=WEIGHT above 0, not {text}")
        found[name] = weight
    return found


class Shape(Struct, frozen=True):
    """What is made of a trace before it is offered."""

    kind: str = "headrace"
    """Its format."""
    speed: float = 1.0
    first: int | None = None
    """Only so many rows."""
    for_s: float | None = None
    """Only what is due within so many seconds of the first, at that speed."""
    input_max: int | None = None
    output_max: int | None = None
    """Tokens that longer rows are cut to."""
    nameless: bool = False
    """Forget which models the rows name."""


def rows_of(trace: Path, shape: Shape) -> list[TraceRow]:
    """Return what a trace offers, from its first row on. Raises TraceError."""
    data = os.environ.get("HEADRACE_DATA")
    tried = [trace] if data is None or trace.is_absolute() else [trace, Path(data) / trace]
    found = next((path for path in tried if path.exists()), None)
    if found is None:
        raise TraceError(
            trace, None, "no such trace; HEADRACE_DATA names the folder of public ones"
        )
    rows = scale(read_trace(shape.kind, found), shape.speed)
    if rows:
        begin = rows[0].at
        end = rows[-1].at + 1 if shape.for_s is None else begin + seconds(shape.for_s)
        rows = window(rows, begin, InstantNs(end))
    rows = rows if shape.first is None else head(rows, shape.first)
    if not rows:
        raise TraceError(found, None, "nothing to offer")
    rows = [replace(row, model=None) for row in rows] if shape.nameless else rows
    return cap_lengths(rows, input_max=shape.input_max, output_max=shape.output_max)


def owned(
    rows: Sequence[TraceRow],
    known: Mapping[TenantId, str],
    tenants: Mapping[str, float],
    classes: Mapping[str, float],
    seed: int,
) -> list[TraceRow]:
    """Return rows that all name a tenant, one with a key if there are keys.

    Raises ConfigError for a tenant without one.
    """
    owners = tenants or dict.fromkeys(known or (ANYBODY,), 1.0)
    found = assign(
        rows,
        tenants={TenantId(name): weight for name, weight in owners.items()},
        classes={ClassName(name): weight for name, weight in classes.items()},
        seed=seed,
    )
    lacking = sorted({row.tenant or ANYBODY for row in found} - set(known)) if known else []
    if lacking:
        raise _wrong("--key", f"no key for tenant {', '.join(lacking[:_SHOWN])}")
    return found


def judge_of(config: Path | None, profile: str | None) -> tuple[Judge, str]:
    """Return what rows are judged by, and the name of what prices their work."""
    if config is not None and profile is not None:
        raise _wrong("--profile", "give either --config or --profile")
    if config is None:
        name = profile or PROFILE
        try:
            priced = load_profile(name)
        except ValueError as error:
            raise _wrong("--profile", str(error)) from None
        classes = {ClassName(spec.name): spec for spec in DEFAULT_CLASSES}
        usual = ClassName(DEFAULT_CLASSES[0].name)

        def by_default(row: TraceRow) -> Terms:
            wanted = row.slo_class or usual
            spec = classes.get(wanted, classes[usual])
            return Terms(slo_class=wanted, bounds=spec.bounds(None, None), profile=priced)

        return by_default, name
    deployment = resolve(config, os.environ, {}).settings.deployment
    names = ", ".join(sorted({pool.profile.name: None for pool in deployment.pools}))
    return by_deployment(deployment), names


def by_deployment(deployment: PlaneConfig) -> Judge:
    """Return the judge that a configured server's own classes and profiles make."""
    classes = {ClassName(spec.name): spec for spec in deployment.classes}
    owns: Mapping[TenantId, tuple[str, ...]] = {
        TenantId(spec.name): spec.classes for spec in deployment.tenants
    }
    places, first = Places(deployment), deployment.classes[0].name

    def judge(row: TraceRow) -> Terms:
        granted = owns.get(row.tenant or ANYBODY, ())
        usual = ClassName((granted or (first,))[0])
        asked = row.slo_class
        name = asked if asked in classes and (not granted or asked in granted) else usual
        assert name is not None
        return Terms(
            slo_class=name,
            bounds=classes[name].bounds(None, None),
            profile=places.profile(row.model, name),
        )

    return judge


def first_model(place: Place, key: str | None) -> str:
    """Return the first model that the server lists; raises ConfigError if it lists none."""
    kind = http.client.HTTPSConnection if place.tls else http.client.HTTPConnection
    connection = kind(place.host, place.port, timeout=TIMEOUT_S)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        connection.request("GET", f"{place.path}/models", headers=headers)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        where = f"{place.host}:{place.port}"
        raise _wrong("--url", f"{where} does not answer: {error!r}") from None
    finally:
        connection.close()
    if answer.status == http.client.UNAUTHORIZED:
        raise _wrong("--key", "the server does not know this key, or wants one")
    try:
        listed = msgspec.json.decode(content, type=_Models)
    except msgspec.DecodeError:
        listed = _Models(data=[])
    if answer.status != http.client.OK or not listed.data:
        raise _wrong("--url", f"{place.path}/models lists no model (status {answer.status})")
    return listed.data[0].id


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]
