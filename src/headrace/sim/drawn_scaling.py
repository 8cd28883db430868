"""Which pools of a drawn world scale, and how."""

from random import Random

from msgspec.structs import replace

from headrace.model.group import Domain, GroupShape
from headrace.model.scaling_spec import Forecasting, Scaling
from headrace.model.stages import Spread, StageTimes
from headrace.policy.catalog import PlaneConfig
from headrace.replica.moving import Migration


def scaled(rng: Random, plain: PlaneConfig) -> PlaneConfig:
    """Return the deployment with some pools, at least one, that scale within seconds."""
    first = rng.randrange(len(plain.pools))
    pools = [
        replace(pool, scaling=_scaling(rng, pool.replicas))
        if nth == first or rng.random() < 0.5
        else pool
        for nth, pool in enumerate(plain.pools)
    ]
    return replace(plain, pools=tuple(pools))


def overrated(rng: Random, plain: PlaneConfig) -> PlaneConfig:
    """Return the deployment as it is, or with pools that believe in fewer groups than they need: these drain under load."""
    if rng.random() < 0.5:
        return plain
    pools = (one if one.scaling is None else replace(one, work_rate=10.0) for one in plain.pools)
    return replace(plain, pools=tuple(pools))


def migration(rng: Random) -> Migration | None:
    """Draw whether engines move running requests, and how quickly: copies that take seconds are seldom done."""
    if rng.random() < 0.3:
        return None
    return Migration(gb_per_s=rng.choice((0.1, 2.0, 25.0)), pause_ms=rng.choice((0.0, 25.0, 500.0)))


def _scaling(rng: Random, replicas: int) -> Scaling:
    whole = rng.choice((0.5, 2.0, 10.0))
    times = StageTimes(
        node_held=Spread(0.0, whole), image=Spread(whole / 2, whole), weights=Spread(whole, whole),
        ranks=Spread(), compile_cache=Spread(), warm=Spread(), unattributed=Spread(),
        register=Spread(0.1, 0.5), wake=Spread(0.1, 0.5),
    )  # fmt: skip
    tp, most = rng.choice((1, 2, 4)), replicas + rng.randint(0, 3)
    return Scaling(
        min=rng.choice((0, 1, 1)),
        max=most,
        max_gpus=rng.choice((None, None, most * tp)),
        standby=rng.choice((0, 0, 1)),
        reserve=rng.choice((0, 0, 1)),
        reserve_domain=Domain.ZONE,
        domains=rng.choice(((), ("eu/a", "eu/b"), ("eu/a", "eu/b", "eu/c"))),
        tick_s=rng.choice((0.5, 2.0, 5.0)),
        in_window_s=rng.choice((0.0, 5.0, 20.0)),
        cancel_window_s=rng.choice((0.0, 3.0)),
        in_groups=rng.choice((1, 4)),
        min_life_s=rng.choice((0.0, 5.0)),
        partial_s=rng.choice((2.0, 20.0)),
        drain_s=rng.choice((0.0, 1.0, 30.0)),
        forecast=rng.choice((None, Forecasting(interval_s=1.0, season_s=60.0))),
        shape=GroupShape(tp=tp),
        times=times,
    )
