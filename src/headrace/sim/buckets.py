"""INV-4, step by step: a tenant's bucket changes by what was refilled, reserved and given back."""

from collections.abc import Sequence

from msgspec import Struct

from headrace.model.decision import Admit
from headrace.model.effect import Concluded, Decided, Effect
from headrace.model.evidence import EntryRecord
from headrace.model.ids import RequestId, TenantId
from headrace.plane.ledger import Bucket, Quota
from headrace.sim.books import hold
from headrace.sim.world import World
from headrace.units import NS_PER_S, InstantNs

_MINUTE = 60 * NS_PER_S
"""Levels are compared in a minute's nanoseconds of a unit: in these a refill is whole."""


class _Level(Struct, frozen=True, gc=False):
    """A bucket as it stood after the last step."""

    at: InstantNs
    tokens: int | None
    requests: int | None


class _Moved(Struct):
    """What one step did to one tenant's buckets, refills aside."""

    looked: bool = False
    """Somebody arrived: the buckets were brought up to date, and cut to their limits."""
    admitted: int = 0
    least: int = 0
    """Tokens given back less tokens reserved, at least."""
    most: int = 0


class Buckets:
    """Follows the buckets of all limited tenants through one life of the driver."""

    def __init__(self) -> None:
        """Start knowing no levels: the first step that shows a bucket is believed."""
        self._levels: dict[TenantId, _Level] = {}
        self._needs: dict[RequestId, int] = {}

    def step(self, world: World, effects: Sequence[Effect]) -> None:
        """Check every bucket after one step."""
        quotas = world.plane.state.ledger.quotas
        moved = self._moved(world, effects)
        for tenant, quota in quotas.items():
            if quota.tokens is None and quota.requests is None:
                continue
            before, now = self._levels.get(tenant), _level(quota)
            if before is not None and (now != before or tenant in moved):
                _compare(world, tenant, quota, before, moved.get(tenant, _Moved()))
            self._levels[tenant] = now

    def _moved(self, world: World, effects: Sequence[Effect]) -> dict[TenantId, _Moved]:
        """Add up what the effects of a step say about reservations."""
        found: dict[TenantId, _Moved] = {}
        for effect in effects:
            match effect:
                case Decided(EntryRecord() as record):
                    one = found.setdefault(record.tenant, _Moved())
                    one.looked = True
                    if isinstance(record.decision, Admit):
                        need: int = record.evidence.budget.tokens_needed
                        self._needs[record.request_id] = need
                        one.admitted += 1
                        one.least -= need
                        one.most -= need
                case Concluded(admitted=True):
                    need = self._needs.pop(effect.request, 0)
                    one = found.setdefault(effect.tenant, _Moved())
                    least, most = _used(world, effect)
                    one.least += need - most
                    one.most += need - least
                case _:
                    pass
        return found


def _used(world: World, row: Concluded) -> tuple[int, int]:
    """Return the least and the most that quota may have been settled on.

    By the engine's count where it is known; a stream cut short is settled on what its caller was
    sent, which is for the driver to know.
    """
    if row.usage is not None:
        used = row.usage.input_tokens + row.usage.output_tokens
        return used, used
    if row.replica is None:
        return 0, 0
    return 0, row.entry.input_tokens + world.rows[row.request - 1].output_tokens


def _level(quota: Quota) -> _Level:
    return _Level(quota.at, _exact(quota.tokens), _exact(quota.requests))


def _exact(bucket: Bucket | None) -> int | None:
    return None if bucket is None else bucket.level * _MINUTE + bucket.rest


def _compare(world: World, tenant: TenantId, quota: Quota, before: _Level, moved: _Moved) -> None:
    passed = quota.at - before.at
    if quota.tokens is not None and before.tokens is not None:
        base = _refilled(before.tokens, quota.tokens.limit, passed, looked=moved.looked)
        low, level = base + moved.least * _MINUTE, _exact(quota.tokens)
        fits = level is not None and low <= level <= base + moved.most * _MINUTE
        hold(world, "INV-4", fits, f"{tenant}: token bucket {before.tokens=} {level=} {moved=}")
    if quota.requests is not None and before.requests is not None:
        base = _refilled(before.requests, quota.requests.limit, passed, looked=moved.looked)
        want, level = base - moved.admitted * _MINUTE, _exact(quota.requests)
        hold(world, "INV-4", level == want, f"{tenant}: request bucket {level=} {want=}")


def _refilled(level: int, limit: int, passed: int, *, looked: bool) -> int:
    """Return a level after a refill, which happens when somebody looks."""
    assert looked or not passed, "a refill that nobody asked for"
    return min(limit * _MINUTE, level + passed * limit) if looked else level
