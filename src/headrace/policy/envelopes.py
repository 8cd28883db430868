"""How much does one replica of a pool count as? The one place where declared and measured rates meet."""

from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from headrace.model.deployment import ClassSpec, PoolSpec
from headrace.model.envelope import Fingerprint, Origin, Promise, Reading, read
from headrace.model.hardware import hardware_of
from headrace.policy.catalog import PlaneConfig
from headrace.units import to_ms

_ENCODER = msgspec.json.Encoder(order="sorted")
_DIGEST = 6
_UNMEASURED = ("name", "source", "token_budget")
"""Of a profile, what says nothing of the replica, and what is compared by itself."""


def reading(config: PlaneConfig, pool: PoolSpec) -> Reading:
    """Return what a replica of a pool counts as: what is declared, else what was measured."""
    if pool.work_rate is not None:
        return Reading(work_rate=pool.work_rate, origin=Origin.DECLARED)
    return read(pool.envelopes, fingerprint(config, pool))


def fingerprint(config: PlaneConfig, pool: PoolSpec) -> Fingerprint:
    """Return what runs in a pool, as far as the plane's configuration tells: not which engine."""
    profile = config.window.stepped(pool).profile
    plan = hardware_of(profile.hardware)
    weights = next((one.quantization for one in config.models if one.name == pool.model), "")
    sizes = {k: v for k, v in msgspec.to_builtins(profile).items() if k not in _UNMEASURED}
    return Fingerprint(
        model=pool.model,
        revision=pool.revision,
        quantization=weights,
        hardware=plan.gpu,
        tp=plan.tp,
        pp=plan.pp,
        profile=f"{profile.name} {digest(sizes)}",
        step_tokens=profile.token_budget,
        policy=policy_revision(config),
        mix=pool.mix,
        promises={spec.name: promise(spec) for spec in config.classes},
    )


def policy_revision(config: PlaneConfig) -> str:
    """Return the revision of what is in force while capacity is measured, first come first served.

    Gates and orders are not: they decide what comes of too much, not how much that is.
    """
    window = replace(config.window, step_tokens={})
    return f"fifo {digest((config.routing, window, config.prediction))}"


def promise(spec: ClassSpec) -> Promise:
    """Return the bounds that each request of a class is served and judged by."""
    bounds = spec.bounds(None, None)
    return Promise(
        ttft_ms=None if bounds.ttft_ns is None else to_ms(bounds.ttft_ns),
        gap_ms=to_ms(bounds.gap_ns),
        tpot_ms=to_ms(bounds.tpot_ns),
        stall_ms=None if bounds.stall_ns is None else to_ms(bounds.stall_ns),
        completion_ms=None if bounds.e2e_ns is None else to_ms(bounds.e2e_ns),
    )


def digest(settings: object) -> str:
    """Return what tells settings from others, in twelve characters."""
    return blake2b(_ENCODER.encode(settings), digest_size=_DIGEST).hexdigest()
