"""Is the process alive, and should callers be sent here? One answer under every habitual name.

Alive: the plane is whole. Ready: it takes newcomers, and some replica is there to serve them. A
process that drains is alive and not ready. Where a pool may scale from zero, no replica need be there.
"""

import msgspec
from msgspec import Struct

from headrace.gateway.driver import Driver
from headrace.model.scaling_spec import Mode

LIVE = ("/health", "/live", "/livez", "/liveness", "/health/liveliness")
READY = ("/ready", "/readyz", "/readiness", "/health/readiness")
PATHS = frozenset((*LIVE, *READY))
OK, _NO = 200, 503


class Health(Struct, frozen=True):
    """An answer to a probe."""

    status: int
    body: bytes


def live(driver: Driver) -> Health:
    """Return whether the process is worth keeping."""
    return _health("broken" if driver.broken is not None else None)


def ready(driver: Driver) -> Health:
    """Return whether newcomers can be served here."""
    if driver.broken is not None:
        return _health("broken")
    if driver.draining:
        return _health("draining")
    return _health(None if driver.ready_replicas or _rises(driver) else "no ready replica")


def _rises(driver: Driver) -> bool:
    """Return whether a pool may stand at zero: only who comes all the same has it rise."""
    plane = driver.plane
    acting = (one.settings for one in plane.settings.scaled.values())
    may = any(one.mode is Mode.ACT and not one.min for one in acting)
    return may and not plane.state.scale_frozen


def _health(trouble: str | None) -> Health:
    body = msgspec.json.encode({"status": trouble or "ok"})
    return Health(OK if trouble is None else _NO, body)
