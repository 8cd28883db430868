"""Which engines does a configuration name? Real ones where it has addresses, emulated ones elsewhere."""

import os
import ssl
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec.structs import replace

from headrace.adapters.engines.answer import lengths
from headrace.adapters.engines.emulated import EmulatedEngine
from headrace.adapters.engines.inprocess import InProcessEngine
from headrace.adapters.engines.kinds import KINDS, Feature
from headrace.adapters.engines.kv.publishing import PublishingEngine
from headrace.adapters.engines.kv.subscriber import Source
from headrace.adapters.engines.remote import Patience, RemoteEngine
from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.pool import Limits
from headrace.config.build import descend
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.resolve import Resolved
from headrace.config.schema import EmulatorSpec, Settings, UpstreamSpec
from headrace.model.deployment import PoolSpec
from headrace.model.engine import Scheduler
from headrace.model.ids import Incarnation, PoolName, ReplicaName
from headrace.model.price import PriceSpec
from headrace.policy.catalog import PlaneConfig
from headrace.ports.clock import Clock
from headrace.ports.engine import EngineClient
from headrace.replica.core import Replica
from headrace.units import NS_PER_S, DurationNs

LIVES_BITS = 20
"""Lives of one real engine within one of ours are counted below them, engines above."""


def fitting(found: Resolved) -> Resolved:
    """Return a configuration as it is; raises ConfigError for engines of a kind that cannot be so."""
    faults: list[Fault] = []
    for nth, spec in enumerate(found.settings.upstreams):
        if spec.kind is None or KINDS[spec.kind].may_have(spec.scheduler):
            continue  # what is found out later is told in the log
        path = f"$.upstreams[{nth}].scheduler"
        message = f"no engine of kind `{spec.kind}` has the scheduler `{spec.scheduler}`"
        known = ", ".join(one for one in Scheduler if KINDS[spec.kind].may_have(one))
        faults.append(Fault(descend(found.tree, path).origin, message, path, f"known: {known}"))
    if faults:
        raise ConfigError(faults)
    return found


def engines(
    settings: Settings, clock: Clock, last: int = 0, provided: Collection[str] = ()
) -> list[EngineClient]:
    """Return an engine for every replica; raises ConfigError for keys and certificates that lack.

    Their incarnations are above `last`, and never the same. `provided`: pools whose replicas come later,
    the first ones too.
    """
    config = settings.deployment
    started = {spec.pool for spec in settings.groups} | {*provided}  # when they are ready
    found: list[EngineClient] = []
    for pool in config.pools:
        given = [spec for spec in settings.upstreams if spec.pool == pool.name]
        for nth, spec in enumerate(given):
            found.append(_remote(spec, pool, nth, clock, last + (len(found) + 1 << LIVES_BITS)))
        if not given and pool.name not in started:
            found += _emulated(
                config.window.stepped(pool), settings.emulator, len(found), clock, last
            )
    return found


def grown(settings: Settings, wanted: Mapping[PoolName, int]) -> Settings:
    """Return settings by which each pool that scales has as many at first as an earlier process wanted."""
    pools = tuple(_grown(pool, wanted) for pool in settings.deployment.pools)
    return replace(settings, deployment=replace(settings.deployment, pools=pools))


def _grown(pool: PoolSpec, wanted: Mapping[PoolName, int]) -> PoolSpec:
    if pool.scaling is None:
        return pool
    most = pool.scaling.ceiling(pool.scaling.group_shape(pool.profile.hardware).gpus)
    count = min(most, wanted.get(PoolName(pool.name), 0))
    return replace(pool, replicas=max(pool.replicas, count))


def restep(found: Iterable[EngineClient], config: PlaneConfig) -> None:
    """Let the steps of emulated engines be as a configuration says, from their next one on."""
    profiles = {pool.name: config.window.stepped(pool).profile for pool in config.pools}
    for engine in found:
        if isinstance(engine, InProcessEngine):
            engine.reprice(profiles[engine.pool])


def joining(settings: Settings, spec: UpstreamSpec, clock: Clock, last: int) -> EngineClient:
    """Return an engine that somebody started and saw serve, in one of our pools; lives above `last`.

    It is up at once, unless its kind is still to be found out.
    """
    (pool,) = (pool for pool in settings.deployment.pools if pool.name == spec.pool)
    return _remote(spec, pool, 0, clock, last, proven=spec.kind is not None)


def hosted(
    config: PlaneConfig, spec: EmulatorSpec, name: ReplicaName, pool: PoolName, clock: Clock, last: int
) -> EngineClient:  # fmt: skip
    """Return one more emulated engine of a pool; its life is above `last`."""
    (found,) = (one for one in config.pools if one.name == pool)
    return _emulated_one(name, config.window.stepped(found), spec, Incarnation(last + 1), clock)


def prices(settings: Settings) -> dict[ReplicaName, PriceSpec]:
    """Return what each hosted engine charges."""
    return {
        _named(spec, nth): spec.price
        for pool in settings.deployment.pools
        for nth, spec in enumerate(one for one in settings.upstreams if one.pool == pool.name)
        if spec.price is not None
    }


def _named(spec: UpstreamSpec, nth: int) -> ReplicaName:
    return ReplicaName(spec.name or f"{spec.pool}-{nth}")


def _emulated(
    pool: PoolSpec, spec: EmulatorSpec, before: int, clock: Clock, last: int
) -> Iterator[InProcessEngine]:
    for nth in range(pool.replicas):
        serial = before + nth + 1
        name, life = ReplicaName(f"{pool.name}-{nth}"), Incarnation(last + serial)
        yield _emulated_one(name, pool, spec, life, clock, noise=serial)


def _emulated_one(
    name: ReplicaName,
    pool: PoolSpec,
    spec: EmulatorSpec,
    life: Incarnation,
    clock: Clock,
    noise: int | None = None,
) -> InProcessEngine:
    replica = Replica(
        name,
        life,
        pool.profile,
        spec.batching,
        ordering=spec.ordering,
        noise_seed=spec.seed + (life if noise is None else noise),
        noise_ppm=spec.noise_ppm(),
        offers=spec.preemption,
    )
    made = EmulatedEngine(replica, PoolName(pool.name), clock, lengths(spec.seed))
    return InProcessEngine(made, clock)


def _remote(
    spec: UpstreamSpec, pool: PoolSpec, nth: int, clock: Clock, last: int, *, proven: bool = False
) -> RemoteEngine:
    upstream = Upstream(
        spec.url,
        clock,
        key=_key(spec),
        tls=_trusted(spec),
        limits=Limits(connections=spec.connections),
    )
    make = RemoteEngine if spec.kv_events is None else PublishingEngine
    engine = make(
        _named(spec, nth),
        PoolName(pool.name),
        upstream,
        clock,
        model=spec.model or pool.model,
        patience=Patience(
            first_byte_ns=DurationNs(round(spec.first_byte_s * NS_PER_S)),
            gap_ns=DurationNs(round(spec.gap_s * NS_PER_S)),
        ),
        kind=spec.kind,
        scheduler=spec.scheduler,
        continuous_usage=spec.continuous_usage,
        incarnation=last,
        proven=proven,
    )
    if isinstance(engine, PublishingEngine):
        _follow(engine, spec)
    return engine


def _follow(engine: PublishingEngine, spec: UpstreamSpec) -> None:
    """Have an engine's cache be followed, if its kind tells of it and we are able to hear."""
    told, path = spec.kv_events, "$.upstreams"
    assert told is not None
    if spec.kind is not None and not KINDS[spec.kind].has(Feature.KV_EVENTS):
        message = f"`kv_events` of `{engine.name}`: kind `{spec.kind}` publishes none"
        raise ConfigError([Fault(Origin("configuration"), message, path)])
    source = Source(endpoint=told.endpoint, replay_endpoint=told.replay_endpoint, topic=told.topic)
    try:
        engine.follow(source)
    except ImportError:
        message = "`kv_events` needs the library `pyzmq`: pip install 'headrace[kv-events]'"
        raise ConfigError([Fault(Origin("configuration"), message, path)]) from None


def _key(spec: UpstreamSpec) -> str | None:
    """Return the key that the environment holds for an engine."""
    if spec.key_env is None:
        return None
    key = os.environ.get(spec.key_env, "")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError([Fault(Origin(f"environment {spec.key_env}"), "no key for the engine")])
    return key


def _trusted(spec: UpstreamSpec) -> ssl.SSLContext | None:
    """Return what certificates are checked against, if not as usual."""
    if spec.ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=spec.ca_file)
    except OSError as error:
        message = (error.strerror or str(error)).lower()
        raise ConfigError([Fault(Origin(spec.ca_file), message)]) from error
