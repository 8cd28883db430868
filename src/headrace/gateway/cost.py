"""What have the replicas of this process cost since it began, by what they served (OPS-3)?

GPU time is paid for whatever it was held for. A pool that scales is held as its decisions found it; of a
fixed number, every replica is held all the time, up or not.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from headrace.gateway.driver import Driver
from headrace.model.deployment import PoolSpec
from headrace.model.ids import PoolName
from headrace.model.scaling_spec import Scaling
from headrace.units import MICRO, InstantNs, MicroUsd, elapsed, to_seconds

_HOUR_S = 3_600


class PoolCost(Struct, frozen=True, kw_only=True):
    """One pool's part of it."""

    pool: str
    gpu_hours: float
    usd: float | None
    """None: no price is declared (`scaling.gpu_hour_usd`)."""


class CostState(Struct, frozen=True, kw_only=True):
    """What was held, and what that comes to by request that met every bound."""

    gpu_hours: float
    met: int
    gpu_s_per_met: float | None
    """None: no request met yet."""
    usd: float | None
    """None: some pool has no price."""
    usd_per_thousand_met: float | None
    pools: list[PoolCost]

    def __str__(self) -> str:
        """Return it in a line, for people."""
        words = [f"{self.gpu_hours:,.3g} GPU-hours"]
        if self.usd is not None:
            words.append(f"${self.usd:,.2f}")
        if self.gpu_s_per_met is not None:
            words.append(f"{self.gpu_s_per_met:,.3g} GPU-s per request that met")
        if self.usd_per_thousand_met is not None:
            words.append(f"${self.usd_per_thousand_met:,.3g} per 1,000")
        return ", ".join(words)


class Spell(Struct, frozen=True, kw_only=True):
    """How long a process has run, and what was found of its pools that scale while it did."""

    begun: InstantNs
    now: InstantNs
    met: int
    """Requests that met every bound."""
    decided: Mapping[PoolName, tuple[int, InstantNs]]
    """By pool: GPU time held up to its last decision, in ns, and when that was."""


def cost_state(driver: Driver, spell: Spell) -> CostState:
    """Return what it cost."""
    held, paid = dict[PoolName, int](), dict[PoolName, MicroUsd | None]()
    for pool in driver.plane.settings.config.pools:
        name = PoolName(pool.name)
        held[name] = _held(driver, pool, spell)
        paid[name] = None if pool.scaling is None else pool.scaling.cost(held[name])
    gpu_s = to_seconds(sum(held.values()))
    usd = _sum(paid[name] for name, ns in held.items() if ns)
    return CostState(
        gpu_hours=gpu_s / _HOUR_S,
        met=spell.met,
        gpu_s_per_met=gpu_s / spell.met if spell.met else None,
        usd=usd,
        usd_per_thousand_met=None if usd is None or not spell.met else usd * 1_000 / spell.met,
        pools=[
            PoolCost(pool=name, gpu_hours=to_seconds(ns) / _HOUR_S, usd=_sum([paid[name]]))
            for name, ns in held.items()
        ],
    )


def _held(driver: Driver, pool: PoolSpec, spell: Spell) -> int:
    """Return the GPU time that a pool has held, in ns."""
    name, books = PoolName(pool.name), driver.plane.state.pools.get(PoolName(pool.name))
    if pool.scaling is not None and books is not None:
        before, at = spell.decided.get(name, (0, spell.begun))
        return before + elapsed(at, spell.now) * sum(one.gpus for one in books.groups.values())
    there = sum(engine.pool == name for engine in driver.engines) or pool.replicas
    gpus = (pool.scaling or Scaling()).group_shape(pool.profile.hardware).gpus
    return there * gpus * elapsed(spell.begun, spell.now)


def _sum(prices: Iterable[MicroUsd | None]) -> float | None:
    known = list(prices)
    total = sum(one for one in known if one is not None)
    return None if None in known else total / MICRO
