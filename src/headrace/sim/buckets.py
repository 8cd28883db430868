"""INV-4, step by step: a tenant's bucket changes by what was refilled, reserved and given back."""

from collections.abc import Sequence

from msgspec import Struct

from headrace.model.decision import Decision, Gate, LetIn, Reject
from headrace.model.effect import Concluded, Decided, Effect
from headrace.model.evidence import EntryRecord
from headrace.model.ids import RequestId, TenantId
from headrace.plane.quotas import Bucket, Quota
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
    strange: bool = False
    """Or was refused by contract, for which nobody need look at a bucket."""
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
                    if _by_contract(record.decision):
                        one.strange = True
                    else:
                        one.looked = True
                    if isinstance(record.decision, LetIn) and record.decision.charged:
                        need: int = record.evidence.budget.tokens_needed
                        self._needs[record.request_id] = need
                        one.admitted += 1
                        one.least -= need
                        one.most -= need
                case Concluded(admitted=True):
                    held = self._needs.pop(effect.request, None)
                    if held is None:  # let in beyond its limits, and nothing was taken of them
                        continue
                    one = found.setdefault(effect.tenant, _Moved())
                    least, most = _used(world, effect)
                    one.least += held - most
                    one.most += held - least
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


def _by_contract(decision: Decision) -> bool:
    return isinstance(decision, Reject) and decision.gate is Gate.CONTRACT


def _compare(world: World, tenant: TenantId, quota: Quota, before: _Level, moved: _Moved) -> None:
    passed = quota.at - before.at
    if quota.tokens is not None and before.tokens is not None:
        bases = _bases(before.tokens, quota.tokens.limit, passed, moved)
        low, high = moved.least * _MINUTE, moved.most * _MINUTE
        level = _exact(quota.tokens)
        fits = level is not None and any(base + low <= level <= base + high for base in bases)
        hold(world, "INV-4", fits, f"{tenant}: token bucket {before.tokens=} {level=} {moved=}")
    if quota.requests is not None and before.requests is not None:
        bases = _bases(before.requests, quota.requests.limit, passed, moved)
        want = [base - moved.admitted * _MINUTE for base in bases]
        level = _exact(quota.requests)
        hold(world, "INV-4", level in want, f"{tenant}: request bucket {level=} {want=}")


def _bases(level: int, limit: int, passed: int, moved: _Moved) -> tuple[int, ...]:
    """Return what a level may be before the step's own moves: a refill needs somebody to look."""
    assert moved.looked or moved.strange or not passed, "a refill that nobody asked for"
    refilled = min(limit * _MINUTE, level + passed * limit)
    if moved.looked or passed:
        return (refilled,)
    return (refilled, level) if moved.strange else (level,)
