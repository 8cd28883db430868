"""What did it cost? GPU time that was held, whatever for, by what it served (OPS-3)."""

from msgspec import Struct

from headrace.model.ids import PoolName
from headrace.report import words
from headrace.report.run import RunRecord
from headrace.report.stats import ratio
from headrace.units import MICRO, NS_PER_S

_HOUR_S = 3_600


class PoolCost(Struct, frozen=True, kw_only=True):
    """One pool's part of it."""

    pool: PoolName
    gpu_hours: float
    serving_share: float | None
    """GPU time of replicas that were up, of all that was held: the rest came, went or stood by."""
    asked: int
    """Groups that were asked for."""
    rose: int
    """Starts that ended ready."""
    moves_begun: int
    """Streams of groups that drained that were to go on in another group."""
    moved: int
    """Of these, those that did; the others ended first, or stayed and ended where they were."""
    usd: float | None
    """None: no price is declared."""


class Cost(Struct, frozen=True, kw_only=True):
    """What a run held, and what that comes to by request that met every bound."""

    gpu_hours: float
    gpu_s_per_met: float | None
    """None: no request did."""
    usd: float | None
    """None: some pool has no price."""
    usd_per_thousand_met: float | None
    pools: tuple[PoolCost, ...]


def cost(run: RunRecord) -> Cost | None:
    """Return the cost of a run; None: nobody counted what was held."""
    if not run.pools:
        return None
    met = sum(row.met for row in run.rows)
    held = sum(one.gpu_ns for one in run.pools)
    prices = [one.micro_usd for one in run.pools if one.micro_usd is not None]
    usd = sum(prices) / MICRO if len(prices) == len(run.pools) else None
    return Cost(
        gpu_hours=round(held / NS_PER_S / _HOUR_S, 4),
        gpu_s_per_met=ratio(held, met * NS_PER_S),
        usd=None if usd is None else round(usd, 4),
        usd_per_thousand_met=None if usd is None else ratio(sum(prices), met * MICRO // 1_000),
        pools=tuple(
            PoolCost(
                pool=one.pool,
                gpu_hours=round(one.gpu_ns / NS_PER_S / _HOUR_S, 4),
                serving_share=ratio(one.serving_ns, one.gpu_ns),
                asked=one.asked,
                rose=one.rose,
                moves_begun=one.moves_begun,
                moved=one.moved,
                usd=None if one.micro_usd is None else round(one.micro_usd / MICRO, 4),
            )
            for one in run.pools
        ),
    )


def cost_rows(cost: Cost | None) -> tuple[tuple[str, str], ...]:
    """Return what was held, and what it comes to, for people."""
    if cost is None:
        return ()
    money: tuple[tuple[str, str], ...] = ()
    if cost.usd is not None:
        money = (
            ("cost, US dollars", words.three(cost.usd)),
            ("cost per 1,000 requests that met", words.three(cost.usd_per_thousand_met)),
        )
    scaled = sum(one.asked for one in cost.pools)
    groups: tuple[tuple[str, str], ...] = ()
    if scaled:
        groups = (("groups asked for", words.count(scaled)),)
    if begun := sum(one.moves_begun for one in cost.pools):
        moved = sum(one.moved for one in cost.pools)
        shown = f"{words.count(moved)} of {words.count(begun)}"
        groups += (("streams moved from groups that went", shown),)
    return (
        ("GPU-hours held", words.three(cost.gpu_hours)),
        ("GPU-seconds per request that met", words.three(cost.gpu_s_per_met)),
        *money,
        *groups,
    )
