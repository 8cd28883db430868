"""Which keys were made while the gateway ran, beside those of its configuration, and where are they kept?

In one small file in the journal's folder, which is replaced as a whole, so that it is the old or the
new one whatever happens; without a journal they are gone with the process. Keys by their hashes alone.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.config.check import problems
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.problem import Severity
from headrace.config.schema import KeySpec, Settings
from headrace.model.deployment import TenantSpec
from headrace.policy.catalog import PlaneConfig

FILE = "keys.json"
VERSION = 1
"""Of the file; another one is refused, not guessed at."""
GRANTS_MAX = 10_000
"""Keys that can be made so. 10,000: each change writes and compares them all."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_MODE = 0o600


class Grant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key, and the tenant that was made for it if its limits are its own."""

    key: KeySpec
    tenant: TenantSpec | None = None


class _Version(Struct, frozen=True, kw_only=True):
    version: int = VERSION


class _Kept(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = VERSION
    grants: tuple[Grant, ...] = ()


class Grants:
    """The keys made so, as they are kept."""

    def __init__(self, folder: Path | None = None) -> None:
        """Read what is kept in a folder; none keeps nothing. Raises ConfigError if it cannot be read."""
        self._path = None if folder is None else folder / FILE
        self.all: tuple[Grant, ...] = () if self._path is None else _read(self._path)

    def keep(self, grants: tuple[Grant, ...]) -> None:
        """Keep these instead; raises OSError, and then nothing has changed."""
        if self._path is not None:
            _write(self._path, msgspec.json.encode(_Kept(grants=grants)))
        self.all = grants

    def beside(self, settings: Settings) -> Settings:
        """Return a configuration with these keys added; raises ConfigError if they do not fit."""
        if not self.all:
            return settings
        merged = plus(settings, self.all)
        before = problems(settings)
        faults = [
            Fault(Origin(str(self._path)), one.message, one.path)
            for one in problems(merged)
            if one.severity is Severity.ERROR and one not in before
        ]
        if faults:
            raise ConfigError(faults)
        return merged


def plus(settings: Settings, grants: Sequence[Grant]) -> Settings:
    """Return a configuration with keys, and the tenants made for them, added."""
    keys = (*settings.keys, *(one.key for one in grants))
    return replace(settings, keys=keys, deployment=with_tenants(settings.deployment, grants))


def with_tenants(config: PlaneConfig, grants: Sequence[Grant]) -> PlaneConfig:
    """Return a deployment with the tenants that were made for keys."""
    made = tuple(one.tenant for one in grants if one.tenant is not None)
    return replace(config, tenants=config.tenants + made) if made else config


def minus(settings: Settings, grants: Sequence[Grant]) -> Settings:
    """Return a configuration without what `plus` added."""
    keys = {one.key.name for one in grants}
    tenants = {one.tenant.name for one in grants if one.tenant is not None}
    config = settings.deployment
    return replace(
        settings,
        keys=tuple(one for one in settings.keys if one.name not in keys),
        deployment=replace(
            config, tenants=tuple(one for one in config.tenants if one.name not in tenants)
        ),
    )


def _read(path: Path) -> tuple[Grant, ...]:
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=_Version).version
        kept = msgspec.json.decode(content, type=_Kept) if version == VERSION else None
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([Fault(Origin(str(path)), f"cannot be read: {error}")]) from error
    if kept is None:
        message = f"cannot be read: it is of version {version}, and only {VERSION} is known here"
        raise ConfigError([Fault(Origin(str(path)), message)])
    return kept.grants


def _write(path: Path, content: bytes) -> None:
    """Replace a file as a whole."""
    beside = path.with_suffix(".new")
    file = os.open(beside, _FLAGS, _MODE)
    try:
        with os.fdopen(file, "wb") as written:
            written.write(content)
            written.flush()
            os.fsync(file)
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
